"""The merge policies by name: what becomes of an expert that two runs have trained.

| policy          | of two copies of one expert                                    | costs       |
|-----------------|----------------------------------------------------------------|-------------|
| `frame_count`   | the one with more frames stays                                 | nothing     |
| `frame_average` | their mean, weighted by the frames since their common ancestor | seconds     |
| `eval_gate`     | the candidate stays if it does better in the same fresh worlds | a minute    |

Where a policy cannot do what it is for, it does as `frame_count` does and says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flowrl.config import MergePolicyName
from flowrl.experts.intervals import more_often
from flowrl.experts.merge import (
    Blended,
    Candidate,
    Compared,
    Evidence,
    FrameRule,
    Keep,
    MergePolicy,
    Question,
    Take,
    Unanswered,
    Verdict,
)
from flowrl.runs import ExpertVersion

_BY_FRAMES = FrameRule()


class FrameAverage:
    """The mean of both copies, weighted by what each side gained since their common ancestor.

    Only copies with a common ancestor are averaged: parameters of other origin do not fit one
    another. The weights are shares of frames, so nothing is ever extrapolated, and the mean of
    many copies is the same in whatever order they come.
    """

    def __call__(
        self,
        ancestor: ExpertVersion | None,
        current: ExpertVersion,
        candidate: Candidate,
        evidence: Evidence | None,
        /,
    ) -> Verdict | Question:
        """Take the blend, once it is made."""
        if ancestor is None or not descends(current, ancestor):
            why = "not averaged: the copies have no common ancestor"
            return _by_frames(current, candidate, why)
        question = Question(
            kind="blend",
            expert=candidate.expert,
            current=current.content,
            candidate=candidate.content,
            gains=(current.frames - ancestor.frames, candidate.gained),
        )
        match evidence:
            case Blended() if evidence.question == question:
                share = candidate.gained / sum(question.gains)
                return Take(
                    frames=current.frames + candidate.gained,
                    why=f"averaged, {share:.0%} of it the run's",
                    blend=evidence,
                )
            case Unanswered(why=why) if evidence.question == question:
                return _by_frames(current, candidate, f"not averaged: {why}")
            case _:
                return question


class EvalGate:
    """The candidate, when it succeeds significantly more often in the same fresh worlds.

    Worlds in which both copies succeed or both fail say nothing; of the others the candidate must
    have won more than half, by the lower end of a 95 % Wilson interval.
    """

    def __call__(
        self,
        ancestor: ExpertVersion | None,
        current: ExpertVersion,
        candidate: Candidate,
        evidence: Evidence | None,
        /,
    ) -> Verdict | Question:
        """Take the better one, once they are compared."""
        question = Question(
            kind="compare",
            expert=candidate.expert,
            current=current.content,
            candidate=candidate.content,
        )
        match evidence:
            case Compared() if evidence.question == question:
                return _better(candidate, evidence)
            case Unanswered(why=why) if evidence.question == question:
                return _by_frames(current, candidate, f"not compared: {why}")
            case _:
                return question


POLICIES: Mapping[MergePolicyName, MergePolicy] = {
    "frame_count": _BY_FRAMES,
    "frame_average": FrameAverage(),
    "eval_gate": EvalGate(),
}


def policy_named(name: MergePolicyName) -> MergePolicy:
    """The policy of `--merge_policy`."""
    return POLICIES[name]


def descends(version: ExpertVersion, ancestor: ExpertVersion) -> bool:
    """Whether a version was made from this very ancestor, directly or over other versions.

    A version's lineage is its parent's and one more run, so it begins with the lineages of all
    its ancestors.
    """
    return version.lineage[: len(ancestor.lineage)] == ancestor.lineage


def _better(candidate: Candidate, found: Compared) -> Verdict:
    figures = f"alone in {found.wins} of {found.episodes} worlds, what is there in {found.losses}"
    if more_often(found.wins, found.losses):
        return Take(frames=candidate.frames, why=f"better: it succeeded {figures}")
    return Keep(why=f"not better: the run's succeeded {figures}")


def _by_frames(current: ExpertVersion, candidate: Candidate, why: str) -> Verdict:
    verdict = _BY_FRAMES(candidate.ancestor, current, candidate, None)
    return replace(verdict, why=f"{verdict.why}; {why}")
