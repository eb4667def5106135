"""A world that several agents act in: four verbs, and how a world is found by its name.

Importing this module does not import JAX, nor does it import any world. The entry-point group
`flowrl.worlds` names worlds of other packages: an entry point's name is the world's name
(`--world`), its value a function of that name and the number of agents.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple, Protocol, runtime_checkable

from flowrl.errors import SKILL_ERRORS, ConfigError, FlowrlError, closest, format_error
from flowrl.games.base import game_names

GROUP = "flowrl.worlds"
_OWN = {
    "match_the_sign": "flowrl.multiagent.own_worlds:MatchTheSign",
    "only_apple": "flowrl.multiagent.own_worlds:OnlyApple",
}
_CRAFTAX = "flowrl.multiagent.craftax_world:GameWorld"
_JAXMARL = "flowrl.multiagent.jaxmarl_world:JaxMARLWorld"
# JaxMARL's worlds that need nothing else, with discrete actions; test_jaxmarl_world.py opens each.
JAXMARL_WORLDS = (
    *(f"MPE_simple{kind}_v3" for kind in ("", "_spread", "_tag", "_crypto", "_push")),
    *("MPE_simple_adversary_v3", "MPE_simple_reference_v3", "MPE_simple_speaker_listener_v4"),
    *("overcooked_v2", "SMAX", "HeuristicEnemySMAX", "hanabi", "coin_game"),
)


class Sizes(NamedTuple):
    """Numbers of each agent, one entry per agent."""

    observations: tuple[int, ...]
    actions: tuple[int, ...]


@runtime_checkable
class World(Protocol):
    """One world of A agents; its state is a tree of arrays and holds all that it remembers.

    The verbs are pure functions. Those of a world in JAX are traced; those of any other world are
    called with NumPy arrays (`--acting call`). Copies side by side and new beginnings are the
    caller's affair.
    """

    @property
    def name(self) -> str:
        """Its name, for messages."""
        ...

    @property
    def sizes(self) -> Sizes:
        """How long the agents' observations are, and from how many actions each chooses."""
        ...

    def reset(self, key: Any) -> Any:
        """The state of a new world."""
        ...

    def observe(self, state: Any) -> Any:
        """f32 `[A, O]`, what each agent sees, padded with 0 to the longest observation."""
        ...

    def step(self, state: Any, actions: Any, key: Any) -> tuple[Any, Any, Any]:
        """All agents act at once, `actions` int32 `[A]`; returns state, rewards and done.

        Rewards are f32 `[A]`. `done` is bool `[]`, or bool `[A]` if agents have episodes of their
        own: the world begins anew when all agents are done, and an agent that is done earlier
        goes on in a new episode in the state that is returned.
        """
        ...


@runtime_checkable
class TurnWorld(World, Protocol):
    """A world whose agents can act one after another, too, each seeing what was done before."""

    def move_others(self, state: Any, key: Any) -> Any:
        """Move what is no agent; done first in every turn, however the agents take theirs."""
        ...

    def act(self, state: Any, agent: Any, action: Any, key: Any) -> tuple[Any, Any]:
        """One agent acts; returns the state and rewards f32 `[A]`. `agent`, `action`: int32."""
        ...

    def is_done(self, state: Any) -> Any:
        """`done`, as `step` returns it, after all agents have acted."""
        ...


def open_world(name: str, agents: int) -> World:
    """The world of this name with so many agents.

    Raises:
      ConfigError: it is unknown, cannot be loaded, or does not have so many agents.
    """
    points = _entry_points()
    point = points.get(name)
    if point is None:
        extra = "JaxMARL is not installed: pip install 'flowrl[marl]'"
        if name in JAXMARL_WORLDS:
            raise ConfigError(f"--world {name}: {extra}")
        more = "" if _has_jaxmarl() else f" ({extra} for its worlds)"
        known = f"choose one of {', '.join(points)}{more}"
        raise ConfigError(f"--world {name} is unknown{closest(name, points)}; {known}")
    try:
        opener: Callable[[str, int], World] = point.load()
    except (ImportError, AttributeError, SyntaxError) as error:
        what = f"the world {name!r} ({point.value}) cannot be loaded: {error}"
        raise ConfigError(f"{what}; repair or uninstall its package") from error
    try:
        world = opener(name, agents)
    except (AssertionError, RuntimeError, *SKILL_ERRORS) as error:
        if isinstance(error, FlowrlError):
            raise
        reason = format_error(error).partition("\n")[0]
        what = f"--world {name} --agents {agents}: {reason}"
        remedy = "choose another number of agents, or repair the world"
        raise ConfigError(f"{what}; {remedy}") from error
    if (has := len(world.sizes.actions)) != agents:
        raise ConfigError(f"--agents {agents}: the world {name} has {has} agents; set {has}")
    return world


def _entry_points() -> Mapping[str, EntryPoint]:
    """The entry point of every installed world; nothing replaces one that flowrl names."""
    values = _OWN | dict.fromkeys(game_names(), _CRAFTAX)
    if _has_jaxmarl():
        values |= dict.fromkeys(JAXMARL_WORLDS, _JAXMARL)
    shipped = {name: EntryPoint(name, value, GROUP) for name, value in values.items()}
    return shipped | {point.name: point for point in entry_points(group=GROUP)} | shipped


def _has_jaxmarl() -> bool:
    return importlib.util.find_spec("jaxmarl") is not None
