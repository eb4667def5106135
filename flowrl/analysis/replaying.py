"""Replay recorded episodes side by side, and play on from their states without a need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.agent import check_replay, key_of
from flowrl.analysis.contracts import LEAST, Experiment, PlayedStep
from flowrl.envs.tasks import SkillEnv, WalkState
from flowrl.envs.world_digest import world_digest
from flowrl.measures.episodes import RecordedEpisode, RecordedEpisodes
from flowrl.networks import dispatch
from flowrl.networks.grouped import Packed

_CHUNK = 50  # timesteps between two looks whether all episodes have ended
_BATCH = 8  # worlds that are generated at once


class _Timestep(NamedTuple):
    """One timestep of B recorded episodes; of one that has ended, `live` is False."""

    live: Any  # bool[B]
    actions: Any  # int32[B]
    keys: Any  # keys[B]


class Replay:
    """Recorded episodes of one plan, with at least one episode.

    Args:
      env: the game that walks the plan.
      packed: the plan's experts, leaves `[E, …]`.
      facts: digest of a function's code → the facts that hold where it is done.
    """

    def __init__(
        self,
        env: SkillEnv,
        packed: Packed,
        episodes: RecordedEpisodes,
        *,
        activation: str,
        facts: Mapping[str, Sequence[str]],
    ) -> None:
        self._env, self._packed, self._episodes = env, packed, [*episodes]
        of_functions = [facts.get(key.partition(" ")[0], ()) for key in env.functions]
        self._facts = sorted({fact for each in of_functions for fact in each})
        says = [[fact in each for each in of_functions] for fact in self._facts]
        self._says = np.array(says, bool).reshape(len(self._facts), len(of_functions))
        self.names = (*sorted(env.game.items), *self._facts)
        self._again = jax.jit(self._replayed)
        self._on = jax.jit(partial(_played_on, env, activation, packed))
        self._begin = jax.jit(self._begun)

    def steps(self, gains: Mapping[str, Sequence[str]]) -> Iterator[PlayedStep]:
        """Each step of each episode; `gains` names what the skills gain."""
        _, seen, _ = self._replay(-1)
        for row, episode in enumerate(self._episodes):
            amounts = seen[: len(episode.actions) + 1, row].astype(int)
            yield from self._steps(episode, amounts, gains)

    def without(
        self, need: str, most: int, *, provider: int | None, episodes: int, seed: int
    ) -> Experiment | None:
        """Play on with at most `most` of a need, and as it was; None where that cannot be.

        An item is taken from the player where the plan's last step begins. A fact is missing if the
        step that brings it about, the `provider`, is left out. Both need enough recorded states.
        """
        is_item, last = need in self._env.game.items, len(self._env.module.tasks) - 1
        holding = getattr(self._env.engine, "holding", None) if is_item else None
        if holding is None and (is_item or provider is None):
            return None
        task = last if is_item or provider is None else provider
        states, _, reached = self._replay(task)
        place = self.names.index(need)
        held = np.asarray(jax.jit(jax.vmap(self._amounts))(states))[:, place]
        rows = np.flatnonzero(reached & ((held > most) if is_item else (held == 0)))
        if len(rows) < LEAST:
            return None
        states = jax.tree.map(lambda leaf: leaf[np.resize(rows, episodes)], states)
        states = states._replace(plan=states.plan._replace(bound=jnp.zeros(episodes, bool)))
        changed = states._replace(task=states.task + 1)
        if holding is not None:
            less = jax.vmap(partial(holding, item=need, most=most))
            changed = states._replace(world=jax.jit(less)(states.world))
        before, without = (self._successes(each, seed) for each in (states, changed))
        return Experiment(need=need, most=most, episodes=episodes, before=before, without=without)

    def _amounts(self, state: WalkState) -> jax.Array:
        """int32[names]: how much there is of each item, and 1 for each fact that holds."""
        facts = (self._env.holds(state) & self._says).any(axis=1)
        return jnp.concatenate([self._env.player(state.world)[1], facts.astype(jnp.int32)])

    def _replay(self, task: int) -> tuple[WalkState, np.ndarray, np.ndarray]:
        """Replay all episodes.

        Returns:
          The states in which the plan's step `task` begins, leaves [B, …]; int16[T + 1, B, names],
          the amounts before the first timestep and after each; bool[B], where the step begins.
        """
        columns, most = self._episodes, max(len(each.actions) for each in self._episodes)
        padded = -(-most // _CHUNK) * _CHUNK

        def rows(name: str) -> np.ndarray:
            """The column of all episodes, [T, B, …]; zeros after their last timestep."""
            parts = [getattr(each, name) for each in columns]
            filled = np.zeros((padded, len(parts), *parts[0].shape[1:]), parts[0].dtype)
            for row, part in enumerate(parts):
                filled[: len(part), row] = part
            return filled

        lengths = np.array([len(each.actions) for each in columns])
        live = np.arange(padded)[:, None] < lengths
        keys, actions = key_of(columns[0], rows("step_keys")), rows("actions").astype(np.int32)
        state, first = self._first()
        carry, amounts, digests, rewards = (state, state), [first[None]], [], []
        for start in range(0, padded, _CHUNK):
            here = slice(start, start + _CHUNK)
            chunk = _Timestep(live[here], actions[here], keys[here])
            carry, told = self._again(np.int32(task), carry, chunk)
            for kept, leaf in zip((amounts, digests, rewards), told, strict=True):
                kept.append(np.asarray(leaf))
        same = np.concatenate(digests) == rows("digests")
        same &= np.concatenate(rewards) == rows("rewards")
        for row, episode in enumerate(columns):
            wrong = np.flatnonzero(~same[: lengths[row], row])
            check_replay(episode, int(wrong[0]) + 1 if len(wrong) else 0, not len(wrong))
        reached = np.array([task in each.steps for each in columns])
        return carry[1], np.concatenate(amounts), reached

    def _first(self) -> tuple[WalkState, np.ndarray]:
        """The first states, leaves [B, …], and their amounts, int16[B, names]."""
        words = np.stack([episode.world_key for episode in self._episodes])
        rows = np.arange(-(-len(words) // _BATCH) * _BATCH) % len(words)
        batches = [
            self._begin(key_of(self._episodes[0], words[rows[start : start + _BATCH]]))
            for start in range(0, len(rows), _BATCH)
        ]
        joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[: len(words)], *batches)
        return joined[0], np.asarray(joined[1])

    def _begun(self, keys: jax.Array) -> tuple[WalkState, jax.Array]:
        """The first states in the worlds of keys[B], and their amounts, int16[B, names]."""
        states = jax.vmap(lambda key: self._env.begin_in(self._env.new_world(key)))(keys)
        return states, jax.vmap(self._amounts)(states).astype(jnp.int16)

    def _replayed(self, task: jax.Array, carry: Any, chunk: _Timestep) -> tuple[Any, Any]:
        """Take recorded actions; the second state of `carry` is that in which the step begins."""

        def act(carry: Any, now: _Timestep) -> tuple[Any, Any]:
            state, kept = carry
            begins = now.live & (state.task == task) & (state.task_length == 0)
            kept = jax.tree.map(partial(_where, begins), state, kept)
            digests = jax.vmap(world_digest)(state.world, state.task)
            _, state = jax.vmap(self._env.observe)(state)
            state, output = jax.vmap(self._env.advance)(now.keys, state, now.actions)
            amounts = jax.vmap(self._amounts)(state).astype(jnp.int16)
            return (state, kept), (amounts, digests, output.reward)

        return jax.lax.scan(act, carry, chunk)

    def _steps(
        self, episode: RecordedEpisode, amounts: np.ndarray, gains: Mapping[str, Sequence[str]]
    ) -> Iterator[PlayedStep]:
        """The steps of one episode; `amounts` is int[T + 1, names]."""
        tasks, items = self._env.module.tasks, len(self.names) - len(self._facts)
        ends = np.flatnonzero(np.diff(episode.steps, append=-1)) + 1
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            task, of_step = tasks[episode.steps[start]], amounts[start : end + 1]
            gained = [self.names.index(name) for name in gains[task.skill] if name in self.names]
            changes = np.diff(of_step, axis=0)
            lost = np.maximum(-changes[:, :items], 0)
            came = (changes[:, gained] > 0).any(axis=1)
            yield PlayedStep(
                skill=task.skill,
                count=task.count,
                is_goal=int(episode.steps[start]) == len(tasks) - 1,
                done=bool(end < len(episode.actions) or episode.success),
                timesteps=int(end - start),
                start=self._named(of_step[0]),
                end=self._named(of_step[-1]),
                spent=self._named(lost.sum(axis=0)),
                won=self._named(np.maximum(changes[:, :items], 0).sum(axis=0)),
                used=self._named(lost[came].sum(axis=0)),
            )

    def _named(self, amounts: np.ndarray) -> dict[str, int]:
        named = zip(self.names, amounts.tolist(), strict=False)
        return {name: amount for name, amount in named if amount}

    def _successes(self, states: WalkState, seed: int) -> int:
        """The number of episodes that go on from these states, leaves [B, …], to a success."""
        none = jnp.zeros(len(states.task), bool)
        carry: Any = (states, jax.random.key(seed), none, none)
        while not np.asarray(carry[2]).all():
            carry = self._on(carry)
        return int(np.asarray(carry[3]).sum())


def _where(rows: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Choose rows, bool[B], of leaves [B, …]."""
    return jnp.where(rows.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def _played_on(env: SkillEnv, activation: str, packed: Packed, carry: Any) -> Any:
    """Let experts act for some timesteps: state, key, bool[B] of those over, and of those won."""

    def act(carry: Any, _: Any) -> tuple[Any, None]:
        state, key, over, won = carry
        key, action_key, step_key = jax.random.split(key, 3)
        observations, state = jax.vmap(env.observe)(state)
        expert = jax.vmap(env.current_expert)(state)
        logits, _ = dispatch.apply(packed, observations, expert, activation=activation)
        choice = jax.random.categorical(action_key, logits).astype(jnp.int32)
        actions = jax.vmap(env.action_of)(state, choice)
        keys = jax.random.split(step_key, len(actions))
        state, output = jax.vmap(env.advance)(keys, state, actions)
        done = output.task_success[:, len(env.module.tasks) - 1]
        return (state, key, over | output.done, won | (done & ~over)), None

    return jax.lax.scan(act, carry, None, length=_CHUNK)[0]
