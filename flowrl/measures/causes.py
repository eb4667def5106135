"""Success and ends of episodes and their causes, from the counts of a run or an evaluation.

A step's own success is the share of its ended attempts that are done. It is compared with that of
the run in which its expert was trained, because plans bring experts into other situations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from flowrl import runs
from flowrl.errors import FileRefusedError
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import PlannedStep, StepEnds

_WORSE = 0.1  # of success, below that of an expert's own run
_LEAST_LOST = 0.1  # of the attempts that have what later steps need
_TIME = "time limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRate:
    """The success rate of a step of the plan, with its 95 % Wilson interval."""

    skill: str
    count: int
    expert: int
    successes: int
    success_rate: float
    low: float
    high: float
    ends: StepEnds


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """The success of the merged experts at a plan."""

    graph: str
    generation: int
    skill: str
    episodes: int
    mean_episode_length: float
    mean_episode_return: float
    deaths: float  # share of the episodes that ended by neither success nor a time limit
    clipped_rewards: int
    steps: tuple[StepRate, ...]

    @property
    def success_rate(self) -> float:
        """The share of episodes that completed the whole plan."""
        return self.steps[-1].success_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoss:
    """The losses of a plan in one of its steps; shares are of all episodes that ended."""

    step: int  # from 1
    skill: str
    lost: float
    died: float
    cut: float
    cause: str  # the most frequent one; empty if nothing is lost
    success: float  # of its ended attempts
    own_success: float | None  # of those in its expert's own run, if that is known


@dataclass(frozen=True, slots=True, kw_only=True)
class LostNeed:
    """A need of later steps that a step lost; shares are of the attempts that ended alive."""

    need: str
    step: int
    skill: str
    before: float  # who had it after the step before that counts it, 1 if none does
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The reasons why a plan does not succeed more often."""

    skill: str
    episodes: int
    success: float
    losses: tuple[StepLoss, ...]  # in the order of the plan
    lost_needs: tuple[LostNeed, ...]  # most first
    remedy: str

    @property
    def worst(self) -> StepLoss:
        """The step in which most episodes end."""
        return max(self.losses, key=lambda loss: loss.lost)

    @property
    def line(self) -> str:
        """The explanation in one line."""
        worst = self.worst
        if not worst.lost:
            return "no episode was lost"
        line = f"{worst.lost:.0%} of its episodes end in step {worst.step}, {worst.skill}"
        line += f", mostly by {worst.cause}"
        if self.lost_needs:
            need = self.lost_needs[0]
            line += f"; {need.need} is lost in {need.skill}"
        return line


def explain(
    plan: Sequence[PlannedStep],
    ends: Sequence[StepEnds],
    *,
    own: Mapping[str, float],
    bound: bool,
) -> Explanation:
    """Explain the success of a plan.

    `ends` says what came of each step, `own` by skill the success of its ended attempts in the run
    in which its expert was trained. If `bound`, a step was done only with what later steps need.
    """
    episodes = sum(end.died + end.cut for end in ends) + ends[-1].done
    total = max(1, episodes)
    numbered = list(enumerate(zip(plan, ends, strict=True), 1))
    losses = tuple(
        _loss(number, *pair, total=total, own_success=own.get(pair[0].skill))
        for number, pair in numbered
    )
    needs = _lost_needs(plan, ends)
    success = ends[-1].done / total
    return Explanation(
        skill=plan[-1].skill,
        episodes=episodes,
        success=success,
        losses=losses,
        lost_needs=needs,
        remedy=_remedy(plan, losses, needs, bound=bound),
    )


def explanation_of(graph_paths: GraphPaths, skill: str, expert: int | None) -> Explanation | None:
    """Explain a skill's merged run; None without one that has counts.

    FileRefusedError: its files are damaged.
    """
    if expert is None or not graph_paths.archive(expert, skill).result_json.exists():
        return None
    return explanation_of_run(graph_paths, graph_paths.archive(expert, skill))


