"""Merges that must know more: what is found out, by a program of its own, before they decide."""

from __future__ import annotations

import multiprocessing
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flowrl import storage
from flowrl.config import BottomUpConfig, with_flags
from flowrl.errors import ComparingError
from flowrl.experts import checkpoint
from flowrl.experts.merge import MERGE_RULES, Compared
from flowrl.experts.store import ExpertStore
from flowrl.launchers import process, sandbox
from flowrl.launchers.base import Handle, Job
from flowrl.launchers.local import LocalLauncher
from flowrl.parallel import comparisons
from flowrl.parallel.events import RunRequest
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.parallel.training_backend import TrainingBackend
from flowrl.parallel.training_setup import PreparedRun
from flowrl.paths import GraphPaths
from flowrl.skills.graph import SkillGraph
from flowrl.storage import records
from tests.chaos.merge_once import merge_with_others
from tests.experts.making import SHAPES
from tests.parallel.faults import killed_at
from tests.parallel.making import (
    GRAPH,
    PICKAXE,
    SWORD,
    TABLE,
    WOOD,
    finish,
    frames,
    make_skill,
    merge,
    merge_finished,
    prepare,
    train,
)
from tests.parallel.stand_in_story import Place, StandInBackend
from tests.waiting import limit, until

DEADLINE_SECONDS = limit(240.0)
COMPLETED = {WOOD: 0, TABLE: 1}
LIKE = checkpoint.like_of(SHAPES)
AVERAGE, GATE = MERGE_RULES["frame_average"], MERGE_RULES["eval_gate"]


@pytest.fixture
def rivals(graph_paths) -> tuple[PreparedRun, PreparedRun]:
    """Two runs that started from expert 0 of 50 frames; 30 and 10 frames were added to it."""
    train(graph_paths, WOOD, 0, {}, acted={0: 50})
    train(graph_paths, TABLE, 1, {WOOD: 0}, acted={1: 20})
    first, second = (
        prepare(graph_paths, PICKAXE, 2, COMPLETED),
        prepare(graph_paths, SWORD, 3, COMPLETED),
    )
    finish(first.run_paths, {0: 30, 2: 1})
    finish(second.run_paths, {0: 10, 3: 1})
    return first, second


def folder_of(graph_paths: GraphPaths, ready: PreparedRun) -> Path:
    return graph_paths.comparisons / ready.run.run_id


def merged_at_last(graph_paths: GraphPaths, ready: PreparedRun, rule) -> dict:
    """Merge as the scheduler does: a merge that is deferred is tried again."""
    while True:
        try:
            return merge(graph_paths, ready, merge_policy=rule)
        except ComparingError:
            wait_for_the_job(folder_of(graph_paths, ready))


def wait_for_the_job(folder: Path) -> None:
    handle = comparisons.LAUNCHED[folder]
    until(lambda: comparisons.LAUNCHER.poll(handle, folder), seconds=240.0, what="its end")


def arrays_of(graph_paths: GraphPaths, expert: int) -> dict[str, np.ndarray]:
    store = ExpertStore(graph_paths)
    found = checkpoint.load_expert(store.verify(store.manifest().experts[expert]), LIKE)
    return checkpoint.host_leaves(found)


def words_of(graph_paths: GraphPaths, ready: PreparedRun) -> tuple[str, ...]:
    """What `merge_once` is told."""
    return (str(graph_paths.root), str(ready.run_folder), str(ready.run.expert), ready.run.skill)


def ledger(graph_paths: GraphPaths) -> list[str]:
    return sorted(ExpertStore(graph_paths).manifest().merged)


