"""How much memory a run takes whose experts are numbered anew: `python scripts/bench_memory.py`.

A graph numbers its experts once and for all. A run for expert 50 that needs experts 0, 5 and 10
holds four networks side by side; without its remapping it would have to hold fifty-one, and Adam's
two moments of each. Both are made, as the trainer makes them, and their bytes are counted.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
from benchmarking import Row, arguments, report

from flowrl.config import PPOConfig
from flowrl.games.base import env_sizes
from flowrl.networks.moe import ActorCritic, init_expert, stack_experts
from flowrl.ppo import optimizer
from flowrl.ppo.programs import seed_words
from flowrl.runs import Remapping

NEEDED, NEW = (0, 5, 10), 50
WIDTHS = (64, 512)


def bytes_of(tree: Any) -> int:
    """The bytes of all arrays in a tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(jax.block_until_ready(tree)))


def held(config: PPOConfig, num_experts: int) -> tuple[int, int]:
    """Bytes of parameters and of optimizer state of a run with so many experts."""
    observation_size, num_actions = env_sizes(
        config.env_name, sight=config.sight, egocentric=config.egocentric
    )
    network = ActorCritic(num_actions, config.layer_size)
    expert = init_expert(network, seed_words(0), observation_size=observation_size)
    params = stack_experts([expert] * num_experts)
    return bytes_of(params), bytes_of(optimizer.init(params))


def rows(config: PPOConfig) -> list[Row]:
    """Remapped and unmapped, of one width."""
    remapping = Remapping.of(NEEDED, NEW)
    mapped = held(config, len(remapping.experts))
    unmapped = held(config, max(remapping.experts) + 1)
    return [
        Row(
            case=f"{what}, width {config.layer_size}",
            ours=ours / 1e6,
            baseline=baseline / 1e6,
            unit="MB",
            ratio=baseline / ours,
        )
        for what, ours, baseline in zip(
            ("parameters", "optimizer state"), mapped, unmapped, strict=True
        )
    ]


def main() -> int:
    """Measure and report."""
    options = arguments(__doc__).parse_args()
    widths = WIDTHS[:1] if options.small else WIDTHS
    found = [row for width in widths for row in rows(PPOConfig(layer_size=width))]
    report("memory", found, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
