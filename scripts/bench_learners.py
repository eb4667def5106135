"""Independent learners: `python scripts/bench_learners.py [--json FILE] [--small] [--only WORDS]`.

The world is JaxMARL's MPE spread (`pip install '.[marl]'`), 64 copies and 64 turns an epoch;
agents learn by ppo, 4 passes of 8 minibatches, with networks of their own.

* `spread 3 agents, epoch, loop over agents / ours`: one epoch without overlap. The baseline is the
  usual loop with compiled calls: in each turn every agent looks and acts by calls of its own and
  adds to a buffer of its own; then the agents learn one after another, a call for each minibatch.
  At least 3 is wanted; of CPU time it was 2.0, and 1.4 with 8 agents, for learning is four fifths
  of an epoch of ours and costs as much for all agents at once as one after another. With 8 copies
  of the world there is less to learn for each call.
* `learning, batched / one after another, …`: one epoch's learning; both sides by our program.
* `acting, one call / per agent, …`: the acting of 20 turns.
* `cost per agent, 16 over 1`: 16 agents against 16 times one agent; at least 0.91 is wanted.
* `overlap off / on, …`: 8 epochs at lag 1; with overlap one is collected while another is learnt
  from. The bound is (C + L) / max(C, L), of the seconds C of collecting and L of learning without
  overlap; at least 0.85 of it is wanted.
* `buffer hand-over, …`: bytes of an epoch's experience that learning finds in another place than
  collecting has left them; none are wanted. The baseline is a copy of the experience.
* `steps/s over IPPO, …`: PPO with one network that all agents share, one compiled update, in the
  manner of JaxMARL's `ippo_ff_mpe`; it logs through a host callback, or not at all.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import baseline_ppo as plain
import jax
import jax.numpy as jnp
import numpy as np
from benchmarking import Row, arguments, paired, report

from flowrl.config import PPOConfig
from flowrl.multiagent import agents, collect
from flowrl.multiagent.agents import Agents
from flowrl.multiagent.config import LearnerConfig
from flowrl.multiagent.pipeline import Boundary, Threads, run
from flowrl.multiagent.world import World, open_world

SPREAD = "MPE_simple_spread_v3"
CONFIG = LearnerConfig()
PLAIN = PPOConfig(num_envs=CONFIG.num_envs, num_steps=CONFIG.num_steps, anneal_lr=False)
KEY = jax.random.key(0)


class Epoch(NamedTuple):
    """The programs and the beginning of one agent group."""

    world: World
    collect: Callable[..., Any]
    learn: Callable[..., Any]
    agents: Agents
    collector: Any

    def run(self) -> None:
        """Collect one epoch and learn from it."""
        _, rollout, _ = self.collect(self.agents.policy, self.collector)
        jax.block_until_ready(self.learn(self.agents, rollout, KEY))

    def collected(self, learner: Agents, collector: Any, _: int) -> tuple[Any, Any]:
        """One side of `pipeline.run`."""
        collector, *experience = self.collect(learner.policy, collector)
        return jax.block_until_ready((collector, experience))

    def learnt(self, learner: Agents, experience: Any, _: int) -> tuple[Agents, Any]:
        """The other one."""
        return jax.block_until_ready(self.learn(learner, experience[0], KEY))


class LoopAgent:
    """One agent of the loop: its network, its optimizer and its buffer, arrays `[T, B, …]`."""

    def __init__(self, number: int, sizes: tuple[int, int], copies: int, calls: Calls) -> None:
        self._calls = calls
        network = plain.init_network(jax.random.key(number), *sizes, PLAIN.layer_size)
        self._params = jax.tree.map(lambda leaf: leaf[None], network)
        self._opt_state = calls.trainer.optimizer.init(self._params)
        self._rng = np.random.default_rng(number)
        steps = PLAIN.num_steps, copies
        numbers = [np.zeros(steps, np.float32) for _ in range(3)]
        obs, flags = np.zeros((*steps, sizes[0]), np.float32), np.zeros(steps, bool)
        names = ("value", "reward", "log_prob")
        self.buffer: dict[str, Any] = dict(zip(names, numbers, strict=True))
        self.buffer |= {"obs": obs, "done": flags, "action": np.zeros(steps, np.int32)}

    def act(self, turn: int, obs: jax.Array, key: jax.Array) -> np.ndarray:
        """Actions `[B]`; what was seen and done is added to the buffer."""
        found = self._calls.act(self._params, obs, key)
        taken = dict(zip(("action", "log_prob", "value"), found, strict=True))
        for name, values in {"obs": obs, **taken}.items():
            self.buffer[name][turn] = values
        return self.buffer["action"][turn]

    def learn(self, last_obs: jax.Array) -> None:
        """Learn from the buffer."""
        kept, config = self.buffer, PLAIN
        none: Any = np.zeros(kept["done"].shape, np.int32)
        boundary: Any = {"boundary": kept["done"]}
        batch = plain.Transition(**kept, next_obs=none, expert=none, info=boundary)
        _, _, last_value = self._calls.act(self._params, last_obs, KEY)
        advantage = np.asarray(self._calls.advantages(batch, last_value))
        rows = batch._replace(info={}), advantage, advantage + kept["value"]
        rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), rows)
        for _ in range(config.update_epochs):
            for index in self._rng.permutation(advantage.size).reshape(config.num_minibatches, -1):
                minibatch = jax.tree.map(lambda leaf, index=index: leaf[index], rows)
                state = self._calls.step(self._params, self._opt_state, minibatch)
                self._params, self._opt_state = state
        jax.block_until_ready(self._params)


class Calls:
    """The compiled calls of the loop, which all agents share."""

    def __init__(self, world: World) -> None:
        self.trainer = plain.Trainer(Any, PLAIN, None)  # pyright: ignore[reportArgumentType]
        self.look = jax.jit(lambda states, agent: jax.vmap(world.observe)(states)[:, agent])
        self.turn = jax.jit(partial(stepped, world))
        self.split = jax.jit(partial(jax.random.split, num=2))
        self.act = jax.jit(self._act)
        self.advantages = jax.jit(partial(plain.advantages, PLAIN))
        self.step = jax.jit(self._step, donate_argnums=(0, 1))

    def _act(self, params: Any, obs: jax.Array, key: jax.Array) -> tuple[jax.Array, ...]:
        logits, value = plain.evaluate(params, obs, jnp.int32(0), activation=PLAIN.activation)
        action = jax.random.categorical(key, logits)
        return action, plain.log_prob_of(logits, action), value

    def _step(self, params: Any, opt_state: Any, minibatch: Any) -> tuple[Any, Any]:
        return plain.move(self.trainer, (params, opt_state), minibatch)[0]


class Loop:
    """The usual loop over agents."""

    def __init__(self, epoch: Epoch) -> None:
        sizes = epoch.world.sizes
        self._calls, self._start = Calls(epoch.world), epoch.collector.worlds
        copies = len(jax.tree.leaves(self._start)[0])
        self._agents = [
            LoopAgent(number, each, copies, self._calls)
            for number, each in enumerate(zip(*sizes, strict=True))
        ]

    def run(self) -> None:
        """Collect one epoch and learn from it."""
        states, key, calls = self._start, KEY, self._calls
        for turn in range(PLAIN.num_steps):
            key, now = calls.split(key)
            actions = [
                agent.act(turn, calls.look(states, number), now)
                for number, agent in enumerate(self._agents)
            ]
            states, reward, done = calls.turn(states, np.stack(actions, axis=1), now)
            for agent, own in zip(self._agents, np.asarray(reward).T, strict=True):
                agent.buffer["reward"][turn], agent.buffer["done"][turn] = own, done
        for number, agent in enumerate(self._agents):
            agent.learn(calls.look(states, number))


class Shared:
    """The world as environments `[A × B]`, agent by agent, for one network that all share."""

    def __init__(self, world: World) -> None:
        self._world, self._agents = world, len(world.sizes.actions)

    def current_expert(self, _: Any) -> jax.Array:
        """All rows are the one network's."""
        return jnp.zeros(self._agents * CONFIG.num_envs, jnp.int32)

    def observe(self, states: Any) -> jax.Array:
        """f32 `[A × B, O]`."""
        obs = jax.vmap(self._world.observe)(states).swapaxes(0, 1)
        return obs.reshape(-1, obs.shape[-1])

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, ...]:
        """One turn; `state` holds the worlds, and the returns `[A × B]` of their episodes."""
        states, returns = state
        states, reward, done = stepped(self._world, states, action.reshape(self._agents, -1).T, key)
        done, returns = jnp.tile(done, self._agents), returns + reward.T.ravel()
        info = {"returned_episode": done, "returned_episode_returns": returns, "boundary": done}
        state = states, jnp.where(done, 0.0, returns)
        return self.observe(states), state, reward.T.ravel(), done, info


