"""Fail every operation on files that a graph makes, in five ways, and count what goes wrong.

python scripts/chaos_faults.py [--json FILE] [--stride N] [--only NAME] [--jobs N]

Merge, archive, recovery, prepare, resume, garbage collection, state save and requests are killed
before and after each operation, torn in each write, failed once with an I/O error, and put on a
disk that is full from each operation on. Needs a C compiler; ends with 1 when anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.chaos import shim
from tests.chaos.loop import POLICIES, WRONGS, totals


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--stride", type=int, default=1, help="of merges, every N-th operation")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--only", default="", help="scenarios whose name holds this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if shim.compiler() is None:
        sys.exit("no C compiler: apt-get install gcc libc6-dev")
    began = time.perf_counter()
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        parts = shares(Path(folder), args)
    report = together(parts)
    report["wall_seconds"] = round(time.perf_counter() - began, 1)
    show(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return int(any(report[kind] for kind in WRONGS))


def shares(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each process's report; they share the operations of every scenario."""
    library = shim.compiled(folder)

    def one(number: int) -> dict[str, Any]:
        report = folder / f"{number}.json"
        room = folder / str(number)
        room.mkdir()
        shim.with_shim(
            library,
            "tests.chaos.loop",
            *(str(room), str(report), "--stride", str(args.stride), "--only", args.only),
            *("--share", f"{number}/{args.jobs}", "--policies", args.policies),
        )
        return json.loads(report.read_text())

    with ThreadPoolExecutor(args.jobs) as pool:
        return list(pool.map(one, range(args.jobs)))


def together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One report out of all shares."""
    tallies = []
    for rows in zip(*(part["scenarios"] for part in parts), strict=True):
        modes = sorted({mode for row in rows for mode in row["faults"]})
        tallies.append(
            {
                "scenario": rows[0]["scenario"],
                "operations": rows[0]["operations"],
                "faults": {mode: sum(row["faults"].get(mode, 0) for row in rows) for mode in modes},
                **totals(list(rows)),
                "examples": [example for row in rows for example in row["examples"]],
            }
        )
    return {**totals(tallies), "scenarios": tallies}


def show(report: dict[str, Any]) -> None:
    heads = ("operations", "injected", *WRONGS)
    print(f"{'scenario':28}" + "".join(f"{head:>20}" for head in heads))
    for row in report["scenarios"]:
        print(f"{row['scenario']:28}" + "".join(f"{row[head]:>20}" for head in heads))
        for example in row["examples"][:5]:
            print(f"  {example}")
    print(f"{'all':28}{'':>20}" + "".join(f"{report[head]:>20}" for head in heads[1:]))
    print(f"{report['wall_seconds']} s")


if __name__ == "__main__":
    sys.exit(main())