def test_two_runs_are_averaged_by_the_frames_that_each_of_them_added(graph_paths, rivals):
    first, second = rivals
    merge(graph_paths, first, merge_policy=AVERAGE)
    one = arrays_of(graph_paths, 0)
    other = checkpoint.host_leaves(checkpoint.load_expert(second.run_paths.final(0), LIKE))
    with pytest.raises(ComparingError, match="expert 0 is being compared"):
        merge(graph_paths, second, merge_policy=AVERAGE)
    assert frames(graph_paths)[0] == 80, "nothing is merged before"
    around = storage.read_json(folder_of(graph_paths, second) / "spec.json")["sandbox"]
    graph = str(graph_paths.root.resolve())
    confined = ("--ro-bind", graph, graph) in zip(around, around[1:], around[2:], strict=False)
    assert confined == (sandbox.confinement("auto").program is not None)
    done = merged_at_last(graph_paths, second, AVERAGE)
    assert done["experts"][0]["why"] == "averaged, 25% of it the run's"
    mean = arrays_of(graph_paths, 0)
    for leaf, found in mean.items():
        np.testing.assert_allclose(found, 0.75 * one[leaf] + 0.25 * other[leaf], rtol=1e-6)
        assert (np.minimum(one[leaf], other[leaf]) <= found).all()
        assert (found <= np.maximum(one[leaf], other[leaf])).all()
    version = ExpertStore(graph_paths).manifest().experts[0]
    assert version.frames == sum(part.frames for part in version.lineage) == 90
    assert {part.run_id for part in version.lineage} >= {first.run.run_id, second.run.run_id}
    assert version.content == checkpoint.array_digest(mean)
    assert merge(graph_paths, second, merge_policy=AVERAGE)["already_merged"] is True
    assert list(graph_paths.comparisons.iterdir()) == []


class IdleLauncher:
    """Launches nothing; `launched` are the jobs that it was given."""

    def __init__(self) -> None:
        self.launched: list[Job] = []

    def launch(self, job: Job) -> Handle:
        self.launched.append(job)
        return Handle(run_id=job.run_id, session="", pid=1)

    def find(self, job: Job) -> None:
        return None

    def poll(self, handle: Handle, folder: Path) -> None:
        return None


@pytest.fixture
def idle(monkeypatch) -> list[Job]:
    """No job is started; says which would have been."""
    launcher = IdleLauncher()
    monkeypatch.setattr(comparisons, "LAUNCHER", launcher)
    return launcher.launched


def defer(graph_paths: GraphPaths, ready: PreparedRun, rule) -> Path:
    """Merge in vain; returns the comparison's folder."""
    with pytest.raises(ComparingError):
        merge(graph_paths, ready, merge_policy=rule)
    return folder_of(graph_paths, ready)


def answer(folder: Path, *, wins: int, losses: int) -> None:
    """Answer the questions as the job would."""
    asked = comparisons.read_record(folder)
    assert asked is not None
    found = (Compared(question=q, wins=wins, losses=losses, ties=0) for q in asked.questions)
    records.write(comparisons.record_of(folder), replace(asked, answers=tuple(found)))


@pytest.mark.parametrize(("wins", "losses", "expected"), [(30, 10, "take"), (10, 30, "keep")])
def test_the_better_copy_counts_whatever_its_frames(
    graph_paths, rivals, idle, wins, losses, expected
):
    first, second = rivals
    merge(graph_paths, first, merge_policy=GATE)
    answer(defer(graph_paths, second, GATE), wins=wins, losses=losses)
    done = merge(graph_paths, second, merge_policy=GATE)
    assert done["experts"][0]["verdict"] == expected
    assert f"alone in {wins} of 40 worlds" in done["experts"][0]["why"]
    assert frames(graph_paths)[0] == (60 if expected == "take" else 80)
    assert ledger(graph_paths)[-2:] == sorted([first.run.run_id, second.run.run_id])
    assert len(idle) == 1


def test_evidence_about_a_version_that_counts_no_more_is_made_anew(graph_paths, rivals, idle):
    first, second = rivals
    third = prepare(graph_paths, "Collect Drink", 5, {})
    finish(third.run_paths, {5: 1})
    merge(graph_paths, first, merge_policy=GATE)
    folder = defer(graph_paths, second, GATE)
    answer(folder, wins=40, losses=0)
    train(graph_paths, WOOD, 0, {}, acted={0: 500})
    defer(graph_paths, second, GATE)
    assert len(idle) == 2
    asked = comparisons.read_record(folder)
    assert asked is not None
    assert asked.answers == (), "the old answers are gone"
    answer(folder, wins=0, losses=0)
    assert merge(graph_paths, second, merge_policy=GATE)["experts"][0]["verdict"] == "keep"


