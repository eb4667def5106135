"""flowrl trains a graph of skills in parallel and merges them into one agent."""

from importlib import import_module as _import_module
from typing import Any as _Any

__version__ = "0.1.0"


def load_agent(path: _Any, *, trust_skills: bool = False) -> _Any:
    """Read an agent that `flowrl export` wrote: see `flowrl.agent.load_agent`."""
    # By name: this module is imported by the scheduler, which must not load JAX.
    return _import_module("flowrl.agent").load_agent(path, trust_skills=trust_skills)
