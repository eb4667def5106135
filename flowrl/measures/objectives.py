"""Measures of runs with declared ranges, and objectives that put them together.

A measure's range is never taken from data, so a score means the same tomorrow. No JAX or NumPy.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from flowrl import storage
from flowrl.errors import ConfigError, FileRefusedError, closest

METRICS_BYTES = 1 << 28  # a line a second for a week, with 400 bytes each
_LARGEST = 1e300
EPISODE_MEASURES = ("success", "return", "deaths")
RUN_MEASURES = ("success", "progress", "frames", "seconds", "steps", "return")
_TERM = re.compile(r"(?P<name>[a-z]+)\s*(?P<sign>>=|<=|=)\s*(?P<value>[-+.0-9e]+)")


class CurvePoint(NamedTuple):
    """One line of metrics.jsonl: what held after so many frames."""

    frames: int
    seconds: float
    success: float  # share of the newest episodes that succeeded at the plan's last step
    episode_length: float  # environment steps
    episode_return: float = 0.0


Curve = Sequence[CurvePoint]  # with rising frames
Figures = Mapping[str, float]  # by the name of a measure, in its unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A figure of a run or an evaluation, and the range in which it is scored."""

    name: str
    unit: str
    worst: float
    best: float
    log: bool = False

    def score(self, figure: float) -> float:
        """Return the place of a figure between the worst, 0, and the best, 1.

        >>> MEASURES["deaths"].score(0.25), MEASURES["frames"].score(1e6)
        (0.75, 0.5)
        """
        if math.isnan(figure):
            raise ConfigError(f"{self.name} is not a number; measure it again")
        ends = (self.worst, self.best)
        inside = min(max(figure, min(ends)), max(ends))
        place, worst, best = (math.log(x) if self.log else x for x in (inside, *ends))
        return (place - worst) / (best - worst)


