"""Craftax walking the plan of a generated module."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from craftax.craftax_env import make_craftax_env_from_name

from flowrl.envs.catalogue import Judge, Plan, alone, shared
from flowrl.envs.fast_choice import craftax_step, craftax_view
from flowrl.envs.features import Game, Moment, asked_by, compute, takes_count
from flowrl.envs.interface import StepOutput
from flowrl.envs.skill_module import TaskModule
from flowrl.errors import SkillError
from flowrl.skills.games import table_of

NEVER = np.iinfo(np.int32).max


class WalkState(NamedTuple):
    """One episode: the world, the plan, and how far it has come in it."""

    world: Any
    """Craftax's EnvState."""
    plan: Plan
    """The same in every episode; here, so that one compiled program walks any plan."""
    task: jax.Array
    """int32: index of the plan's step under way."""
    success: jax.Array
    """bool[columns]: steps completed in this episode."""
    length: jax.Array
    """int32: environment steps of this episode."""
    task_length: jax.Array
    """int32: environment steps of the plan's step under way."""
    total: jax.Array
    """f32: sum of this episode's rewards."""


def make_env(
    env_name: str,
    module: TaskModule,
    *,
    max_task_steps: int,
    success_bonus: float = 1.0,
    fast_choice: bool = True,
    share: bool = False,
) -> SkillEnv:
    """Craftax walking the module's plan.

    Args:
      max_task_steps: an episode is cut when one task takes as many steps, unless the task has a
        limit of its own.
      success_bonus: reward for completing a task, on top of the task's own; it lets a skill
        whose reward function is silent be learned.
      fast_choice: step through `flowrl.envs.fast_choice`; False is Craftax's own code.
      share: compile to the same program for every plan of library skills.

    Raises:
      ConfigError: the environment is unknown.
      SkillError: the module was written for the other game.
    """
    package = table_of(env_name).package
    if package != module.game:
        raise SkillError(
            f"the module was written for {module.game}, --env_name {env_name} is "
            f"{package}; write it again with generate_module_with_remapping"
        )
    make = shared if share else alone
    judges, plan = make(module, max_task_steps=max_task_steps)
    return SkillEnv(
        env_name=env_name,
        fast_choice=fast_choice,
        module=module,
        judges=judges,
        plan=plan,
        success_bonus=success_bonus,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class SkillEnv:
    """One environment that walks a plan; `BatchedEnv` makes a `WalkingEnv` of it.

    The plan moves on by at most one task per step, so that every task has a step in which its
    expert acts, earns its bonus and is counted: a task that is already done when it begins
    takes one step. A player's death ends the episode; it carries no penalty but the reward that
    the skill's author gives and the return that is lost.
    """

    env_name: str
    fast_choice: bool
    module: TaskModule
    judges: tuple[Judge, ...]
    plan: Plan
    success_bonus: float

    @cached_property
    def craftax(self) -> Any:
        """Craftax itself, which is loaded when it is first asked for: a second of CPU time."""
        with jax.ensure_compile_time_eval():  # its constants outlive a trace that asks first
            importlib.import_module(f"{self.module.game}.constants")
            return make_craftax_env_from_name(self.env_name, auto_reset=False)

    @cached_property
    def craftax_step(self) -> Callable[..., tuple[Any, Any]]:
        """A step of the game."""
        with jax.ensure_compile_time_eval():
            return craftax_step(self.module.game, fast_choice=self.fast_choice)

    @cached_property
    def craftax_view(self) -> Callable[[Any], jax.Array]:
        """What is seen of a world."""
        with jax.ensure_compile_time_eval():
            return craftax_view(self.module.game, fast_choice=self.fast_choice)

    @cached_property
    def params(self) -> Any:
        """Craftax's parameters."""
        # The time limit is ours: without Craftax's own, its `done` means death or victory.
        with jax.ensure_compile_time_eval():
            return self.craftax.default_params.replace(max_timesteps=NEVER)

    @cached_property
    def game(self) -> Game:
        """What the features know of the game."""
        with jax.ensure_compile_time_eval():
            return Game.of(self.module.game)

    @property
    def observation_size(self) -> int:
        """Length of one observation."""
        return table_of(self.env_name).observation_size

    @property
    def num_actions(self) -> int:
        """Actions are 0 … num_actions - 1."""
        return table_of(self.env_name).num_actions

    @property
    def num_experts(self) -> int:
        """Experts of the run."""
        return len(self.module.global_to_local)

    @property
    def num_tasks(self) -> int:
        """Length of the plan."""
        return len(self.module.tasks)

    def new_world(self, key: jax.Array) -> Any:
        """A freshly generated world: Craftax's EnvState."""
        return settle(self.craftax.reset_env(key, self.params)[1])

    def begin_in(self, world: Any, plan: Plan | None = None) -> WalkState:
        """A new episode in a given world, at the first task of `plan` (default: the module's)."""
        plan = Plan(*map(jnp.asarray, self.plan)) if plan is None else plan
        return WalkState(
            world=world,
            plan=plan,
            task=jnp.zeros((), jnp.int32),
            success=jnp.zeros(plan.judge.shape, bool),
            length=jnp.zeros((), jnp.int32),
            task_length=jnp.zeros((), jnp.int32),
            total=jnp.zeros((), jnp.float32),
        )

    def observe(self, state: WalkState) -> jax.Array:
        """Craftax's symbolic observation, unchanged: f32[observation_size]."""
        return self.craftax_view(state.world)

    def current_expert(self, state: WalkState) -> jax.Array:
        """int32: local index of the expert that acts next."""
        return state.plan.expert[state.task]

    def advance(
        self, key: jax.Array, state: WalkState, action: jax.Array
    ) -> tuple[WalkState, StepOutput]:
        """Take one action, without a reset: after `done` the state is that of the old episode."""
        world, env_reward = self.craftax_step(
            key, state.world, action, self.params, self.craftax.static_env_params
        )
        world = settle(world)
        over = self.craftax.is_terminal(world, self.params)
        completed, reward = self._judge(
            state, Moment(state.world, world, jnp.asarray(env_reward, jnp.float32))
        )
        return self._walk(state, world, completed=completed, reward=reward, over=over)

    def reset(self, key: jax.Array) -> tuple[jax.Array, WalkState]:
        """A new episode and its first observation."""
        state = self.begin_in(self.new_world(key))
        return self.observe(state), state

    def step(
        self, key: jax.Array, state: WalkState, action: jax.Array
    ) -> tuple[jax.Array, WalkState, StepOutput]:
        """Take one action; an episode that ended is followed by a new one.

        Under vmap every environment would generate a world in every step: use `BatchedEnv`.
        """
        step_key, world_key = jax.random.split(key)
        state, output = self.advance(step_key, state, action)
        state = jax.lax.cond(
            output.done, lambda: self.begin_in(self.new_world(world_key), state.plan), lambda: state
        )
        return self.observe(state), state, output

    def _walk(
        self,
        state: WalkState,
        world: Any,
        *,
        completed: jax.Array,
        reward: jax.Array,
        over: jax.Array,
    ) -> tuple[WalkState, StepOutput]:
        """Move the plan on and say what the step was."""
        plan = state.plan
        reward = reward + self.success_bonus * completed
        ended = over | (completed & (state.task == plan.last))
        columns = jnp.arange(state.success.shape[0])
        walked = WalkState(
            world=world,
            plan=plan,
            task=jnp.minimum(state.task + completed, plan.last).astype(jnp.int32),
            success=state.success | (completed & (columns == state.task)),
            length=state.length + 1,
            task_length=jnp.where(completed, 0, state.task_length + 1),
            total=state.total + reward,
        )
        truncated = ~ended & (walked.task_length >= plan.limit[state.task])
        done = ended | truncated
        return walked, StepOutput(
            reward=reward,
            done=done,
            boundary=done | completed,
            truncated=truncated,
            task=state.task,
            expert=plan.expert[state.task],
            next_expert=plan.expert[jnp.where(done, 0, walked.task)],
            task_success=walked.success,
            episode_length=walked.length,
            episode_return=walked.total,
        )

    def _judge(self, state: WalkState, moment: Moment) -> tuple[jax.Array, jax.Array]:
        """Whether the task under way is done, and the reward it gives for the step.

        All judges are computed and one is picked: under vmap a switch would do the same.
        """
        functions = [f for judge in self.judges for f in (judge.is_done, judge.reward)]
        features = compute((name for f in functions for name in asked_by(f)), self.game, moment)
        count = state.plan.count[state.task]
        done = [_call(judge, judge.is_done, features, count) for judge in self.judges]
        reward = [_call(judge, judge.reward, features, count) for judge in self.judges]
        chosen = state.plan.judge[state.task]
        return (
            jnp.stack([value.astype(bool) for value in done])[chosen],
            jnp.stack([value.astype(jnp.float32) for value in reward])[chosen],
        )


def settle(tree: Any) -> Any:
    """The same values with settled types, so that reset and step agree and compile once.

    Craftax's fresh states hold Python numbers, which jax types weakly; stepped ones do not.
    """
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), tree)


def _call(
    judge: Judge, function: Callable[..., Any], features: dict[str, Any], count: jax.Array
) -> jax.Array:
    """A skill function's value, one number; `count` is its n where that is not written in it."""
    place = f"{function.__name__} of skill {judge.skill!r}"
    asked = {name: features[name] for name in asked_by(function)}
    if judge.counted and takes_count(function):
        asked["n"] = count
    try:
        value = jnp.asarray(function(**asked))
    except (TypeError, ValueError, LookupError, AttributeError, NameError, ArithmeticError) as why:
        raise SkillError(f"{place} cannot be computed: {why}; correct the skill") from why
    if value.shape:
        raise SkillError(f"{place} returns shape {value.shape}; return one number")
    return value
