"""A graph on many nodes with a clock that jumps: of use to `bench_scale.py`.

The scheduler's step, its state and the state's encoding are the real ones, called in the order in
which `SkillScheduler` calls them. The engine, the run folders and the merges are played: they take
as many seconds of the clock as was measured of the real ones. What the scheduler takes of a core
is measured, and delays all that follows, as it would.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from flowrl.config import ScheduleConfig
from flowrl.launchers.base import ExitCause, Exited, Handle, Lost
from flowrl.parallel import events
from flowrl.parallel.events import Command, Event, StatusChange
from flowrl.parallel.state import SchedulerState, StateFile, next_due, ready_entries
from flowrl.parallel.status import Completed, Entry
from flowrl.parallel.transitions import step
from flowrl.paths import session_name
from flowrl.runs import RunResult

BEGIN = datetime(2030, 1, 1, tzinfo=UTC)
DAY = 86_400.0
FRAMES = 5_000_000
LOG = ("Traceback (most recent call last):", "FloatingPointError: invalid value", "exit code 1")
PARTS = ("step", "encode", "loop")  # of the scheduler
LOOKS_AT_QUEUE = 20  # ticks between two counts of the skills that wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The nodes, one run on each, and all that befalls runs there."""

    nodes: int = 1_000
    median_seconds: float = 1_800.0  # of a run without faults, lognormal
    sigma: float = 0.5
    stragglers: float = 0.01  # so many runs take five times as long
    startup_seconds: float = 60.0  # until the first update, at every launch
    checkpoint_seconds: float = 600.0
    lost_a_day: float = 0.01  # nodes
    unheard: float = 0.1  # of their runs the engine says nothing: they count as lost
    repair_seconds: float = 4 * 3_600.0
    preempted_an_hour: float = 0.02  # runs
    crashes: float = 0.01  # launches that end with exit code 1
    save_seconds: float = 10.0  # of a run that is asked to end


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds that the scheduler is busy with one command; `measured`: and with its own steps."""

    prepare: float = 0.03
    launch: float = 0.05
    merge: float = 0.12
    save: float = 0.005  # beside the encoding
    measured: bool = True


NOTHING = Costs(prepare=0.0, launch=0.0, merge=0.0, save=0.0, measured=False)


@dataclass(slots=True)
class Run:
    """A run: how long it trains, how much of that is saved, and its present launch."""

    skill: str
    seconds: float
    saved: float = 0.0
    launch: int = 0
    node: int | None = None
    began: float = 0.0


@dataclass(slots=True)
class Found:
    """What came of a simulation; times in seconds."""

    makespan: float = 0.0
    ideal: float = 0.0
    launches: int = 0
    charged: int = 0
    completed: int = 0
    merges: Counter[str] = field(default_factory=Counter)  # by skill
    ready: int = 0  # most skills that wait for a slot
    queued: int = 0  # most runs in the engine's queue
    events: int = 0
    saves: int = 0
    state_bytes: int = 0  # most
    written_bytes: float = 0.0
    cpu: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))  # seconds

    @property
    def cpu_seconds(self) -> float:
        """What the scheduler took of a core."""
        return sum(self.cpu.values())


def wide_graph(size: int) -> tuple[Entry, ...]:
    """Skills of which a fifth need nothing, and each other one needs two of those long before."""
    dice, roots = random.Random(size), max(1, size // 5)
    return tuple(
        Entry(
            skill=f"Collect Thing {number}",
            needs=tuple({f"Collect Thing {dice.randint(number // 4, number // 2)}" for _ in "ab"})
            if number >= roots
            else (),
        )
        for number in range(size)
    )


class Simulation:
    """One graph, trained to its end; `encode_every`: only each so many-th save is encoded."""

    def __init__(
        self,
        skills: Iterable[Entry],
        cluster: Cluster,
        *,
        costs: Costs = NOTHING,
        slot_minutes: float = 0.0,
        seed: int = 0,
        encode_every: int = 1,
    ) -> None:
        self._cluster, self._costs = cluster, costs
        self._schedule = ScheduleConfig(
            max_parallel_skills=cluster.nodes, slot_minutes=slot_minutes
        )
        self._skills = tuple(skills)
        self._dice = random.Random(seed)
        self._seconds = {entry.skill: self._duration() for entry in self._skills}
        self._encode_every = encode_every
        self.state = self._saved = SchedulerState()
        self._file = StateFile(Path())
        self._pending: deque[Command] = deque()
        self._now = 0.0
        self._numbers = itertools.count()
        self._heap: list[tuple[float, int, str, Any]] = []
        self._free, self._busy = list(range(cluster.nodes)), dict[int, str]()
        self._queue: deque[str] = deque()
        self._runs: dict[str, Run] = {}
        self.found = Found(ideal=self._ideal())

    def play(self) -> Found:
        """Train all skills."""
        found = self.found
        self._at(self._next_loss(), "loss")
        self._step([events.SkillsAdded(self._skills)], launching=False)
        self._carry_all_out()
        self._step(())
        for number in itertools.count():
            self._carry_all_out()
            if number % LOOKS_AT_QUEUE == 0:
                found.ready = max(found.ready, len(ready_entries(self.state.entries)))
            if self._timed("loop", lambda: self.state.settled):
                break
            self._step(self._wait())
        found.makespan = self._now
        entries = self.state.entries.values()
        found.charged = sum(entry.failures for entry in entries)
        found.completed = sum(isinstance(entry.status, Completed) for entry in entries)
        return found

    # The scheduler

    def _wait(self) -> list[Event]:
        """Move the clock to the next event or the end of a wait; returns what has happened."""
        due = self._timed("loop", lambda: next_due(self.state, after=self._time()))
        due_seconds = (due - BEGIN).total_seconds() if due else math.inf
        self._timed("loop", lambda: (self.state.launched(), self.state.launched()))
        received: list[Event] = []
        while not received:
            if due_seconds <= min(self._now, self._heap[0][0]):
                break
            self._now = max(self._now, min(self._heap[0][0], due_seconds))
            while self._heap and self._heap[0][0] <= self._now:
                _, _, kind, facts = heapq.heappop(self._heap)
                received += getattr(self, f"_{kind}")(facts)
        return received

    def _step(self, received: Iterable[Event], *, launching: bool = True) -> None:
        received = list(received)
        self.found.events += len(received)
        now = self._time()
        self.state, commands = self._timed(
            "step", lambda: step(self.state, received, now, self._schedule, launching=launching)
        )
        self._pending.extend(commands)

    def _carry_all_out(self) -> None:
        """Carry out commands until none is left; each waits for the state to be saved."""
        while self._pending:
            self._save()
            received = self._carry_out(self._pending.popleft())
            if received or not self._pending:
                self._step(received)
        self._save()

    def _save(self) -> None:
        if self.state is self._saved:
            return
        self._saved = self.state
        found, every = self.found, self._encode_every
        if found.saves % every == 0:
            content, seconds = _measured(lambda: self._file.encode(self.state))
            found.cpu["encode"] += every * seconds
            found.written_bytes += every * len(content)
            found.state_bytes = max(found.state_bytes, len(content))
            self._now += every * seconds if self._costs.measured else 0.0
        found.saves += 1
        self._now += self._costs.save

    def _carry_out(self, command: Command) -> list[Event]:
        if isinstance(command, StatusChange | events.Discard):
            return []
        request = command.request
        status = self.state.entries[request.skill].status
        if request.run_id != status.run_id:
            return []
        skill = request.skill
        match command:
            case events.Prepare():
                self._now += self._costs.prepare
                run_id = request.run_id
                if run_id is None:
                    run_id = (
                        f"e{request.expert}.a{request.attempt}.{self._dice.getrandbits(32):08x}"
                    )
                    self._runs[run_id] = Run(skill, self._seconds[skill])
                return [events.RunPrepared(skill, run_id)]
            case events.Launch():
                self._now += self._costs.launch
                return [events.RunLaunched(skill, *self._submit(request))]
            case events.Merge():
                self._now += self._costs.merge
                self.found.merges[skill] += 1
                return [events.MergeDone(skill, request.run_id or "", goal=0.8, budget=FRAMES)]
            case events.StopRun():
                run = self._runs[request.run_id or ""]
                stopped = Exited(cause=ExitCause.STOPPED, code=85, detail="stopped on request")
                facts = (request.run_id, run.launch, stopped)
                self._at(self._now + self._cluster.save_seconds, "end", facts)
        return []

    def _timed(self, part: str, act: Callable[[], Any]) -> Any:
        value, seconds = _measured(act)
        self.found.cpu[part] += seconds
        self._now += seconds if self._costs.measured else 0.0
        return value

    def _time(self) -> datetime:
        return BEGIN + timedelta(seconds=self._now)

    # The engine and its nodes

    def _submit(self, request: events.RunRequest) -> tuple[str, Handle]:
        run_id = request.run_id or ""
        self.found.launches += 1
        self._runs[run_id].launch = number = self.found.launches
        self._queue.append(run_id)
        self._start_queued()
        self.found.queued = max(self.found.queued, len(self._queue))
        name = session_name(request.expert, request.skill)
        handle = Handle(run_id=run_id, session=name, pid=0, engine="slurm", engine_id=str(number))
        return run_id, handle

    def _start_queued(self) -> None:
        """Give free nodes to the runs that wait, and draw how their launches end."""
        while self._queue and self._free:
            run_id, node = self._queue.popleft(), self._free.pop()
            run, cluster = self._runs[run_id], self._cluster
            self._busy[node], run.node, run.began = run_id, node, self._now
            left = run.seconds - run.saved
            whole = self._now + cluster.startup_seconds + left
            ends: list[tuple[float, Any]] = [(whole, self._result(run_id))]
            hours = self._dice.expovariate(cluster.preempted_an_hour or 1e-12)
            taken = Exited(cause=ExitCause.SERVER_KILLED, detail="Slurm gave its place away")
            ends.append((self._now + 3_600 * hours, taken))
            if self._dice.random() < cluster.crashes:
                crashed = Exited(cause=ExitCause.EXIT, code=1, detail="exit code 1")
                ends.append((whole - left * self._dice.random(), crashed))
            end, outcome = min(ends, key=lambda each: each[0])
            self._at(end, "end", (run_id, run.launch, outcome))
            self._at(self._now + cluster.startup_seconds, "trains", (run_id, run.launch))

    def _end(self, facts: tuple[str, int, Any]) -> list[Event]:
        """Take a run from its node, unless that launch of it has ended before."""
        run_id, launch, outcome = facts
        run = self._runs[run_id]
        if run.launch != launch or run.node is None:
            return []
        self._free.append(run.node)
        return self._ended(run_id, outcome)

    def _ended(self, run_id: str, outcome: Any) -> list[Event]:
        run, period = self._runs[run_id], self._cluster.checkpoint_seconds
        if run.node is not None:
            del self._busy[run.node]
            run.node = None
        trained = run.saved + max(0.0, self._now - run.began - self._cluster.startup_seconds)
        asked = isinstance(outcome, Exited) and outcome.cause is ExitCause.STOPPED
        run.saved = min(run.seconds, trained if asked else period * (trained // period))
        log = LOG if isinstance(outcome, Exited) and outcome.cause is ExitCause.EXIT else ()
        saved = int(run.saved // period)
        self._start_queued()
        return [events.RunEnded(run.skill, run_id, outcome, FRAMES // 2, log, saved)]

    def _trains(self, facts: tuple[str, int]) -> list[Event]:
        run = self._runs[facts[0]]
        same = run.launch == facts[1] and run.node is not None
        return [events.RunTrains(run.skill, facts[0])] if same else []

    def _loss(self, _: None) -> list[Event]:
        """Lose a node with the run on it."""
        self._at(self._next_loss(), "loss")
        node = self._dice.randrange(self._cluster.nodes)
        if node not in self._busy:
            return []
        self._at(self._now + self._cluster.repair_seconds, "repair", node)
        unheard = self._dice.random() < self._cluster.unheard
        died = Exited(cause=ExitCause.SERVER_KILLED, detail="its node failed")
        return self._ended(self._busy[node], Lost("it left no record") if unheard else died)

    def _repair(self, node: int) -> list[Event]:
        self._free.append(node)
        self._start_queued()
        return []

    def _next_loss(self) -> float:
        rate = self._cluster.nodes * self._cluster.lost_a_day / DAY
        return self._now + self._dice.expovariate(rate or 1e-12)

    def _at(self, seconds: float, kind: str, facts: Any = None) -> None:
        heapq.heappush(self._heap, (seconds, next(self._numbers), kind, facts))

    def _result(self, run_id: str) -> RunResult:
        return RunResult(
            run_id=run_id,
            frames=FRAMES,
            experts=(),
            success_rate=0.9,
            step_success=(0.9,),
            mean_episode_length=40.0,
            updates=1_000,
            wall_seconds=self._runs[run_id].seconds,
            stopped_early=True,
        )

    def _duration(self) -> float:
        cluster = self._cluster
        seconds = self._dice.lognormvariate(math.log(cluster.median_seconds), cluster.sigma)
        return seconds * (5.0 if self._dice.random() < cluster.stragglers else 1.0)

    def _ideal(self) -> float:
        """No schedule is shorter: all work on all nodes, and the longest chain of needs."""
        startup, longest = self._cluster.startup_seconds, dict[str, float]()
        for entry in self._skills:  # needs stand first
            before = max((longest[need] for need in entry.needs), default=0.0)
            longest[entry.skill] = before + startup + self._seconds[entry.skill]
        work = sum(self._seconds.values()) + startup * len(self._skills)
        return max(work / self._cluster.nodes, *longest.values())


def _measured(act: Callable[[], Any]) -> tuple[Any, float]:
    """Return the value of a call, and the seconds that it took of a core."""
    began = time.process_time()
    value = act()
    return value, time.process_time() - began
