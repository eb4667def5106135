"""The daemon's loop: hear of ended runs, step, save, act, until nothing moves.

All that is decided is decided in `state.step`; here is the I/O around it. A command is carried out
once the state is saved that it follows from, unless the folders remember it, too (`book`), and may
be carried out twice, so a daemon killed at any point goes on where it was when it is started again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict, Unpack

from flowrl.errors import ConfigError, GraphError, SkillError
from flowrl.experts import rooms
from flowrl.launchers.job import Launcher
from flowrl.launchers.local import LocalLauncher
from flowrl.parallel import signals
from flowrl.parallel.acts import Acts
from flowrl.parallel.asks import PAUSED, Wish
from flowrl.parallel.book import Book
from flowrl.parallel.claim import Claim
from flowrl.parallel.heartbeat import Watch
from flowrl.parallel.listeners import Callbacks, tell_end
from flowrl.parallel.requests import Inbox, log_answers
from flowrl.parallel.room import PROBE_SECONDS, Room
from flowrl.parallel.settings import Settings, SettingsDict
from flowrl.parallel.signals import Announce, Command, Event, NewSkill
from flowrl.parallel.state import SchedulerState, next_due
from flowrl.parallel.state_file import StateFile
from flowrl.parallel.status import Entry, Status
from flowrl.parallel.story import Story
from flowrl.parallel.workshop import CallbackWorkshop
from flowrl.paths import GraphPaths, display_name
from flowrl.skills.skill import Skill, skill_from_data

_LOOK_SECONDS = 1.0  # between looks at requests/ while nothing happens


class Known(TypedDict, total=False):
    """What `SkillScheduler.add_skill` may be told besides: see `signals.NewSkill`."""

    priority: int
    expert: int | None
    status: Status


class SkillScheduler:
    """Trains skills side by side as soon as their needs are trained, and merges each once."""

    def __init__(
        self,
        base_dir: Path | str,
        *,
        launcher: Launcher | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        **settings: Unpack[SettingsDict],
    ) -> None:
        """Schedule in the graph's folder `base_dir`; the settings are those of `Settings`."""
        self.layout = GraphPaths(Path(base_dir))
        self.settings = Settings(**settings)
        self.skills: dict[str, Skill] = {}  # what add_skill was told they are; not saved
        self._launcher = launcher or LocalLauncher()
        self._clock = clock
        self._claim = Claim(self.layout.daemon_lock)
        self._story = Story(self.layout.events)
        self._inbox = Inbox(self.layout)
        self._room = Room(self.layout)
        self._watch = Watch(
            silent_seconds=self.settings.hung_seconds, run_seconds=self.settings.run_seconds
        )
        self._callbacks: Callbacks = {}
        self._loaded: Book | None = None
        self._crew: Acts | None = None
        self._last_beat = self._clock()
        self._stopping = False
        self._untold: list[Entry] = []  # ends that could not be told for lack of room
        self.stopped_by_wish = False  # `run` has ended because a user asked for it
        self._cancelling = False

    def __enter__(self) -> SkillScheduler:
        self.load()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def state(self) -> SchedulerState:
        """What the scheduler knows; the first look claims the folder and loads it."""
        return self.load().state

    def load(self) -> Book:
        """Claim the folder and load its state; later calls change nothing.

        Raises:
          BusyError: another daemon has the folder; the message names it.
          FileRefusedError: scheduler_state.json is damaged or of another version.
        """
        if self._loaded is None:
            rooms.refuse_moved(self.layout)
            self._claim.acquire()
            try:
                file = StateFile(self.layout.scheduler_state)
                jitter, secrets = self.settings.retry_jitter, self.settings.secrets()
                rules = self.settings.rules()
                self._loaded = Book(file, rules, self._room, most_jitter=jitter, secrets=secrets)
            except BaseException:
                self._claim.release()
                raise
            self._tell(signals.Restarted())
        return self._loaded

    def save(self) -> None:
        """Write scheduler_state.json if something has changed; a full disk is logged."""
        self.load().saved()

    def close(self) -> None:
        """Give the folder back; runs go on and are adopted by the next daemon."""
        self._launcher.close()
        self._claim.release()
        self._loaded = None

    def set_callbacks(self, **callbacks: Unpack[Callbacks]) -> None:
        """Say who makes and merges runs, and whom to tell; later calls add to earlier ones."""
        self._callbacks.update(callbacks)
        workshop = self._callbacks.get("workshop")
        prepare, process = self._callbacks.get("prepare"), self._callbacks.get("process")
        if workshop is None and prepare is not None and process is not None:
            workshop = CallbackWorkshop(prepare, process)
        if workshop is not None:
            self._crew = Acts(self._launcher, workshop, self._watch, self._room)

    def add_skill(
        self,
        skill_name: str,
        skill_data: Skill | Mapping[str, Any] | None = None,
        dependency_skill_names: Collection[str] = (),
        **known: Unpack[Known],
    ) -> None:
        """Add a skill; the same skill with the same dependencies may be added again.

        `skill_data` says what the skill is, as in `skill_from_data`; it is checked here and kept
        in `skills`, where a workshop may read it. None or {} says nothing: the workshop knows.
        `priority` (higher starts sooner), and `expert` and `status` of a skill that was trained
        without this state, may be said by keyword.

        Raises:
          SkillError: the skill's data is malformed, or its code does not pass the gate.
          GraphError: a dependency is unknown, or the skill is there with other dependencies.
          NameRefusedError: the name cannot be used, or shares its folder name with another's.
        """
        name = display_name(skill_name)
        skill = _skill_of(name, skill_data)
        needs = tuple(dict.fromkeys(map(display_name, dependency_skill_names)))
        entry = self.state.entries.get(name)
        if entry is None:
            self.add_skills([NewSkill(skill=name, needs=needs, **known)])
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
        self._tell(signals.SkillsAdded(tuple(skills)))

    def assign_expert(self, skill_name: str) -> int:
        """The skill's expert number, given now or before; training gives one by itself."""
        self._known(skill_name)
        self._tell(signals.ExpertWanted(skill_name))
        expert = self.state.entries[skill_name].expert
        assert expert is not None
        return expert

    def retry(self, skill_name: str) -> None:
        """Let a failed or held skill train again, or a waiting one start at once."""
        self._known(skill_name)
        self._tell(signals.Retry(skill_name))

    def hold(self, skill_name: str, why: str = PAUSED) -> None:
        """Pause a skill until it is retried; a running one saves what it has and ends."""
        self._known(skill_name)
        self._tell(signals.Hold(skill_name, why))

    def tick(self, now: datetime | None = None) -> None:
        """One beat: hear of requests and ended runs, step, save and act until all is still."""
        now = self._last_beat = now or self._clock()
        book = self.load()
        self._claim.check()
        book.saved()  # what there was no room for before
        self._room.look()
        requests, before = self._inbox.take(), book.state.answers
        heard = [event for entry, _ in self.state.launched() for event in self._acts.heard(entry)]
        self._book_tell([*requests, *heard], now)
        log_answers(before, book.state.answers)
        if requests and book.saved():
            self._inbox.done()
        untold, self._untold = self._untold, []
        self._tell_ends(untold)
        while self._room.free and (command := book.next_command()) is not None:
            self._book_tell(self._act(book, command, now), now)
        book.saved()
        self._acts.tidy()
        for entry, _ in self.state.launched() if self._ending_runs else ():
            self._acts.stop(entry)

    def wait(self) -> None:
        """Sleep until a run may have ended, a request comes, a wait is over, or poll_interval."""
        seconds = self.settings.poll_interval
        due = next_due(self.state, after=self._last_beat)
        if due is not None:
            seconds = min(seconds, (due - self._clock()).total_seconds())
        handles = [handle for _, handle in self.state.launched()]
        left_alive = (self._acts.left_seconds(handle) for handle in handles)
        most = math.inf if self._room.free and not self._untold else PROBE_SECONDS
        until = time.monotonic() + max(0.0, min(seconds, most, *left_alive))
        while (left := until - time.monotonic()) > 0 and not self._inbox.waiting:
            if self._stopping and not self._ending_runs:
                return
            began = time.monotonic()
            self._launcher.wait(handles, timeout_seconds=min(left, _LOOK_SECONDS))
            if time.monotonic() - began < 0.9 * min(left, _LOOK_SECONDS):
                return  # it did not sleep to the end: something has happened

    def run(self, *, stop_when: Callable[[SchedulerState], bool] | None = None) -> SchedulerState:
        """Tick until every skill is settled, or `stop_when` says so, or a stop is asked for."""
        finished = stop_when or (lambda state: state.settled)
        book = self.load()
        while True:
            self.tick()
            if self._stopping and not (self._ending_runs and self.state.launched()):
                return self.state
            done = finished(self.state) or self.state.stop_is_due
            if done and not book.pending and not self._untold and book.saved():
                if self.state.wish:
                    self.stopped_by_wish = True
                    self._tell(signals.Stopped())
                return self.state
            self.wait()

    def stop(self, *, cancel: bool = False) -> None:
        """End `run` soon; runs go on and are adopted later, or, with `cancel`, save and end.

        It may be called from a signal handler or another thread.
        """
        self._cancelling = self._cancelling or cancel
        self._stopping = True

    def _tell(self, event: Event) -> None:
        """Take in one event between two beats; nothing is started before the next one."""
        book = self.load()
        book.tell([event], self._clock(), launching=False)
        book.saved()

    def _book_tell(self, events: Collection[Event], now: datetime) -> None:
        launching = not self._stopping and self._room.free
        self.load().tell(events, now, launching=launching)

    def _act(self, book: Book, command: Command, now: datetime) -> Collection[Event]:
        """Carry out a command; moves that come in a row are told in a row."""
        if isinstance(command, Announce):
            moves = [command, *book.moves_in_a_row()]
            self._story.tell([(move.before, move.entry) for move in moves], now)
            self._tell_ends(move.entry for move in moves)
            return ()
        return self._acts.carry_out(command, self.state.entries[command.task.skill].status)

    def _tell_ends(self, entries: Iterable[Entry]) -> None:
        self._untold += [e for e in entries if not tell_end(self._callbacks, e)]

    @property
    def _ending_runs(self) -> bool:
        """Whether runs are asked to save what they have and end."""
        return self._cancelling or self.state.wish is Wish.STOP_NOW

    @property
    def _acts(self) -> Acts:
        if self._crew is None:
            raise ConfigError("nobody prepares runs; call set_callbacks(workshop=…) first")
        return self._crew

    def _known(self, skill: str) -> None:
        if skill not in self.state.entries:
            raise GraphError(f"there is no skill {skill!r}; add it first")


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
