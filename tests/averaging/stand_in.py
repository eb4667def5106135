"""A replica without a game: `python -m tests.averaging.stand_in ROUNDS REPLICA [FAULT]`.

What it offers is a function of the round's mean and its number, as a real replica's is. FAULT is
how it errs: `nan`, `shape`, `stale`, `dead` (from round 2 on), `full` (the disk).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from flowrl.averaging.rounds import Figures, Offer, Round, Rounds
from flowrl.errors import EXIT_DISK_FULL

SHAPES = {"params/kernel": (3, 40, 8), "opt_state/mu": (3, 40, 8)}


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
        if leaf.dtype.kind == "f"
    }
    return {**moved, "opt_state/count": mean["opt_state/count"] + np.int32(4)}


def offer_of(record: Round, replica: int) -> Offer:
    """The record beside those arrays; the third expert acted in replica 0 only."""
    acted = (100 + 10 * replica, 50, 25 if replica == 0 else 0)
    figures = Figures(step_success=(0.1,), mean_episode_length=9.0, episodes=300, full=True)
    return Offer(replica=replica, base=record.digest, acted=acted, figures=figures)


def spoil(arrays: dict[str, np.ndarray], fault: str) -> None:
    """Make them what a faulty replica offers."""
    kernel = arrays["params/kernel"]
    if fault == "nan":
        kernel[1, 2, 3] = np.nan
    elif fault == "shape":
        arrays["params/kernel"] = kernel[:, 1:]


def main(rounds: Rounds, replica: int, fault: str) -> int:
    """Offer in every round until the last; returns the exit code."""
    if replica == 0 and rounds.newest() is None:
        rounds.commit(Round(number=0, acted=(0, 0, 0)), first_mean())
    number = -1
    while True:
        record = rounds.newest()
        if record is None or record.number <= number:
            time.sleep(0.002)
            continue
        if record.ended:
            return 0
        number = record.number
        arrays, offer = learned(rounds.mean(record), number, replica), offer_of(record, replica)
        if fault == "full" or (fault == "dead" and number >= 2):
            return EXIT_DISK_FULL if fault == "full" else 1
        if fault == "stale":
            offer = offer_of(Round(number=0, digest="0" * 64), replica)
        spoil(arrays, fault)
        rounds.offer(number + 1, offer, arrays, {"state": np.arange(3)})


if __name__ == "__main__":
    sys.exit(main(Rounds(Path(sys.argv[1])), int(sys.argv[2]), "".join(sys.argv[3:])))
