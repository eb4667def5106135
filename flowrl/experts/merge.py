"""The merge rules: which copy of an expert counts after a run; pure functions, no disk.

Several runs may start from one version of an expert (their *ancestor*) and finish in any order.
`decide` handles the unambiguous cases; a merge rule is asked only when two runs trained the same
expert. The rules, by the value of `--merge_policy`:

| rule            | of two copies of one expert                                    | costs       |
|-----------------|----------------------------------------------------------------|-------------|
| `frame_count`   | the one with more frames counts                                | nothing     |
| `frame_average` | their mean, weighted by the frames since their common ancestor | seconds     |
| `eval_gate`     | the candidate counts if it does better in the same new worlds  | a minute    |

A rule that cannot get its blend or comparison decides as `frame_count` and gives the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from flowrl.config import MergePolicyName
from flowrl.errors import ResultRefusedError
from flowrl.runs import ExpertVersion, Shapes
from flowrl.storage.records import Natural

_Z95 = 1.959963984540054  # the normal quantile of a two-sided 95 % interval
_MIN_PAIRS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An expert that a run trained; its arrays were read and are finite.

    The run adds to the ancestor's frames the environment steps in which this expert acted; with
    `--frame_accounting total` all its steps, by which an unused copy can win over one that learned.
    """

    expert: int
    skill: str
    ancestor: ExpertVersion | None  # None for a new expert
    gained: int  # the frames that the run added
    sha256: str  # of its files
    shapes: Shapes
    content: str  # the digest of its arrays
    folder: Path  # of its files
    success_rate: float | None = None  # of the run, if this is its skill's own expert
    anew: bool = False  # it takes the place of the version that counts, whatever that is

    @property
    def frames(self) -> int:
        """The frames of the ancestor and those that the run added."""
        return (self.ancestor.frames if self.ancestor else 0) + self.gained


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question of a merge rule about the arrays of two copies."""

    kind: Literal["blend", "compare"]
    expert: int
    current: str  # digest of the arrays of the version that counts now
    candidate: str  # digest of the candidate's arrays
    gains: tuple[Natural, Natural] = (0, 0)  # frames since the ancestor: current's, candidate's
    objective: str = ""  # by which two copies are compared; "" is success


@dataclass(frozen=True, slots=True, kw_only=True)
class Blended:
    """The weighted mean of both copies, saved in a folder."""

    kind: ClassVar[str] = "blended"
    question: Question
    folder: Path
    sha256: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Both copies in the same worlds: how often only one of them succeeded, or scored more."""

    kind: ClassVar[str] = "compared"
    question: Question
    wins: int  # worlds in which the candidate alone succeeded
    losses: int  # worlds in which the current version alone did
    ties: int
    broken: tuple[str, ...] = ()  # limits of the objective that the candidate does not keep

    @property
    def episodes(self) -> int:
        """The number of worlds in which both were tried."""
        return self.wins + self.losses + self.ties


@dataclass(frozen=True, slots=True, kw_only=True)
class Unanswered:
    """The question could not be answered."""

    kind: ClassVar[str] = "unanswered"
    question: Question
    why: str


