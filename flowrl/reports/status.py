"""Status of a graph: rows, document, table and live screen, from its folder's files alone."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flowrl import config as configs
from flowrl import notices, runs
from flowrl.config import BottomUpConfig
from flowrl.console import ERRORS
from flowrl.errors import FileRefusedError, FlowrlError, GraphError, closest
from flowrl.experts.store import ExpertStore
from flowrl.judging.report import read_reports
from flowrl.launchers import process
from flowrl.launchers.run_status import lock_held, read_exit
from flowrl.measures.causes import explanation_of
from flowrl.parallel.events import StopMode
from flowrl.parallel.health import daemon_of, disk_shortage
from flowrl.parallel.state import SchedulerState, StateFile
from flowrl.parallel.status import (
    CANCELLED,
    PAUSED,
    Blocked,
    Completed,
    Entry,
    Failed,
    Held,
    Merging,
    Preparing,
    Running,
    Slotted,
    StopReason,
    Waiting,
    percent,
    ranges,
)
from flowrl.paths import GraphPaths, RunPaths, SweepPaths, printable, refuse_agent, slug
from flowrl.redaction import cleaned
from flowrl.skills.skill import load_library
from flowrl.storage import records

_WATCH_SECONDS = 1.0
WIDTH = 150  # columns in a file or a pipe
_STYLE = {
    "completed": "green",
    "below goal": "yellow",
    "running": "cyan",
    "merging": "cyan",
    "preparing": "cyan",
    "failed": "bold red",
    "cancelled": "red",
    "held": "yellow",
    "blocked": "red",
    "waiting": "dim",
}
_GPU, _WHY = "gpu", "waits for / why"
_LEAST_WHY = 30  # columns
# The least columns of each while its figures change: nothing on the screen moves with them.
_LEAST = {"status": 10, "run frames": 10, "steps/s": 7, "time": 7, _WHY: _LEAST_WHY}
_DROPPED_FIRST = ("attempt", "expert", _GPU, "time", "steps/s", "run frames", "time left at most")
_LEFT_ALIGNED = frozenset({"skill", "status", _GPU, _WHY})
_STOP_MODES = {
    StopMode.NONE: "",
    StopMode.STOP: "stopping on request: nothing new is started, the scheduler ends with its runs",
    StopMode.STOP_NOW: "stopping on request: runs save what they have, then the scheduler ends",
}
_STOP_REASONS = {
    StopReason.PAUSE: "asked to pause",
    StopReason.CANCEL: "asked to end: cancelled",
    StopReason.PRUNE: "asked to end with what it has",
    StopReason.HUNG: "asked to end: no progress for too long",
    StopReason.OVERDUE: "asked to end: longer than --run_timeout",
    StopReason.YIELD: "asked to end: other skills wait for its slot",
}
_PHASES = {"compiling": "its programs to compile; runs of the same sizes load them later"}
ENDED = frozenset(kind.kind for kind in (Completed, Failed, Held, Blocked))
PHASE_ENDED = "ended"  # the phase of a run whose end no scheduler has seen

_OF_TRAINER = (
    "phase", "steps_per_second", "step_success", "frames", "total_frames", "eta_seconds",
)  # fmt: skip


def training_screen(graph_paths: GraphPaths, console: Console = ERRORS) -> Live:
    """A live table below the log on a terminal, elsewhere the table when the block ends."""
    live = console.is_terminal
    now = partial(_now, graph_paths, console)
    return Live(get_renderable=now, console=console, auto_refresh=live, refresh_per_second=1)


def screen(
    graph_paths: GraphPaths, rows: Sequence[SkillRow], *, width: int = WIDTH, logs: bool = True
) -> Group:
    """Return headings, notices, the table, and logs of failed skills, or how to read them."""
    root = printable(str(graph_paths.root))
    warnings = [*filter(None, [_read_stop_mode(graph_paths)]), *_notices(graph_paths).values()]
    if not all_ended(rows) and daemon_of(graph_paths.daemon_lock) is None:
        again = last_command(graph_paths)
        live = any(row.status == Running.kind and row.phase != PHASE_ENDED for row in rows)
        goes_on = "runs go on; " if live else ""
        warnings.append(f"no scheduler: {goes_on}nothing is started or merged until {again}")
    if any(row.status == Held.kind and row.why == PAUSED for row in rows):
        resume = f"to go on with paused skills: flowrl resume {shlex.quote(root)} --all"
        warnings.append(
            f"{resume}, then {last_command(graph_paths)}" if all_ended(rows) else resume
        )
    yellow = [Text(cleaned(text, ()), style="yellow") for text in warnings]  # files may be forged
    failed = [row for row in rows if row.log]
    texts = [
        f"\n{row.skill}, the last lines of its log:\n  " + "\n  ".join(row.log) for row in failed
    ]
    if failed and not logs:
        skill = str(graph_paths.root), failed[0].skill
        words = (printable(shlex.join(["flowrl", word, *skill])) for word in ("logs", "retry"))
        texts = ["\nto read a failed skill's log: {}; to try again: {}".format(*words)]
    heading = Text(f"{root}: {tally(rows)}\n{_totals(graph_paths, rows)}")
    return Group(
        heading, *yellow, "", skill_table(rows, width), *(Text(text, style="dim") for text in texts)
    )


def settings(graph_paths: GraphPaths, rows: Sequence[SkillRow]) -> list[str]:
    """Return a line for each skill's newest run: the settings that are no defaults, and why."""
    lines = []
    begun = [(row, row.expert) for row in rows if row.expert is not None]
    for row, expert in begun:
        for place in (graph_paths.run, graph_paths.archive):
            with suppress(FileRefusedError):
                run = runs.read_run(place(expert, row.skill))
                said = [f"{key} {run.config.get(key)} ({run.origins[key]})" for key in run.origins]
                what = ", ".join(said) or "all settings by default"
                lines.append(printable(f"{row.skill}: {what}"))
                break
    return lines


