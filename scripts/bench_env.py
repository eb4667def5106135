"""How fast environments step: `python scripts/bench_env.py [--json FILE] [--small]`.

Random actions inside one compiled loop, a new world for every episode, observations and rewards
used on both sides. The baselines are Craftax as shipped, whose environment generates a world in
every step of every environment and spends nearly all its time on that; a wrapper in the manner of
the public PPO baselines, which generates one world for 16 environments in every step and lets
episodes that end at once share them; and Craftax's own step with flowrl's resets, which tells what
the step alone is worth. The small form leaves out the wrapper and full Craftax.

flowrl's side is the environment that its trainer steps, with the success functions of one skill,
and the time in which used worlds are replaced between two loops counts. Episodes end by death and
after EPISODE steps on both sides, so equally many worlds are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from benchmarking import Row, arguments, paired, report
from craftax.craftax_env import make_craftax_env_from_name

from flowrl.envs.skill_module import load_module
from flowrl.envs.tasks import make_env, settle
from flowrl.envs.vector import BatchedEnv
from flowrl.games.base import find_game
from flowrl.games.craftax_engine import CraftaxEngine

CLASSIC, FULL = "Craftax-Classic-Symbolic-v1", "Craftax-Symbolic-v1"
PACKAGES = {CLASSIC: "craftax_classic", FULL: "craftax"}
EPISODE = 300
STEPS = 64
STEPS_SHIPPED = 4  # of full Craftax as shipped: a step of it generates 64 large worlds
STOCK = 256
RESET_RATIO = 16
MODULE = '''"""A plan of one skill that nobody completes: death or the time limit ends episodes."""
import jax
import jax.numpy as jnp
from craftax.{package}.constants import {enums}

GAME = {name!r}

GLOBAL_TO_LOCAL = {{0: 0}}

LOCAL_TO_GLOBAL = {{0: 0}}

PLAN = [{{"skill": "Wander", "count": 1, "expert": 0}}]


def task_0_is_done(inventory, n=1):
    return inventory.diamond >= 100


def task_0_reward(env_reward):
    return env_reward


def task_0_network_number():
    return GLOBAL_TO_LOCAL[0]
'''

Take = Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, Any, jax.Array]]
"""(key, state, actions) to observations, state and rewards."""


class Case(NamedTuple):
    """How many environments of which game take how many steps in a call."""

    env_name: str
    num_envs: int
    steps: int = STEPS


def looped(take: Take, num_actions: int, case: Case) -> Callable[..., tuple[Any, jax.Array]]:
    """Steps with random actions as one program: the state, and a sum over all it saw."""

    def step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        action_key, step_key = jax.random.split(key)
        actions = jax.random.randint(action_key, (case.num_envs,), 0, num_actions)
        obs, state, rewards = take(step_key, state, actions)
        return state, obs.sum() + rewards.sum()

    def run(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        return jax.lax.scan(step, state, jax.random.split(key, case.steps))

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


def ours(case: Case, *, fast: bool = True) -> Stepper:
    """flowrl's environments, a new world for every episode."""
    name, package = case.env_name, PACKAGES[case.env_name]
    enums = ", ".join(sorted(find_game(name).enums))
    module = load_module(MODULE.format(package=package, name=name, enums=enums))
    engine = CraftaxEngine(name, f"craftax.{package}", fast=fast)
    env = make_env(name, module, max_task_steps=EPISODE)
    env = replace(env, game=replace(env.game, make=lambda: engine))
    batch = BatchedEnv(env, stock=max(STOCK, 2 * case.num_envs))

    def take(key: jax.Array, state: Any, actions: jax.Array) -> tuple[jax.Array, Any, jax.Array]:
        obs, state, output = batch.step(key, state, actions)
        return obs, state, output.reward

    _, state = batch.reset(jax.random.key(0), case.num_envs)
    return Stepper(looped(take, env.game.num_actions, case), state, batch.restock)


