"""Commands that steer a scheduler from another terminal.

Each leaves a request in the graph's folder, which works while the scheduler is up or down.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from flowrl.parallel.asks import Verb
from flowrl.paths import DEFAULT_GRAPH
from flowrl.report import control


@dataclass(frozen=True, kw_only=True)
class Steering:
    """What all of these commands take."""

    graph_path: Path = DEFAULT_GRAPH
    """Folder of the graph."""
    wait: float = 0.0
    """Seconds to wait for the scheduler's answer; exit code 75 when it has not come by then."""
    json: bool = False
    """Print what was asked and what came of it as JSON."""

    def _steer(self, verb: Verb, skill: str | None = None, *, number: int = 0) -> int:
        asked = control.Asked(verb=verb, skill=skill, number=number)
        return control.steer(self.graph_path, asked, wait_seconds=self.wait, as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class Retry(Steering):
    """Let a failed or held skill train again; works while the daemon is up or down.

    Examples:
      flowrl retry "Collect Iron" --graph-path exp/demo
    """

    skill: tyro.conf.Positional[str]
    """The skill's name, or its expert number."""

    def __call__(self) -> int:
        """Run the command."""
        return self._steer(Verb.RETRY, self.skill)


@dataclass(frozen=True, kw_only=True)
class Pause(Steering):
    """Let a running skill save what it has and end, and keep a waiting one from starting.

    Examples:
      flowrl pause "Collect Iron" --graph-path exp/demo
      flowrl pause --all --graph-path exp/demo --wait 60
    """

    skill: tyro.conf.Positional[str] = ""
    """The skill's name, or its expert number."""
    all: bool = False
    """Every skill that is in the graph now."""

    def __call__(self) -> int:
        """Run the command."""
        return self._steer(Verb.PAUSE, control.one_or_all(self.skill, every=self.all))


@dataclass(frozen=True, kw_only=True)
class Resume(Steering):
    """Let a held skill go on from its checkpoint.

    Examples:
      flowrl resume "Collect Iron" --graph-path exp/demo
      flowrl resume --all --graph-path exp/demo
    """

    skill: tyro.conf.Positional[str] = ""
    """The skill's name, or its expert number."""
    all: bool = False
    """Every skill that was paused on request; it takes a `flowrl stop` back as well."""

    def __call__(self) -> int:
        """Run the command."""
        return self._steer(Verb.RESUME, control.one_or_all(self.skill, every=self.all))


@dataclass(frozen=True, kw_only=True)
class Cancel(Steering):
    """End a skill's run and give the skill up; what needs it is blocked until a retry.

    Examples:
      flowrl cancel "Collect Iron" --graph-path exp/demo
    """

    skill: tyro.conf.Positional[str]
    """The skill's name, or its expert number."""

    def __call__(self) -> int:
        """Run the command."""
        return self._steer(Verb.CANCEL, self.skill)


@dataclass(frozen=True, kw_only=True)
class Priority(Steering):
    """Say how early a skill starts when several could: higher numbers start sooner.

    Examples:
      flowrl priority "Collect Iron" 10 --graph-path exp/demo
    """

    skill: tyro.conf.Positional[str]
    """The skill's name, or its expert number."""
    number: tyro.conf.Positional[int]
    """The new priority; skills have as many as others wait for them."""

    def __call__(self) -> int:
        """Run the command."""
        return self._steer(Verb.PRIORITY, self.skill, number=self.number)


@dataclass(frozen=True, kw_only=True)
class Stop(Steering):
    """Let the scheduler end: it starts nothing new, merges what is running, and ends.

    Examples:
      flowrl stop --graph-path exp/demo
      flowrl stop --now --graph-path exp/demo --wait 60
    """

    now: bool = False
    """Let the runs save what they have and end; the next start goes on with them."""

    def __call__(self) -> int:
        """Run the command."""
        return self._steer(Verb.STOP_NOW if self.now else Verb.STOP)
