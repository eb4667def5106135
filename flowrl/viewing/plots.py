"""Pictures of graphs: when their skills trained, what needs what, and graphs side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import networkx as nx

from flowrl.errors import ConfigError, FileRefusedError
from flowrl.experts.merge import newcombe, wilson
from flowrl.measures.objectives import Curve, read_curve
from flowrl.paths import GraphPaths, RunPaths
from flowrl.reports.status import SkillRow
from flowrl.viewing import drawing
from flowrl.viewing.curves import Lines, read_lines, wrong_value
from flowrl.viewing.drawing import Picture, plain
from flowrl.viewing.layout import graph_of, places

_OF_STATUS = {"completed": "#009E73", "below goal": "#E69F00", "failed": "#D55E00"}
Rate = tuple[float, int]  # a share, and the number of episodes that it is of
_OTHER = "#0072B2"  # what still runs or waits
_RETRY = {"hatch": "xxx", "edgecolor": "#555555"}
# How high the bar of a status is, and its look; that of a run has its skill's colour.
_PHASES: Mapping[str, tuple[str, float, Any]] = {
    "waiting": ("waits for a slot, or to retry", 0.12, {"facecolor": "#999999"}),
    "preparing": ("prepares", 0.8, {"facecolor": "white", "edgecolor": "#555", "hatch": "////"}),
    "running": ("trains", 0.8, {}),
    "merging": ("merges", 0.8, {"facecolor": "#333333"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar of a Gantt chart: a skill had one status; minutes are those of the graph."""

    skill: str
    begun: float
    ended: float
    status: str = "running"
    retry: bool = False  # its attempt is not the first


def bars(lines: Lines, needs: Mapping[str, Collection[str]]) -> list[Bar]:
    """The times of waiting, preparing, training and merging, from events.jsonl.

    What is under way ends with the last line; a skill waits for a slot once its needs are met.
    """
    moments = [_moment(line) for line in lines]
    minutes = [(moment - moments[0]).total_seconds() / 60 for moment in moments]
    under_way: dict[str, Bar] = {}
    met: dict[str, float] = {}  # when a skill was completed first
    found: list[Bar] = []
    for minute, line in zip(minutes, lines, strict=True):
        skill, status, attempt = (line.get(key) for key in ("skill", "status", "attempt"))
        if not isinstance(skill, str) or not isinstance(status, str):
            continue  # a line about the graph
        if bar := under_way.pop(skill, None):
            found.append(replace(bar, ended=minute))
        if status in _PHASES:
            retry = type(attempt) is int and attempt > 1
            bar = Bar(skill=skill, begun=minute, ended=minute, status=status, retry=retry)
            under_way[skill] = bar
        elif status == "completed":
            met.setdefault(skill, minute)
    found += [replace(bar, ended=minutes[-1]) for bar in under_way.values()]
    for place, bar in enumerate(found):
        if bar.status == "waiting":
            since = (met.get(one, bar.ended) for one in needs.get(bar.skill, ()))
            found[place] = replace(bar, begun=max(bar.begun, *since, 0.0))
    return [bar for bar in found if bar.begun < bar.ended or bar.status == "running"]


def _moment(line: Mapping[str, Any]) -> datetime:
    try:
        return datetime.fromisoformat(str(line.get("at"))).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise wrong_value(line, "at", "time") from error


def graph_picture(graph_paths: GraphPaths, rows: Sequence[SkillRow]) -> Picture:
    """A row for each skill over the minutes of the graph: what it did then, and its success.

    ConfigError if nothing has trained yet.
    """
    needs = {row.skill: row.needs for row in rows}
    found = bars(read_lines(graph_paths.events), needs)
    names = list(dict.fromkeys(bar.skill for bar in found if bar.status == "running"))
    if not names and any(row.expert is not None for row in rows):
        what = f"{graph_paths.events} does not say when skills trained"
        raise FileRefusedError(f"{what}; restore it from a copy, or plot a SKILL or --graph")
    if not names:
        raise ConfigError(f"nothing in {graph_paths.root} has trained yet; plot it later")
    by_name = {row.skill: row for row in rows}
    figure, axes = drawing.figure_and_axes(1, (9.0, 1.3 + 0.32 * len(names)))
    for place, name in enumerate(names):
        row = by_name.get(name)
        word = "" if row is None else "below goal" if row.below_goal else row.status
        colour = _OF_STATUS.get(word, _OTHER)
        own = [bar for bar in found if bar.skill == name]
        for bar in own:
            _, height, look = _PHASES[bar.status]
            again = _RETRY if bar.retry and bar.status == "running" else {}
            width = max(bar.ended - bar.begun, 0.02)
            look = {"facecolor": _pale(colour), "linewidth": 0, **look, **again}
            axes.barh(place, width, height, bar.begun, **look)
        runs = [bar for bar in own if bar.status == "running"]
        if row is not None and row.success_rate is not None:
            newest = newest_run(graph_paths, row)
            minutes, success = _over_minutes(read_curve(newest.metrics) if newest else (), runs)
            floor = place + 0.4
            tops = [floor - 0.8 * share for share in success]
            axes.fill_between(minutes, tops, floor, color=colour, linewidth=0)
            end = max(bar.ended for bar in own)
            axes.annotate(f" {row.success_rate:.0%}", (end, place), va="center", fontsize=8)
    axes.set(xlabel="minutes", ylim=(len(names) - 0.4, -0.6), xlim=(0, None))
    axes.set_yticks(range(len(names)), [*map(plain, names)])
    axes.grid(axis="x", alpha=0.25)
    _explain(figure)
    return Picture(str(graph_paths.root), figure, [asdict(bar) for bar in found])


