"""A game that walks a plan: tasks as data, so that one compiled program serves many plans.

To compile a timestep of Craftax takes half a minute of CPU time, to run it a millisecond. So the
trainer's program does not hold one plan: it holds the success functions of all library skills, and
which of them apply to an episode, in what order and with which counts, is data that the program is
given. The functions cost next to nothing beside a timestep of the game.

The functions of a user's own skill are compiled in, with its count as a constant; plans with the
same such skills share a program, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.envs.base import COUNTS, REWARD_LIMIT, StepOutput
from flowrl.envs.frames import UP, Frame, way_of
from flowrl.envs.sight import NOWHERE, ahead, nearest, not_visited, visit, window
from flowrl.envs.skill_module import SuccessFunctions, Task, TaskModule
from flowrl.errors import ConfigError, FalseGainError, SkillError
from flowrl.games.base import COUNT, INTRINSICS, Engine, Game, ObservationSize, WorldStep, find_game
from flowrl.games.random_play import settle
from flowrl.runs import StepEnds
from flowrl.skills.skill import load_library
from flowrl.skills.validation.cache import code_digest, parsed_function
from flowrl.skills.validation.execution import execute_functions

_LEAST_COLUMNS = 8
_SUCCESS_BONUS = 1.0  # beside the reward of the task: a skill whose own is silent can be learned
_INVENTORY = "inventory"  # the feature that has the game's items
_MOST_LIES = 0.01  # of the times that a step is done
_LEAST_CLAIMS = 100
_LACK_SCALE = 0.1  # as Craftax scales an inventory


class Plan(NamedTuple):
    """A plan as arrays, int32[columns]; rows beyond `last` have no meaning and are not reached."""

    functions: Any  # index into the environment's success functions
    count: Any  # n
    limit: Any  # most environment steps
    expert: Any  # local index of the expert that acts
    last: Any  # int32[]: the plan's last step
    gains: Any  # int32[columns, items]: the least that the inventory holds when a step is done
    keeps: Any  # int32[columns, items]: how much of each item later steps need after a step
    facts: Any  # bool[columns, functions]: whose done-conditions must hold after a step
    bound: Any  # bool[]: a step is done only while all that later steps need is kept


class WalkState(NamedTuple):
    """One episode: the world, the plan, and how far it has come in it."""

    world: Any  # as the game's engine makes it
    plan: Plan  # the same in every episode; here, so that one compiled program walks any plan
    task: jax.Array  # int32: index of the plan's step under way
    success: jax.Array  # bool[columns]: steps completed in this episode
    length: jax.Array  # int32: environment steps of this episode
    task_length: jax.Array  # int32: environment steps of the plan's step under way
    total: jax.Array  # f32: sum of this episode's rewards
    visited: jax.Array  # bool[rows, columns]: where the player was in this step, or no cells
    seen: jax.Array  # int32[lasting, 2]: where channels of the map were seen last, or none
    way: jax.Array  # int32: in whose frame the last observation was
    potential: jax.Array  # f32: of this state, by the reward of the step; 0 where the step begins


def make_env(
    env_name: str,
    module: TaskModule,
    *,
    max_task_steps: int,
    sight: bool = False,
    egocentric: bool = False,
    keep_needs: bool = False,
) -> SkillEnv:
    """A game that walks the module's plan.

    Args:
      max_task_steps: an episode is cut when one task takes as many steps, unless the task has a
        limit of its own.
      sight: experts see the columns of `envs.sight` beside the game's observation.
      egocentric: they see and move in the player's own frame, if the game says its moves.
      keep_needs: a step is done only while the player still has what later steps need.

    Raises:
      ConfigError: the game is unknown.
      SkillError: the module was written for another game.
    """
    game = find_game(env_name)
    if game.name != module.game.name:
        raise SkillError(
            f"the module was written for {module.game.name}, --env_name is {env_name}; "
            f"use --env_name {module.game.name}"
        )
    functions, plan = shared_functions(module, max_task_steps=max_task_steps)
    plan = plan._replace(bound=np.asarray(keep_needs))
    looks = {"sight": sight, "egocentric": egocentric}
    return SkillEnv(game=game, module=module, functions=functions, plan=plan, **looks)


@dataclass(frozen=True, kw_only=True, eq=False)
class SkillEnv:
    """One environment that walks a plan; `BatchedEnv` has many of it.

    The plan moves on by at most one task per step, so that every task has a step in which its
    expert acts, earns its bonus and is counted: a task that is already done when it begins
    takes one step. A player's death ends the episode; it carries no penalty but the reward that
    the skill's author gives and the return that is lost.
    """

    game: Game
    module: TaskModule
    functions: Mapping[str, SuccessFunctions]
    plan: Plan
    sight: bool = False
    egocentric: bool = False

    @property
    def observation_size(self) -> ObservationSize:
        """Size of one observation."""
        return self.game.observed(sight=self.sight, egocentric=self.egocentric)

    @property
    def num_counts(self) -> int:
        """Columns of `count_steps`."""
        return len(COUNTS) + sum(map(len, (self.game.causes, self.game.items, self.functions)))

    @cached_property
    def engine(self) -> Engine:
        """The game itself, which is loaded when it is first needed: a second of CPU time."""
        # It may be needed within a trace, where a `jnp.array` of its modules would be a tracer.
        with jax.ensure_compile_time_eval():
            return self.game.make()

    def new_world(self, key: jax.Array) -> Any:
        """A newly generated world."""
        return settle(self.engine.reset(key))

    def begin_in(self, world: Any, plan: Plan | None = None) -> WalkState:
        """A new episode in a given world, at the first task of `plan` (default: the module's)."""
        plan = Plan(*map(jnp.asarray, self.plan)) if plan is None else plan
        return WalkState(
            world=world,
            plan=plan,
            task=jnp.zeros((), jnp.int32),
            success=jnp.zeros(plan.functions.shape, bool),
            length=jnp.zeros((), jnp.int32),
            task_length=jnp.zeros((), jnp.int32),
            total=jnp.zeros((), jnp.float32),
            visited=self._visit(not_visited(self._cells or (0, 0)), world)[0],
            seen=jnp.full((self.game.lasting if self.sight else 0, 2), NOWHERE, jnp.int32),
            way=jnp.full((), UP, jnp.int32),
            potential=jnp.zeros((), jnp.float32),
        )

    def observe(self, state: WalkState) -> tuple[jax.Array, WalkState]:
        """The game's observation, with sight the columns beside it; and the state that remembers.

        Returns:
          f32[observation_size], or a grid without columns beside it; and the state with what is
          in view among what was seen, and the way in whose frame all of this is.
        """
        seen = self.engine.observe(state.world)
        if seen.shape != self.game.observation_shape:  # the networks' error would name no game
            name, size = self.game.name, self.game.observation_size
            problem = f"observe returns {list(seen.shape)}, and observation_size is {size}"
            raise ConfigError(f"{name}: {problem}; see flowrl check --game {name}")
        view, heading, frame = self.game.view, self.game.heading, self._frame
        looks = jnp.int32(UP) if heading is None else way_of(seen, heading)
        shown = seen
        if frame:
            state, shown = state._replace(way=looks), frame.turned(seen, looks)
        if not self.sight or self.game.is_grid:
            return shown, state
        parts = [shown, self._of_step(state), self._spare(state)]
        position = self.engine.position(state.world) if self._cells else jnp.zeros(2, jnp.int32)
        if view:
            columns, places = nearest(seen, view, state.seen, position, way=state.way)
            parts.append(columns)
            state = state._replace(seen=places)
        if view and heading is not None:
            parts.append(ahead(seen, view, looks))
        if self._cells:
            parts.append(window(state.visited, position, state.way))
        return jnp.concatenate(parts), state

    def action_of(self, state: WalkState, choice: jax.Array) -> jax.Array:
        """int32: the game's action of what an expert chose, in the frame of what it saw last."""
        return self._frame.action_of(choice, state.way) if self._frame else choice

    @property
    def _frame(self) -> Frame | None:
        """The player's own frame, if experts see and move in it."""
        view, heading, moves = self.game.view, self.game.heading, self.game.moves
        if not (self.egocentric and view and moves) or heading is None:
            return None
        return Frame(view, heading, moves)

    def _of_step(self, state: WalkState) -> jax.Array:
        """f32[2]: how much the inventory lacks of what the step yields, and its time left."""
        lack = jnp.maximum(state.plan.gains[state.task] - self._held(state.world), 0).sum()
        left = 1.0 - state.task_length / state.plan.limit[state.task]
        return jnp.stack([_LACK_SCALE * lack, left]).astype(jnp.float32)

    def _spare(self, state: WalkState) -> jax.Array:
        """f32[items]: of what later steps need, 1 where no more is held, less the more is spare.

        It is negative where some is lacking, and 0 of what is not needed.
        """
        keeps = state.plan.keeps[state.task]
        spare = (self._held(state.world) - keeps).astype(jnp.float32)
        spare = jnp.where(spare < 0, _LACK_SCALE * spare, 1 / (1 + jnp.maximum(spare, 0)))
        return jnp.where(keeps > 0, spare, 0.0)

    @property
    def _cells(self) -> tuple[int, int] | None:
        """Rows and columns of the cells that are remembered, if any."""
        return self.game.cells if self.sight else None

    def _visit(self, visited: jax.Array, world: Any) -> tuple[jax.Array, jax.Array]:
        """The cells visited once the player is in `world`, and whether its cell is new."""
        if not self._cells:
            return visited, jnp.zeros((), bool)
        return visit(visited, self.engine.position(world))

    def current_expert(self, state: WalkState) -> jax.Array:
        """int32: local index of the expert that acts next."""
        return state.plan.expert[state.task]

    def advance(
        self, key: jax.Array, state: WalkState, action: jax.Array
    ) -> tuple[WalkState, StepOutput]:
        """Take one action, without a reset: after `done` the state is that of the old episode."""
        world, env_reward = self.engine.step(key, state.world, action)
        world = settle(world)
        over, plan, task = self.engine.is_over(world), state.plan, state.task
        step = WorldStep(
            state.world,
            world,
            jnp.asarray(env_reward, jnp.float32),
            timestep=state.task_length + 1,
            episode_timestep=state.length + 1,
        )
        done, earned = self._success_and_reward(state, step)
        held = self._held(world)
        kept = jnp.concatenate([held >= plan.keeps[task], done | ~plan.facts[task]])
        completed = done[plan.functions[task]] & (kept.all() | ~plan.bound)
        completed &= ~over | (task == plan.last)  # who dies hands nothing on
        lied = completed & (held < plan.gains[task]).any()
        walked, output = self._walk(state, world, completed=completed, earned=earned, over=over)
        visited, explored = self._visit(state.visited, world)
        anew, _ = self._visit(jnp.zeros_like(visited), world)
        walked = walked._replace(visited=jnp.where(completed, anew, visited))
        number = self.engine.cause(step) if self.game.causes else 0
        cause = jnp.arange(len(self.game.causes)) == number
        return walked, output._replace(lied=lied, explored=explored, kept=kept, cause=cause)

    def _held(self, world: Any) -> jax.Array:
        """int32[items]: how much of each of the game's items is in the inventory."""
        if not self.game.items:
            return jnp.zeros(0, jnp.int32)
        step = WorldStep(world, world, jnp.zeros((), jnp.float32))
        held = self.engine.features([_INVENTORY], step)[_INVENTORY]
        amounts = (jnp.sum(getattr(held, item)) for item in sorted(self.game.items))
        return jnp.stack([amount.astype(jnp.int32) for amount in amounts])

    def player(self, world: Any) -> tuple[jax.Array, jax.Array]:
        """The player's intrinsics, f32[intrinsics], and items, int32[items]; none if not known."""
        if not self.game.intrinsics:
            return jnp.zeros(0, jnp.float32), self._held(world)
        step = WorldStep(world, world, jnp.zeros((), jnp.float32))
        return self.engine.features([INTRINSICS], step)[INTRINSICS], self._held(world)

    def holds(self, state: WalkState) -> jax.Array:
        """bool[functions]: whose done-condition holds in a state in which nothing changes."""
        zero = jnp.zeros((), jnp.float32)
        return self._success_and_reward(state, WorldStep(state.world, state.world, zero))[0]

    def _walk(
        self,
        state: WalkState,
        world: Any,
        *,
        completed: jax.Array,
        earned: jax.Array,
        over: jax.Array,
    ) -> tuple[WalkState, StepOutput]:
        """Move the plan on and say what the step was; `earned` as `_success_and_reward` says."""
        plan = state.plan
        reward = jnp.clip(earned[0] + _SUCCESS_BONUS * completed, -REWARD_LIMIT, REWARD_LIMIT)
        potential = jnp.clip(earned[1], -REWARD_LIMIT, REWARD_LIMIT)
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
            visited=state.visited,
            seen=state.seen,
            way=state.way,
            potential=jnp.where(completed, 0.0, potential),
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
            lied=jnp.zeros_like(completed),
            explored=jnp.zeros_like(completed),
            kept=jnp.zeros(0, bool),
            cause=jnp.zeros(0, bool),
            episode_length=walked.length,
            episode_return=walked.total,
        )

    def _success_and_reward(self, state: WalkState, step: WorldStep) -> tuple[jax.Array, jax.Array]:
        """Return which functions are done, bool[functions], and the task's reward and potential.

        All functions are computed and one value is picked: under vmap a switch would do the same.
        Reward and potential are f32[2]. A potential that a reward function does not return is 0.
        """
        pairs, count = self.functions.values(), state.plan.count[state.task]
        called = [function for pair in pairs for function in (pair.is_done, pair.reward)]
        names = {name for function in called for name in features_of(function)}
        features = self.engine.features(names, step)

        def value(pair: SuccessFunctions, function: Callable[..., Any]) -> jax.Array:
            given = {name: features[name] for name in features_of(function)}
            if pair.takes_count and COUNT in inspect.signature(function).parameters:
                given[COUNT] = count
            return jnp.asarray(function(**given))

        done = [value(pair, pair.is_done).astype(bool) for pair in pairs]
        earned = [value(pair, pair.reward).astype(jnp.float32) for pair in pairs]
        earned = [each if each.ndim else jnp.stack([each, jnp.zeros_like(each)]) for each in earned]
        return jnp.stack(done), jnp.stack(earned)[state.plan.functions[state.task]]


