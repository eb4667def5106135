"""What a merge costs, next to copying the same bytes: `python scripts/bench_merge.py`.

A run brings ten experts back, nine of which it has trained further. Its folder is made as the
scheduler makes it, its experts are Orbax checkpoints of random numbers that another process has
saved, as a trainer does, and it is merged by the call that the scheduler makes: verified, its
arrays read, committed. Beside it the same ten folders are copied and flushed, file by file: the
least that whoever keeps them must do. What the scheduler does once it has started those that
waited for the merge (archiving the records, removing the folder) has a row of its own.

The peak of memory is that of this process, which holds no arrays.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import psutil
from benchmarking import Row, arguments, paired, report, seconds_of

from flowrl.config import PPOConfig
from flowrl.experts.array_check import start_reader
from flowrl.experts.merge import Candidate, frame_count
from flowrl.experts.store import ExpertStore
from flowrl.parallel.training_processor import archive_run, merge_run
from flowrl.parallel.training_setup import PreparedRun, expected_shapes, prepare_training_run
from flowrl.paths import GraphPaths
from flowrl.runs import ExpertReport, RunResult, Shapes, write_result
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import Skill, skill_from_data

EXPERTS = 10
MAKER = Path(__file__).with_name("making_experts.py")
_READER_LOADS_SECONDS = 1.0
NEW = EXPERTS - 1  # the expert that the run adds


@dataclass(frozen=True, slots=True)
class Size:
    """How large an expert is, and the networks that are so large."""

    megabytes: int
    env_name: str
    layer_size: int

    @property
    def config(self) -> PPOConfig:
        """What a run of such experts is trained with."""
        return PPOConfig(env_name=self.env_name, layer_size=self.layer_size)

    @property
    def shapes(self) -> Shapes:
        """The arrays of one of them."""
        return expected_shapes(
            {
                "env_name": self.env_name,
                "layer_size": self.layer_size,
                "sight": True,
                "egocentric": True,
            }
        )


SMALL = Size(1, "Craftax-Classic-Symbolic-v1", 82)
LARGE = Size(40, "Craftax-Symbolic-v1", 532)


class Bench:
    """A graph with nine experts, finished runs to merge into it, and folders to copy."""

    def __init__(self, place: Path, size: Size, rounds: int) -> None:
        self._size = size
        self._place = place
        self._graph_paths = GraphPaths(place / "graph")
        self._graph = SkillGraph([_skill(number) for number in range(EXPERTS)])
        self._made = self._save(rounds + 1)
        self._commit_first()
        self._copies = count()
        self._attempts = count(1)
        self._ready: PreparedRun | None = None
        self.written: dict[str, list[float]] = {"merge": [], "copy": []}
        self.archiving: list[float] = []

    def merge(self) -> None:
        """Merge the run that is ready."""
        assert self._ready is not None
        before = _written_bytes()
        merge_run(
            ExpertStore(self._graph_paths),
            self._ready.run_paths,
            self._ready.run.skill,
            accounting="acted",
            rule=frame_count,
        )
        self.written["merge"].append(_written_bytes() - before)

    def copy(self) -> None:
        """Copy the experts that the run brings back, and make the copies durable."""
        before = _written_bytes()
        copies = self._place / f"copies{next(self._copies)}"
        copies.mkdir()
        for folder in sorted((self._place / "same").iterdir()):
            shutil.copytree(folder, copies / folder.name)
            _flush(copies / folder.name)
        _flush_one(copies)
        self.written["copy"].append(_written_bytes() - before)

    def next_run(self) -> None:
        """Make another finished run, its experts under a second name to copy them from."""
        self.archive()
        for left in (*self._place.glob("copies*"), *self._place.glob("same")):
            shutil.rmtree(left)
        self._ready = ready = self._finished()
        finals = ready.run_paths.finals
        shutil.copytree(finals, self._place / "same", copy_function=os.link)
        start_reader()  # as the scheduler does, long before the next run ends
        time.sleep(_READER_LOADS_SECONDS)

    def archive(self) -> None:
        """Put away the run that was merged last, if there is one."""
        if self._ready is not None:
            act = partial(archive_run, self._graph_paths, self._ready.run_paths)
            self.archiving.append(seconds_of(act))

    def _save(self, sets: int) -> list[tuple[Path, dict[str, str]]]:
        folder = self._place / "made"
        words = [folder, sets * EXPERTS, self._size.env_name, self._size.layer_size, 0]
        said = subprocess.run(
            [sys.executable, MAKER, *map(str, words)],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        return [(folder / str(number), told) for number, told in enumerate(json.loads(said))]

    def _commit_first(self) -> None:
        """The experts that the first run starts from."""
        candidates = []
        for expert in range(NEW):
            folder, told = self._made.pop()
            candidates.append(
                Candidate(
                    expert=expert,
                    skill=f"Skill {expert}",
                    ancestor=None,
                    gained=1,
                    sha256=told["sha256"],
                    shapes=self._size.shapes,
                    content=told["content"],
                    folder=folder,
                )
            )
        ExpertStore(self._graph_paths).commit("first", candidates, rule=frame_count)
        self._made.pop()

    def _finished(self) -> PreparedRun:
        """A run's folder as a trainer leaves it; each run acts more than the one before."""
        attempt = next(self._attempts)
        ready = prepare_training_run(
            graph_paths=self._graph_paths,
            graph=self._graph,
            skill=f"Skill {NEW}",
            expert=NEW,
            attempt=attempt,
            completed={f"Skill {expert}": expert for expert in range(NEW)},
            config=self._size.config,
        )
        ready.run_paths.finals.mkdir(parents=True)
        reports = []
        for local, expert in enumerate(ready.run.experts):
            folder, told = self._made.pop()
            folder.rename(ready.run_paths.final(local))
            reports.append(
                ExpertReport(expert=expert, acted=attempt, shapes=self._size.shapes, **told)
            )
        write_result(ready.run_paths, _result(ready, tuple(reports)))
        return ready


