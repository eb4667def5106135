"""The trainer: from a run folder with a module to its final experts and result.json."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

import jax

from flowrl import checkpoints, durable, runs
from flowrl.config import TrainConfig
from flowrl.envs.admission import open_module
from flowrl.envs.craftax import make_env
from flowrl.envs.interface import WalkingEnv
from flowrl.envs.skill_module import TaskModule
from flowrl.envs.wrappers import BatchedEnv
from flowrl.launch.environment import compile_cache
from flowrl.models import dispatch
from flowrl.models.actor_critic import ActorCriticMoE
from flowrl.rl import optimizer, resuming
from flowrl.rl.assignment import Assignment, initial_experts, read_assignment, save_finals
from flowrl.rl.reporting import TRAINING, Reporter
from flowrl.rl.resuming import Keeper, Kept
from flowrl.rl.stopping import StopWish
from flowrl.rl.train import Counters, Turn, train
from flowrl.rl.update import Learner, start
from flowrl.runs import RunResult

_LEAST_STOCK = 256  # worlds


class Prepared(NamedTuple):
    """A run that is ready to train."""

    env: WalkingEnv
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
    module = open_module(config.module_path)
    env = open_env(config, module)
    assignment = read_assignment(config, module)
    reporter = Reporter(assignment, config)
    try:
        reporter.phase("compiling", Counters(acted=(0,) * env.num_experts))
        prepared = prepare(assignment, config, env)
        return _train(assignment, config, prepared, stop=stop, reporter=reporter, began=began)
    finally:
        reporter.close()


def open_env(config: TrainConfig, module: TaskModule) -> WalkingEnv:
    """The environments that walk the module's plan."""
    walk = make_env(config.env_name, module, max_task_steps=config.max_task_steps, share=True)
    stock = max(_LEAST_STOCK, 2 * config.num_envs)
    return BatchedEnv(walk, world_pool=config.world_pool, stock=stock)


def prepare(assignment: Assignment, config: TrainConfig, env: WalkingEnv) -> Prepared:
    """Experts, environments and counters: of the last trainer when it left them."""
    body = ActorCriticMoE(
        num_experts=env.num_experts,
        observation_size=env.observation_size,
        num_actions=env.num_actions,
        layer_size=config.layer_size,
        activation=config.activation,
    )
    init_key, key = jax.random.split(jax.random.key(assignment.seed))
    params = jax.jit(dispatch.pack)(initial_experts(assignment, body, init_key))
    kept = Kept(
        params,
        optimizer.init(config, params),
        key,
        Counters(acted=(0,) * env.num_experts),
    )
    if config.resume and checkpoints.has_resume(assignment.layout.resume):
        kept = resuming.load(assignment.layout, params=params, opt_state=kept.opt_state)
    learner = start(env, config, params=kept.params, opt_state=kept.opt_state, key=kept.key)
    return Prepared(env, learner, kept.counters)


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
    env, learner, counters = prepared
    born = began - counters.seconds  # as if all starts had been one
    turns = train(env, config, learner=learner, counters=counters, born=born)
    reporter.phase(TRAINING, counters)
    keeper = Keeper(assignment.layout, seconds=config.checkpoint_seconds)
    for turn in turns:
        reporter.turn(turn)
        if turn.ended:
            _finish(assignment, turn, born=born)
        elif stop.heard:
            resuming.save(assignment.layout, turn.learner, turn.counters)
            return stop.exit_code
        else:
            keeper.turn(turn)
    return 0


def _finish(assignment: Assignment, turn: Turn, *, born: float) -> None:
    """Final experts first, then result.json: it vouches for them. Then there is no going on."""
    layout = assignment.layout
    durable.remove_file(layout.result_json)  # of an earlier run in the same folder
    params = jax.jit(dispatch.unpack)(turn.learner.params)
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
    durable.remove_tree(layout.resume)
