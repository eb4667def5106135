"""Schedule the training of many skills: the package's documented calls, loaded when asked for."""

from pkgutil import resolve_name as _resolve_name
from typing import Any as _Any

_PLACES = {
    "SkillScheduler": "scheduler",
    "build_remapping": "training_setup",
    "prepare_training_run": "training_setup",
    "process_completed_training": "training_processor",
}


def __getattr__(name: str) -> _Any:
    """Import a documented call on first use: `flowrl --help` needs none of them."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _resolve_name(f"{__name__}.{_PLACES[name]}:{name}")
