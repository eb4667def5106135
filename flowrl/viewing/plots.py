"""Pictures of how a graph and its skills learn, drawn by matplotlib, which is loaded late."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flowrl import storage
from flowrl.errors import ConfigError, FileRefusedError
from flowrl.experts.merge import wilson
from flowrl.measures.objectives import METRICS_BYTES, Curve, read_curve
from flowrl.paths import GraphPaths, printable
from flowrl.reports.status import SkillRow

ENDINGS = (".svg", ".png", ".pdf")
_EPISODES = 256  # that a share is of, at least
# The colours that M. Okabe and K. Ito chose for all kinds of colour vision; then the same, dashed.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442", "#000000")
_OF_STATUS = {"completed": "#009E73", "below goal": "#E69F00", "failed": "#D55E00"}
_OTHER = "#0072B2"  # what still runs or waits
_STYLE: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
_STYLE |= {"svg.fonttype": "none", "savefig.bbox": "tight", "figure.dpi": 120}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCurve:
    """One step of a plan over the frames of a run; shares are of all episodes that ended."""

    skill: str
    frames: tuple[int, ...]
    success: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    died: tuple[float, ...]
    cut: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar of a Gantt chart: a run of a skill trained; minutes are those of the graph."""

    skill: str
    begun: float
    ended: float


def read_lines(path: Path) -> list[Mapping[str, Any]]:
    """The JSON objects of a file of lines; a last line without its end is left out.

    FileRefusedError says which other line is none.
    """
    content = storage.read_bytes(path, limit_bytes=METRICS_BYTES) if path.exists() else b""
    lines: list[Mapping[str, Any]] = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            read = json.loads(line)
        except (ValueError, RecursionError):
            read = None
        if not isinstance(read, dict):
            raise FileRefusedError(f"{path}:{number} is no JSON object; remove the line")
        lines.append(read)
    return lines


def step_curves(lines: Sequence[Mapping[str, Any]]) -> list[StepCurve]:
    """The curves of a plan's steps, from the lines of metrics.jsonl.

    Each point counts the newest lines whose episodes are `_EPISODES` or more.
    """
    names = [key.partition("/")[2] for key in (lines[-1] if lines else {}) if key[:6] == "begun/"]
    curves = {name: ([], [], [], [], [], []) for name in names}
    newest: list[Mapping[str, Any]] = []
    for line in lines:
        newest.append(line)
        while len(newest) > 1 and _ended(newest[1:], names) >= _EPISODES:
            del newest[0]
        episodes = _ended(newest, names)
        for name in names if episodes else ():
            done = sum(_number(each, f"done/{name}") for each in newest)
            low, high = wilson(min(done, episodes), episodes)
            died, cut = (
                sum(_number(each, f"{key}/{name}") for each in newest) / episodes
                for key in ("died", "cut")
            )
            frames = _number(line, "frames")
            point = (frames, min(done / episodes, 1.0), low, high, died, cut)
            for column, value in zip(curves[name], point, strict=True):
                column.append(value)
    fields = ("frames", "success", "low", "high", "died", "cut")
    return [
        StepCurve(
            skill=name.partition("_")[2].replace("_", " "),
            **dict(zip(fields, map(tuple, columns), strict=True)),
        )
        for name, columns in curves.items()
    ]


def _ended(lines: Iterable[Mapping[str, Any]], names: Sequence[str]) -> int:
    """The episodes that ended in these lines: by death, a limit, or the last step's success."""
    lost = (f"{key}/{name}" for key in ("died", "cut") for name in names)
    keys = [*lost, *(f"done/{name}" for name in names[-1:])]
    return sum(_number(line, key) for line in lines for key in keys)


def _number(line: Mapping[str, Any], key: str) -> int:
    value = line.get(key, 0)
    if type(value) is not int or not 0 <= value < 2**53:
        what = f"{printable(key)} in metrics.jsonl is {value!r:.40}, no count"
        raise FileRefusedError(f"{what}; remove the line")
    return value


