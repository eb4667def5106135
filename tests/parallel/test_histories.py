"""Random histories of the core: faults, requests and crashes at any moment, checked afterwards.

Each seed plays one graph: runs end in every way, users ask for everything, the clock jumps back
and forth, the disk is full for a while, a second daemon tries to take the folder. A crash drops
every command and event under way and goes on from the saved text of the newest state that was
saved before the command in question.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest

from flowrl.config import ScheduleConfig
from flowrl.errors import BusyError
from flowrl.launchers.base import ExitCause, Exited, Handle, Lost
from flowrl.parallel import events, health
from flowrl.parallel.events import ControlRequest, StopMode, Verb
from flowrl.parallel.health import DaemonLock
from flowrl.parallel.state import SchedulerState, StateFile, decode, next_due
from flowrl.parallel.status import (
    Completed,
    Entry,
    Failed,
    Held,
    Merging,
    Running,
    Slotted,
    StopReason,
    Waiting,
)
from flowrl.parallel.transitions import step
from flowrl.rates import is_clearly_more
from flowrl.runs import RunResult
from tests.parallel.scheduling import NOW, finished

SEEDS_PER_CASE = 100
LOCK: list[Path] = []  # of the folder in which the histories are played
ENDS = (*(Exited(cause=cause) for cause in ExitCause), *[Lost()] * 3, *[None] * 6)


@dataclass
class Disk:
    """What survives a crash: run folders, living processes, the ledger, what happened."""

    runs: dict[str, object] = field(default_factory=dict)  # run id → outcome, None while it lives
    anew: set[str] = field(default_factory=set)  # runs that do not go on from an expert
    newest: dict[str, str] = field(default_factory=dict)  # skill → run id
    started: list[tuple[str, int, tuple[str, ...]]] = field(default_factory=list)
    launched: set[str] = field(default_factory=set)  # run ids
    ledger: list[str] = field(default_factory=list)
    attempts: Counter = field(default_factory=Counter)
    told_to_end: set[str] = field(default_factory=set)  # run ids
    requests: list[ControlRequest] = field(default_factory=list)  # files that are still there
    outcomes: dict[str, set[str]] = field(default_factory=dict)  # request id → answers ever seen
    met: Counter = field(default_factory=Counter)


class Play:
    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        names = self.dice.choice([(), ("0",), ("0", "1"), ("0", "1", "2", "3")])
        self.schedule = ScheduleConfig(
            max_parallel_skills=self.dice.randint(1, 4),
            max_retries=self.dice.randint(0, 2),
            min_success_rate=0.5,
            needs_success_rate=self.dice.choice([0.5, 0.7]),
            devices_per_run=self.dice.randint(1, max(1, len(names))),
        )
        self.devices = {name: self.dice.randint(1, 2) for name in names}
        self.now = NOW
        self.disk = Disk()
        self.state = SchedulerState()
        self.file = StateFile(Path())
        self.saved = self.file.encode(self.state)
        self.pending: deque = deque()
        self.trouble = self.dice.random() * 0.5
        self.full = False  # the disk
        self.doomed = self.dice.random() < 0.3  # the first skill always fails

    def tell(self, *received) -> None:
        self.state, commands = step(
            self.state,
            received,
            self.now,
            self.schedule,
            devices=self.devices,
            launching=not self.full,
        )
        self.pending.extend(commands)
        self.save()
        self.check_slots()

    def save(self) -> None:
        if self.full:
            return
        self.saved = self.file.encode(self.state)
        for response in self.state.responses:
            self.disk.outcomes.setdefault(response.id, set()).add(response.outcome)

    def crash(self) -> None:
        self.disk.met["crash"] += 1
        self.pending.clear()
        self.file = StateFile(Path())
        self.state = decode(self.saved, "saved")
        self.tell(events.Restarted())

    def unlucky(self) -> bool:
        return self.dice.random() < self.trouble

    def act(self) -> None:
        command = self.pending.popleft()
        if isinstance(command, events.StopRun) and self.lives(command.request.run_id):
            self.disk.told_to_end.add(command.request.run_id)
        if isinstance(command, events.StatusChange | events.Discard | events.StopRun):
            return
        task = command.request
        status = self.state.entries[task.skill].status
        if task.run_id != getattr(status, "run_id", None):
            return
        crash_before, crash_after = self.unlucky() and self.unlucky(), self.unlucky()
        if crash_before:
            self.crash()
            return
        results = self.carry_out(command, task)
        if crash_after and self.unlucky():
            self.crash()
            return
        self.tell(*results)

    def carry_out(self, command, task):
        match command:
            case events.Prepare():
                return self.prepare(task)
            case events.Launch(seek=seek):
                return self.launch(task, seek)
            case events.Merge():
                return self.merge(task)

    def prepare(self, task):
        if self.unlucky():
            return [
                self.dice.choice(
                    [
                        events.Deferred(task.skill, "disk"),
                        events.LaunchRefused(task.skill, "no"),
                        events.PrepareRefused(task.skill, "bad") if self.unlucky()
                        else events.Deferred(task.skill, "busy"),
                    ]
                )
            ]  # fmt: skip
        run_id = task.run_id
        if run_id is None:
            run_id = f"{task.skill}/{task.expert}/{task.attempt}/{len(self.disk.runs)}"
        assert self.disk.runs.get(run_id, "ended") is not None, "it lives"
        old = self.disk.newest.get(task.skill)
        assert old is None or self.disk.runs[old] is not None, "its folder is in use"
        self.disk.runs[run_id] = "prepared"
        self.disk.anew |= {run_id} if task.anew else set()
        self.disk.newest[task.skill] = run_id
        return [events.RunPrepared(task.skill, run_id)]

    def launch(self, task, seek):
        handle = Handle(run_id=task.run_id, session="s", pid=1)
        if seek and self.disk.runs[task.run_id] != "prepared":
            return [events.RunLaunched(task.skill, task.run_id, handle)]
        if self.unlucky():
            return [events.LaunchRefused(task.skill, "no tmux")]
        assert self.disk.runs[task.run_id] == "prepared", "launched twice"
        self.disk.runs[task.run_id] = None
        if task.run_id not in self.disk.launched:
            least = self.schedule.needs_success_rate
            entries = self.state.entries.items()
            done = {n: e.trained or e.status for n, e in entries}
            completed = {n: s for n, s in done.items() if isinstance(s, Completed)}
            good = tuple(name for name, s in completed.items() if s.success_rate >= least)
            self.disk.started.append((task.skill, task.expert, good))
        self.disk.launched.add(task.run_id)
        return [events.RunLaunched(task.skill, task.run_id, handle)]

    def merge(self, task):
        if task.run_id in self.disk.ledger:
            return [events.MergeDone(task.skill, task.run_id)]
        if self.unlucky():
            if self.unlucky():
                return [events.MergeRefused(task.skill, task.run_id, "NaN")]
            return [events.Deferred(task.skill, "disk")]
        assert isinstance(self.disk.runs[task.run_id], RunResult)
        self.disk.ledger.append(task.run_id)
        return [events.MergeDone(task.skill, task.run_id)]

    def live(self) -> None:
        """Processes go on, users act, disks fill up, time passes or jumps."""
        for run_id, outcome in list(self.disk.runs.items()):
            if outcome is None and self.dice.random() < 0.5:
                self.disk.runs[run_id] = self.end_of(run_id)
        if self.unlucky() and self.unlucky() and self.state.entries:
            skill = self.dice.choice(list(self.state.entries))
            verb = self.dice.choice([Verb.RETRY, Verb.PAUSE, *[Verb.TRAIN_MORE] * 3])
            self.tell(events.Asked(skill, verb))
        if self.unlucky() and self.unlucky():
            self.ask()
        was_full, self.full = self.full, self.unlucky() and self.unlucky()
        self.disk.met["full"] += self.full
        if was_full and not self.full:
            self.save()
        self.now += timedelta(seconds=self.dice.choice([0, 1, 60, 700]))
        if self.unlucky() and self.unlucky():
            self.now += timedelta(seconds=self.dice.choice([-5000, -60, 5000]))

    def end_of(self, run_id):
        if run_id in self.disk.told_to_end and self.dice.random() < 0.9:
            self.disk.told_to_end.discard(run_id)
            return Exited(cause=ExitCause.STOPPED, code=85)
        if run_id.startswith("s0/") and self.doomed and self.trouble:
            return Exited(cause=ExitCause.EXIT, code=1)
        end = self.dice.choice(ENDS) if self.unlucky() else None
        return end or finished(run_id, success_rate=self._rate())

    def _rate(self) -> float:
        return self.dice.choice([0.2, 0.6, 0.8]) if self.unlucky() else 0.9

    def lives(self, run_id) -> bool:
        return self.disk.runs.get(run_id, "never") is None

    def ask(self) -> None:
        """A user leaves a request."""
        verb = self.dice.choice(list(Verb))
        skill = self.dice.choice([*self.state.entries, "nobody", None])
        name = f"{len(self.disk.outcomes) + len(self.disk.requests)}-{self.dice.random()}"
        self.disk.requests.append(
            ControlRequest(id=name, verb=verb, skill=skill, number=self.dice.randint(-3, 3))
        )
        self.disk.met[verb.value] += 1

    def take_requests(self) -> None:
        """Obey what was asked; the daemon may die before the files are gone."""
        taken = list(self.disk.requests)
        self.tell(*taken)
        again, _ = step(self.state, taken, self.now, self.schedule, launching=False)
        assert again.responses == self.state.responses
        assert [e.status for e in again.entries.values() if not isinstance(e.status, Merging)] == [
            e.status for e in self.state.entries.values() if not isinstance(e.status, Merging)
        ], "a request is obeyed twice"
        if self.full:
            return
        if self.unlucky() and self.unlucky():
            self.crash()
            return
        self.disk.requests = [one for one in self.disk.requests if one not in taken]

    def stop_if_wanted(self) -> None:
        """The shell's part of a stop, and the next start of the daemon."""
        if self.state.stop_mode is StopMode.STOP_NOW:
            self.disk.told_to_end |= {handle.run_id for _, handle in self.state.launched()}
        if self.state.stop_is_due and not self.pending and not self.full:
            self.disk.met["stopped"] += 1
            self.tell(events.Stopped())
            self.crash()

    def hear(self) -> None:
        for entry in self.state.active():
            status = entry.status
            if not isinstance(status, Running) or status.handle is None:
                continue
            outcome = self.disk.runs[status.run_id]
            if outcome not in (None, "prepared"):
                said = self.dice.choice([(), ("one",), ("one",)])
                for _ in range(1 + self.unlucky()):  # told once, or twice
                    saved = self.dice.randint(0, 3)
                    self.tell(events.RunEnded(entry.skill, status.run_id, outcome, 10, said, saved))
            elif self.unlucky() and self.unlucky():
                reason = self.dice.choice([StopReason.HUNG, StopReason.OVERDUE, StopReason.YIELD])
                self.tell(events.RunLate(entry.skill, status.run_id, reason))
        self.tell()

    def add(self, count: int) -> None:
        names = list(self.state.entries)
        for _ in range(count):
            needs = self.dice.sample(names, k=min(len(names), self.dice.randint(0, 2)))
            name = f"s{len(names)}"
            new = Entry(skill=name, needs=tuple(needs), priority=self.dice.randint(0, 2))
            self.tell(events.SkillsAdded((new,)))
            names.append(name)

    def check_slots(self) -> None:
        slotted = [e.status for e in self.state.active() if isinstance(e.status, Slotted)]
        assert len(slotted) <= self.schedule.max_parallel_skills
        loads = Counter(name for status in slotted for name in status.devices)
        for device in self.devices:
            assert loads[device] <= self.devices[device]
        for status in slotted:
            if status.alone and self.devices:
                assert {loads[name] for name in status.devices} == {1}
        if self.devices:
            assert {len(set(status.devices)) for status in slotted} <= {
                self.schedule.devices_per_run
            }


