"""The compiled programs of a trainer: what each is made of, and what is compiled into it.

Acting and learning are two programs. Acting holds the game, which is slow to compile, and is the
same for all plans of library skills and for any number of experts up to a bound; learning compiles
quickly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.config import PPOConfig, flags, to_json
from flowrl.envs.base import StepOutput, WalkingEnv
from flowrl.experts import checkpoint
from flowrl.networks.grouped import Dense, Packed, pack, pad_experts, unpack
from flowrl.ppo import optimizer
from flowrl.ppo.rollout import (
    RolloutBatch,
    RolloutState,
    Timestep,
    group_size,
    num_groups,
    rollout,
)
from flowrl.ppo.sparse_inputs import learn_from_columns
from flowrl.ppo.update import Stats, TrainState, draw_minibatches
from flowrl.program_cache import Program, ProgramCache, ProgramSpec, register_results
from flowrl.runs import expert_shapes

_LEAST_ACTING = 8
_HOST = frozenset(
    {
        "total_timesteps",
        "success_state_rate",
        "lr",
        "anneal_lr",
        "max_task_steps",
        "seed",
        "frame_accounting",
        "log_seconds",
        "checkpoint_seconds",
        "use_tensorboard",
        "use_wandb",
        "wandb_project",
        "wandb_entity",
        "compile_cache",
    }
)
register_results(Dense, Packed, RolloutState, StepOutput, Timestep, RolloutBatch, TrainState, Stats)


class Programs(NamedTuple):
    """What a trainer calls; threads may still be loading or compiling it.

    E experts of the run, A experts that acting is compiled for; shapes as of the functions below.
    """

    act: Callable[[Packed, RolloutState], tuple[RolloutState, RolloutBatch, jax.Array]]
    learn: Callable[[TrainState, tuple[RolloutBatch, ...], np.float32], tuple[TrainState, Stats]]
    expert_keys: Callable[[np.ndarray], tuple[jax.Array, jax.Array]]
    group_keys: Callable[[jax.Array], tuple[tuple[jax.Array, jax.Array], ...]]
    fresh_state: Callable[[Any], TrainState]
    pad: Callable[[Packed], Packed]
    unpack: Callable[[Packed], Any]

    def wait(self) -> None:
        """Wait until all programs are ready; raises what prevented that."""
        for program in self:
            if isinstance(program, Program):
                program.wait()


def begin_programs(
    env: WalkingEnv, config: PPOConfig, cache: ProgramCache | None = None
) -> Programs:
    """Let threads load or compile a trainer's programs, the slowest first."""
    cache, config = cache or ProgramCache(), compiled_in(config)
    experts, groups = env.num_experts, num_groups(config)
    of_group = replace(config, num_envs=group_size(config), acting_threads=None)
    acts = {"config": to_json(of_group), "acting": acting_experts(experts)}
    learns = {"config": to_json(config), "acting": acting_experts(experts), "experts": experts}
    pad, fresh_state = padding(experts), partial(_fresh_state, config)
    act = jax.jit(partial(_act, env, config))  # traced once for itself and for learning

    def stacked() -> tuple[Any]:
        return (stacked_like(env, config),)

    def packed() -> tuple[Packed]:
        return (jax.eval_shape(pack, *stacked()),)

    @functools.cache
    def acting() -> tuple[Packed, RolloutState]:
        obs, state = env.like(group_size(config))
        return jax.eval_shape(pad, *packed()), RolloutState(state, obs, *_key_like())

    def learning() -> tuple[Any, ...]:
        batch = jax.eval_shape(act, *acting())[1]
        return jax.eval_shape(fresh_state, *stacked()), (batch,) * groups, np.float32(0)

    specs = (  # one for each field of Programs, in that order
        ProgramSpec("act", act, acting, acts, donate=(1,)),
        ProgramSpec("learn", partial(_learn, config), learning, learns, donate=(0,)),
        ProgramSpec("keys", partial(_expert_keys, experts), lambda: (seed_words(0),), learns),
        ProgramSpec("groups", partial(_group_keys, groups), _key_like, {"groups": groups}),
        ProgramSpec("ready", fresh_state, stacked, learns),
        ProgramSpec("pad", pad, packed, learns),
        ProgramSpec("unpack", unpack, packed, learns),
    )
    return Programs(*map(cache.begin, specs))


def compiled_in(config: PPOConfig) -> PPOConfig:
    """The configuration with the fields that only the host reads at their default."""
    kept = {name: value for name, value in flags(config).items() if name not in _HOST}
    return PPOConfig(**kept)


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


def stacked_like(env: WalkingEnv, config: PPOConfig) -> Any:
    """Shapes of the experts as they are stored, leaves `[E, …]`."""
    leaves = expert_shapes(env.observation_size, env.num_actions, config.layer_size)
    return checkpoint.like_of({path: (env.num_experts, *shape) for path, shape in leaves.items()})


def _key_like() -> tuple[Any]:
    return (jax.eval_shape(jax.random.key, 0),)


def _act(
    env: WalkingEnv, config: PPOConfig, packed: Packed, state: RolloutState
) -> tuple[RolloutState, RolloutBatch, jax.Array]:
    """A rollout of one group, and a key to restock with."""
    state, batch = rollout(env, config, packed, state)
    restock_key, key = jax.random.split(state.key)
    return state._replace(key=key), batch, restock_key


def _learn(
    config: PPOConfig, state: TrainState, groups: tuple[RolloutBatch, ...], lr: jax.Array
) -> tuple[TrainState, Stats]:
    """An update from the rollouts of all groups."""
    minibatches = draw_minibatches(config, groups[0].shuffle_key, groups=len(groups))
    return learn_from_columns(config, state, groups, minibatches=minibatches, lr=lr)


def _expert_keys(num_experts: int, words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A word pair for each new expert, uint32[E, 2], and the key of all that follows."""
    first, key = jax.random.split(jax.random.wrap_key_data(words))
    experts = jax.vmap(partial(jax.random.fold_in, first))(jnp.arange(num_experts))
    return jax.random.key_data(experts), key


def _group_keys(groups: int, key: jax.Array) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """Two keys for every group: one to begin with, one to go on from."""
    keys = [key] if groups == 1 else jax.random.split(key, groups)
    return tuple((two[0], two[1]) for two in map(jax.random.split, keys))


def _fresh_state(config: PPOConfig, stacked: Any) -> TrainState:
    """Experts, leaves `[E, …]`, as they are computed with, and a fresh optimizer."""
    packed = pack(stacked)
    return TrainState(packed, optimizer.init(config, packed))
