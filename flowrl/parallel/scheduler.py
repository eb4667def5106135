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
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flowrl.config import ScheduleConfig, checked
from flowrl.errors import (
    SKILL_ERRORS,
    ConfigError,
    FileRefusedError,
    FlowrlError,
    GraphError,
    SkillError,
    classify_io_error,
    format_error,
    is_transient,
)
from flowrl.experts.store import refuse_misplaced
from flowrl.launchers.launcher import Launcher
from flowrl.launchers.tmux import TmuxLauncher
from flowrl.parallel import events
from flowrl.parallel.events import (
    Command,
    ControlRequest,
    Event,
    StatusChange,
    StopMode,
    Verb,
    why_not,
)
from flowrl.parallel.executor import Backend, CommandExecutor, log_change
from flowrl.parallel.health import PROBE_SECONDS, DaemonLock, DiskHealth, RunLimits
from flowrl.parallel.requests import Inbox, log_responses
from flowrl.parallel.state import SchedulerState, StateFile, next_due
from flowrl.parallel.status import Completed, Entry, Failed
from flowrl.parallel.transitions import NO_DEVICES, step
from flowrl.paths import GraphPaths, display_name
from flowrl.redaction import cleaned, secrets_of
from flowrl.skills.skill import Skill, skill_from_data

logger = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0  # between looks at requests/ while nothing happens
_TICK_SECONDS = 60.0  # for which a tick lasts at most, unless this process is frozen


