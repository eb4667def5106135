"""A graph of skills, one after another and side by side: `python scripts/bench_parallel.py`.

Nine skills of Craftax-Classic, six that need nothing and three that need some of those, each with a
fixed number of frames, so that nothing depends on how well they learn. Sequential training is
`flowrl.bottomup`. Parallel training is `flowrl.bottomup_parallel`.
Whether runs side by side gain anything depends on what one run leaves unused, so for every way of
training the table says how busy the processors, or the GPU, were.

No schedule can beat the longest chain of needs; that bound is computed from the time that each run
took in the sequential training, where it had the machine to itself.

    --runs_per_gpu 1 2 4   so many runs at a time on a GPU; without a GPU, on the processors
    --pinned               also with every run pinned to processors of its own
    --cold                 do not fill the compile cache before anything is timed
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from benchmarking import Row, arguments, report

STORY = Path(__file__).with_name("training_some.py")
NEEDS: dict[str, tuple[str, ...]] = {
    "Collect Wood": (),
    "Collect Sapling": (),
    "Collect Drink": (),
    "Wake Up": (),
    "Eat Cow": (),
    "Defeat Zombie": (),
    "Place Table": ("Collect Wood",),
    "Place Plant": ("Collect Sapling",),
    "Make Wood Pickaxe": ("Collect Wood", "Place Table"),
}
FEW = ("Collect Wood", "Collect Sapling", "Wake Up", "Place Table")
WARMING = ("Collect Wood", "Place Table", "Make Wood Pickaxe")  # runs of one, two, three experts
_GPU = ("nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")
_SAMPLE_SECONDS = 0.5
_SET_CHILD_SUBREAPER = 36


@dataclass(kw_only=True)
class Load:
    """How busy the GPUs are while a block runs, in percent, by samples; none without a GPU."""

    gpu: list[float] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Load:
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._sampler.join()

    def _sample(self) -> None:
        while shutil.which(_GPU[0]) and not self._over.wait(_SAMPLE_SECONDS):
            said = subprocess.run(_GPU, capture_output=True, text=True, check=True).stdout
            self.gpu.append(statistics.mean(float(line) for line in said.splitlines()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One training of the graph."""

    seconds: float
    own_share: float  # of all processors, that its processes used, in percent
    load: Load
    runs: Mapping[str, float]  # seconds of each run, if they were trained one after another


class Bench:
    """Trains the same graph in several ways."""

    def __init__(self, folder: Path, skills: Sequence[str], words: Sequence[str]) -> None:
        self._folder = folder
        self._skills = skills
        self._words = words

    def warm(self, story: str, *flags: str) -> None:
        """Let all programs be compiled and kept that this way of training needs.

        They depend on how many threads a run has, so each way has its own; skills share them.
        """
        few = [skill for skill in WARMING if skill in self._skills]
        self._train(story, few, 1, flags)

    def train(self, story: str, frames: int, *flags: str) -> Trained:
        """Train the graph from nothing, each skill for so many frames."""
        return self._train(story, self._skills, frames, flags)

    def _train(
        self, story: str, skills: Sequence[str], frames: int, flags: Sequence[str]
    ) -> Trained:
        graph = self._folder / "graph"
        shutil.rmtree(graph, ignore_errors=True)
        names = ",".join(skills)
        words = [story, names, "--graph_path", str(graph), "--total_timesteps", str(frames)]
        words += ["--success_state_rate", "1", "--min_success_rate", "0"]
        words += ["--needs_success_rate", "0", *flags, *self._words]
        used, began, began_at = _processor_seconds(), time.perf_counter(), datetime.now(UTC)
        with Load() as load:
            self._run(words)
        seconds = time.perf_counter() - began
        _reap_orphans()
        used = (_processor_seconds() - used) / (seconds * (os.cpu_count() or 1))
        return Trained(
            seconds=seconds,
            own_share=100 * used,
            load=load,
            runs=_own_seconds(began_at, _ends(graph)),
        )

    def _run(self, words: Sequence[str]) -> None:
        with (self._folder / "log").open("w+", encoding="utf-8") as log:
            argv = [sys.executable, str(STORY), *words]
            if code := subprocess.run(argv, stdout=log, stderr=log, check=False).returncode:
                log.seek(0)
                raise SystemExit(f"{' '.join(words)} ended with {code}\n{log.read()[-2000:]}")


