"""Runs that will be launched in a moment: what a launcher may do while their folders are made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A run whose folder is not there yet; the words mean what they mean in its `Job`."""

    name: str
    run_id: str
    folder: Path


@runtime_checkable
class ExpectsRuns(Protocol):
    """A launcher that can do a part of a launch ahead."""

    def expect(self, run: Expected) -> None:
        """Begin what needs no folder; what cannot be begun is left to `launch`."""
        ...

    def expect_nothing(self) -> None:
        """Undo what was begun for runs that have not been launched."""
        ...
