"""Who is told of runs before their folders are there, and that they come about or do not."""

from __future__ import annotations

import pytest

from flowrl.config import BottomUpConfig, PPOConfig
from flowrl.errors import LaunchError, ResultRefusedError
from flowrl.launchers.expecting import Expected
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.parallel.signals import Task
from flowrl.parallel.training_workshop import TrainingWorkshop
from flowrl.paths import GraphPaths
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import load_library
from tests.parallel.scheduling import FakeLauncher, FakeWorkshop

WOOD = "Collect Wood"


class NamingWorkshop(FakeWorkshop):
    def expected(self, task):
        return Expected(name=task.skill, run_id="e0.a1.x", folder=self.world.root / task.skill)


class ExpectingLauncher(FakeLauncher):
    def expect(self, run):
        self.world.op(f"expect {run.name}")

    def expect_nothing(self):
        self.world.op("expect nothing")


@pytest.fixture
def scheduler(tmp_path, world, clock):
    with SkillScheduler(
        tmp_path / "graph", launcher=ExpectingLauncher(world), clock=clock, max_parallel_skills=2
    ) as scheduler:
        scheduler.set_callbacks(workshop=NamingWorkshop(world))
        scheduler.add_skill("A")
        scheduler.add_skill("B", {}, ["A"])
        scheduler.add_skill("C", {}, ["A"])
        scheduler.tick()
        yield scheduler


@pytest.fixture
def told(world, monkeypatch):
    """What is done from now on, but for looks and what follows the last launch."""
    told, op = [], world.op
    monkeypatch.setattr(world, "op", lambda verb: told.append(verb) or op(verb))
    return told


def acts(told: list[str]) -> list[str]:
    """What is done of a launch and before it."""
    return [verb for verb in told if verb in ("merge", "prepare", "launch") or "expect" in verb]


def test_dependants_are_expected_before_their_need_is_merged(scheduler, world, told):
    world.end("A")
    scheduler.tick()
    assert acts(told)[:3] == ["expect B", "expect C", "merge"]
    assert acts(told)[-3:] == ["launch", "launch", "expect nothing"]


def test_a_run_that_follows_from_no_merge_is_expected_before_it_is_prepared(scheduler, told):
    scheduler.add_skill("D")
    scheduler.tick()
    assert acts(told) == ["expect D", "prepare", "expect flowrl_e1_D", "launch", "expect nothing"]


def test_runs_that_nobody_can_name_are_all_expected_before_the_first_launch(scheduler, world, told):
    scheduler.set_callbacks(workshop=FakeWorkshop(world))
    world.end("A")
    scheduler.tick()
    dependants = ["expect flowrl_e1_B", "expect flowrl_e2_C"]
    assert [verb for verb in acts(told) if verb != "prepare"] == [
        *("merge", *dependants, "launch", "launch", "expect nothing")
    ]


@pytest.mark.parametrize(
    ("verb", "error"),
    [("merge", ResultRefusedError("NaN")), ("prepare", LaunchError("no"))],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_come_about_is_called_off(scheduler, world, told, verb, error):
    world.end("A")
    world.refusals[verb] = [error, error]
    scheduler.tick()
    assert "launch" not in told
    assert acts(told)[-1] == "expect nothing"


def test_nothing_is_expected_by_a_scheduler_that_stops(scheduler, world, told):
    world.end("A")
    scheduler.stop()
    scheduler.tick()
    assert "merge" in told
    assert not [verb for verb in told if verb.startswith("expect ") and verb != "expect nothing"]


def test_a_run_is_called_what_was_said_of_it(tmp_path):
    graph = SkillGraph(load_library(PPOConfig().env_name).values())
    config = BottomUpConfig(sandbox="none")
    workshop = TrainingWorkshop(GraphPaths(tmp_path), config, lambda: graph)
    task = Task(skill=WOOD, expert=0, attempt=1)
    told = workshop.expected(task)
    assert workshop.expected(task) == told
    job = workshop.prepare(task)
    assert Expected(name=job.name, run_id=job.run_id, folder=job.folder) == told
    assert workshop.expected(task).run_id != told.run_id
