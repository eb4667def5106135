"""Many environments side by side, with resets that cost only what ended.

World generation is by far the most expensive part of Craftax, cheapest by the batch, and most steps
end no episode. So worlds are generated a batch at a time into a store, and the rows that ended take
theirs from it, in a loop that runs only while there are any.
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
from flowrl.program_cache import Device, ProgramCache, ProgramSpec, register_results

BATCH = 8  # worlds generated at once: fewer cost as much, more are slower per world on CPUs
_BATCHES = 32  # of a store on a GPU: 256 worlds at once take it twice as long as 8


class Store(NamedTuple):
    """Worlds for episodes to begin in."""

    worlds: Any  # worlds, leaves [S, …]
    used: Any  # int32[1]: how many of them episodes have begun in since the last `restock`
    next: Any  # int32[1]: index of the next unused world


class BatchedState(NamedTuple):
    """B episodes, and the worlds that resets take."""

    walk: WalkState  # leaves [B, …]
    store: Store


class BatchedEnv:
    """B copies of a SkillEnv, and a store of S worlds that is filled by `reset`.

    Its methods are pure and can be jitted, but for `reset` and `restock`. The shapes and types of
    a state never change; `step` reads B off the actions.

    With `stock` worlds every episode has a world of its own: `step` takes the next one and
    `restock` replaces those that were taken, by a program of its own, the same for every plan.
    Should more than S episodes end in between, the oldest worlds are used a second time. With
    `world_pool` worlds, each episode begins in one of them drawn at random; none is replaced.
    """

    def __init__(
        self,
        env: SkillEnv,
        *,
        stock: int = 0,
        world_pool: int = 0,
        cache: ProgramCache | None = None,
    ) -> None:
        self.env = env
        self.world_pool = world_pool
        self._stock = stock
        self.batch = batch_size(world_pool or stock)
        self.size = -(-(world_pool or stock) // self.batch) * self.batch
        self.observation_size = env.observation_size
        self.num_actions = env.game.num_actions
        self.num_experts = len(env.module.experts)
        self.num_tasks = len(env.module.tasks)
        self._made = {"batch": self.batch}
        self._stored = {"worlds": self.size, **self._made}  # for programs that take them all
        self._cache = ProgramCache() if cache is None else cache
        self._firsts: dict[int, Callable[..., Any]] = {}
        self._on: dict[Device, BatchedEnv] = {}

    def on(self, device: Device) -> BatchedEnv:
        """The same environments with their programs on this device."""
        if device == jax.local_devices()[0]:
            return self  # JAX's default
        if device not in self._on:
            cache, stock = self._cache.on(device), self._stock
            self._on[device] = BatchedEnv(
                self.env, stock=stock, world_pool=self.world_pool, cache=cache
            )
        return self._on[device]

    def begin_worlds(self) -> None:
        """Compile the program that generates worlds, which is needed first, in a thread."""
        _ = self._new_batch

    def begin_programs(self, num_envs: int) -> None:
        """Compile the programs that `reset` needs, in threads."""
        _ = self._new_batch, self._zeros, self._put, self._first_program(num_envs)

    @cached_property
    def _new_batch(self) -> Callable[..., Any]:
        spec = ProgramSpec("worlds", self._generate_batch, _key_and_number, self._made)
        return self._cache.begin(spec)

    @cached_property
    def _zeros(self) -> Callable[[], Any]:
        empty = partial(self._empty, self.size)
        return self._cache.begin(ProgramSpec("zeros", empty, tuple, self._stored))

    @cached_property
    def _put(self) -> Callable[..., Any]:
        def like() -> tuple[Any, ...]:
            stock, batch = (
                jax.eval_shape(partial(self._empty, n)) for n in (self.size, self.batch)
            )
            return stock, batch, np.int32(0)

        return self._cache.begin(ProgramSpec("put", _put, like, self._stored, donate=(0,)))

    def _first_program(self, num_envs: int) -> Callable[..., Any]:
        if num_envs not in self._firsts:
            like, key = partial(self._like_first, num_envs), {**self._stored, "num_envs": num_envs}
            self._firsts[num_envs] = self._cache.begin(ProgramSpec("first", self._first, like, key))
        return self._firsts[num_envs]

    def reset(self, key: jax.Array, num_envs: int) -> tuple[jax.Array, BatchedState]:
        """First observations f32[B, observation_size] and state of B = num_envs episodes."""
        if not self.world_pool and num_envs > self.size:
            raise ValueError(f"a stock of {self.size} worlds is too small for {num_envs} episodes")
        store = self._filled(key, Store(self._zeros(), _count(self.size), _count(0)))
        rows = np.arange(num_envs, dtype=np.int32)
        if self.world_pool:
            rows = jax.random.randint(key, (num_envs,), 0, self.world_pool, jnp.int32)
        obs, walk = self._first_program(num_envs)(store.worlds, rows, self.env.plan)
        used, following = _count(num_envs), _count(num_envs % self.size)
        return obs, BatchedState(walk, Store(store.worlds, used, following))

    def like(self, num_envs: int) -> tuple[Any, Any]:
        """Shapes and types of what `reset` returns."""
        first = self._like_first(num_envs)
        obs, walk = jax.eval_shape(self._first, *first)
        return obs, BatchedState(walk, Store(first[0], _count(0), _count(0)))

    def restock(self, key: jax.Array, state: BatchedState) -> BatchedState:
        """Replace used worlds by new ones, a batch at a time; `state` is given up.

        Call it between compiled steps, not inside of them: how often depends on the state.
        """
        if self.world_pool:
            return state
        return BatchedState(state.walk, self._filled(key, state.store))

    def step(
        self, key: jax.Array, state: BatchedState, actions: jax.Array
    ) -> tuple[jax.Array, BatchedState, StepOutput]:
        """Take int32[B] actions; observations and state are those after resets."""
        _, reset_key = jax.random.split(key)
        keys = self.step_keys(key, actions.shape[0])
        walk, output = jax.vmap(self.env.advance)(keys, state.walk, actions)
        state = self._begin_again(reset_key, BatchedState(walk, state.store), output.done)
        obs, walk = jax.vmap(self.env.observe)(state.walk)
        return obs, BatchedState(walk, state.store), output

    def step_keys(self, key: jax.Array, num_envs: int) -> jax.Array:
        """The key of each environment's timestep in a `step` with this key, keys[B]."""
        return jax.random.split(jax.random.split(key)[0], num_envs)

    def world_keys(self, key: jax.Array, num_envs: int) -> jax.Array:
        """The key of each first world after a `reset` with this key, keys[B]."""
        count = -(-num_envs // self.batch)
        batches = (_batch_keys(key, np.int32(n), self.batch) for n in range(count))
        return jnp.concatenate([*batches])[:num_envs]

    def current_expert(self, state: BatchedState) -> jax.Array:
        """int32[B]: local index of the expert that acts next in each environment."""
        return jax.vmap(self.env.current_expert)(state.walk)

    def action_of(self, state: BatchedState, choice: jax.Array) -> jax.Array:
        """int32[B]: the game's actions of what experts chose, int32[B]."""
        return jax.vmap(self.env.action_of)(state.walk, choice)

    def potential(self, state: BatchedState) -> jax.Array:
        """f32[B]: the potentials of the environments' states."""
        return state.walk.potential

    def _begin_again(self, key: jax.Array, state: BatchedState, done: jax.Array) -> BatchedState:
        """New episodes in the rows that ended, up to a batch of rows at a time."""
        size, batch = done.shape[0], self.batch
        # The rows that ended, in order, then `size`: a row that is not there takes no writes.
        ended = jnp.sort(jnp.where(done, jnp.arange(size), size))
        ended = jnp.concatenate([ended, jnp.full(batch, size, ended.dtype)])
        lanes = jnp.arange(batch)

        def begin_some(carry: tuple[jax.Array, BatchedState]) -> tuple[jax.Array, BatchedState]:
            begun, (walk, store) = carry
            rows = jax.lax.dynamic_slice(ended, (begun,), (batch,))
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
        """A batch of worlds, how many of them count (1 … wanted), and the store without them."""
        count = jnp.minimum(wanted, self.batch).astype(jnp.int32)
        if self.world_pool:
            rows = jax.random.randint(key, (self.batch,), 0, self.world_pool)
            return _rows_of(store.worlds, rows), count, store
        worlds = _rows_of(store.worlds, (store.next[0] + jnp.arange(self.batch)) % self.size)
        after = (store.next + count) % self.size
        return worlds, count, Store(store.worlds, store.used + count, after)

    def _filled(self, key: jax.Array, store: Store) -> Store:
        used, start = int(np.asarray(store.used)[0]), int(np.asarray(store.next)[0])
        worlds = store.worlds
        for number in range(min(used, self.size) // self.batch):
            fresh = self._new_batch(key, np.int32(number))
            # Never across the end: the stock and the first used one are multiples of a batch.
            place = (start - used + number * self.batch) % self.size
            worlds = self._put(worlds, fresh, np.int32(place))
        return Store(worlds, _count(used % self.batch), store.next)

    def _first(self, worlds: Any, rows: jax.Array, plan: Any) -> tuple[jax.Array, WalkState]:
        """Observations [B, …] and episodes [B, …] in the worlds of these rows, int32[B]."""
        plan = jax.tree.map(jnp.asarray, plan)
        walk = jax.vmap(self.env.begin_in, in_axes=(0, None))(_rows_of(worlds, rows), plan)
        return jax.vmap(self.env.observe)(walk)

    def _like_first(self, num_envs: int) -> tuple[Any, ...]:
        worlds = jax.eval_shape(partial(self._empty, self.size))
        return worlds, np.zeros(num_envs, np.int32), self.env.plan

    def _generate_batch(self, key: jax.Array, number: jax.Array) -> Any:
        return jax.vmap(self.env.new_world)(_batch_keys(key, number, self.batch))

    def _empty(self, count: int) -> Any:
        """`count` worlds of zeros."""
        return jax.tree.map(
            lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), self._world_like
        )

    @cached_property
    def _world_like(self) -> Any:
        """Shapes and types of a world; to ask for them is to trace its generation."""
        return jax.eval_shape(self.env.new_world, jax.eval_shape(jax.random.key, 0))


def batch_size(worlds: int) -> int:
    """Return how many of a store's worlds are generated at once, a power of two.

    A store is filled by whole batches, so on a GPU a batch is a small part of it.
    """
    if jax.default_backend() == "cpu":
        return BATCH
    return 1 << max(BATCH, worlds // _BATCHES).bit_length() - 1


def _batch_keys(key: jax.Array, number: Any, size: int) -> jax.Array:
    """The keys of a batch of worlds, by its number, keys[size]."""
    return jax.random.split(jax.random.fold_in(key, number), size)


def _key_and_number() -> tuple[Any, Any]:
    return jax.eval_shape(jax.random.key, 0), np.int32(0)


def _put(worlds: Any, fresh: Any, place: jax.Array) -> Any:
    """The worlds with a batch of fresh ones from `place` on."""
    return jax.tree.map(
        lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, place, 0), worlds, fresh
    )


def _rows_of(worlds: Any, rows: Any) -> Any:
    """The worlds of these rows, int32[N]: leaves [N, …]."""
    return jax.tree.map(lambda leaf: leaf[rows], worlds)


def _count(number: int) -> jax.Array:
    return jnp.asarray(np.full(1, number, np.int32))  # no program of its own


register_results(Plan, WalkState, Store, BatchedState)
