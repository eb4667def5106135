"""What a policy says of all offers of a run, held against the experts of one manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrl.errors import BusyError, ExpertIndexError
from flowrl.experts.manifest import Manifest
from flowrl.experts.merge import Candidate, Evidence, MergePolicy, Question, Verdict, judge


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A candidate and the folder that holds its arrays."""

    candidate: Candidate
    folder: Path
    copy: Path | None = None  # durable, of the candidate's digest, and the merge's to take


def questions(
    policy: MergePolicy, run_id: str, present: Manifest, offers: Sequence[Offer]
) -> tuple[Question, ...]:
    """What the policy has to know before it can decide; nothing of a run that is merged."""
    if run_id in present.merged:
        return ()
    answers = (_answer(policy, run_id, present, candidate=offer.candidate) for offer in offers)
    return tuple(answer for answer in answers if isinstance(answer, Question))


def decided(
    policy: MergePolicy,
    run_id: str,
    present: Manifest,
    *,
    offers: Sequence[Offer],
    evidence: Mapping[int, Evidence],
) -> dict[int, Verdict]:
    """The verdict on each offer, by expert.

    Raises:
      BusyError: the evidence is about another version than the one that counts now.
    """
    verdicts: dict[int, Verdict] = {}
    for offer in offers:
        expert = offer.candidate.expert
        told = evidence.get(expert)
        answer = _answer(policy, run_id, present, candidate=offer.candidate, evidence=told)
        if isinstance(answer, Question):
            raise BusyError(f"expert {expert} was merged by another run meanwhile; merge again")
        verdicts[expert] = answer
    return verdicts


def _answer(
    policy: MergePolicy,
    run_id: str,
    present: Manifest,
    *,
    candidate: Candidate,
    evidence: Evidence | None = None,
) -> Verdict | Question:
    current = present.experts.get(candidate.expert)
    if current is not None and current.skill != candidate.skill:
        raise ExpertIndexError(
            f"expert {candidate.expert} is that of {current.skill!r}, not of {candidate.skill!r}; "
            "train the skill as another expert"
        )
    return judge(policy, run_id=run_id, current=current, candidate=candidate, evidence=evidence)
