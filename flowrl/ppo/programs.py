"""The compiled programs of a trainer: what each is made of, and what is compiled into it.

Acting and learning are two programs. Acting holds the game, which is slow to compile, and is the
same for all plans of library skills and for any number of experts up to a bound; learning compiles
quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from flowrl.config import PPOConfig, num_shards
from flowrl.envs.base import StepOutput
from flowrl.envs.vector import BatchedEnv
from flowrl.experts import checkpoint
from flowrl.networks.grouped import Dense, Packed, pack, pad_experts, unpack
from flowrl.ppo import optimizer
from flowrl.ppo.loss import Hyperparameters
from flowrl.ppo.rollout import RolloutBatch, RolloutState, Timestep, rollout
from flowrl.ppo.sharding import COPIED, ONE_DEVICE, SPLIT, Axis, Placement, place, shard_size
from flowrl.ppo.sparse_inputs import learn_from_columns
from flowrl.ppo.update import Stats, TrainState, average_copies, draw_minibatches, stats_of_all
from flowrl.program_cache import Program, ProgramCache, ProgramOnEach, ProgramSpec, register_results
from flowrl.runs import expert_shapes

_LEAST_ACTING = 8
# Fields that are compiled in. Of the first, some say only how many worlds lie ready.
_BOTH = ("layer_size", "activation", "precision", "num_envs", "env_shards", "num_steps")
_ACTING = (*_BOTH, "world_pool")
_LEARNING = (*_BOTH, "num_devices", "grad_sync_period", "update_epochs", "num_minibatches")
register_results(Dense, Packed, RolloutState, StepOutput, Timestep, RolloutBatch, TrainState, Stats)


class Programs(NamedTuple):
    """The programs of a trainer; threads may still be loading or compiling them.

    E experts of the run, A experts that acting is compiled for; shapes as of the functions below.
    """

    act: Callable[[Packed, RolloutState], tuple[RolloutState, RolloutBatch, jax.Array]]
    learn: Callable[
        [TrainState, tuple[RolloutBatch, ...], Hyperparameters, Any], tuple[TrainState, Stats]
    ]
    agree: Callable[[TrainState, jax.Array], TrainState]
    expert_keys: Callable[[np.ndarray], tuple[jax.Array, jax.Array]]
    shard_keys: Callable[[jax.Array], tuple[tuple[jax.Array, jax.Array], ...]]
    fresh_state: Callable[[Any], TrainState]
    pad: Callable[[Packed], Packed]
    unpack: Callable[[Packed], Any]
    placement: Placement

    def wait(self) -> None:
        """Wait until all programs are ready; raises what prevented that."""
        for program in self:
            if isinstance(program, Program | ProgramOnEach):
                program.wait()


def begin_programs(
    env: BatchedEnv, config: PPOConfig, cache: ProgramCache | None = None
) -> Programs:
    """Let threads load or compile a trainer's programs, the slowest first."""
    placement, cache = place(config), cache or ProgramCache()
    config = replace(config, env_shards=num_shards(config))
    experts, shards, axis = env.num_experts, num_shards(config), placement.axis
    of_acting, of_learning = _compiled_in(config, _ACTING), _compiled_in(config, _LEARNING)
    acts = vars(of_acting) | {"acting": acting_experts(experts)}
    sizes = {"layer_size": config.layer_size, "experts": experts}
    act = jax.jit(partial(_act, env, of_acting))  # traced once for itself and for learning
    shapes = _Shapes(env, of_learning, placement, act)

    def on_one(name: str, function: Any, arguments: Any, key: Any = sizes) -> Any:
        return cache.begin(ProgramSpec(name, function, arguments, key))

    def on_all(name: str, function: Any, arguments: Any, *specs: P, donate: Any = ()) -> Any:
        spread, lie = placement.spread(function, specs), placement.shardings(specs)
        key = sizes | vars(of_learning) if name == "learn" else sizes
        return cache.begin(ProgramSpec(name, spread, arguments, key, donate, lie))

    learn = partial(_learn, config=of_learning, axis=axis)
    agree = partial(average_copies, axis=axis)
    of_learn, of_agree = (COPIED, SPLIT, COPIED, SPLIT), (COPIED, SPLIT)
    apart = placement.mesh is not None and config.grad_sync_period > 1
    acting = ProgramSpec("act", act, lambda: shapes.acting, acts, donate=(1,))
    return Programs(
        act=_begin_on_each(placement, cache, acting),
        learn=on_all("learn", learn, shapes.learning, *of_learn, donate=(0,)),
        agree=on_all("agree", agree, shapes.agreeing, *of_agree, donate=(0,)) if apart else _same,
        expert_keys=on_one("keys", partial(_expert_keys, experts), _words, {"experts": experts}),
        shard_keys=on_one("shards", partial(_shard_keys, shards), _key_like, {"shards": shards}),
        fresh_state=on_one("ready", _fresh_state, shapes.stacked),
        pad=on_all("pad", padding(experts), shapes.packed, COPIED),
        unpack=on_one("unpack", unpack, shapes.packed),
        placement=placement,
    )