def explanation_of_run(graph_paths: GraphPaths, run_paths: RunPaths) -> Explanation | None:
    """Explain an ended run, whose needs are experts of the graph; None if it has no counts.

    FileRefusedError: its files are damaged.
    """
    return _explained(graph_paths, *_read(run_paths))


def explanation_so_far(
    graph_paths: GraphPaths, skill: str, expert: int | None
) -> Explanation | None:
    """Explain a skill's run that is under way or waits to go on, by its newest episodes.

    None without such a run, or before its first episodes have ended.
    """
    run_paths = graph_paths.run(expert or 0, skill)
    with suppress(FileRefusedError):  # it has none
        run = runs.read_run(run_paths)
        progress = runs.progress_of(run_paths, run.run_id)
        if progress is not None and len(progress.step_ends) == len(run.plan):
            return _explained(graph_paths, run, progress.step_ends)
    return None


def _explained(
    graph_paths: GraphPaths, run: runs.TrainingRun, ends: Sequence[StepEnds]
) -> Explanation | None:
    if not ends:
        return None
    own: dict[str, float] = {}
    for step in run.plan[:-1]:
        with suppress(FileRefusedError):
            _, of_own = _read(graph_paths.archive(step.expert, step.skill))
            if of_own and (success := success_of(of_own[-1])) is not None:
                own[step.skill] = success
    return explain(run.plan, ends, own=own, bound=bool(run.config.get("keep_needs")))


def _read(run_paths: RunPaths) -> tuple[runs.TrainingRun, tuple[StepEnds, ...]]:
    return runs.read_run(run_paths), runs.read_result(run_paths).step_ends


def success_of(end: StepEnds) -> float | None:
    """The share of a step's ended attempts that are done; None without any."""
    ended = end.done + end.died + end.cut
    return end.done / ended if ended else None


def _loss(
    number: int, step: PlannedStep, end: StepEnds, *, total: int, own_success: float | None
) -> StepLoss:
    causes = {_TIME: end.cut, **end.causes}
    causes.setdefault("death", end.died - sum(end.causes.values()))
    return StepLoss(
        step=number,
        skill=step.skill,
        lost=(end.died + end.cut) / total,
        died=end.died / total,
        cut=end.cut / total,
        cause=max(causes, key=lambda cause: causes[cause]) if end.died + end.cut else "",
        success=success_of(end) or 0.0,
        own_success=own_success,
    )


def _lost_needs(plan: Sequence[PlannedStep], ends: Sequence[StepEnds]) -> tuple[LostNeed, ...]:
    """The needs that a step lost in a tenth of its attempts or more."""
    shares: dict[str, float] = {}
    lost = []
    for number, (step, end) in enumerate(zip(plan, ends, strict=True), 1):
        alive = end.done + end.cut
        for need, kept in end.kept.items() if alive else ():
            before, after = shares.get(need, 1.0), kept / alive
            shares[need] = after
            if before - after >= _LEAST_LOST:
                found = LostNeed(
                    need=need, step=number, skill=step.skill, before=before, after=after
                )
                lost.append(found)
    return tuple(sorted(lost, key=lambda need: need.after - need.before))


def _remedy(
    plan: Sequence[PlannedStep],
    losses: Sequence[StepLoss],
    needs: Sequence[LostNeed],
    *,
    bound: bool,
) -> str:
    """One remedy: the first rule that holds."""
    worst, goal = max(losses, key=lambda loss: loss.lost), plan[-1].skill
    if not worst.lost:
        return "nothing to do"
    if needs and not bound:
        return "train with --keep_needs, so that a step counts only with what later steps need"
    if worst.skill != goal and (worst.own_success or 0.0) - worst.success > _WORSE:
        return (
            f"{worst.skill} succeeds in {worst.own_success:.0%} of the attempts of its own run: "
            f"train {goal} on, it meets situations here that it has not learned"
        )
    if worst.cut > worst.died:
        return f"give {worst.skill} more time (max_steps in its file), or a reward on the way"
    if worst.skill != goal:
        return f"train {worst.skill} on: its own success is the limit"
    return f"train {goal} on, or reward in its file what keeps the player alive"