def shared_functions(
    module: TaskModule, *, max_task_steps: int
) -> tuple[dict[str, SuccessFunctions], Plan]:
    """The functions of the game's library, then those that this plan has besides, and the plan.

    The functions' keys tell programs apart. The number of columns is a power of two, 8 at least.
    """
    library = library_functions(module.game.name)
    functions, chosen = dict(library), []
    for task in module.tasks:
        chosen.append(task.digest if task.digest in library else f"{task.digest} {task.count}")
        functions.setdefault(chosen[-1], task.functions)
    numbers = {key: number for number, key in enumerate(functions)}
    columns = max(_LEAST_COLUMNS, 1 << (len(chosen) - 1).bit_length())

    def row(values: Iterable[int]) -> np.ndarray:
        given = np.fromiter(values, np.int32)
        return np.pad(given, (0, columns - len(given)))

    tasks, items = module.tasks, sorted(module.game.items)

    def amounts(of_tasks: Iterable[Mapping[str, int]]) -> np.ndarray:
        given = np.zeros((columns, len(items)), np.int32)
        for number, of_task in enumerate(of_tasks):
            given[number] = [of_task.get(item, 0) for item in items]
        return given

    facts = np.zeros((columns, len(functions)), bool)
    for number, task in enumerate(tasks):
        facts[number, [numbers[chosen[step]] for step in task.facts.values()]] = True
    return functions, Plan(
        functions=row(numbers[key] for key in chosen),
        count=row(task.count for task in tasks),
        limit=row(task.max_steps or max_task_steps for task in tasks),
        expert=row(task.expert_local for task in tasks),
        last=np.asarray(len(tasks) - 1, np.int32),
        gains=amounts(task.gains for task in tasks),
        keeps=amounts(task.keeps for task in tasks),
        facts=facts,
        bound=np.asarray(False),
    )


