"""The space of hyper-parameters that a sweep searches, and its points in unit coordinates.

A space is read from a TOML or JSON file with a table for each field of PPOConfig,

    [lr]
    type = "log_uniform"     # or PufferLib's: distribution = "log_normal"
    min = 1e-4
    max = 1e-2

or from `--vary lr=log:1e-4:1e-2`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from flowrl import arguments, command_line
from flowrl.config import PPOConfig, checked, flags, with_flags
from flowrl.errors import ConfigError, FlowrlError, closest, format_error
from flowrl.skills.skill import SKILL_SETTINGS
from flowrl.storage import read_json

Value = float | int | str | bool
Point = Mapping[str, Value]
DimensionKind = Literal["uniform", "log_uniform", "int_uniform", "uniform_pow2", "logit", "choice"]

_KINDS: Mapping[str, DimensionKind] = {
    **{kind: kind for kind in get_args(DimensionKind)},
    **{"log": "log_uniform", "int": "int_uniform", "pow2": "uniform_pow2"},
    **{"log_normal": "log_uniform", "logit_normal": "logit"},
}
_OF_GRAPH = ("layer_size", "activation", "sight", "egocentric")
_FIXED = ("success_state_rate", "max_task_steps")  # the goal, which trials are compared by
_FIELDS = tuple(name for name in SKILL_SETTINGS if name not in _FIXED)
_SCALE = 0.5
_DIGITS = 9  # of a number that is proposed
_KEYS = {
    **{"type": "kind", "distribution": "kind", "min": "low", "max": "high"},
    **{"choices": "choices", "values": "choices", "scale": "scale"},
}
_EXAMPLE = 'lr = {type = "log_uniform", min = 1e-4, max = 1e-2}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """One field of PPOConfig, and the values that it may take.

    A range of whole numbers or of powers of two lists them in `choices`. `scale` is the step from a
    good point to its neighbours, as a share of half the range.
    """

    name: str
    kind: DimensionKind
    low: float = 0.0
    high: float = 0.0
    choices: Sequence[Value] = ()
    scale: float = _SCALE

    def contains(self, value: object) -> bool:
        """Return whether this is one of the values."""
        if self.choices:
            return type(value) is type(self.choices[0]) and value in self.choices
        return type(value) in self._types and self.low <= value <= self.high  # type: ignore[operator]

    def unit(self, value: Value) -> float:
        """Return where a value lies, in [0, 1]; raises ConfigError if it is none of the values."""
        if not self.contains(value):
            raise ConfigError(f"{self.name} {value!r} is no value of the space")
        if self.choices:
            return (self.choices.index(value) + 0.5) / len(self.choices)
        low, high, at = (self._warp(float(each)) for each in (self.low, self.high, value))
        return (at - low) / (high - low)

    def value(self, unit: float) -> Value:
        """Return the value at a place, which is clipped to [0, 1]."""
        unit = min(1.0, max(0.0, unit))
        if self.choices:
            return self.choices[min(len(self.choices) - 1, int(unit * len(self.choices)))]
        low, high = self._warp(self.low), self._warp(self.high)
        value = float(f"{self._unwarp(low + unit * (high - low)):.{_DIGITS}g}")
        value = min(self.high, max(self.low, value))
        return value if float in self._types else round(value)

    @property
    def _types(self) -> tuple[type, ...]:
        return (int,) if _type_of(self.name) is int else (int, float)

    def _warp(self, value: float) -> float:
        if self.kind == "log_uniform":
            return math.log(value)
        return -math.log1p(-value) if self.kind == "logit" else value

    def _unwarp(self, value: float) -> float:
        if self.kind == "log_uniform":
            return math.exp(value)
        return -math.expm1(-value) if self.kind == "logit" else value


@dataclass(frozen=True, slots=True)
class Space:
    """The dimensions that a sweep varies, and the settings of all that it does not vary."""

    dimensions: tuple[Dimension, ...]
    base: PPOConfig | None = None  # None: every point is admissible

    def admitted(self, point: Point) -> Point | None:
        """Return a point that a run admits, its minibatches repaired; None if there is none."""
        if self.base is None:
            return point
        try:
            repaired = flags(admissible(point, self.base))
        except ConfigError:
            return None
        admitted = {each.name: repaired[each.name] for each in self.dimensions}
        inside = all(each.contains(admitted[each.name]) for each in self.dimensions)
        return admitted if inside else None

    def first_points(self, tuned: Sequence[Mapping[str, Any]]) -> tuple[Point, ...]:
        """Return the points to try first: that of the base, and what other sweeps found."""
        assert self.base
        default, points = flags(self.base), []
        for settings in ({}, *tuned):
            names = (each.name for each in self.dimensions)
            point = {name: settings.get(name, default[name]) for name in names}
            if point not in points and self.admitted(point) == point:
                points.append(point)
        return tuple(points)

    def to_unit(self, point: Point) -> NDArray[np.float64]:
        """Return a point in unit coordinates, `[d]` in [0, 1]; raises ConfigError."""
        if point.keys() != (names := {each.name for each in self.dimensions}):
            raise ConfigError(f"the point has {sorted(point)}, the space {sorted(names)}")
        return np.array([each.unit(point[each.name]) for each in self.dimensions])

    def from_unit(self, unit: NDArray[np.float64]) -> Point:
        """Return the point at unit coordinates `[d]`."""
        return {
            each.name: each.value(float(at)) for each, at in zip(self.dimensions, unit, strict=True)
        }

    def to_data(self) -> dict[str, Any]:
        """Return the space as JSON values, which `space_from_data` reads back."""
        return {each.name: _written(each) for each in self.dimensions}


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A trial that has ended; the score is None if it failed, the cost is what it took then.

    The score is that of `cut_at` frames, if a pruner ended it there.
    """

    number: int
    point: Point
    score: float | None
    cost: float
    cut_at: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchInput:
    """All that a proposal depends on."""

    space: Space
    history: Sequence[Observation] = ()
    pending: Sequence[Point] = ()  # of trials that have not ended
    number: int = 0  # of the trial, from 0
    seed: int = 0  # of the sweep
    budget_left: float = 1.0  # share of the sweep's budget

    def generator(self) -> np.random.Generator:
        """Return the randomness of this proposal, from the sweep's seed and the trial's number."""
        return np.random.default_rng([self.seed % 2**64, self.number])


