from __future__ import annotations

from collections import deque
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.multiagent import buffers
from flowrl.multiagent.buffers import Transitions
from tests.multiagent.making import COPIES, TURNS, rollout

CAPACITY, DRAWN = 13, 6
ADD = jax.jit(buffers.add)
SAMPLE = jax.jit(partial(buffers.sample, size=DRAWN))


def steps(first: int, number: int) -> Transitions:
    """Steps numbered from `first`, each of whose numbers says which it is."""
    names = np.arange(first, first + number)
    obs = np.stack([names, -names], axis=1).astype(np.float32)
    flags = (names % 3 == 0).astype(bool)
    return Transitions(obs, names.astype(np.int32), names / 2.0, flags, obs + 0.5)


def held(ring: buffers.Ring) -> list[int]:
    """The numbers of the steps in a ring, the oldest first."""
    size, place = int(ring.size), int(ring.position)
    order = (place - size + np.arange(size)) % CAPACITY
    return np.asarray(ring.steps.action)[order].tolist()


def test_a_ring_holds_and_draws_what_a_deque_would():
    rng = np.random.default_rng(0)
    ring = jax.tree.map(jnp.asarray, buffers.empty_ring(CAPACITY, 2))
    wanted, added = deque(maxlen=CAPACITY), 0
    for operation in range(10_000):
        if added and rng.random() < 0.3:
            drawn = SAMPLE(ring, jax.random.wrap_key_data(np.uint32([operation, 1])))
            names = np.asarray(drawn.action)
            assert set(names.tolist()) <= set(wanted)
            np.testing.assert_array_equal(drawn.obs[:, 1], -names)
            np.testing.assert_array_equal(drawn.next_obs[:, 0], names + 0.5)
            np.testing.assert_array_equal(drawn.done, names % 3 == 0)
            np.testing.assert_array_equal(drawn.reward, names / 2)
        else:
            number = int(rng.choice([1, 4, CAPACITY, CAPACITY + 7]))
            ring, added = ADD(ring, steps(added, number)), added + number
            wanted.extend(range(added - number, added))
            assert held(ring) == list(wanted)


def test_every_step_held_is_drawn_as_often_as_any_other():
    ring = ADD(buffers.empty_ring(CAPACITY, 2), steps(0, 4))
    drawn = buffers.sample(ring, jax.random.key(0), 4000).action
    counts = np.bincount(np.asarray(drawn), minlength=4)
    assert len(counts) == 4
    assert (abs(counts - 1000) < 5 * np.sqrt(750)).all()


@pytest.mark.parametrize("agent", [0, 2])
def test_the_step_after_the_last_turn_sees_the_last_observation(agent):
    turns = jax.tree.map(lambda leaf: leaf[agent], rollout())
    found = jax.tree.map(lambda leaf: leaf.reshape(TURNS, COPIES, -1), buffers.transitions(turns))
    np.testing.assert_array_equal(found.obs, turns.obs)
    np.testing.assert_array_equal(found.next_obs[:-1], turns.obs[1:])
    np.testing.assert_array_equal(found.next_obs[-1], turns.last_obs)
    np.testing.assert_array_equal(found.reward[..., 0], turns.reward)
