"""Learns on two host devices and on one: `python -m tests.multiagent.sharded FOLDER ALGORITHM`.

A process cannot change the number of its devices, so a test starts this one with
`XLA_FLAGS=--xla_force_host_platform_device_count=2`. It leaves FOLDER/found.json and two runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from flowrl.config import parse
from flowrl.multiagent import agents, run
from flowrl.multiagent.config import IndependentConfig, LearnerConfig
from flowrl.multiagent.world import Sizes
from tests.multiagent.making import CONFIGS, learner, rollout

FOUR = Sizes((5, 5, 5, 5), (3, 3, 3, 3))
KEY = jax.random.key(7)
RUN = (
    "--world=match_the_sign",
    "--agents=2",
    "--devices=2",
    "--epochs=3",
    "--num_envs=4",
    "--num_steps=8",
    "--layer_size=8",
    "--num_minibatches=2",
    "--update_epochs=1",
)


def facts(config: LearnerConfig) -> dict[str, Any]:
    """What two devices make of four agents in two epochs, beside one device and two of them."""
    begun = agents.init(config, FOUR), rollout(FOUR)

    def learned(learn: Any, chosen: slice) -> Any:
        before, turns = jax.tree.map(lambda leaf: leaf[chosen], begun)
        return learn(learn(before, turns, KEY)[0], turns, KEY)

    found = learned(agents.learning(config, 2), slice(None))
    halves = [learned(learner(config), chosen) for chosen in (slice(2), slice(2, 4))]
    joined = jax.tree.map(lambda *parts: np.concatenate(parts), *halves)
    return {
        "same_bits": bits(found) == bits(joined),
        "devices": sorted({len(leaf.sharding.device_set) for leaf in jax.tree.leaves(found)}),
    }


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def trained(folder: Path, algorithm: str, *codes: int | None) -> None:
    """Train in a folder until a code asks to stop."""
    asked, own = iter(codes), (f"--run_folder={folder}", f"--algorithm={algorithm}")
    run.train(parse(IndependentConfig, [*RUN, *own]), lambda: next(asked))


def main(folder: Path, algorithm: str) -> None:
    """Write the facts, and train: whole, and stopped after an epoch and gone on with."""
    (folder / "found.json").write_text(json.dumps(facts(CONFIGS[algorithm])))
    made: list[Any] = []
    real = run._programs

    def compiled_once(of: Any) -> Any:
        made[:] = made or [real(of)]
        return made[0]

    with mock.patch.object(run, "_programs", compiled_once):
        trained(folder / "whole", algorithm, None, None, None)
        trained(folder / "stopped", algorithm, 85)
        trained(folder / "stopped", algorithm, None, None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
