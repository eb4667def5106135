"""flowrl trains a graph of skills in parallel and merges them into one agent."""

from pkgutil import resolve_name as _resolve_name
from typing import Any as _Any

__version__ = "0.1.0"
_PLACES = {
    "load_agent": "flowrl.agent:load_agent",
    "train": "flowrl.api:train",
    "status": "flowrl.api:status",
    "evaluate": "flowrl.api:evaluate",
}


def __getattr__(name: str) -> _Any:
    """Load a function of the package when it is first asked for: `import flowrl` loads no JAX."""
    if name not in _PLACES:
        raise AttributeError(f"flowrl has no {name!r}; it has {', '.join(sorted(_PLACES))}")
    return _resolve_name(_PLACES[name])