def read_space(path: Path) -> Space:
    """Read a space from a TOML or JSON file; raises ConfigError."""
    if path.suffix != ".json":
        return space_from_data(command_line.toml(path, flag="space"), str(path))
    try:
        document = read_json(path)
    except (FlowrlError, OSError) as error:
        raise ConfigError(f"--space {path} cannot be read: {format_error(error)}") from error
    return space_from_data(document, str(path))


def parse_vary(items: Sequence[str]) -> Space:
    """Read a space from `--vary FIELD=KIND:…`.

    >>> parse_vary(["lr=log:1e-4:1e-2"]).from_unit(np.array([0.5]))
    {'lr': 0.001}
    """
    data: dict[str, Any] = {}
    for item in items:
        name, _, words = item.partition("=")
        kind, *ends = words.split(":")
        keys = ["choices"] if _KINDS.get(kind) == "choice" else ["min", "max"]
        if not name or name in data or len(ends) != len(keys):
            twice = f"{name} is varied twice; " if name in data else ""
            raise ConfigError(
                f"--vary {item}: {twice}write FIELD=KIND:MIN:MAX or FIELD=choice:A,B, "
                f"with KIND one of {', '.join(_KINDS)}"
            )
        values = [ends[0].split(",")] if keys == ["choices"] else ends
        data[name] = {"type": kind, **dict(zip(keys, values, strict=True))}
    return space_from_data(data, "--vary")


def space_from_data(data: Mapping[str, Any], place: str) -> Space:
    """Return the space that plain JSON values describe; `place` says where they stand.

    Raises ConfigError, which names the dimension, its problem, and the remedy.
    """
    if not data:
        raise ConfigError(f"{place}: no field is varied; write {_EXAMPLE}")
    dimensions = []
    for name, written in data.items():
        try:
            _check_name(name)
            dimensions.append(_dimension(name, written))
        except ConfigError as error:
            raise ConfigError(f"{place}: {name}: {error}") from error
    return Space(tuple(dimensions))


