"""Claims on jobs that other hosts can see, and the beats of their runners; a leaf.

The claim, beside the job's folder, names the launch that may go on. The runner looks at it at every
beat; once it is gone or names another, the runner ends its job without a record of its end. While a
claim is there, processes of the run may live on a host that nobody here can look at.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from flowrl import storage
from flowrl.errors import FileRefusedError
from flowrl.paths import JobPaths
from flowrl.storage import records

BEAT_SECONDS = 5.0  # between two beats; runner.py, which imports nothing of ours, has it, too
LOST_SECONDS = 120.0  # without a beat, until a run or a scheduler is taken for lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """engine.json: which launch of which run an engine, or a host of a shared folder, has."""

    run_id: str
    launch: str  # a name that no other launch has; the engine keeps it with its job
    engine: str  # "" for a host of a shared folder
    engine_id: str = ""  # unknown until the engine has answered
    stop: bool = False  # the run was asked to end


class Beats:
    """The beats of runs, timed by the clock of the one who looks, from one look to the next."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}  # by run id: time of the beat, since when

    def are_still(self, claim: Claim, folder: Path, seconds: float) -> bool:
        """Return whether a run's beat has stood still for so long while this process looked."""
        beat, now = 0, time.monotonic()
        with suppress(FileNotFoundError):
            beat = JobPaths(folder).beat.stat().st_mtime_ns
        known, since = self._seen.setdefault(claim.run_id, (beat, now))
        if known != beat:
            self._seen[claim.run_id] = (beat, now)
            return False
        return now - since > seconds

    def forget(self, run_id: str) -> None:
        """Drop a run that has ended."""
        self._seen.pop(run_id, None)


def claim_of(folder: Path, run_id: str | None = None) -> Claim | None:
    """Return the claim on a job, or on this run of it; FileRefusedError if it is damaged."""
    path = JobPaths(folder).engine_json
    if not path.exists():
        return None
    claim = records.read(path, Claim, remedy="remove it once no process of the run lives")
    return claim if run_id in (None, claim.run_id) else None


def write_claim(folder: Path, claim: Claim) -> Claim:
    """Make a claim, or replace it; returns it."""
    records.write(JobPaths(folder).engine_json, claim)
    return claim


def ask_to_end(folder: Path) -> Claim | None:
    """Ask the runner to end its job, which it does at its next beat; returns its claim."""
    claim = None
    with suppress(FileRefusedError):
        if (claim := claim_of(folder)) and not claim.stop:
            claim = write_claim(folder, replace(claim, stop=True))
    return claim


def is_claimed(folder: Path) -> bool:
    """Return whether an engine may have processes of the job."""
    return JobPaths(folder).engine_json.exists()


def remove_claim(folder: Path) -> None:
    """Withdraw the claim: what still lives of the run ends at its next beat."""
    storage.remove_file(JobPaths(folder).beat)
    storage.remove_file(JobPaths(folder).engine_json)
