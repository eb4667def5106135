"""Games of gymnax: an environment, with features as functions of its state; a leaf.

`game` makes a `Game` of an environment's name. Nothing here imports JAX or gymnax: that does
`gymnax_engine`, when the game is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError, closest
from flowrl.games.base import Game, ObservationSize, check_extra

Feature = Callable[[Any], Any]  # of an environment's state
# Observation and actions of environments in gymnax, so that a scheduler need not load them.
SIZES: Mapping[str, tuple[ObservationSize, int]] = {
    "CartPole-v1": (4, 2),
    "Acrobot-v1": (6, 3),
    "MountainCar-v0": (2, 3),
    "Asterix-MinAtar": ((10, 10, 4), 5),
    "Breakout-MinAtar": ((10, 10, 4), 3),
    "Freeway-MinAtar": ((10, 10, 7), 3),
    "Seaquest-MinAtar": ((10, 10, 10), 6),
    "SpaceInvaders-MinAtar": ((10, 10, 6), 4),
    "Catch-bsuite": ((10, 5, 1), 3),
    "DeepSea-bsuite": ((8, 8, 1), 2),
    "FourRooms-misc": (4, 4),
}
# Timesteps after which an episode ends in any case, where they are fewer than 200.
SHORT: Mapping[str, int] = {"Catch-bsuite": 9, "DeepSea-bsuite": 8}
CONTINUOUS = frozenset(
    ["Pendulum-v1", "MountainCarContinuous-v0", "PointRobot-misc", "Reacher-misc", "Swimmer-misc"]
)
_KNOWN = {
    "score": "float: the sum of the game's own rewards in this episode",
    "reward": "float: the game's own reward in this timestep",
    "alive": "bool: the game goes on",
    "timestep": "int: timesteps of the plan's step, from 1",
}


def game(
    name: str,
    *,
    library_folder: Path,
    features: Mapping[str, Feature] | None = None,
    environment: str | Callable[[], Any] | None = None,
    **fields: Any,
) -> Game:
    """A game of an environment, by the name of its entry point.

    Skills may ask for each feature, for its change in the timestep as `NAME_diff`, and for `score`,
    `reward`, `alive` and `timestep`. A feature is int32, or f32, of any shape.

    Args:
      library_folder: the folder of the game's skills.
      features: name → function of an environment's state.
      environment: its name in gymnax (default: the game's), or a function that makes one, alone or
        with its parameters as `gymnax.make` does.
      fields: other fields of `Game`; `observation_size` and `num_actions` of an environment that
        SIZES does not have.

    Raises:
      ConfigError: the environment is unknown, its actions are continuous, or a feature is no
        function or has the name of one that every game has.
    """
    features, environment = features or {}, environment or name
    for feature, of_state in features.items():
        if feature in _KNOWN:
            raise ConfigError(f"every game has the feature {feature!r}; give yours another name")
        if not callable(of_state):
            what = f"the feature {feature!r} is {of_state!r:.60}, no function of a state"
            raise ConfigError(f"{what}; write lambda state: state.{feature}")
    if not {"observation_size", "num_actions"} <= fields.keys():
        size, num_actions = sizes_of(environment)
        fields = {"observation_size": size, "num_actions": num_actions, **fields}
    words = {feature: _meaning(feature, of_state) for feature, of_state in features.items()}
    changes = {f"{feature}_diff": f"the change of {feature} in this timestep" for feature in words}
    own = [*features.values(), *([] if isinstance(environment, str) else [environment])]
    modules = sorted({function.__module__.partition(".")[0] for function in own})
    given = {"capacity": 9, "enums": {}, "sources": ("gymnax", *modules), **fields}
    if isinstance(given["observation_size"], tuple):
        given.setdefault("renderer", _renderer)
    return Game(
        name=name,
        features=words | changes | _KNOWN,
        library_folder=library_folder,
        make=partial(_engine, name, environment, features, fields["num_actions"]),
        **given,
    )


def sizes_of(environment: str | Callable[[], Any]) -> tuple[ObservationSize, int]:
    """Observation and number of actions; raises ConfigError if flowrl cannot say or play them."""
    word = environment if isinstance(environment, str) else f"{environment}"
    if word in CONTINUOUS:
        what = f"{word} has continuous actions, and experts choose one of N"
        raise ConfigError(f"{what}; cut them into levels in an environment of your own")
    if word not in SIZES:
        what = f"the sizes of {word} are not known{closest(word, SIZES)}"
        raise ConfigError(
            f"{what}; give observation_size and num_actions to game(), or name one of "
            f"{', '.join(SIZES)}"
        )
    return SIZES[word]


def _meaning(feature: str, of_state: Feature) -> str:
    """The first line of the function's documentation, if it has any."""
    return (of_state.__doc__ or f"{feature}, after the timestep").partition("\n")[0]


def _engine(
    name: str,
    environment: str | Callable[[], Any],
    features: Mapping[str, Feature],
    num_actions: int,
) -> Any:
    check_extra(name, "gymnax")
    from flowrl.games.adapters.gymnax_engine import GymnaxEngine

    return GymnaxEngine(environment, features, num_actions)


def _renderer() -> Callable[[Any], Any]:
    from flowrl.games.adapters.gymnax_engine import draw

    return draw
