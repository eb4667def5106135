"""Lines of metrics.jsonl and events.jsonl, and rows of a status, for pictures."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

from flowrl.reports.status import SkillRow

STEPS = ("0_Collect_Wood", "1_Place_Table", "2_Make_Wood_Pickaxe")


def lines_of(seed: int, *, updates: int, steps: tuple[str, ...] = STEPS) -> list[dict[str, Any]]:
    """Lines as a trainer writes them: each has what came of the steps since the one before."""
    draw, lines = random.Random(seed), []
    for update in range(1, updates + 1):
        line: dict[str, Any] = {"frames": 4096 * update, "seconds": 2.0 * update}
        line["episodes"] = begun = draw.randint(0, 60)
        for step in steps:
            died = draw.randint(0, begun // 3)
            cut = draw.randint(0, (begun - died) // 3)
            done = begun - died - cut
            line |= {f"begun/{step}": begun, f"done/{step}": done}
            line |= {f"died/{step}": died, f"cut/{step}": cut}
            begun = done
        lines.append(line)
    return lines


def events_of(*moves: tuple[float, str, str]) -> list[dict[str, str]]:
    """Lines of events.jsonl: minutes, skill, status."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    return [
        {"at": (start + timedelta(minutes=at)).isoformat(), "skill": skill, "status": status}
        for at, skill, status in moves
    ]


def a_row(skill: str, *, expert: int | None = None, **facts: Any) -> SkillRow:
    return SkillRow(skill=skill, status="completed", expert=expert, attempt=1, **facts)
