"""Amounts are linear in n and never code."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import SkillError
from flowrl.skills.amount import Amount


@pytest.mark.parametrize(
    ("written", "per", "base"),
    [
        ("n", 1, 0),
        ("4*n + 1", 4, 1),
        ("lambda n: 4*n + 0", 4, 0),
        ("lambda n: n", 1, 0),
        ("1 + n * 4", 4, 1),
        ("2*(n + 3)", 2, 6),
        ("2*n - 1", 2, -1),
        ("2", 0, 2),
        (3, 0, 3),
        (3.0, 0, 3),
        (0, 0, 0),
    ],
)
def test_an_amount_is_read_from_numbers_and_text(written, per, base):
    assert Amount.parse(written) == Amount(per=per, base=base)


@pytest.mark.parametrize(
    "written",
    [
        *("n*n", "n**2", "-1", "n - 2", "-n", "n/2", "1.5*n", "2*m", "lambda x: x", "", "n n"),
        *("__import__('os')", "(lambda: 1)()", "[1][0]", "9" * 99, "n" * 101, "2000", "2000*n"),
        *(True, None, 1.5, float("nan"), float("inf"), 10**30, -1, ["n"], {"n": 1}),
    ],
    ids=lambda written: str(written)[:20] or "empty",
)
def test_anything_else_is_refused(written):
    with pytest.raises(SkillError):
        Amount.parse(written)


amounts = st.builds(
    lambda per, base: Amount(per=per, base=max(base, -per)), st.integers(0, 9), st.integers(-9, 9)
)


@given(amounts)
def test_an_amount_reads_back_what_it_writes(amount):
    assert Amount.parse(str(amount)) == amount


@given(amounts, st.integers(0, 50))
def test_the_least_count_is_the_least(amount, need):
    reaching = [n for n in range(1, 100) if amount.at(n) >= need]
    assert amount.least_n(need) == (reaching[0] if reaching else None)
