"""The process of `flowrl evaluate`: merged experts walk a plan in worlds no training has seen."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowrl import config as configs
from flowrl.config import PPOConfig
from flowrl.envs.base import StepOutput, claims_of, count_steps, is_clipped
from flowrl.envs.skill_module import TaskModule, open_module, terms_of
from flowrl.envs.tasks import SkillEnv, WalkState, check_gains, features_of, step_ends
from flowrl.envs.vector import BatchedEnv, BatchedState
from flowrl.envs.world_digest import world_digest
from flowrl.errors import ConfigError, ExpertMissingError
from flowrl.experts import checkpoint
from flowrl.experts.merge import wilson
from flowrl.experts.store import ExpertStore
from flowrl.games.base import WorldStep
from flowrl.games.random_play import settle
from flowrl.judging.judge import RECORDED, Recording
from flowrl.launchers.confined import ENDED, EPISODES
from flowrl.measures.causes import EvaluationReport, StepRate
from flowrl.measures.episodes import EpisodesOrigin, RecordedEpisodes
from flowrl.networks import dispatch
from flowrl.networks.grouped import pack
from flowrl.networks.moe import stack_experts
from flowrl.parallel.training_setup import expected_shapes
from flowrl.paths import GraphPaths, RunPaths
from flowrl.ppo.programs import acting_experts, padding, stacked_like
from flowrl.ppo.sharding import check_backend
from flowrl.ppo.trainer import open_cache, use_compile_cache, walk_of
from flowrl.program_cache import ProgramCache, ProgramSpec, register_results
from flowrl.runs import PlannedStep, StepEnds, TrainingRun, check_module, read_run

ROWS = 256  # episodes side by side
_CHUNK = 50  # steps between two checks whether all episodes have ended
_LARGEST_FEATURE = 32  # numbers; a recording leaves larger ones out, such as maps
# Differences to the timestep before, and what tells that the step is done.
_logger = logging.getLogger(EPISODES)
_NOT_RECORDED = re.compile(r".*_(diff|prev|penalty)|was_.*|env_reward|achievements")


class Tally(NamedTuple):
    """The first episode of each environment; leaves `[B, …]`."""

    over: Any  # bool[B]
    success: Any  # bool[B, tasks]; while playing as many columns as the plan's arrays have
    length: Any  # int32[B]
    total: Any  # f32[B]
    clipped: Any  # int32[B]; timesteps whose reward was clipped
    truncated: Any  # bool[B]; the time limit ended it
    counts: Any  # int32[1, tasks, …]; what came of the tasks of all environments
    seen: Any = None  # what `watch` returned, leaves [T, B]; None while playing
    world_keys: Any = None  # uint32[B, …]: of the worlds; None while playing, and without `watch`

    @property
    def died(self) -> Any:
        """bool[B]: the episode ended without its last task's success, and not by a time limit."""
        return ~(self.truncated | self.success[:, -1])


class PlayedTimestep(NamedTuple):
    """One timestep of B environments."""

    state: BatchedState
    """Before the timestep."""
    logits: jax.Array
    """f32[B, actions]: of the experts' choices, in the frame of what they saw"""
    values: jax.Array
    """f32[B]"""
    key: jax.Array
    """The key that `BatchedEnv.step` took."""
    actions: jax.Array
    """int32[B]: the game's"""
    output: StepOutput
    """Leaves [B]."""


Watch = Callable[[BatchedEnv, PlayedTimestep], Any]  # → leaves [B]
Play = Callable[[Any, jax.Array, int], Tally]
register_results(Tally)


def evaluate(
    graph_paths: GraphPaths,
    skill: str,
    *,
    episodes: int,
    seed: int,
    first: int = 0,
    failed: int = 0,
) -> tuple[EvaluationReport, RecordedEpisodes | None]:
    """Play `episodes` episodes, each in a fresh world of its own.

    Records the `first` ones and the first `failed` ones that fail, if there are to be any.

    Raises:
      ExpertMissingError: no such skill is merged.
      ExpertCorruptError: an expert's files are not those that were merged.
      FalseGainError: a step is done without what its skill gains.
    """
    store, watch = ExpertStore(graph_paths), _recorded if first or failed else None
    played = _play(store, skill, episodes=episodes, seed=seed, watch=watch)
    run, module, tallies = played
    check_gains(module.tasks, claims_of(sum(tally.counts.sum(axis=0) for tally in tallies)))
    report = _report(graph_paths.root, store.manifest().generation, played)
    if watch is None:
        return report, None
    origin = EpisodesOrigin.of(run, generation=report.generation, seed=seed)
    chosen = _chosen(np.concatenate([tally.success[:, -1] for tally in tallies]), first, failed)
    return report, RecordedEpisodes(origin=origin, columns=_columns(tallies, chosen))


