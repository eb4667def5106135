"""The array shapes of an expert; alone, because the scheduler reads them without JAX."""

from __future__ import annotations

from flowrl.games.base import find_game

HIDDEN_LAYERS = 3
LAYERS = tuple(f"dense_{number}" for number in range(HIDDEN_LAYERS + 1))


def env_sizes(env_name: str) -> tuple[int, int]:
    """The observation size and the number of actions of an environment.

    Raises:
      ConfigError: the environment is unknown.
    """
    game = find_game(env_name)
    return game.observation_size, game.num_actions


def expert_shapes(
    observation_size: int, num_actions: int, layer_size: int
) -> dict[str, tuple[int, ...]]:
    """The shape of every leaf of one expert, by its path.

    >>> expert_shapes(1345, 17, 64)["actor/dense_0/kernel"]
    (1345, 64)
    >>> expert_shapes(1345, 17, 64)["critic/dense_3/bias"]
    (1,)
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for net, outputs in (("actor", num_actions), ("critic", 1)):
        widths = [observation_size, *[layer_size] * HIDDEN_LAYERS, outputs]
        for layer, size, width in zip(LAYERS, widths, widths[1:], strict=False):
            shapes[f"{net}/{layer}/kernel"] = (size, width)
            shapes[f"{net}/{layer}/bias"] = (width,)
    return shapes