def play(seed: int) -> Play:
    game = Play(seed)
    game.add(game.dice.randint(1, 5))
    late = game.dice.randint(0, 2)
    for beat in range(4000):
        while game.pending and not game.full:
            game.act()
        game.live()
        game.hear()
        game.take_requests()
        game.stop_if_wanted()
        second_daemon_is_refused(game)
        if beat == 5:
            game.add(late)
        if beat > 60:
            game.trouble = 0.0  # faults end some time; then everything must come to rest
        resting = game.state.settled and not game.pending and not game.disk.requests
        if beat > 5 and resting and not game.full:
            return game
    raise AssertionError(f"seed {seed} never comes to rest: {game.state}")


def check_laws(game: Play) -> None:
    """The laws of every history, from what is left on disk and in the state."""
    least = game.schedule.needs_success_rate
    entries = game.state.entries
    completed = {n: e.status for n, e in entries.items() if isinstance(e.status, Completed)}
    trained = completed | {n: e.trained for n, e in entries.items() if e.trained is not None}
    last = {run_id.partition("/")[0]: run_id for run_id in game.disk.ledger}
    assert last == {name: status.run_id for name, status in trained.items()}
    for name, status in trained.items():
        merged = [run for run in game.disk.ledger if run.startswith(f"{name}/")]
        since = max((n for n, run in enumerate(merged) if run in game.disk.anew), default=0)
        counting = [game.disk.runs[run].success_rate for run in merged[since:]]
        assert status.success_rate == counting[-1]
        for before, after in itertools.pairwise(counting):
            assert not is_clearly_more(before, after), "clearly lower only when trained anew"
    assert len(set(game.disk.ledger)) == len(game.disk.ledger)
    numbers: dict[str, set[int]] = {}
    for skill, expert, done in game.disk.started:
        numbers.setdefault(skill, set()).add(expert)
        assert set(entries[skill].needs) <= set(done), f"{skill} began before its needs"
    assert all(len(experts) == 1 for experts in numbers.values())
    experts = [e.expert for e in entries.values() if e.expert is not None]
    assert len(set(experts)) == len(experts)
    assert all(expert < game.state.next_expert for expert in experts)
    assert None not in game.disk.runs.values(), "something still runs"
    assert all(len(answers) == 1 for answers in game.disk.outcomes.values())
    for entry in entries.values():
        assert not isinstance(entry.status, Waiting), "nothing waits when all is settled"
        assert entry.failures <= game.schedule.max_retries + 1
        if isinstance(entry.status, Completed):
            assert all(need in trained for need in entry.needs)
        elif not isinstance(entry.status, Failed | Held):
            by = entry.status.blocked_by
            assert by
            low = {n for n, s in completed.items() if s.success_rate < least}
            assert all(n in low or isinstance(entries[n].status, Failed | Held) for n in by)
    assert next_due(game.state, after=NOW) is None


