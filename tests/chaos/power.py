"""Power cuts on a real file system: an ext4 of its own is shut down without flushing its journal.

`python -m tests.chaos.power FOLDER REPORT --cuts N`, as root and with the shim preloaded, cuts at
random operations, mounts the file system again, which replays its journal, and looks what is left.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.chaos.frozen import leftovers
from tests.chaos.loop import POLICIES, WRONGS, Bench, totals
from tests.chaos.scenarios import scenarios
from tests.chaos.shim import End, Mode, Shim

CUTS = (Mode.CUT_BEFORE, Mode.CUT_AFTER, Mode.CUT_BEFORE_COMMIT, Mode.CUT_AFTER_COMMIT)
NAMES = ("merge", "archive", "prepare", "garbage", "state save")
AT_END = 0.15  # of the cuts come when the act has just ended
# With mounts of its own: a sandbox that starts meanwhile would copy ours and keep the disk mounted.
ALONE = ("unshare", "--mount")
_MEGABYTES = 48


def obstacle(folder: Path) -> str:
    """Why no power can be cut here; empty when it can."""
    if os.geteuid() != 0:
        return "power cuts need root"
    for program in ("mkfs.ext4", "mount", "umount", "losetup", "unshare"):
        if shutil.which(program) is None:
            return f"power cuts need {program}"
    try:
        with Disk(folder / "trial").mounted():
            return ""
    except subprocess.CalledProcessError as error:
        return f"no loop device can be mounted: {error.stderr.decode().strip()}"


class Disk:
    """An ext4 in a file, mounted at `place`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.place = folder / "disk"
        self._image = folder / "image"
        self.place.mkdir()
        with self._image.open("wb") as file:
            file.truncate(_MEGABYTES * 2**20)
        _run("mkfs.ext4", "-q", "-F", "-b", "4096", "-J", "size=4", str(self._image))

    @contextmanager
    def mounted(self) -> Iterator[int]:
        """Mount it; gives a descriptor of its root, which is closed before the end."""
        _run("mount", "-o", "loop,noatime", str(self._image), str(self.place))
        root = os.open(self.place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield root
        finally:
            os.close(root)
            _run("umount", str(self.place))


class PowerBench(Bench):
    """One scenario on a disk whose power is cut."""

    def try_cut(self, disk: Disk, mode: Mode, at: int) -> None:
        """Cut at this operation, or once the act has ended; what had ended must still be there."""
        ended = at == self.tally.operations
        with disk.mounted() as root:
            self.start.lay_out(self.graph_paths.root)
            os.sync()
            self.shim.mount = root
            met = self.shim.meet(self.graph_paths.root, mode, at, self._until_the_end)
        where = f"{self.scenario.name}, {mode.name} at {at} ({met.where})"
        self.tally.faults[mode.name] += 1
        if not met.met or met.end is not End.KILLED or "no power cut" in met.where:
            self.tally.blame("wrong errors", where, met)
        with disk.mounted():
            self._check_reading(where)
            if ended and self.scenario.look(self.graph_paths) != self.readings[1]:
                self.tally.blame("wrong end states", where, "what was done is undone")
            self._check_recovery(Mode.KILL_BEFORE, at, where)
            if left := leftovers(self.graph_paths.root):
                self.tally.blame("leftovers", where, left)

    def _until_the_end(self) -> None:
        self.scenario.act(self.graph_paths)
        self.shim.die()


def run(folder: Path, *, cuts: int, seed: int) -> dict[str, Any]:
    """So many cuts, shared by the scenarios, at random operations."""
    logging.disable(logging.CRITICAL)
    chance = random.Random(seed)
    began = time.perf_counter()
    tallies = []
    wanted = [s for s in scenarios(POLICIES[:1]) if s.name.startswith(NAMES)]
    for number, scenario in enumerate(wanted):
        disk = Disk(folder / str(number))
        with disk.mounted() as root:
            shim = Shim(real_sync=True, mount=root)
            bench = PowerBench(shim, scenario, disk.place)
        for _ in range(number, cuts, len(wanted)):
            operations = bench.tally.operations
            at = operations if chance.random() < AT_END else chance.randrange(operations)
            bench.try_cut(disk, chance.choice(CUTS), at)
        tallies.append(bench.tally.as_json())
    return {**totals(tallies), "seconds": time.perf_counter() - began, "scenarios": tallies}


def main() -> int:
    """Write the report; 0 when nothing was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("--cuts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    report = run(args.folder, cuts=args.cuts, seed=args.seed)
    args.report.write_text(json.dumps(report, indent=2))
    return int(any(report[kind] for kind in WRONGS))


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
