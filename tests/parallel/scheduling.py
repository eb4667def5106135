"""A world for the scheduler that obeys no clock: run folders, processes and a ledger in memory.

The world outlives a scheduler, as the disk and the sessions do. It fails a test at once when a
run is started twice, merged twice, or a slot is used twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from flowrl.errors import FileRefusedError, ResultRefusedError
from flowrl.launchers.base import ExitCause, Exited, Finished, Handle, Job, Lost, Outcome
from flowrl.parallel.events import RunRequest
from flowrl.parallel.state import SchedulerState
from flowrl.parallel.status import Entry
from flowrl.paths import RunPaths
from flowrl.runs import Progress, RunResult, write_progress

NOW = datetime(2030, 1, 1, tzinfo=UTC)


class Killed(BaseException):
    """The daemon dies here."""


def finished(run_id: str, *, success_rate: float = 0.9, frames: int = 1000) -> RunResult:
    return RunResult(
        run_id=run_id,
        frames=frames,
        experts=(),
        success_rate=success_rate,
        step_success=(success_rate,),
        mean_episode_length=10.0,
        updates=3,
        wall_seconds=2.0,
        stopped_early=False,
    )


def progress(
    run_id: str, updates: int, *, phase: str = "training", speed: float = 1000.0
) -> Progress:
    return Progress(
        run_id=run_id,
        updates=updates,
        frames=10 * updates,
        total_frames=100,
        steps_per_second=speed,
        step_success=(0.5,),
        eta_seconds=0.1,
        phase=phase,
        updated_at=0.0,
    )


def exited(cause: ExitCause, **facts: Any) -> Exited:
    return Exited(cause=cause, **facts)


def state_of_entries(entries: Iterable[Entry], **facts: Any) -> SchedulerState:
    return SchedulerState(entries={entry.skill: entry for entry in entries}, **facts)


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now

    def pass_seconds(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@dataclass
class Process:
    task: RunRequest
    job: Job
    outcome: RunResult | Exited | Lost | None = None
    result: RunResult | None = None  # its result.json
    saved: bool = True  # a checkpoint to go on from, a new one at each end
    ends: int = 0
    updates: int = 0
    launches: int = 0
    asked_to_end: bool = False


@dataclass
class World:
    root: Path = Path("/nowhere")
    folders: dict[str, str] = field(default_factory=dict)  # skill → run id
    runs: dict[str, Process] = field(default_factory=dict)  # by run id
    ledger: list[str] = field(default_factory=list)
    discarded: list[str | None] = field(default_factory=list)
    prepared: list[RunRequest] = field(default_factory=list)
    refusals: dict[str, list[BaseException]] = field(default_factory=dict)  # verb → errors
    queue: str = ""  # why runs wait in their engine's queue
    die_at: int = -1  # the daemon dies at this operation
    operations: int = 0

    def op(self, verb: str) -> None:
        self.operations += 1
        if self.operations == self.die_at:
            raise Killed(verb)
        if self.refusals.get(verb):
            raise self.refusals[verb].pop(0)

    def advance(self, skill: str) -> None:
        """Let the skill's trainer write that it has made an update."""
        process = self.of(skill)
        process.updates += 1
        run_paths = RunPaths(process.job.folder, process.task.expert)
        run_paths.folder.mkdir(parents=True, exist_ok=True)
        write_progress(run_paths, progress(process.job.run_id, process.updates))

    def living(self) -> list[Process]:
        return [p for p in self.runs.values() if p.launches and p.outcome is None]

    def of(self, skill: str) -> Process:
        """The newest run of a skill."""
        return self.runs[self.folders[skill]]

    def end(
        self,
        skill: str,
        outcome: RunResult | Exited | Lost | None = None,
        result: RunResult | None = None,
    ) -> None:
        process = self.of(skill)
        assert process.launches, f"{skill} is not launched"
        assert process.outcome is None, f"{skill} has ended before"
        process.outcome = outcome or finished(process.job.run_id)
        process.ends += 1
        process.result = process.outcome if isinstance(process.outcome, RunResult) else result


