"""Averages of what several trainers learned: rules, messages, and coordinators of rounds.

Nothing here imports JAX. A *round* is an average that counts: all its members get the same bits.
Each name is imported when it is asked for, so no engine is loaded that is not used.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

_NAMES = {
    "coordinator": "Averaged LocalSyncCoordinator SyncCoordinator stale_weight",
    "mpi": "MPIDistributedTrainer MPISyncCoordinator",
    "rules": "OuterStep Rule average gossip_means matching spectral_gap",
    "spark": "SparkDistributedTrainer",
    "state": "AgentState SyncMessage Tree",
    "trainer": "DistributedAgent DistributedTrainer ackley simple_loss_function",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = list(_MODULE_OF)  # type: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> _Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(_import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
