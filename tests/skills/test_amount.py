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


@pytest.mark.parametrize(
    ("written", "amounts"),
    [
        ("ceil(n/4)", [1, 1, 1, 1, 2, 2, 2, 2, 3]),
        ("lambda n: ceil(n / 2)", [1, 1, 2, 2, 3, 3, 4, 4, 5]),
        ("ceil((3*n - 1)/2)", [1, 3, 4, 6, 7, 9, 10, 12, 13]),
    ],
)
def test_an_amount_is_rounded_up_where_one_piece_yields_several(written, amounts):
    assert [Amount.parse(written).at(n) for n in range(1, 10)] == amounts


@pytest.mark.parametrize(
    "written", ["ceil(n)", "ceil(n/0)", "ceil(4/n)", "floor(n/4)", "n/4", "ceil(n/4) + ceil(n/2)"]
)
def test_other_fractions_are_refused_and_the_remedy_names_the_one_that_can_be(written):
    with pytest.raises(SkillError, match=r"ceil\(n/4\)|correct it"):
        Amount.parse(written)


amounts = st.builds(
    lambda per, base, over: Amount(per=per, base=max(base, -per), over=over),
    st.integers(0, 9),
    st.integers(-9, 9),
    st.integers(1, 5),
)


@given(amounts)
def test_an_amount_reads_back_what_it_writes(amount):
    read = Amount.parse(str(amount))
    assert [read.at(n) for n in range(1, 60)] == [amount.at(n) for n in range(1, 60)]
    assert str(read) == str(amount)


@given(amounts, st.integers(0, 50))
def test_the_least_count_is_the_least(amount, need):
    reaching = [n for n in range(1, 300) if amount.at(n) >= need]
    assert amount.least_n(need) == (reaching[0] if reaching else None)
