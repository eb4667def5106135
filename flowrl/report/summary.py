"""The last word of a training: what came out, and what running side by side has saved."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group

from flowrl.report.snapshot import SkillRow
from flowrl.report.table import clock, skill_table, tally


def summary(rows: Sequence[SkillRow], *, trained_now: Sequence[str], wall_seconds: float) -> Group:
    """The table of skills and, of those trained just now, the speed-up over one by one."""
    lines = [f"{tally(rows)}; {clock(wall_seconds)} of wall time"]
    own_seconds = sum(row.seconds or 0.0 for row in rows if row.skill in trained_now)
    if len(trained_now) > 1 and wall_seconds > 0:
        lines.append(
            f"the runs' own times sum up to {clock(own_seconds)}: "
            f"{own_seconds / wall_seconds:.2f} times as fast as one after another at that speed"
        )
    return Group("", skill_table(rows), "", *lines)
