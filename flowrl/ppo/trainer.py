"""The trainer: from a run folder with a module to its final experts and result.json."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from flowrl import storage
from flowrl.config import PPOConfig, num_shards
from flowrl.envs.base import claims_of
from flowrl.envs.skill_module import TaskModule, open_module
from flowrl.envs.tasks import SkillEnv, check_gains, make_env, step_ends
from flowrl.envs.vector import BatchedEnv
from flowrl.errors import EXIT_RESUMABLE
from flowrl.experts import checkpoint
from flowrl.launchers.sandbox import compile_cache
from flowrl.measures.convergence import look_at, verdict
from flowrl.measures.objectives import CurvePoint, read_curve
from flowrl.networks.moe import ActorCritic
from flowrl.paths import RunPaths
from flowrl.ppo import processes, run_io
from flowrl.ppo.loop import (
    Counters,
    Learner,
    UpdateReport,
    frames_per_update,
    num_updates,
    start,
    train,
)
from flowrl.ppo.programs import Programs, begin_programs, seed_words
from flowrl.ppo.progress import Reporter
from flowrl.ppo.run_io import Assignment, Best, Resumed
from flowrl.ppo.sharding import place, shard_size, verify_distributed_setup
from flowrl.program_cache import ProgramCache
from flowrl.rates import is_clearly_more
from flowrl.runs import EarlyEnd, TrainConfig

_LEAST_STOCK = 256  # worlds, of all shards together


def run(config: TrainConfig, stop: Callable[[], int | None]) -> int:
    """Train the run in the module's folder to its end, or until a stop is requested.

    `stop` returns an exit code to stop with, or None; it is called after every update.

    Returns 0 with result.json written, else the stop's exit code with the state saved. Raises
    FlowrlError if the run cannot be trained; its folder holds no result then.
    """
    began = time.monotonic()
    use_compile_cache(config.ppo.compile_cache)
    module = open_module(config.module_path)
    with processes.connected(config, stop) as connected:
        opened = open_run(connected, module)
        if not jax.process_index():
            return _train(opened, stop, began=began, asked=connected)
        learner, counters, _ = prepare(opened)
        for update in opened.updates(learner, counters, stop):
            if update.stop and not update.ended:
                return update.stop
        return 0


class Opened(NamedTuple):
    """A run with its environments and programs."""

    config: TrainConfig
    module: TaskModule
    assignment: Assignment
    env: BatchedEnv
    programs: Programs

    def updates(
        self, learner: Learner, counters: Counters, stop: Callable[[], int | None]
    ) -> Iterator[UpdateReport]:
        """Train until the run's end, as `loop.train` does."""
        return train(
            self.env,
            self.config.ppo,
            self.programs,
            learner=learner,
            counters=counters,
            trained=self.assignment.run.trained,
            stop=stop,
        )


def open_run(config: TrainConfig, module: TaskModule) -> Opened:
    """The run in the module's folder, on the devices that are there; programs are being made."""
    ppo = verify_distributed_setup(config.ppo)
    config = replace(config, ppo=ppo)
    processes.meet("numbers of shards (give --env_shards)", str(ppo.env_shards))
    assignment = run_io.read_assignment(config, module)
    return Opened(config, module, assignment, *open_env(ppo, module))


def _train(
    opened: Opened, stop: Callable[[], int | None], *, began: float, asked: TrainConfig
) -> int:
    """Train as the process that writes, as was `asked`; returns the exit code."""
    config, module, assignment, *_ = opened
    reporter = Reporter(
        assignment, config.ppo, step_ends=lambda episodes: step_ends(module, *episodes.counts())
    )
    try:
        learner, counters, best = prepare(opened)
        asked.record()
        seconds = counters.seconds + time.monotonic() - began  # as if all starts had been one
        counters = replace(counters, seconds=seconds)
        reporter.begin_training(counters)
        checkpoints, stuck = run_io.Checkpointer(config.ppo.checkpoint_seconds), False
        claims = 0  # of this start

        save = partial(run_io.save_checkpoint, assignment.run_paths, config.ppo)

        def stop_here() -> int | None:
            return EXIT_RESUMABLE if stuck else stop()

        for update in opened.updates(learner, counters, stop_here):
            reporter.report(update)
            claims = claims + claims_of(update.counts)
            check_gains(module.tasks, claims, ended=update.ended)
            best = best.or_better(update)
            stopped = _why_stopped(update, assignment.run_paths, stuck=stuck)
            if update.ended or stopped:
                _finish(opened, update, best, stopped)
                break
            if update.stop:
                save(update, best)
                return update.stop
            checkpoints.due(partial(save, update, best))
            stuck = stuck or _is_stuck(assignment.run_paths, config.ppo, update)
        return 0
    finally:
        reporter.close()


def _why_stopped(update: UpdateReport, run_paths: RunPaths, *, stuck: bool) -> EarlyEnd:
    """Return the reason of an early end; "" without one, or if goal or budget is reached."""
    if update.ended or not update.stop:
        return ""
    if run_paths.prune_json.exists():
        return "pruned"
    return "converged" if stuck else ""


