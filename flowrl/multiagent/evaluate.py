"""The returns of finished agents in fresh worlds: `python -m flowrl.independent evaluate`."""

from __future__ import annotations

import logging
from dataclasses import replace

import jax
import numpy as np

from flowrl import config as configs
from flowrl import console
from flowrl.errors import ConfigError
from flowrl.experts import checkpoint
from flowrl.multiagent import agents
from flowrl.multiagent.agents import Policy
from flowrl.multiagent.collect import begin, collecting
from flowrl.multiagent.config import EvaluateAgents, IndependentConfig, LearnerConfig
from flowrl.multiagent.run import IndependentResult, IndependentRun, record_of
from flowrl.multiagent.world import Sizes, World, open_world
from flowrl.networks.grouped import pack
from flowrl.networks.moe import stack_experts
from flowrl.paths import IndependentPaths, graph_around
from flowrl.ppo.trainer import use_compile_cache
from flowrl.runs import expert_shapes
from flowrl.storage import records

logger = logging.getLogger(__name__)
_LINE = (
    "agent {agent}: mean return {mean_return:.4g} (95 % interval {low:.4g} to {high:.4g}), "
    "{mean_episode_length:.0f} turns each"
)
_MOST_ROLLOUTS = 1000  # of --num_steps turns each, in which every episode must end


def evaluate(command: EvaluateAgents) -> int:
    """Let the agents of a finished run play, and print their returns.

    Raises ConfigError if the run is not finished, its world changed, or episodes do not end.
    """
    use_compile_cache(None)
    run_paths = IndependentPaths(command.run_folder.absolute())
    if outer := graph_around(run_paths.folder):
        what = f"{run_paths.folder} is in the graph {outer.root}, whose agents are skills"
        raise ConfigError(f"{what}; measure one by {outer.command('evaluate')} SKILL")
    if not run_paths.run_json.exists():
        raise ConfigError(f"{run_paths.folder} has no run.json; name the folder of a run")
    if not run_paths.result_json.exists():
        raise ConfigError(f"{run_paths.folder} has no finished run; let its command go on first")
    result = records.read(run_paths.result_json, IndependentResult)
    begun = records.read(run_paths.run_json, IndependentRun, remedy="train again")
    config = configs.from_json(IndependentConfig, begun.config, world="")
    world = open_world(config.world, config.agents)
    if replace(record_of(config, world), config=begun.config) != begun:
        raise ConfigError(f"{run_paths.folder} was trained in another world {config.world}")
    learner = replace(config.learner, num_envs=command.episodes, seed=command.seed)
    totals, lengths = _first_episodes(world, learner, _policy(run_paths, learner, world.sizes))
    rows = [_row(agent, *pair) for agent, pair in enumerate(zip(totals, lengths, strict=True))]
    facts = {
        "run_folder": str(run_paths.folder),
        "world": config.world,
        "epochs": result.epochs,
        "episodes": command.episodes,
        "agents": rows,
    }
    lines = [f"{config.world}: {command.episodes} episodes after {result.epochs} epochs"]
    lines += map(_LINE.format_map, rows)
    console.print_report(facts, lines, as_json=command.json)
    return 0


def _policy(run_paths: IndependentPaths, config: LearnerConfig, sizes: Sizes) -> Policy:
    """The finished agents as they act, without dqn's random actions."""
    networks = []
    for agent, own in enumerate(zip(*sizes, strict=True)):
        like = checkpoint.like_of(expert_shapes(*own, config.layer_size))
        params = checkpoint.load_expert(run_paths.final(agent), like)
        networks.append(agents.padded(params, sizes, config.layer_size))
    policy = agents.init(config, sizes).policy
    network = pack(stack_experts(networks))
    return policy._replace(network=network, epsilon=np.zeros_like(policy.epsilon))


def _first_episodes(
    world: World, config: LearnerConfig, policy: Policy
) -> tuple[np.ndarray, np.ndarray]:
    """Returns and lengths, f64 `[A, B]`, of the first episode of each agent in B copies."""
    collector = begin(world, config, jax.random.key(config.seed))
    collect = collecting(world, config)
    totals = np.zeros((len(world.sizes.actions), config.num_envs))
    lengths, over = np.zeros_like(totals), np.zeros(totals.shape, bool)
    for _ in range(_MOST_ROLLOUTS):
        collector, rollout, _ = collect(policy, collector)
        for reward, done in zip(*(np.asarray(x).swapaxes(0, 1) for x in rollout[4:6]), strict=True):
            totals += np.where(over, 0.0, reward)
            lengths += ~over
            over |= done
        if over.all():
            return totals, lengths
    turns = _MOST_ROLLOUTS * config.num_steps
    raise ConfigError(f"the world {world.name}: episodes do not end within {turns:,} turns")


def _row(agent: int, totals: np.ndarray, lengths: np.ndarray) -> dict[str, float]:
    """The mean return of an agent's episodes, with the 95 % interval of the mean."""
    mean, half = totals.mean(), 1.96 * totals.std(ddof=1) / np.sqrt(len(totals))
    return {
        "agent": agent,
        "mean_return": float(mean),
        "low": float(mean - half),
        "high": float(mean + half),
        "mean_episode_length": float(lengths.mean()),
    }
