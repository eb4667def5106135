"""What all benchmarks share: pairs taken in turns, a table, and figures in a file.

A machine is faster at one moment than at another, and most of all when others use it. So ours and
the baseline are run in turns, within the same seconds, and what is believed is the median of the
rounds' ratios, not the quotient of two times.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case: medians in `unit`, and how many times better ours is (more than 1: better).

    Where there is nothing to compare with, `baseline` and `ratio` are None.
    """

    case: str
    ours: float
    baseline: float | None = None
    unit: str
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """Seconds of both sides, round by round."""

    ours: tuple[float, ...]
    baseline: tuple[float, ...]

    @property
    def speedup(self) -> float:
        """Median over the rounds of how many times as long the baseline took."""
        rounds = zip(self.ours, self.baseline, strict=True)
        return statistics.median(baseline / ours for ours, baseline in rounds)

    def row(self, case: str) -> Row:
        """The pair as milliseconds."""
        ours, baseline = (1e3 * statistics.median(side) for side in (self.ours, self.baseline))
        return Row(case=case, ours=ours, baseline=baseline, unit="ms", ratio=self.speedup)

    def rate_row(self, case: str, *, work: float, unit: str) -> Row:
        """The pair as `work` per second, for instance environment steps."""
        ours, baseline = (work / statistics.median(side) for side in (self.ours, self.baseline))
        return Row(case=case, ours=ours, baseline=baseline, unit=unit, ratio=self.speedup)


def paired(
    ours: Callable[[], object],
    baseline: Callable[[], object],
    *,
    rounds: int,
    warmups: int = 1,
    before: Callable[[], object] = lambda: None,
    pause_seconds: float = 0.0,
) -> Pair:
    """Time both in turns, the order changing from round to round.

    Each must return only when its work is done: end jax work with `jax.block_until_ready`.
    `before` prepares each round and is not timed. `pause_seconds` go by before each side: XLA gives
    memory back in threads of its own, after it has said that it is ready, and that should not be
    counted as time of whoever comes next.
    """
    for _ in range(warmups):
        for act in (before, ours, baseline):
            act()
    seconds: dict[Callable[[], object], list[float]] = {ours: [], baseline: []}
    for number in range(rounds):
        before()
        for side in (ours, baseline) if number % 2 else (baseline, ours):
            time.sleep(pause_seconds)
            seconds[side].append(seconds_of(side))
    return Pair(tuple(seconds[ours]), tuple(seconds[baseline]))


def seconds_of(act: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--small", action="store_true", help="fewer cases and rounds")
    return parser


def report(benchmark: str, rows: Sequence[Row], file: Path | None) -> None:
    """Print a table; write the figures to a file, if one is asked for."""
    table = Table(title=f"{benchmark}, {date.today()}, {machine()}")
    table.add_column("case")
    for name in ("flowrl", "baseline", "unit", "ratio"):
        table.add_column(name, justify="left" if name == "unit" else "right")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.case, _number(row.ours), _number(row.baseline), row.unit, ratio)
    Console().print(table)
    if file is not None:
        found = {
            "benchmark": benchmark,
            "date": str(date.today()),
            "machine": machine(),
            "rows": [asdict(row) for row in rows],
        }
        file.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def machine() -> str:
    """The machine in a few words, without its name."""
    memory = psutil.virtual_memory().total / 2**30
    words = [_processor(), f"{os.cpu_count()} cores", f"{memory:.0f} GiB"]
    words += [gpu for gpu in [_gpu()] if gpu]
    return ", ".join([*words, f"Python {platform.python_version()}"])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpu() -> str:
    """The GPU that jax runs on, where it is loaded and on one."""
    jax: Any = sys.modules.get("jax")
    if jax is None or jax.default_backend() == "cpu":
        return ""
    return jax.devices()[0].device_kind


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