def _chosen(success: np.ndarray, first: int, failed: int) -> list[int]:
    """Numbers of the first episodes and of the first that failed, in order, from 0."""
    return sorted({*range(min(first, len(success))), *np.flatnonzero(~success)[:failed].tolist()})


def _columns(tallies: Sequence[Tally], chosen: Sequence[int]) -> dict[str, np.ndarray]:
    """The arrays of `RecordedEpisodes`, of these episodes."""
    episodes = [(tallies[number // ROWS], number % ROWS) for number in chosen]
    none, ends = tallies[0], [int(tally.length[row]) for tally, row in episodes]

    def timesteps(name: str) -> np.ndarray:
        parts = (
            tally.seen[name][:end, row] for (tally, row), end in zip(episodes, ends, strict=True)
        )
        return np.concatenate([none.seen[name][:0, 0], *parts])

    return {
        "lengths": np.array(ends, np.int32),
        "success": np.array([tally.success[row, -1] for tally, row in episodes], bool),
        "world_keys": np.concatenate(
            [none.world_keys[:0], *(tally.world_keys[row][None] for tally, row in episodes)]
        ),
        **{name: timesteps(name) for name in none.seen},
    }


def evaluate_runs(
    places: Sequence[RunPaths], *, episodes: int, seed: int
) -> Iterator[EvaluationReport]:
    """Evaluate the experts that runs of one skill have left, in the same worlds; none is merged.

    Runs of one plan play under the module and settings of the first one. Gains that are missing
    were counted while they trained, in many more episodes.
    """
    opened: tuple[Any, ...] | None = None
    for run_paths in places:
        run = read_run(run_paths)
        if opened is None or (opened[0].plan, opened[0].experts) != (run.plan, run.experts):
            opened = open_plan(run_paths)
        _, module, play = opened
        params = _final_experts(run_paths, run)
        tallies = _episodes(play, params, episodes=episodes, seed=seed)
        yield _report(run_paths.folder, 0, (run, module, tallies))


def evaluate_candidates(
    places: Sequence[RunPaths], *, episodes: int, seed: int
) -> Iterator[tuple[int, Sequence[tuple[Any, ...]]]]:
    """Evaluate as `evaluate_runs`, and replay the terms of each run's reward.

    Yields the successes, and of each term its source, its mean and standard deviation over the
    timesteps of the last step, and the share of those in which it is not 0.
    """
    for run_paths in places:
        sources, function = terms_of(run_paths.module)

        def terms(env: BatchedEnv, timestep: PlayedTimestep, function: Any = function) -> Any:
            return _terms(env, timestep, function)

        terms.__name__ = f"terms {hashlib.sha256(repr(sources).encode()).hexdigest()}"
        run, module, play = open_plan(run_paths, terms)
        params = _final_experts(run_paths, run)
        tallies = _episodes(play, params, episodes=episodes, seed=seed)
        last = len(run.plan) - 1
        counted = [
            tally.seen[:, row][:length][tally.seen[:length, row, 0] == last, 1:]
            for tally in tallies
            for row, length in enumerate(tally.length)
        ]
        values = np.nan_to_num(np.concatenate([np.zeros((0, len(sources))), *counted])).T
        figures = [
            (name, float(x.mean()), float(x.std()), float((x != 0).mean()))
            for name, x in zip(sources, values, strict=True)
            if x.size
        ]
        yield _report(run_paths.folder, 0, (run, module, tallies)).steps[-1].successes, figures


def _terms(env: BatchedEnv, timestep: PlayedTimestep, function: Any) -> jax.Array:
    """The number of the plan's step, and the terms of the last one's reward; f32[B, 1 + terms]."""

    def of(key: jax.Array, walk: WalkState, action: jax.Array) -> jax.Array:
        engine = env.env.engine
        world, reward = engine.step(key, walk.world, action)
        times = {"timestep": walk.task_length + 1, "episode_timestep": walk.length + 1}
        step = WorldStep(walk.world, settle(world), jnp.asarray(reward, jnp.float32), **times)
        values = function(**engine.features(features_of(function), step))
        terms = [jnp.asarray(value, jnp.float32).reshape(-1)[0] for value in values]
        return jnp.stack([walk.task.astype(jnp.float32), *terms])

    keys = env.step_keys(timestep.key, len(timestep.actions))
    return jax.vmap(of)(keys, timestep.state.walk, timestep.actions)


def _final_experts(run_paths: RunPaths, run: TrainingRun) -> Any:
    """The experts that a run has left; leaves `[E, …]` by local index."""
    like = checkpoint.like_of(expected_shapes(run.config))
    finals = map(run_paths.final, range(len(run.experts)))
    return stack_experts([checkpoint.load_expert(final, like) for final in finals])


def _report(
    place: Path, generation: int, played: tuple[TrainingRun, TaskModule, list[Tally]]
) -> EvaluationReport:
    run, module, tallies = played
    counted = (each._replace(seen=None, world_keys=None) for each in tallies)
    tally = jax.tree.map(lambda *leaves: np.concatenate(leaves), *counted)
    successes, episodes = tally.success.sum(axis=0).tolist(), len(tally.length)
    counts = tally.counts.sum(axis=0)
    ends = step_ends(module, counts)
    return EvaluationReport(
        graph=str(place),
        generation=generation,
        skill=run.skill,
        episodes=episodes,
        mean_episode_length=float(tally.length.mean()),
        mean_episode_return=float(tally.total.mean()),
        deaths=float(tally.died.mean()),
        clipped_rewards=int(tally.clipped.sum()),
        steps=tuple(map(partial(_rate, episodes=episodes), run.plan, successes, ends)),
    )


def record(graph_paths: GraphPaths, skill: str, *, episodes: int, seed: int) -> Recording:
    """Play as `evaluate` does, and keep the features of each episode's first timesteps."""
    run, _, tallies = _play(
        ExpertStore(graph_paths), skill, episodes=episodes, seed=seed, watch=_watched
    )
    names = tuple(sorted(tallies[0].seen))
    blocks = [
        np.stack([_first_timesteps(tally.seen[name]) for name in names], axis=-1)
        for tally in tallies
    ]
    return Recording(
        skill=run.skill,
        names=names,
        steps=np.concatenate([block.swapaxes(0, 1) for block in blocks]),
        lengths=np.concatenate([tally.length for tally in tallies]),
        success=np.concatenate([tally.success[:, -1] for tally in tallies]),
    )


def _play(
    store: ExpertStore, skill: str, *, episodes: int, seed: int, watch: Watch | None = None
) -> tuple[TrainingRun, TaskModule, list[Tally]]:
    """Let the merged experts play a skill's plan."""
    if episodes < 1:
        raise ConfigError(f"--episodes {episodes} must be at least 1")
    place = store.archive_of(skill)
    check_backend()
    params = load_experts(store, read_run(place))  # before anything is compiled
    run, module, play = open_plan(place, watch)
    return run, module, _episodes(play, params, episodes=episodes, seed=seed)


def open_plan(
    run_paths: RunPaths, watch: Watch | None = None
) -> tuple[TrainingRun, TaskModule, Play]:
    """A run, its module, and what lets experts play its plan; raises as `open_walk`."""
    run, config, walk = open_walk(run_paths)
    cache = open_cache(config, walk)
    env = BatchedEnv(walk, stock=ROWS, cache=cache)
    return run, walk.module, player(env, config, cache, watch)


def open_walk(run_paths: RunPaths) -> tuple[TrainingRun, PPOConfig, SkillEnv]:
    """A run, its settings, and the game that walks its plan.

    Raises:
      FileRefusedError: the module is not the one that was generated for the run.
    """
    run = read_run(run_paths)
    check_module(run_paths, run)
    module = open_module(run_paths.module)
    config = configs.from_json(PPOConfig, run.config)
    use_compile_cache(config.compile_cache)
    check_backend()
    return run, config, walk_of(config, module)


def _episodes(play: Play, params: Any, *, episodes: int, seed: int) -> list[Tally]:
    """Play, ROWS episodes at a time."""
    keys = jax.random.split(jax.random.key(seed), -(-episodes // ROWS))
    counts = [min(ROWS, episodes - begun) for begun in range(0, episodes, ROWS)]
    return [play(params, key, count) for key, count in zip(keys, counts, strict=True)]


def load_experts(store: ExpertStore, run: TrainingRun) -> Any:
    """The run's experts as they are merged now, verified; leaves `[E, …]` by local index."""
    versions = store.manifest().experts
    if missing := sorted(set(run.experts) - versions.keys()):
        raise ExpertMissingError(
            f"{run.skill} was trained with the experts {missing}, which "
            f"{store.graph_paths.manifest} does not name; train them again"
        )
    like = checkpoint.like_of(expected_shapes(run.config))
    return stack_experts(
        [checkpoint.load_expert(store.verify(versions[index]), like) for index in run.experts]
    )


def _shown(tally: Tally, count: int, num_tasks: int) -> Tally:
    """The first `count` environments of a tally, with the plan's own tasks, in NumPy."""
    rows, tasks = jax.tree.map(lambda leaf: np.asarray(leaf)[:count], tally), slice(num_tasks)
    return rows._replace(success=rows.success[:, tasks], counts=rows.counts[:, tasks])


def player(
    env: BatchedEnv, config: PPOConfig, cache: ProgramCache, watch: Watch | None = None
) -> Play:
    """A function that lets experts play: the first episode of each environment.

    It takes parameters with leaves `[E, …]`, a random key and a number B ≤ ROWS of environments,
    and returns a Tally of NumPy arrays `[B, …]`. Its programs are the same for every plan of
    library skills. The environments' stock has ROWS worlds: only their first episode counts.
    `watch` is called after each timestep; the tally has what it returned, also after an
    environment's first episode. Of a judge's view only about RECORDED timesteps are kept.
    """
    pad = padding(env.num_experts)
    key = {
        "activation": config.activation,
        "layer_size": config.layer_size,
        "experts": acting_experts(env.num_experts),
        "watch": watch.__name__ if watch else "",
    }

    def like() -> tuple[Any, ...]:
        obs, state = env.like(ROWS)
        key = jax.eval_shape(jax.random.key, 0)
        packed = jax.eval_shape(lambda params: pad(pack(params)), stacked_like(env, config))
        return packed, (obs, state, key, _tally(env, state, 0))

    program = partial(_chunk, env, config.activation, watch=watch)
    chunk = cache.begin(ProgramSpec("play", program, like, key))
    env.begin_programs(ROWS)

    def play(params: Any, key: jax.Array, count: int) -> Tally:
        packed = pad(pack(params))
        reset_key, key = jax.random.split(key)
        obs, state = env.reset(reset_key, ROWS)
        tally, chunks = _tally(env, state, count), []
        while not (over := np.asarray(tally.over)).all():
            (obs, state, key, tally), seen = chunk(packed, (obs, state, key, tally))
            _logger.debug(ENDED, np.asarray(tally.over).sum() - over.sum())
            if watch is not _watched or len(chunks) * _CHUNK < RECORDED:
                chunks.append(jax.tree.map(lambda leaf: np.asarray(leaf)[:, :count], seen))
        episodes = _shown(tally, count, env.num_tasks)
        if watch is None:
            return episodes
        return episodes._replace(
            seen=jax.tree.map(lambda *leaves: np.concatenate(leaves), *chunks),
            world_keys=np.asarray(jax.random.key_data(env.world_keys(reset_key, count))),
        )

    return play


def _recorded(env: BatchedEnv, timestep: PlayedTimestep) -> dict[str, jax.Array]:
    """Columns of `RecordedEpisodes`, [B, …], by which a timestep is replayed and compared."""
    walk = timestep.state.walk
    keys = env.step_keys(timestep.key, len(timestep.actions))
    return {
        "actions": timestep.actions.astype(jnp.int16),
        "steps": walk.task.astype(jnp.int16),
        "step_keys": jax.random.key_data(keys),
        "rewards": timestep.output.reward,
        "digests": jax.vmap(world_digest)(walk.world, walk.task),
    }


def _watched(env: BatchedEnv, timestep: PlayedTimestep) -> dict[str, jax.Array]:
    """Return a judge's view of B environments before a timestep, by name, each f32[B].

    These are the plan's step, the episode's return so far, the expert's value and entropy, and
    the game's features of at most 32 numbers, without those that tell that a step is done.
    """
    walk, engine = timestep.state.walk, env.env.engine
    zero = jnp.zeros((), jnp.float32)

    def features(walk: WalkState) -> dict[str, Any]:
        given = WorldStep(walk.world, walk.world, zero, walk.task_length + 1, walk.length + 1)
        names = [name for name in env.env.game.features if not _NOT_RECORDED.fullmatch(name)]
        return engine.features(names, given)

    chances = jax.nn.log_softmax(timestep.logits)
    view = {"plan_step": walk.task, "return": walk.total, "value": timestep.values}
    view["entropy"] = -(jnp.exp(chances) * chances).sum(-1)
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.vmap(features)(walk)):
        columns = leaf.reshape(leaf.shape[0], -1)
        if columns.shape[1] <= _LARGEST_FEATURE:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            view |= {f"{name}.{n}": columns[:, n] for n in range(columns.shape[1])}
    return {name: value.astype(jnp.float32) for name, value in view.items()}


def _first_timesteps(rows: np.ndarray) -> np.ndarray:
    """The first RECORDED timesteps, [RECORDED, B]; zeros after the last one."""
    first = rows[:RECORDED]
    return np.pad(first, [(0, RECORDED - len(first)), (0, 0)])


def _tally(env: BatchedEnv, state: BatchedState, count: int) -> Tally:
    """A tally with a row for each of the state's; all rows but the first `count` are over."""
    rows, columns = state.walk.success.shape
    return Tally(
        over=np.arange(rows) >= count,
        success=np.zeros((rows, columns), bool),
        length=np.zeros(rows, np.int32),
        total=np.zeros(rows, np.float32),
        clipped=np.zeros(rows, np.int32),
        truncated=np.zeros(rows, bool),
        counts=np.zeros((1, columns, env.env.num_counts), np.int32),
    )


def _chunk(
    env: BatchedEnv, activation: str, packed: Any, carry: Any, *, watch: Watch | None = None
) -> tuple[Any, Any]:
    def act(carry, _):
        obs, before, key, tally = carry
        key, action_key, step_key = jax.random.split(key, 3)
        expert = env.current_expert(before)
        logits, values = dispatch.apply(packed, obs, expert, activation=activation)
        choice = jax.random.categorical(action_key, logits).astype(jnp.int32)
        actions = env.action_of(before, choice)
        obs, state, output = env.step(step_key, before, actions)
        timestep = PlayedTimestep(before, logits, values, step_key, actions, output)
        seen = watch(env, timestep) if watch else None
        fresh = ~tally.over
        rows = jax.tree.map(lambda leaf: leaf[None], (output, fresh))
        tally = Tally(
            over=tally.over | output.done,
            success=jnp.where(fresh[:, None], output.task_success, tally.success),
            length=jnp.where(fresh, output.episode_length, tally.length),
            total=jnp.where(fresh, output.episode_return, tally.total),
            clipped=tally.clipped + (fresh & is_clipped(output.reward)),
            truncated=tally.truncated | (fresh & output.truncated),
            counts=tally.counts + count_steps(*rows),
        )
        return (obs, state, key, tally), seen

    return jax.lax.scan(act, carry, None, length=_CHUNK)


def _rate(step: PlannedStep, wins: int, ends: StepEnds, *, episodes: int) -> StepRate:
    low, high = wilson(wins, episodes)
    return StepRate(
        skill=step.skill,
        count=step.count,
        expert=step.expert,
        successes=wins,
        success_rate=wins / episodes,
        low=low,
        high=high,
        ends=ends,
    )