class FakeBackend:
    def __init__(self, world: World) -> None:
        self.world = world

    def prepare(self, task: RunRequest) -> Job:
        self.world.op("prepare")
        old = self.world.folders.get(task.skill)
        if old is not None:
            assert self.world.runs[old] not in self.world.living(), "its folder is in use"
        run_id = f"e{task.expert}.a{task.attempt}.{len(self.world.runs):08x}"
        job = Job(
            name=f"flowrl_e{task.expert}_{task.skill}",
            run_id=run_id,
            argv=("true",),
            env={},
            cwd=self.world.root,
            folder=self.world.root / run_id,
        )
        self.world.prepared.append(task)
        self.world.folders[task.skill] = run_id
        self.world.runs[run_id] = Process(task, job)
        self.world.op("prepared")
        return job

    def resume(self, task: RunRequest) -> Job:
        self.world.op("resume")
        job = self.reopen(task)
        if job is None:
            raise FileRefusedError(f"{task.skill}: no folder")
        process = self.world.runs[job.run_id]
        assert not (process.launches and process.outcome is None), "it lives"
        process.launches, process.outcome, process.asked_to_end = 0, None, False
        process.task = task
        self.world.prepared.append(task)
        self.world.op("resumed")
        return job

    def reopen(self, task: RunRequest) -> Job | None:
        assert task.run_id is not None
        if self.world.folders.get(task.skill) != task.run_id:
            return None
        return self.world.runs[task.run_id].job

    def merge(self, task: RunRequest) -> Mapping[str, Any]:
        assert task.run_id is not None
        self.world.op("merge")
        if task.run_id not in self.world.ledger:
            if self.world.folders.get(task.skill) != task.run_id:
                raise ResultRefusedError(f"{task.skill}: no run {task.run_id}")
            if self.world.runs[task.run_id].result is None:
                raise ResultRefusedError(f"{task.skill}: no result")
            self.world.ledger.append(task.run_id)
        self.world.op("merged")
        return {"run_id": task.run_id}

    def archived_result(self, task: RunRequest) -> RunResult | None:
        return finished(task.run_id) if task.run_id in self.world.ledger else None

    def archive(self, task: RunRequest) -> None:
        self.world.op("put away")
        assert task.run_id in self.world.ledger
        if self.world.folders.get(task.skill) == task.run_id:
            del self.world.folders[task.skill]

    def discard(self, task: RunRequest) -> None:
        self.world.op("discard")
        if self.world.folders.get(task.skill) == task.run_id:
            del self.world.folders[task.skill]
        self.world.discarded.append(task.run_id)


class QuietBackend:
    """A backend that archives and discards nothing."""

    def archived_result(self, task: RunRequest) -> None:
        pass

    def archive(self, task: RunRequest) -> None:
        pass

    def discard(self, task: RunRequest) -> None:
        pass


class JobsBackend(QuietBackend):
    """A backend whose jobs come from a function, for real launchers; its merges do nothing."""

    def __init__(self, make: Callable[[RunRequest], Job]) -> None:
        self._make = make
        self._jobs: dict[str, Job] = {}

    def prepare(self, task: RunRequest) -> Job:
        job = self._make(task)
        self._jobs[job.run_id] = job
        return job

    def resume(self, task: RunRequest) -> Job:
        if task.run_id not in self._jobs:
            raise FileRefusedError(f"run {task.run_id} is unknown")
        return self._jobs[task.run_id]

    def reopen(self, task: RunRequest) -> Job | None:
        return self._jobs.get(task.run_id or "")

    def merge(self, task: RunRequest) -> Mapping[str, Any]:
        return {}


class FakeLauncher:
    """Satisfies `Launcher`; `on_wait` plays what happens while the scheduler sleeps."""

    def __init__(self, world: World, *, on_wait: Any = None) -> None:
        self.world = world
        self.on_wait = on_wait
        self.waits: list[float] = []

    def launch(self, job: Job) -> Handle:
        self.world.op("launch")
        process = self.world.runs[job.run_id]
        if not (process.launches and process.outcome is None):
            assert process.launches == 0, "an ended run is launched again without resuming it"
            process.launches += 1
        self.world.op("launched")
        return self._handle(job)

    def find(self, job: Job) -> Handle | None:
        return self._handle(job) if self.world.runs[job.run_id].launches else None

    def poll(self, handle: Handle, folder: Path) -> Outcome | None:
        assert folder.name == handle.run_id
        self.world.op("poll")
        process = self.world.runs[handle.run_id]
        if process.result is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "result.json").write_text(json.dumps({"format": 1, **asdict(process.result)}))
        elif process.outcome is not None and process.saved:
            checkpoint = folder / f"{process.task.expert}_policies" / "resume" / str(process.ends)
            checkpoint.mkdir(parents=True, exist_ok=True)
        return Finished(folder) if isinstance(process.outcome, RunResult) else process.outcome

    def queued(self, handle: Handle) -> str:
        return self.world.queue

    def stop(self, handle: Handle, folder: Path) -> None:
        self.world.op("stop")
        self.world.runs[handle.run_id].asked_to_end = True

    def wait(self, handles: Collection[Handle], *, timeout_seconds: float) -> bool:
        self.waits.append(timeout_seconds)
        assert len(self.waits) < 10_000, "the scheduler waits for ever"
        if self.on_wait is not None:
            self.on_wait()
        return True

    def clear(self, runs: Path, done: Collection[Path]) -> None:
        self.world.op("clear")

    def close(self) -> None:
        pass

    def _handle(self, job: Job) -> Handle:
        return Handle(run_id=job.run_id, session=job.name, pid=1)


def words(scheduler):
    return {name: entry.status.kind for name, entry in scheduler.state.entries.items()}


def status(scheduler, skill):
    return scheduler.state.entries[skill].status


def saved(scheduler):
    return json.loads(scheduler.graph_paths.scheduler_state.read_text())


def lines(scheduler):
    return {line["skill"]: line for line in saved(scheduler)["skills"]}
