"""The table of skills, for the status command, the scheduler's screen and the last word."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from rich.table import Table
from rich.text import Text

from flowrl.report.snapshot import SkillRow

_STYLE = {
    "completed": "green",
    "running": "cyan",
    "merging": "cyan",
    "preparing": "cyan",
    "failed": "bold red",
    "held": "yellow",
    "blocked": "red",
    "waiting": "dim",
}


def skill_table(rows: Sequence[SkillRow], *, title: str | None = None) -> Table:
    """One line per skill."""
    table = Table(title=title, title_justify="left", pad_edge=False, box=None, header_style="bold")
    table.add_column("skill", overflow="fold")
    table.add_column("status", no_wrap=True)
    for name in ("expert", "attempt", "frames", "steps/s", "success", "time", "ETA"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("waits for / why", overflow="fold", ratio=1)
    for row in rows:
        table.add_row(*_cells(row))
    return table


def tally(rows: Sequence[SkillRow]) -> str:
    """How many skills have which status, in one line."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.status] = counts.get(row.status, 0) + 1
    return ", ".join(f"{count} {status}" for status, count in counts.items()) or "no skills yet"


def clock(seconds: float | None) -> str:
    """Seconds as h:mm:ss; nothing for None.

    >>> clock(75.4)
    '0:01:15'
    """
    return "" if seconds is None else str(timedelta(seconds=int(seconds)))


def _cells(row: SkillRow) -> tuple[Text | str, ...]:
    shown = row.phase if row.status == "running" and row.phase else row.status
    return (
        Text(row.skill),
        Text(shown, style=_STYLE.get(row.status, "")),
        _number(row.expert),
        _number(row.attempt),
        _frames(row),
        "" if row.steps_per_second is None else f"{row.steps_per_second:,.0f}",
        "" if row.success_rate is None else f"{row.success_rate:.0%}",
        clock(row.seconds),
        clock(row.eta_seconds),
        Text(_reason(row)),
    )


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _frames(row: SkillRow) -> str:
    return "" if row.frames is None else f"{row.frames:,}"


def _reason(row: SkillRow) -> str:
    parts = [", ".join(row.waits_for), row.why]
    return "; ".join(part for part in parts if part)
