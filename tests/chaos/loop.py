"""The fault loop: every scenario, every mode, every operation. Needs the shim preloaded.

`python -m tests.chaos.loop FOLDER REPORT [--stride N] [--share 0/2] [--policies a,b]`
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.config import MergePolicyName
from flowrl.paths import GraphPaths
from tests.chaos.frozen import Frozen, leftovers
from tests.chaos.scenarios import Scenario, scenarios
from tests.chaos.shim import FIVE, KILLS, End, Mode, Shim

MANY = 25
POLICIES: tuple[MergePolicyName, ...] = ("frame_count", "frame_average", "eval_gate")
WRONGS = ("inconsistent reads", "wrong end states", "leftovers", "leaks", "wrong errors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Some:
    """Which faults are tried: of `MANY` operations every `stride`-th, and of those one share."""

    stride: int = 1
    share: int = 0
    shares: int = 1
    modes: tuple[Mode, ...] = FIVE


@dataclass(slots=True)
class Tally:
    """What came of the faults of one scenario."""

    scenario: str
    operations: int = 0
    faults: Counter[str] = field(default_factory=Counter)  # by mode
    wrong: Counter[str] = field(default_factory=Counter)  # by kind
    examples: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def blame(self, kind: str, where: str, why: object) -> None:
        """Write down one wrong outcome."""
        self.wrong[kind] += 1
        if len(self.examples) < 20:
            self.examples.append(f"{kind}: {where}: {str(why)[:2000]}")

    def as_json(self) -> dict[str, Any]:
        """The tally for a report."""
        wrong = {kind: self.wrong[kind] for kind in WRONGS}
        return {
            "scenario": self.scenario,
            "operations": self.operations,
            "faults": dict(self.faults),
            "injected": self.faults.total(),
            "seconds": round(self.seconds, 2),
            **wrong,
            "examples": self.examples,
        }


class Bench:
    """One scenario laid out again for every fault."""

    def __init__(self, shim: Shim, scenario: Scenario, folder: Path) -> None:
        self.shim, self.scenario = shim, scenario
        self.graph_paths = GraphPaths(folder / "graph")
        self.graph_paths.root.mkdir(parents=True)
        scenario.build(self.graph_paths)
        self.start = Frozen.of(self.graph_paths.root)
        self.parts = set(leftovers(self.graph_paths.root, parts_only=True))  # of a killed merge
        before = scenario.look(self.graph_paths)
        whole = self._meet(Mode.COUNT, -1)
        assert whole.end is End.DONE, whole
        self.readings = (before, scenario.look(self.graph_paths))
        scenario.end_it(self.graph_paths)
        self.wanted = scenario.end(self.graph_paths)
        self.tally = Tally(scenario.name, operations=whole.seen)

    def try_all(self, some: Some) -> Tally:
        """The operations that are this process's share, in every mode."""
        began = time.perf_counter()
        stride = some.stride if self.tally.operations > MANY else 1
        for offset, mode in enumerate(some.modes):  # of a stride, each mode takes another operation
            at = some.share * stride + offset % stride
            while self.try_one(mode, at):
                at += stride * some.shares
        self.tally.seconds = time.perf_counter() - began
        return self.tally

    def try_one(self, mode: Mode, at: int) -> bool:
        """One fault; False once the act ended before it was met."""
        self.start.lay_out(self.graph_paths.root)
        met = self._meet(mode, at)
        if not met.met:
            return False
        self.tally.faults[mode.name] += 1
        where = f"{self.scenario.name}, {mode.name} at {at} ({met.where})"
        self._check_end(mode, met, where)
        self._check_reading(where)
        self._check_recovery(mode, at, where)
        return True

    def _meet(self, mode: Mode, at: int):
        root = self.graph_paths.root
        return self.shim.meet(root, mode, at, lambda: self.scenario.act(self.graph_paths))

    def _check_end(self, mode: Mode, met: Any, where: str) -> None:
        if met.end is End.LEAKED:
            self.tally.blame("leaks", where, "a descriptor stays open")
        elif (met.end is End.KILLED) != (mode in KILLS) or met.end is End.BROKEN:
            self.tally.blame("wrong errors", where, met.end)
        parts = set(leftovers(self.graph_paths.root, parts_only=True)) - self.parts
        if parts and mode not in KILLS:
            self.tally.blame("leftovers", where, parts)
        if met.end is End.DONE and self.scenario.look(self.graph_paths) != self.readings[1]:
            self.tally.blame("wrong end states", where, "it said that all was done")

    def _check_reading(self, where: str) -> None:
        try:
            reading = self.scenario.look(self.graph_paths)
        except Exception as error:  # noqa: BLE001 whatever a reader stumbles over is a finding
            self.tally.blame("inconsistent reads", where, repr(error))
            return
        if reading not in self.readings:
            self.tally.blame("inconsistent reads", where, reading)

    def _check_recovery(self, mode: Mode, at: int, where: str) -> None:
        try:
            if mode not in KILLS and at % 2:  # the same process tries again, without recovery
                self.scenario.act(self.graph_paths)
            self.scenario.end_it(self.graph_paths)
            found = self.scenario.end(self.graph_paths)
        except Exception as error:  # noqa: BLE001 as above
            self.tally.blame("wrong end states", where, repr(error))
            return
        if left := leftovers(self.graph_paths.root):
            self.tally.blame("leftovers", where, left)
        elif found != self.wanted:
            self.tally.blame("wrong end states", where, _difference(found, self.wanted))


def _difference(found: Any, wanted: Any) -> str:
    if isinstance(found, tuple) and isinstance(wanted, tuple) and len(found) == len(wanted):
        return "; ".join(_difference(f, w) for f, w in zip(found, wanted, strict=True) if f != w)
    if isinstance(found, dict) and isinstance(wanted, dict):
        names = {name for name in {*found, *wanted} if found.get(name, 0) != wanted.get(name, 0)}
        return f"files {sorted(map(str, names))}"
    return f"found {found}, wanted {wanted}"


def run(
    folder: Path, *, some: Some, policies: Sequence[MergePolicyName], only: str, skip: str
) -> dict[str, Any]:
    """The whole loop, or this process's share of it."""
    logging.disable(logging.CRITICAL)
    shim = Shim()
    gc.freeze()
    began = time.perf_counter()
    tallies = []
    for number, scenario in enumerate(scenarios(policies)):
        if only in scenario.name and not (skip and skip in scenario.name):
            bench = Bench(shim, scenario, folder / str(number))
            tallies.append(bench.try_all(some).as_json())
    return {**totals(tallies), "seconds": time.perf_counter() - began, "scenarios": tallies}


def totals(tallies: list[dict[str, Any]]) -> dict[str, int]:
    """All faults of all scenarios, and all that went wrong."""
    return {kind: sum(tally[kind] for tally in tallies) for kind in ("injected", *WRONGS)}


def main() -> int:
    """Write the report; 0 when nothing was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--share", default="0/1")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--only", default="")
    parser.add_argument("--skip", default="")
    parser.add_argument("--modes", default=",".join(mode.name for mode in FIVE))
    args = parser.parse_args()
    share, shares = map(int, args.share.split("/"))
    modes = tuple(Mode[name] for name in args.modes.split(","))
    some = Some(stride=args.stride, share=share, shares=shares, modes=modes)
    policies: list[MergePolicyName] = [p for p in POLICIES if p in args.policies.split(",")]
    report = run(args.folder, some=some, policies=policies, only=args.only, skip=args.skip)
    args.report.write_text(json.dumps(report, indent=2))
    return int(any(report[kind] for kind in WRONGS))


if __name__ == "__main__":
    sys.exit(main())