class SkillScheduler:
    """Trains skills side by side as soon as their needs are trained, and merges each once."""

    def __init__(
        self,
        base_dir: GraphPaths | Path | str,
        *,
        launcher: Launcher | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        devices: Mapping[str, int] = NO_DEVICES,
        pass_env: Collection[str] = (),
        shared_folder: bool = False,
        **schedule: Any,
    ) -> None:
        """Schedule the runs of the graph in `base_dir`, a folder or its paths.

        Args:
          launcher: where runs execute (default: tmux sessions).
          clock: the time, for waits.
          devices: how many runs each device takes, by its id; without any, runs use the CPU.
          pass_env: names of variables whose values must not be written into records.
          shared_folder: whether schedulers on other hosts could use the folder.
          schedule: values of `ScheduleConfig`'s flags; ConfigError says which makes no sense.
        """
        self.graph_paths = (
            base_dir if isinstance(base_dir, GraphPaths) else GraphPaths(Path(base_dir))
        )
        self.schedule = checked(ScheduleConfig(**schedule))
        self.devices = dict(devices)
        self._secrets = secrets_of(os.environ, pass_env)
        self.skills: dict[str, Skill] = {}  # as given to add_skill; not saved
        self.stopped_on_request = False  # whether `run` has ended because a user asked for it
        self.launcher = launcher or TmuxLauncher()
        self._clock = clock
        self._lock = DaemonLock(self.graph_paths.daemon_lock, shared=shared_folder)
        self.inbox = Inbox(self.graph_paths)
        self.state_file = StateFile(self.graph_paths.scheduler_state)
        self.disk = DiskHealth(self.graph_paths, probe=lambda: self.state_file.save(self.state))
        self._limits = _limits_of(self.schedule)
        self._callbacks: dict[type, Callable[[str], object]] = {}
        self._state: SchedulerState | None = None  # until the folder is locked
        self._saved: SchedulerState | None = None
        self._pending: deque[Command] = deque()  # until the state that issued them is saved
        self._executor: CommandExecutor | None = None
        self._last_tick = self._clock()
        self._on_text: dict[Verb, Callable[[str], object]] = {}
        self._on_tick: Callable[[], object] = lambda: None
        self._more: Callable[[], bool] = lambda: False
        self._more_may_come = False  # after the last tick
        self._unreported: list[Entry] = []  # ends whose callback is to be called again

    def __enter__(self) -> SkillScheduler:
        _ = self.state
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def state(self) -> SchedulerState:
        """The scheduler's state; the first access locks the folder and loads it.

        BusyError: another daemon has the folder. FileRefusedError: the state's file cannot be used.
        """
        if self._state is None:
            refuse_misplaced(self.graph_paths)
            self._lock.acquire()
            try:
                self._state = self._saved = self.state_file.load() or SchedulerState()
            except BaseException:
                self._lock.release()
                raise
            self._apply(events.Restarted())
        return self._state

    def save(self) -> bool:
        """Write a changed state; False on a full disk, FileRefusedError for a lasting error."""
        state = self.state
        if state is self._saved:
            return True
        self.check_lock()
        try:
            self.state_file.save(state)
        except OSError as error:
            if not self.disk.report(error):
                raise FileRefusedError(
                    f"{self.state_file.path} cannot be written ({format_error(error)}), so nothing "
                    "more is started or merged; runs go on: mend it and start again to adopt them"
                ) from error
            if not self.disk.ok:
                return False  # else the probe has written the state
        self._saved = state
        return True

    def check_lock(self) -> None:
        """Raise BusyError if another scheduler may have the folder by now."""
        self._lock.check()

    def close(self) -> None:
        """Unlock the folder; runs go on and are adopted by the next daemon."""
        self.launcher.close()
        self.disk.close()
        self._lock.release()
        self._state = None
        self._pending.clear()

    def set_callbacks(  # noqa: PLR0913 — each is a callback
        self,
        *,
        backend: Backend | None = None,
        on_skill_complete: Callable[[str], object] | None = None,
        on_skill_failed: Callable[[str], object] | None = None,
        on_add: Callable[[str], object] | None = None,
        on_retrain: Callable[[str], object] | None = None,
        on_tick: Callable[[], object] | None = None,
        more: Callable[[], bool] | None = None,
    ) -> None:
        """Set the backend and the callbacks; later calls add to earlier ones.

        Callbacks are called with the skill's name, after the state is saved, and may add skills.
        They are not called again after a crash: look at `state`. One that raises an error that
        malformed data can raise (`errors.SKILL_ERRORS`) is logged with its traceback and the others
        go on; it is called again if a full disk or the like was the reason. Any other exception is
        a bug and ends the daemon.

        `on_add` is called with the name of a skill that a user asks to add to the graph,
        `on_retrain` with that of one to train under its new text, both perhaps twice. An error of
        flowrl's is the request's refusal. `on_tick` is called at the beginning of each tick, and
        `more` by `run` after it: while that returns True, requests to add skills are waited for.
        """
        of_text = {Verb.ADD: on_add, Verb.RETRAIN: on_retrain}
        self._on_text |= {verb: call for verb, call in of_text.items() if call}
        self._on_tick, self._more = on_tick or self._on_tick, more or self._more
        if backend is not None:
            self._executor = CommandExecutor(self.launcher, backend, self._limits, self.disk)
        given = {Completed: on_skill_complete, Failed: on_skill_failed}
        self._callbacks |= {kind: call for kind, call in given.items() if call}

    def add_skill(
        self,
        skill_name: str,
        skill_data: Skill | Mapping[str, Any] | None = None,
        dependency_skill_names: Collection[str] = (),
        *,
        priority: int = 0,
    ) -> None:
        """Add a skill; the same skill with the same dependencies may be added again.

        `skill_data` is as in `skill_from_data`; it is checked here and kept in `skills`, where a
        backend may read it. With None or {} the backend knows the skill by its name. A higher
        `priority` starts sooner.

        Raises:
          SkillError: the skill's data is malformed, or the syntax of its code is refused.
          GraphError: a dependency is unknown, or the skill is there with other dependencies.
          NameRefusedError: the name cannot be used, or shares its folder name with another's.
        """
        name = display_name(skill_name)
        skill = _skill_of(name, skill_data) if skill_data else None
        needs = tuple(dict.fromkeys(map(display_name, dependency_skill_names)))
        entry = self.state.entries.get(name)
        if entry is None:
            self.add_skills([Entry(skill=name, needs=needs, priority=priority)])
        elif set(entry.needs) != set(needs):
            raise GraphError(
                f"{name!r} is there with the needs {list(entry.needs)}, not {list(needs)}; give "
                "the changed skill another name, or use another --graph_path"
            )
        if skill is not None:
            self.skills[name] = skill

    def add_skills(self, skills: Collection[Entry]) -> None:
        """Add all of the skills or none, in any order; raises as `add_skill` does."""
        self._apply(events.SkillsAdded(tuple(skills)))

    def ask(self, skill_name: str, verb: Verb, **facts: Any) -> None:
        """Change a skill as `events.Asked` says; its `facts` are the fields of that.

        GraphError: there is no such skill.
        """
        if skill_name not in self.state.entries:
            raise GraphError(f"there is no skill {skill_name!r}; add it first")
        self._apply(events.Asked(skill_name, verb, **facts))

    def tick(self, now: datetime | None = None) -> None:
        """Apply requests and ended runs, then carry out commands until none is left."""
        now = self._last_tick = now or self._clock()
        before, executor = self.state.responses, self._started_executor()
        executor.stop_is_owed = False
        self.check_lock()
        self._on_tick()
        self.save()  # in case the disk was full before
        self.disk.check()
        taken = (self._with_text_taken(request) for request in self.inbox.take())
        requests = [request for request in taken if request]
        ended = [event for entry, _ in self.state.launched() for event in executor.poll_run(entry)]
        self._step([*requests, *ended], now, launching=self.disk.ok)
        log_responses(before, self.state.responses)
        if requests and self.save():
            self.inbox.done(requests)
        unreported, self._unreported = self._unreported, []
        self._report_ends(unreported)
        while self.disk.ok and self._pending and self.save():
            received = self._carry_out(self._pending.popleft())
            if received or not self._pending:  # the last step starts what the callbacks have added
                merged = any(isinstance(event, events.MergeDone) for event in received)
                self._step(received, now, launching=self.disk.ok and not merged)
        self.save()
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
        limits = (self._limits.seconds_left(handle) for handle in handles)
        most = math.inf if self.disk.ok and not self._unreported else PROBE_SECONDS
        if self._started_executor().stop_is_owed or self._more_may_come:
            most = _LOOK_SECONDS
        until = time.monotonic() + max(0.0, min(seconds, most, *limits))
        while (left := until - time.monotonic()) > 0 and not self.inbox.waiting:
            if self.launcher.wait(handles, timeout_seconds=min(left, _LOOK_SECONDS)):
                return

    def run(self) -> SchedulerState:
        """Tick until every skill is settled, or a user has stopped the daemon."""
        self._clear_sessions()
        while True:
            self.tick()
            self._more_may_come = self._more()
            done = (self.state.settled and not self._more_may_come) or self.state.stop_is_due
            if done and not self._pending and not self._unreported and self.save():
                if self.state.stop_mode:
                    self.stopped_on_request = True
                    self._apply(events.Stopped())
                self._clear_sessions()
                return self.state
            self.wait()

    def when_there_is_room(self, work: Callable[[], object]) -> None:
        """Call `work`, again every few seconds while the disk is full."""
        while True:
            try:
                work()
                return
            except (FlowrlError, OSError) as error:
                if classify_io_error(error) != "disk":
                    raise
                self.disk.report(error)
            time.sleep(PROBE_SECONDS)

    def _clear_sessions(self) -> None:
        """Close the sessions of completed skills: runs that ended unwatched may have left some."""
        done = [
            self.graph_paths.run(entry.expert, entry.skill).folder.resolve()
            for entry in self.state.entries.values()
            if isinstance(entry.status, Completed) and entry.expert is not None
        ]
        try:
            self.launcher.clear(self.graph_paths.training_runs.resolve(), done)
        except (FlowrlError, OSError) as error:
            logger.warning("sessions of ended runs may stay: %s", format_error(error))

    def _with_text_taken(self, request: ControlRequest) -> ControlRequest | None:
        """Take up the text of a skill to add or retrain; returns the request, refused on an error.

        None while the machine cannot do it, as on a full disk: the request waits in its folder.
        """
        verb, entry = request.verb, self.state.entries.get(request.skill or "")
        if request.refusal or not request.skill or not (verb is Verb.ADD or verb is Verb.RETRAIN):
            return request
        if verb is Verb.RETRAIN and (entry is None or why_not(verb, entry.status.kind)):
            return request  # the step refuses it
        if not self.disk.ok:
            return None
        try:
            if (take := self._on_text.get(verb)) is None:
                raise GraphError("this scheduler has a fixed set of skills")
            take(request.skill)
        except (FlowrlError, OSError) as error:
            if not is_transient(error):
                return replace(request, refusal=format_error(error))
            self.disk.report(error)
            logger.warning("%s: not taken up yet: %s", request.skill, format_error(error))
            return None
        return request

    def _apply(self, event: Event) -> None:
        """Apply one event between two ticks; nothing is started before the next one."""
        self._step([event], self._clock(), launching=False)
        self.save()

    def _step(self, received: Iterable[Event], now: datetime, *, launching: bool) -> None:
        """Step once; the commands that follow wait for the state to be saved."""
        self._state, commands = step(
            self.state,
            [cleaned(event, self._secrets) for event in received],
            now,
            self.schedule,
            devices=self.devices,
            launching=launching,
        )
        self._pending.extend(commands)

    def _carry_out(self, command: Command) -> Collection[Event]:
        """Carry out a command; returns what came of it."""
        self.check_lock()
        if isinstance(command, StatusChange):
            log_change(self.graph_paths.events, command, self._clock())
            self._report_ends([command.entry])
            return ()
        status = self.state.entries[command.request.skill].status
        return self._started_executor().carry_out(command, status)

    def _report_ends(self, entries: Iterable[Entry]) -> None:
        """Call the callbacks of ends; one that met a full disk is called again at the next tick."""
        for entry in entries:
            callback = self._callbacks.get(type(entry.status))
            try:
                if callback:
                    callback(entry.skill)
            except SKILL_ERRORS as error:
                logger.error(
                    "%s: its callback has failed: %s",
                    entry.skill,
                    format_error(error),
                    exc_info=error,
                )
                if is_transient(error):
                    self._unreported.append(entry)

    def _started_executor(self) -> CommandExecutor:
        if self._executor is None:
            raise ConfigError("there is no backend; call set_callbacks(backend=…) first")
        return self._executor


def _limits_of(schedule: ScheduleConfig) -> RunLimits:
    return RunLimits(
        silent_seconds=schedule.stall_timeout,
        run_seconds=schedule.run_timeout,
        look_seconds=schedule.scheduler_poll_interval + _TICK_SECONDS,
    )


def _skill_of(name: str, data: Skill | Mapping[str, Any]) -> Skill:
    """The skill that `data` describes; SkillError if that is malformed, or another skill."""
    skill = data if isinstance(data, Skill) else skill_from_data(name, data)
    if skill.name != name:
        raise SkillError(f"skill {name!r}: the data is that of {skill.name!r}; add it by its name")
    return skill
