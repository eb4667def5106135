"""Merges that must know more: what is found out, by a program of its own, before they decide."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flowrl import checkpoints, durable
from flowrl.errors import BusyError, ComparingError
from flowrl.experts.inquiry import Desk, read_answers, write_answers
from flowrl.experts.merge import Compared, Question, Unanswered
from flowrl.experts.policies import policy_named
from flowrl.experts.store import ExpertStore
from flowrl.layout import GraphLayout
from flowrl.parallel import comparisons
from flowrl.parallel.training_processor import recover_graph
from flowrl.parallel.training_setup import PreparedRun
from tests.experts.making import SHAPES, make_expert
from tests.parallel.making import PICKAXE, SWORD, TABLE, WOOD, finish, frames, merge, prepare, train

DEADLINE_SECONDS = 240.0
COMPLETED = {WOOD: 0, TABLE: 1}
LIKE = checkpoints.like_of(SHAPES)
AVERAGE, GATE = policy_named("frame_average"), policy_named("eval_gate")


@pytest.fixture
def layout(tmp_path) -> GraphLayout:
    return GraphLayout(tmp_path / "graph")


@pytest.fixture
def rivals(layout) -> tuple[PreparedRun, PreparedRun]:
    """Two runs that started from expert 0 of 50 frames; 30 and 10 frames were added to it."""
    train(layout, WOOD, 0, {}, acted={0: 50})
    train(layout, TABLE, 1, {WOOD: 0}, acted={1: 20})
    first, second = prepare(layout, PICKAXE, 2, COMPLETED), prepare(layout, SWORD, 3, COMPLETED)
    finish(first.layout, {0: 30, 2: 1})
    finish(second.layout, {0: 10, 3: 1})
    return first, second


def desk_of(layout: GraphLayout, ready: PreparedRun) -> Desk:
    return Desk(layout.comparisons / ready.run.run_id)


def until(met: Callable[[], object], *, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not met():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.05)


def merged_at_last(layout: GraphLayout, ready: PreparedRun, policy) -> dict:
    """Merge as the scheduler does: a busy merge is tried again."""
    desk = desk_of(layout, ready)
    while True:
        try:
            return merge(layout, ready, merge_policy=policy)
        except ComparingError:
            until(lambda: _is_free(desk), what="the end of the program")


def _is_free(desk: Desk) -> bool:
    with comparisons._lock_of(desk) as descriptor:
        return descriptor is not None


def arrays_of(layout: GraphLayout, expert: int) -> dict[str, np.ndarray]:
    store = ExpertStore(layout)
    found = checkpoints.load_expert(store.verify(store.manifest().experts[expert]), LIKE)
    return checkpoints._leaves(found)


def ledger(layout: GraphLayout) -> list[str]:
    return sorted(ExpertStore(layout).manifest().merged)


def test_two_runs_are_averaged_by_the_frames_that_each_of_them_added(layout, rivals):
    first, second = rivals
    merge(layout, first, merge_policy=AVERAGE)
    one = arrays_of(layout, 0)
    other = checkpoints._leaves(checkpoints.load_expert(second.layout.final(0), LIKE))
    with pytest.raises(ComparingError, match="expert 0 is being compared"):
        merge(layout, second, merge_policy=AVERAGE)
    assert frames(layout)[0] == 80, "nothing is merged before"
    done = merged_at_last(layout, second, AVERAGE)
    assert done["experts"][0]["why"] == "averaged, 25% of it the run's"
    mean = arrays_of(layout, 0)
    for leaf, found in mean.items():
        np.testing.assert_allclose(found, 0.75 * one[leaf] + 0.25 * other[leaf], rtol=1e-6)
        assert (np.minimum(one[leaf], other[leaf]) <= found).all()
        assert (found <= np.maximum(one[leaf], other[leaf])).all()
    version = ExpertStore(layout).manifest().experts[0]
    assert version.frames == sum(part.frames for part in version.lineage) == 90
    assert {part.run_id for part in version.lineage} >= {first.run.run_id, second.run.run_id}
    assert version.content == checkpoints.array_digest(mean)
    assert merge(layout, second, merge_policy=AVERAGE)["already_merged"] is True
    assert list(layout.comparisons.iterdir()) == []