def _completed(game: Play) -> list[Completed]:
    statuses = (entry.status for entry in game.state.entries.values())
    return [status for status in statuses if isinstance(status, Completed)]


@pytest.fixture(autouse=True)
def folder_of_a_daemon(tmp_path, monkeypatch):
    """The claim of the daemon that plays, on a real lock."""
    monkeypatch.setattr(health, "_RETRY_SECONDS", 0.0)
    LOCK.clear()
    first = DaemonLock(tmp_path / "daemon.lock")
    first.acquire()
    LOCK.append(tmp_path / "daemon.lock")
    yield
    first.check()
    first.release()


def second_daemon_is_refused(game: Play) -> None:
    if game.dice.random() < 0.02:
        game.disk.met["second"] += 1
        with pytest.raises(BusyError, match="is in use by process"):
            DaemonLock(LOCK[0]).acquire()


@pytest.mark.parametrize("case", range(12))
def test_every_random_history_keeps_the_laws(case):
    for seed in range(case * SEEDS_PER_CASE, (case + 1) * SEEDS_PER_CASE):
        check_laws(play(seed))


def test_the_histories_meet_every_kind_of_end():
    seen: Counter = Counter()
    for seed in range(150):
        game = play(seed)
        seen.update(e.status.kind for e in game.state.entries.values())
        seen.update(type(r).__name__ for r in game.disk.runs.values())
        seen["retried"] += any(e.failures for e in game.state.entries.values())
        seen["anew"] += any(".a1." not in run_id for run_id in game.disk.runs)
        seen["goes on"] += any(e.failures for e in game.state.entries.values() if not e.frames_used)
        seen["trained on"] += any(e.attempt > 1 for e in _completed(game) if not e.why)
        seen["in vain"] += any(e.why for e in _completed(game))
        seen.update(game.disk.met)
    ends = ("completed", "failed", "held", "blocked", "Lost", "Exited", "RunResult", "retried")
    more = ("trained on", "in vain")
    met = (
        *more,
        "crash",
        "full",
        "stopped",
        "second",
        "anew",
        "goes on",
        *(verb.value for verb in Verb),
    )
    for word in (*ends, *met):
        assert seen[word] > 5, (word, seen)