def _pale(colour: str) -> list[float]:
    """Return a colour mixed with white; transparent bars would have transparent hatches."""
    return [1 - 0.3 * (1 - int(colour[at : at + 2], 16) / 255) for at in (1, 3, 5)]


def _explain(figure: Any) -> None:
    """Say at the bottom what each look of a bar means."""
    from matplotlib.patches import Patch

    looks = [({"facecolor": _pale(_OTHER), **look}, label) for label, _, look in _PHASES.values()]
    looks += [({"facecolor": "white", **_RETRY}, "trains on, or again after a failure")]
    looks += [({"facecolor": colour}, word) for word, colour in _OF_STATUS.items()]
    patches = [Patch(label=label, **look) for look, label in looks]
    figure.legend(handles=patches, ncols=4, loc="outside lower center", **drawing.LEGEND)


def newest_run(graph_paths: GraphPaths, row: SkillRow) -> RunPaths | None:
    """The folder of a skill's newest run, or the archive; None if it has had no run."""
    if row.expert is None:
        return None
    run = graph_paths.run(row.expert, row.skill)
    return run if run.run_json.exists() else graph_paths.archive(row.expert, row.skill)


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


def needs_picture(title: str, rows: Sequence[SkillRow]) -> Picture:
    """The graph of skills, each right of all that it needs, coloured by its success.

    ConfigError if there is no skill.
    """
    if not rows:
        raise ConfigError(f"{title} has no skill yet; plot it later")
    graph = graph_of({row.skill: row.needs for row in rows})
    spots = places(graph)
    columns = 1 + max(column for column, _ in spots.values())
    most = 1 + 2 * max(row for _, row in spots.values())
    figure, axes = drawing.figure_and_axes(1, (1.2 + 1.6 * columns, 0.8 + 0.55 * most))
    for one, name in nx.transitive_reduction(graph).edges:
        (x, y), (end, height) = spots[one], spots[name]
        arrow = {"arrowstyle": "-|>", "color": "#888888", "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (end - 0.27, height), (x, y), arrowprops=arrow, zorder=1)
    scale = drawing.scale_of_shares()
    figure.colorbar(scale, ax=axes, label="success in training", shrink=0.7, pad=0.02)
    for row in rows:
        fill, ink = "white", "black"
        lines = [*map(plain, textwrap.wrap(row.skill, 14)[:3])]
        if (share := row.success_rate) is not None:
            fill, ink = scale.to_rgba(share), "white" if share < 0.6 else "black"
            lines.append(f"{share:.0%}")
        look = {"bbox": {"boxstyle": "round,pad=0.4", "facecolor": fill, "edgecolor": "#555555"}}
        look |= {"ha": "center", "va": "center", "fontsize": 7, "color": ink}
        axes.text(*spots[row.skill], "\n".join(lines), **look)
    axes.set(title=plain(title), xlim=(-0.5, columns - 0.5), ylim=(most / 2, -most / 2))
    axes.axis("off")
    table = [
        {
            "skill": row.skill,
            "column": spots[row.skill][0],
            "success": row.success_rate,
            "needs": ", ".join(row.needs),
        }
        for row in rows
    ]
    return Picture(title, figure, table)


def compare_picture(shares: Mapping[str, Mapping[str, Rate]]) -> Picture:
    """The success of skills by graph, with 95 % Wilson intervals.

    The table has the differences to the first graph, with Newcombe's intervals. ConfigError if
    there is no success yet.
    """
    names = list(dict.fromkeys(name for own in shares.values() for name in own))
    if not names:
        raise ConfigError(f"no skill of {' and '.join(shares)} has success yet; plot it later")
    height = 1.0 + (0.2 + 0.14 * len(shares)) * len(names)
    figure, axes = drawing.figure_and_axes(1, (8.0, height))
    for number, (label, own) in enumerate(shares.items()):
        look = {"color": drawing.COLOURS[number % 7], "marker": "osD^v"[number % 5]}
        shift = 0.6 * ((number + 0.5) / len(shares) - 0.5)
        for place, name in enumerate(names):
            if name in own:
                share, episodes = own[name]
                bounds = wilson(round(share * episodes), episodes)
                axes.plot(bounds, [place + shift] * 2, color=look["color"])
        shown = [(own[name][0], place + shift) for place, name in enumerate(names) if name in own]
        axes.plot(*zip(*shown or [((), ())], strict=True), ls="", label=plain(label), **look)
    axes.set(xlim=(None, 1.02), ylim=(len(names) - 0.5, -0.5))
    axes.set(xlabel="success in training, 95 % Wilson intervals")
    axes.set_yticks(range(len(names)), [*map(plain, names)])
    axes.grid(axis="x", alpha=0.25)
    axes.legend(**drawing.BESIDE)
    first, *others = shares
    table = [
        {"skill": name, "graph": other, "beside": first}
        | _difference(shares[first].get(name), shares[other].get(name))
        for other in others
        for name in names
    ]
    return Picture(" · ".join(shares), figure, table)


def _difference(beside: Rate | None, own: Rate | None) -> dict[str, float | None]:
    """Two shares, the second less the first, and its interval."""
    (here, episodes), (there, others) = own or (None, None), beside or (None, None)
    found = {"success": here, "episodes": episodes}
    found |= {"success beside": there, "episodes beside": others}
    gap = own[0] - beside[0] if beside and own else None
    low, high = newcombe(beside, own) if beside and own else (None, None)
    return {**found, "difference": gap, "low": low, "high": high}
