"""What flat PPO masters of a game in some minutes: `python scripts/bench_flat.py --minutes 40`.

One actor and one critic learn from the game's own reward, as people train Craftax today
(`baseline_ppo.py`). A row is the share of the newest episodes, at least 256 of them, in which an
achievement was unlocked. A skill that flowrl has trained for as long is held against it by
`flowrl evaluate`. Compiling is not counted. A minute is one of the whole machine: CPU time over its
cores, so that other programs take nothing away.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
from baseline_envs import TaskState
from baseline_ppo import Baseline
from benchmarking import Row, arguments, report
from craftax.craftax_env import make_craftax_env_from_name

from flowrl.config import PPOConfig

EPISODES = 256
LEAST = 0.8
PREFIX = "Achievements/"


class WholeGame:
    """One environment with the game's own reward and its own end."""

    num_experts = 1

    def __init__(self, env_name: str) -> None:
        self._craftax: Any = make_craftax_env_from_name(env_name, auto_reset=False)
        self._params = self._craftax.default_params
        self.observation_size = self._craftax.observation_space(self._params).shape[0]
        self.num_actions = self._craftax.num_actions

    def reset(self, key: jax.Array) -> tuple[jax.Array, TaskState]:
        obs, world = self._craftax.reset_env(key, self._params)
        nothing = jnp.zeros((), jnp.int32)
        return obs, TaskState(world, nothing, nothing)

    def step(self, key: jax.Array, state: TaskState, action: jax.Array):
        obs, world, reward, done, info = self._craftax.step_env(
            key, state.world, action, self._params
        )
        info["boundary"] = done
        return obs, state._replace(world=world), jnp.asarray(reward, jnp.float32), done, info

    def current_expert(self, state: TaskState) -> jax.Array:
        return state.task


def trained(env_name: str, minutes: float, seed: int) -> tuple[dict[str, float], int, float]:
    """The share of the newest episodes with each achievement, the frames, and the mean return."""
    config = PPOConfig(env_name=env_name, seed=seed, total_timesteps=10**9)
    baseline = Baseline(WholeGame(env_name), config, updates=1)
    newest: deque[dict[str, float]] = deque()
    began, told, updates = _machine_seconds(), 0.0, 0
    while (elapsed := _machine_seconds() - began) < 60 * minutes:
        baseline()
        jax.effects_barrier()
        updates += 1
        newest.append(baseline.logged.pop())
        while sum(each["ended"] for each in newest) - newest[0]["ended"] >= EPISODES:
            newest.popleft()
        if elapsed - told >= 60:
            told = elapsed
            rates = _shares(newest)
            good = sum(rate >= LEAST for name, rate in rates.items() if name.startswith(PREFIX))
            sys.stdout.write(f"{elapsed / 60:.0f} minutes, update {updates}: {good} mastered\n")
            sys.stdout.flush()
    shares = _shares(newest)
    rates = {name.removeprefix(PREFIX): x for name, x in shares.items() if name.startswith(PREFIX)}
    frames = updates * config.num_envs * config.num_steps
    return rates, frames, shares["returned_episode_returns"]


def _machine_seconds() -> float:
    return time.process_time() / len(os.sched_getaffinity(0))


def _shares(newest: deque[dict[str, float]]) -> dict[str, float]:
    """The means over episodes; the game logs an achievement as 100."""
    full = [each for each in newest if each["ended"]]
    ended = sum(each["ended"] for each in full) or 1.0
    means = {
        name: sum(each[name] * each["ended"] for each in full) / ended
        for name in (full[0] if full else ())
    }
    return {n: x / 100 if n.startswith(PREFIX) else x for n, x in means.items()}


def main() -> int:
    """Train, measure and report."""
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument("--env_name", default="Craftax-Symbolic-v1")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    minutes = 0.5 if args.small else args.minutes
    rates, frames, total = trained(args.env_name, minutes, args.seed)
    order = sorted(rates, key=lambda name: -rates[name])
    rows = [Row(case=name, ours=round(rates[name], 4), unit="of episodes") for name in order]
    good = sum(rate >= LEAST for rate in rates.values())
    rows += [
        Row(case=f"achievements with 80 % or more of {len(rates)}", ours=good, unit=""),
        Row(case="return", ours=round(total, 2), unit=""),
        Row(case="frames", ours=frames, unit="steps"),
    ]
    report("flat", rows, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
