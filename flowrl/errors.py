"""Every error flowrl raises on purpose; each message names the thing, its place and the remedy."""

from __future__ import annotations

from typing import ClassVar

EXIT_USAGE = 2
EXIT_IO = 74  # EX_IOERR: the disk is full, broken or read-only
EXIT_BUSY = 75  # EX_TEMPFAIL: another daemon holds the folder
EXIT_RESUMABLE = 85  # the trainer was asked to stop and saved a resumable checkpoint


class FlowrlError(Exception):
    """The root of the family; `exit_code` is what a program ends with."""

    exit_code: ClassVar[int] = 1


class ConfigError(FlowrlError):
    """A flag or a configuration value cannot be used."""

    exit_code = EXIT_USAGE


class NameRefusedError(FlowrlError):
    """A skill's name cannot be shown, or cannot become a file name."""


class SkillError(FlowrlError):
    """A skill file is malformed."""


class GateError(SkillError):
    """Skill code asks for something the gate does not admit."""


class GraphError(FlowrlError):
    """The skill graph is impossible."""


class CycleError(GraphError):
    """Skills need one another in a circle."""


class UnknownNeedError(GraphError):
    """No skill gains what another requires."""


class FileRefusedError(FlowrlError):
    """A file is missing, too large, not a plain file, or not of the expected form."""


class FormatVersionError(FileRefusedError):
    """A file was written by a version of flowrl that this one cannot read."""


class ExpertError(FlowrlError):
    """An expert checkpoint cannot be used."""


class ExpertMissingError(ExpertError):
    """An expert that the manifest names is not on disk."""


class ExpertCorruptError(ExpertError):
    """An expert's files are not the ones that were committed."""


class ExpertShapeError(ExpertError):
    """An expert's arrays do not have the shapes this run needs."""


class ExpertIndexError(ExpertError):
    """The experts of a run have impossible indices."""


class ResultRefusedError(FlowrlError):
    """A finished run's result cannot be merged."""


class LaunchError(FlowrlError):
    """A run could not be started; it may be tried again."""


class BusyError(FlowrlError):
    """Another process holds what this one needs."""

    exit_code = EXIT_BUSY


class ComparingError(BusyError):
    """A merge waits for what a program of its own finds out about the experts; try again."""


class TrainingError(FlowrlError):
    """Training cannot go on, for instance because the loss is not finite."""
