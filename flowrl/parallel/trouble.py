"""Which errors are the machine's and pass, which are one skill's, and which are bugs.

A bug is what is not named here: it ends the daemon with its traceback, while runs go on.
"""

from __future__ import annotations

import errno

from flowrl.errors import FlowrlError

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_IO = frozenset({errno.EIO, errno.EROFS, errno.ESTALE})
_LIMITS = frozenset({errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_RIGHTS = frozenset({errno.EACCES, errno.EPERM})
# What hostile or malformed data can raise in whoever reads it, a user's callback included.
OF_ONE_SKILL = (
    FlowrlError,
    OSError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)


def trouble(error: BaseException) -> str:
    """ "disk" or "io" when the machine cannot do it now, whoever asks; "" for any other error."""
    number = _number(error)
    if number in DISK_FULL:
        return "disk"
    return "io" if number in _IO | _LIMITS | _RIGHTS else ""


def passes(error: BaseException) -> bool:
    """Whether the same may work later, so that no work should be given up for it.

    A file that may not be read counts only where no error of ours has judged it already.
    """
    number = _number(error)
    return number in DISK_FULL | _IO | _LIMITS or (isinstance(error, OSError) and number in _RIGHTS)


def said(error: BaseException) -> str:
    """An error in one line."""
    if not isinstance(error, OSError):
        text = str(error) or type(error).__name__
        return text if isinstance(error, FlowrlError) else f"{type(error).__name__}: {text}"
    place = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{place}"


def _number(error: BaseException) -> int | None:
    """The number of an OSError, or of the one that an error of ours was made from."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return cause.errno if isinstance(cause, OSError) else None
