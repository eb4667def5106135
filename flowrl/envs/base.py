"""The steps of environments that walk a plan of tasks, and the counts of what came of them.

An episode starts in a fresh world at task 0. The expert of task k acts until the task is done,
then task k + 1 begins in the same world; the last task's success, the player's death or a task's
time limit ends the episode. An environment that ended is reset within the same `step`: the
observation and the state that come back are those of the new episode, the `StepOutput` is that
of the old one.

Returns are cut wherever `boundary` is set: at the end of an episode and where one task hands
over to the next, because the next task's reward is not this expert's to earn. Nothing is
bootstrapped across a boundary, the time limit included: the observation after the last step is
not kept, and "not done in time" is worth nothing more to the task. A trainer that wants to
bootstrap at the time limit can tell it by `truncated`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

REWARD_LIMIT = 1e4  # of a timestep's reward, either way; what is beyond is clipped


class StepOutput(NamedTuple):
    """The yield of one step of B environments, besides observation and state.

    The success rate of step k over a window is a mean of `task_success[:, k]` over the rows with
    `done`: every finished episode counts once, also one that never came to step k. Task k was
    tried in an episode when k == 0 or task k - 1 was completed in it.
    """

    reward: jax.Array  # f32[B]: of the task in which the action was taken, with its bonus, clipped
    done: jax.Array  # bool[B]: the episode ended with this step (last success, death or time limit)
    boundary: jax.Array  # bool[B]: `done`, or the task was completed: cut returns after this step
    truncated: jax.Array  # bool[B]: the time limit alone ended the episode; implies `done`
    task: jax.Array  # int32[B]: index into the plan of the task in which the action was taken
    expert: jax.Array  # int32[B]: local index of the expert that acted
    next_expert: jax.Array  # int32[B]: the one that acts next, in the new episode after `done`
    task_success: jax.Array  # bool[B, num_tasks or more]: tasks completed so far in this episode
    lied: jax.Array  # bool[B]: the task was completed, and the inventory lacks what its skill gains
    explored: jax.Array  # bool[B]: the player came into a cell in which it was not in this task
    kept: jax.Array  # bool[B, K]: items, then facts: it is there, or no later task needs it
    cause: jax.Array  # bool[B, C]: which of the game's causes it is, if the player died
    episode_length: jax.Array  # int32[B]: steps of this episode so far, this one included
    episode_return: jax.Array  # f32[B]: undiscounted sum of this episode's rewards so far


COUNTS = ("begun", "done", "lied", "died", "cut", "timesteps")  # of each task


def count_steps(output: StepOutput, of: jax.Array | None = None) -> jax.Array:
    """Count what came of each task in steps `[T, B]`: int32 `[tasks, 6 + C + K]`.

    Columns are those of COUNTS, deaths by cause, and for each thing that may be kept the tasks that
    ended alive with it. The tasks begun count those of new episodes, not the first ones of all.
    With `of`, bool `[T, B]`, only those steps are counted; float32 is exact up to 2²⁴ of them.
    """
    of = jnp.ones_like(output.done) if of is None else of
    acted = jax.nn.one_hot(output.task, output.task_success.shape[-1]) * of[..., None]
    handed_on = output.boundary & ~output.done
    completed = handed_on | (acted.astype(bool) & output.task_success).any(axis=-1)
    died = output.done & ~completed & ~output.truncated
    events = [handed_on, completed, output.lied, died, output.truncated, jnp.ones_like(died)]
    killed = output.cause & died[..., None]
    kept = output.kept & (completed | output.truncated)[..., None]
    columns = jnp.concatenate([jnp.stack(events, axis=-1), killed, kept], axis=-1)
    counts = jnp.einsum("tbk,tbc->kc", acted, columns.astype(jnp.float32))
    begun = jnp.concatenate([(output.done & of).sum()[None].astype(jnp.float32), counts[:-1, 0]])
    return counts.at[:, 0].set(begun).astype(jnp.int32)


def claims_of(counts: Any) -> Any:
    """int[tasks, 2]: how often each task was done, and how often without its gains."""
    return counts[:, [COUNTS.index("done"), COUNTS.index("lied")]]


def is_clipped(reward: jax.Array) -> jax.Array:
    """bool: whether a reward, of any shape, is at the limit."""
    return jnp.abs(reward) >= REWARD_LIMIT