def skill_table(rows: Sequence[SkillRow], width: int = WIDTH) -> Table:
    """Return a table with one line per skill, without columns that do not fit.

    Once all skills have ended, empty columns are left out, too; `gpu` is so always.
    """
    table = Table(pad_edge=False, box=None, header_style="bold")
    lines = [_cells(row) for row in rows]
    ended, columns = all_ended(rows), lines[0] if lines else ()
    empty = {name for name in columns if not any(str(line[name]) for line in lines)}
    shown = [name for name in columns if name not in empty or not (ended or name == _GPU)]
    least = {} if ended else _LEAST
    sizes = {n: max(len(n), least.get(n, 0), *(len(str(row[n])) for row in lines)) for n in shown}
    needed = {name: size + 2 for name, size in sizes.items()}
    needed[_WHY] = min(needed.get(_WHY, 0), _LEAST_WHY)
    for name in _DROPPED_FIRST:
        if sum(needed.values()) > width and name in shown:
            shown.remove(name)
            del needed[name]
    for name in shown:
        justify = "left" if name in _LEFT_ALIGNED else "right"
        least_width = None if name == _WHY else sizes[name]
        table.add_column(name, justify=justify, no_wrap=name != _WHY, min_width=least_width)
    for line in lines:
        table.add_row(*(line[name] for name in shown))
    return table


def tally(rows: Sequence[SkillRow]) -> str:
    """Return how many skills have which status, in one line."""
    counts = Counter(map(_status_word, rows))
    return ", ".join(f"{count} {status}" for status, count in counts.items()) or "no skills yet"


def _totals(graph_paths: GraphPaths, rows: Sequence[SkillRow]) -> str:
    """Return slots in use, frames in merged experts and free disk space, in one line."""
    used = sum(row.status in (Preparing.kind, Running.kind) for row in rows)
    parts = [
        *([f"slots in use: {used}"] if used else []),
        f"{sum(_merged_frames(graph_paths).values()):,} frames merged",
        f"{shutil.disk_usage(graph_paths.root).free / 1e9:,.1f} GB free",
    ]
    return " · ".join(parts)


def clock(seconds: float | None) -> str:
    """Return seconds as h:mm:ss, and "" for None.

    >>> clock(75.4)
    '0:01:15'
    """
    return "" if seconds is None else str(timedelta(seconds=int(seconds)))


