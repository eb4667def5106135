"""Stopping a run and going on with it: what a stopped trainer leaves for the next start."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from flowrl import checkpoints
from flowrl.envs.interface import WalkingEnv
from flowrl.layout import RunLayout
from flowrl.rl.train import Counters
from flowrl.rl.update import Learner


def save(layout: RunLayout, learner: Learner, counters: Counters) -> None:
    """Keep parameters, optimizer state, random key and counters; not the environments."""
    checkpoints.save_resume(layout.resume, _kept(learner, counters))


def load(
    layout: RunLayout, learner: Learner, *, env: WalkingEnv, num_envs: int
) -> tuple[Learner, Counters]:
    """Where the stopped trainer was, in fresh environments.

    Args:
      layout: the run folder.
      learner: a fresh one of the same run, for its shapes.
      env, num_envs: the environments to restart, from the kept key.

    Raises:
      ExpertError: the kept state is damaged, or of a run with other sizes.
    """
    blank = Counters(acted=(0,) * env.num_experts)
    kept = checkpoints.load_resume(layout.resume, _kept(learner, blank))
    params, opt_state = jax.tree.map(jax.numpy.asarray, (kept["params"], kept["opt_state"]))
    reset_key, key = jax.random.split(jax.random.wrap_key_data(kept["key"]))
    obs, state = jax.jit(env.reset, static_argnums=1)(reset_key, num_envs)
    place = learner.place._replace(env=state, obs=obs, key=key)
    counters = Counters(
        updates=int(kept["updates"]),
        frames=int(kept["frames"]),
        acted=tuple(int(frames) for frames in kept["acted"]),
        seconds=float(kept["seconds"]),
    )
    return Learner(params, opt_state, place), counters


def _kept(learner: Learner, counters: Counters) -> dict[str, Any]:
    return {
        "params": learner.params,
        "opt_state": learner.opt_state,
        "key": np.asarray(jax.random.key_data(learner.place.key)),
        "updates": np.asarray(counters.updates, np.int64),
        "frames": np.asarray(counters.frames, np.int64),
        "acted": np.asarray(counters.acted, np.int64),
        "seconds": np.asarray(counters.seconds, np.float64),
    }