def _skill(number: int) -> Skill:
    """A skill that needs all those before it."""
    data: dict[str, Any] = {
        "requirements": {f"thing_{earlier}": 1 for earlier in range(number)},
        "gain": {f"thing_{number}": "n"},
        "is_done": "def task_is_done(inventory, n):\n    return inventory.wood >= n\n",
        "reward": "def task_reward(env_reward):\n    return env_reward\n",
    }
    return skill_from_data(f"Skill {number}", data)


def _result(ready: PreparedRun, reports: tuple[ExpertReport, ...]) -> RunResult:
    return RunResult(
        run_id=ready.run.run_id,
        frames=sum(told.acted for told in reports),
        experts=reports,
        success_rate=0.9,
        step_success=(0.9,) * len(ready.run.plan),
        mean_episode_length=40.0,
        updates=3,
        wall_seconds=1.5,
        stopped_early=True,
    )


def _flush(root: Path) -> None:
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            _flush_one(Path(folder, name))
        _flush_one(Path(folder))


def _flush_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _written_bytes() -> int:
    """What this process and its children, ended or living, have sent to the disk."""
    living = (psutil.Process(), *psutil.Process().children(recursive=True))
    return sum(process.io_counters().write_bytes for process in living)


def _peak_megabytes(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(kilobytes) / 1024


def _forget_peak() -> None:
    """Begin to measure this process's peak of memory anew."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def measured(size: Size, rounds: int) -> list[Row]:
    """The rows of one size: time, bytes written, and both peaks of memory."""
    case = f"{EXPERTS} x {size.megabytes} MB"
    with tempfile.TemporaryDirectory() as folder:
        warmups = min(1, rounds - 1)
        bench = Bench(Path(folder), size, warmups + rounds)
        _forget_peak()
        pair = paired(
            bench.merge, bench.copy, rounds=rounds, warmups=warmups, before=bench.next_run
        )
        bench.archive()
        later = 1e3 * statistics.median(bench.archiving[warmups:])
        ours, copied = (statistics.median(bench.written[side]) / 1e6 for side in bench.written)
    return [
        pair.row(case),
        Row(
            case=f"{case}, bytes written",
            ours=ours,
            baseline=copied,
            unit="MB",
            ratio=copied / ours,
        ),
        Row(case=f"{case}, put away later", ours=later, unit="ms"),
    ]


def main() -> int:
    """Measure both sizes, the small one first: a process's peak never sinks."""
    options = arguments(__doc__).parse_args()
    rows, peaks = [], []
    for size, rounds in ((SMALL, 5), (LARGE, 1)) if options.small else ((SMALL, 9), (LARGE, 3)):
        rows += measured(size, rounds)
        peaks.append(_peak_megabytes(os.getpid()))
    rows += [
        Row(
            case="peak memory, 40 MB next to 1 MB experts",
            ours=peaks[1],
            baseline=peaks[0],
            unit="MB",
            ratio=peaks[0] / peaks[1],
        ),
    ]
    report("merge", rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
