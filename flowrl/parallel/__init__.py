"""Schedule the training of many skills: the package's documented calls, loaded when asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowrl.parallel.scheduler import SkillScheduler
    from flowrl.parallel.training_processor import process_completed_training
    from flowrl.parallel.training_setup import build_remapping, prepare_training_run

__all__ = [
    "SkillScheduler",
    "build_remapping",
    "prepare_training_run",
    "process_completed_training",
]
_MODULE_OF = {
    "SkillScheduler": "scheduler",
    "build_remapping": "training_setup",
    "prepare_training_run": "training_setup",
    "process_completed_training": "training_processor",
}


def __getattr__(name: str) -> Any:
    """Import a documented call on first use: `flowrl --help` needs none of them."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
