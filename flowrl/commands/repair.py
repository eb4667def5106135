"""Commands that find damage and repair it: fsck, rollback, recover."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowrl.config import Count
from flowrl.errors import ConfigError, FileRefusedError
from flowrl.experts import manifest as manifests
from flowrl.experts import repair
from flowrl.experts.manifest import Manifest
from flowrl.experts.repair import Finding
from flowrl.experts.store import ExpertStore
from flowrl.parallel import doctor
from flowrl.parallel.recovery import (
    Recovered,
    claimed,
    read_state,
    recover_state,
    train_lost_again,
)
from flowrl.parallel.run_folder import live_runs
from flowrl.parallel.status import Completed, Running
from flowrl.paths import DEFAULT_GRAPH, GraphPaths

_WIDTH = 140  # into a file or a pipe


@dataclass(frozen=True, kw_only=True)
class FsckCommand:
    """Check a graph's folder: digests, ledger, records, leftovers; exit 1 if anything is wrong.

    Examples:
      flowrl fsck exp/demo
      flowrl fsck exp/demo --repair
      flowrl fsck exp/demo --json | jq '.findings[].thing'
    """

    graph_path: tyro.conf.Positional[Path] = DEFAULT_GRAPH
    """Folder of the graph."""
    repair: bool = False
    """Put right what can be, then check again; no scheduler may be at work."""
    json: bool = False
    """Print JSON instead of lines."""

    def __call__(self) -> int:
        """Run the command; raises BusyError if a scheduler is at work where it should repair."""
        layout = _graph(self.graph_path)
        done: list[str] = []
        if self.repair:
            with claimed(layout):
                for sentence in doctor.repair(layout):
                    done.append(sentence)
                    if not self.json:
                        sys.stdout.write(f"repair: {_line(sentence)}\n")
                findings = doctor.inspect(layout, claimed=True)
        else:
            findings = doctor.inspect(layout)
        wrong = any(finding.severity != "note" for finding in findings)
        if self.json:
            rows = [_row_of(finding) for finding in findings]
            graph = str(layout.root)
            _print_json({"graph": graph, "clean": not wrong, "repaired": done, "findings": rows})
        else:
            _print_findings(layout, findings)
        return 1 if wrong else 0


@dataclass(frozen=True, kw_only=True)
class RollbackCommand:
    """Let the experts of an earlier generation count again, or list the generations.

    Examples:
      flowrl rollback exp/demo
      flowrl rollback exp/demo 12
    """

    graph_path: tyro.conf.Positional[Path]
    """Folder of the graph."""
    generation: tyro.conf.Positional[Count | None] = None
    """The generation to go back to; without it they are listed."""
    json: bool = False
    """Print JSON instead of a table."""

    def __call__(self) -> int:
        """Run the command; what is refused changes nothing."""
        layout = _graph(self.graph_path)
        if self.generation is None:
            _print_generations(layout, as_json=self.json)
            return 0
        store = ExpertStore(layout)
        with claimed(layout):
            doctor.refuse_obstacles(layout)
            read_state(layout)  # refused before anything changes
            if self.generation == store.manifest().generation:
                raise ConfigError(
                    f"generation {self.generation} counts now; there is nothing to go back to"
                )
            manifest = repair.rollback(store, self.generation)
            again = train_lost_again(layout)
        live = [place.folder.name for place in live_runs(layout)]
        if self.json:
            numbers = {"generation": manifest.generation, "experts_of": self.generation}
            _print_json({**numbers, "trained_again": list(again), "live_runs": live})
            return 0
        sys.stdout.write(
            f"generation {manifest.generation} has the experts of generation {self.generation}; "
            "the ledger is as it was\n"
        )
        for skill in again:
            sys.stdout.write(f"{skill} will be trained again when the scheduler starts\n")
        if live:
            sys.stdout.write(f"still under way, and merged when they end: {', '.join(live)}\n")
        return 0


@dataclass(frozen=True, kw_only=True)
class RecoverCommand:
    """Make a lost or damaged scheduler_state.json anew from what else is in the folder.

    Examples:
      flowrl recover exp/demo
    """

    graph_path: tyro.conf.Positional[Path] = DEFAULT_GRAPH
    """Folder of the graph."""
    json: bool = False
    """Print JSON instead of lines."""

    def __call__(self) -> int:
        """Run the command; raises FileRefusedError if the manifest or a record is damaged, too."""
        layout = _graph(self.graph_path)
        with claimed(layout):
            doctor.refuse_obstacles(layout)
            found = recover_state(layout)
        if found is not None:
            _print_recovered(layout, found, as_json=self.json)
        elif self.json:
            _print_json({"recovered": False})
        else:
            sys.stdout.write(f"{layout.scheduler_state} is whole: there is nothing to recover\n")
        return 0


def _graph(graph_path: Path) -> GraphPaths:
    layout = GraphPaths(graph_path)
    if not (layout.checkpoints.is_dir() or layout.scheduler_state.is_file()):
        raise FileRefusedError(
            f"{layout.root} is no graph: it has neither checkpoints/ nor scheduler_state.json; "
            "name the folder that --graph_path named"
        )
    return layout


def _row_of(finding: Finding) -> dict[str, str]:
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


def _generations(layout: GraphPaths) -> Iterator[dict[str, Any]]:
    """A row for each generation of the history, oldest first; `written` is None if damaged."""
    before: Manifest | None = None
    for number, known in manifests.read_history(layout):
        if known is None:
            row = {"generation": number, "written": None, "merged": [], "experts": 0, "frames": 0}
            yield row
            continue
        path = manifests.history_file(layout, number)
        yield {
            "generation": number,
            "written": datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(),
            "merged": list(_added(before, known)),
            "experts": len(known.experts),
            "frames": sum(version.frames for version in known.experts.values()),
        }
        before = known


def _added(before: Manifest | None, known: Manifest) -> Iterator[str]:
    """What a generation added to the ledger; of the oldest, only the newest run is known."""
    count = len(before.merged) if before is not None else max(0, len(known.merged) - 1)
    skills = {f"e{index}": version.skill for index, version in known.experts.items()}
    for run_id in known.merged[count:]:
        name = skills.get(run_id.partition(".")[0])
        yield f"{run_id} ({name})" if name else run_id


def _print_generations(layout: GraphPaths, *, as_json: bool) -> None:
    present = ExpertStore(layout).manifest()
    rows = list(_generations(layout))
    if as_json:
        _print_json({"generation": present.generation, "history": rows})
        return
    table = Table(pad_edge=False, box=None, header_style="bold")
    for name in ("generation", "written", "merged", "experts", "frames", ""):
        table.add_column(name, justify="right" if name in {"experts", "frames"} else "left")
    for row in rows:
        when, merged = "damaged", ", ".join(row["merged"])
        if row["written"] is not None:
            when = row["written"].partition(".")[0].partition("+")[0] + "Z"
            merged = merged or "nothing: experts went back"
        now = "counts now" if row["generation"] == present.generation else ""
        numbers = (str(row["experts"]), f"{row['frames']:,}")
        table.add_row(*map(Text, (str(row["generation"]), when, merged, *numbers, now)))
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)
    sys.stdout.write(f"To go back: flowrl rollback {layout.root} GENERATION\n")


def _print_recovered(layout: GraphPaths, found: Recovered, *, as_json: bool) -> None:
    rows = [
        {"skill": item.skill, "expert": item.expert, "status": item.status.kind}
        for item in found.skills
    ]
    kept = None if found.kept is None else str(found.kept)
    if as_json:
        head = {"recovered": True, "kept": kept, "next_expert": found.next_expert}
        _print_json({**head, "skills": rows})
        return
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


def _line(text: str) -> str:
    """Return the text as one line without control characters, which could steer a terminal."""
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(" " if c in {"\\n", "\\r", "\\t"} else c for c in shown)


def _print_json(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