def status_document(graph_paths: GraphPaths) -> dict[str, Any]:
    """Return the status as JSON values, for scripts."""
    state = StateFile(graph_paths.scheduler_state).load()
    rows, experts = read_rows(graph_paths, state), _merged_frames(graph_paths)
    names = [item.name for item in fields(SkillRow)]  # asdict would take as long as all else
    return {
        "graph": str(graph_paths.root),
        "ended": all_ended(rows),
        "scheduler": daemon_of(graph_paths.daemon_lock),
        "stopping": _STOP_MODES[state.stop_mode] if state else "",
        "notices": _notices(graph_paths),
        "judges": _judges(graph_paths),
        "machine": _machine(rows),
        "runs_left": _left(rows),
        "skills": [
            {name: getattr(row, name) for name in names} | {"expert_frames": experts.get(row.skill)}
            for row in rows
        ],
    }


def _judges(graph_paths: GraphPaths) -> list[str]:
    """Return a line for each judge that was measured: how good it is, how often it abstained."""
    try:
        return [one.calibration.line for one in read_reports(graph_paths)]
    except FileRefusedError as error:
        return [str(error)]


def _machine(rows: Sequence[SkillRow]) -> dict[str, Any]:
    """Return what is in use of this machine: of its GPUs by these runs, else by all processes."""
    memory, gpus = psutil.virtual_memory(), len([*Path("/dev").glob("nvidia[0-9]*")])
    return {
        "cpu_load": {"used": round(os.getloadavg()[0], 1), "total": len(os.sched_getaffinity(0))},
        "gpus": {"used": len({name for row in rows for name in row.devices}), "total": gpus},
        "memory_gb": {
            "used": round((memory.total - memory.available) / 1e9, 1),
            "total": round(memory.total / 1e9, 1),
        },
    }


def _left(rows: Sequence[SkillRow]) -> dict[str, Any]:
    """Return the frames and hours that are left at most of the runs under way; None without."""
    frames = [row.total_frames - (row.frames or 0) for row in rows if row.total_frames]
    seconds = [row.eta_seconds for row in rows if row.eta_seconds is not None]
    hours = round(max(seconds) / 3600, 2) if seconds else None
    return {"frames": sum(frames) if frames else None, "hours": hours}


def _now(graph_paths: GraphPaths, console: Console) -> Group:
    end = () if console.is_terminal else ("",)  # rich ends the last line on a terminal alone
    try:
        return Group(
            screen(graph_paths, read_rows(graph_paths), width=console.width, logs=False), *end
        )
    except FileRefusedError:
        return Group("starting …")


def _merged_frames(graph_paths: GraphPaths) -> dict[str, int]:
    """Return, by skill, the steps in which its merged expert acted, in all runs that count."""
    try:
        experts = ExpertStore(graph_paths).manifest().experts.values()
    except FileRefusedError:  # a notice says so
        return {}
    return {version.skill: version.frames for version in experts}


def _notices(graph_paths: GraphPaths) -> dict[str, str]:
    """Return the notices, a full disk (which no notice can be written to), a damaged manifest."""
    texts = dict(notices.read(graph_paths))
    texts.pop("command", None)  # shown only where it is needed
    if notices.STAGES in texts and daemon_of(graph_paths.stages_lock) is None:
        del texts[notices.STAGES]  # its orchestrator was killed, or a stage ended badly
    for path in sorted(graph_paths.sweeps.glob("*/sweep.json")):
        sweep, name = GraphPaths(path.parent), printable(path.parent.name)
        said = notices.read(sweep).get(notices.SWEEP, "no trial has ended yet")
        going = " is under way" if daemon_of(sweep.daemon_lock) else ""
        texts[f"sweep {name}"] = f"sweep {name}{going}: {said}"
    if "paused" not in texts and (shortage := disk_shortage(graph_paths)):
        texts["paused"] = f"paused ({shortage[0]}): {shortage[1]}"
    try:
        ExpertStore(graph_paths).manifest()
    except FileRefusedError as error:
        texts["manifest"] = f"the graph cannot go on: {error}"
    return texts


def _cells(row: SkillRow) -> dict[str, Text | str]:
    shown = row.phase if row.status == Running.kind and row.phase else _status_word(row)
    reasons = [", ".join(row.waits_for), row.waits, row.why]
    return {
        "skill": Text(row.skill),
        "status": Text(shown, style=_STYLE.get(shown, _STYLE.get(row.status, ""))),
        "expert": "" if row.expert is None else str(row.expert),
        "attempt": "" if row.attempt is None else str(row.attempt),
        _GPU: ranges(row.devices),
        "run frames": "" if row.frames is None else f"{row.frames:,}",
        "steps/s": "" if row.steps_per_second is None else f"{row.steps_per_second:,.0f}",
        "success": "" if row.success_rate is None else percent(row.success_rate),
        "time": clock(row.seconds),
        "time left at most": clock(row.eta_seconds),
        _WHY: Text("; ".join(filter(None, reasons))),
    }


