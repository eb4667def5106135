"""Values from files that others may write: each is what it should be, or refused."""

from __future__ import annotations

import math
import re
from typing import Any

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # fit to be part of a path
_PHASE = re.compile(r"[a-z]{1,20}")
_MOST = 2**63 - 1
_LARGEST = 1e12  # seconds, steps: beyond it, dates and clocks have no words


def text(value: Any) -> str:
    """Text."""
    if not isinstance(value, str):
        raise TypeError(f"{_shown(value)} is not text")
    return value


def word(value: Any) -> str:
    """A plain word, fit to be part of a path."""
    if not isinstance(value, str) or not _WORD.fullmatch(value):
        raise ValueError(f"{_shown(value)} is not a plain word")
    return value


def phase(value: Any) -> str:
    """A word to be shown on a terminal."""
    if not isinstance(value, str) or not _PHASE.fullmatch(value):
        raise ValueError(f"{_shown(value)} is no phase")
    return value


def _shown(value: Any) -> str:
    """The beginning of what was found, for a message."""
    return repr(value)[:100]


def natural(value: Any) -> int:
    """A whole number that fits into 64 bits, from 0."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
        raise TypeError(f"{_shown(value)} is not a natural number, or too large")
    return value


def figure(value: Any) -> float:
    """A number that can be counted with; it may be infinite or none at all."""
    if isinstance(value, int) and abs(value) > _MOST:
        raise ValueError(f"{_shown(value)} is too large")
    found = float(value)
    if math.isfinite(found) and abs(found) > _LARGEST:
        raise ValueError(f"{found} is too large")
    return found


def finite(value: Any) -> float:
    """A number."""
    found = figure(value)
    if not math.isfinite(found):
        raise ValueError(f"{found} is not finite")
    return found


def share(value: Any) -> float:
    """A number from 0 to 1."""
    found = figure(value)
    if not 0.0 <= found <= 1.0:
        raise ValueError(f"{found} is not a share between 0 and 1")
    return found