def check_gains(tasks: Sequence[Task], claims: Any, *, ended: bool = True) -> None:
    """Make sure that steps that are done have yielded what their skills gain.

    `claims` int[tasks, 2] say how often each step was done, and how often its gains were missing.
    Before the end a step that was done a few times is not judged.

    Raises FalseGainError if they were missing in more than 1 %.
    """
    for task, (done, lied) in zip(tasks, np.asarray(claims).tolist(), strict=False):
        most = max(_MOST_LIES * done, 1)  # one may be chance
        if lied > most and (ended or done >= _LEAST_CLAIMS):
            gains = ", ".join(f"{amount} {item}" for item, amount in task.gains.items())
            raise FalseGainError(
                f"{task.skill} × {task.count} was done {done} times, {lied} of them without "
                f"{gains} in the inventory; correct its task_is_done or its gain"
            )


def step_ends(module: TaskModule, counts: Any, running: Any = None) -> tuple[StepEnds, ...]:
    """Count what came of each step of a module's plan.

    Args:
      counts: int `[tasks, …]`, as `count_steps` says.
      running: int `[tasks]`, steps under way at the end; none by default.
    """
    _, plan = shared_functions(module, max_task_steps=1)
    items, causes = sorted(module.game.items), module.game.causes
    first_item = len(COUNTS) + len(causes)
    first_fact, ends = first_item + len(items), []
    running = np.zeros(len(module.tasks), int) if running is None else running
    for task, row, under_way in zip(module.tasks, counts.tolist(), running.tolist(), strict=False):
        named = dict(zip(COUNTS, row, strict=False))
        facts = {fact: first_fact + plan.functions[step] for fact, step in task.facts.items()}
        places = {item: first_item + items.index(item) for item in task.keeps} | facts
        ended = {name: named[name] for name in ("done", "died", "cut")}
        killed = zip(causes, row[len(COUNTS) :], strict=False)
        ends.append(
            StepEnds(
                **ended,
                begun=sum(ended.values()) + under_way,
                running=under_way,
                timesteps=named["timesteps"],
                causes={cause: number for cause, number in killed if number},
                kept={name: row[place] for name, place in places.items()},
            )
        )
    return tuple(ends)


@cache
def library_functions(env_name: str) -> dict[str, SuccessFunctions]:
    """The functions of all library skills of a game by the digest of their code, in its order."""
    by_digest: dict[str, SuccessFunctions] = {}
    for skill in load_library(env_name).values():
        done, reward = parsed_function(skill.is_done), parsed_function(skill.reward)
        game, place = find_game(env_name), f"the library's {skill.name}"
        load = cache(partial(execute_functions, (done, reward), game, place=place))
        functions = SuccessFunctions(skill.name, load, takes_count=True)
        by_digest.setdefault(code_digest(done, reward, env_name), functions)
    return by_digest


def features_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """The features a skill function asks for; the count n is none."""
    return tuple(name for name in inspect.signature(function).parameters if name != COUNT)
