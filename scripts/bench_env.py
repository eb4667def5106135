"""How fast environments step: `python scripts/bench_env.py [--json FILE] [--small]`.

Random actions inside one compiled loop, a new world for every episode, observations and rewards
used on both sides. The baselines are Craftax as shipped, whose environment generates a world in
every step of every environment and spends nearly all its time on that, and Craftax's own step with
flowrl's resets, which tells what the step alone is worth.

flowrl's side is the environment that its trainer steps, with the judges of one skill, and the time
in which used worlds are replaced between two loops counts. Episodes end by death and after EPISODE
steps on both sides, so equally many worlds are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from benchmarking import Row, arguments, paired, report
from craftax.craftax_env import make_craftax_env_from_name

from flowrl.envs.craftax import make_env, settle
from flowrl.envs.skill_module import load_module
from flowrl.envs.wrappers import BatchedEnv

CLASSIC = "Craftax-Classic-Symbolic-v1"
EPISODE = 300
STEPS = 64
STOCK = 256
MODULE = '''"""A plan of one skill that nobody completes: death or the time limit ends episodes."""
import jax
import jax.numpy as jnp
from craftax.craftax_classic.constants import Achievement, Action, BlockType

GLOBAL_TO_LOCAL = {0: 0}

LOCAL_TO_GLOBAL = {0: 0}

PLAN = [{"skill": "Wander", "count": 1, "expert": 0}]


def task_0_is_done(inventory, n=1):
    return inventory.diamond >= 100


def task_0_reward(env_reward):
    return env_reward


def task_0_network_number():
    return GLOBAL_TO_LOCAL[0]
'''

Take = Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, Any, jax.Array]]
"""(key, state, actions) to observations, state and rewards."""


def looped(take: Take, num_actions: int, num_envs: int) -> Callable[..., tuple[Any, jax.Array]]:
    """STEPS steps with random actions as one program: the state, and a sum over all it saw."""

    def step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        action_key, step_key = jax.random.split(key)
        actions = jax.random.randint(action_key, (num_envs,), 0, num_actions)
        obs, state, rewards = take(step_key, state, actions)
        return state, obs.sum() + rewards.sum()

    def run(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        return jax.lax.scan(step, state, jax.random.split(key, STEPS))

    return jax.jit(run, donate_argnums=0)


class Stepper:
    """Environments that step on from call to call."""

    def __init__(self, run: Callable[..., Any], state: Any, restock: Callable[..., Any]) -> None:
        self.run, self.state, self.restock = run, state, restock
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        key = jax.random.key(self.calls)
        state, seen = self.run(self.state, key)
        self.state = self.restock(key, state)
        jax.block_until_ready((self.state, seen))


def ours(env_name: str, num_envs: int, *, fast_choice: bool = True) -> Stepper:
    """flowrl's environments, a new world for every episode."""
    module = load_module(MODULE)
    env = make_env(env_name, module, max_task_steps=EPISODE, fast_choice=fast_choice)
    batch = BatchedEnv(env, stock=max(STOCK, 2 * num_envs))

    def take(key: jax.Array, state: Any, actions: jax.Array) -> tuple[jax.Array, Any, jax.Array]:
        obs, state, output = batch.step(key, state, actions)
        return obs, state, output.reward

    _, state = batch.reset(jax.random.key(0), num_envs)
    return Stepper(looped(take, env.num_actions, num_envs), state, batch.restock)


def as_shipped(env_name: str, num_envs: int) -> Stepper:
    """Craftax's own environment, which resets itself, under vmap."""
    env: Any = make_craftax_env_from_name(env_name, auto_reset=True)
    params = env.default_params.replace(max_timesteps=EPISODE)

    def take(key: jax.Array, state: Any, actions: jax.Array) -> tuple[jax.Array, Any, jax.Array]:
        step = jax.vmap(partial(env.step, params=params))
        obs, state, reward, _, _ = step(jax.random.split(key, num_envs), state, actions)
        return obs, settle(state), reward

    return Stepper(looped(take, env.num_actions, num_envs), _first(env, params, num_envs), _kept)


def own_step(env_name: str, num_envs: int) -> Stepper:
    """Craftax's own step and observation, with flowrl's resets."""
    return ours(env_name, num_envs, fast_choice=False)


def _first(env: Any, params: Any, num_envs: int) -> Any:
    """The first states, with the types that stepped ones have."""

    @jax.jit
    def reset(key: jax.Array) -> Any:
        keys = jax.random.split(key, (num_envs // 8, 8))
        states = jax.lax.map(jax.vmap(lambda key: env.reset(key, params)[1]), keys)
        return settle(jax.tree.map(lambda leaf: leaf.reshape(num_envs, *leaf.shape[2:]), states))

    return reset(jax.random.key(0))


def _kept(key: jax.Array, state: Any) -> Any:
    del key
    return state


def compared(case: str, env_name: str, baseline: Callable[..., Stepper], **scale: int) -> Row:
    """One case: environment steps per second of both sides."""
    num_envs = scale["num_envs"]
    pair = paired(
        ours(env_name, num_envs), baseline(env_name, num_envs), rounds=scale["rounds"], warmups=2
    )
    return pair.rate_row(case, work=num_envs * STEPS, unit="env steps/s")


def main() -> None:
    """Run the cases and report."""
    options = arguments(__doc__).parse_args()
    rounds = 2 if options.small else 5
    rows = [
        compared("classic 64", CLASSIC, as_shipped, num_envs=64, rounds=rounds),
        compared("classic 64 own step", CLASSIC, own_step, num_envs=64, rounds=rounds + 2),
    ]
    report("env", rows, options.json)


if __name__ == "__main__":
    main()