def _adopt_orphans() -> None:
    """Become the parent of what outlives the scheduler by a moment, so that its time counts."""
    if ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise SystemExit("this process cannot adopt others")


def _reap_orphans() -> None:
    with suppress(ChildProcessError):  # none is left
        while True:
            os.waitpid(-1, 0)


def _processor_seconds() -> float:
    """What this process's ended children and their children have used."""
    times = os.times()
    return times.children_user + times.children_system


def _ends(graph: Path) -> dict[str, datetime]:
    """When the expert of every skill was merged, as the scheduler has told it."""
    lines = (graph / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    return {
        event["skill"]: datetime.fromisoformat(event["at"])
        for event in events
        if event["status"] == "completed"
    }


def _own_seconds(began: datetime, ends: Mapping[str, datetime]) -> dict[str, float]:
    """Seconds of every run of a sequential training: each begins when the one before it ends."""
    order = sorted(ends, key=lambda skill: ends[skill])
    starts = [began, *(ends[skill] for skill in order)]
    return {
        skill: (ends[skill] - start).total_seconds()
        for skill, start in zip(order, starts, strict=False)
    }


def _chain_seconds(runs: Mapping[str, float]) -> float:
    """How long the longest chain of needs takes."""
    done: dict[str, float] = {}
    for skill in (name for name in NEEDS if name in runs):
        done[skill] = runs[skill] + max((done[need] for need in NEEDS[skill]), default=0.0)
    return max(done.values())


def _ways(numbers: Sequence[int], *, pinned: bool) -> dict[str, tuple[str, ...]]:
    """The ways of training side by side, and the flags of each."""
    ways: dict[str, tuple[str, ...]] = {}
    for number in numbers:
        flags = ("--launcher", "local", "--max_parallel_skills", str(number))
        if shutil.which(_GPU[0]):
            ways[f"{number} per GPU"] = (*flags, "--skills_per_gpu", str(number))
            continue
        ways[f"{number} at a time"] = flags
        if pinned:
            width = max(1, (os.cpu_count() or 1) // number)
            ways[f"{number} at a time, pinned"] = (*flags, "--cpus_per_run", str(width))
    return ways


def rows(alone: Trained, trained: Mapping[str, Trained]) -> list[Row]:
    """Every way of training next to one skill after another, and what bounds it."""
    chain = _chain_seconds(alone.runs)
    found = [_busy("one after another", alone, alone)]
    for way, side_by_side in trained.items():
        seconds = side_by_side.seconds
        for case, baseline in ((way, alone.seconds), (f"{way}, next to the longest chain", chain)):
            found.append(
                Row(case=case, ours=seconds, baseline=baseline, unit="s", ratio=baseline / seconds)
            )
        found.append(_busy(way, side_by_side, alone))
    return found


def _busy(way: str, trained: Trained, alone: Trained) -> Row:
    if trained.load.gpu:
        ours, baseline = (statistics.mean(side.load.gpu) for side in (trained, alone))
        return Row(case=f"{way}, GPU busy", ours=ours, baseline=baseline, unit="%")
    return Row(
        case=f"{way}, processors busy",
        ours=trained.own_share,
        baseline=alone.own_share,
        unit="%",
    )


def main() -> int:
    """Measure and report; flags that are not ours go to the training."""
    parser = arguments(__doc__)
    parser.add_argument("--runs_per_gpu", type=int, nargs="+", default=[2])
    parser.add_argument("--pinned", action="store_true")
    parser.add_argument("--cold", action="store_true")
    options, words = parser.parse_known_args()
    _adopt_orphans()
    skills, frames = (FEW, 16_384) if options.small else (tuple(NEEDS), 163_840)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), skills, words)
        ways = _ways(options.runs_per_gpu, pinned=options.pinned)
        if not options.cold:
            bench.warm("bottomup")
            for flags in ways.values():
                bench.warm("bottomup_parallel", *flags)
        alone = bench.train("bottomup", frames)
        trained = {
            way: bench.train("bottomup_parallel", frames, *flags) for way, flags in ways.items()
        }
    report("parallel", rows(alone, trained), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
