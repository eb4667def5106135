"""How much Python a function executes: the same on every machine, however busy it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_run(function: Callable[[], Any]) -> int:
    """The number of lines that a call executes, every pass of a loop counted.

    What a call into C costs is not counted.
    """
    lines = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        function()
    finally:
        sys.settrace(before)
    return lines


def growth(work: Callable[[int], Callable[[], Any]], size: int) -> float:
    """How many times as many lines the work of twice the size executes.

    Args:
        work: makes, for a size, the function whose lines count.
    """
    return lines_run(work(2 * size)) / lines_run(work(size))