Evidence = Blended | Compared | Unanswered


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepCurrent:
    """The version that counts now stays."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UseCandidate:
    """The candidate, or a blend of both copies, becomes the newest version."""

    why: str
    blend: Blended | None = None


MergeDecision = KeepCurrent | UseCandidate


# A rule is a pure function of (ancestor, current version, candidate, evidence), so that a merge can
# be repeated. It returns the copy that counts, or what must be found out first; if the evidence is
# about other versions than these, it asks again.
MergeRule = Callable[
    [ExpertVersion | None, ExpertVersion, Candidate, Evidence | None], MergeDecision | Question
]


def decide(
    rule: MergeRule,
    *,
    run_id: str,
    current: ExpertVersion | None,
    candidate: Candidate,
    evidence: Evidence | None = None,
) -> MergeDecision | Question:
    """Decide about a candidate, by the rule if need be; ResultRefusedError if its shapes differ."""
    if current is None:
        return UseCandidate(why="new expert")
    _refuse_other_shapes(current, candidate)
    ancestor = candidate.ancestor
    if candidate.content in {current.content, ancestor.content if ancestor else ""}:
        return KeepCurrent(why="the run did not change it")
    if any(entry.run_id == run_id for entry in current.lineage):
        return KeepCurrent(why="the run is in it already")
    if candidate.gained == 0:
        return KeepCurrent(why="it did not act in the run")
    if candidate.anew:
        return UseCandidate(why="its skill was trained anew")
    if ancestor is not None and ancestor.version == current.version:
        why = f"{candidate.frames} frames, and no other run has trained it meanwhile"
        return UseCandidate(why=why)
    if ancestor is not None and _first_run(ancestor) != _first_run(current):
        return KeepCurrent(why="its skill was trained anew meanwhile")
    return rule(ancestor, current, candidate, evidence)


def frame_count(
    ancestor: ExpertVersion | None,
    current: ExpertVersion,
    candidate: Candidate,
    evidence: Evidence | None = None,
    /,
) -> MergeDecision:
    """Use the candidate if it has more frames than the version that counts now."""
    frames = candidate.frames
    if frames > current.frames:
        return UseCandidate(why=f"{frames} frames over {current.frames}")
    return KeepCurrent(why=f"{current.frames} frames, the run's has {frames}")


def frame_average(
    ancestor: ExpertVersion | None,
    current: ExpertVersion,
    candidate: Candidate,
    evidence: Evidence | None,
    /,
) -> MergeDecision | Question:
    """Use the mean of both copies, weighted by the frames since their common ancestor.

    Parameters of different origins do not fit one another, so without such an ancestor the frames
    decide. The mean of many copies does not depend on their order.
    """
    if ancestor is None or not descends(current, ancestor):
        return _by_frames(current, candidate, "not averaged: the copies have no common ancestor")
    question = Question(
        kind="blend",
        expert=candidate.expert,
        current=current.content,
        candidate=candidate.content,
        gains=(current.frames - ancestor.frames, candidate.gained),
    )
    if evidence is None or evidence.question != question:
        return question
    if isinstance(evidence, Blended):
        share = candidate.gained / sum(question.gains)
        why = f"averaged, {share:.0%} of it the run's"
        return UseCandidate(why=why, blend=evidence)
    why = evidence.why if isinstance(evidence, Unanswered) else "it was compared"
    return _by_frames(current, candidate, f"not averaged: {why}")


def eval_gate(
    ancestor: ExpertVersion | None,
    current: ExpertVersion,
    candidate: Candidate,
    evidence: Evidence | None,
    /,
    *,
    objective: str = "",
) -> MergeDecision | Question:
    """Use the candidate if it succeeds significantly more often in the same new worlds.

    Worlds in which both copies succeed or both fail say nothing; of the others the candidate must
    have won more than half, by the lower end of a 95 % Wilson interval. With an objective
    (`flowrl.measures.objectives`) a world is won by the higher score, and all limits must be kept.
    """
    question = Question(
        kind="compare",
        expert=candidate.expert,
        current=current.content,
        candidate=candidate.content,
        objective=objective,
    )
    if evidence is None or evidence.question != question:
        return question
    if not isinstance(evidence, Compared):
        why = evidence.why if isinstance(evidence, Unanswered) else "it was blended"
        return _by_frames(current, candidate, f"not compared: {why}")
    wins, losses = evidence.wins, evidence.losses
    if evidence.broken:
        return KeepCurrent(why=f"the run's breaks a limit: {', '.join(evidence.broken)}")
    did = "scored more" if objective else "succeeded alone"
    figures = f"{did} in {wins} of {evidence.episodes} worlds, what is there in {losses}"
    if more_often(wins, losses):
        return UseCandidate(why=f"better: it {figures}")
    return KeepCurrent(why=f"not better: the run's {figures}")


MERGE_RULES: Mapping[MergePolicyName, MergeRule] = {
    "frame_count": frame_count,
    "frame_average": frame_average,
    "eval_gate": eval_gate,
}


def descends(version: ExpertVersion, ancestor: ExpertVersion) -> bool:
    """Return whether a version was made from this ancestor, directly or over other versions."""
    return version.lineage[: len(ancestor.lineage)] == ancestor.lineage


def _first_run(version: ExpertVersion) -> str:
    return version.lineage[0].run_id


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % score interval of a share, without continuity correction.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", Journal
    of the American Statistical Association 22 (1927), 209-212.

    >>> low, high = wilson(8, 10)
    >>> round(low, 3), round(high, 3)
    (0.49, 0.943)
    """
    share, z2 = successes / trials, _Z95**2
    middle = share + z2 / (2 * trials)
    spread = _Z95 * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2))
    scale = 1 + z2 / trials
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def newcombe(first: tuple[float, int], second: tuple[float, int]) -> tuple[float, float]:
    """The 95 % interval of the second share less the first; each with the trials that it is of.

    R. G. Newcombe, "Interval estimation for the difference between independent proportions",
    Statistics in Medicine 17 (1998), 873-890, method 10.
    """
    (was, _), (now, _), gap = first, second, second[0] - first[0]
    (was_low, was_high), (now_low, now_high) = (wilson(round(p * n), n) for p, n in (first, second))
    low = gap - math.hypot(now - now_low, was_high - was)
    return low, gap + math.hypot(now_high - now, was - was_low)


def more_often(wins: int, losses: int) -> bool:
    """Return whether wins outnumber losses by more than chance: the share's bound is over a half.

    For pairs of outcomes this is the test of Q. McNemar, "Note on the sampling error of the
    difference between correlated proportions or percentages", Psychometrika 12 (1947), 153-157. It
    rests on the normal distribution, so fewer than ten pairs that differ say nothing here.

    >>> more_often(9, 1), more_often(6, 4), more_often(4, 0)
    (True, False, False)
    """
    pairs = wins + losses
    return pairs >= _MIN_PAIRS and wilson(wins, pairs)[0] > 0.5


def _by_frames(current: ExpertVersion, candidate: Candidate, why: str) -> MergeDecision:
    decision = frame_count(candidate.ancestor, current, candidate)
    return replace(decision, why=f"{decision.why}; {why}")


def _refuse_other_shapes(current: ExpertVersion, candidate: Candidate) -> None:
    lines = [f"expert {candidate.expert} ({candidate.skill}) cannot be merged; train it again"]
    for leaf in sorted({*current.shapes, *candidate.shapes}):
        expected, actual = current.shapes.get(leaf), candidate.shapes.get(leaf)
        if expected != actual:
            lines += [f"- {leaf} {expected or 'absent'}", f"+ {leaf} {actual or 'absent'}"]
    if lines[1:]:
        raise ResultRefusedError("\n".join(lines))
