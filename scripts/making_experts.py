"""Save experts of random numbers, as a trainer saves its own; of use to the benchmarks.

python scripts/making_experts.py FOLDER COUNT ENV_NAME LAYER_SIZE SEED

Makes `FOLDER/0`, `FOLDER/1`, … and prints a JSON list of their digests. It is a program of its own
so that whoever measures a merge stays free of JAX, as the scheduler is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from flowrl import storage
from flowrl.experts import checkpoint
from flowrl.games.base import env_sizes
from flowrl.runs import expert_shapes


def main(folder: Path, count: int, env_name: str, layer_size: int, seed: int) -> None:
    """Save them and say what they are."""
    shapes = expert_shapes(*env_sizes(env_name, sight=True, egocentric=True), layer_size)
    rng = np.random.default_rng(seed)
    told = []
    for number in range(count):
        place = folder / str(number)
        params = {leaf: rng.standard_normal(shape, np.float32) for leaf, shape in shapes.items()}
        checkpoint.save_expert(place, params)
        content = checkpoint.array_digest(params)
        told.append({"sha256": storage.tree_digest(place), "content": content})
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    where, how_many, game, width, begin = sys.argv[1:]
    main(Path(where), int(how_many), game, int(width), int(begin))
