"""Many environments side by side, with resets that cost only what ended.

World generation is by far the dearest part of Craftax, cheapest by the batch, and most steps end
no episode. So worlds are generated a batch at a time into a store, and the rows that ended take
theirs from it, in a loop that runs only while there are any. No world is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.envs.base import StepOutput
from flowrl.envs.tasks import Plan, SkillEnv, WalkState
from flowrl.program_cache import ProgramCache, ProgramSpec, register_results

BATCH = 8  # worlds generated at once: fewer cost as much, more are slower per world on CPUs


class Store(NamedTuple):
    """Worlds for episodes to begin in."""

    worlds: Any
    """Craftax worlds, leaves [BATCH, …], or [world_pool, …], or [stock, …]."""
    used: Any
    """int32[1]: how many of them episodes have begun in; a pool's are never used up."""
    next: Any
    """int32[1]: where in a stock the next unused world lies."""


class BatchedState(NamedTuple):
    """B episodes, and the worlds that resets take."""

    walk: WalkState
    """Leaves [B, …]."""
    store: Store


class BatchedEnv:
    """A `WalkingEnv`: B copies of a SkillEnv.

    Every episode has a new world of its own, in one of two ways. With `stock` 0, `step` generates
    worlds whenever it runs out of them; that makes it slow to compile. With a stock of S worlds
    `step` takes from the stock and `restock` fills it up afterwards, which is a program of its own,
    the same for every plan; should more than S episodes end in between, the oldest worlds are used
    a second time. With a pool of `world_pool` worlds, each episode begins in one of them drawn at
    random; `reset` makes the pool from its key, and it stays.
    """

    def __init__(
        self,
        env: SkillEnv,
        *,
        world_pool: int = 0,
        stock: int = 0,
        cache: ProgramCache | None = None,
    ) -> None:
        self.env = env
        self._cache = ProgramCache() if cache is None else cache
        self._firsts: dict[int, Callable[..., Any]] = {}
        self.world_pool = world_pool
        self.stock = 0 if world_pool else -(-stock // BATCH) * BATCH
        self.observation_size = env.observation_size
        self.num_actions = env.num_actions
        self.num_experts = env.num_experts
        self.num_tasks = env.num_tasks

    def begin_worlds(self) -> None:
        """Let a thread get ready what generates worlds, which is needed first."""
        if self.stock:
            _ = self._new_batch

    def begin_programs(self, num_envs: int) -> None:
        """Let threads get ready what `reset` will need."""
        if self.stock:
            _ = self._new_batch, self._room, self._put, self._begun(num_envs)

    @cached_property
    def _new_batch(self) -> Callable[..., Any]:
        return self._cache.begin(ProgramSpec("worlds", self._numbered_batch, _key_and_number))

    @cached_property
    def _room(self) -> Callable[[], Any]:
        empty = partial(self._nothing, self.stock)
        return self._cache.begin(ProgramSpec("room", empty, tuple))

    @cached_property
    def _put(self) -> Callable[..., Any]:
        def like() -> tuple[Any, ...]:
            stock, batch = (jax.eval_shape(partial(self._nothing, n)) for n in (self.stock, BATCH))
            return stock, batch, np.int32(0)

        return self._cache.begin(ProgramSpec("put", _put, like, donate=(0,)))

    def _begun(self, num_envs: int) -> Callable[..., Any]:
        def like() -> tuple[Any, ...]:
            return jax.eval_shape(partial(self._nothing, self.stock)), self.env.plan

        if num_envs not in self._firsts:
            first, key = partial(self._first, num_envs), {"num_envs": num_envs}
            self._firsts[num_envs] = self._cache.begin(ProgramSpec("first", first, like, key))
        return self._firsts[num_envs]

    def reset(self, key: jax.Array, num_envs: int) -> tuple[jax.Array, BatchedState]:
        """First observations f32[B, observation_size] and state of B = num_envs episodes."""
        if self.stock:
            return self._open_stock(key, num_envs)
        store_key, draw_key = jax.random.split(key)
        return self._reset(store_key, draw_key, num_envs)

    def like(self, num_envs: int) -> tuple[Any, Any]:
        """Shapes and types of what `reset` answers."""
        if not self.stock:
            return jax.eval_shape(lambda key: self.reset(key, num_envs), jax.random.key(0))
        worlds = jax.eval_shape(partial(self._nothing, self.stock))
        obs, walk = jax.eval_shape(partial(self._first, num_envs), worlds, self.env.plan)
        return obs, BatchedState(walk, Store(worlds, _count(0), _count(0)))

    def restock(self, key: jax.Array, state: BatchedState) -> BatchedState:
        """Put new worlds in the place of used ones, a batch at a time; `state` is given up.

        Call it between compiled steps, not inside of them: how often depends on the state.
        """
        if not self.stock:
            return state
        return BatchedState(state.walk, self._filled(key, state.store))

    def step(
        self, key: jax.Array, state: BatchedState, actions: jax.Array
    ) -> tuple[jax.Array, BatchedState, StepOutput]:
        """Take int32[B] actions; observations and state are those after resets."""
        step_key, reset_key = jax.random.split(key)
        keys = jax.random.split(step_key, actions.shape[0])
        walk, output = jax.vmap(self.env.advance)(keys, state.walk, actions)
        state = self._begin_again(reset_key, BatchedState(walk, state.store), output.done)
        return jax.vmap(self.env.observe)(state.walk), state, output

    def current_expert(self, state: BatchedState) -> jax.Array:
        """int32[B]: local index of the expert that acts next in each environment."""
        return jax.vmap(self.env.current_expert)(state.walk)

    def _begin_again(self, key: jax.Array, state: BatchedState, done: jax.Array) -> BatchedState:
        """New episodes in the rows that ended, up to BATCH rows at a time."""
        size = done.shape[0]
        # The rows that ended, in order, then `size`: a row that is not there takes no writes.
        ended = jnp.sort(jnp.where(done, jnp.arange(size), size))
        ended = jnp.concatenate([ended, jnp.full(BATCH, size, ended.dtype)])
        lanes = jnp.arange(BATCH)

        def begin_some(carry: tuple[jax.Array, BatchedState]) -> tuple[jax.Array, BatchedState]:
            begun, (walk, store) = carry
            rows = jax.lax.dynamic_slice(ended, (begun,), (BATCH,))
            worlds, count, store = self._take(
                jax.random.fold_in(key, begun), store, (rows < size).sum()
            )
            rows = jnp.where(lanes < count, rows, size)
            plan = jax.tree.map(lambda leaf: leaf[0], walk.plan)
            fresh = jax.vmap(self.env.begin_in, in_axes=(0, None))(worlds, plan)
            walk = jax.tree.map(lambda old, new: old.at[rows].set(new, mode="drop"), walk, fresh)
            return begun + count, BatchedState(walk, store)

        start = (jnp.zeros((), jnp.int32), state)
        return jax.lax.while_loop(lambda carry: carry[0] < done.sum(), begin_some, start)[1]

    def _take(
        self, key: jax.Array, store: Store, wanted: jax.Array
    ) -> tuple[Any, jax.Array, Store]:
        """BATCH worlds, how many of them count (1 … wanted), and the store without them."""
        if self.world_pool:
            return _draw(key, store.worlds, BATCH), wanted.astype(jnp.int32), store
        if self.stock:
            count, size = jnp.minimum(wanted, BATCH).astype(jnp.int32), self.stock
        else:
            store = jax.lax.cond(
                store.used[0] == BATCH,
                lambda: Store(self._generate(key, BATCH), _count(0), _count(0)),
                lambda: store,
            )
            count, size = jnp.minimum(wanted, BATCH - store.used[0]).astype(jnp.int32), BATCH
        order = (store.next[0] + jnp.arange(BATCH)) % size
        worlds = jax.tree.map(lambda leaf: leaf[order], store.worlds)
        after = (store.next + count) % size
        return worlds, count, Store(store.worlds, store.used + count, after)

    @partial(jax.jit, static_argnums=(0, 3))
    def _reset(
        self, store_key: jax.Array, draw_key: jax.Array, num_envs: int
    ) -> tuple[jax.Array, BatchedState]:
        if self.world_pool:
            store = Store(self._generate(store_key, self.world_pool), _count(0), _count(0))
            worlds = _draw(draw_key, store.worlds, num_envs)
        else:
            worlds = self._generate(draw_key, num_envs)
            store = Store(self._nothing(BATCH), _count(BATCH), _count(0))
        obs, walk = self._first(num_envs, worlds, self.env.plan)
        return obs, BatchedState(walk, store)

    def _filled(self, key: jax.Array, store: Store) -> Store:
        used, start = int(np.asarray(store.used)[0]), int(np.asarray(store.next)[0])
        worlds = store.worlds
        for number in range(min(used, self.stock) // BATCH):
            fresh = self._new_batch(key, np.int32(number))
            # Never across the end: the stock and the first used one are multiples of BATCH.
            place = (start - used + number * BATCH) % self.stock
            worlds = self._put(worlds, fresh, np.int32(place))
        return Store(worlds, _count(used % BATCH), store.next)

    def _first(self, num_envs: int, worlds: Any, plan: Any) -> tuple[jax.Array, WalkState]:
        """Episodes in the first of the worlds."""
        plan = jax.tree.map(jnp.asarray, plan)
        worlds = jax.tree.map(lambda leaf: leaf[:num_envs], worlds)
        walk = jax.vmap(self.env.begin_in, in_axes=(0, None))(worlds, plan)
        return jax.vmap(self.env.observe)(walk), walk

    def _open_stock(self, key: jax.Array, num_envs: int) -> tuple[jax.Array, BatchedState]:
        """Fill the stock; the first episodes begin in its first worlds."""
        if num_envs > self.stock:
            raise ValueError(f"a stock of {self.stock} worlds is too small for {num_envs} episodes")
        empty = Store(self._room(), _count(self.stock), _count(0))
        worlds = self._filled(key, empty).worlds
        obs, walk = self._begun(num_envs)(worlds, self.env.plan)
        used, following = _count(num_envs), _count(num_envs % self.stock)
        return obs, BatchedState(walk, Store(worlds, used, following))

    def _generate(self, key: jax.Array, count: int) -> Any:
        """`count` new worlds, leaves [count, …], generated a batch at a time."""
        keys = jax.random.split(key, -(-count // BATCH))
        worlds = jax.lax.map(self._generate_batch, keys)
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:count], worlds)

    def _numbered_batch(self, key: jax.Array, number: jax.Array) -> Any:
        return self._generate_batch(jax.random.fold_in(key, number))

    def _generate_batch(self, key: jax.Array) -> Any:
        return jax.vmap(self.env.new_world)(jax.random.split(key, BATCH))

    def _nothing(self, count: int) -> Any:
        """Room for `count` worlds."""
        return jax.tree.map(
            lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), self._world_like
        )

    @cached_property
    def _world_like(self) -> Any:
        """Shapes and types of a world; to ask for them is to trace its generation."""
        return jax.eval_shape(self.env.new_world, jax.eval_shape(jax.random.key, 0))


def _key_and_number() -> tuple[Any, Any]:
    return jax.eval_shape(jax.random.key, 0), np.int32(0)


def _put(worlds: Any, fresh: Any, place: jax.Array) -> Any:
    """The worlds with BATCH fresh ones from `place` on."""
    return jax.tree.map(
        lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, place, 0), worlds, fresh
    )


def _draw(key: jax.Array, worlds: Any, count: int) -> Any:
    """`count` of the worlds at random, with replacement."""
    drawn = jax.random.randint(key, (count,), 0, jax.tree.leaves(worlds)[0].shape[0])
    return jax.tree.map(lambda leaf: leaf[drawn], worlds)


def _count(number: int) -> jax.Array:
    return jnp.asarray(np.full(1, number, np.int32))  # no program of its own


register_results(Plan, WalkState, Store, BatchedState)
