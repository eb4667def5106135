"""`flowrl fsck`, `flowrl rollback` and `flowrl recover`: damage found, named and put right."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowrl.errors import ConfigError, FileRefusedError
from flowrl.experts import manifest as manifests
from flowrl.experts import repair
from flowrl.experts.fsck import Finding
from flowrl.experts.manifest import Manifest
from flowrl.experts.store import ExpertStore
from flowrl.parallel.inspection import inspect
from flowrl.parallel.mending import mend
from flowrl.parallel.obstacles import refuse_obstacles
from flowrl.parallel.recovery import claimed, read_state, recover_state, train_lost_again
from flowrl.parallel.run_folder import live_runs
from flowrl.parallel.status import Completed, Running
from flowrl.paths import GraphPaths

_WIDTH = 140  # into a file or a pipe


def check(graph_path: Path, *, mending: bool, as_json: bool) -> int:
    """Say what is wrong with a graph's folder, after repairing it if asked to; 1 if anything is.

    Raises:
      FileRefusedError: there is no graph in it.
      BusyError: it is to be repaired, and a scheduler is at work in it.
    """
    layout = _graph(graph_path)
    done: list[str] = []
    if mending:
        with claimed(layout):
            for sentence in mend(layout):
                done.append(sentence)
                if not as_json:
                    sys.stdout.write(f"repair: {_line(sentence)}\n")
            findings = inspect(layout, claimed=True)
    else:
        findings = inspect(layout)
    wrong = any(finding.severity != "note" for finding in findings)
    if as_json:
        _print_json(
            {
                "graph": str(layout.root),
                "clean": not wrong,
                "repaired": done,
                "findings": [_facts(finding) for finding in findings],
            }
        )
    else:
        _print_findings(layout, findings)
    return 1 if wrong else 0


def roll_back(graph_path: Path, generation: int | None, *, as_json: bool) -> int:
    """Make an earlier generation's experts count again; without one, list the generations.

    Raises:
      FileRefusedError: there is no graph, no such generation, or its state is damaged.
      ExpertError: an expert of that generation is not whole any more.
      BusyError: a scheduler is at work in the folder.
    """
    layout = _graph(graph_path)
    if generation is None:
        _print_generations(layout, as_json=as_json)
        return 0
    store = ExpertStore(layout)
    with claimed(layout):
        refuse_obstacles(layout)
        read_state(layout)  # refused before anything changes
        if generation == store.manifest().generation:
            raise ConfigError(f"generation {generation} counts now; there is nothing to go back to")
        manifest = repair.rollback(store, generation)
        again = train_lost_again(layout)
    facts = {
        "generation": manifest.generation,
        "experts_of": generation,
        "trained_again": list(again),
        "live_runs": [place.folder.name for place in live_runs(layout)],
    }
    if as_json:
        _print_json(facts)
    else:
        _tell_rollback(facts)
    return 0


def recover(graph_path: Path, *, as_json: bool) -> int:
    """Make a lost or damaged scheduler_state.json anew, and say what was found.

    Raises:
      FileRefusedError: there is no graph, or the manifest or a record is damaged, too.
      BusyError: a scheduler is at work in the folder.
    """
    layout = _graph(graph_path)
    with claimed(layout):
        refuse_obstacles(layout)
        found = recover_state(layout)
    if found is None:
        if as_json:
            _print_json({"recovered": False})
        else:
            sys.stdout.write(f"{layout.scheduler_state} is whole: there is nothing to recover\n")
        return 0
    rows = [
        {"skill": item.skill, "expert": item.expert, "status": item.status.word}
        for item in found.skills
    ]
    kept = None if found.kept is None else str(found.kept)
    if as_json:
        facts = {"recovered": True, "kept": kept, "next_expert": found.next_expert}
        _print_json({**facts, "skills": rows})
        return 0
    for row in rows:
        number = "" if row["expert"] is None else f", expert {row['expert']}"
        sys.stdout.write(f"{row['skill']}: {row['status']}{number}\n")
    counts = Counter(type(item.status) for item in found.skills)
    sys.stdout.write(
        f"{layout.scheduler_state} is made anew: {counts[Completed]} completed, {counts[Running]} "
        f"under way, {len(rows) - counts[Completed] - counts[Running]} waiting"
        f"{'; the damaged one is ' + kept if kept else ''}\n"
        "What had failed or was held is tried again when the scheduler is started.\n"
    )
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One manifest of the history, as a person chooses among them."""

    number: int
    at: datetime | None
    merged: tuple[str, ...]  # run ids, in words
    experts: int
    frames: int
    readable: bool = True