def shared_learner(epoch: Epoch, log: Callable[..., None] | None) -> Callable[[], object]:
    """One update of PPO with a shared network, with as many turns as an epoch of ours."""
    world = epoch.world
    env, number = Shared(world), len(world.sizes.actions)
    config = PPOConfig(num_envs=number * PLAIN.num_envs, num_steps=PLAIN.num_steps, anneal_lr=False)
    trainer = plain.Trainer(env, config, log)  # pyright: ignore[reportArgumentType]
    observation, actions = map(max, world.sizes)
    network = plain.init_network(KEY, observation, actions, config.layer_size)
    params = jax.tree.map(lambda leaf: leaf[None], network)
    states = epoch.collector.worlds
    begun = (states, jnp.zeros(config.num_envs)), env.observe(states), KEY, jnp.int32(0)
    runner = plain.Runner(params, trainer.optimizer.init(params), *begun)
    update = jax.jit(partial(plain.update, trainer))
    return lambda: jax.block_until_ready(update(runner))


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", metavar="WORDS", help="cases with this in the name")
    options = parser.parse_args()
    rounds = 5 if options.small else 15
    cases: dict[str, Callable[[str], Row]] = {}
    for number in (3, 8):
        epoch = f"spread {number} agents, epoch, loop over agents / ours"
        cases[epoch] = partial(epoch_row, number, CONFIG.num_envs, rounds)
        cases[f"{epoch}, 8 copies"] = partial(epoch_row, number, 8, rounds)
        learning = f"learning, batched / one after another, {number} agents"
        cases[learning] = partial(learning_row, number, rounds)
        cases[f"overlap off / on, {number} agents"] = partial(overlap_row, number, rounds)
        cases[f"buffer hand-over, {number} agents"] = partial(hand_over_row, number)
    for number in (3, 8, 32):
        acting = f"acting, one call / per agent, {number} agents"
        cases[acting] = partial(acting_row, number, rounds)
    cases["cost per agent, 16 over 1"] = partial(cost_row, 16, rounds)
    for name, log in (("logging", lambda *_: None), ("silent", None)):
        cases[f"steps/s over IPPO, {name}, spread 3 agents"] = partial(ippo_row, log, rounds)
    rows = [row(name) for name, row in cases.items() if options.only in name]
    report("learners", rows, options.json)
    return 0


