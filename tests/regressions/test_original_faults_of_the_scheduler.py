"""Faults 4, 5, 6, 7, 10, 13 and 14 of the original: what a daemon must not do to its runs."""

from __future__ import annotations

import contextlib
import errno

import pytest

from flowrl.config import BottomUpConfig, parse, with_flags
from flowrl.errors import ConfigError, CycleError, FileRefusedError, UnknownNeedError
from flowrl.experts.store import ExpertStore
from flowrl.launchers.base import ExitCause
from flowrl.parallel.events import NewSkill, RunRequest
from flowrl.parallel.training_backend import TrainingBackend
from flowrl.parallel.training_processor import process_completed_training
from flowrl.paths import GraphPaths
from flowrl.runs import TrainConfig
from tests.parallel.making import GRAPH, WOOD, finish, frames, prepare, train
from tests.parallel.scheduling import (
    FakeBackend,
    exited,
    finished,
    interrupt,
    lines,
    saved,
    status,
    words,
)


def test_fault_04_stop_abandons_no_run(start, world):
    scheduler = start()
    scheduler.add_skill("A")
    scheduler._launcher.on_wait = interrupt
    with pytest.raises(KeyboardInterrupt):
        scheduler.run()
    world.end("A")  # while nobody schedules
    scheduler = start()
    assert scheduler.run().complete
    assert len(world.runs) == len(world.ledger) == 1


def test_fault_05_a_full_disk_is_no_busy_lock_and_the_merge_is_not_run_again_and_again(
    start, world, clock
):
    merges = []

    class Counting(FakeBackend):
        def merge(self, task):
            merges.append(task.run_id)
            return super().merge(task)

    scheduler = start()
    scheduler.set_callbacks(backend=Counting(world))
    scheduler.add_skill("A")
    scheduler.tick()
    world.end("A")
    world.refusals["merge"] = [OSError(errno.ENOSPC, "No space left on device")]
    scheduler.tick()
    assert len(merges) == 1
    told = lines(scheduler)["A"]
    assert told["status"] == "merging"
    assert "No space left" in told["why"]
    assert "lock" not in told["why"]
    clock.pass_seconds(3600)
    assert scheduler.run().complete
    assert (len(merges), len(world.ledger)) == (2, 1)


def test_fault_05_a_real_merge_on_a_full_disk_says_so_and_changes_nothing(tmp_path, monkeypatch):
    layout = GraphPaths(tmp_path)
    ready = prepare(layout, WOOD, 0, {})
    finish(ready.layout, {0: 10})
    monkeypatch.setenv("FLOWRL_FAULT", "commit.copied:enospc")
    with pytest.raises(OSError, match="No space left") as caught:
        process_completed_training(ready.run_folder, WOOD, 0, layout.root)
    assert caught.value.errno == errno.ENOSPC
    assert ExpertStore(layout).manifest().generation == 0


def test_fault_06_a_restart_with_a_running_skill_goes_on_with_it(start, world):
    first = start()
    first.add_skill("A")
    first.add_skill("B", {}, ["A"])
    first.tick()
    run_id = lines(first)["A"]["run_id"]
    second = start()  # the first one is gone
    second.tick()
    assert words(second) == {"A": "running", "B": "waiting"}
    world.end("A")
    second.tick()
    world.end("B")
    assert second.run().complete
    assert world.ledger[0] == run_id
    assert [process.launches for process in world.runs.values()] == [1, 1]


def test_fault_07_a_failed_need_blocks_its_dependants_and_the_run_ends(start, world):
    scheduler = start(max_retries=0)
    for name, needs in (("A", []), ("B", ["A"]), ("C", ["B"])):
        scheduler.add_skill(name, {}, needs)
    scheduler.tick()
    world.end("A", exited(ExitCause.EXIT, code=1))
    state = scheduler.run()
    assert words(scheduler) == {"A": "failed", "B": "blocked", "C": "blocked"}
    assert status(scheduler, "C").blocked_by == ("A",)
    assert not state.complete


