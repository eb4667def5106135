"""Rounds of averaging over MPI against other ways to do them; part of bench_averaging.py.

Each rank has one agent with a mixture of experts of the default size. The baselines are what mpi4py
makes easy: `gather` and `bcast` of the tree, which pickle it, and one `Allreduce` for each array;
and a copy of the numbers by all ranks at once, the least that any mean must do.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from benchmarking import Pair, Row

OBSERVATION, WIDTH, ACTIONS = 1345, 64, 17
BASELINES = {"pickles": "", "calls": " against a call per array", "copy": " over memory"}


def mpi_rows(ranks: int, numbers: str, *, small: bool = False) -> list[Row]:
    """The rows of so many ranks; none, with a line on stderr, where MPI is not installed."""
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    if mpirun is None or find_spec("mpi4py") is None:
        sys.stderr.write("no rows of MPI: pip install '.[mpi]' in flowrl's folder\n")
        return []
    argv = [mpirun, "-n", str(ranks), sys.executable, "-m", "mpi4py", __file__, numbers]
    argv += ["3" if small else "9"]
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, timeout=600)
    seconds = {side: tuple(each) for side, each in json.loads(done.stdout).items()}
    pairs = {words: Pair(seconds["round"], seconds[side]) for side, words in BASELINES.items()}
    return [pair.row(f"mpi {ranks} {numbers}{words}") for words, pair in pairs.items()]


class Sides:
    """One rank's ways to a mean of all ranks' mixtures of about so many numbers f32."""

    def __init__(self, world, numbers: float) -> None:
        from flowrl.averaging import MPISyncCoordinator

        self.world, self.tree = world, mixture(numbers, world.rank)
        agents = [f"agent{rank}" for rank in range(world.size)]
        self.coordinator = MPISyncCoordinator(agents)
        self.agent = agents[world.rank]
        self.coordinator.join(self.agent)
        self.number = 0

    def round(self):
        self.number += 1
        return asyncio.run(self.coordinator.mean(self.agent, self.number, self.tree)).tree

    def pickles(self):
        trees = self.world.gather(self.tree)
        return self.world.bcast(trees and mapped(lambda *each: sum(each) / len(each), *trees))

    def calls(self):
        def mean(leaf):
            summed = np.empty_like(leaf)
            self.world.Allreduce(leaf, summed)
            summed /= self.world.size
            return summed

        return mapped(mean, self.tree)

    def copy(self):
        return mapped(np.array, self.tree)

    def check(self) -> None:
        ours = self.round()
        for other in (self.pickles(), self.calls()):
            mapped(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, other)


def mixture(numbers: float, rank: int) -> dict:
    random = np.random.default_rng(rank)
    sizes = [OBSERVATION, WIDTH, WIDTH, WIDTH]
    one = sum((a + 1) * b for out in (ACTIONS, 1) for a, b in pairs([*sizes, out]))

    def net(out):
        layers = enumerate(pairs([*sizes, out]))
        made = {n: {"kernel": (a, b), "bias": (b,)} for n, (a, b) in layers}
        return {
            f"dense_{n}": {k: random.standard_normal(s, np.float32) for k, s in layer.items()}
            for n, layer in made.items()
        }

    return {f"{n}": {"actor": net(ACTIONS), "critic": net(1)} for n in range(round(numbers / one))}


def pairs(sizes):
    return itertools.pairwise(sizes)


def mapped(function, *trees):
    from flowrl.averaging.state import map_leaves

    return map_leaves(function, *trees)


def main(numbers: float, rounds: int) -> None:
    """Time each side in turns, the order changing; rank 0 prints the seconds."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    sides = Sides(world, numbers)
    sides.check()  # and warm up
    names = ["round", *BASELINES]
    seconds = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 else reversed(names):
            world.Barrier()
            began = time.perf_counter()
            kept = getattr(sides, name)()
            world.Barrier()
            seconds[name].append(time.perf_counter() - began)
            del kept
    if world.rank == 0:
        print(json.dumps(seconds))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
