"""The search of a sweep: a pure function from the trials so far to the next trial's point."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from flowrl.arguments import Count, CountOrZero, count
from flowrl.config import Configuration
from flowrl.errors import ConfigError
from flowrl.measures.objectives import RUN_MEASURES, parse_objective
from flowrl.tuning.pruning import Pruner
from flowrl.tuning.space import Dimension, Point, SearchInput, Space, Value

Method = Literal["cooled", "protein", "carbs", "cleanrl", "random", "grid"]
Unit = Literal["frames", "seconds"]
_DURATION = re.compile(r"([0-9.]+)([smh])")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_LEAST_FRAMES = 1000  # of a budget: fewer were meant as something else
_SPREAD_PER_DIMENSION = 1.5  # first trials that fill the space, for each dimension and one
_GRID = 4  # values of a dimension that has more than can be listed
_MOST_LISTED = 16
_MOST_DRAWN = 1000  # points that are not admissible, after which a sweep gives up


@dataclass(frozen=True, kw_only=True)
class SearchConfig(Configuration):
    """The choice and the scoring of points, and their budget."""

    method: Method = "cooled"
    """How points are chosen; protein, carbs and cleanrl are other names of cooled."""
    trials: Count | None = None
    """Most trials of the search (default: 20, or as many as --budget lets)."""
    budget: str | None = None
    """What the search may cost: seconds of training as 90s, 30m or 2h, or frames as 20M."""
    objective: str = "progress=1"
    """What a trial is scored by: weights and limits of success, progress, frames, seconds, steps,
    return, such as success=1,frames=0.5,success>=0.8."""
    max_failures: Count = 5
    """The search ends when so many trials have failed."""
    pruner: Pruner = "none"
    """The rule that ends trials which are unlikely to become the best."""
    confirm: CountOrZero = 5
    """Seeds with which the best points and the default are trained again; 0 for none."""

    def problems(self) -> Iterator[str]:
        """Check whether objective and budget can be read; raises ConfigError if they cannot."""
        parse_objective(self.objective, measured=RUN_MEASURES)
        read_budget(self.budget)
        if self.confirm == 1:
            yield "--confirm 1 confirms nothing; choose 2 seeds or more, or 0 for none"


def suggest(method: Method, given: SearchInput) -> Point:
    """Return the point of a trial, one that a run with `space.base` admits.

    It depends on these arguments alone, not on the order of history and pending points. Raises
    ConfigError if no point is admissible, or the grid has no more.
    """
    space = given.space
    history = sorted(given.history, key=lambda each: each.number)
    pending = sorted(given.pending, key=lambda each: tuple(space.to_unit(each)))
    proposals = _METHODS[method](replace(given, history=history, pending=pending))
    for point in map(space.admitted, itertools.islice(proposals, _MOST_DRAWN)):
        if point is not None:
            return point
    raise ConfigError(
        f"method {method} finds no point for trial {given.number} that a run admits; "
        "end the sweep, or change its dimensions or what they must divide"
    )


def read_budget(text: str | None) -> tuple[float | None, Unit]:
    """Return a budget and its unit.

    >>> read_budget("30m"), read_budget("20M"), read_budget(None)
    ((1800.0, 'seconds'), (20000000.0, 'frames'), (None, 'frames'))

    Raises ConfigError if it is neither a time nor a number of frames.
    """
    if text is None:
        return None, "frames"
    match = _DURATION.fullmatch(text)
    try:
        value = float(match[1]) * _SECONDS[match[2]] if match else float(count(text))
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ConfigError(f"--budget {text} is no time above 0, as 30m, and no frames, as 20M")
    if not match and value < _LEAST_FRAMES:
        raise ConfigError(f"--budget {text} is {text} frames; write {text}m for minutes")
    return value, "seconds" if match else "frames"


def grid_points(space: Space) -> Iterator[Point]:
    """Yield the grid's points: all values of a short dimension, some of a longer one."""
    names = [each.name for each in space.dimensions]
    seen = set()
    for row in itertools.product(*(_levels(each) for each in space.dimensions)):
        point = space.admitted(dict(zip(names, row, strict=True)))
        values = None if point is None else tuple(point.values())
        if point is not None and values not in seen:  # a repair may make two the same
            seen.add(values)
            yield point


def _levels(dimension: Dimension) -> list[Value]:
    listed = len(dimension.choices)
    count = listed if 0 < listed <= _MOST_LISTED else _GRID
    return [dimension.value((level + 0.5) / count) for level in range(count)]


def _grid(given: SearchInput) -> Iterator[Point]:
    taken = [*(each.point for each in given.history), *given.pending]
    return (point for point in grid_points(given.space) if point not in taken)


def _random(given: SearchInput) -> Iterator[Point]:
    rng = given.generator()
    while True:
        yield given.space.from_unit(rng.random(len(given.space.dimensions)))


def _spread(given: SearchInput) -> Iterator[Point]:
    """Yield the point of this number in a sequence that fills the space, then random points.

    The sequence is Roberts's generalisation of the golden ratio (2018), begun at a place that the
    sweep's seed says.
    """
    from scipy.optimize import brentq  # takes as long to import as all else

    count = len(given.space.dimensions)
    ratio: Any = brentq(lambda x: x ** (count + 1) - x - 1, 1, 2)
    begun = np.random.default_rng(given.seed % 2**64).random(count)
    steps = given.number * ratio ** -np.arange(1.0, count + 1)
    yield given.space.from_unit((begun + steps) % 1)
    yield from _random(given)


def _modelled(given: SearchInput) -> Iterator[Point]:
    """Yield by models that are fitted to the history, once there are trials enough."""
    whole = sum(each.score is not None and not each.cut_at for each in given.history)
    few = _SPREAD_PER_DIMENSION * (len(given.space.dimensions) + 1)
    if whole < 2 or len(given.history) < few:
        return _spread(given)
    from flowrl.tuning.surrogate import ranked  # SciPy takes as long to import as all else

    return itertools.chain(map(given.space.from_unit, ranked(given)), _random(given))


_METHODS: Mapping[Method, Callable[[SearchInput], Iterator[Point]]] = {
    **dict.fromkeys(("cooled", "protein", "carbs", "cleanrl"), _modelled),
    "random": _random,
    "grid": _grid,
}
