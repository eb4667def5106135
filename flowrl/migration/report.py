"""What a migration did, or would do, for people and for scripts."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowrl.config import Activation
from flowrl.errors import ConfigError, FileRefusedError
from flowrl.migration.building import order_of, refuse_taken, write_graph
from flowrl.migration.planned import Plan, plan_migration

FORMAT = 1
# Orbax warns of what old folders lack, the skill book of skills that are not the library's.
_TALKATIVE = ("absl", "flowrl.parallel.skill_book")
_ORIGINS = {
    "own": "its own",
    "library": "the library's",
    "none": "none: an expert only",
}


def run(
    old: Path, new: Path, *, dry_run: bool, as_json: bool, activation: Activation | None
) -> int:
    """Migrate, or say what would be done; returns the exit code."""
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    if not old.exists():
        raise FileRefusedError(f"{old} does not exist; name the original's graph folder")
    _refuse_nested(old, new)
    refuse_taken(new)
    plan = plan_migration(old, activation=activation)
    if not dry_run:
        write_graph(plan, new)
    if as_json:
        sys.stdout.write(json.dumps(as_facts(plan, old, new, dry_run=dry_run), indent=2) + "\n")
    else:
        _show(plan, old, new, dry_run=dry_run)
    return 0


def as_facts(plan: Plan, old: Path, new: Path, *, dry_run: bool) -> dict[str, Any]:
    """The report as plain JSON values."""
    return {
        "format": FORMAT,
        "old": str(old),
        "new": str(new),
        "dry_run": dry_run,
        "found": list(plan.survey.found),
        "env_name": plan.config.env_name,
        "layer_size": plan.config.layer_size,
        "activation": plan.config.activation,
        "experts": _rows(plan),
        "left_out": [{"what": item.what, "why": item.why} for item in plan.left_out],
        "notes": list(plan.notes),
        "go_on": go_on(plan, new),
    }


def go_on(plan: Plan, new: Path) -> str:
    """The command that trains the rest of the graph on the migrated experts."""
    config = plan.config
    words = [
        *("python", "-m", "flowrl.bottomup_parallel", f"--graph_path={new}"),
        *(f"--env_name={config.env_name}", f"--layer_size={config.layer_size}"),
        f"--activation={config.activation}",
    ]
    return shlex.join(words)


def _refuse_nested(old: Path, new: Path) -> None:
    ours, theirs = new.resolve(), old.resolve()
    if ours == theirs or theirs in ours.parents or ours in theirs.parents:
        raise ConfigError(f"{new} and {old} lie in one another; name a folder beside the old one")


def _rows(plan: Plan) -> list[dict[str, Any]]:
    playable = {expert.index: whole for expert, whole in order_of(plan)}
    rows = []
    for expert in plan.experts:
        decision = plan.decision(expert)
        rows.append(
            {
                "index": expert.index,
                "name": decision.name,
                "old_name": expert.name,
                "frames": expert.frames,
                "success_rate": expert.success_rate,
                "skill": decision.origin,
                "why": decision.why,
                "playable": playable[expert.index],
                "from": str(expert.place),
            }
        )
    return rows


def _show(plan: Plan, old: Path, new: Path, *, dry_run: bool) -> None:
    screen = Console(width=None if sys.stdout.isatty() else 200)
    config = plan.config
    screen.print(
        Text(
            f"{old}: {', '.join(plan.survey.found)}; {config.env_name}, width "
            f"{config.layer_size}, {config.activation}"
        )
    )
    screen.print(_table(plan))
    for item in plan.left_out:
        screen.print(Text(f"left out: {item.what}: {item.why}"))
    for note in plan.notes:
        screen.print(Text(f"note: {note}"))
    if dry_run:
        screen.print(Text(f"nothing is written; without --dry_run {new} would hold these experts"))
    else:
        screen.print(Text(f"{new} is written. To go on: {go_on(plan, new)}"))


def _table(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("expert", justify="right")
    table.add_column("skill")
    table.add_column("frames", justify="right")
    table.add_column("success", justify="right")
    table.add_column("skill's data")
    for row in _rows(plan):
        rate, frames = row["success_rate"], row["frames"]
        origin = _ORIGINS[row["skill"]]
        table.add_row(
            str(row["index"]),
            Text(row["name"]),
            "unknown" if frames is None else f"{frames:,}",
            "unknown" if rate is None else f"{rate:.0%}",
            Text(f"{origin} ({row['why']})" if row["why"] else origin),
        )
    return table
