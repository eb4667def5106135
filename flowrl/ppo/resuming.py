"""Stopping a run and going on with it: what a trainer leaves for the next start."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowrl import checkpoints
from flowrl.networks.dispatch import Packed
from flowrl.paths import RunPaths
from flowrl.ppo.train import Counters, Turn
from flowrl.ppo.update import Learner

logger = logging.getLogger(__name__)


class Kept(NamedTuple):
    """What outlives a stop; environments start afresh from the key."""

    params: Packed
    opt_state: Any
    key: jax.Array
    counters: Counters


class Keeper:
    """Saves a run every so often, since a trainer that is killed has no time to."""

    def __init__(
        self, layout: RunPaths, *, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._layout = layout
        self._seconds = seconds
        self._clock = clock
        self._saved_at = clock()

    def turn(self, turn: Turn) -> None:
        """Save when it is time to; what cannot be saved is warned of, and training goes on."""
        if not self._seconds or self._clock() - self._saved_at < self._seconds:
            return
        try:
            save(self._layout, turn.learner, turn.counters)
        except (OSError, ValueError) as error:  # Orbax tells of a full disk by the latter
            reason = str(error).partition("\n")[0]
            logger.warning("there is no new checkpoint to go on from: %s", reason)
        self._saved_at = self._clock()


def save(layout: RunPaths, learner: Learner, counters: Counters) -> None:
    """Keep parameters, optimizer state, random key and counters; not the environments."""
    key = learner.places[0].key
    tree = _tree(learner.params, learner.opt_state, key=key, counters=counters)
    checkpoints.save_resume(layout.resume, tree)


def load(layout: RunPaths, *, params: Packed, opt_state: Any) -> Kept:
    """What the last trainer left; `params` and `opt_state` give the shapes.

    Raises:
      ExpertError: it is damaged, or of a run with other sizes.
    """
    blank = Counters(acted=(0,) * params.first.bias.shape[0])
    like = _tree(params, opt_state, key=jax.random.key(0), counters=blank)
    found = checkpoints.load_resume(layout.resume, like)
    params = jax.tree.map(jnp.asarray, found["params"])
    moments = map(jnp.asarray, found["opt_state"])
    opt_state = jax.tree.unflatten(jax.tree.structure(opt_state), moments)
    counters = Counters(
        updates=int(found["updates"]),
        frames=int(found["frames"]),
        acted=tuple(int(frames) for frames in found["acted"]),
        seconds=float(found["seconds"]),
    )
    return Kept(params, opt_state, jax.random.wrap_key_data(found["key"]), counters)


def _tree(params: Packed, opt_state: Any, *, key: jax.Array, counters: Counters) -> dict[str, Any]:
    return {
        "params": params,
        "opt_state": tuple(jax.tree.leaves(opt_state)),
        "key": np.asarray(jax.random.key_data(key)),
        "updates": np.asarray(counters.updates, np.int64),
        "frames": np.asarray(counters.frames, np.int64),
        "acted": np.asarray(counters.acted, np.int64),
        "seconds": np.asarray(counters.seconds, np.float64),
    }
