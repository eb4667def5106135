"""Experts side by side: `python scripts/bench_moe.py [--json FILE] [--small]`.

The baseline is what the public research code does: every expert is a network of a vmapped stack,
all of them evaluate every row, the acting one's outputs are selected by a one-hot mask, and
gradients are taken through that. Both sides draw a shuffled minibatch from the rows of a rollout
and give PPO's loss and its gradient; the two are checked to be equal before they are timed.

* `grad E=16 2048x64`: value and gradient, 16 experts, 2,048 rows, hidden layers 64 wide.
* `forward …`: acting, logits and values of as many environments as rows.
* `grad E=1 …`: against an actor and a critic without any experts.
* `skewed …`: three quarters of the rows belong to one expert.
* `flat …`: ours with one expert over ours with sixteen; 1 means that experts cost nothing.

Four gradients are taken in a row, as in an epoch, or sixteen forward passes, after a pause in which
the kernel takes back the memory of the side before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from benchmarking import Pair, Row, arguments, paired, report

from flowrl.config import PPOConfig
from flowrl.networks import dispatch
from flowrl.networks.grouped import pack, unpack
from flowrl.networks.moe import ActorCritic, init_expert, stack_experts, take_expert
from flowrl.ppo.loss import Hyperparameters, Rows, ppo_loss
from flowrl.runs import LAYERS

OBSERVATION, MAP, ACTIONS = 1345, 1323, 17  # Craftax-Classic: 63 cells of 21 bits, 22 numbers
CONFIG = PPOConfig()
HYPER = Hyperparameters.of(CONFIG, CONFIG.lr)


class Case(NamedTuple):
    """One comparison."""

    name: str
    experts: int
    rows: int
    width: int
    rounds: int = 15
    skewed: bool = False


GRADIENTS = [
    Case("grad E=16 2048x64", 16, 2048, 64),
    Case("grad E=16 8192x64", 16, 8192, 64, rounds=7),
    Case("grad E=16 2048x256", 16, 2048, 256, rounds=7),
    Case("grad E=16 512x64", 16, 512, 64, rounds=25),
    Case("grad E=64 2048x64", 64, 2048, 64, rounds=5),
    Case("skewed E=16 2048x64", 16, 2048, 64, skewed=True),
    Case("grad E=1 2048x64", 1, 2048, 64, rounds=31),
    Case("grad E=1 512x64", 1, 512, 64, rounds=51),
]
FORWARDS = [
    Case("forward E=16 256x64", 16, 256, 64, rounds=31),
    Case("forward E=16 64x64", 16, 64, 64, rounds=31),
    Case("forward E=64 256x64", 64, 256, 64, rounds=9),
    Case("forward E=1 64x64", 1, 64, 64, rounds=31),
]
FLAT = Case("flat E=16/E=1 2048x64", 16, 2048, 64, rounds=25)
SMALL = {"grad E=16 2048x64", "grad E=1 2048x64", "forward E=16 256x64"}
CALLS = 16  # forward passes of one measurement
GRADIENT_CALLS = 4  # gradients of one measurement: those of an epoch follow one another, too
PAUSE_SECONDS = 0.1  # the baseline gives up to 340 MB back after each gradient


class Sides(NamedTuple):
    """The same work, done by flowrl and by the baseline."""

    ours: Callable[[], Any]
    baseline: Callable[[], Any]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", metavar="WORDS", help="cases with this in the name")
    options = parser.parse_args()

    def wanted(case: Case) -> bool:
        small = not options.small or case.name in {*SMALL, FLAT.name}
        return small and options.only in case.name

    rows = [_gradient_row(case, _gradients(case)) for case in GRADIENTS if wanted(case)]
    rows += [_forward_row(case) for case in FORWARDS if wanted(case)]
    if wanted(FLAT):
        one, many = (_our_gradient(FLAT._replace(experts=e)) for e in (1, FLAT.experts))
        rows.append(_gradient_row(FLAT, Sides(many, one)))
    report("moe", rows, options.json)
    return 0


def _timed(case: Case, sides: Sides) -> Pair:
    return paired(
        sides.ours, sides.baseline, rounds=case.rounds, warmups=2, pause_seconds=PAUSE_SECONDS
    )


def _gradients(case: Case) -> Sides:
    """Both gradients of one minibatch; checked to be equal."""
    stacked, rows, index = _stacked(case), _rows(case), _minibatch(case)
    loss = _plain_loss if case.experts == 1 else _one_hot_loss
    theirs = take_expert(stacked, 0) if case.experts == 1 else stacked
    gradient = jax.jit(jax.value_and_grad(loss))
    ours = _our_gradient(case)
    value, wanted = gradient(theirs, rows, index)
    wanted = jax.tree.map(lambda leaf: leaf[None], wanted) if case.experts == 1 else wanted
    found = ours()
    _refuse_unequal(case, (found.loss, unpack(found.grads)), (value, wanted))
    return Sides(ours, lambda: jax.block_until_ready(gradient(theirs, rows, index)))


def _our_gradient(case: Case) -> Callable[[], dispatch.Evaluation]:
    packed, rows, index = pack(_stacked(case)), _rows(case), _minibatch(case)
    evaluate = jax.jit(
        partial(
            dispatch.evaluate_rows,
            row_loss=partial(ppo_loss, hyper=HYPER),
            activation=CONFIG.activation,
        )
    )
    return lambda: jax.block_until_ready(evaluate(packed, rows, index))


def _gradient_row(case: Case, sides: Sides) -> Row:
    """Milliseconds of one gradient."""
    return _row_of_one(case, sides, GRADIENT_CALLS)


def _forward_row(case: Case) -> Row:
    """Milliseconds of one forward pass."""
    return _row_of_one(case, _forwards(case), CALLS)


def _row_of_one(case: Case, sides: Sides, calls: int) -> Row:
    """Milliseconds of one of as many calls in a row."""
    several = Sides(*(partial(_in_a_row, side, calls) for side in sides))
    row = _timed(case, several).row(case.name)
    return Row(
        case=row.case,
        ours=row.ours / calls,
        baseline=(row.baseline or 0.0) / calls,
        unit=row.unit,
        ratio=row.ratio,
    )


def _forwards(case: Case) -> Sides:
    stacked, rows = _stacked(case), _rows(case)
    obs, expert = rows.obs[: case.rows], rows.expert[: case.rows]
    packed = pack(stacked)
    ours = jax.jit(partial(dispatch.apply, activation=CONFIG.activation))
    theirs = take_expert(stacked, 0) if case.experts == 1 else stacked
    baseline = jax.jit(_plain if case.experts == 1 else _one_hot)
    _refuse_unequal(case, ours(packed, obs, expert), baseline(theirs, obs, expert))
    return Sides(lambda: ours(packed, obs, expert), lambda: baseline(theirs, obs, expert))


def _in_a_row(act: Callable[[], Any], calls: int) -> None:
    for _ in range(calls):
        jax.block_until_ready(act())


def _one_hot(stacked: Any, obs: jax.Array, expert: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits and values of every expert in every row, those of the acting one selected."""
    logits, value = jax.vmap(_plain, in_axes=(0, None, None))(stacked, obs, expert)
    mask = jax.nn.one_hot(expert, value.shape[0]).T
    return jnp.sum(logits * mask[:, :, None], axis=0), jnp.sum(value * mask, axis=0)


