"""The programs of a trainer: what each is made of, and what is compiled into it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowrl import checkpoints
from flowrl.config import PPOConfig, to_json, values
from flowrl.envs.base import StepOutput, WalkingEnv
from flowrl.networks import dispatch
from flowrl.networks.dispatch import Dense, Packed
from flowrl.networks.shapes import expert_shapes
from flowrl.ppo import optimizer
from flowrl.ppo.acting import group_size, of_group, threads_of
from flowrl.ppo.rollout import Acted, Place, Step, rollout
from flowrl.ppo.update import Stats, learn
from flowrl.program_cache import Program, ProgramCache, ProgramSpec, register_results

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
register_results(Dense, Packed, Place, StepOutput, Step, Acted, Stats)


class Programs(NamedTuple):
    """What a trainer calls; threads may still be loading or compiling it."""

    keys: Callable[[np.ndarray], tuple[jax.Array, jax.Array]]
    ready: Callable[[Any], tuple[Packed, Any]]
    widen: Callable[[Packed], Packed]
    act: Callable[[Packed, Place], tuple[Place, Acted, jax.Array]]
    learn: Callable[
        [tuple[Packed, Any], tuple[Acted, ...], np.float32], tuple[tuple[Packed, Any], Stats]
    ]
    unpack: Callable[[Packed], Any]
    groups: Callable[[jax.Array], tuple[tuple[jax.Array, jax.Array], ...]]

    def wait(self) -> None:
        """Until all programs are ready; raises what stands in the way of one."""
        for program in self:
            if isinstance(program, Program):
                program.wait()


def begin_programs(
    env: WalkingEnv, config: PPOConfig, cache: ProgramCache | None = None
) -> Programs:
    """Let threads load or compile a trainer's programs, the slowest first."""
    cache = ProgramCache() if cache is None else cache
    return Programs(**{spec.name: cache.begin(spec) for spec in _specs(env, config)})


def _specs(env: WalkingEnv, config: PPOConfig) -> list[ProgramSpec]:
    config = compiled_in(config)
    shapes, count = Shapes(env, config), env.num_experts
    experts = {"acting": acting_experts(count)}
    facts = {"config": to_json(of_group(config)), **experts}
    own = {"config": to_json(config), **experts, "experts": count}
    groups = threads_of(config)
    return [
        ProgramSpec("act", shapes.act, shapes.acting, facts, donate=(1,)),
        ProgramSpec("learn", partial(learn, config), shapes.learning, own, donate=(0,)),
        ProgramSpec("keys", partial(_keys, count), _words_like, own),
        ProgramSpec("ready", partial(_ready, config), lambda: (shapes.stacked,), own),
        ProgramSpec("widen", shapes.widen, lambda: (shapes.packed,), own),
        ProgramSpec("unpack", dispatch.unpack, lambda: (shapes.packed,), own),
        ProgramSpec("groups", partial(_group_keys, groups), _key_like, {"groups": groups}),
    ]


def compiled_in(config: PPOConfig) -> PPOConfig:
    """The configuration as programs see it: what only the host heeds is left at its default."""
    kept = {name: value for name, value in values(config, PPOConfig).items() if name not in _HOST}
    return PPOConfig(**kept)


def seed_words(seed: int) -> np.ndarray:
    """A seed as the two words of a random key, uint32[2]."""
    return np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


class Shapes:
    """Shapes of what programs take, which only those ask who trace one."""

    def __init__(self, env: WalkingEnv, config: PPOConfig) -> None:
        self._env = env
        self._config = config

    @cached_property
    def stacked(self) -> Any:
        """Of the experts as they are stored."""
        env = self._env
        leaves = expert_shapes(env.observation_size, env.num_actions, self._config.layer_size)
        return checkpoints.like_of(
            {path: (env.num_experts, *shape) for path, shape in leaves.items()}
        )

    @cached_property
    def packed(self) -> Any:
        """Of the experts as they are computed with."""
        return jax.eval_shape(dispatch.pack, self.stacked)

    @property
    def widen(self) -> Callable[[Packed], Packed]:
        """From the run's experts to as many as acting is compiled for."""
        return partial(dispatch.widened, num_experts=acting_experts(self._env.num_experts))

    @cached_property
    def act(self) -> Callable[..., tuple[Place, Acted, jax.Array]]:
        """Acting; jitted, so that it is traced once for itself and for learning."""
        return jax.jit(partial(_act, self._env, self._config))

    def acting(self) -> tuple[Any, Place]:
        """What acting takes, for one group of environments."""
        return self._acting

    @cached_property
    def _acting(self) -> tuple[Any, Place]:
        obs, state = self._env.like(group_size(self._config))
        key = jax.eval_shape(jax.random.key, 0)
        return jax.eval_shape(self.widen, self.packed), Place(state, obs, key)

    def learning(self) -> tuple[Any, ...]:
        """What learning takes."""
        state = jax.eval_shape(partial(_ready, self._config), self.stacked)
        acted = jax.eval_shape(self.act, *self.acting())[1]
        return state, (acted,) * threads_of(self._config), np.float32(0)


def _words_like() -> tuple[np.ndarray]:
    return (seed_words(0),)


def _keys(num_experts: int, words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A word pair for each new expert, uint32[E, 2], and the key of all that follows."""
    first, key = jax.random.split(jax.random.wrap_key_data(words))
    experts = jax.vmap(partial(jax.random.fold_in, first))(jnp.arange(num_experts))
    return jax.random.key_data(experts), key


def _key_like() -> tuple[Any]:
    return (jax.eval_shape(jax.random.key, 0),)


def _group_keys(groups: int, key: jax.Array) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """Two keys for every group: one to begin with, one to go on from."""
    keys = [key] if groups == 1 else jax.random.split(key, groups)
    return tuple((two[0], two[1]) for two in map(jax.random.split, keys))


def _ready(config: PPOConfig, stacked: Any) -> tuple[Packed, Any]:
    """Experts as they are computed with, and a fresh optimizer."""
    packed = dispatch.pack(stacked)
    return packed, optimizer.init(config, packed)


def _act(
    env: WalkingEnv, config: PPOConfig, packed: Packed, place: Place
) -> tuple[Place, Acted, jax.Array]:
    """A rollout, and a key to restock with."""
    place, acted = rollout(env, config, packed, place)
    restock_key, key = jax.random.split(place.key)
    return place._replace(key=key), acted, restock_key


def acting_experts(num_experts: int) -> int:
    """For how many experts acting is compiled: few numbers, so that runs share programs.

    On a CPU blank experts cost nothing, since only those are evaluated that act; elsewhere all
    are, and there are no blank ones.
    """
    if jax.default_backend() != "cpu":
        return num_experts
    return max(_LEAST_ACTING, 1 << (num_experts - 1).bit_length())
