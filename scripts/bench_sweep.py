"""How well the methods of a sweep search at equal cost: `python scripts/bench_sweep.py`.

Problems with a known best, each with noise of its own scale, 20 seeds, one trial at a time:

- learning curve: five hyper-parameters and the frames of a trial (a factor of 100), which are its
  cost. A trial comes up to quality(x) · (1 - exp(-frames / time(x))), plus noise of 0.02; the
  best parameters, their weights, and the one that learning's speed hangs on differ from seed to
  seed. The budget is 20 trials of most frames.
- hartmann, cost unrelated: Hartmann's function of six dimensions (times 1, at most 3.32), noise of
  0.05. A trial costs from 1 to 30 by one coordinate, which is another from seed to seed. The budget
  is 80 trials of mean cost.
- hartmann, equal cost: the same, every trial costs 1; 80 trials.
- mixed 0 to mixed 4: spaces that `mixed_spaces.py` draws, with choices, a power of two that drives
  the cost, and points that fail. The budget is 40 trials of mean cost, failed ones among them.

A sweep has at most 150 trials. One that would end over the budget does not count. The regret of a
sweep is the best that could be had, less what the trial with the best (noisy) score is truly worth.
A ratio is the mean regret of the baseline over ours; the interval is of 95 %, from 2,000 bootstrap
samples of the seeds.
Pruning is measured on the first problem: frames until a trial of most frames is truly worth as much
as the best of 20 random ones. `--methods`, `--problems` and `--seeds` choose; with `--keep FILE` a
later call goes on with the sweeps that are missing. Without `--problems` a real trainer is started,
too: seconds to the first update of a first trial, and of a second one with other numbers.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from bench_startup import trial_row
from benchmarking import Row, arguments, report
from mixed_spaces import MixedSpace

from flowrl.tuning.pruning import should_prune
from flowrl.tuning.search import suggest
from flowrl.tuning.space import Dimension, Observation, Point, SearchInput, Space

UNIT_FIELDS = ("gamma", "gae_lambda", "ent_coef", "vf_coef", "clip_eps", "lr")
UNITS = tuple(Dimension(name=name, kind="uniform", low=0.0, high=1.0) for name in UNIT_FIELDS)
LEAST, MOST = 1.0, 100.0  # frames of a trial, in units
MOST_TRIALS = 150
FRAMES = Dimension(name="max_grad_norm", kind="log_uniform", low=LEAST, high=MOST)
BASELINES = ("random", "tpe", "blind")
MIXED = 5  # spaces


@dataclass(frozen=True)
class Problem:
    """What a trial at unit coordinates truly scores and costs; one without a score fails."""

    space: Space
    score: Callable[[np.ndarray], float]
    cost: Callable[[np.ndarray], float]
    best: float
    noise: float
    budget: float


class LearningCurve:
    """A problem whose last coordinate is the frames of a trial."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng([1, seed])
        self.best_at = rng.uniform(0.2, 0.8, 5)
        self.weights = rng.permutation([12.0, 6.0, 3.0, 1.5, 0.75])
        self.fast = int(rng.integers(5))

    def reached(self, x: np.ndarray, frames: float) -> float:
        """Score of parameters `x[:5]` after so many frames."""
        quality = math.exp(-float(self.weights @ (x[:5] - self.best_at) ** 2))
        return quality * (1 - math.exp(-frames / (30 * 10 ** -x[self.fast])))

    def problem(self) -> Problem:
        """The problem in which a search chooses the frames, too."""

        def cost(x: np.ndarray) -> float:
            return LEAST * (MOST / LEAST) ** float(x[5])

        return Problem(
            space=Space((*UNITS[:5], FRAMES)),
            score=lambda x: self.reached(x, cost(x)),
            cost=cost,
            best=self.most(),
            noise=0.02,
            budget=20 * MOST,
        )

    def most(self) -> float:
        """The best score: only the coordinate that speed hangs on is not at its optimum."""
        points = np.tile(self.best_at, (1001, 1))
        points[:, self.fast] = np.linspace(0, 1, 1001)
        return max(self.reached(x, MOST) for x in points)