def test_a_damaged_record_is_made_anew(graph_paths, rivals, idle):
    first, second = rivals
    merge(graph_paths, first, merge_policy=GATE)
    folder = defer(graph_paths, second, GATE)
    answer(folder, wins=40, losses=0)
    path = comparisons.record_of(folder)
    path.write_text(path.read_text().replace("4", "5"))
    defer(graph_paths, second, GATE)
    assert len(idle) == 2


def test_answers_that_a_trainer_left_in_its_own_folder_are_not_believed(graph_paths, rivals, idle):
    first, second = rivals
    merge(graph_paths, first, merge_policy=GATE)
    folder = defer(graph_paths, second, GATE)
    answer(folder, wins=40, losses=0)
    shutil.copytree(folder, second.run_folder / "comparisons")
    storage.remove_tree(folder)
    defer(graph_paths, second, GATE)


@pytest.mark.parametrize(
    "fault", ["it is killed", pytest.param("it takes too long", marks=pytest.mark.slow)]
)
def test_a_program_that_fails_leaves_it_to_the_frames(graph_paths, rivals, monkeypatch, fault):
    first, second = rivals
    merge(graph_paths, first, merge_policy=GATE)
    if fault == "it is killed":
        monkeypatch.setenv("FLOWRL_FAULT", "comparing.begun:kill")
    else:
        monkeypatch.setattr(comparisons, "LIMIT_SECONDS", 0.01)
    done = merged_at_last(graph_paths, second, GATE)
    said = done["experts"][0]["why"]
    assert said.startswith("80 frames, the run's has 60; not compared: the program that does it")
    assert done["experts"][0]["verdict"] == "keep"
    assert list(graph_paths.comparisons.iterdir()) == []


def test_one_job_at_a_time_and_an_end_for_it_when_nobody_needs_it(graph_paths, rivals, monkeypatch):
    first, second = rivals
    merge(graph_paths, first, merge_policy=AVERAGE)
    make, launched = comparisons.comparison_job, []

    def sleeper(*args):
        words = (sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)")
        launched.append(replace(make(*args), argv=words))
        return launched[-1]

    monkeypatch.setattr(comparisons, "comparison_job", sleeper)
    folder = defer(graph_paths, second, AVERAGE)
    until(lambda: comparisons.LAUNCHER.find(launched[0]), seconds=240.0, what="its start")
    handle = comparisons.LAUNCHED.pop(folder)  # as if another scheduler had launched it
    defer(graph_paths, second, AVERAGE)
    assert folder not in comparisons.LAUNCHED, "it was adopted"
    assert merge(graph_paths, second)["experts"][0]["verdict"] == "keep", "by frames, without it"
    until(lambda: not process.alive(handle.pid, handle.start_time), seconds=240.0)
    assert list(graph_paths.comparisons.iterdir()) == []


@pytest.mark.parametrize(
    "point",
    [
        "commit.copied",
        "merge.committed",
        pytest.param("merge.informed", marks=pytest.mark.slow),
        pytest.param("commit.swapped", marks=pytest.mark.slow),
    ],
)
def test_killed_at_a_named_point_an_average_is_merged_exactly_once(graph_paths, rivals, point):
    first, second = rivals
    merge(graph_paths, first, merge_policy=AVERAGE)
    folder = defer(graph_paths, second, AVERAGE)
    wait_for_the_job(folder)
    words = (*words_of(graph_paths, second), "frame_average")
    assert killed_at(point, "tests.chaos.merge_once", *words)
    merge_finished(graph_paths, AVERAGE)
    assert frames(graph_paths)[0] == 90
    lineage = ExpertStore(graph_paths).manifest().experts[0].lineage
    assert [part.frames for part in lineage] == [50, 30, 10]
    assert ledger(graph_paths).count(second.run.run_id) == 1
    assert list(graph_paths.comparisons.iterdir()) == []


