"""Every error that flowrl raises on purpose, and which errors are transient.

Each message names the thing, its place and the remedy. Errors of a bad value are also ValueError.
"""

from __future__ import annotations

import difflib
import errno
import math
import os
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import TypeGuard

EXIT_USAGE = 2
EXIT_UNAVAILABLE = 69  # EX_UNAVAILABLE: no scheduler lives for what is left, or no endpoint
EXIT_DISK_FULL = 73  # EX_CANTCREAT
EXIT_IO = 74  # EX_IOERR: broken or read-only disk, rights, descriptors
EXIT_BUSY = 75  # EX_TEMPFAIL: another daemon holds the folder
EXIT_BUDGET = 76  # what a language model may cost is used up; the same command goes on
EXIT_DIVERGED = 65  # EX_DATAERR: a loss or parameter is not finite
EXIT_INTERRUPTED = 130  # Ctrl-C or SIGTERM
EXIT_RESUMABLE = 85  # the trainer was asked to stop and saved a resumable checkpoint


class FlowrlError(Exception):
    """The root of the family; `exit_code` is what a program ends with."""

    exit_code: int = 1


class ConfigError(FlowrlError, ValueError):
    """A flag or a configuration value cannot be used."""

    exit_code = EXIT_USAGE


class NameRefusedError(FlowrlError, ValueError):
    """A skill's name cannot be shown, or cannot become a file name."""


class SkillError(FlowrlError, ValueError):
    """A skill file is malformed."""


class CodeRefusedError(SkillError):
    """Skill code contains something that is not admitted."""


class FalseGainError(SkillError):
    """A skill says that it is done, and what it gains is not in the inventory."""

    exit_code = EXIT_USAGE  # another attempt would not mend the skill


class GraphError(FlowrlError, ValueError):
    """The skill graph is impossible."""


class FileRefusedError(FlowrlError):
    """A file is missing, too large, not a plain file, or not of the expected form."""


class TornFileError(FileRefusedError):
    """A file's content is a part of what was written, or altered."""


class FormatVersionError(FileRefusedError):
    """A file was written by a version of flowrl that this one cannot read."""


class GraphDamagedError(FileRefusedError):
    """A file that all skills of a graph need, such as its manifest or a lock, cannot be used."""


class GraphFormatError(GraphDamagedError, FormatVersionError):
    """Another version of flowrl has written such a file."""


class KeptSkillError(FormatVersionError):
    """A skill that is kept with a graph, and whose code this version does not admit any more."""


class ExpertError(FlowrlError):
    """An expert checkpoint cannot be used."""


class ExpertMissingError(ExpertError, FileNotFoundError):
    """An expert that the manifest names is not on disk."""


class ExpertCorruptError(ExpertError):
    """An expert's files are not the ones that were committed."""


class ExpertShapeError(ExpertError, ValueError):
    """An expert's arrays do not have the shapes this run needs."""


class ExpertIndexError(ExpertError, ValueError):
    """The experts of a run have impossible indices."""


class ResultRefusedError(FlowrlError):
    """A finished run's result cannot be merged."""


class LaunchError(FlowrlError):
    """A run could not be started; it may be tried again."""


class BusyError(FlowrlError):
    """Another process holds what this one needs."""

    exit_code = EXIT_BUSY


class ComparingError(BusyError):
    """A merge waits for a comparison of experts, which another program makes; try again."""


class TrainingError(FlowrlError):
    """Training cannot go on, because a loss or a parameter is not finite."""

    exit_code = EXIT_DIVERGED


class EpochError(FlowrlError):
    """Collecting or learning fails, or takes too long."""


