"""Graph folders as a scheduler and its trainers leave them, made by hand."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

from flowrl import runs, storage
from flowrl.launchers.base import Handle
from flowrl.parallel.state import StateFile
from flowrl.parallel.status import Blocked, Completed, Entry, Failed, Held, Running, Status, Waiting
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import Progress
from tests.parallel.scheduling import state_of_entries

NOW = datetime(2030, 1, 1, tzinfo=UTC)
DONE = Completed(
    run_id="e0.a1.x", attempt=1, frames=2000, success_rate=0.875, wall_seconds=90.0, at=NOW
)
FAILED = Failed(why="exit 1", attempt=3, at=NOW)
HELD = Held(why="its session was killed", attempt=1, at=NOW)
WAITING = Waiting()


def running(run_id: str = "e0.a1.x", *, since: datetime = NOW) -> Running:
    handle = Handle(run_id=run_id, session="flowrl_e0_A", pid=1)
    return Running(run_id=run_id, attempt=1, handle=handle, devices=("0",), since=since)


def save(root: Path, *skills: tuple[str, Status] | tuple[str, Status, tuple[str, ...]]):
    """Write scheduler_state.json: a name, a status, and its needs; expert numbers in order."""
    entries = [
        Entry(
            skill=name,
            status=status,
            needs=needs[0] if needs else (),
            expert=None if isinstance(status, Waiting | Blocked) else number,
        )
        for number, (name, status, *needs) in enumerate(skills)
    ]
    graph_paths = GraphPaths(root)
    storage.make_dir(root)
    state = state_of_entries(entries, next_expert=len(entries))
    StateFile(graph_paths.scheduler_state).save(state)
    return graph_paths


def tell_progress(run_paths: RunPaths, run_id: str = "e0.a1.x", **changes) -> Progress:
    storage.make_dir(run_paths.folder)
    facts = {
        "run_id": run_id,
        "updates": 4,
        "frames": 512,
        "total_frames": 1024,
        "steps_per_second": 1234.5,
        "step_success": (0.9, 0.25),
        "eta_seconds": 61.0,
        "phase": "compiling",
        "updated_at": time.time(),
    }
    progress = Progress(**{**facts, **changes})
    runs.write_progress(run_paths, progress)
    return progress


def write_log(path: Path, text: str) -> Path:
    storage.make_dir(path.parent)
    path.write_text(text)
    return path
