"""Graphs for `bench_scheduler.py`: pairs of skills, and runs that only sleep."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flowrl.config import BottomUpConfig, to_json, with_flags
from flowrl.launchers.base import Job
from flowrl.launchers.launcher import Launcher
from flowrl.parallel.events import RunRequest
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.parallel.status import Entry
from flowrl.parallel.training_backend import TrainingBackend
from flowrl.parallel.training_setup import PreparedRun, expected_shapes
from flowrl.paths import GraphPaths, session_name
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import skill_from_data

HERE = Path(__file__).parent
LAYER_SIZE = 82  # an expert of 1 MB
NOTED = 'date +%s.%N >"$0/began"; exec "$@"'  # a process runs before its Python has begun
IS_DONE = "def task_is_done(inventory, n):\n    return inventory.wood >= n\n"
REWARD = "def task_reward(env_reward):\n    return env_reward\n"


class Chain:
    """Pairs of skills, the second of which needs the first; one run at a time."""

    def __init__(self, folder: Path, *, pairs: int) -> None:
        self._graph_paths = GraphPaths(folder / "graph")
        self._pairs = pairs
        self.ended: list[float] = []  # when the first run of each pair ended, once all have run
        self._config = with_flags(
            BottomUpConfig(), layer_size=LAYER_SIZE, sandbox="none", total_timesteps=100
        )
        self._made = folder / "made"
        shapes = expected_shapes(to_json(self._config.ppo))
        words = [self._made, 2 * pairs, self._config.ppo.env_name, LAYER_SIZE, 0]
        done = subprocess.run(
            [sys.executable, str(HERE / "making_experts.py"), *map(str, words)],
            check=True,
            capture_output=True,
            text=True,
        )
        told = [{**digests, "shapes": shapes} for digests in json.loads(done.stdout)]
        (self._made / "told.json").write_text(json.dumps(told))

    def run(self, launcher: Launcher) -> list[float]:
        """Train them all; answers the seconds from each first end to the second's beginning."""
        skills = [
            skill
            for number in range(self._pairs)
            for skill in (
                _skill(f"A {number}", f"a_{number}", ()),
                _skill(f"B {number}", f"b_{number}", (f"a_{number}",)),
            )
        ]
        graph = SkillGraph(skills)
        backend = _Backend(self._graph_paths, self._config, graph)
        backend.made = self._made
        with SkillScheduler(
            self._graph_paths.root, launcher=launcher, max_parallel_skills=1
        ) as scheduler:
            scheduler.set_callbacks(backend=backend)
            for skill in skills:
                scheduler.add_skill(skill.name, {}, graph.needs(skill.name))
            if not scheduler.run().complete:
                raise SystemExit("a run failed; see the log")
        moments = backend.moments
        self.ended = [moments[f"A {number}"]["ended"] for number in range(self._pairs)]
        return [moments[f"B {number}"]["began"] - ended for number, ended in enumerate(self.ended)]


class _Backend(TrainingBackend):
    """Real run folders and merges; only the trainer's program is another."""

    made: Path
    moments: dict[str, dict[str, float]]

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.moments = {}

    def merge(self, task: RunRequest) -> Mapping[str, Any]:
        """Note when the run's trainer began and ended before its folder goes."""
        folder = self._graph_paths.run(task.expert, task.skill).folder
        if folder.is_dir():
            self.moments[task.skill] = {
                name: float((folder / name).read_text()) for name in ("began", "ended")
            }
        return super().merge(task)

    def job_of(self, prepared: PreparedRun, request: RunRequest) -> Job:
        """The job of a stand-in for the trainer, which writes when it began."""
        job = super().job_of(prepared, request)
        module = str(prepared.run_paths.module.resolve())
        script = str(HERE / "stand_in_trainer.py")
        trainer = (sys.executable, "-I", "-S", script, str(self.made.resolve()), module)
        argv = ("/bin/sh", "-c", NOTED, str(job.folder), *trainer)
        return dataclasses.replace(job, argv=argv)


class SleepingBackend:
    """A backend whose runs sleep for ten minutes and are never merged."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def prepare(self, task: RunRequest) -> Job:
        """A job in a folder of its own."""
        folder = self._root / f"run_{task.expert}"
        folder.mkdir(exist_ok=True)
        return Job(
            name=session_name(task.expert, task.skill),
            run_id=f"e{task.expert}.a1.0",
            argv=("/bin/sleep", "600"),
            env={"PATH": "/usr/bin:/bin"},
            cwd=folder,
            folder=folder,
        )

    resume = reopen = prepare

    def merge(self, task: RunRequest) -> Mapping[str, Any]:
        """A run that was ended has nothing to merge."""
        raise AssertionError(f"{task.skill} sleeps")

    def archived_result(self, task: RunRequest) -> None:
        """Nothing was merged."""

    archive = discard = merge


@contextmanager
def sleepers(folder: Path, launcher: Launcher, *, sessions: int) -> Iterator[SkillScheduler]:
    """A scheduler whose runs sleep; they are ended at last."""
    with SkillScheduler(folder, launcher=launcher, max_parallel_skills=sessions) as scheduler:
        scheduler.set_callbacks(backend=SleepingBackend(folder))
        scheduler.add_skills([Entry(skill=f"Task {number}") for number in range(sessions)])
        yield scheduler
        scheduler.run()


def _skill(name: str, gain: str, needs: tuple[str, ...]) -> Any:
    return skill_from_data(
        name,
        {
            "description": "Made for a benchmark.",
            "requirements": dict.fromkeys(needs, 1),
            "gain": {gain: "n"},
            "is_done": IS_DONE,
            "reward": REWARD,
        },
    )
