from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.experts.merge import (
    Candidate,
    Contribution,
    ExpertVersion,
    FrameRule,
    Keep,
    Take,
)
from flowrl.runs import Ancestor

MILLION = 1_000_000
SHAPES = {"actor/dense_0/kernel": (3, 2)}
ANCESTOR = Ancestor(
    expert=0, skill="Collect Wood", version="v000001-a", frames=50, sha256="files", content="old"
)
FRAMES = st.integers(0, 10**12)


def version(*, frames: int, content: str = "old") -> ExpertVersion:
    return ExpertVersion(
        index=0,
        skill="Collect Wood",
        version="v000001-a",
        frames=frames,
        sha256=f"files of {content}",
        content=content,
        shapes=SHAPES,
        lineage=(Contribution(run_id="a", frames=frames),),
    )


def candidate(
    *,
    acted: int,
    total: int | None = None,
    content: str = "new",
    ancestor: Ancestor | None = ANCESTOR,
) -> Candidate:
    return Candidate(
        expert=0,
        skill="Collect Wood",
        ancestor=ancestor,
        acted=acted,
        total=acted if total is None else total,
        sha256=f"files of {content}",
        content=content,
        shapes=SHAPES,
    )


def after(current: ExpertVersion | None, offers, rule) -> ExpertVersion | None:
    """The version that counts once the offers came in, one after another."""
    for offer in offers:
        verdict = rule(offer.ancestor, current, offer)
        if isinstance(verdict, Take):
            current = version(frames=verdict.frames, content=offer.content)
    return current


@pytest.mark.parametrize("order", list(itertools.permutations([80, 100])), ids=str)
def test_the_documented_conflict_keeps_150_million_frames_in_either_order(order):
    ancestor = Ancestor(
        expert=0,
        skill="Collect Wood",
        version="v1",
        frames=50 * MILLION,
        sha256="files",
        content="old",
    )
    offers = [
        candidate(acted=millions * MILLION, content=f"run{millions}", ancestor=ancestor)
        for millions in order
    ]
    rule = FrameRule()
    assert sorted(rule.frames(offer) for offer in offers) == [130 * MILLION, 150 * MILLION]
    kept = after(version(frames=50 * MILLION), offers, rule)
    assert kept is not None
    assert (kept.frames, kept.content) == (150 * MILLION, "run100")


def test_the_shorter_run_that_arrives_last_changes_nothing():
    rule = FrameRule()
    longer = version(frames=150, content="longer")
    assert isinstance(rule(ANCESTOR, longer, candidate(acted=80)), Keep)


def test_a_new_expert_is_taken_with_the_frames_it_acted_in():
    verdict = FrameRule()(None, None, candidate(acted=7, total=100, ancestor=None))
    assert verdict == Take(frames=7, why="new expert")


def test_a_new_expert_is_taken_even_when_it_never_acted():
    assert isinstance(FrameRule()(None, None, candidate(acted=0, ancestor=None)), Take)


def test_a_tie_keeps_what_is_there():
    verdict = FrameRule()(ANCESTOR, version(frames=60, content="first"), candidate(acted=10))
    assert isinstance(verdict, Keep)


@pytest.mark.parametrize("accounting", ["acted", "total"])
@pytest.mark.parametrize("current", ["old", "other"])
def test_an_unchanged_expert_is_kept_however_it_is_counted(accounting, current):
    offer = candidate(acted=500, content="old")
    verdict = FrameRule(accounting)(ANCESTOR, version(frames=50, content=current), offer)
    assert isinstance(verdict, Keep)


@pytest.mark.parametrize(
    ("accounting", "expected"),
    [("acted", Keep), ("total", Take)],
)
def test_an_expert_that_only_watched_gains_frames_only_by_the_documented_formula(
    accounting, expected
):
    offer = candidate(acted=0, total=100)
    assert isinstance(FrameRule(accounting)(ANCESTOR, version(frames=50), offer), expected)


def test_total_accounting_is_initial_plus_total_timesteps():
    assert FrameRule("total").frames(candidate(acted=3, total=80)) == 130


@given(st.lists(FRAMES, min_size=1, max_size=5, unique=True), st.randoms())
def test_the_order_of_arrival_does_not_matter(runs, random):
    offers = [candidate(acted=acted, content=f"run{acted}") for acted in runs]
    shuffled = random.sample(offers, len(offers))
    rule = FrameRule()
    assert after(version(frames=50), offers, rule) == after(version(frames=50), shuffled, rule)


@given(st.lists(FRAMES, min_size=1, max_size=5))
def test_twice_is_once(runs):
    offers = [candidate(acted=acted, content=f"run{place}") for place, acted in enumerate(runs)]
    rule = FrameRule()
    once = after(version(frames=50), offers, rule)
    assert after(once, offers, rule) == once


@given(st.lists(FRAMES, min_size=1, max_size=5))
def test_frames_never_fall(runs):
    rule = FrameRule()
    current = version(frames=50)
    for place, acted in enumerate(runs):
        following = after(current, [candidate(acted=acted, content=f"run{place}")], rule)
        assert following is not None
        assert following.frames >= current.frames
        current = following
