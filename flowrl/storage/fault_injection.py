"""Points in the code, a leaf for tests, at which a test kills the process or fails the disk.

`FLOWRL_FAULT=<name>:<kill|raise|enospc|torn>` names one point: `kill` ends the process there,
`raise` is an I/O error, `enospc` a full disk, and `torn` writes half of the data before the process
is killed. If the variable is unset or empty, a point costs one look into the environment.
"""

from __future__ import annotations

import errno
import os
import signal

from flowrl.errors import ConfigError

VARIABLE = "FLOWRL_FAULT"
_ERRORS = {
    "raise": (errno.EIO, "Input/output error (injected)"),
    "enospc": (errno.ENOSPC, "No space left on device (injected)"),
}
_MODES = ("kill", *_ERRORS, "torn")


def fault_point(name: str) -> None:
    """Die or fail here when the environment says so.

    Raises:
      ConfigError: the variable is not `<name>:<mode>`, or `torn` names a point without a write.
    """
    mode = _mode_at(name)
    if mode == "kill":
        die()
    if mode == "torn":
        raise ConfigError(f"{VARIABLE}={name}:torn: nothing is written there; use kill")
    if mode:
        number, words = _ERRORS[mode]
        raise OSError(number, words, name)


def is_torn(name: str) -> bool:
    """Return whether the write at this point shall stop half way, followed by `die`."""
    return _mode_at(name) == "torn"


def die() -> None:
    """End this process as kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)


def _mode_at(name: str) -> str:
    """Return the mode for this point; empty when the variable names another one."""
    value = os.environ.get(VARIABLE)
    if not value:
        return ""
    point, _, mode = value.rpartition(":")
    if not point or mode not in _MODES:
        raise ConfigError(f"{VARIABLE}={value!r} is not <name>:<mode>; use {', '.join(_MODES)}")
    return mode if point == name else ""
