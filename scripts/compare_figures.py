"""Hold a folder of benchmark figures against the committed ones, as ratios.

python scripts/compare_figures.py FOLDER [--figures docs/figures] [--write]

Both folders hold one JSON file for each benchmark, as `bench_*.py --json` writes it. Machines
differ in speed, so only ratios to a baseline of the same minute are judged: a case is worse when
its ratio has fallen below 0.7 of the committed one. Ends with 1 when one is worse; --write then
replaces the committed figures all the same.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
WORSE = 0.7  # of the committed ratio: a busy machine moves most ratios less


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One case of one benchmark: a value in its unit, and how many times the baseline that is."""

    benchmark: str
    case: str
    ours: float
    unit: str
    ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A case then and now; None where it was not measured."""

    then: Figure | None
    now: Figure | None

    @property
    def verdict(self) -> str:
        """In a word, for the table."""
        if self.now is None:
            return "not run"
        if self.then is None:
            return "new"
        if self.then.ratio is None or self.now.ratio is None:
            return ""
        return "WORSE" if self.now.ratio < WORSE * self.then.ratio else "as good"


def figures(folder: Path) -> dict[tuple[str, str], Figure]:
    """The figures in a folder, by benchmark and case; a folder that is not there has none."""
    return {
        (found.benchmark, found.case): found
        for path in sorted(folder.glob("*.json"))
        for found in _in_file(path)
    }


def _in_file(path: Path) -> Iterator[Figure]:
    facts = json.loads(path.read_text(encoding="utf-8"))
    for row in facts["rows"]:
        yield Figure(
            benchmark=facts["benchmark"],
            case=row["case"],
            ours=row["ours"],
            unit=row["unit"],
            ratio=row["ratio"],
        )


def compared(committed: Path, measured: Path) -> list[Compared]:
    """Every case of either folder, in the committed order, new ones last."""
    then, now = figures(committed), figures(measured)
    return [Compared(then=then.get(key), now=now.get(key)) for key in {**then, **now}]


def show(cases: list[Compared]) -> None:
    """Print the table."""
    table = Table()
    for name in ("benchmark", "case", "then", "now", ""):
        table.add_column(name, justify="right" if name in {"then", "now"} else "left")
    for case in cases:
        either = case.now or case.then
        assert either is not None
        table.add_row(
            either.benchmark, either.case, _said(case.then), _said(case.now), case.verdict
        )
    Console().print(table)


def _said(figure: Figure | None) -> str:
    if figure is None:
        return ""
    if figure.ratio is not None:
        return f"{figure.ratio:.2f} ×"
    return f"{figure.ours:,.4g} {figure.unit}"


def main() -> int:
    """Compare, show, and replace if that is asked for; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the figures of now")
    parser.add_argument("--figures", type=Path, default=FIGURES, help="the committed figures")
    parser.add_argument("--write", action="store_true", help="replace the committed figures")
    options = parser.parse_args()
    cases = compared(options.figures, options.folder)
    show(cases)
    worse = [case for case in cases if case.verdict == "WORSE"]
    if options.write:
        options.figures.mkdir(parents=True, exist_ok=True)
        for path in sorted(options.folder.glob("*.json")):
            shutil.copy(path, options.figures / path.name)
    if not any(case.now for case in cases):
        sys.stderr.write(f"{options.folder} holds no figures\n")
        return 2
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
