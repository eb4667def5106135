"""Reliability diagrams of a graph's judges; alone, because nothing else draws judges."""

from __future__ import annotations

from flowrl.errors import ConfigError
from flowrl.experts.merge import wilson
from flowrl.judging.report import read_reports
from flowrl.paths import GraphPaths
from flowrl.viewing.drawing import LEGEND, Picture, figure_and_axes, line_style, plain


def judges_picture(graph_paths: GraphPaths) -> Picture:
    """The share of positive labels over the scores of each judge that was measured.

    Bars are 95 % Wilson intervals. ConfigError if no judge was measured.
    """
    read = (one.calibration for one in read_reports(graph_paths))
    measured = [one for one in read if one.bins]
    if not measured:
        raise ConfigError(f"no judge was measured in {graph_paths.root}; use flowrl judge")
    figure, axes = figure_and_axes(1, (5.0, 4.4))
    axes.plot((0, 1), (0, 1), color="#888888", linewidth=0.8, label="scores that are true")
    rows = []
    for number, judge in enumerate(measured):
        scores = [one.score for one in judge.bins]
        shares = [one.positive for one in judge.bins]
        bounds = [wilson(round(one.items * one.positive), one.items) for one in judge.bins]
        below = [max(share - low, 0) for share, (low, _) in zip(shares, bounds, strict=True)]
        above = [max(high - share, 0) for share, (_, high) in zip(shares, bounds, strict=True)]
        label, style = plain(f"{judge.judge}, {judge.items}s"), line_style(number)
        axes.errorbar(scores, shares, yerr=(below, above), label=label, capsize=2, **style)
        rows += [
            {"judge": judge.judge, "items": one.items, "score": one.score, "positive": one.positive}
            for one in judge.bins
        ]
    axes.set(xlabel="score", ylabel="share of positive labels", xlim=(0, 1), ylim=(0, 1.02))
    axes.legend(**LEGEND)
    return Picture("Reliability of judges", figure, rows)