# The rows


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillRow:
    """One skill as `flowrl status` shows it; None is for a number that does not apply."""

    skill: str
    status: str
    expert: int | None
    attempt: int | None
    session: str = ""
    devices: tuple[str, ...] = ()
    phase: str = ""  # of a run: compiling, training, saving, ended
    steps_per_second: float | None = None
    success_rate: float | None = None  # of the plan's last step
    step_success: tuple[float, ...] = ()
    frames: int | None = None  # environment steps of its run
    total_frames: int = 0
    eta_seconds: float | None = None
    seconds: float | None = None  # since the run began, or that it took
    goal: float = 0.0  # --success_state_rate of a completed skill's run
    below_goal: bool = False  # completed, with less success than that
    ended_at: str = ""  # when it was completed, failed or held; ISO 8601 in UTC
    needs: tuple[str, ...] = ()
    waits_for: tuple[str, ...] = ()  # those that are not completed, or what blocks it
    waits: str = ""  # a slot or a time that it waits for
    why: str = ""
    log: tuple[str, ...] = ()  # the last lines of a failed skill's training log


def read_rows(graph_paths: GraphPaths, state: SchedulerState | None = None) -> list[SkillRow]:
    """Return every skill in the order of adding; FileRefusedError if the folder is no graph.

    The state is read unless it is given.
    """
    state = state or StateFile(graph_paths.scheduler_state).load()
    if state is None:
        root = graph_paths.root
        begun = any(graph_paths.sweeps.glob("*/sweep.json"))  # nothing but trials was trained yet
        if begun or SweepPaths(root).sweep_json.exists():  # not begun, or by Ray
            return []
        if graph_paths.checkpoints.is_dir():
            raise FileRefusedError(
                f"{root} has lost its scheduler_state.json; flowrl recover "
                f"{shlex.quote(str(root))} makes it anew of checkpoints/ and the runs"
            )
        refuse_agent(root)
        what = f"{shlex.quote(str(root))} is no graph: it has no scheduler_state.json"
        raise FileRefusedError(
            f"{what}; name the folder of a graph (GRAPH comes first), or let flowrl train make one"
        )
    return [_row(graph_paths, state, entry) for entry in state.entries.values()]


def _read_stop_mode(graph_paths: GraphPaths) -> str:
    """Return how a user stops the scheduler, in words; "" when nobody does."""
    state = StateFile(graph_paths.scheduler_state).load()
    return _STOP_MODES[state.stop_mode] if state else ""


def last_command(graph_paths: GraphPaths) -> str:
    """Return the command of the last start, to be given again: its flags say what is trained."""
    command = notices.find(graph_paths, "command") or "the same command as before"
    return printable(command.replace("GRAPH", shlex.quote(str(graph_paths.root)), 1))


def find_row(rows: Sequence[SkillRow], wanted: str, graph: Path) -> SkillRow:
    """Return a skill's row by name, machine name or number; GraphError lists all skills."""
    word = wanted.strip().casefold()
    for row in rows:
        if word in (row.skill.casefold(), slug(row.skill).casefold()):
            return row
    for row in rows:
        if row.expert is not None and word == str(row.expert):
            return row
    library = _of_library(GraphPaths(graph))
    for name in library:
        if word in (name.casefold(), slug(name).casefold()):
            begin = GraphPaths(graph).command("train", "--target_skill", name)
            raise GraphError(f"{name} has not begun in {graph}; {begin} begins it")
    known = ", ".join(row.skill for row in rows) or "none yet"
    near = closest(wanted, [row.skill for row in rows]) or closest(wanted, library)
    raise GraphError(f"{graph} has no skill {wanted!r}{near}; it has: {known}")


def _of_library(graph_paths: GraphPaths) -> Iterable[str]:
    """Return the skills that a graph could train, () where its game or its folder is not known."""
    if not graph_paths.config_json.exists():
        return ()
    try:
        recorded = records.read_document(graph_paths.config_json)
        config = configs.from_json(BottomUpConfig, recorded)
        own = config.graph
        return load_library(config.ppo.env_name, own.skills_dir, trust=own.trust_skills)
    except FlowrlError:  # the answer goes without it
        return ()


