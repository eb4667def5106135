"""The process that holds a game to its contract: `python -m flowrl.skills.validation.contract`.

`dry_run.check_game` starts it, confined as skill code is. It reads the game's name from standard
input. It prints a JSON list with one line for each promise of `Game` and `Engine` that is broken.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import operator
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from flowrl.errors import RAISED, FlowrlError, format_raised
from flowrl.games.base import INVENTORIES, Engine, Game, WorldStep, find_game
from flowrl.games.random_play import moments_of, play, settle
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import load_library
from flowrl.skills.validation.worker import equations

_WORLDS, _STEPS = 4, 16
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
_CLOSE = 1e-3  # floats of one world and of a batch, which are added in another order


class _BrokenError(Exception):
    """A broken promise: the fault and the remedy."""


def main() -> int:
    """Print the broken promises; returns the exit code."""
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # whatever the game prints goes nowhere
    lines = [" ".join(line.split()) for line in broken_promises(find_game(sys.stdin.read()))]
    reports.write(json.dumps(lines))
    reports.close()
    return 0


def broken_promises(game: Game) -> list[str]:
    """One line for each: function, fault and remedy."""
    lines: list[str] = []
    _check_names(game, lines)
    _check_modules(game, lines)
    with _promise(lines, "make"):
        engine = game.make()
        with _promise(lines, "reset"):
            world = _traced(lambda key: settle(engine.reset(key)), jax.random.key(0))
            _check_functions(game, engine, world, lines)
    if not lines:
        with _promise(lines, "play"):
            _check_values(game, engine, lines)
            _check_moves(game, engine)
    return lines


@contextmanager
def _promise(lines: list[str], name: str) -> Iterator[None]:
    """Add a line if the block raises an error."""
    try:
        yield
    except _BrokenError as broken:
        lines.append(f"{name}: {broken}")
    except RAISED as error:
        lines.append(f"{name}: raises {format_raised(error)}; correct it")


def _check_names(game: Game, lines: list[str]) -> None:
    for name, count in Counter([*game.features, *game.items, *game.enums]).items():
        if count > 1 or not name.isidentifier():
            lines.append(f"names: {name!r} is taken twice or no plain name; rename it")


def _check_modules(game: Game, lines: list[str]) -> None:
    for name in game.sources:
        if importlib.util.find_spec(name) is None:
            lines.append(f"sources: there is no module {name}; name those of the game's own code")
    for enum, members in game.enums.items():
        with _promise(lines, "enums"):
            known = {each.name for each in getattr(importlib.import_module(game.constants), enum)}
            if missing := ", ".join(sorted(members - known)):
                raise _BrokenError(f"{enum} of {game.constants} lacks {missing}")
    if not game.library_folder.is_dir():
        lines.append(f"library_folder: there is no folder {game.library_folder}; make or rename it")
    try:
        SkillGraph(load_library(game.name).values(), capacity=game.capacity).check()
    except FlowrlError as error:
        lines.append(f"library_folder: {error}")


def _check_functions(game: Game, engine: Engine, world: Any, lines: list[str]) -> None:
    """Check the shapes and types of all that the engine returns."""
    number, reward = jnp.int32(1), jnp.float32(0)
    with _promise(lines, "step"):
        moved = _traced(engine.step, jax.random.key(1), world, number - 1)
        if not isinstance(moved, tuple) or len(moved) != 2:
            raise _BrokenError("returns no pair; return the world after and the reward")
        _require_same(moved[0], world, "reset")
        kinds = [(leaf.shape, leaf.dtype.kind) for leaf in jax.tree.leaves(moved[1])]
        if kinds not in [[((), kind)] for kind in "bif"]:
            raise _BrokenError("the reward is no number; return a scalar")
    with _promise(lines, "observe"):
        wanted = jax.ShapeDtypeStruct(game.observation_shape, jnp.float32)
        _require_same(_traced(engine.observe, world), wanted, "observation_size")
        size = math.prod(game.observation_shape)
        if game.view and math.prod(game.view) > size:
            raise _BrokenError(f"view is {game.view}, more than observation_size; correct it")
        if game.heading not in (None, *range(size - 3)):
            raise _BrokenError(f"heading is {game.heading}; name the first of its four columns")
    step = WorldStep(world, world, reward, number, number)
    _check_small(game, engine, step, lines)
    features = {}
    for name in game.features:
        with _promise(lines, f"features: {name}"):
            features[name] = _check_feature(game, engine, name, step)
    if len(features) == len(game.features):
        _check_moments(game, engine, features, lines)


def _check_moments(game: Game, engine: Engine, features: dict[str, Any], lines: list[str]) -> None:
    with _promise(lines, "moments"):
        moments = moments_of(game, engine)
        lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(dict(moments))}
        if len(lengths) != 1 or lengths <= {(), (0,)}:
            raise _BrokenError(f"the leaves begin with {sorted(lengths)}; with the same (M,)")
        for name, feature in features.items():
            with _promise(lines, f"moments: {name}"):
                if name not in moments:
                    raise _BrokenError("is missing; add it")
                first = jax.eval_shape(partial(jax.tree.map, lambda x: x[0]), moments[name])
                _require_same(first, feature, "features")
                _require_finite(moments[name])


def _check_small(game: Game, engine: Engine, step: WorldStep, lines: list[str]) -> None:
    """Check the functions that return a number or two, as far as the game has them."""
    returned = {
        "position": (game.cells, step.after, jax.ShapeDtypeStruct((2,), jnp.int32)),
        "cause": (game.causes, step, jax.ShapeDtypeStruct((), jnp.int32)),
        "is_over": (True, step.after, jax.ShapeDtypeStruct((), jnp.bool_)),
    }
    for name, (asked, given, wanted) in returned.items():
        if asked:
            with _promise(lines, name):
                _require_same(_traced(getattr(engine, name), given), wanted, "the contract")


def _check_feature(game: Game, engine: Engine, name: str, step: WorldStep) -> Any:
    """Return the shapes of a feature that has all that the `Game` says."""
    asked = _traced(partial(engine.features, [name]), step)
    if not isinstance(asked, dict) or list(asked) != [name]:
        raise _BrokenError("is not returned alone; return what is asked for")
    missing = [item for item in sorted(game.items) if not hasattr(asked[name], item)]
    if name in INVENTORIES and missing:
        raise _BrokenError(f"lacks {', '.join(missing)}; add what Game.items names")
    return asked[name]


def _check_values(game: Game, engine: Engine, lines: list[str]) -> None:
    """Check what a random player meets: finite values, the same in one world and in a batch."""
    once = partial(play, engine, names=game.features, num_actions=game.num_actions, steps=_STEPS)
    keys = jax.random.split(jax.random.key(2), _WORLDS)
    many = jax.jit(jax.vmap(once), compiler_options=_QUICK)(keys)
    alone = jax.jit(once, compiler_options=_QUICK)(keys[0])
    for name, values in many.items():
        with _promise(lines, name):
            _require_finite(values)
            pairs = zip(jax.tree.leaves(values), jax.tree.leaves(alone[name]), strict=True)
            if not all(_close(batch[0], one) for batch, one in pairs):
                raise _BrokenError("is another value under jax.vmap; compute it from arrays alone")


def _check_moves(game: Game, engine: Engine) -> None:
    """Check that each of a game's moves turns the player to where it leads."""
    key, moves, heading = jax.random.key(3), game.moves, game.heading
    if moves is None or heading is None:
        return

    def looks(action: jax.Array) -> jax.Array:
        world, _ = engine.step(key, settle(engine.reset(key)), action)
        return jnp.argmax(engine.observe(world)[heading : heading + len(moves)])

    ways = jax.jit(jax.vmap(looks), compiler_options=_QUICK)(jnp.array(moves))
    if ways.tolist() != [*range(len(moves))]:
        what = f"after moves {moves} in a new world the player looks {ways.tolist()}"
        raise _BrokenError(f"{what}, not left, right, up, down (0 to 3); correct moves or heading")


