"""Cut the power of a real ext4 while a graph is written, and count what is lost.

sudo python scripts/chaos_power.py [--cuts 100] [--seed 1] [--json FILE]

Each cut shuts a loop-mounted file system down at a random operation of merge, archive, prepare,
garbage collection or state save, without flushing its journal; it is mounted again and recovered.
Needs root, loop devices, mkfs.ext4 and a C compiler; ends with 1 when anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.chaos import power, shim
from tests.chaos.loop import WRONGS


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cuts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if shim.compiler() is None:
            sys.exit("no C compiler: apt-get install gcc libc6-dev")
        if why := power.obstacle(folder):
            sys.exit(why)
        report = folder / "report.json"
        words = (str(folder), str(report), "--cuts", str(args.cuts), "--seed", str(args.seed))
        shim.with_shim(shim.compiled(folder), "tests.chaos.power", *words, within=power.ALONE)
        found = json.loads(report.read_text())
    show(found)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return int(any(found[kind] for kind in WRONGS))


def show(report: dict) -> None:
    print(f"{'scenario':24}{'cuts':>8}" + "".join(f"{kind:>20}" for kind in WRONGS))
    for row in (*report["scenarios"], {**report, "scenario": "all"}):
        figures = "".join(f"{row[kind]:>20}" for kind in WRONGS)
        print(f"{row['scenario']:24}{row['injected']:>8}{figures}")
        for example in row.get("examples", ())[:5]:
            print(f"  {example}")
    print(f"{report['seconds']:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