def generations(layout: GraphPaths) -> list[Generation]:
    """The generations that one can go back to, oldest first."""
    listed: list[Generation] = []
    before: Manifest | None = None
    for number in manifests.generations(layout):
        path = manifests.history_file(layout, number)
        try:
            known = manifests.read_file(path)
        except FileRefusedError:
            lost = Generation(number=number, at=None, merged=(), experts=0, frames=0)
            listed.append(lost)
            continue
        listed.append(
            Generation(
                number=number,
                at=datetime.fromtimestamp(path.stat().st_mtime, UTC),
                merged=_merged(before, known),
                experts=len(known.experts),
                frames=sum(version.frames for version in known.experts.values()),
            )
        )
        before = known
    return listed


def _merged(before: Manifest | None, known: Manifest) -> tuple[str, ...]:
    """What a generation added to the ledger; of the oldest, only the newest run is known."""
    count = len(before.merged) if before is not None else max(0, len(known.merged) - 1)
    skills = {f"e{index}": version.skill for index, version in known.experts.items()}
    names = (skills.get(run_id.partition(".")[0], "") for run_id in known.merged[count:])
    pairs = zip(known.merged[count:], names, strict=True)
    return tuple(f"{run_id} ({name})" if name else run_id for run_id, name in pairs)


def _graph(graph_path: Path) -> GraphPaths:
    layout = GraphPaths(graph_path)
    if not (layout.checkpoints.is_dir() or layout.scheduler_state.is_file()):
        raise FileRefusedError(
            f"{layout.root} is no graph: it has neither checkpoints/ nor scheduler_state.json; "
            "name the folder that --graph_path named"
        )
    return layout


def _facts(finding: Finding) -> dict[str, str]:
    return {
        "severity": finding.severity,
        "thing": finding.thing,
        "place": str(finding.place),
        "remedy": finding.remedy,
    }


def _print_findings(layout: GraphPaths, findings: Sequence[Finding]) -> None:
    for finding in findings:
        line = f"{finding.severity}: {finding.thing} [{finding.place}]: {finding.remedy}"
        sys.stdout.write(_line(line) + "\n")
    counts = Counter(finding.severity for finding in findings)
    kinds = [(counts[kind], kind) for kind in ("error", "warning") if counts[kind]]
    tally = ", ".join(f"{count} {kind}{'s' if count > 1 else ''}" for count, kind in kinds)
    sys.stdout.write(_line(f"{layout.root}: {tally or 'clean'}") + "\n")


def _print_generations(layout: GraphPaths, *, as_json: bool) -> None:
    present = ExpertStore(layout).manifest()
    listed = generations(layout)
    if as_json:
        _print_json({"generation": present.generation, "history": [_plain(one) for one in listed]})
        return
    table = Table(pad_edge=False, box=None, header_style="bold")
    for name in ("generation", "written", "merged", "experts", "frames", ""):
        table.add_column(name, justify="right" if name in {"experts", "frames"} else "left")
    for one in listed:
        when = one.at.isoformat(timespec="seconds").replace("+00:00", "Z") if one.at else "damaged"
        merged = ", ".join(one.merged) or ("" if one.at is None else "nothing: experts went back")
        now = "counts now" if one.number == present.generation else ""
        cells = (str(one.number), when, merged, str(one.experts), f"{one.frames:,}", now)
        table.add_row(*map(Text, cells))
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)
    sys.stdout.write(f"To go back: flowrl rollback {layout.root} GENERATION\n")


def _plain(one: Generation) -> dict[str, Any]:
    return {
        "generation": one.number,
        "written": one.at.isoformat() if one.at else None,
        "merged": list(one.merged),
        "experts": one.experts,
        "frames": one.frames,
    }


def _tell_rollback(facts: dict[str, Any]) -> None:
    sys.stdout.write(
        f"generation {facts['generation']} has the experts of generation {facts['experts_of']}; "
        "the ledger is as it was\n"
    )
    for skill in facts["trained_again"]:
        sys.stdout.write(f"{skill} will be trained again when the scheduler starts\n")
    if facts["live_runs"]:
        names = ", ".join(facts["live_runs"])
        sys.stdout.write(f"still under way, and merged when they end: {names}\n")


def _line(text: str) -> str:
    """One line that does nothing to a terminal: what cannot be seen is spelt out."""
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(" " if c in {"\\n", "\\r", "\\t"} else c for c in shown)


def _print_json(facts: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(facts, indent=2) + "\n")
