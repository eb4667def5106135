"""Programs compiled once: not side by side by processes that start together, nor again later."""

from flowrl.compiling.once import compiled
from flowrl.compiling.shelf import Draft, Pending, Shelf, known

__all__ = ["Draft", "Pending", "Shelf", "compiled", "known"]
