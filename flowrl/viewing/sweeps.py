"""Pictures of sweeps: best scores over cost, points, importance of dimensions, the front of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any

import numpy as np

from flowrl.errors import ConfigError
from flowrl.measures.objectives import MEASURES, parse_objective, read_curve, run_figures
from flowrl.tuning.search import read_budget
from flowrl.tuning.space import SearchInput
from flowrl.tuning.trials import BegunTrial, Sweep, TrialOutcome, searched
from flowrl.viewing import drawing
from flowrl.viewing.drawing import Picture, plain

_SHUFFLES = 50  # of a dimension's values
_LEAST = 4  # trials from which importance is told


def sweep_picture(sweep: Sweep, tried: Sequence[BegunTrial]) -> Picture:
    """The trials of a sweep's search that have ended; ConfigError if none has a score yet."""
    if sweep.record.candidates:
        place = sweep.sweep_paths.training_runs
        raise ConfigError(f"{sweep.sweep_paths.root} has no dimensions; plot the runs in {place}")
    ended = [(each, each.outcome) for each in searched(tried) if each.outcome]
    scored = [each for each, _ in ended if each.score is not None]
    if not scored:
        raise ConfigError(f"no trial of {sweep.sweep_paths.root} has a score yet; plot it later")
    weights = parse_objective(sweep.search.objective).weights
    pair = [name for name, weight in weights.items() if weight]
    figure, ((history, points), (importances, front)) = drawing.figure_and_axes(
        2, (10.0, 6.6), ncols=2
    )
    title = f"{sweep.record.skill}: {len(scored)} of {len(ended)} trials have a score"
    figure.suptitle(plain(title))
    _history(history, sweep, ended)
    _points(points, sweep, scored)
    figure.colorbar(drawing.scale_of_shares(), ax=points, label="score", shrink=0.7)
    _importance(importances, sweep, [each for each, _ in ended])
    if len(pair) == 2:
        _front(front, sweep, scored, pair)
    else:
        front.axis("off")
    facts = ({"trial": each.trial.number, **asdict(outcome)} for each, outcome in ended)
    rows = [fact | dict(each.trial.point) for fact, (each, _) in zip(facts, ended, strict=True)]
    return Picture(title, figure, rows)


def _history(axes: Any, sweep: Sweep, ended: Sequence[tuple[BegunTrial, TrialOutcome]]) -> None:
    """Scores over the cost so far, in the order of trials, and the best until then."""
    costs = list(accumulate(sweep.cost(outcome) for _, outcome in ended))
    scores = [outcome.score or 0.0 for _, outcome in ended]
    looks = [
        "failed, x" if outcome.score is None else "cut, v" if outcome.cut_at else "ended, o"
        for _, outcome in ended
    ]
    for number, look in enumerate(dict.fromkeys(looks)):
        own = [place for place, other in enumerate(looks) if other == look]
        style = {"marker": look[-1], "color": drawing.COLOURS[number], "label": look[:-3]}
        axes.plot([costs[n] for n in own], [scores[n] for n in own], ls="", **style)
    best = list(accumulate(scores, max))
    axes.step(costs, best, where="post", color="black", label="best so far")
    axes.set(xlabel=f"{read_budget(sweep.search.budget)[1]} so far", ylabel="score")
    drawing.frames_on(axes.xaxis)
    axes.legend(**drawing.LEGEND)


def _points(axes: Any, sweep: Sweep, scored: Sequence[BegunTrial]) -> None:
    """A line for each trial through its values, all scaled to their range; the best on top."""
    dimensions = sweep.space.dimensions
    colours = drawing.scale_of_shares().to_rgba
    for each in sorted(scored, key=lambda one: one.score or 0.0):
        axes.plot(sweep.space.to_unit(each.trial.point), color=colours(each.score), marker=".")
    for place, each in enumerate(dimensions):
        low, high = (plain(drawing.said(each.value(unit))) for unit in (0.0, 1.0))
        axes.annotate(high, (place, 1.03), ha="center", fontsize=7)
        axes.annotate(low, (place, -0.03), ha="center", va="top", fontsize=7)
    axes.set_xticks(range(len(dimensions)), [plain(each.name) for each in dimensions], rotation=20)
    axes.set(ylim=(-0.12, 1.1), yticks=())
    axes.grid(axis="x")


def importance(model: Any, points: np.ndarray) -> np.ndarray:
    """Return the permutation importance of each dimension, f64[d], by a model of points [n, d].

    It is the share of the model's variance over the trials that is lost when a dimension's values
    are shuffled among them; shares may sum to more than 1.
    """
    rng, told = np.random.default_rng(0), model.predict(points)[0]
    lost = np.zeros(points.shape[1])
    for column in range(len(lost)):
        for _ in range(_SHUFFLES):
            moved = points.copy()
            moved[:, column] = rng.permutation(moved[:, column])
            lost[column] += np.mean((model.predict(moved)[0] - told) ** 2) / _SHUFFLES
    return lost / (2 * told.var() or 1.0)


def _importance(axes: Any, sweep: Sweep, ended: Sequence[BegunTrial]) -> None:
    if sum(each.score is not None and not each.cut_at for each in ended) < _LEAST:
        axes.axis("off")
        return
    from flowrl.tuning.surrogate import fit_models  # loads scipy

    history = [sweep.observation(each) for each in ended]
    models = fit_models(SearchInput(space=sweep.space, history=history))
    found = importance(models.score, models.points)
    names, order = [plain(each.name) for each in sweep.space.dimensions], np.argsort(found)
    axes.barh([names[place] for place in order], found[order], color=drawing.COLOURS[0])
    axes.set(xlabel="permutation importance: share of the score's variance", xlim=(0, None))


def _front(axes: Any, sweep: Sweep, scored: Sequence[BegunTrial], pair: Sequence[str]) -> None:
    """Both measures of each trial in their scores, and the trials that none surpasses in both."""
    points, how = [], {"budget_frames": sweep.horizon, "goal": sweep.base.success_state_rate}
    for each in scored:
        if curve := read_curve(sweep.run(each.trial.number).metrics):
            figures = run_figures(curve, curve[-1].success, **how)
            points.append(tuple(MEASURES[name].score(figures[name]) for name in pair))
    front = sorted(p for p in points if all(q == p or q[0] < p[0] or q[1] < p[1] for q in points))
    for label, dots, style in (("trials", points, ".C7"), ("front", front, "o-k")):
        axes.plot([one for one, _ in dots], [other for _, other in dots], style, label=label)
    axes.set(xlabel=f"{plain(pair[0])}, scored", ylabel=f"{plain(pair[1])}, scored")
    axes.legend(**drawing.LEGEND)