@dataclass(frozen=True)
class _Shapes:
    """Shapes of the programs' arguments, which are asked for only to trace a program."""

    env: BatchedEnv
    config: PPOConfig
    placement: Placement
    act: Callable[..., Any]

    def stacked(self) -> tuple[Any]:
        return (stacked_like(self.env, self.config),)

    def packed(self) -> tuple[Packed]:
        return (jax.eval_shape(pack, *self.stacked()),)

    @cached_property
    def acting(self) -> tuple[Packed, RolloutState]:
        obs, state = self.env.like(shard_size(self.config))
        padded = jax.eval_shape(padding(self.env.num_experts), *self.packed())
        return padded, RolloutState(state, obs, *_key_like())

    def learning(self) -> tuple[Any, ...]:
        batch = self.placement.joined_like(jax.eval_shape(self.act, *self.acting)[1])
        stops = np.zeros(len(self.placement.devices), np.int32)
        hyper = Hyperparameters.of(PPOConfig(), np.zeros(self.env.num_experts))
        return self._state(), (batch,) * self.placement.shards_each, hyper, stops

    def agreeing(self) -> tuple[Any, ...]:
        shape = len(self.placement.devices), self.env.num_experts
        return self._state(), np.zeros(shape, np.int32)

    def _state(self) -> TrainState:
        return jax.eval_shape(_fresh_state, *self.stacked())


def _begin_on_each(placement: Placement, cache: ProgramCache, spec: ProgramSpec) -> Any:
    """A program that runs on one device at a time, for every device of this process."""
    if placement.mesh is None:
        return cache.begin(spec)
    return ProgramOnEach({device: cache.on(device).begin(spec) for device in placement.local})


def _compiled_in(config: PPOConfig, fields: Sequence[str]) -> Any:
    """The configuration with these fields alone: none of the others can be read."""
    return SimpleNamespace(**{name: getattr(config, name) for name in fields})


def acting_experts(num_experts: int) -> int:
    """For how many experts acting is compiled: few numbers, so that runs share programs.

    On a CPU blank experts cost nothing, since only those are evaluated that act; elsewhere all
    are, and there are no blank ones.
    """
    if jax.default_backend() != "cpu":
        return num_experts
    return max(_LEAST_ACTING, 1 << (num_experts - 1).bit_length())


def seed_words(seed: int) -> np.ndarray:
    """A seed as the two words of a random key, uint32[2]."""
    return np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


def padding(num_experts: int) -> Callable[[Packed], Packed]:
    """From a run's experts, leaves `[E, …]`, to as many as acting is compiled for."""
    return partial(pad_experts, num_experts=acting_experts(num_experts))


def stacked_like(env: BatchedEnv, config: PPOConfig) -> Any:
    """Shapes of the experts as they are stored, leaves `[E, …]`."""
    leaves = expert_shapes(env.observation_size, env.num_actions, config.layer_size)
    return checkpoint.like_of({path: (env.num_experts, *shape) for path, shape in leaves.items()})


def _same(state: TrainState, _: Any) -> TrainState:
    """The state of devices that are never apart."""
    return state


def _words() -> tuple[np.ndarray]:
    return (seed_words(0),)


def _key_like() -> tuple[Any]:
    return (jax.eval_shape(jax.random.key, 0),)


def _act(
    env: BatchedEnv, config: PPOConfig, packed: Packed, state: RolloutState
) -> tuple[RolloutState, RolloutBatch, jax.Array]:
    """A rollout of one shard, and a key to restock with."""
    state, batch = rollout(env, config, packed, state)
    restock_key, key = jax.random.split(state.key)
    return state._replace(key=key), batch, restock_key


def _learn(
    state: TrainState,
    shards: tuple[RolloutBatch, ...],
    hyper: Hyperparameters,
    stop: jax.Array,
    *,
    config: PPOConfig,
    axis: Axis,
) -> tuple[TrainState, Stats]:
    """An update from the rollouts of all shards, by one device of `axis` with its own shards.

    `stop` int32[1] is an exit code or 0; the stats have the greatest of all devices.
    """
    keys = [jax.random.wrap_key_data(shard.shuffle_key[0]) for shard in shards]
    minibatches = draw_minibatches(config, keys)
    together = axis if config.grad_sync_period == 1 else ONE_DEVICE
    state, stats = learn_from_columns(
        config, state, shards, minibatches=minibatches, hyper=hyper, axis=together
    )
    return state, stats_of_all(stats._replace(stop=stop[0]), axis)


def _expert_keys(num_experts: int, words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A word pair for each new expert, uint32[E, 2], and the key of all that follows."""
    first, key = jax.random.split(jax.random.wrap_key_data(words))
    experts = jax.vmap(partial(jax.random.fold_in, first))(jnp.arange(num_experts))
    return jax.random.key_data(experts), key


def _shard_keys(shards: int, key: jax.Array) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """Two keys for every shard: one to begin with, one to go on from."""
    keys = [key] if shards == 1 else jax.random.split(key, shards)
    return tuple((two[0], two[1]) for two in map(jax.random.split, keys))


def _fresh_state(stacked: Any) -> TrainState:
    """Experts, leaves `[E, …]`, as they are computed with, and a fresh optimizer."""
    packed = pack(stacked)
    return TrainState(packed, optimizer.init(packed))
