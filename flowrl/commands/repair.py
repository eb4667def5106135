"""Commands that find damage and repair it: fsck, rollback, recover."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import tyro

from flowrl.arguments import ReportCommand
from flowrl.console import print_report
from flowrl.errors import ConfigError
from flowrl.experts import manifest as manifests
from flowrl.experts.repair import rollback, whole_generation
from flowrl.experts.store import ExpertStore, refuse_misplaced
from flowrl.parallel.health import DaemonLock
from flowrl.parallel.recovery import found_skills, inspect, recover_state, repair, state_fault
from flowrl.paths import GraphPaths, SweepPaths, existing_graph
from flowrl.storage import locks

_NUMBER = tyro.conf.arg(metavar="GENERATION")
_GENERATION = "{generation:<4}  {written}  {experts:>3} experts  {frames:>14,} frames  {merged}"


@dataclass(frozen=True, kw_only=True)
class FsckCommand(ReportCommand):
    """Check a graph's folder; exit 1 if anything is wrong.

    Examples:
      flowrl fsck exp/demo
      flowrl fsck exp/demo --repair
      flowrl fsck exp/demo --json | jq '.findings[].thing'
    """

    repair: bool = False
    """Put right what can be, then check again; no scheduler may be at work."""

    def __call__(self) -> int:
        """Run the command; raises BusyError if a scheduler is at work where it should repair."""
        graph_paths = _repairable(self.graph_path)
        again, done = graph_paths.command("fsck", "--repair"), list[str]()
        if self.repair:
            with _claimed(graph_paths):
                done += filter(None, repair(graph_paths))
        findings = [
            {"severity": one.severity, "thing": one.thing, "place": str(one.place)}
            | {"remedy": one.remedy or f"stop the scheduler and run {again}"}
            for one in inspect(graph_paths)
        ]
        clean = not findings
        facts = {
            "graph": str(graph_paths.root),
            "clean": clean,
            "repaired": done,
            "findings": findings,
        }
        lines = [f"repair: {sentence}" for sentence in done]
        lines += ["{severity}: {thing} [{place}]: {remedy}".format(**row) for row in findings]
        lines.append(f"{graph_paths.root}: {'clean' if clean else f'{len(findings)} found'}")
        print_report(facts, lines, as_json=self.json)
        return 0 if clean else 1


@dataclass(frozen=True, kw_only=True)
class RollbackCommand(ReportCommand):
    """Let experts of an earlier generation count; list them.

    Examples:
      flowrl rollback exp/demo
      flowrl rollback exp/demo 12
    """

    generation: Annotated[int | None, tyro.conf.Positional, _NUMBER] = None
    """The generation to go back to; without it they are listed."""

    def __call__(self) -> int:
        """Run the command; what is refused changes nothing."""
        graph_paths = _repairable(self.graph_path)
        store = ExpertStore(graph_paths)
        if self.generation is None:
            rows, present = list(_generations(graph_paths)), store.manifest().generation
            lines = [_GENERATION.format(**row) for row in rows]
            lines.append(f"generation {present} counts now")
            print_report({"generation": present, "history": rows}, lines, as_json=self.json)
            return 0
        if self.generation == store.manifest().generation:
            raise ConfigError(
                f"generation {self.generation} counts now; flowrl rollback lists the earlier ones"
            )
        _check_places(graph_paths)  # what is refused, is before anything changes
        state_fault(graph_paths)
        found_skills(graph_paths)
        whole_generation(store, self.generation)
        with _claimed(graph_paths):
            number = rollback(store, self.generation).generation
            state = recover_state(graph_paths)
        said = f"generation {number} has the experts of generation {self.generation}"
        facts = {"generation": number, "experts_of": self.generation, "state": state}
        print_report(facts, [f"{said}; the ledger is as it was", state], as_json=self.json)
        return 0


@dataclass(frozen=True, kw_only=True)
class RecoverCommand(ReportCommand):
    """Make a lost or damaged scheduler_state.json anew.

    Examples:
      flowrl recover exp/demo
    """

    def __call__(self) -> int:
        """Run the command; raises FileRefusedError if the manifest or a record is damaged, too."""
        graph_paths, state = _repairable(self.graph_path), ""
        _check_places(graph_paths)
        if state_fault(graph_paths):
            found_skills(graph_paths)  # what is refused, is before anything changes
            with _claimed(graph_paths):
                state = recover_state(graph_paths)
        line = state or f"{graph_paths.scheduler_state} is whole: there is nothing to recover"
        print_report({"recovered": bool(state), "state": state}, [line], as_json=self.json)
        return 0


def _repairable(graph_path: Path) -> GraphPaths:
    """Return the paths of a graph; raises ConfigError for the folder of a sweep."""
    if SweepPaths(graph_path).sweep_json.exists():
        root = graph_path.absolute()
        again = GraphPaths(root.parents[1]).command("sweep", "--name", root.name)
        raise ConfigError(f"{graph_path} is a sweep, which leaves out what is damaged: {again}")
    return existing_graph(graph_path)


def _check_places(graph_paths: GraphPaths) -> None:
    """Raise FileRefusedError if a link or a file is in the place of a folder, or of the lock."""
    refuse_misplaced(graph_paths)
    locks.check_plain(graph_paths.daemon_lock)


@contextmanager
def _claimed(graph_paths: GraphPaths) -> Iterator[None]:
    """Hold the graph's folder; raises BusyError if a scheduler or another repair holds it."""
    _check_places(graph_paths)
    claim = DaemonLock(graph_paths.daemon_lock, shared=None)
    claim.acquire()
    try:
        yield
    finally:
        claim.release()


def _generations(graph_paths: GraphPaths) -> Iterator[dict[str, Any]]:
    """A row for each whole generation of the history, oldest first, with the runs it merged."""
    known_before = -1  # of the oldest, only the newest run is known to be new
    for number, known in manifests.read_history(graph_paths):
        if known is None:
            continue
        skills = {f"e{index}": version.skill for index, version in known.experts.items()}
        added = known.merged[known_before:] if known.merged else ()
        written = manifests.history_file(graph_paths, number).stat().st_mtime
        yield {
            "generation": number,
            "written": datetime.fromtimestamp(int(written), UTC).isoformat(),
            "merged": ", ".join(f"{run} ({skills.get(run.partition('.')[0])})" for run in added),
            "experts": len(known.experts),
            "frames": sum(version.frames for version in known.experts.values()),
        }
        known_before = len(known.merged)