def epoch_row(number: int, copies: int, rounds: int, case: str) -> Row:
    """One epoch: collect and learn."""
    ours = spread(number, copies)
    return paired(ours.run, Loop(ours).run, rounds=rounds).row(case)


def learning_row(number: int, rounds: int, case: str) -> Row:
    """One epoch's learning."""
    ours = spread(number)
    _, rollout, _ = ours.collect(ours.agents.policy, ours.collector)
    alone = [(one_of(ours.agents, agent), one_of(rollout, agent)) for agent in range(number)]

    def one_after_another() -> None:
        for agent, own in alone:
            jax.block_until_ready(ours.learn(agent, own, KEY))

    def batched() -> None:
        jax.block_until_ready(ours.learn(ours.agents, rollout, KEY))

    return paired(batched, one_after_another, rounds=rounds).row(case)


def overlap_row(number: int, rounds: int, case: str) -> Row:
    """Epochs at lag 1; the unit names the bound of the ratio."""
    ours, spans = spread(number), []
    sides = ours.collected, ours.learnt
    start = Boundary(0, ours.agents, ours.collector)

    def epochs(threads: Threads) -> None:
        for epoch in run(*sides, start=start, epochs=8, lag=1, threads=threads):
            spans.extend(span for span in epoch.spans if threads is off and span.name != "wait")

    with (
        Threads(overlap=False, stall_timeout=600) as off,
        Threads(overlap=True, stall_timeout=600) as on,
    ):
        pair = paired(partial(epochs, on), partial(epochs, off), rounds=rounds)
    by_side = {"collect": [], "learn": []}
    for span in spans:
        by_side[span.name].append(span.ended - span.began)
    alone = [statistics.median(seconds) for seconds in by_side.values()]
    bound = sum(alone) / max(alone)
    return replace(pair.row(case), unit=f"ms (bound {bound:.2f})")


