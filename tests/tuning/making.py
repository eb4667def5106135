"""Small sweeps for tests."""

from __future__ import annotations

from typing import Any

from flowrl import config as configs
from flowrl.config import PPOConfig
from flowrl.paths import SweepPaths
from flowrl.tuning.search import SearchConfig
from flowrl.tuning.trials import BegunTrial, Sweep, SweepRecord, Trial, TrialOutcome

ID = "0123456789abcdef"
_FLAGS = configs.flags(SearchConfig()).keys()


def a_record(**changes: Any) -> SweepRecord:
    """A sweep of the learning rate by random search; changes are of flags or of the record."""
    flags: dict[str, Any] = {"method": "random", "trials": 4, "confirm": 3, "max_failures": 2}
    flags |= {name: changes.pop(name) for name in _FLAGS & changes.keys()}
    facts: dict[str, Any] = {
        "sweep": ID,
        "skill": "Collect Wood",
        "expert": 0,
        "flags": flags,
        "space": {"lr": {"type": "log_uniform", "min": 1e-4, "max": 1e-2}},
        "config": configs.to_json(PPOConfig(total_timesteps=10_000)),
        "origins": {},
        "starts": (),
    }
    return SweepRecord(**facts | changes)


def a_sweep(folder: Any, **changes: Any) -> Sweep:
    """A sweep in a folder, without files."""
    return Sweep(SweepPaths(folder), a_record(**changes))


def a_trial(
    number: int, lr: float, score: float | None = None, *, frames: int = 10_000, **changes: Any
) -> BegunTrial:
    """A trial of the search that has ended; without a score it has failed."""
    trial = Trial(sweep=ID, number=number, point={"lr": lr}, seed=number, **changes)
    why = "" if score is not None else "exit 65"
    outcome = TrialOutcome(score=score, frames=frames, seconds=2.0, why=why)
    return BegunTrial(trial, outcome)
