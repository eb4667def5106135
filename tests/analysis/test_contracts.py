"""What episodes and experiments disprove of a contract, and what they leave."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import fisher_exact

from flowrl.analysis.contracts import (
    LEAST,
    Experiment,
    PlayedStep,
    corrected,
    disproofs,
    experiments_of,
    fitted,
    unwritten,
)
from flowrl.skills.amount import Amount
from tests.parallel.making import make_skill

ITEMS = frozenset({"berry", "pie", "ore", "knife"})
BAKE = make_skill("Bake Pie", gain="pie", requirements={"berry": "n"}, consumption={"berry": "n"})
STEP = PlayedStep(
    skill="Bake Pie",
    count=1,
    is_goal=True,
    done=True,
    timesteps=4,
    start={"berry": 1},
    end={"pie": 1},
    spent={"berry": 1},
    won={"pie": 1},
    used={"berry": 1},
)
FAILED = replace(STEP, done=False, end={}, spent={}, won={}, used={})
GOOD = (STEP,) * LEAST
SPARE = {"episodes": 128, "before": 120, "without": 121}


def at(count, berries):
    """A success at a count that began with so many berries and used them all."""
    had = {"berry": berries}
    return replace(STEP, count=count, start=had, end={"pie": count}, spent=had, used=had)


def found(skill, *played, experiments=()):
    told = disproofs(skill, played, experiments, items=ITEMS)
    return {(each.key, each.item): each.now for each in told}


def with_amounts(**parts):
    amounts = {key: {i: Amount.parse(n) for i, n in part.items()} for key, part in parts.items()}
    return replace(BAKE, **amounts)


def test_a_right_contract_is_left_as_it_is():
    assert found(BAKE, *GOOD) == {}
    assert found(BAKE, *GOOD, *[at(3, 3)] * LEAST) == {}


@pytest.mark.parametrize(
    ("contract", "expected"),
    [
        ({"consumption": {"berry": "2"}}, {("consumption", "berry"): "1"}),
        ({"consumption": {"berry": "2*n"}}, {("consumption", "berry"): "n"}),
        ({"consumption": {}}, {("consumption", "berry"): "1"}),
        (
            {"consumption": {}, "requirements": {}},
            {("consumption", "berry"): "1", ("requirements", "berry"): "1"},
        ),
        ({"gain": {"pie": "n", "knife": "1"}}, {("gain", "knife"): "0"}),
        ({"requirements": {"berry": "n", "ore": "1"}}, {("requirements", "ore"): "0"}),
    ],
    ids=["too dear", "grows too fast", "not said", "missing", "promised", "not needed"],
)
def test_what_32_successes_disprove(contract, expected):
    wrong = with_amounts(**contract)
    assert found(wrong, *GOOD) == expected
    assert found(wrong, *GOOD[1:], *[FAILED] * 99) == {}, "one success fewer says nothing"
    odd = replace(STEP, spent={"berry": 2, "ore": 1}, end={"pie": 1, "knife": 1}, start={"ore": 2})
    assert found(wrong, *[STEP] * 98, odd, odd) == expected, "two odd ones of 100"


def test_counts_are_fitted_over_all_that_were_seen():
    told = found(BAKE, *GOOD, *[at(3, 5)] * LEAST)
    assert told == {("consumption", "berry"): "2*n - 1", ("requirements", "berry"): "2*n - 1"}


def test_amounts_on_no_line_are_told_and_nothing_is_proposed():
    more = [at(2, 5), at(3, 6)] * LEAST
    told = disproofs(BAKE, [*GOOD, *more], (), items=ITEMS)
    assert {each.now for each in told} == {None}
    assert corrected(BAKE, told) == {}


def test_waste_on_the_way_is_no_consumption():
    """A stone that is dropped while coal is looked for was not used for the coal."""
    waste = replace(STEP, start={"berry": 1, "ore": 1}, spent={"berry": 1, "ore": 1})
    assert found(BAKE, *[waste] * LEAST) == {}


def test_a_success_that_began_with_its_gain_says_nothing():
    idle = replace(STEP, start={"berry": 1, "pie": 1}, spent={}, used={})
    assert found(BAKE, *[idle] * 99) == {}


def test_only_an_experiment_lowers_what_all_had():
    dear = with_amounts(requirements={"berry": "3"})
    rich = [replace(STEP, start={"berry": 3})] * LEAST
    assert found(dear, *rich) == {}
    spare = Experiment(need="berry", most=1, **SPARE)
    assert found(dear, *rich, experiments=[spare]) == {("requirements", "berry"): "1"}
    for without in (0, 90):
        real = replace(spare, without=without)
        assert found(dear, *rich, experiments=[real]) == {}


@pytest.mark.parametrize(
    ("before", "without", "verdict"),
    [
        (128, 0, "needed"),
        (120, 121, "superfluous"),
        (120, 90, "helps"),
        (64, 60, "unclear"),
        (0, 0, "unclear"),
        (12, 12, "unclear"),
        (100, 93, "unclear"),
    ],
)
def test_what_an_experiment_says(before, without, verdict):
    tried = Experiment(need="ore", most=0, episodes=128, before=before, without=without)
    assert tried.verdict == verdict
    assert tried.line.endswith(f": {verdict}")


@pytest.mark.parametrize(
    ("before", "without", "expected"), [(9, 3, (-0.8090, -0.1705)), (10, 0, (-1.0, -0.6075))]
)
def test_the_interval_is_newcombes(before, without, expected):
    """Examples (b) and (h) of his table II, method 10."""
    tried = Experiment(need="x", most=0, episodes=10, before=before, without=without)
    assert tried.interval == pytest.approx(expected, abs=5e-5)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=80))
def test_fishers_test_is_that_of_scipy(rows):
    steps = [
        replace(STEP, done=done, start={"berry": 1} | ({"knife": 1} if have else {}))
        for have, done in rows
    ]
    table = [[rows.count((have, done)) for done in (True, False)] for have in (True, False)]
    chance = fisher_exact(table, alternative="greater").pvalue
    told = unwritten(steps, but=["berry"])
    if abs(chance - 0.05) > 1e-9:
        assert [name for name, _ in told] == (["knife"] if chance < 0.05 else [])
        assert all(abs(each - chance) < 1e-9 for _, each in told)


def test_chances_are_corrected_for_all_that_is_compared():
    """One in 30 at p = 0.017 is chance: Holm asks it for 0.05 / 30."""
    good = [replace(STEP, start={"knife": 1})] * 7
    bad = [replace(FAILED, start={})] * 3 + [replace(FAILED, start={"knife": 1})] * 2
    [(name, chance)] = unwritten([*good, *bad], but=())
    assert (name, 0.01 < chance < 0.05) == ("knife", True)
    others = {f"fact_{n}": 1 for n in range(29)}
    among = [replace(step, start={**step.start, **others}) for step in (*good, *bad)]
    assert unwritten(among, but=()) == []


def test_a_need_that_nobody_wrote_takes_an_experiment():
    armed, bare = replace(STEP, start={"berry": 1, "knife": 1}), replace(FAILED, start={"berry": 1})
    played = [armed] * 60 + [bare] * 60
    assert experiments_of({"berry": 1}, ["pie"], played) == {"knife": 0}
    assert found(BAKE, *played) == {}
    real = Experiment(need="knife", most=0, episodes=128, before=120, without=3)
    assert found(BAKE, *played, experiments=[real]) == {("requirements", "knife"): "1"}
    assert found(BAKE, *played, experiments=[replace(real, **SPARE)]) == {}


def test_what_is_taken_away_is_what_is_not_used():
    needs = {"berry": 4, "ore": 1}
    assert experiments_of(needs, ["pie"], GOOD) == {"berry": 1, "ore": 0}
    assert experiments_of({"berry": 1}, ["pie"], GOOD) == {}
    assert experiments_of(needs, ["pie"], GOOD[1:]) == {}


@given(
    per=st.integers(0, 5),
    base=st.integers(0, 5),
    counts=st.sets(st.integers(1, 9), min_size=2, max_size=5),
)
def test_a_line_is_found_again(per, base, counts):
    line = Amount(per=per, base=base)
    assert fitted({n: line.at(n) for n in counts}, Amount(per=0, base=0)) == line


@given(amounts=st.dictionaries(st.integers(1, 9), st.integers(0, 9), min_size=1, max_size=5))
def test_whatever_was_seen_a_line_is_an_amount_or_none(amounts):
    line = fitted(amounts, Amount(per=1, base=0))
    assert line is None or {n: line.at(n) for n in amounts} == amounts