RAISED = (  # by a user's own code
    *(TypeError, ValueError, LookupError, AttributeError, NameError, ArithmeticError),
    *(AssertionError, RuntimeError, ImportError, SyntaxError, StopIteration, OSError),
)
_NOT_OWN = (
    str(Path(__file__).parent),
    "/site-packages/jax/",
    "/importlib/",
    "<frozen ",
    "<string>",
)
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_UNANSWERED = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN})
_IO = _UNANSWERED | {errno.EROFS}
_LIMITS = frozenset({errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_RIGHTS = frozenset({errno.EACCES, errno.EPERM})
# What malformed data of one skill can raise in the code that reads it, a user's callback included.
# Any other exception is a bug: it ends the daemon with its traceback, while runs go on.
SKILL_ERRORS = (
    FlowrlError,
    OSError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)


def classify_io_error(error: BaseException) -> str:
    """Return "disk" or "io" if the machine cannot do it now; "" for any other error."""
    number = _errno_of(error)
    if number in _DISK_FULL:
        return "disk"
    return "io" if number in _IO | _LIMITS | _RIGHTS else ""


def is_unanswered(error: OSError) -> bool:
    """Return whether the disk, or the way to it, is gone: no other folder on it is better."""
    return error.errno in _UNANSWERED


def is_transient(error: BaseException) -> bool:
    """Return whether the same call may succeed later, so that no work should be given up for it.

    Missing permission counts only if no error of ours was raised from it.
    """
    number = _errno_of(error)
    return number in _DISK_FULL | _IO | _LIMITS or (is_os_error(error) and number in _RIGHTS)


def is_os_error(error: BaseException) -> TypeGuard[OSError]:
    """Return whether the system raised it; some errors of ours are an OSError, too."""
    return isinstance(error, OSError) and not isinstance(error, FlowrlError)


def format_error(error: BaseException) -> str:
    """Return an error in one line; one of the system with the files that it is of."""
    if is_os_error(error):
        files = [os.fsdecode(file) for file in (error.filename, error.filename2) if file]
        return ": ".join(filter(None, [error.strerror or str(error), " -> ".join(files)]))
    text = str(error) or type(error).__name__
    return text if isinstance(error, FlowrlError) else f"{type(error).__name__}: {text}"


def without_remedy(error: FlowrlError) -> str:
    """Return what is wrong by an error's message, for a caller that knows another remedy."""
    return str(error).partition("; ")[0]


def format_raised(error: BaseException) -> str:
    """Return an error of a user's own code in one line, with the place that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(part in f.filename for part in _NOT_OWN)]
    places = [(frame.filename, frame.lineno) for frame in own]
    if isinstance(error, SyntaxError):
        places = [(str(error.filename), error.lineno)]
    place = f" ({places[-1][0]}:{places[-1][1]})" if places else ""
    text = str(error.msg if isinstance(error, SyntaxError) else error).partition("\n")[0]
    return f"{type(error).__name__}: {' '.join(text.split())}{place}"


def closest(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown word: what it may have been meant to be.

    >>> closest("statsu", ["status", "stop"])
    "; closest is 'status'"
    >>> closest("x", ["status"])
    ''
    """
    names = {name.casefold(): name for name in known}
    matches = difflib.get_close_matches(word.casefold(), names, n=3, cutoff=0.6)
    shown = ", ".join(repr(names[each]) for each in matches)
    return f"; closest {'is' if len(matches) == 1 else 'are'} {shown}" if matches else ""


def divisors_near(number: int, wanted: int) -> tuple[int, ...]:
    """Return the nearest divisors of a number below and above a wanted one.

    >>> divisors_near(384, 10)
    (8, 12)
    """
    smaller = range(1, math.isqrt(number) + 1)
    divisors = {each for n in smaller if number % n == 0 for each in (n, number // n)}
    below, above = (n for n in divisors if n < wanted), (n for n in divisors if n > wanted)
    return tuple(n for n in (max(below, default=0), min(above, default=0)) if n)


def closest_file(path: Path, suffix: str = "") -> str:
    """Return the end of a message about a file: if it is missing, what its folder has instead."""
    folder = path.parent
    there = os.path.lexists(path) or not folder.is_dir()
    names = [] if there else [each.name for each in folder.iterdir()]
    return closest(path.name, [name for name in names if name.endswith(suffix)])


def _errno_of(error: BaseException) -> int | None:
    """Return the number of an OSError, or of the OSError that an error of ours was raised from."""
    own = isinstance(error, OSError) and error.errno is not None
    cause = error if own else error.__cause__
    return cause.errno if isinstance(cause, OSError) else None
