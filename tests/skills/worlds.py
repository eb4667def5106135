"""Small crafted Craftax worlds: grass, a player who looks up, and whatever a test puts there."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from craftax.craftax_env import make_craftax_env_from_name

from flowrl.envs.tasks import features_of
from flowrl.games.base import WorldStep, find_game
from flowrl.skills.skill import Skill

PACKAGES = {
    "Craftax-Classic-Symbolic-v1": "craftax.craftax_classic",
    "Craftax-Symbolic-v1": "craftax.craftax",
}
HERE = (24, 24)
AHEAD = (23, 24)
BEHIND = {"CRAFTING_TABLE": (25, 25), "FURNACE": (25, 23)}  # diagonal, so still in reach
UP = 3
_KINDS = ("zombies", "cows", "skeletons", "melee_mobs", "passive_mobs", "ranged_mobs")


class Game:
    """One of the two games: an empty world, its step, and skill functions called on it."""

    def __init__(self, env_name: str) -> None:
        self.package = PACKAGES[env_name]
        self.enums = find_game(env_name).enums
        self.engine = find_game(env_name).make()
        self.constants = importlib.import_module(f"{self.package}.constants")
        env = make_craftax_env_from_name(env_name, auto_reset=False)
        self.params = _quiet(env.default_params)
        logic = importlib.import_module(f"{self.package}.game_logic")
        self._step = jax.jit(
            functools.partial(
                logic.craftax_step, params=self.params, static_params=env.static_env_params
            )
        )
        _, world = jax.jit(env.reset_env)(jax.random.key(0), self.params)
        self.empty = self._cleared(world)

    def _cleared(self, world: Any) -> Any:
        mobs = {
            name: getattr(world, name).replace(mask=jnp.zeros_like(getattr(world, name).mask))
            for name in _KINDS
            if hasattr(world, name)
        }
        grass = jnp.full_like(world.map, self.block("GRASS"))
        world = world.replace(map=grass, mob_map=jnp.zeros_like(world.mob_map), **mobs)
        if hasattr(world, "item_map"):
            lit = jnp.ones_like(world.light_map)
            world = world.replace(item_map=jnp.zeros_like(world.item_map), light_map=lit)
        return world.replace(
            player_position=jnp.array(HERE, jnp.int32),
            player_direction=jnp.int32(UP),
            inventory=jax.tree.map(jnp.zeros_like, world.inventory),
        )

    def block(self, name: str) -> int:
        return self.constants.BlockType[name].value

    def with_block(self, world: Any, name: str, place: tuple[int, int] = AHEAD) -> Any:
        return world.replace(map=world.map.at[(*floor_of(world), *place)].set(self.block(name)))

    def with_ladder(self, world: Any, name: str) -> Any:
        """A ladder under the player."""
        item = self.constants.ItemType[name].value
        place = (*floor_of(world), *HERE)
        return world.replace(item_map=world.item_map.at[place].set(item))

    def block_ahead(self, world: Any) -> str:
        """What the player of an `empty` world faces."""
        return self.constants.BlockType(int(world.map[AHEAD])).name

    def with_items(self, world: Any, **items: int) -> Any:
        kept = {
            name: _spread(getattr(world.inventory, name), amount) for name, amount in items.items()
        }
        return world.replace(inventory=world.inventory.replace(**kept))

    def with_mob(self, world: Any, kind: str, number: int | None = None) -> Any:
        """A mob of one health in front of the player; `number` says which in full Craftax."""
        mobs, floor = getattr(world, kind), floor_of(world)
        first = (*floor, 0)
        mobs = mobs.replace(
            position=mobs.position.at[first].set(jnp.array(AHEAD)),
            health=mobs.health.at[first].set(1),
            mask=mobs.mask.at[first].set(True),
        )
        if number is not None:
            mobs = mobs.replace(type_id=mobs.type_id.at[first].set(number))
        mob_map = world.mob_map.at[(*floor, *AHEAD)].set(True)
        return world.replace(**{kind: mobs}, mob_map=mob_map)

    def act(self, world: Any, action: str, seed: int = 0) -> tuple[Any, Any]:
        """The world after an action, and the game's reward."""
        number = jnp.int32(self.constants.Action[action].value)
        return self._step(jax.random.key(seed), jax.tree.map(_strong, world), number)

    def ask(self, skill: Skill, name: str, before: Any, after: Any, n: int = 1) -> Any:
        """What a function of a skill says about one step."""
        function = self.functions(skill)[name]
        step = WorldStep(before, after, jnp.float32(0))
        of_walk = {"n", "episode_timestep"}
        wanted = [item for item in features_of(function) if item not in of_walk]
        given = self.engine.features(wanted, step)
        if "episode_timestep" in features_of(function):
            given["episode_timestep"] = after.timestep
        return function(**given, **({"n": n} if asks_for_n(function) else {}))

    def functions(self, skill: Skill) -> dict[str, Callable[..., Any]]:
        """The two functions of a skill, which has passed the syntax check."""
        enums = {name: getattr(self.constants, name) for name in self.enums}
        namespace: dict[str, Any] = {"jax": jax, "jnp": jnp, **enums}
        exec(f"{skill.is_done}\n{skill.reward}\n", namespace)
        return {name: namespace[name] for name in ("task_is_done", "task_reward")}


def floor_of(world: Any) -> tuple[int, ...]:
    """The index of the player's floor; none in Classic, which has one."""
    return (int(world.player_level),) if hasattr(world, "player_level") else ()


@functools.cache
def game_of(env_name: str) -> Game:
    """One game per session: its step compiles once."""
    return Game(env_name)


def asks_for_n(function: Callable[..., Any]) -> bool:
    return "n" in function.__code__.co_varnames[: function.__code__.co_argcount]


def _strong(leaf: Any) -> Any:
    """A leaf without a weak type, so that the step compiles once."""
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    return jax.lax.convert_element_type(leaf, leaf.dtype)


def _spread(kept: Any, amount: int) -> Any:
    """An amount as the inventory keeps it; of pieces and colours, over as many as there are."""
    if jnp.ndim(kept) == 0:
        return jnp.full_like(kept, amount)
    pieces = jnp.size(kept)
    each = (amount + jnp.arange(pieces)[::-1]) // pieces
    return each.astype(kept.dtype)


def _quiet(params: Any) -> Any:
    """The game's parameters with no mob ever spawned."""
    chances = [name for name in vars(params) if name.startswith("spawn_")]
    return params.replace(**dict.fromkeys(chances, 0.0))