def test_recovery_leaves_a_run_that_is_being_compared_to_the_scheduler(graph_paths, rivals, idle):
    first, second = rivals
    merge(graph_paths, first, merge_policy=GATE)
    (graph_paths.comparisons / "of a run that is gone").mkdir(parents=True)
    assert merge_finished(graph_paths, GATE)[0] == []
    assert [path.name for path in graph_paths.comparisons.iterdir()] == [second.run.run_id]
    answer(folder_of(graph_paths, second), wins=0, losses=0)
    assert len(merge_finished(graph_paths, GATE)[0]) == 1


def test_an_attempt_that_is_given_up_leaves_no_questions(graph_paths, rivals, idle):
    first, second = rivals
    merge(graph_paths, first, merge_policy=GATE)
    folder = defer(graph_paths, second, GATE)
    backend = TrainingBackend(graph_paths, BottomUpConfig(), GRAPH)
    backend.discard(RunRequest(skill=SWORD, expert=3, attempt=1, run_id=second.run.run_id))
    assert not folder.exists()
    assert not second.run_folder.exists()


@pytest.mark.parametrize("name", ["frame_count", "frame_average"])
def test_two_runs_that_finish_at_once_are_both_merged(graph_paths, rivals, name):
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    mergers = [
        context.Process(
            target=merge_with_others, args=(barrier, name, *words_of(graph_paths, ready))
        )
        for ready in rivals
    ]
    for merger in mergers:
        merger.start()
    for merger in mergers:
        merger.join(timeout=DEADLINE_SECONDS)
    assert [merger.exitcode for merger in mergers] == [0, 0]
    assert set(ledger(graph_paths)) >= {ready.run.run_id for ready in rivals}
    version = ExpertStore(graph_paths).manifest().experts[0]
    assert version.frames == sum(part.frames for part in version.lineage)
    assert version.frames == (80 if name == "frame_count" else 90)


def test_a_run_from_three_generations_ago_is_averaged_with_what_became_of_its_ancestor(
    graph_paths, rivals
):
    late, _ = rivals
    for acted in (1, 2, 3):
        now = prepare(graph_paths, "Collect Drink", 5, {})
        finish(now.run_paths, {5: acted})
        merge(graph_paths, now)
        again = prepare(graph_paths, TABLE, 1, {WOOD: 0})
        finish(again.run_paths, {0: acted, 1: 1})
        merge(graph_paths, again, merge_policy=AVERAGE)
    assert frames(graph_paths)[0] == 56
    done = merged_at_last(graph_paths, late, AVERAGE)
    assert done["experts"][0]["why"] == "averaged, 83% of it the run's"
    version = ExpertStore(graph_paths).manifest().experts[0]
    assert [part.frames for part in version.lineage] == [50, 1, 2, 3, 30]


def test_a_scheduler_goes_on_while_two_copies_are_averaged(tmp_path):
    skills = [make_skill("Base", gain="base")]
    skills += [make_skill(name, needs=("base",), gain=f"item{name.lower()}") for name in ("A", "B")]
    skills.append(make_skill("Last", needs=("itema",), gain="last"))
    graph = SkillGraph(skills)
    place = Place(tmp_path)
    place.order(
        {
            "A": {"acted": {"0": 30, "1": 1}, "gate": "go"},
            "B": {"acted": {"0": 10, "2": 1}, "gate": "go"},
        }
    )
    asked: list[str] = []

    class Backend(StandInBackend):
        def merge(self, task):
            asked.append(task.skill)
            return super().merge(task)

        def prepare(self, task):
            if task.skill == "B":
                place.open("go")  # both have the same ancestor by then
            return super().prepare(task)

    config = with_flags(BottomUpConfig(), merge_policy="frame_average")
    with SkillScheduler(
        place.graph_paths.root, launcher=LocalLauncher(), retry_backoff=0.05, max_parallel_skills=3
    ) as daemon:
        daemon.set_callbacks(backend=Backend(place.graph_paths, config, graph))
        for name in graph.order():
            daemon.add_skill(name, {}, graph.needs(name))
        assert daemon.run().complete
    assert {index: found[1] for index, found in place.experts().items()}[0] == 140
    assert len(asked) > len(skills), "the later of A and B was put off and tried again"
    assert list(place.graph_paths.comparisons.iterdir()) == []