def _is_stuck(run_paths: RunPaths, config: PPOConfig, update: UpdateReport) -> bool:
    """Return whether metrics.jsonl says at this update that success will hardly rise again.

    The other processes hear of it in the next update, as of a stop.
    """
    each, frames = frames_per_update(config), update.counters.frames
    budget = num_updates(config) * each
    before = frames - each * config.grad_sync_period
    if not config.stop_when_stuck or not update.rates.full:
        return False
    if look_at(before, budget) == look_at(frames, budget):
        return False
    rates, seconds = update.rates, update.counters.seconds
    newest = CurvePoint(frames, seconds, rates.success, rates.mean_episode_length)
    curve = (*read_curve(run_paths.metrics), newest)
    return verdict(curve, budget_frames=budget, goal=config.success_state_rate) == "stuck"


def walk_of(config: PPOConfig, module: TaskModule) -> SkillEnv:
    """One environment that walks the module's plan, as the run's configuration says."""
    return make_env(
        config.env_name,
        module,
        max_task_steps=config.max_task_steps,
        sight=config.sight,
        egocentric=config.egocentric,
        keep_needs=config.keep_needs,
    )


def open_env(config: PPOConfig, module: TaskModule) -> tuple[BatchedEnv, Programs]:
    """The environments that walk the module's plan, and the trainer's programs for them."""
    walk = walk_of(config, module)
    shards, size = num_shards(config), shard_size(config)
    pool, stock = -(-config.world_pool // shards), max(_LEAST_STOCK // shards, 2 * size)
    cache = open_cache(config, walk)
    env = BatchedEnv(walk, world_pool=pool, stock=stock, cache=cache)
    envs = [env.on(device) for device in place(config).local]
    for own in envs:
        own.begin_worlds()
    programs = begin_programs(env, config, cache)
    for own in envs:
        own.begin_programs(size)
    return env, programs


def open_cache(config: PPOConfig, walk: SkillEnv) -> ProgramCache:
    """The cache of the programs that have these environments compiled in."""
    folder = compile_cache(config.compile_cache, os.environ) / "programs"
    key = {
        "env_name": config.env_name,
        "game_code": walk.game.code_digest(),
        "functions": list(walk.functions),
        "columns": len(walk.plan.functions),
        "sight": walk.sight,
        "egocentric": walk.egocentric,
    }
    return ProgramCache(folder.absolute(), key)


def prepare(opened: Opened) -> tuple[Learner, Counters, Best]:
    """The learner, its counters and the best, of the last checkpoint if any; programs are ready."""
    config, _, assignment, env, programs = opened
    network = ActorCritic(env.num_actions, config.ppo.layer_size, config.ppo.activation)
    words, key = programs.expert_keys(seed_words(config.ppo.seed + assignment.run.attempt - 1))
    if config.replica:
        key = jax.random.fold_in(key, config.replica)  # worlds and actions of its own
    experts = run_io.initial_experts(
        assignment, network, np.asarray(words), observation_size=env.observation_size
    )
    state, counters = programs.fresh_state(experts), Counters(acted=(0,) * env.num_experts)
    begun = Resumed(state, key, counters, Best.none(state.params, env.num_tasks, counters.acted))
    if config.resume and checkpoint.has_resume(assignment.run_paths.resume):
        begun = run_io.load_checkpoint(assignment.run_paths, config.ppo, begun)
    learner = start(env, config.ppo, programs, train=begun.train, key=begun.key)
    programs.wait()
    if jax.process_count() > 1:
        processes.meet("parameters to start from", run_io.digest_of(begun, config.ppo))
    return learner, begun.counters, begun.best


def use_compile_cache(folder: Path | None) -> None:
    """Keep compiled programs between processes, also small and quick ones.

    Without a folder: JAX_COMPILATION_CACHE_DIR, or flowrl/jax in the user's cache folder.
    """
    jax.config.update("jax_compilation_cache_dir", str(compile_cache(folder, os.environ)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _finish(opened: Opened, update: UpdateReport, best: Best, stopped: EarlyEnd) -> None:
    """Write the final experts and result.json; remove the checkpoint.

    The experts are those of the last update, unless an earlier one was clearly better.
    """
    assignment, rates, last = opened.assignment, update.rates, update.rates.success
    lost = not rates.full or is_clearly_more(best.success, last, episodes=rates.episodes)
    is_last = not (best.update and lost)
    kept = Best.of(update) if is_last else best
    run_io.finish(
        assignment,
        opened.programs.unpack(kept.params),
        replace(update.counters, acted=tuple(map(int, kept.acted))),
        step_success=tuple(map(float, kept.step_success)),
        mean_episode_length=float(kept.mean_episode_length),
        step_ends=step_ends(opened.module, *update.episodes.counts()),
        stopped_early=update.reached,
        stopped=stopped,
        kept_update=None if is_last else int(kept.update),
        last_success_rate=None if is_last else last,
    )
    storage.remove_tree(assignment.run_paths.resume)
