"""The rules that need to know more, their evidence made on the spot."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.experts.merge import (
    MERGE_RULES,
    Blended,
    Candidate,
    Compared,
    KeepCurrent,
    Question,
    Unanswered,
    UseCandidate,
    decide,
    descends,
    eval_gate,
    more_often,
    wilson,
)
from flowrl.runs import ExpertVersion, LineageEntry
from tests.experts.test_merge import OLD, candidate, version

AVERAGE, GATE = MERGE_RULES["frame_average"], MERGE_RULES["eval_gate"]
GAINS = st.lists(st.integers(1, 10**9), min_size=1, max_size=6)
FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)


class Pool:
    """Experts whose arrays are one vector each, known by digest; blends are made when asked."""

    def __init__(self, start: np.ndarray) -> None:
        self.arrays = {"old": start}

    def offer(self, number: int, gained: int, values: np.ndarray) -> Candidate:
        self.arrays[f"run{number}"] = values
        return candidate(acted=gained, content=f"run{number}")

    def blend(self, asked: Question) -> Blended:
        one, other = (self.arrays[name] for name in (asked.current, asked.candidate))
        share = asked.gains[1] / sum(asked.gains)
        assert 0.0 <= share <= 1.0
        name = f"({asked.current}+{asked.candidate})"
        mean = one.astype(float) * (1 - share) + other.astype(float) * share
        mean = np.clip(mean, np.minimum(one, other), np.maximum(one, other)).astype(np.float32)
        self.arrays[name] = mean
        return Blended(question=asked, folder=Path(name), sha256=name, content=name)

    def after(self, current: ExpertVersion, offers: list[Candidate]) -> ExpertVersion:
        """The version that counts once all offers are merged, each under its own run id."""
        for offered in offers:
            run_id = offered.content
            facts = {"run_id": run_id, "current": current, "candidate": offered}
            decision = decide(AVERAGE, **facts)
            if isinstance(decision, Question):
                decision = decide(AVERAGE, **facts, evidence=self.blend(decision))
            if isinstance(decision, UseCandidate):
                current = taken(current, run_id, offered, decision)
        return current


def taken(
    current: ExpertVersion, run_id: str, offered: Candidate, decision: UseCandidate
) -> ExpertVersion:
    """The version that the store would make."""
    parent = current if decision.blend else OLD
    return dataclasses.replace(
        current,
        version=f"v000009-{run_id}",
        frames=parent.frames + offered.gained,
        content=decision.blend.content if decision.blend else offered.content,
        lineage=(*parent.lineage, LineageEntry(run_id=run_id, frames=offered.gained)),
    )


@given(GAINS, st.randoms(use_true_random=False), st.data())
def test_the_order_in_which_copies_are_averaged_does_not_matter(gains, random, data):
    start = np.zeros(4, np.float32)
    values = [
        np.array(
            data.draw(st.lists(st.floats(-8, 8, width=32), min_size=4, max_size=4)), np.float32
        )
        for _ in gains
    ]
    found = []
    for order in (list(range(len(gains))), random.sample(range(len(gains)), len(gains))):
        pool = Pool(start)
        offers = [pool.offer(number, gains[number], values[number]) for number in order]
        end = pool.after(OLD, offers)
        assert sum(part.frames for part in end.lineage) == end.frames == 50 + sum(gains)
        found.append((pool.arrays[end.content], {part.run_id for part in end.lineage}))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    assert found[0][1] == found[1][1] == {"a", *(f"run{n}" for n in range(len(gains)))}


@given(GAINS)
def test_averaging_twice_is_averaging_once(gains):
    pool = Pool(np.zeros(1, np.float32))
    offers = [pool.offer(n, gain, np.array([n], np.float32)) for n, gain in enumerate(gains)]
    once = pool.after(OLD, offers)
    assert pool.after(once, offers) == once


@given(GAINS, st.data())
def test_no_mean_leaves_the_range_of_what_was_averaged(gains, data):
    pool = Pool(np.zeros(3, np.float32))
    values = [
        np.array(data.draw(st.lists(FLOATS, min_size=3, max_size=3)), np.float32) for _ in gains
    ]
    offers = [pool.offer(n, gain, values[n]) for n, gain in enumerate(gains)]
    mean = pool.arrays[pool.after(OLD, offers).content]
    assert (np.min(values, axis=0) <= mean).all()
    assert (mean <= np.max(values, axis=0)).all()


def branch(*runs: tuple[str, int]) -> ExpertVersion:
    """A version that these runs made, one after another, from the one of 50 frames."""
    lineage = (*OLD.lineage, *(LineageEntry(run_id=run, frames=frames) for run, frames in runs))
    return dataclasses.replace(
        version(frames=50, content="other", name=f"v000005-{runs[-1][0]}"),
        frames=sum(part.frames for part in lineage),
        lineage=lineage,
    )


def test_a_run_whose_ancestor_is_three_generations_old_is_averaged_by_all_their_frames():
    current = branch(("b", 10), ("c", 20), ("d", 30))
    asked = decide(AVERAGE, run_id="late", current=current, candidate=candidate(acted=40))
    assert isinstance(asked, Question)
    assert asked.gains == (60, 40)
    blend = Blended(question=asked, folder=Path("mean"), sha256="mean", content="mean")
    facts = {"run_id": "late", "current": current, "candidate": candidate(acted=40)}
    decision = decide(AVERAGE, **facts, evidence=blend)
    assert decision == UseCandidate(why="averaged, 40% of it the run's", blend=blend)
    assert descends(current, OLD)
    assert descends(current, branch(("b", 10), ("c", 20)))


def test_a_rule_is_asked_where_an_older_version_counts_again():
    newer = dataclasses.replace(OLD, version="v000009-z")
    facts = {"run_id": "r", "current": version(frames=50, content="rolled back")}
    decision = decide(GATE, **facts, candidate=candidate(acted=5, ancestor=newer))
    assert isinstance(decision, Question)


STRANGERS = {
    "another branch": branch(("b", 10)),
    "other frames": dataclasses.replace(OLD, version="v000004-z", frames=70, content="other"),
    "a sibling": version(frames=90, content="other", name="v000003-x", runs=("a", "x")),
}


@pytest.mark.parametrize("current", STRANGERS.values(), ids=STRANGERS.keys())
def test_copies_without_a_common_ancestor_are_never_averaged(current):
    ancestor = version(frames=60, content="young", name="v000002-y", runs=("a", "y"))
    decision = decide(
        AVERAGE, run_id="r", current=current, candidate=candidate(acted=5, ancestor=ancestor)
    )
    assert isinstance(decision, UseCandidate | KeepCurrent)
    assert decision.why.endswith("; not averaged: the copies have no common ancestor")


@pytest.mark.parametrize("rule", MERGE_RULES.values(), ids=MERGE_RULES.keys())
def test_an_expert_trained_anew_counts_over_every_copy_of_its_former_self(rule):
    former = version(frames=10**6, content="former", runs=("a", "b"))
    anew = dataclasses.replace(candidate(acted=5, ancestor=None), anew=True)
    assert isinstance(decide(rule, run_id="r", current=former, candidate=anew), UseCandidate)
    current = version(frames=5, content="anew", name="v000009-r", runs=("r",))
    late = candidate(acted=10**6, ancestor=OLD)
    assert isinstance(decide(rule, run_id="late", current=current, candidate=late), KeepCurrent)
    again = decide(rule, run_id="r", current=current, candidate=anew)
    assert isinstance(again, KeepCurrent), "the same merge once more"


def test_a_skill_that_was_trained_anew_is_not_averaged_with_its_old_self():
    decision = decide(
        AVERAGE, run_id="r", current=OLD, candidate=candidate(acted=90, ancestor=None)
    )
    assert isinstance(decision, UseCandidate)
    assert decision.blend is None


# --- the gate


def gated(wins: int, losses: int, ties: int = 0):
    current = branch(("b", 1000))
    facts = {"run_id": "r", "current": current, "candidate": candidate(acted=5)}
    asked = decide(GATE, **facts)
    assert isinstance(asked, Question)
    assert asked.gains == (0, 0), "how much was trained says nothing here"
    found = Compared(question=asked, wins=wins, losses=losses, ties=ties)
    return decide(GATE, **facts, evidence=found)


@pytest.mark.parametrize(
    ("wins", "losses", "expected"),
    [
        (0, 0, KeepCurrent),
        (9, 0, KeepCurrent),
        (9, 1, UseCandidate),
        (59, 41, KeepCurrent),
        (60, 40, UseCandidate),
        (0, 50, KeepCurrent),
    ],
)
def test_the_offeredis_taken_only_when_it_is_better_beyond_chance(wins, losses, expected):
    decision = gated(wins, losses, ties=7)
    assert isinstance(decision, expected)
    assert f"alone in {wins} of {wins + losses + 7} worlds" in str(decision)


@given(st.integers(0, 200), st.integers(0, 200))
def test_the_bound_is_mcnemar_s_test(wins, losses):
    enough = wins + losses >= 10
    expected = enough and wins > losses and (wins - losses) ** 2 / (wins + losses) > 3.841459
    assert more_often(wins, losses) is expected
    assert not (more_often(wins, losses) and more_often(losses, wins))


def test_wilson_s_interval_is_the_one_of_the_tables():
    low, high = wilson(81, 263)  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)


# --- evidence


@pytest.mark.parametrize("rule", [AVERAGE, GATE], ids=["average", "gate"])
def test_what_could_not_be_found_out_leaves_it_to_the_frames_and_says_so(rule):
    facts = {"run_id": "r", "current": branch(("b", 10)), "candidate": candidate(acted=50)}
    asked = decide(rule, **facts)
    assert isinstance(asked, Question)
    decision = decide(rule, **facts, evidence=Unanswered(question=asked, why="it crashed"))
    assert isinstance(decision, UseCandidate)
    assert decision.why.startswith("100 frames over 60; not ")
    assert decision.why.endswith(": it crashed")


def test_an_objective_decides_by_scores_and_keeps_its_limits():
    facts = {"run_id": "r", "current": branch(("b", 10)), "candidate": candidate(acted=5)}
    rule = partial(eval_gate, objective="success=1,deaths=1,success>=0.5")
    asked = decide(rule, **facts)
    assert isinstance(asked, Question)
    assert asked != decide(GATE, **facts), "answers about success are none about the objective"
    found = Compared(question=asked, wins=60, losses=0, ties=0)
    decision = decide(rule, **facts, evidence=found)
    assert isinstance(decision, UseCandidate)
    assert decision.why == "better: it scored more in 60 of 60 worlds, what is there in 0"
    broken = dataclasses.replace(found, broken=("success is 0.4, not >= 0.5",))
    decision = decide(rule, **facts, evidence=broken)
    assert isinstance(decision, KeepCurrent)
    assert decision.why == "the run's breaks a limit: success is 0.4, not >= 0.5"


@pytest.mark.parametrize("rule", [AVERAGE, GATE], ids=["average", "gate"])
def test_evidence_about_another_version_is_no_evidence(rule):
    facts = {"run_id": "r", "current": branch(("b", 10)), "candidate": candidate(acted=50)}
    asked = decide(rule, **facts)
    assert isinstance(asked, Question)
    other = dataclasses.replace(asked, current="another one")
    for told in (
        Unanswered(question=other, why="?"),
        Compared(question=other, wins=99, losses=0, ties=0),
        Blended(question=other, folder=Path("x"), sha256="x", content="x"),
    ):
        assert decide(rule, **facts, evidence=told) == asked
