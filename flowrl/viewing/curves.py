"""Pictures of one run: its figures over frames or minutes, read from its metrics.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowrl import storage
from flowrl.errors import ConfigError, FileRefusedError, closest
from flowrl.experts.merge import wilson
from flowrl.measures.objectives import METRICS_BYTES
from flowrl.paths import printable
from flowrl.viewing import drawing
from flowrl.viewing.drawing import Picture, plain

EPISODES = 256  # that a share is of, at least
_LARGEST = 1e100  # number that is drawn
Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCurve:
    """One step of a plan over the frames of a run; shares are of all episodes that ended."""

    skill: str
    places: tuple[float, ...]  # frames, or minutes of training
    success: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    died: tuple[float, ...]
    cut: tuple[float, ...]


class Line(dict[str, Any]):
    """A JSON object of a file of lines; `place` is PATH:NUMBER."""

    place = "a line"


def wrong_value(line: Mapping[str, Any], key: str, what: str) -> FileRefusedError:
    """Return the error that a value of a line is not `what` it has to be."""
    place, said = getattr(line, "place", Line.place), f"{line.get(key)!r:.40}"
    return FileRefusedError(f"{place}: {printable(key)} is {said}, no {what}; remove the line")


def read_lines(path: Path) -> list[Line]:
    """The JSON objects of a file of lines; a last line without its end is left out.

    FileRefusedError says which other line is none.
    """
    content = storage.read_bytes(path, limit_bytes=METRICS_BYTES) if path.exists() else b""
    lines: list[Line] = []
    for place, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            read = json.loads(line)
        except (ValueError, RecursionError):
            read = None
        if not isinstance(read, dict):
            raise FileRefusedError(f"{path}:{place} is no JSON object; remove the line")
        lines.append(Line(read))
        lines[-1].place = f"{path}:{place}"
    return lines


def step_curves(lines: Lines, *, minutes: bool = False) -> list[StepCurve]:
    """The curves of a plan's steps, from the lines of metrics.jsonl.

    Each point counts the newest lines whose episodes are `EPISODES` or more.
    """
    names = [key.partition("/")[2] for key in (lines[-1] if lines else {}) if key[:6] == "begun/"]
    ended = np.cumsum([0, *(count_of(line, "episodes") for line in lines)], dtype=float)
    points = np.flatnonzero(ended)  # lines, from 1
    first = np.searchsorted(ended, ended[points] - EPISODES, side="right") - 1
    first = np.maximum(first, 0)
    episodes = ended[points] - ended[first]
    places = tuple(_place(lines[point - 1], minutes) for point in points.tolist())

    def newest(key: str) -> np.ndarray:
        counted = np.cumsum([0, *(count_of(line, key) for line in lines)], dtype=float)
        return counted[points] - counted[first]

    curves = []
    for name in names:
        done = np.minimum(newest(f"done/{name}"), episodes)
        bounds = [wilson(int(n), int(of)) for n, of in zip(done, episodes, strict=True)]
        curves.append(
            StepCurve(
                skill=_words(name),
                places=places,
                success=tuple((done / episodes).tolist()),
                low=tuple(low for low, _ in bounds),
                high=tuple(high for _, high in bounds),
                died=tuple((newest(f"died/{name}") / episodes).tolist()),
                cut=tuple((newest(f"cut/{name}") / episodes).tolist()),
            )
        )
    return curves


def _words(name: str) -> str:
    """The name of a step or an expert in a key: without its number in the plan."""
    number, _, rest = name.partition("_")
    return (rest if number.isdecimal() else name).replace("_", " ")


def count_of(line: Mapping[str, Any], key: str) -> int:
    """A count of a line, 0 for none; FileRefusedError if it is another value."""
    value = line.get(key, 0)
    if type(value) is not int or not 0 <= value < 2**53:
        raise wrong_value(line, key, "count")
    return value


def number_of(line: Mapping[str, Any], key: str) -> float:
    """A figure of a line, NaN for none; FileRefusedError if it is no number."""
    value = line.get(key)
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return math.nan
    if type(value) not in (int, float) or not abs(value) <= _LARGEST:
        raise wrong_value(line, key, "number to draw")
    return float(value)


def _place(line: Mapping[str, Any], minutes: bool) -> float:
    return number_of(line, "seconds") / 60 if minutes else count_of(line, "frames")


def skill_picture(skill: str, lines: Lines, *, minutes: bool = False) -> Picture:
    """The success of a plan's steps, where its episodes end, and which experts act.

    ConfigError if no episode has ended yet.
    """
    curves = [curve for curve in step_curves(lines, minutes=minutes) if curve.places]
    if not curves:
        what = f"no episode of {printable(skill)} has ended in its metrics.jsonl"
        raise ConfigError(f"{what}; plot it later, or restore the file from a copy")
    names = [f"{number} {curve.skill}" for number, curve in enumerate(curves, 1)]
    figure, axes = drawing.figure_and_axes(3, (8.0, 8.8), sharex=True)
    for number, curve in enumerate(curves[:-1]):
        style = drawing.line_style(number)
        axes[0].plot(curve.places, curve.success, label=plain(names[number]), **style)
    last = curves[-1]
    axes[0].plot(last.places, last.success, color="black", linewidth=2, label=plain(names[-1]))
    axes[0].fill_between(last.places, last.low, last.high, color="#CCCCCC", linewidth=0)
    lost = {
        f"{name}, {how}": shares
        for name, curve in zip(names, curves, strict=True)
        for how, shares in (("died", curve.died), ("cut", curve.cut))
        if max(shares) >= 0.01
    }
    drawing.stack(axes[1], last.places, lost)
    drawing.stack(axes[2], [_place(line, minutes) for line in lines], _acting(lines))
    axes[0].set(title=plain(skill), ylabel="episodes that complete the step", ylim=(0, 1.02))
    axes[1].set(ylabel="episodes that end in the step", ylim=(0, 1.02))
    axes[2].set(ylabel="frames of each expert", ylim=(0, 1.02))
    columns = {"minutes" if minutes else "frames": last.places}
    columns |= {name: curve.success for name, curve in zip(names, curves, strict=True)}
    columns |= {"95 % low": last.low, "95 % high": last.high, **lost}
    return _finished(skill, figure, columns)


def _acting(lines: Lines) -> dict[str, Sequence[float]]:
    """The share of each expert in the frames since the line before."""
    keys = [key for key in lines[-1] if key.startswith("acted/")]
    frames = np.array([[count_of(line, key) for key in keys] for line in lines])
    grown = np.maximum(np.diff(frames, axis=0, prepend=0), 0)
    shares = grown / np.maximum(grown.sum(axis=1, keepdims=True), 1)
    return {_words(key.partition("/")[2]): shares[:, place] for place, key in enumerate(keys)}


def metric_picture(title: str, lines: Lines, metric: str, *, minutes: bool = False) -> Picture:
    """A figure of metrics.jsonl over a run: a key, or all keys of which it is one of the parts.

    ConfigError if no line has it, with those that there are.
    """
    keys = dict.fromkeys(key for line in lines for key in line)
    found = [key for key in keys if metric in (key, *key.split("/"))]
    if not found:
        names = sorted({key.split("/")[key.startswith("agent_") and "/" in key] for key in keys})
        there = f"it has: {', '.join(map(printable, names))}" if names else "it has no line yet"
        near = closest(metric, names)
        raise ConfigError(f"--metric {printable(metric)} is not in metrics.jsonl{near}; {there}")
    figure, axes = drawing.figure_and_axes(1, (8.0, 3.6))
    places = [_place(line, minutes) for line in lines]
    curves = {key: [number_of(line, key) for line in lines] for key in found}
    for number, (key, values) in enumerate(curves.items()):
        axes.plot(places, values, label=plain(key), **drawing.line_style(number))
    axes.set(title=plain(title), ylabel=plain(metric))
    return _finished(title, figure, {"minutes" if minutes else "frames": places, **curves})


def _finished(title: str, figure: Any, table: Mapping[str, Sequence[float]]) -> Picture:
    """The picture of a figure, and of the columns of its numbers; the first has the places."""
    minutes = "minutes" in table
    figure.axes[-1].set_xlabel("minutes of training" if minutes else "frames of its run")
    for axes in figure.axes:
        if not minutes:
            drawing.frames_on(axes.xaxis)
        axes.grid(alpha=0.25)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(**drawing.BESIDE)
    rows = zip(*table.values(), strict=True)
    plain_rows = ([None if math.isnan(x) else float(x) for x in row] for row in rows)
    return Picture(title, figure, [dict(zip(table, row, strict=True)) for row in plain_rows])
