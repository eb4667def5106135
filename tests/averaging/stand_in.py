"""A run with replicas without a game: `python -m tests.averaging.stand_in FAULTS FLAGS`.

The averager is the real one; its replicas are forked, so that they start at once. What one offers
is a function of the round's mean, the round's number and its own, as a real replica's is. FAULTS
say how some err: `2=nan,3=shape`; also `stale`, `dead` (from round 2 on), `full` (disk), `slow`,
`boast` (more steps than it can have taken), `plan` (rates of another plan),
and `peak`, whose success is highest in round 2. Replica 0 writes down every round that it sees in
`seen/`, and leaves the best one as its result.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from flowrl import console, storage
from flowrl.command_line import parse
from flowrl.console import StopSignal
from flowrl.errors import EXIT_DISK_FULL
from flowrl.launchers.child import die_with_parent
from flowrl.paths import RunPaths
from flowrl.rates import Rates
from flowrl.replicas import averager
from flowrl.replicas.rounds import Offer, Round, Rounds
from flowrl.runs import TrainConfig
from flowrl.storage import records

SHAPES = {"params/kernel": (3, 40, 8), "opt_state/mu": (3, 40, 8)}


class Forked(multiprocessing.get_context("fork").Process):
    """A forked child with the verbs of `subprocess.Popen`."""

    def __init__(self, work: Callable[[], int]) -> None:
        super().__init__(target=begin, args=(os.getpid(), work))
        self.start()

    def poll(self) -> int | None:
        """Its exit code, or the signal that ended it below 0; None while it lives."""
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """As `poll`, when it has ended."""
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired("replica", timeout or 0)
        return self.exitcode


def begin(parent: int, work: Callable[[], int]) -> None:
    """Work in a forked child, and end with its exit code."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(parent)
    sys.exit(console.guarded(work))


def first_mean() -> dict[str, np.ndarray]:
    """What all replicas begin with: three experts and their step counts."""
    random = np.random.default_rng(0)
    arrays = {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    return {**arrays, "opt_state/count": np.zeros(3, np.int32)}


def learned(mean: dict[str, np.ndarray], number: int, replica: int) -> dict[str, np.ndarray]:
    """What a replica makes of a round's mean."""
    random = np.random.default_rng([number, replica])
    moved = {
        name: (leaf + 0.1 * random.normal(size=leaf.shape)).astype(leaf.dtype)
        for name, leaf in sorted(mean.items())
        if leaf.dtype.kind == "f" and not name.startswith("velocity/")
    }
    return {**moved, "opt_state/count": mean["opt_state/count"] + np.int32(4)}


def offer_of(record: Round, replica: int) -> Offer:
    """The record beside those arrays; the third expert acted in replica 0 only."""
    acted = (100 + 10 * replica, 50, 25 if replica == 0 else 0)
    return Offer(replica=replica, base=record.digest, acted=acted, rates=rates(0.1))


def rates(success: float, episodes: int = 300) -> Rates:
    """What a replica has seen of its newest episodes."""
    return Rates(
        step_success=(success,),
        mean_episode_length=9.0,
        mean_episode_return=0.5,
        episodes=episodes,
        full=episodes >= 256,
    )


def spoil(arrays: dict[str, np.ndarray], fault: str) -> None:
    """Make them what a faulty replica offers."""
    kernel = arrays["params/kernel"]
    if fault == "nan":
        kernel[1, 2, 3] = np.nan
    elif fault == "shape":
        arrays["params/kernel"] = kernel[:, 1:]


def spoilt(fault: str) -> dict[str, object]:
    """The values of an offer's record that a faulty replica changes."""
    found: dict[str, dict[str, object]] = {
        "stale": {"base": "0" * 64},
        "boast": {"acted": (2**40, 0, 0)},
        "plan": {"rates": replace(rates(0.1), step_success=(0.1, 0.1))},
    }
    return found.get(fault, {})


def replica(run_paths: RunPaths, number: int, fault: str) -> int:
    """Offer in every round until the last; returns the exit code."""
    rounds, at = Rounds(run_paths.rounds), -1
    own = storage.make_dir(run_paths.replica(number).folder)
    (own / "pid").write_text(str(os.getpid()))
    if number == 0 and rounds.newest() is None:
        rounds.commit(Round(number=0, acted=(0, 0, 0)), first_mean())
    while True:
        record = rounds.newest()
        if record is None or record.number <= at:
            time.sleep(0.002)
            continue
        mean, at = rounds.mean(record), record.number
        if number == 0:
            write_down(run_paths, record)
            np.savez(run_paths.folder / "final.npz", **rounds.mean(rounds.best(record)))
        if record.ended:
            return 0
        seen = rates(0.1 if fault != "peak" or at == 1 else 0.02)
        arrays, offer = learned(mean, at, number), replace(offer_of(record, number), rates=seen)
        if fault == "full" or (fault == "dead" and at >= 2):
            return EXIT_DISK_FULL if fault == "full" else 1
        spoil(arrays, fault)
        offer = replace(offer, **spoilt(fault))
        time.sleep(0.1 if fault == "slow" else 0.0)
        rounds.offer(at + 1, offer, arrays, {"state": np.arange(3)})


def write_down(run_paths: RunPaths, record: Round) -> None:
    """Keep a round's record; one that was seen before must be the same."""
    seen = storage.make_dir(run_paths.folder / "seen") / f"{record.number}.json"
    assert not seen.exists() or records.read(seen, Round) == record, record.number
    records.write(seen, record)


def main(faults: str, *argv: str) -> int:
    """Run the averager; returns its exit code."""
    said = dict(pair.split("=") for pair in faults.split(",") if pair)
    config = parse(TrainConfig, argv)
    run_paths = RunPaths(config.module_path.absolute().parent, 0)

    def start(_: TrainConfig, number: int) -> Forked:
        return Forked(partial(replica, run_paths, number, said.get(str(number), "")))

    averager._start = start  # type: ignore[assignment]
    console.start_logging()
    stop = StopSignal()
    with stop.listening():
        return console.guarded(lambda: averager.run(config, stop))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
