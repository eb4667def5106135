"""The order of a contest's candidates."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowrl.tuning.contest import Standing, ranked

BUDGET = 1_000
STANDINGS = st.lists(
    st.builds(
        Standing,
        label=st.text(max_size=3),
        trial=st.none() | st.integers(0, 9),
        successes=st.integers(0, 256) | st.integers(240, 256),
        frames=st.sampled_from((1, 500, BUDGET, BUDGET + 1, 2 * BUDGET)),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda each: each.label,
)


@given(STANDINGS)
def test_the_first_is_not_surely_worse_than_any_and_took_the_fewest_frames_of_such(standings):
    found = ranked(standings, budget=BUDGET)
    assert sorted(found, key=str) == sorted(standings, key=str)
    failed = [each.trial is None for each in found]
    assert failed == sorted(failed)
    if not failed[0]:
        least = max(each.interval[0] for each in standings)
        assert found[0].interval[1] >= least
        rivals = [each for each in found if each.trial is not None and each.interval[1] >= least]
        taken = min(found[0].frames, BUDGET)
        assert taken == min(min(each.frames, BUDGET) for each in rivals)
        spent = [each for each in rivals if min(each.frames, BUDGET) == taken]
        assert found[0].successes == max(each.successes for each in spent)
