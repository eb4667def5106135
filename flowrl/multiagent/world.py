"""A world that several agents act in: four verbs, and how a world is found by its name.

Importing this module does not import JAX, nor does it import any world. A world of another package
is named by its class, `--world MODULE:CLASS`, which is called with that name and the number of
agents.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from flowrl.errors import SKILL_ERRORS, ConfigError, FlowrlError, closest, format_error
from flowrl.games.base import game_names

_OWN = {
    "match_the_sign": "flowrl.multiagent.own_worlds:MatchTheSign",
    "only_apple": "flowrl.multiagent.own_worlds:OnlyApple",
}
_GAME = "flowrl.multiagent.own_worlds:GameWorld"
_JAXMARL = "flowrl.multiagent.jaxmarl_world:JaxMARLWorld"
# JaxMARL's worlds that need nothing else, with discrete actions; test_jaxmarl_world.py opens each.
JAXMARL_WORLDS = (
    *(f"MPE_simple{kind}_v3" for kind in ("", "_spread", "_tag", "_crypto", "_push")),
    *("MPE_simple_adversary_v3", "MPE_simple_reference_v3", "MPE_simple_speaker_listener_v4"),
    *("overcooked_v2", "SMAX", "HeuristicEnemySMAX", "hanabi", "coin_game"),
)

# What the module and the class of a world may raise; a module can ask to end the program, too.
_ERRORS = (
    *(*SKILL_ERRORS, AssertionError, AttributeError, ImportError, NameError),
    *(RuntimeError, SyntaxError, SystemExit),
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
        """The lengths of the agents' observations and their numbers of actions."""
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
        """Move the entities that are no agents; done first in every turn."""
        ...

    def act(self, state: Any, agent: Any, action: Any, key: Any) -> tuple[Any, Any]:
        """One agent acts; returns the state and rewards f32 `[A]`. `agent`, `action`: int32."""
        ...

    def is_done(self, state: Any) -> Any:
        """`done`, as `step` returns it, after all agents have acted."""
        ...


def open_world(name: str, agents: int) -> World:
    """The world of this name with so many agents; raises ConfigError if there is none."""
    try:
        world = _opener(name)(name, agents)
        has = len(world.sizes.actions) if isinstance(world, World) else agents
    except FlowrlError:
        raise
    except _ERRORS as error:
        remedy = "choose another number of agents, or repair the world"
        raise ConfigError(f"--world {name} --agents {agents}: {_line(error)}; {remedy}") from error
    if not isinstance(world, World):
        problem = "is no world, which has name, sizes, reset, observe and step"
        raise ConfigError(f"--world {name}: {type(world).__name__} {problem}; repair it")
    if has != agents:
        raise ConfigError(f"--agents {agents}: the world {name} has {has} agents; set {has}")
    return world


def module_file(name: str) -> Path | None:
    """The file in which the module of an opened world of one's own begins; else None."""
    module = sys.modules[name.partition(":")[0]] if ":" in name else None
    return Path(module.__file__) if module and module.__file__ else None


def _opener(name: str) -> Callable[[str, int], World]:
    """The class of a world; raises ConfigError."""
    known, missing = _OWN | dict.fromkeys(game_names(), _GAME), ""
    if importlib.util.find_spec("jaxmarl"):
        known |= dict.fromkeys(JAXMARL_WORLDS, _JAXMARL)
    else:
        missing = "JaxMARL is not installed: pip install '.[marl]' in flowrl's folder"
        if name in JAXMARL_WORLDS:
            raise ConfigError(f"--world {name}: {missing}")
        missing = f" ({missing} for its worlds)"
    if ":" not in name and name not in known:
        choices = f"choose one of {', '.join(known)}, or MODULE:CLASS{missing}"
        raise ConfigError(f"--world {name} is unknown{closest(name, known)}; {choices}")
    module, _, kind = known.get(name, name).partition(":")
    if module.endswith(".py"):
        dotted = module.removesuffix(".py").replace("/", ".")
        raise ConfigError(f"--world {name} names a file; write its module: {dotted}:{kind}")
    try:
        return getattr(importlib.import_module(module), kind)
    except _ERRORS as error:
        problem = f"--world {name}: {kind!r} of module {module!r} cannot be loaded: {_line(error)}"
        raise ConfigError(f"{problem}; repair or install it, or start in its folder") from error


def _line(error: BaseException) -> str:
    return format_error(error).partition("\n")[0]
