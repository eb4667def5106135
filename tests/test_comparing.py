"""The program that compares experts, on real Craftax worlds."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl import storage
from flowrl.comparing import EPISODES, blended
from flowrl.config import PPOConfig
from flowrl.errors import ComparingError, FileRefusedError
from flowrl.evaluation import open_plan
from flowrl.experts.merge import MERGE_RULES, MergeRule, eval_gate
from flowrl.parallel import comparisons
from flowrl.parallel.training_setup import PreparedRun, prepare_training_run
from flowrl.paths import GraphPaths
from flowrl.skills.graph import SkillGraph
from tests.experts.making import make_expert, tell_arrays
from tests.parallel.making import LIBRARY, finish, make_skill, merge, report_anew

SAPLING = "Collect Sapling"
GATE = MERGE_RULES["eval_gate"]
NOTHING, DO = 0, 5  # actions; to do something to grass gives a sapling once in ten times
GRAPH = SkillGraph(
    [
        LIBRARY[SAPLING],
        *(make_skill(f"Skill {i}", needs=("sapling",), gain=f"item{i}") for i in "abc"),
    ]
)


def run_of(graph_paths: GraphPaths, skill: str, expert: int) -> PreparedRun:
    return prepare_training_run(
        graph_paths=graph_paths,
        graph=GRAPH,
        skill=skill,
        expert=expert,
        attempt=1,
        completed={SAPLING: 0} if expert else {},
        config=PPOConfig(max_task_steps=32),
    )


def finished(ready: PreparedRun, *, action: int, acted: int) -> PreparedRun:
    """The run brings back an expert 0 that nearly always does one thing."""
    new = ready.run.expert
    finish(ready.run_paths, {0: acted, new: 1} if new else {0: acted})
    folder = ready.run_paths.final(0)
    storage.remove_tree(folder)
    values = tuple(9.0 + acted / 1000 if number == action else 0.0 for number in range(17))
    make_expert(folder, f"{acted} frames", values=values)
    tell_arrays(folder)
    report_anew(ready.run_paths, 0)
    return ready


def merged_at_last(graph_paths: GraphPaths, ready: PreparedRun, rule: MergeRule = GATE) -> dict:
    folder = graph_paths.comparisons / ready.run.run_id
    while True:
        try:
            return merge(graph_paths, ready, merge_policy=rule)["experts"][0]
        except ComparingError:
            comparisons.LAUNCHER.wait([comparisons.LAUNCHED[folder]], timeout_seconds=1.0)


@pytest.mark.craftax
@pytest.mark.timeout(900)
@pytest.mark.parametrize("worse_too", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_of_two_copies_the_one_that_does_better_in_the_same_worlds_counts(tmp_path, worse_too):
    graph_paths = GraphPaths(tmp_path / "graph")
    merge(graph_paths, finished(run_of(graph_paths, SAPLING, 0), action=NOTHING, acted=50))
    runs = [run_of(graph_paths, f"Skill {name}", expert) for expert, name in enumerate("abc", 1)]
    idle = finished(runs[0], action=NOTHING, acted=40)
    better = finished(runs[1], action=DO, acted=10)
    worse = finished(runs[2], action=NOTHING, acted=900)
    assert merge(graph_paths, idle, merge_policy=GATE)["experts"][0]["verdict"] == "take"
    found = merged_at_last(graph_paths, better)
    assert (found["verdict"], found["frames"]) == ("take", 60), found
    assert found["why"].startswith("better: it succeeded alone in ")
    assert found["why"].endswith(f" of {EPISODES} worlds, what is there in 0")
    if worse_too:
        limited = partial(eval_gate, objective="success=1,deaths=0.1,success>=0.5")
        found = merged_at_last(graph_paths, worse, limited)
        assert (found["verdict"], found["frames"]) == ("keep", 60), found
        assert found["why"] == "the run's breaks a limit: success is 0, not >= 0.5"


def test_no_copy_plays_a_module_that_was_changed(tmp_path):
    ready = run_of(GraphPaths(tmp_path / "graph"), SAPLING, 0)
    with ready.run_paths.module.open("a") as file:
        file.write("\n")
    with pytest.raises(FileRefusedError, match="is not the module that"):
        open_plan(ready.run_paths)


VALUES = st.lists(
    st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3, max_size=3
)


@given(VALUES, VALUES, st.integers(0, 10**15), st.integers(1, 10**15))
def test_a_blend_lies_between_its_two_sides(one, other, there, added):
    one, other = np.array(one, np.float32), np.array(other, np.float32)
    mean = blended({"w": one}, {"w": other}, (there, added))["w"]
    assert mean.dtype == np.float32
    assert (np.minimum(one, other) <= mean).all()
    assert (mean <= np.maximum(one, other)).all()


def test_a_blend_is_weighted_by_the_frames_of_each_side():
    one, other = {"w": np.array([0, 8], np.float32)}, {"w": np.array([4, 8], np.float32)}
    assert blended(one, other, (3, 1))["w"].tolist() == [1.0, 8.0]
    assert blended(one, other, (0, 7))["w"].tolist() == [4.0, 8.0]
