"""A daemon under load and faults: 2,000 skills, each trained by a process that does no work.

PYTHONPATH=. python scripts/chaos_load.py [--skills 2000] [--runs 2000] [--json FILE]

Every few seconds a runner, a trainer or the scheduler is killed, the scheduler is starved of file
descriptors, or somebody holds the lock that merges need. Prints what each quarter of the runs
cost; exit code 1 when a run was lost or merged twice, or when anything is left over.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

from tests.chaos.load import Load, play

LEFT = ("run_folders_left", "processes_left", "temp_files_left")
ZERO = ("lost", "merged_twice", "gave_up", *LEFT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--skills", type=int, default=2_000)
    parser.add_argument("--runs", type=int, default=2_000)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--every", type=float, default=4.0, help="seconds between faults, about")
    parser.add_argument(
        "--limit", type=float, default=3600.0, help="seconds, after which it ends early"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the report here as well")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="load") as folder:
        load = Load(
            root=Path(folder),
            skills=args.skills,
            runs=args.runs,
            slots=args.slots,
            chance=random.Random(args.seed),
        )
        try:
            every = (0.5 * args.every, 1.5 * args.every)
            found = play(load, every_seconds=every, limit_seconds=args.limit)
        finally:
            load.end()
    for name, value in found.items():
        for line in value if name == "phases" else [value]:
            print(f"{name}: {line}")
    if args.json:
        args.json.write_text(json.dumps({"format": 1, **found}, indent=2) + "\n")
    return 1 if any(found[name] for name in ZERO) else 0


if __name__ == "__main__":
    sys.exit(main())