@pytest.mark.parametrize(
    ("skills", "error"),
    [
        ([NewSkill(skill="A", needs=("B",)), NewSkill(skill="B", needs=("A",))], CycleError),
        ([NewSkill(skill="A"), NewSkill(skill="B", needs=("Nobody",))], UnknownNeedError),
    ],
    ids=["circle", "unknown name"],
)
def test_fault_07_what_could_wait_for_ever_is_refused_whole(start, skills, error):
    scheduler = start()
    with pytest.raises(error, match="B"):
        scheduler.add_skills(skills)
    assert not scheduler.state.entries


def test_fault_10_a_write_that_dies_leaves_the_whole_old_state(start, monkeypatch):
    scheduler = start()
    scheduler.add_skill("A")
    before = saved(scheduler)
    monkeypatch.setenv("FLOWRL_FAULT", "write.scheduler_state.json:raise")
    with contextlib.suppress(OSError):
        scheduler.add_skill("B")
    assert saved(scheduler) == before
    monkeypatch.delenv("FLOWRL_FAULT")
    assert list(start().state.entries) == ["A"]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.99])
def test_fault_10_a_cut_state_or_manifest_is_refused_by_name_and_left_alone(start, share):
    scheduler = start()
    scheduler.add_skill("A")
    layout = scheduler.layout
    train(layout, WOOD, 0, {}, acted={0: 10})
    for path, load in (
        (layout.scheduler_state, lambda: start().state),
        (layout.manifest, lambda: frames(layout)),
    ):
        cut = path.read_bytes()[: int(share * path.stat().st_size)]
        path.write_bytes(cut)
        with pytest.raises(FileRefusedError, match=path.name):
            load()
        assert path.read_bytes() == cut


def test_fault_13_max_retries_2_gives_three_attempts_with_growing_waits(start, world, clock):
    scheduler = start(max_retries=2, retry_backoff=5.0)
    scheduler.add_skill("A")
    scheduler.add_skill("B")
    waits = []
    for attempt in (1, 2, 3):
        scheduler.tick()
        world.end("A", exited(ExitCause.EXIT, code=1, detail=f"trouble {attempt}"))
        scheduler.tick()
        if attempt < 3:
            waits.append((status(scheduler, "A").not_before - clock.now).total_seconds())
        clock.pass_seconds(3600)
    assert waits == [5.0, 10.0]
    assert words(scheduler) == {"A": "failed", "B": "running"}
    assert [task.attempt for task in world.prepared if task.skill == "A"] == [1, 2, 3]
    assert scheduler.state.entries["B"].failures == 0, "each skill has a counter of its own"


def test_fault_14_a_spent_budget_is_never_taken_for_no_budget(tmp_path):
    config = with_flags(BottomUpConfig(), total_timesteps=5000, skill_timesteps_budget=2000)
    backend = TrainingBackend(GraphPaths(tmp_path), config, GRAPH)
    with pytest.raises(ConfigError, match="skill_timesteps_budget is 0"):
        parse(BottomUpConfig, ["--skill_timesteps_budget=0"])
    left = RunRequest(skill=WOOD, expert=0, attempt=1, frames_left=700)
    assert TrainConfig.read(backend.prepare(left).argv[3:], prog="").ppo.total_timesteps == 700
    with pytest.raises(ConfigError, match="total_timesteps is 0"):
        backend.prepare(RunRequest(skill=WOOD, expert=0, attempt=2, frames_left=0))


def test_fault_14_a_skill_whose_budget_is_spent_is_not_started_again(start, world):
    scheduler = start(skill_timesteps_budget=1000, min_success_rate=0.5)
    scheduler.add_skill("A")
    scheduler.tick()
    world.end("A", finished(world.folders["A"], success_rate=0.0, frames=1000))
    scheduler.tick()
    assert words(scheduler) == {"A": "failed"}
    assert "budget of 1000" in status(scheduler, "A").why
