"""The rows of `flowrl status`, read from the files of a graph's folder alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flowrl import runs
from flowrl.errors import FileRefusedError, GraphError
from flowrl.parallel.events import StopMode
from flowrl.parallel.state_file import StateFile
from flowrl.paths import GraphPaths, slug

_STOP_MODES = {
    StopMode.NONE: "",
    StopMode.STOP: "stopping on request: nothing new is started, the scheduler ends with its runs",
    StopMode.STOP_NOW: "stopping on request: runs save what they have, then the scheduler ends",
}
_STOP_REASONS = {
    "pause": "asked to pause",
    "cancel": "asked to end: cancelled",
    "hung": "asked to end: no progress for too long",
    "overdue": "asked to end: longer than --run_timeout",
}
ENDED = frozenset({"completed", "failed", "held", "blocked"})


_OF_STATE = ("skill", "status", "expert", "attempt", "session", "device", "frames", "success_rate")
_OF_TRAINER = (
    "phase", "steps_per_second", "step_success", "frames", "total_frames", "eta_seconds",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillRow:
    """One skill as `flowrl status` shows it; None stands for a value that does not apply."""

    skill: str
    status: str
    expert: int | None
    attempt: int | None
    session: str | None = None
    device: str | None = None
    phase: str | None = None  # of a running trainer: compiling, training, saving
    steps_per_second: float | None = None
    success_rate: float | None = None  # of the plan's last step
    step_success: tuple[float, ...] = ()
    frames: int | None = None
    total_frames: int | None = None
    eta_seconds: float | None = None
    seconds: float | None = None  # since the run began, or that it took
    ended_at: str | None = None  # when it was completed, failed or held; ISO 8601 in UTC
    waits_for: tuple[str, ...] = ()
    waits: str = ""  # a slot or a time that it waits for
    why: str = ""
    log: tuple[str, ...] = ()  # the last lines of a failed skill's training log


def read_rows(paths: GraphPaths) -> list[SkillRow]:
    """Return every skill of the graph, in the order in which they were added.

    Raises:
      FileRefusedError: the folder holds no readable scheduler_state.json.
    """
    if not paths.scheduler_state.is_file():
        raise FileRefusedError(
            f"{paths.root} is no graph: it has no scheduler_state.json; name the folder that "
            "--graph_path named, or start python -m flowrl.bottomup_parallel"
        )
    lines = StateFile(paths.scheduler_state).load_document()["skills"]
    return [_row(paths, line) for line in lines]


def read_stop_mode(paths: GraphPaths) -> str:
    """Return how a user stops the scheduler, in words; "" when nobody does."""
    return _STOP_MODES[StateFile(paths.scheduler_state).load_document()["stop_mode"]]


def find_row(rows: Sequence[SkillRow], wanted: str, graph: Path) -> SkillRow:
    """Return the row of a skill, found by its name, its machine name or its expert number.

    Raises:
      GraphError: there is no such skill; the message lists all skills.
    """
    word = wanted.strip().casefold()
    for row in rows:
        if word in (row.skill.casefold(), slug(row.skill).casefold()):
            return row
    for row in rows:
        if row.expert is not None and word == str(row.expert):
            return row
    known = ", ".join(row.skill for row in rows) or "none yet"
    raise GraphError(f"{graph} has no skill {wanted!r}; it has: {known}")


def all_ended(rows: Sequence[SkillRow]) -> bool:
    """Return whether no skill changes any more by itself."""
    return all(row.status in ENDED for row in rows)


def _row(paths: GraphPaths, line: Mapping[str, Any]) -> SkillRow:
    facts = {name: line[name] for name in _OF_STATE if name in line}
    seconds = line.get("wall_seconds")
    if line["status"] == "running":
        seconds = (datetime.now(UTC) - datetime.fromisoformat(line["since"])).total_seconds()
        progress = _progress(paths, line)
        if progress is not None:
            facts |= {name: getattr(progress, name) for name in _OF_TRAINER}
            facts["success_rate"] = progress.step_success[-1] if progress.step_success else None
    return SkillRow(
        **facts,
        seconds=seconds,
        ended_at=line.get("at"),
        waits_for=tuple(line.get("blocked_by") or line["waits_for"]),
        waits=_waits(line),
        why=_STOP_REASONS.get(line.get("stop_reason", ""), "") or line.get("why") or "",
        log=tuple(line.get("log", ())),
    )


def _waits(line: Mapping[str, Any]) -> str:
    """Return the slot or the time that a skill waits for, "" if it waits for skills or nothing."""
    if line["status"] not in ("waiting", "merging") or line["waits_for"]:
        return ""
    due = line.get("not_before")
    if due is not None and (when := datetime.fromisoformat(due)) > datetime.now(UTC):
        return f"its next try at {when:%H:%M:%S} UTC"
    return "a free slot" if line["status"] == "waiting" else ""


def _progress(paths: GraphPaths, line: Mapping[str, Any]) -> runs.Progress | None:
    """Return the trainer's newest figures; None if they are another run's or cannot be read."""
    try:
        progress = runs.read_progress(paths.run(line["expert"], line["skill"]))
    except FileRefusedError:
        return None
    return progress if progress and progress.run_id == line["run_id"] else None