def _traced(function: Callable[..., Any], *given: Any) -> Any:
    """Return the shapes of what a function returns; raises _BrokenError unless it is pure."""

    def call(*values: Any) -> Any:
        before = jax.tree.leaves(values)
        result = function(*values)
        after = jax.tree.leaves(values)
        if len(before) != len(after) or any(map(operator.is_not, before, after)):
            raise _BrokenError("changes the world that it is given; return a new one")
        return result

    # JAX would remember the first trace of the same function; a partial is another one.
    first, shapes = jax.make_jaxpr(partial(call), return_shape=True)(*given)
    second = jax.make_jaxpr(partial(call))(*given)
    if any(isinstance(const, Tracer) for const in (*first.consts, *second.consts)):
        raise _BrokenError(
            "keeps a traced array from one call to the next (UnexpectedTracerError); return it in "
            "the world"
        )
    for equation, _ in equations(first.jaxpr):
        if equation.effects or "callback" in equation.primitive.name:
            raise _BrokenError(f"uses {equation.primitive.name}; compute with jnp alone")
    same = all(map(_close, first.consts, second.consts))
    if str(first) != str(second) or not same:
        raise _BrokenError("is another computation each time; compute from its arguments alone")
    return shapes


def _require_same(tree: Any, wanted: Any, where: str) -> None:
    """Refuse a tree of shapes that is not the wanted one."""
    if jax.tree.structure(tree) != jax.tree.structure(wanted):
        raise _BrokenError(f"has another structure than {where} says; return the same")
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), other in zip(leaves, jax.tree.leaves(wanted), strict=True):
        if (leaf.shape, leaf.dtype) != (other.shape, other.dtype):
            what = f"{jax.tree_util.keystr(path) or 'it'} is {leaf.dtype}{list(leaf.shape)}"
            raise _BrokenError(f"{what}; {where} says {other.dtype}{list(other.shape)}")


def _require_finite(tree: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        values = _numbers(leaf)
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            wrong = f"{int((~np.isfinite(values)).sum())} of {values.size} values"
            what = f"{jax.tree_util.keystr(path) or 'it'} is not finite in {wrong}"
            raise _BrokenError(f"{what}; divide by what is never 0")


def _close(one: Any, other: Any) -> bool:
    first, second = _numbers(one), _numbers(other)
    if first.dtype.kind == "f" and first.shape == second.shape:
        return np.allclose(first, second, rtol=_CLOSE, atol=_CLOSE, equal_nan=True)
    return np.array_equal(first, second)


def _numbers(leaf: Any) -> np.ndarray:
    if jax.dtypes.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


if __name__ == "__main__":
    sys.exit(main())