MEASURES: Mapping[str, Measure] = {
    measure.name: measure
    for measure in (
        Measure(name="success", unit="share of episodes", worst=0, best=1),
        Measure(name="progress", unit="mean success over the budget", worst=0, best=1),
        Measure(name="frames", unit="frames to the goal", worst=1e9, best=1e3, log=True),
        Measure(name="seconds", unit="seconds to the goal", worst=1e6, best=1, log=True),
        Measure(name="return", unit="reward of an episode", worst=-10, best=40),
        Measure(name="deaths", unit="share of episodes", worst=1, best=0),
        Measure(name="steps", unit="timesteps for each success", worst=1e5, best=1, log=True),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A weighted mean of measures' scores, and limits in the measures' units that must be kept."""

    weights: Mapping[str, float]
    limits: tuple[tuple[str, str, float], ...]

    def __post_init__(self) -> None:
        if any(weight < 0 or not math.isfinite(weight) for weight in self.weights.values()):
            raise ConfigError("a weight of an objective must be 0 or more, and finite")
        if not sum(self.weights.values()):
            raise ConfigError("no measure has a weight above 0; give one, such as success=1")

    def broken(self, figures: Figures) -> list[str]:
        """Return the limits that the figures do not keep, for people."""
        lines = []
        for name, sign, limit in self.limits:
            figure = _figure(figures, name)
            if not (figure >= limit if sign == ">=" else figure <= limit):
                lines.append(f"{name} is {figure:g}, not {sign} {limit:g}")
        return lines

    def score(self, figures: Figures) -> float:
        """Return the weighted mean of the scores in [0, 1]; 0 if a limit is broken."""
        return 0.0 if self.broken(figures) else self.mean(figures)

    def mean(self, figures: Figures) -> float:
        """Return the weighted mean of the scores in [0, 1], whatever the limits."""
        used = {name: weight for name, weight in self.weights.items() if weight}
        total = math.fsum(w * MEASURES[n].score(_figure(figures, n)) for n, w in used.items())
        return total / math.fsum(used.values())


def parse_objective(text: str, *, measured: Sequence[str] = tuple(MEASURES)) -> Objective:
    """Read an objective of what is measured: weights and limits, separated by commas.

    >>> objective = parse_objective("success=1,deaths=0.5,success>=0.8")
    >>> objective.score({"success": 0.9, "deaths": 0.3})
    0.8333333333333334

    Raises ConfigError if a term is malformed, or names no measure, or one that is not measured.
    """
    weights: dict[str, float] = {}
    limits: list[tuple[str, str, float]] = []
    for term in text.split(","):
        match = _TERM.fullmatch(term.strip())
        try:
            name, sign, value = match["name"], match["sign"], float(match["value"])  # type: ignore[index]
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"objective {text!r}: {term.strip()!r} is not measure=weight, measure>=limit or "
                f"measure<=limit; write {measured[0]}=1,{measured[0]}>=0.8"
            ) from error
        if name not in measured:
            near = closest(name, measured)
            raise ConfigError(
                f"objective {text!r}: {name} is not measured here{near}; use {', '.join(measured)}"
            )
        if sign == "=":
            weights[name] = value
        elif {MEASURES[name].worst, MEASURES[name].best} == {0, 1} and not 0 <= value <= 1:
            raise ConfigError(f"objective {text!r}: {name} lies in [0, 1]; write 0.8 for 80 %")
        else:
            limits.append((name, sign, value))
    try:
        return Objective(weights=weights, limits=tuple(limits))
    except ConfigError as error:
        raise ConfigError(f"objective {text!r}: {error}") from error


def read_curve(path: Path) -> tuple[CurvePoint, ...]:
    """Read the curve of a run from its metrics.jsonl; () while there is none.

    A last line without its end is left out, since a trainer may be writing it. So are lines whose
    figures are null, and those of updates that a resumed trainer made again. FileRefusedError says
    which other line is malformed, or that the file is too large.
    """
    if not path.exists():
        return ()
    points: list[CurvePoint] = []
    lines = storage.read_bytes(path, limit_bytes=METRICS_BYTES).split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            point = _point(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise FileRefusedError(f"{path}:{number} is no line of figures of a run") from error
        if point and (not points or point.frames > points[-1].frames):
            points.append(point)
    return tuple(points)


def progress(curve: Curve, *, budget_frames: int) -> float:
    """Return the mean success over the frames of a budget, in [0, 1].

    Success is linear between points and 0 at the beginning; after the last point its success counts
    on, so that an early stop is no loss. It is the default score of a trial.

    >>> progress([CurvePoint(50, 1.0, 1.0, 9.0)], budget_frames=100)
    0.75
    """
    frames, success, area = 0.0, 0.0, 0.0
    for point in curve:
        if point.frames >= budget_frames:
            share = (budget_frames - frames) / (point.frames - frames)
            end = success + share * (point.success - success)
            return (area + (budget_frames - frames) * (success + end) / 2) / budget_frames
        area += (point.frames - frames) * (success + point.success) / 2
        frames, success = point.frames, point.success
    return (area + (budget_frames - frames) * success) / budget_frames


def run_figures(
    curve: Curve, success: float, *, budget_frames: int, goal: float
) -> dict[str, float]:
    """Return what a run measured: `RUN_MEASURES`.

    `success` is that of the experts that it leaves; the curve has a point at least. Frames and
    seconds to a `goal` that was not reached are infinite, and score as the worst.
    """
    ends = ((point.frames, point.seconds) for point in curve if point.success >= goal)
    frames, seconds = next(ends, (math.inf, math.inf))
    return {
        "success": success,
        "progress": progress(curve, budget_frames=budget_frames),
        "frames": frames,
        "seconds": seconds,
        "steps": curve[-1].episode_length / success if success else math.inf,
        "return": curve[-1].episode_return,
    }


def _figure(figures: Figures, name: str) -> float:
    if name not in figures:
        there = ", ".join(sorted(figures))
        raise ConfigError(
            f"the objective needs {name}, and only {there} are measured; leave it out"
        )
    return figures[name]


def _point(line: dict[str, object]) -> CurvePoint | None:
    """The point of a line, None if a figure is null; ValueError if one is malformed."""
    names = ("frames", "seconds", "success_rate", "mean_episode_length", "mean_episode_return")
    figures = [line[name] for name in names]
    if None in figures:
        return None
    if any(isinstance(x, bool) or not isinstance(x, int | float) for x in figures):
        raise ValueError("a figure is no number")
    if max(abs(x) for x in figures) > _LARGEST:  # type: ignore[arg-type]
        raise ValueError("a figure is outside of its range")
    frames, seconds, success, length, total = (float(x) for x in figures)  # type: ignore[arg-type]
    whole = frames.is_integer() and frames >= 0
    if not (whole and seconds >= 0 and 0 <= success <= 1 and length >= 0):
        raise ValueError("a figure is outside of its range")
    return CurvePoint(int(frames), seconds, success, length, total)
