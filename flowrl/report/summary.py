"""The last word on a graph: what came out, and what running side by side has saved."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from rich.console import Group
from rich.text import Text

from flowrl.report.snapshot import SkillRow
from flowrl.report.table import clock, skill_table, tally


def summary(rows: Sequence[SkillRow], *, goal: float | None = None) -> Group:
    """The table of skills, the speed-up over one by one, and who fell short of the goal."""
    return Group("", skill_table(rows), "", *map(Text, last_words(rows, goal=goal)))


def last_words(rows: Sequence[SkillRow], *, goal: float | None = None) -> list[str]:
    """A line on all skills, one on the time they took, one on those below the success `goal`."""
    lines = [tally(rows)]
    spans = [span for row in rows if (span := _span(row)) is not None]
    if len(spans) > 1:
        wall = (max(end for _, end in spans) - min(start for start, _ in spans)).total_seconds()
        own = sum((end - start).total_seconds() for start, end in spans)
        lines.append(
            f"{clock(wall)} from the first start to the last end; the runs' own times sum up to "
            f"{clock(own)}: {own / wall:.2f} times as fast as one after another"
        )
    if goal is not None and (short := _below(rows, goal)):
        lines.append(f"below the success rate of {goal:.0%} that was asked for: {', '.join(short)}")
    return lines


def _span(row: SkillRow) -> tuple[datetime, datetime] | None:
    if row.status != "completed" or row.ended_at is None or not row.seconds:
        return None
    end = datetime.fromisoformat(row.ended_at)
    return end - timedelta(seconds=row.seconds), end


def _below(rows: Sequence[SkillRow], goal: float) -> list[str]:
    completed = (row for row in rows if row.status == "completed")
    return [row.skill for row in completed if (row.success_rate or 0.0) < goal]