def as_shipped(case: Case) -> Stepper:
    """Craftax's own environment, which resets itself, under vmap."""
    env: Any = make_craftax_env_from_name(case.env_name, auto_reset=True)
    params = env.default_params.replace(max_timesteps=EPISODE)

    def take(key: jax.Array, state: Any, actions: jax.Array) -> tuple[jax.Array, Any, jax.Array]:
        step = jax.vmap(partial(env.step, params=params))
        obs, state, reward, _, _ = step(jax.random.split(key, case.num_envs), state, actions)
        return obs, settle(state), reward

    return Stepper(looped(take, env.num_actions, case), _first(env, params, case.num_envs), _kept)


def optimistic(case: Case) -> Stepper:
    """Craftax without resets, and one new world for RESET_RATIO environments in every step."""
    num_envs, count = case.num_envs, case.num_envs // RESET_RATIO
    env: Any = make_craftax_env_from_name(case.env_name, auto_reset=False)
    params = env.default_params.replace(max_timesteps=EPISODE)

    def take(key: jax.Array, state: Any, actions: jax.Array) -> tuple[jax.Array, Any, jax.Array]:
        step_key, reset_key, share_key = jax.random.split(key, 3)
        step = jax.vmap(partial(env.step, params=params))
        obs, state, reward, done, _ = step(jax.random.split(step_key, num_envs), state, actions)
        reset = jax.vmap(partial(env.reset, params=params))
        new_obs, new = reset(jax.random.split(reset_key, count))
        # Those that ended get different worlds while there are any left.
        odds = jnp.where(done, 1.0, 0.0) / jnp.maximum(done.sum(), 1)
        lucky = jax.random.choice(share_key, num_envs, (count,), replace=False, p=odds)
        which = (jnp.arange(num_envs) // RESET_RATIO).at[lucky].set(jnp.arange(count))
        pick = partial(jax.tree.map, lambda old, fresh: _where(done, fresh[which], old))
        return pick(obs, new_obs), settle(pick(state, new)), reward

    return Stepper(looped(take, env.num_actions, case), _first(env, params, num_envs), _kept)


def own_step(case: Case) -> Stepper:
    """Craftax's own step and observation, with flowrl's resets."""
    return ours(case, fast=False)


def _first(env: Any, params: Any, num_envs: int) -> Any:
    """The first states, with the types that stepped ones have."""

    @jax.jit
    def reset(key: jax.Array) -> Any:
        keys = jax.random.split(key, (num_envs // 8, 8))
        states = jax.lax.map(jax.vmap(lambda key: env.reset(key, params)[1]), keys)
        return settle(jax.tree.map(lambda leaf: leaf.reshape(num_envs, *leaf.shape[2:]), states))

    return reset(jax.random.key(0))


def _where(done: jax.Array, one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.where(done.reshape(-1, *[1] * (other.ndim - 1)), one, other)


def _kept(key: jax.Array, state: Any) -> Any:
    del key
    return state


def compared(name: str, case: Case, baseline: Callable[[Case], Stepper], *, rounds: int) -> Row:
    """One case: environment steps per second of both sides."""
    pair = paired(ours(case), baseline(case), rounds=rounds, warmups=1)
    return pair.rate_row(name, work=case.num_envs * case.steps, unit="env steps/s")


def main() -> None:
    """Run the cases and report."""
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", metavar="WORDS", help="cases with this in the name")
    options = parser.parse_args()
    classic, full = Case(CLASSIC, 64), Case(FULL, 64)
    cases: dict[str, tuple[Case, Callable[[Case], Stepper], int]] = {
        "classic 64": (classic, as_shipped, 3),
        "classic 64 own step": (classic, own_step, 5),
    }
    if not options.small:
        cases |= {
            "classic 64 optimistic": (classic, optimistic, 5),
            "classic 256 optimistic": (Case(CLASSIC, 256), optimistic, 5),
            "craftax 64": (full._replace(steps=STEPS_SHIPPED), as_shipped, 3),
            "craftax 64 own step": (full, own_step, 5),
        }
    chosen = {name: case for name, case in cases.items() if options.only in name}
    rows = [
        compared(name, case, baseline, rounds=rounds)
        for name, (case, baseline, rounds) in chosen.items()
    ]
    report("env", rows, options.json)


if __name__ == "__main__":
    main()