def hand_over_row(number: int, case: str) -> Row:
    """Bytes of an epoch that are copied between collecting and learning, in the mean of 8."""
    ours, places, copied, whole = spread(number), {}, [], []

    def collected(learner: Agents, collector: Any, epoch: int) -> tuple[Any, Any]:
        collector, experience = ours.collected(learner, collector, epoch)
        leaves = jax.tree.leaves(experience)
        places[epoch] = [leaf.unsafe_buffer_pointer() for leaf in leaves]
        return collector, experience

    def learnt(learner: Agents, experience: Any, epoch: int) -> tuple[Agents, Any]:
        leaves = zip(jax.tree.leaves(experience), places[epoch], strict=True)
        sizes = [(leaf.nbytes, leaf.unsafe_buffer_pointer() != place) for leaf, place in leaves]
        copied.append(sum(size for size, is_moved in sizes if is_moved))
        whole.append(sum(size for size, _ in sizes))
        return ours.learnt(learner, experience, epoch)

    start = Boundary(0, ours.agents, ours.collector)
    with Threads(overlap=True, stall_timeout=600) as threads:
        for _ in run(collected, learnt, start=start, epochs=8, lag=1, threads=threads):
            pass
    moved, baseline = map(statistics.mean, (copied, whole))
    return Row(case=case, ours=moved, baseline=baseline, unit="bytes copied")


def acting_row(number: int, rounds: int, case: str) -> Row:
    """The calls of 20 turns."""
    ours = spread(number)
    act = jax.jit(partial(agents.act, CONFIG))
    obs = jnp.zeros((number, CONFIG.num_envs, max(ours.world.sizes.observations)))
    policies = [one_of(ours.agents.policy, agent) for agent in range(number)]
    own = obs[:1]

    def one_call() -> None:
        for _ in range(20):
            jax.block_until_ready(act(ours.agents.policy, obs, KEY))

    def per_agent() -> None:
        for _ in range(20):
            jax.block_until_ready([act(policy, own, KEY) for policy in policies])

    return paired(one_call, per_agent, rounds=rounds).row(case)


def ippo_row(log: Callable[..., None] | None, rounds: int, case: str) -> Row:
    """Agents' steps per second: our networks of their own against one shared network."""
    ours, number = spread(3), 3
    pair = paired(ours.run, shared_learner(ours, log), rounds=rounds)
    work = number * CONFIG.num_envs * CONFIG.num_steps
    return pair.rate_row(case, work=work, unit="steps/s")


def cost_row(number: int, rounds: int, case: str) -> Row:
    """An epoch of many agents against as many epochs of one."""
    many, one = spread(number), spread(1)

    def as_often() -> None:
        for _ in range(number):
            one.run()

    return paired(many.run, as_often, rounds=rounds).row(case)


def spread(number: int, copies: int = CONFIG.num_envs) -> Epoch:
    """Agents in MPE spread, and their programs."""
    world, config = open_world(SPREAD, number), replace(CONFIG, num_envs=copies)
    return Epoch(
        world,
        collect.collecting(world, config),
        jax.jit(partial(agents.learn, config)),
        agents.init(config, world.sizes),
        collect.begin(world, config, KEY),
    )


def one_of(tree: Any, agent: int) -> Any:
    """Leaves `[1, …]` of one agent."""
    return jax.tree.map(lambda leaf: leaf[agent : agent + 1], tree)


def stepped(world: World, states: Any, actions: jax.Array, key: jax.Array) -> tuple[Any, ...]:
    """All copies of the world after one turn, those that are over begun anew."""
    step_keys, reset_keys = jax.random.split(key, (2, actions.shape[0]))
    states, reward, done = jax.vmap(world.step)(states, actions, step_keys)
    fresh = jax.vmap(world.reset)(reset_keys)
    pick = jax.vmap(lambda over, new, old: jax.tree.map(partial(jnp.where, over), new, old))
    return pick(done, fresh, states), reward, done


if __name__ == "__main__":
    sys.exit(main())