def _plain(one: Any, obs: jax.Array, _expert: jax.Array) -> tuple[jax.Array, jax.Array]:
    """An actor and a critic, each a network of its own."""
    return _network(one["actor"], obs), _network(one["critic"], obs)[:, 0]


def _network(layers: Any, seen: jax.Array) -> jax.Array:
    for name in LAYERS[:-1]:
        seen = jnp.tanh(seen @ layers[name]["kernel"] + layers[name]["bias"])
    return seen @ layers[LAYERS[-1]]["kernel"] + layers[LAYERS[-1]]["bias"]


def _one_hot_loss(stacked: Any, rows: Rows, index: jax.Array) -> jax.Array:
    chosen = jax.tree.map(lambda leaf: leaf[index], rows)
    logits, value = _one_hot(stacked, chosen.obs, chosen.expert)
    return ppo_loss(logits, value, chosen, hyper=HYPER)[0].mean()


def _plain_loss(one: Any, rows: Rows, index: jax.Array) -> jax.Array:
    chosen = jax.tree.map(lambda leaf: leaf[index], rows)
    logits, value = _plain(one, chosen.obs, chosen.expert)
    return ppo_loss(logits, value, chosen, hyper=HYPER)[0].mean()


def _stacked(case: Case) -> Any:
    network = ActorCritic(ACTIONS, case.width)
    keys = np.random.default_rng(0).integers(2**32, size=(case.experts, 2), dtype=np.uint32)
    return stack_experts([init_expert(network, k, observation_size=OBSERVATION) for k in keys])


def _rows(case: Case) -> Rows:
    """Two minibatches of steps as Craftax-Classic shows them, random in all that is random there.

    Of every cell's 17 bits of block one is set, and now and then one of its four of creatures.
    """
    rng, count = np.random.default_rng(0), 2 * case.rows
    cells = np.zeros((count, 63, 21), np.float32)
    np.put_along_axis(cells, rng.integers(17, size=(count, 63, 1)), 1.0, axis=-1)
    cells[..., 17:] = rng.random((count, 63, 4)) < 0.02
    obs = np.concatenate([cells.reshape(count, MAP), rng.random((count, 22))], axis=1)
    share = np.full(case.experts, 1.0 / case.experts)
    if case.skewed:
        share = np.asarray([0.75] + [0.25 / (case.experts - 1)] * (case.experts - 1))
    return Rows(
        obs=jnp.asarray(obs, jnp.float32),
        expert=jnp.asarray(rng.choice(case.experts, count, p=share), jnp.int32),
        action=jnp.asarray(rng.integers(ACTIONS, size=count), jnp.int32),
        log_prob=jnp.asarray(np.log(1 / ACTIONS) + 0.1 * rng.standard_normal(count), jnp.float32),
        advantage=jnp.asarray(rng.standard_normal(count), jnp.float32),
        target=jnp.asarray(rng.standard_normal(count), jnp.float32),
    )


def _minibatch(case: Case) -> jax.Array:
    order = np.random.default_rng(1).permutation(2 * case.rows)
    return jnp.asarray(order[: case.rows], jnp.int32)


def _refuse_unequal(case: Case, found: Any, wanted: Any) -> None:
    """Both sides must do the same work, whatever the order in which they add."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if not np.allclose(one, other, rtol=1e-3, atol=1e-5 * float(np.abs(other).max())):
            apart = float(np.abs(np.asarray(one) - np.asarray(other)).max())
            sys.exit(f"{case.name}: ours and the baseline differ by {apart:g}; nothing was timed")


if __name__ == "__main__":
    sys.exit(main())
