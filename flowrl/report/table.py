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


_COLUMNS = (
    "skill", "status", "expert", "attempt", "frames", "steps/s", "success", "time", "ETA",
    "waits for / why",
)  # fmt: skip
_WORDS = frozenset({"skill", "status", "waits for / why"})


def skill_table(rows: Sequence[SkillRow]) -> Table:
    """One line per skill; columns in which nothing is said are left out."""
    table = Table(pad_edge=False, box=None, header_style="bold")
    lines = [_cells(row) for row in rows]
    said = [any(str(line[name]) for line in lines) for name in _COLUMNS]
    shown = [name for name, any_said in zip(_COLUMNS, said, strict=True) if any_said]
    for name in shown:
        justify = "left" if name in _WORDS else "right"
        table.add_column(name, justify=justify, no_wrap=name != _COLUMNS[-1])
    for line in lines:
        table.add_row(*(line[name] for name in shown))
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


def _cells(row: SkillRow) -> dict[str, Text | str]:
    shown = row.phase if row.status == "running" and row.phase else row.status
    return {
        "skill": Text(row.skill),
        "status": Text(shown, style=_STYLE.get(row.status, "")),
        "expert": _number(row.expert),
        "attempt": _number(row.attempt),
        "frames": "" if row.frames is None else f"{row.frames:,}",
        "steps/s": "" if row.steps_per_second is None else f"{row.steps_per_second:,.0f}",
        "success": "" if row.success_rate is None else f"{row.success_rate:.0%}",
        "time": clock(row.seconds),
        "ETA": clock(row.eta_seconds),
        "waits for / why": Text(_reason(row)),
    }


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _reason(row: SkillRow) -> str:
    parts = [", ".join(row.waits_for), row.waits, row.why]
    return "; ".join(part for part in parts if part)
