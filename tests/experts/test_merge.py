from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import ResultRefusedError
from flowrl.experts.merge import (
    MERGE_RULES,
    Candidate,
    KeepCurrent,
    MergeRule,
    Question,
    UseCandidate,
    decide,
    frame_count,
)
from flowrl.runs import ExpertVersion, LineageEntry

MILLION = 1_000_000
SHAPES = {"actor/dense_0/kernel": (3, 2)}
FRAMES = st.integers(1, 10**12)
RULE = frame_count


def version(
    *, frames: int, content: str = "old", name: str = "v000001-a", runs: tuple[str, ...] = ("a",)
) -> ExpertVersion:
    shares = [LineageEntry(run_id=run, frames=0) for run in runs[:-1]]
    return ExpertVersion(
        index=0,
        skill="Collect Wood",
        version=name,
        frames=frames,
        sha256=f"files_of_{content}",
        content=content,
        shapes=SHAPES,
        lineage=(*shares, LineageEntry(run_id=runs[-1], frames=frames)),
    )


OLD = version(frames=50)


def candidate(
    *, acted: int, content: str = "new", ancestor: ExpertVersion | None = OLD, **changes
) -> Candidate:
    facts = Candidate(
        expert=0,
        skill="Collect Wood",
        ancestor=ancestor,
        gained=acted,
        sha256=f"files_of_{content}",
        shapes=SHAPES,
        content=content,
        folder=Path("expert"),
    )
    return dataclasses.replace(facts, **changes)


def decided(
    current: ExpertVersion | None, offered: Candidate, rule: MergeRule = RULE, run_id: str = "run"
):
    return decide(rule, run_id=run_id, current=current, candidate=offered)


def after(current: ExpertVersion | None, offers, rule: MergeRule = RULE) -> ExpertVersion | None:
    """The version that counts once the offers came in, one after another."""
    for offer in offers:
        decision = decided(current, offer, rule, run_id=offer.content)
        if isinstance(decision, UseCandidate):
            current = version(
                frames=offer.frames,
                content=offer.content,
                name=f"v000002-{offer.content}",
                runs=("a", offer.content),
            )
    return current


def always_use(ancestor, current, offered, evidence):
    return UseCandidate(why="whatever it is")


# --- the prelude


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shapes": {"actor/dense_0/kernel": (3, 4)}}, "- actor/dense_0/kernel (3, 2)"),
        ({"shapes": {}}, "+ actor/dense_0/kernel absent"),
        ({"shapes": {**SHAPES, "extra": (1,)}}, "- extra absent\n+ extra (1,)"),
    ],
    ids=["another shape", "a leaf lost", "a leaf too many"],
)
@pytest.mark.parametrize("current", [OLD, version(frames=60, content="other", name="v000002-b")])
@pytest.mark.parametrize("rule", [always_use, *MERGE_RULES.values()])
def test_no_rule_can_take_arrays_that_cannot_be_merged(current, rule, changes, words):
    with pytest.raises(ResultRefusedError) as refused:
        decided(current, candidate(acted=500, **changes), rule)
    assert words in str(refused.value)


@pytest.mark.parametrize("rule", [always_use, *MERGE_RULES.values()])
@pytest.mark.parametrize("content", ["old", "other"], ids=["as its ancestor", "as the current one"])
def test_no_rule_can_take_arrays_that_the_run_did_not_change(rule, content):
    current = version(frames=60, content="other", name="v000002-b")
    decision = decided(current, candidate(acted=500, content=content), rule)
    assert decision == KeepCurrent(why="the run did not change it")


@pytest.mark.parametrize("rule", [always_use, *MERGE_RULES.values()])
def test_no_rule_can_merge_a_run_twice(rule):
    current = version(frames=60, content="blend", name="v000002-run", runs=("a", "run"))
    assert decided(current, candidate(acted=10), rule) == KeepCurrent(
        why="the run is in it already"
    )


@pytest.mark.parametrize("rule", [always_use, *MERGE_RULES.values()])
def test_no_rule_can_take_an_expert_that_did_not_act(rule):
    assert isinstance(decided(OLD, candidate(acted=0), rule), KeepCurrent)


def never(*_):
    raise AssertionError("this needs no opinion")


def test_a_offeredis_taken_when_nobody_else_has_merged_since_its_ancestor():
    assert isinstance(decided(OLD, candidate(acted=7), never), UseCandidate)


@pytest.mark.parametrize("acted", [7, 0])
def test_a_new_expert_is_taken_with_the_frames_it_acted_in_even_if_none(acted):
    offered = candidate(acted=acted, ancestor=None)
    assert decided(None, offered, never) == UseCandidate(why="new expert")
    assert offered.frames == acted


def test_a_rule_sees_ancestor_current_and_candidate_of_a_stale_run():
    current = version(frames=90, content="other", name="v000004-d", runs=("a", "b", "c", "d"))
    seen = []
    offered = candidate(acted=5)
    decided(current, offered, lambda *facts: seen.append(facts) or KeepCurrent(why="as told"))
    assert seen == [(OLD, current, offered, None)]


# --- the frame rule


@pytest.mark.parametrize("acted", [5, 10], ids=["shorter", "as long"])
def test_only_a_longer_run_that_arrives_later_changes_anything(acted):
    there = version(frames=60, content="first", name="v000002-b")
    assert isinstance(decided(there, candidate(acted=acted)), KeepCurrent)


@given(st.lists(FRAMES, min_size=1, max_size=5, unique=True), st.randoms())
def test_the_order_of_arrival_does_not_matter(runs, random):
    offers = [candidate(acted=acted, content=f"run{acted}") for acted in runs]
    shuffled = random.sample(offers, len(offers))
    assert after(OLD, offers) == after(OLD, shuffled)


@given(st.lists(FRAMES, min_size=1, max_size=5))
def test_twice_is_once(runs):
    offers = [candidate(acted=acted, content=f"run{place}") for place, acted in enumerate(runs)]
    once = after(OLD, offers)
    assert after(once, offers) == once


@given(st.lists(FRAMES, min_size=1, max_size=5))
def test_frames_never_fall(runs):
    current = OLD
    for place, acted in enumerate(runs):
        following = after(current, [candidate(acted=acted, content=f"run{place}")])
        assert following is not None
        assert following.frames >= current.frames
        current = following


def test_a_question_is_of_the_two_copies_and_of_nothing_else():
    current = version(frames=60, content="other", name="v000002-b", runs=("a", "b"))
    asked = decided(current, candidate(acted=10), MERGE_RULES["eval_gate"])
    assert asked == Question(kind="compare", expert=0, current="other", candidate="new")