def admissible(point: Point, base: PPOConfig) -> PPOConfig:
    """Return the configuration of a trial at this point.

    If its rows do not divide into minibatches, it has the nearest number that they divide into.
    Raises ConfigError if it makes no sense for another reason.
    """
    config = with_flags(base, **point)
    rows, wanted = config.num_envs * config.num_steps, config.num_minibatches
    try:
        return checked(config)
    except ConfigError:
        if rows % wanted == 0:
            raise
    small = [number for number in range(1, math.isqrt(rows) + 1) if rows % number == 0]
    divisors = {*small, *(rows // number for number in small)}
    nearest = min(divisors, key=lambda number: (abs(math.log(number / wanted)), number))
    return checked(with_flags(config, num_minibatches=nearest))


def _written(dimension: Dimension) -> dict[str, Any]:
    written: dict[str, Any] = {"type": dimension.kind, "scale": dimension.scale}
    if dimension.kind == "choice":
        return {**written, "choices": list(dimension.choices)}
    return {**written, "min": dimension.low, "max": dimension.high}


def _check_name(name: str) -> None:
    if name in _FIXED:
        raise ConfigError("says what trials are compared by, so all have the same; leave it out")
    if name in _OF_GRAPH:
        raise ConfigError(
            "is the same for all experts of a graph, which train in one stacked tree; leave it out"
        )
    if name not in _FIELDS:
        near = closest(arguments.SYNONYMS.get(name, name), _FIELDS)
        raise ConfigError(f"is no field that can be varied{near}; there are {', '.join(_FIELDS)}")


def _dimension(name: str, written: object) -> Dimension:
    kind, given = _given(written)
    scale = _SCALE if given.get("scale", "auto") == "auto" else given["scale"]
    if type(scale) not in (int, float) or not 0 < scale <= 1:
        raise ConfigError(f"scale {scale!r} must be auto, or a number above 0 and at most 1")
    if kind == "choice":
        choices = _choices(name, given["choices"])
        return Dimension(name=name, kind=kind, choices=choices, scale=scale)
    if _type_of(name) not in (int, float):
        raise ConfigError(f'has no range of values; use type = "choice", not {kind}')
    low, high = (arguments.value_of(PPOConfig, name, [str(given[end])]) for end in ("low", "high"))
    _check_range(name, kind, low, high)
    choices = ()
    if kind == "int_uniform":
        choices = range(low, high + 1)
    elif kind == "uniform_pow2":
        choices = tuple(low * 2**power for power in range(round(math.log2(high / low)) + 1))
    return Dimension(name=name, kind=kind, low=low, high=high, choices=choices, scale=scale)


def _type_of(name: str) -> object:
    return arguments.arguments(PPOConfig)[name].type


def _given(written: object) -> tuple[DimensionKind, dict[str, Any]]:
    """Return the kind of a dimension and what else was written of it, by fields of Dimension."""
    if not isinstance(written, Mapping):
        raise ConfigError(f"is no table; write {_EXAMPLE}")
    if unknown := written.keys() - _KEYS.keys():
        raise ConfigError(f"{min(unknown)!r} is unknown; there are {', '.join(_KEYS)}")
    given = {_KEYS[key]: value for key, value in written.items()}
    kind = _KINDS.get(str(given.pop("kind", None)))
    if kind is None:
        raise ConfigError(f"has no known type; choose one of {', '.join(_KINDS)}")
    wanted, said = (
        ({"choices"}, "choices") if kind == "choice" else ({"low", "high"}, "min and max")
    )
    if given.keys() - {"scale"} != wanted:
        raise ConfigError(f"type {kind} needs {said}, and may have scale")
    return kind, given


def _choices(name: str, written: object) -> tuple[Value, ...]:
    words = written if isinstance(written, list) else [written]
    choices = tuple(
        dict.fromkeys(arguments.value_of(PPOConfig, name, [str(each)]) for each in words)
    )
    if len(choices) < 2:
        raise ConfigError(f"has one choice; give two or more, or say --{name}")
    return choices


def _check_range(name: str, kind: DimensionKind, low: float, high: float) -> None:
    if low >= high:
        raise ConfigError(f"min {low} must be below max {high}")
    if kind == "log_uniform" and low <= 0:
        raise ConfigError(f"min {low} has no logarithm; choose more than 0, or type uniform")
    if kind == "logit" and high >= 1:
        raise ConfigError(f"max {high} must be below 1, which 1 - x in log cannot reach")
    if kind == "int_uniform" and _type_of(name) is not int:
        raise ConfigError("is no whole number; use type uniform")
    if kind == "uniform_pow2" and not all(_is_pow2(end) for end in (low, high)):
        raise ConfigError(f"min {low} and max {high} must be powers of two, such as 32 and 256")


def _is_pow2(value: float) -> bool:
    return value > 0 and math.frexp(value)[0] == 0.5
