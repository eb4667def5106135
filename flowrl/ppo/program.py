"""The trainer: from a run folder with a module to its final experts and result.json."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from flowrl import checkpoints, runs, storage
from flowrl.config import PPOConfig, TrainConfig
from flowrl.envs.admission import open_module
from flowrl.envs.base import WalkingEnv
from flowrl.envs.skill_module import TaskModule
from flowrl.envs.tasks import SkillEnv, compiled_functions, make_env
from flowrl.envs.vector import BatchedEnv
from flowrl.launchers.environment import compile_cache
from flowrl.networks.actor_critic import ActorCriticMoE
from flowrl.ppo import resuming
from flowrl.ppo.acting import group_size, settled, threads_of
from flowrl.ppo.assignment import Assignment, initial_experts, read_assignment, save_finals
from flowrl.ppo.drafts import Programs, begin_programs, seed_words
from flowrl.ppo.reporting import TRAINING, Reporter
from flowrl.ppo.resuming import Keeper, Kept
from flowrl.ppo.stopping import StopWish
from flowrl.ppo.train import Counters, Turn, start, train
from flowrl.ppo.update import Learner
from flowrl.program_cache import ProgramCache
from flowrl.runs import RunResult

_LEAST_STOCK = 256  # worlds, of all groups together


class Prepared(NamedTuple):
    """A run that is ready to train."""

    env: WalkingEnv
    programs: Programs
    learner: Learner
    counters: Counters


def run(config: TrainConfig, stop: StopWish, *, lived_seconds: float = 0.0) -> int:
    """Train the run in the module's folder to its end, or until a stop is wished.

    Args:
      config: the command line.
      stop: asked after every update.
      lived_seconds: what the program took before it came here, counted as the run's.

    Returns:
      The exit code: 0 with result.json written, else that of the stop with the state saved.

    Raises:
      FlowrlError: the run cannot be trained; its folder holds no result.
    """
    began = time.monotonic() - lived_seconds
    use_compile_cache(config.compile_cache)
    config = settled(config)
    module = open_module(config.module_path)
    env, programs = open_env(config, module)
    assignment = read_assignment(config, module)
    reporter = Reporter(assignment, config)
    try:
        reporter.phase("compiling", Counters(acted=(0,) * env.num_experts))
        prepared = prepare(assignment, config, env, programs)
        return _train(assignment, config, prepared, stop=stop, reporter=reporter, began=began)
    finally:
        reporter.close()


def open_env(config: TrainConfig, module: TaskModule) -> tuple[WalkingEnv, Programs]:
    """The environments that walk the module's plan, and the trainer's programs for them."""
    walk = make_env(config.env_name, module, max_task_steps=config.max_task_steps, share=True)
    groups, size = threads_of(config), group_size(config)
    pool, stock = -(-config.world_pool // groups), max(_LEAST_STOCK // groups, 2 * size)
    cache = open_cache(config, walk, world_pool=pool, stock=stock)
    env = BatchedEnv(walk, world_pool=pool, stock=stock, cache=cache)
    env.begin_worlds()
    programs = begin_programs(env, config, cache)
    env.begin_programs(size)
    return env, programs


def open_cache(config: PPOConfig, walk: SkillEnv, *, world_pool: int, stock: int) -> ProgramCache:
    """Where programs are kept in which these environments are compiled in."""
    folder = compile_cache(config.compile_cache, os.environ) / "programs"
    facts = {
        "env_name": config.env_name,
        "game_code": walk.game.code_digest(),
        "functions": compiled_functions(walk.module),
        "columns": len(walk.plan.functions),
        "world_pool": world_pool,
        "stock": stock,
    }
    return ProgramCache(folder.absolute(), facts)


def prepare(
    assignment: Assignment, config: TrainConfig, env: WalkingEnv, programs: Programs
) -> Prepared:
    """Experts, environments and counters: of the last trainer when it left them."""
    body = ActorCriticMoE(
        num_experts=env.num_experts,
        observation_size=env.observation_size,
        num_actions=env.num_actions,
        layer_size=config.layer_size,
        activation=config.activation,
    )
    words, key = programs.keys(seed_words(assignment.seed))
    experts = initial_experts(assignment, body, np.asarray(words))
    params, opt_state = programs.ready(experts)
    kept = Kept(params, opt_state, key, Counters(acted=(0,) * env.num_experts))
    if config.resume and checkpoints.has_resume(assignment.layout.resume):
        kept = resuming.load(assignment.layout, params=params, opt_state=opt_state)
    learner = start(
        env, config, programs, params=kept.params, opt_state=kept.opt_state, key=kept.key
    )
    return Prepared(env, programs, learner, kept.counters)


def use_compile_cache(folder: Path | None) -> None:
    """Keep compiled programs between processes, also small and quick ones.

    Without a folder: JAX_COMPILATION_CACHE_DIR, or flowrl/jax in the user's cache folder.
    """
    jax.config.update("jax_compilation_cache_dir", str(compile_cache(folder, os.environ)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _train(
    assignment: Assignment,
    config: TrainConfig,
    prepared: Prepared,
    *,
    stop: StopWish,
    reporter: Reporter,
    began: float,
) -> int:
    env, programs, learner, counters = prepared
    born = began - counters.seconds  # as if all starts had been one
    turns = train(env, config, programs, learner=learner, counters=counters, born=born)
    reporter.phase(TRAINING, counters)
    keeper = Keeper(assignment.layout, seconds=config.checkpoint_seconds)
    for turn in turns:
        reporter.turn(turn)
        if turn.ended:
            _finish(assignment, turn, params=programs.unpack(turn.learner.params), born=born)
        elif stop.heard:
            resuming.save(assignment.layout, turn.learner, turn.counters)
            return stop.exit_code
        else:
            keeper.turn(turn)
    return 0


def _finish(assignment: Assignment, turn: Turn, *, params: Any, born: float) -> None:
    """Final experts first, then result.json: it vouches for them. Then there is no going on."""
    layout = assignment.layout
    storage.remove_file(layout.result_json)  # of an earlier run in the same folder
    experts = save_finals(assignment, params, acted=turn.counters.acted)
    result = RunResult(
        run_id=assignment.run_id,
        frames=turn.counters.frames,
        experts=experts,
        success_rate=turn.rates.success,
        step_success=turn.rates.step_success,
        mean_episode_length=turn.rates.mean_episode_length,
        updates=turn.counters.updates,
        wall_seconds=time.monotonic() - born,
        stopped_early=turn.reached,
    )
    runs.write_result(layout, result)
    storage.remove_tree(layout.resume)