def bars(lines: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """The times in which runs trained, from events.jsonl; one under way ends with the last line."""
    moments = [_moment(line) for line in lines]
    minutes = [(moment - moments[0]).total_seconds() / 60 for moment in moments]
    under_way: dict[str, float] = {}
    found: list[Bar] = []
    for minute, line in zip(minutes, lines, strict=True):
        skill, status = line.get("skill"), line.get("status")
        if not isinstance(skill, str) or not isinstance(status, str):
            continue  # a line about the graph
        begun = under_way.pop(skill, None)
        if begun is not None:
            found.append(Bar(skill=skill, begun=begun, ended=minute))
        if status == "running":
            under_way[skill] = minute
    last = minutes[-1] if minutes else 0.0
    return found + [Bar(skill=skill, begun=at, ended=last) for skill, at in under_way.items()]


def _moment(line: Mapping[str, Any]) -> datetime:
    try:
        return datetime.fromisoformat(str(line.get("at"))).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        said = f"{line.get('at')!r:.40}"
        raise FileRefusedError(f"a line of events.jsonl is at {said}; remove the line") from error


def skill_picture(skill: str, lines: Sequence[Mapping[str, Any]], ending: str) -> bytes:
    """The success of a plan's steps over frames, and where its episodes end.

    ConfigError if no episode has ended yet.
    """
    curves = [curve for curve in step_curves(lines) if curve.frames]
    if not curves:
        raise ConfigError(f"no episode of {printable(skill)} has ended yet; plot it later")
    figure, (success, ends) = _figure(2, (8.0, 6.4))
    for number, curve in enumerate(curves):
        colour = _COLOURS[number % len(_COLOURS)]
        last = number == len(curves) - 1
        line = {"color": colour, "linewidth": 2 if last else 1}
        line["linestyle"] = "-" if number < len(_COLOURS) else "--"
        label = f"{number + 1} {curve.skill}"
        success.plot(curve.frames, curve.success, label=_plain(label), **line)
        if last:
            success.fill_between(curve.frames, curve.low, curve.high, color=colour, alpha=0.2)
    lost = {
        f"{number} {curve.skill}, {how}": shares
        for number, curve in enumerate(curves, 1)
        for how, shares in (("died", curve.died), ("cut", curve.cut))
        if max(shares) >= 0.01
    }
    if lost:
        colours = [_COLOURS[n % len(_COLOURS)] for n in range(len(lost))]
        labels = [*map(_plain, lost)]
        ends.stackplot(curves[-1].frames, *lost.values(), labels=labels, colors=colours, alpha=0.8)
    success.set(title=_plain(skill), ylabel="episodes that complete the step", ylim=(0, 1.02))
    ends.set(xlabel="frames of its run", ylabel="episodes that end in the step", ylim=(0, 1.02))
    for axes in (success, ends):
        axes.xaxis.set_major_formatter(_frames_formatter())
        axes.grid(alpha=0.25)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
    return _saved(figure, ending)


def graph_picture(graph_paths: GraphPaths, rows: Sequence[SkillRow], ending: str) -> bytes:
    """A row for each skill over the minutes of the graph: when it trained, and its success.

    ConfigError if nothing has trained yet.
    """
    trained = bars(read_lines(graph_paths.events))
    if not trained:
        raise ConfigError(f"nothing in {graph_paths.root} has trained yet; plot it later")
    names = list(dict.fromkeys(bar.skill for bar in trained))
    by_name = {row.skill: row for row in rows}
    figure, axes = _figure(1, (9.0, 0.9 + 0.32 * len(names)))
    for place, name in enumerate(names):
        row = by_name.get(name)
        status = row.status if row else ""
        colour = _OF_STATUS.get(status, _OTHER)
        own = [bar for bar in trained if bar.skill == name]
        for bar in own:
            width = max(bar.ended - bar.begun, 0.02)
            axes.barh(place, width, 0.8, bar.begun, color=colour, alpha=0.25)
        if row is not None and row.success_rate is not None:
            path = newest_metrics(graph_paths, row)
            curve = read_curve(path) if path else ()
            minutes, success = _over_minutes(curve, own)
            floor = place + 0.4
            tops = [floor - 0.8 * share for share in success]
            axes.fill_between(minutes, tops, floor, color=colour, linewidth=0)
            axes.annotate(
                f" {row.success_rate:.0%}", (own[-1].ended, place), va="center", fontsize=8
            )
    axes.set(xlabel="minutes", ylim=(len(names) - 0.4, -0.6), xlim=(0, None))
    axes.set_yticks(range(len(names)), [*map(_plain, names)])
    axes.grid(axis="x", alpha=0.25)
    return _saved(figure, ending)


def newest_metrics(graph_paths: GraphPaths, row: SkillRow) -> Path | None:
    """The figures of a skill's newest run, in its folder or in the archive; None if it has none."""
    if row.expert is None:
        return None
    run, archive = (
        place(row.expert, row.skill).metrics for place in (graph_paths.run, graph_paths.archive)
    )
    return run if run.exists() else archive


def _over_minutes(curve: Curve, own: Sequence[Bar]) -> tuple[list[float], list[float]]:
    """Minutes of the graph and the success at them, of a skill's newest run.

    A run's seconds are those of training alone; they are laid backwards from the end of its last
    bar, over earlier ones where it went on after a stop.
    """
    placed: list[tuple[float, float]] = []
    for point in reversed(curve):
        left = (curve[-1].seconds - point.seconds) / 60
        for bar in reversed(own):
            if left <= bar.ended - bar.begun:
                placed.append((bar.ended - left, point.success))
                break
            left -= bar.ended - bar.begun
    minutes, success = zip(*reversed(placed), strict=True) if placed else ((), ())
    return list(minutes), list(success)


def _figure(rows: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure and its axes, below one another; inches."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        return figure, figure.subplots(rows, 1, sharex=True)


def _saved(figure: Any, ending: str) -> bytes:
    import matplotlib

    content = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        dated = {} if ending == ".png" else {"Date" if ending == ".svg" else "CreationDate": None}
        figure.savefig(content, format=ending.removeprefix("."), metadata=dated)
    return content.getvalue()


def _frames_formatter() -> Any:
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="")


def _plain(text: str) -> str:
    """A text in which matplotlib finds no formula, and that a line can hold."""
    return printable(text).replace("\\", "\\\\").replace("$", r"\$")
