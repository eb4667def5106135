"""Named places at which a test may have this process die or its disk fail.

`FLOWRL_FAULT=<name>:<kill|raise|enospc|torn>` names one place: `kill` ends the process there,
`raise` is an I/O error, `enospc` a full disk, and `torn` has half of what is written there reach
the disk before the process is killed. Unset or empty, a place costs one look into the environment.
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
      ConfigError: the variable does not say `<name>:<mode>`, or wants to tear what is no write.
    """
    if not os.environ.get(VARIABLE):
        return
    mode = _mode_at(name)
    if mode == "kill":
        die()
    if mode == "torn":
        raise ConfigError(f"{VARIABLE}={name}:torn: nothing is written there; use kill")
    if mode:
        number, words = _ERRORS[mode]
        raise OSError(number, words, name)


def is_torn(name: str) -> bool:
    """Whether what is written at this point shall be torn: half of it, then `die`."""
    return bool(os.environ.get(VARIABLE)) and _mode_at(name) == "torn"


def die() -> None:
    """End this process as kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)


def _mode_at(name: str) -> str:
    """The mode that is wanted at this point; empty when another one is meant."""
    wanted, _, mode = os.environ[VARIABLE].rpartition(":")
    if not wanted or mode not in _MODES:
        raise ConfigError(
            f"{VARIABLE}={os.environ[VARIABLE]!r} is not <name>:<mode>; use {', '.join(_MODES)}"
        )
    return mode if wanted == name else ""