def all_ended(rows: Sequence[SkillRow]) -> bool:
    """Return whether no skill changes any more by itself."""
    return all(row.status in ENDED for row in rows)


def _status_word(row: SkillRow) -> str:
    if row.below_goal:
        return "below goal"
    return "cancelled" if row.status == Failed.kind and row.why == CANCELLED else row.status


def _row(graph_paths: GraphPaths, state: SchedulerState, entry: Entry) -> SkillRow:
    status = cleaned(entry.status, ())  # its texts may come from a trainer's log
    row = SkillRow(
        skill=entry.skill,
        status=status.kind,
        expert=entry.expert,
        attempt=status.attempt,
        session=entry.session or "",
        devices=status.devices if isinstance(status, Slotted) else (),
        needs=entry.needs,
        waits_for=state.waits_for(entry.skill),
        why="" if isinstance(status, Slotted) else status.why,
    )
    weak: Sequence[str] = ()  # completed skills that succeed too seldom
    match status:
        case Waiting() if not row.waits_for:
            row = replace(row, waits=_next_try(status) or "a free slot")
        case Blocked(blocked_by=by):
            row = replace(row, attempt=None, waits_for=by)
            weak = [name for name in by if state.is_completed(name)]
        case Running():
            row = replace(row, **_of_run(graph_paths, entry, status))
        case Merging() | Completed() | Failed() | Held():
            row = replace(row, **_of_end(status))
            weak = [entry.skill] if row.below_goal else ()
            with suppress(FileRefusedError):  # flowrl why and fsck say it
                if weak and (found := explanation_of(graph_paths, entry.skill, entry.expert)):
                    row = replace(row, why=found.line)
    graph = shlex.quote(printable(str(graph_paths.root)))
    more = [f"flowrl train-more {graph} {shlex.quote(skill)}" for skill in sorted(weak)]
    return replace(row, why="; ".join(filter(None, [row.why, *more])))


def _of_end(status: Merging | Completed | Failed | Held) -> dict[str, Any]:
    """Return the figures of a run that has ended, by the names that they have in a SkillRow."""
    if isinstance(status, Failed | Held):
        log = status.log if isinstance(status, Failed) else ()
        return {"ended_at": records.to_json(status.at), "log": log}
    facts = {"frames": status.frames, "success_rate": status.success_rate}
    facts |= {"seconds": status.wall_seconds}
    if isinstance(status, Merging):
        return facts | {"waits": _next_try(status)}
    goal = {"goal": status.goal, "below_goal": status.below_goal}
    return facts | goal | {"ended_at": records.to_json(status.at)}


def _of_run(graph_paths: GraphPaths, entry: Entry, status: Running) -> dict[str, Any]:
    """Return a launched run's figures, by the names that they have in a SkillRow."""
    assert entry.expert is not None
    run_paths, until = graph_paths.run(entry.expert, entry.skill), time.time()
    facts: dict[str, Any] = {"why": _STOP_REASONS.get(status.stop_reason, "")}
    if progress := runs.progress_of(run_paths, status.run_id):
        facts |= {name: getattr(progress, name) for name in _OF_TRAINER}
        facts["waits"] = progress.waits_for or _PHASES.get(progress.phase, "")
        facts["success_rate"] = progress.step_success[-1] if progress.step_success else None
    if _has_ended(run_paths, status):
        exit_ = read_exit(run_paths.folder, status.run_id)
        until = min(until, exit_.ended_at) if exit_ else until
        facts |= {"phase": PHASE_ENDED, "steps_per_second": None, "eta_seconds": None}
    return facts | {"seconds": until - status.since.timestamp()}


def _has_ended(run_paths: RunPaths, status: Running) -> bool:
    """Return whether a launched run has no process left; a scheduler may not know it yet."""
    handle = status.handle
    if handle is None or not handle.start_time:
        return False
    with suppress(OSError):  # it cannot be looked at now
        return not (process.alive(handle.pid, handle.start_time) or lock_held(run_paths.folder))
    return False


def _next_try(status: Waiting | Merging) -> str:
    """Return when a skill is tried again, "" if it waits for no time."""
    due = status.not_before
    return f"its next try at {due:%H:%M:%S} UTC" if due and due > datetime.now(UTC) else ""