_ALPHA = np.array([1.0, 1.2, 3.0, 3.2])
_A = np.array(
    [
        [10, 3, 17, 3.5, 1.7, 8],
        [0.05, 10, 17, 0.1, 8, 14],
        [3, 3.5, 1.7, 10, 17, 8],
        [17, 8, 0.05, 10, 0.1, 14],
    ]
)
_P = 1e-4 * np.array(
    [
        [1312, 1696, 5569, 124, 8283, 5886],
        [2329, 4135, 8307, 3736, 1004, 9991],
        [2348, 1451, 3522, 2883, 3047, 6650],
        [4047, 8828, 8732, 5743, 1091, 381],
    ]
)
_HARTMANN_BEST = 3.32237
_DEAREST = 30.0


def hartmann(seed: int, *, equal: bool) -> Problem:
    """Hartmann's function, to be maximised."""
    rng = np.random.default_rng([2, seed])
    coordinate, dear_first = int(rng.integers(6)), bool(rng.integers(2))

    def cost(x: np.ndarray) -> float:
        place = 1 - x[coordinate] if dear_first else x[coordinate]
        return 1.0 if equal else _DEAREST ** float(place)

    mean = 1.0 if equal else (_DEAREST - 1) / math.log(_DEAREST)
    return Problem(
        space=Space(UNITS),
        score=lambda x: float(_ALPHA @ np.exp(-np.sum(_A * (x - _P) ** 2, axis=1))),
        cost=cost,
        best=_HARTMANN_BEST,
        noise=0.05,
        budget=80 * mean,
    )


def mixed(number: int, seed: int) -> Problem:
    """One of the spaces that are drawn."""
    drawn = MixedSpace(number, seed)
    return Problem(
        space=drawn.space(),
        score=lambda x: float(drawn.scores(x[None])[0]),
        cost=lambda x: float(drawn.costs(x[None])[0]),
        best=drawn.most(),
        noise=drawn.noise,
        budget=40 * drawn.mean_cost(),
    )


PROBLEMS: dict[str, Callable[[int], Problem]] = {
    "learning curve": lambda seed: LearningCurve(seed).problem(),
    "hartmann, cost unrelated": lambda seed: hartmann(seed, equal=False),
    "hartmann, equal cost": lambda seed: hartmann(seed, equal=True),
    **{f"mixed {number}": partial(mixed, number) for number in range(MIXED)},
}


def proposal(
    problem: Problem, history: Sequence[Observation], method: str, seed: int, *, left: float
) -> Point:
    """The next point of a sweep; `left` is the share of its budget."""
    if method == "tpe":
        import optuna_baseline  # of the extra dev

        return optuna_baseline.suggest(problem.space, history, seed=seed)
    given = SearchInput(
        space=problem.space, history=history, number=len(history), seed=seed, budget_left=left
    )
    return suggest("cooled" if method == "blind" else method, given)  # type: ignore[arg-type]


def regret(problem: Problem, method: str, seed: int) -> float:
    """What a sweep leaves to be gained; "blind" is cooled with every cost told as 1."""
    rng = np.random.default_rng([3, seed])
    history: list[Observation] = []
    spent, best_seen, worth = 0.0, -math.inf, 0.0
    while True:
        point = proposal(problem, history, method, seed, left=1 - spent / problem.budget)
        x = problem.space.to_unit(point)
        cost, truth = problem.cost(x), problem.score(x)
        spent += cost
        if spent > problem.budget or len(history) == MOST_TRIALS:
            return problem.best - worth
        seen = None if math.isnan(truth) else truth + problem.noise * rng.normal()
        if seen is not None and seen > best_seen:
            best_seen, worth = seen, truth
        told = 1.0 if method == "blind" else cost
        history.append(Observation(number=len(history), point=point, score=seen, cost=told))


