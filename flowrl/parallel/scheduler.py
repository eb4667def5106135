"""The daemon's loop: collect requests and ended runs, step, save, carry out commands.

All decisions are made by `transitions.step`; this module does the I/O around it. Commands run only
after the state that issued them is saved, and may run twice, so a daemon that is killed at any
point goes on where it was when it is started again.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict, Unpack

from flowrl.config import ScheduleConfig, checked
from flowrl.errors import (
    SKILL_ERRORS,
    ConfigError,
    GraphError,
    SkillError,
    format_error,
    is_transient,
)
from flowrl.experts.store import refuse_misplaced
from flowrl.launchers.base import Launcher
from flowrl.launchers.local import LocalLauncher
from flowrl.parallel import events
from flowrl.parallel.backend import Backend
from flowrl.parallel.event_log import EventLog
from flowrl.parallel.events import (
    PAUSED,
    Command,
    Event,
    NewSkill,
    StatusChange,
    StopMode,
)
from flowrl.parallel.executor import CommandExecutor
from flowrl.parallel.health import PROBE_SECONDS, DaemonLock, DiskHealth, RunLimits
from flowrl.parallel.requests import Inbox, log_responses
from flowrl.parallel.state import SchedulerState, next_due
from flowrl.parallel.state_file import StateFile, StateStore
from flowrl.parallel.status import Completed, Entry, Failed, Status
from flowrl.parallel.transitions import NO_DEVICES
from flowrl.paths import GraphPaths, display_name
from flowrl.redaction import secrets_of
from flowrl.skills.skill import Skill, skill_from_data

logger = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0  # between looks at requests/ while nothing happens


class SkillOptions(TypedDict, total=False):
    """Further arguments of `SkillScheduler.add_skill`: see `events.NewSkill`."""

    priority: int
    expert: int | None
    status: Status


class Callbacks(TypedDict, total=False):
    """The arguments of `SkillScheduler.set_callbacks`.

    `on_skill_complete` and `on_skill_failed` are called with the skill's name, after the state
    is saved. They may add skills. They are not called again after a crash: look at `state`.
    One that raises an error that malformed data can raise (`errors.SKILL_ERRORS`) is logged with
    its traceback and the others go on; it is called again if a full disk or the like was the
    reason. Any other exception is a bug and ends the daemon.
    """

    backend: Backend
    on_skill_complete: Callable[[str], object]
    on_skill_failed: Callable[[str], object]


class SkillScheduler:
    """Trains skills side by side as soon as their needs are trained, and merges each once."""

    def __init__(
        self,
        base_dir: Path | str,
        *,
        launcher: Launcher | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        devices: Mapping[str, int] = NO_DEVICES,
        pass_env: Collection[str] = (),
        retry_jitter: float = 0.25,
        **schedule: Any,
    ) -> None:
        """Schedule the runs of one graph.

        Args:
          base_dir: the graph's folder.
          launcher: where runs execute (default: plain processes).
          clock: the time, for waits.
          devices: how many runs each device takes, by its id; without any, runs use the CPU.
          pass_env: names of variables whose values must not be written into records.
          retry_jitter: each wait before a retry grows by a random share up to this one.
          schedule: values of `ScheduleConfig`'s flags.

        Raises:
          ConfigError: a value makes no sense.
        """
        self.layout = GraphPaths(Path(base_dir))
        self.schedule = checked(ScheduleConfig(**schedule))
        self.devices = dict(devices)
        if any(runs < 1 for runs in self.devices.values()):
            raise ConfigError(f"devices {self.devices} must take at least 1 run each")
        self._retry_jitter = retry_jitter
        self._pass_env = pass_env
        self.skills: dict[str, Skill] = {}  # as given to add_skill; not saved
        self.stopped_on_request = False  # whether `run` has ended because a user asked for it
        self._launcher = launcher or LocalLauncher()
        self._clock = clock
        self._lock = DaemonLock(self.layout.daemon_lock)
        self._log = EventLog(self.layout.events)
        self._inbox = Inbox(self.layout)
        self._disk = DiskHealth(self.layout)
        self._limits = RunLimits(
            silent_seconds=self.schedule.stall_timeout, run_seconds=self.schedule.run_timeout
        )
        self._callbacks: Callbacks = {}
        self._store: StateStore | None = None
        self._executor: CommandExecutor | None = None
        self._last_tick = self._clock()
        self._unreported: list[Entry] = []  # ends whose callback is to be called again

    def __enter__(self) -> SkillScheduler:
        self.load()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def state(self) -> SchedulerState:
        """The scheduler's state; the first access locks the folder and loads it."""
        return self.load().state

    def load(self) -> StateStore:
        """Lock the folder and load its state; later calls change nothing.

        Raises:
          BusyError: another daemon has the folder; the message names it.
          FileRefusedError: scheduler_state.json is damaged or of another version.
        """
        if self._store is None:
            refuse_misplaced(self.layout)
            self._lock.acquire()
            try:
                self._store = StateStore(
                    StateFile(self.layout.scheduler_state),
                    self.schedule,
                    self._disk,
                    devices=self.devices,
                    most_jitter=self._retry_jitter,
                    secrets=self.secrets(),
                )
            except BaseException:
                self._lock.release()
                raise
            self._apply(events.Restarted())
        return self._store

    def secrets(self) -> tuple[str, ...]:
        """Return the values of this process's environment that must not be written down."""
        return secrets_of(os.environ, self._pass_env)

    def save(self) -> None:
        """Write scheduler_state.json if the state has changed; a full disk is logged."""
        self.load().save()

    def close(self) -> None:
        """Unlock the folder; runs go on and are adopted by the next daemon."""
        self._launcher.close()
        self._lock.release()
        self._store = None

    def set_callbacks(self, **callbacks: Unpack[Callbacks]) -> None:
        """Set the backend and the callbacks; later calls add to earlier ones."""
        self._callbacks.update(callbacks)
        if backend := callbacks.get("backend"):
            self._executor = CommandExecutor(self._launcher, backend, self._limits, self._disk)

    def add_skill(
        self,
        skill_name: str,
        skill_data: Skill | Mapping[str, Any] | None = None,
        dependency_skill_names: Collection[str] = (),
        **options: Unpack[SkillOptions],
    ) -> None:
        """Add a skill; the same skill with the same dependencies may be added again.

        `skill_data` is as in `skill_from_data`; it is checked here and kept in `skills`, where a
        backend may read it. With None or {} the backend knows the skill by its name. The options
        are `priority` (higher starts sooner), and `expert` and `status` of a skill that was
        trained without this state.

        Raises:
          SkillError: the skill's data is malformed, or the syntax of its code is refused.
          GraphError: a dependency is unknown, or the skill is there with other dependencies.
          NameRefusedError: the name cannot be used, or shares its folder name with another's.
        """
        name = display_name(skill_name)
        skill = _skill_of(name, skill_data)
        needs = tuple(dict.fromkeys(map(display_name, dependency_skill_names)))
        entry = self.state.entries.get(name)
        if entry is None:
            self.add_skills([NewSkill(skill=name, needs=needs, **options)])
        elif set(entry.needs) != set(needs):
            raise GraphError(
                f"{name!r} is there with the needs {list(entry.needs)}, not {list(needs)}; give "
                "the changed skill another name, or use another --graph_path"
            )
        if skill is not None:
            self.skills[name] = skill

    def add_skills(self, skills: Collection[NewSkill]) -> None:
        """Add skills, all of them or none; they may need one another in any order.

        Raises:
          GraphError, NameRefusedError: as `add_skill`, or they need one another in a circle.
        """
        self._apply(events.SkillsAdded(tuple(skills)))

    def retry(self, skill_name: str) -> None:
        """Let a failed or held skill train again, or a waiting one start at once."""
        self._check_known(skill_name)
        self._apply(events.Retry(skill_name))

    def hold(self, skill_name: str, why: str = PAUSED) -> None:
        """Pause a skill until it is retried; a running one saves what it has and ends."""
        self._check_known(skill_name)
        self._apply(events.Hold(skill_name, why))

    def tick(self, now: datetime | None = None) -> None:
        """Apply requests and ended runs, then carry out commands until none is left."""
        now = self._last_tick = now or self._clock()
        store, executor = self.load(), self._started_executor()
        self._lock.check()
        store.save()  # in case the disk was full before
        self._disk.check()
        requests, responses = self._inbox.take(), store.state.responses
        ended = [event for entry, _ in self.state.launched() for event in executor.poll_run(entry)]
        store.apply([*requests, *ended], now, launching=self._disk.ok)
        log_responses(responses, store.state.responses)
        if requests and store.save():
            self._inbox.done()
        unreported, self._unreported = self._unreported, []
        self._report_ends(unreported)
        while self._disk.ok and (commands := store.next_commands()):
            store.apply(self._carry_out(commands, now), now, launching=self._disk.ok)
        store.save()
        executor.archive_merged()
        if self.state.stop_mode is StopMode.STOP_NOW:
            for entry, _ in self.state.launched():
                executor.stop_once(entry)

    def wait(self) -> None:
        """Sleep until a run may have ended, a request comes, a wait is over, or poll_interval."""
        seconds = self.schedule.scheduler_poll_interval
        due = next_due(self.state, after=self._last_tick)
        if due is not None:
            seconds = min(seconds, (due - self._clock()).total_seconds())
        handles = [handle for _, handle in self.state.launched()]
        executor = self._started_executor()
        limits = (executor.seconds_left(handle) for handle in handles)
        most = math.inf if self._disk.ok and not self._unreported else PROBE_SECONDS
        until = time.monotonic() + max(0.0, min(seconds, most, *limits))
        while (left := until - time.monotonic()) > 0 and not self._inbox.waiting:
            if self._launcher.wait(handles, timeout_seconds=min(left, _LOOK_SECONDS)):
                return

    def run(self) -> SchedulerState:
        """Tick until every skill is settled, or a user has stopped the daemon."""
        store = self.load()
        while True:
            self.tick()
            done = self.state.settled or self.state.stop_is_due
            if done and not store.pending and not self._unreported and store.save():
                if self.state.stop_mode:
                    self.stopped_on_request = True
                    self._apply(events.Stopped())
                return self.state
            self.wait()

    def _apply(self, event: Event) -> None:
        """Apply one event between two ticks; nothing is started before the next one."""
        store = self.load()
        store.apply([event], self._clock(), launching=False)
        store.save()

    def _carry_out(self, commands: list[Command], now: datetime) -> Collection[Event]:
        """Carry out a command, or report the changes of status that come in a row."""
        changes = [command for command in commands if isinstance(command, StatusChange)]
        if changes:
            self._log.append(changes, now)
            self._report_ends(change.entry for change in changes)
            return ()
        (command,) = commands
        assert not isinstance(command, StatusChange)
        status = self.state.entries[command.request.skill].status
        return self._started_executor().carry_out(command, status)

    def _report_ends(self, entries: Iterable[Entry]) -> None:
        self._unreported += [e for e in entries if not _call_back(self._callbacks, e)]

    def _started_executor(self) -> CommandExecutor:
        if self._executor is None:
            raise ConfigError("there is no backend; call set_callbacks(backend=…) first")
        return self._executor

    def _check_known(self, skill: str) -> None:
        if skill not in self.state.entries:
            raise GraphError(f"there is no skill {skill!r}; add it first")


def _call_back(callbacks: Callbacks, entry: Entry) -> bool:
    """Report an end to its callback; return False when that should be tried again later."""
    if isinstance(entry.status, Completed):
        callback = callbacks.get("on_skill_complete")
    elif isinstance(entry.status, Failed):
        callback = callbacks.get("on_skill_failed")
    else:
        return True
    if callback is None:
        return True
    try:
        callback(entry.skill)
    except SKILL_ERRORS as error:
        logger.error(
            "%s is %s, but its callback has failed: %s",
            entry.skill,
            entry.status.kind,
            format_error(error),
            exc_info=error,
        )
        return not is_transient(error)
    return True


def _skill_of(name: str, data: Skill | Mapping[str, Any] | None) -> Skill | None:
    """The skill that `data` describes; None when it describes nothing.

    Raises:
      SkillError: the data is malformed, or of another skill.
    """
    if isinstance(data, Mapping):
        return skill_from_data(name, data) if data else None
    if data is None:
        return None
    if not isinstance(data, Skill):
        raise SkillError(f"skill {name!r}: {type(data).__name__} is not skill data; give a mapping")
    if data.name != name:
        raise SkillError(f"skill {name!r}: the data is that of {data.name!r}; add it by its name")
    return data
