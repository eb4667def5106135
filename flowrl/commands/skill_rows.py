"""What a graph's folder says about every skill, read from its files alone."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillRow:
    """One skill as `flowrl status` shows it; None where there is nothing to say."""

    skill: str
    status: str
    expert: int | None
    attempt: int | None
    session: str | None
    device: str | None
    phase: str | None  # of a running trainer: compiling, training, saving
    steps_per_second: float | None
    success_rate: float | None  # of the plan's last step
    step_success: tuple[float, ...]
    frames: int | None
    total_frames: int | None
    eta_seconds: float | None
    seconds: float | None  # since the run began, or that it took
    ended_at: str | None  # when it was completed, failed or held; ISO 8601 in UTC
    waits_for: tuple[str, ...]
    waits: str  # for what else than skills
    why: str
    log: tuple[str, ...]  # the last lines of a failed skill's training log


def read_rows(layout: GraphPaths) -> list[SkillRow]:
    """Every skill of the graph, in the order in which they were added.

    Raises:
      FileRefusedError: the folder holds no readable scheduler_state.json.
    """
    if not layout.scheduler_state.is_file():
        raise FileRefusedError(
            f"{layout.root} is no graph: it has no scheduler_state.json; name the folder that "
            "--graph_path named, or start python -m flowrl.bottomup_parallel"
        )
    document = StateFile(layout.scheduler_state).load_document()
    try:
        return [_row(layout, facts) for facts in document["skills"]]
    except (KeyError, TypeError, ValueError) as error:
        raise FileRefusedError(
            f"{layout.scheduler_state} is malformed ({type(error).__name__}: {error}); "
            "restore it from a copy"
        ) from error


def read_stop_mode(layout: GraphPaths) -> str:
    """Return how a user stops the scheduler, in words; "" when nobody does."""
    try:
        return _STOP_MODES[StopMode(StateFile(layout.scheduler_state).load_document()["stop_mode"])]
    except (KeyError, TypeError, ValueError) as error:
        raise FileRefusedError(f"{layout.scheduler_state} is malformed: {error}") from error


def find_row(rows: Sequence[SkillRow], wanted: str, graph: Path) -> SkillRow:
    """The row of a skill, by its name, its machine name or its expert number.

    Raises:
      GraphError: there is no such skill; says which there are.
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
    """Whether nothing will move any more by itself."""
    return all(row.status in ENDED for row in rows)


def _row(layout: GraphPaths, facts: Mapping[str, Any]) -> SkillRow:
    progress = _progress(layout, facts) if facts["status"] == "running" else None
    steps = progress.step_success if progress else ()
    success = steps[-1] if steps else facts.get("success_rate")
    return SkillRow(
        skill=facts["skill"],
        status=facts["status"],
        expert=facts["expert"],
        attempt=facts["attempt"],
        session=facts.get("session"),
        device=facts.get("device"),
        phase=progress.phase if progress else None,
        steps_per_second=progress.steps_per_second if progress else None,
        success_rate=success,
        step_success=steps,
        frames=progress.frames if progress else facts.get("frames"),
        total_frames=progress.total_frames if progress else None,
        eta_seconds=progress.eta_seconds if progress else None,
        seconds=_seconds(facts),
        ended_at=facts.get("at"),
        waits_for=tuple(facts.get("blocked_by") or facts["waits_for"]),
        waits=_waits(facts),
        why=_STOP_REASONS.get(facts.get("stop_reason", ""), "") or facts.get("why") or "",
        log=tuple(facts.get("log", ())),
    )


def _waits(facts: Mapping[str, Any]) -> str:
    """For what a skill waits that is no skill: a slot, or a time."""
    if facts["status"] not in ("waiting", "merging") or facts["waits_for"]:
        return ""
    due = facts.get("not_before")
    if due is not None and (when := datetime.fromisoformat(due)) > datetime.now(UTC):
        return f"its next try at {when:%H:%M:%S} UTC"
    return "a free slot" if facts["status"] == "waiting" else ""


def _progress(layout: GraphPaths, facts: Mapping[str, Any]) -> runs.Progress | None:
    """The trainer's newest figures, unless they are another run's or unreadable just now."""
    try:
        progress = runs.read_progress(layout.run(facts["expert"], facts["skill"]))
    except FileRefusedError:
        return None
    return progress if progress and progress.run_id == facts["run_id"] else None


def _seconds(facts: Mapping[str, Any]) -> float | None:
    if "wall_seconds" in facts:
        return facts["wall_seconds"]
    if facts["status"] == "running":
        return (datetime.now(UTC) - datetime.fromisoformat(facts["since"])).total_seconds()
    return None