class Kept:
    """Regrets that were measured, kept in a file if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path and path.exists() else []
        self._found: dict[str, float] = dict(json.loads(line) for line in lines)

    def of(self, problem: str, method: str, seeds: Sequence[int]) -> list[float]:
        """The regret of every seed."""
        return [self._one(problem, method, seed) for seed in seeds]

    def _one(self, problem: str, method: str, seed: int) -> float:
        key = f"{problem}, {method}, {seed}"
        if key not in self._found:
            self._found[key] = regret(PROBLEMS[problem](seed), method, seed)
            if self._path:
                with self._path.open("a") as file:
                    file.write(json.dumps([key, self._found[key]]) + "\n")
        return self._found[key]


def interval(baseline: Sequence[float], ours: Sequence[float] | None = None) -> tuple[float, float]:
    """Interval of the mean, or of the ratio of the means."""
    pairs = np.array([baseline, ours or [1.0] * len(baseline)]).T
    picked = np.random.default_rng(0).integers(len(pairs), size=(2000, len(pairs)))
    means = pairs[picked].mean(axis=1)
    low, high = np.percentile(means[:, 0] / means[:, 1], [2.5, 97.5])
    return float(low), float(high)


def compared(case: str, ours: Sequence[float], baseline: Sequence[float], what: str) -> Row:
    """A row with the ratio of the means; its interval stands in the unit."""
    low, high = interval(baseline, ours)
    mean, other = float(np.mean(ours)), float(np.mean(baseline))
    unit = f"{what}; ratio {low:.2f} to {high:.2f}"
    return Row(case=case, ours=mean, baseline=other, unit=unit, ratio=other / mean)


def searches(kept: Kept, problem: str, methods: Sequence[str], seeds: Sequence[int]) -> list[Row]:
    """The rows of one problem, and every method's mean with its interval on the terminal."""
    found = {method: kept.of(problem, method, seeds) for method in methods}
    for method, regrets in found.items():
        low, high = interval(regrets)
        sys.stdout.write(f"{problem}, {method}: {np.mean(regrets):.4f} [{low:.4f}, {high:.4f}]\n")
    return [
        compared(f"{problem}, cooled over {other}", found["cooled"], found[other], "regret")
        for other in BASELINES
        if {"cooled", other} <= found.keys()
    ]


def frames_to(curve: LearningCurve, seed: int, goal: float | None = None) -> tuple:
    """Frames until a trial of all frames is truly worth the goal, at random points; and the best.

    Without a goal nothing is pruned: the best of as many trials as the other problem's budget has.
    """
    rng = np.random.default_rng([4, seed])
    rungs = (MOST / 27, MOST / 9, MOST / 3)
    scores: dict[int, dict[float, float]] = {}
    spent, best, best_at = 0.0, -math.inf, 0.0
    for number in range(20 if goal is None else 1000):
        x, scores[number] = rng.random(5), {}
        noise = np.random.default_rng([5, seed, number])
        for frames in rungs:
            scores[number][frames] = curve.reached(x, frames) + 0.02 * noise.normal()
            if goal is not None and should_prune(number, scores):
                break
        else:
            frames = MOST
        spent += frames
        if frames == MOST and curve.reached(x, MOST) > best:
            best, best_at = curve.reached(x, MOST), spent
        if goal is not None and best >= goal:
            break
    return best_at, best


def pruning(seeds: Sequence[int]) -> Row:
    """Frames to the same confirmed score, without and with pruning."""
    baseline, best = zip(*(frames_to(LearningCurve(seed), seed) for seed in seeds), strict=True)
    goals = zip(seeds, best, strict=True)
    spent = [frames_to(LearningCurve(seed), seed, goal)[0] for seed, goal in goals]
    return compared("asha over none", spent, baseline, "frames to the same score")


def proposal_seconds() -> Row:
    """CPU time of one proposal at 200 trials, all models fitted anew."""
    problem = hartmann(0, equal=False)
    rng = np.random.default_rng(6)
    history = []
    for number in range(200):
        x = rng.random(6)
        point = problem.space.from_unit(x)
        score = problem.score(x) + problem.noise * rng.normal()
        history.append(Observation(number=number, point=point, score=score, cost=problem.cost(x)))
    taken = []
    for number in range(200, 206):
        began = time.process_time()
        given = SearchInput(space=problem.space, history=history, number=number, budget_left=0.5)
        suggest("cooled", given)
        taken.append(1e3 * (time.process_time() - began))
    milliseconds = statistics.median(taken)
    return Row(
        case="suggest at 200 trials, at most 300 ms",
        ours=milliseconds,
        baseline=300.0,
        unit="ms of CPU",
        ratio=300.0 / milliseconds,
    )


def main() -> int:
    """Measure what is asked for."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--methods", default=",".join(("cooled", *BASELINES)), help="which, by comma"
    )
    parser.add_argument("--problems", default="", help="only those whose name begins so")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="regrets, kept for a later call")
    options = parser.parse_args()
    methods, seeds = options.methods.split(","), range(3 if options.small else options.seeds)
    if options.small:
        methods = ["cooled", "tpe", "random"]
    rows: list[Row] = []
    for problem in PROBLEMS:
        if problem.startswith(options.problems):
            rows += searches(Kept(options.keep), problem, methods, seeds)
    if not options.problems:
        rows += [pruning(range(options.seeds)), proposal_seconds()]
    if not options.problems:
        rows.append(trial_row(rounds=1 if options.small else 3))
    report("sweep", rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
