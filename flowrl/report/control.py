"""`flowrl retry`, `pause`, `resume`, `cancel`, `priority`, `stop`: requests and their answers."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from flowrl.errors import EXIT_BUSY, ConfigError, GraphError
from flowrl.parallel import requests
from flowrl.parallel.asks import FITS, MOST_PRIORITY, Answer, Verb, unfit
from flowrl.parallel.claim import daemon_of
from flowrl.paths import GraphPaths
from flowrl.report.snapshot import SkillRow, find_row, read_answers, read_rows

_LOOK_SECONDS = 0.1
_RETRIED = frozenset({"failed", "held"})
_SAYS = {
    Verb.RETRY: "{} will be tried again",
    Verb.PAUSE: "{} will pause",
    Verb.RESUME: "{} will go on",
    Verb.CANCEL: "{} will be cancelled",
    Verb.PRIORITY: "{} will have its new priority",
    Verb.STOP: "it will start nothing new, merge what is running, and end",
    Verb.STOP_NOW: "its runs will save what they have, and it will end",
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a user asks; without a skill, of all of them or of the scheduler."""

    verb: Verb
    skill: str | None = None
    number: int = 0


def one_or_all(skill: str, *, every: bool) -> str | None:
    """The one skill that was named, or None for all.

    Raises:
      ConfigError: neither is said, or both are.
    """
    if every == bool(skill):
        raise ConfigError("name one skill, or say --all")
    return skill or None


def steer(graph_path: Path, asked: Asked, *, wait_seconds: float, as_json: bool) -> int:
    """Leave a request, wait for its answer if that is wanted, and say what came of it.

    Raises:
      GraphError: there is no such skill, or its status does not admit it.
    """
    layout = GraphPaths(graph_path)
    rows = read_rows(layout)
    skill = None
    if asked.skill is not None:
        row = find_row(rows, asked.skill, graph_path)
        _check(asked, row)
        skill = row.skill
    if abs(asked.number) > MOST_PRIORITY:
        raise ConfigError(f"priority {asked.number} must lie within ±{MOST_PRIORITY}")
    name = requests.ask(layout, asked.verb, skill, number=asked.number)
    daemon = daemon_of(layout.daemon_lock)
    answer = _answer(layout, name, wait_seconds)
    if as_json:
        facts = {"id": name, **asdict(asked), "skill": skill, "daemon": daemon}
        facts["outcome"] = answer.outcome if answer else None
        sys.stdout.write(json.dumps(facts) + "\n")
    else:
        what = _SAYS[asked.verb].format(skill or "every skill that it fits")
        said = f"{what}: {answer.outcome}" if answer else f"{what}, {_by(graph_path, daemon)}"
        sys.stdout.write(f"{said}\n")
    if answer is None:
        return EXIT_BUSY if wait_seconds else 0
    return 1 if answer.refused else 0


def _check(asked: Asked, row: SkillRow) -> None:
    if asked.verb is Verb.RETRY and row.status not in _RETRIED:
        raise GraphError(f"{row.skill} is {row.status}; only failed and held skills can be retried")
    why_not = unfit(asked.verb, row.status) if asked.verb in FITS else ""
    if why_not:
        raise GraphError(f"{row.skill} cannot be asked to {asked.verb.value}: {why_not}")


def _answer(layout: GraphPaths, name: str, wait_seconds: float) -> Answer | None:
    until = time.monotonic() + wait_seconds
    while wait_seconds:
        for answer in read_answers(layout):
            if answer.id == name:
                return answer
        if time.monotonic() > until:
            return None
        time.sleep(_LOOK_SECONDS)
    return None


def _by(graph_path: Path, daemon: str | None) -> str:
    if daemon:
        return f"by the scheduler of {graph_path} ({daemon})"
    return (
        f"by the scheduler of {graph_path}; none runs now, so it is done when you start "
        f"python -m flowrl.bottomup_parallel --graph_path {graph_path}"
    )
