#!/usr/bin/env python3
"""How many skills of Craftax-Classic the merged agent masters after 20, 60 and 120 minutes.

    scripts/learn_classic.sh [--minutes 20|60|120] [--folder exp/classic] [--json FILE]

It trains the whole library with the defaults and a goal of 90 %. When all skills have ended, deep
ones below the goal are trained on with twice the frames. At each mark the training stops and every
merged skill plays 256 episodes in fresh worlds; then the training goes on. Minutes are those of
training alone. A skill counts when 80 % of its episodes succeed and it is one of the game's 22
achievements. The same command goes on with a folder that is there; --fresh removes it first.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarking import Row, arguments, report

import flowrl
from flowrl.games.craftax import CLASSIC
from flowrl.paths import GraphPaths
from flowrl.reports.status import status_document

MARKS = (20, 60, 120)
LEAST = 0.8
BEFORE = {20: 13, 60: 17}  # at 1c9961b, after 20 and 60 minutes
DEEP = 3_000_000  # frames of a deep skill's first run
MOST_PASSES = 5
FLOWRL = (sys.executable, "-m", "flowrl")


def train(folder: Path, minutes: float, flags: list[str], passes: int) -> int:
    """Train for so many minutes; runs under way save what they have.

    `passes` of the library have ended before, each with twice the frames of the one before it.
    Returns how many have ended now.
    """
    ends = time.monotonic() + 60 * minutes
    while (left := ends - time.monotonic()) > 0 and passes < MOST_PASSES:
        more = ["--total_timesteps", str(DEEP << passes)] if passes else []
        words = ["train", str(folder), "--success_state_rate", "0.9", *more, *flags]
        training = subprocess.Popen([*FLOWRL, *words], stdout=subprocess.DEVNULL)
        try:
            training.wait(left)
        except subprocess.TimeoutExpired:
            subprocess.run([*FLOWRL, "stop", str(folder), "--now"], check=True)
            training.wait()
            return passes
        passes += 1
    return passes


def measured(folder: Path) -> dict[str, float]:
    """The success of every merged skill in fresh worlds, best first."""
    skills = status_document(GraphPaths(folder))["skills"]
    merged = [row["skill"] for row in skills if row["expert_frames"]]
    rates = {skill: flowrl.evaluate(folder, skill).success_rate for skill in merged}
    return dict(sorted(rates.items(), key=lambda rate: -rate[1]))


def rows(folder: Path, marks: tuple[int, ...], flags: list[str]) -> Iterator[Row]:
    """One row for each mark."""
    trained = passes = 0
    for mark in marks:
        passes = train(folder, mark - trained, flags, passes)
        trained = mark
        began, rates = time.monotonic(), measured(folder)
        names = {skill.upper().replace(" ", "_") for skill, rate in rates.items() if rate >= LEAST}
        mastered = len(names & CLASSIC.enums["Achievement"])
        shown = ", ".join(f"{skill} {rate:.0%}" for skill, rate in rates.items())
        sys.stdout.write(f"after {mark} minutes: {shown} ({time.monotonic() - began:.0f} s)\n")
        sys.stdout.flush()
        baseline = BEFORE.get(mark)
        yield Row(
            case=f"skills of 22 with 80 % or more after {mark} minutes",
            ours=mastered,
            baseline=baseline,
            unit="skills",
            ratio=mastered / baseline if baseline else None,
        )


def main() -> int:
    """Train, measure and report."""
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=int, choices=MARKS, default=20)
    parser.add_argument("--folder", type=Path, default=Path("exp/classic"))
    parser.add_argument("--fresh", action="store_true", help="remove the folder first")
    args, flags = parser.parse_known_args()
    if args.fresh:
        shutil.rmtree(args.folder, ignore_errors=True)
    marks = tuple(mark for mark in MARKS if mark <= args.minutes)
    if args.small:
        marks, flags = (1,), [*flags, "--max_nodes", "2"]
    report("classic", list(rows(args.folder, marks, flags)), args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
