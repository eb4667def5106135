"""The engine of navix's games; a leaf, alone because it imports JAX and navix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import navix
import numpy as np
from navix.rendering.cache import RenderingCache

from flowrl.games.base import WorldStep

_FIELD = 4  # pixels for one of navix's, each way
_STEPS = jnp.array([[0, 1], [1, 0], [0, -1], [-1, 0]])  # east, south, west, north


class NavixEngine:
    """An `Engine` whose worlds are navix's states, without what only draws them.

    Of MiniGrid's actions `drop` and `done` are left out: in navix a dropped key still opens doors,
    and nothing heeds the other.
    """

    def __init__(self, name: str, actions: Iterable[str]) -> None:
        functions = tuple(getattr(navix.actions, action) for action in actions)
        self._environment = navix.make(name, action_set=functions)

    def reset(self, key: jax.Array) -> Any:
        """A new world; navix 0.7 walls up KeyCorridor's doors, and has its locked one open."""
        blank = RenderingCache(jnp.zeros((0,), jnp.uint8))
        state = self._environment.reset(key, blank).state
        doors = state.get_doors()
        passable = state.grid.at[doors.position[:, 0], doors.position[:, 1]].set(0)
        state = state.replace(grid=passable)
        return state.set_doors(doors.replace(open=doors.open == 1))

    def step(self, key: jax.Array, world: Any, action: jax.Array) -> tuple[Any, jax.Array]:
        """The world after an action, int32[], and 1 where it reached the goal."""
        del key
        environment = self._environment
        state = jax.tree.map(lambda leaf: leaf, world)  # navix changes the state that it is given
        state = environment.transitions_fn(state, action, environment.action_set)
        return state, environment.reward_fn(world, action, state)

    def observe(self, world: Any) -> jax.Array:
        """f32[rows, columns, channels], as CHANNELS says."""
        player, doors, shape = world.get_player(), world.get_doors(), world.grid.shape

        def marked(entity: Any, where: Any = True) -> jax.Array:
            row, column = entity.position.reshape(-1, 2).T
            shown = (column >= 0) & where  # what was picked up lies in column -1
            return jnp.zeros(shape).at[row, column].max(shown.astype(jnp.float32))

        walls = (world.grid < 0).astype(jnp.float32)
        if "wall" in world.entities:
            walls = jnp.maximum(walls, marked(world.entities["wall"]))
        locked, opened = _is_locked(doors), doors.open.astype(bool)
        has_key = jnp.broadcast_to(_numbers(world)["has_key"], shape)
        planes = [walls, marked(world.get_keys()), marked(doors, ~opened & ~locked)]
        planes += [marked(doors, locked), marked(doors, opened), marked(world.get_goals()), has_key]
        planes += [marked(player, player.direction == way) for way in range(len(_STEPS))]
        return jnp.stack(planes, axis=-1).astype(jnp.float32)

    def is_over(self, world: Any) -> jax.Array:
        """bool[]: the player has come to the goal."""
        return jnp.asarray(world.events.goal_reached.happened, bool)

    def features(self, names: Iterable[str], step: WorldStep) -> dict[str, Any]:
        """The named features."""
        now, before = _numbers(step.after), _numbers(step.before)
        changes = {f"{name}_diff": value - before[name] for name, value in now.items()}
        return {name: {**now, **changes}[name] for name in names}


def _numbers(state: Any) -> dict[str, jax.Array]:
    """Every feature of a state, int32[]."""
    player, key, goal = state.get_player(), state.get_keys()[0], state.get_goals()[0]
    doors, has_key = state.get_doors(), state.get_keys().position[0, 1] < 0
    ahead, locked = player.position + _STEPS[player.direction], _is_locked(doors)
    far = jnp.abs(doors.position - player.position).sum(axis=-1)
    values = {
        "has_key": has_key,
        "key_distance": jnp.where(has_key, 0, jnp.abs(key.position - player.position).sum()),
        "key_ahead": (key.position == ahead).all(),
        "lock_distance": jnp.where(locked.any(), jnp.where(locked, far, far.max()).min(), 0),
        "lock_ahead": (locked & (doors.position == ahead).all(axis=-1)).any(),
        "locked_doors": locked.sum(),
        "open_doors": (doors.open == 1).sum(),
        "goal_distance": jnp.abs(goal.position - player.position).sum(),
        "goal_ahead": (goal.position == ahead).all(),
        "at_goal": (goal.position == player.position).all(),
        "past_door": jnp.maximum(player.position[1] - doors.position[:, 1].max(), 0),
    }
    return {name: value.astype(jnp.int32) for name, value in values.items()}


def _is_locked(doors: Any) -> jax.Array:
    return doors.requires > 0


def draw(world: Any) -> np.ndarray:
    """The picture that navix draws of a world, enlarged: uint8 `[H, W, 3]`."""
    state = world.replace(cache=RenderingCache.init(world.grid))
    picture = np.asarray(navix.observations.rgb(state), np.uint8)
    return picture.repeat(_FIELD, axis=0).repeat(_FIELD, axis=1)
