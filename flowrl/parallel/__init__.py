"""Training many skills at once: the scheduler, what a run is given, and what becomes of it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowrl.parallel.scheduler import SkillScheduler
    from flowrl.parallel.training_processor import process_completed_training, recover_graph
    from flowrl.parallel.training_setup import (
        build_remapping,
        fail_run,
        generate_module_with_remapping,
        prepare_training_run,
        resume_training_run,
    )

__all__ = [
    "SkillScheduler",
    "build_remapping",
    "fail_run",
    "generate_module_with_remapping",
    "prepare_training_run",
    "process_completed_training",
    "recover_graph",
    "resume_training_run",
]

_MODULES = ("scheduler", "training_processor", "training_setup")


def __getattr__(name: str) -> Any:
    """Load an export when it is first asked for: `flowrl --help` needs none of them."""
    for module in _MODULES if name in __all__ else ():
        home = importlib.import_module(f"{__name__}.{module}")
        if hasattr(home, name):
            return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
