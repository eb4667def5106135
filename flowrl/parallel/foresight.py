"""What will be launched in a moment: told to the launcher before the run's folder is there.

Both sides may lack it: a workshop that knows no name ahead, a launcher that can do nothing ahead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from flowrl.launchers.expecting import Expected, ExpectsRuns
from flowrl.launchers.job import Job, Launcher
from flowrl.parallel.signals import Task
from flowrl.parallel.workshop import Workshop


@runtime_checkable
class NamesRuns(Protocol):
    """A workshop that knows what a run will be called before it makes it."""

    def expected(self, task: Task) -> Expected:
        """The next new run of this task."""
        ...


def expect(launcher: Launcher, workshop: Workshop, tasks: Iterable[Task]) -> None:
    """Tell of new runs, if the one side can tell and the other can listen."""
    if isinstance(launcher, ExpectsRuns) and isinstance(workshop, NamesRuns):
        for task in tasks:
            launcher.expect(workshop.expected(task))


def expect_job(launcher: Launcher, job: Job) -> None:
    """Tell of a run that is made and will be launched once it is saved that it will."""
    if isinstance(launcher, ExpectsRuns):
        launcher.expect(Expected(name=job.name, run_id=job.run_id, folder=job.folder))


def expect_nothing(launcher: Launcher) -> None:
    """Say that what was told and is not launched by now will not be."""
    if isinstance(launcher, ExpectsRuns):
        launcher.expect_nothing()
