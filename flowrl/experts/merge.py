"""What becomes of an expert that a run brings back: pure rules, no disk.

Several runs may start from one version of an expert (their *ancestor*) and finish in any order.
`judge` decides all that needs no opinion, by the same rules for everybody; only then a policy looks
at the ancestor, at the version that counts now and at the candidate, and says what becomes of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from flowrl.config import FrameAccounting
from flowrl.errors import ResultRefusedError
from flowrl.experts.array_check import FLOAT
from flowrl.runs import ExpertVersion, Shapes
from flowrl.storage.records import Natural


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An expert as a run brings it back, its arrays as they were read; a new one has no ancestor.

    `accounting` says what the run adds to the ancestor's frames: "acted" the steps in which this
    expert acted, "total" all steps of the run. Crediting unused experts with every step lets an
    unused copy win over one that learned, so "acted" is the default.
    """

    expert: int
    skill: str
    ancestor: ExpertVersion | None
    acted: int  # environment steps of the run in which this expert acted
    total: int  # environment steps of the whole run
    sha256: str  # of its files
    content: str  # digest of its arrays
    shapes: Shapes
    dtypes: frozenset[str]  # of its leaves
    not_finite: tuple[str, ...]  # leaves that hold NaN or an infinity
    accounting: FrameAccounting = "acted"

    @property
    def ancestor_frames(self) -> int:
        """The frames that the expert had before the run."""
        return self.ancestor.frames if self.ancestor else 0

    @property
    def gained(self) -> int:
        """The frames that the run added."""
        return self.acted if self.accounting == "acted" else self.total

    @property
    def frames(self) -> int:
        """The candidate's frames: those of its ancestor and what the run added."""
        return self.ancestor_frames + self.gained


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What has to be found out with the arrays of two copies before a policy can decide."""

    kind: Literal["blend", "compare"]
    expert: Natural
    current: str  # digest of the arrays that count now
    candidate: str  # digest of the candidate's arrays
    gains: tuple[Natural, Natural] = (0, 0)  # frames since the ancestor: current's, candidate's


@dataclass(frozen=True, slots=True, kw_only=True)
class Blended:
    """The weighted mean of both copies, made and durable in a folder."""

    kind: ClassVar[str] = "blended"
    question: Question
    folder: Path
    sha256: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Both copies in the same worlds: how often only the one, or only the other, succeeded."""

    kind: ClassVar[str] = "compared"
    question: Question
    wins: int  # worlds in which the candidate alone succeeded
    losses: int  # worlds in which the current version alone did
    ties: int

    @property
    def episodes(self) -> int:
        """The worlds that both were tried in."""
        return self.wins + self.losses + self.ties


@dataclass(frozen=True, slots=True, kw_only=True)
class Unanswered:
    """It could not be found out."""

    kind: ClassVar[str] = "unanswered"
    question: Question
    why: str


Evidence = Blended | Compared | Unanswered


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What is there stays."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """The candidate, or a blend of both, becomes the newest version, with so many frames."""

    frames: int
    why: str
    blend: Blended | None = None


Verdict = Keep | Take


class MergePolicy(Protocol):
    """Judges two copies of an expert; pure, so that a merge can be repeated after a crash."""

    def __call__(
        self,
        ancestor: ExpertVersion | None,
        current: ExpertVersion,
        candidate: Candidate,
        evidence: Evidence | None,
        /,
    ) -> Verdict | Question:
        """Which copy stays, or what must be found out first; `evidence` may be of another time."""
        ...


def judge(
    policy: MergePolicy,
    *,
    run_id: str,
    current: ExpertVersion | None,
    candidate: Candidate,
    evidence: Evidence | None = None,
) -> Verdict | Question:
    """What becomes of a candidate; no policy is asked about what admits one answer only.

    Raises:
      ResultRefusedError: its arrays are not finite or have another form than the current ones, or
        the policy gives it frames that its lineage cannot have.
    """
    _refuse(candidate, _differences(current, candidate))
    if current is None:
        return Take(frames=candidate.frames, why="new expert")
    ancestor = candidate.ancestor
    if candidate.content in {current.content, ancestor.content if ancestor else ""}:
        return Keep(why="the run did not change it")
    if any(part.run_id == run_id for part in current.lineage):
        return Keep(why="the run is in it already")
    if candidate.gained == 0:
        return Keep(why="it did not act in the run")
    if ancestor is not None and ancestor.version == current.version:
        why = f"{candidate.frames} frames, and nobody else has trained it meanwhile"
        return Take(frames=candidate.frames, why=why)
    verdict = policy(ancestor, current, candidate, evidence)
    _refuse(candidate, _wrong_frames(current, candidate, verdict))
    return verdict


class FrameRule:
    """The frame-count heuristic: keep the version with most frames; ties keep what is there."""

    def __call__(
        self,
        ancestor: ExpertVersion | None,
        current: ExpertVersion,
        candidate: Candidate,
        evidence: Evidence | None = None,
        /,
    ) -> Verdict:
        """Take the candidate when it has more frames than the version that counts now."""
        frames = candidate.frames
        if frames > current.frames:
            return Take(frames=frames, why=f"{frames} frames over {current.frames}")
        return Keep(why=f"{current.frames} frames, the run's has {frames}")


def _differences(current: ExpertVersion | None, candidate: Candidate) -> Iterator[str]:
    for leaf in candidate.not_finite:
        yield from _differ(leaf, "finite", "NaN or infinite")
    if candidate.dtypes != {FLOAT}:
        yield from _differ("dtypes", FLOAT, ", ".join(sorted(candidate.dtypes)) or "none")
    if current is not None and current.shapes != candidate.shapes:
        for leaf in sorted({*current.shapes, *candidate.shapes}):
            wanted, found = current.shapes.get(leaf), candidate.shapes.get(leaf)
            if wanted != found:
                yield from _differ(leaf, wanted or "absent", found or "absent")


def _wrong_frames(
    current: ExpertVersion, candidate: Candidate, verdict: Verdict | Question
) -> Iterator[str]:
    """A lineage that does not sum up to the frames could never be read again."""
    if not isinstance(verdict, Take):
        return
    if verdict.blend is not None and verdict.frames != current.frames + candidate.gained:
        yield from _differ("frames", current.frames + candidate.gained, verdict.frames)
    elif verdict.frames < candidate.ancestor_frames:
        yield from _differ("frames", f"at least {candidate.ancestor_frames}", verdict.frames)


def _differ(what: str, wanted: Any, found: Any) -> Iterator[str]:
    yield f"- {what} {wanted}"
    yield f"+ {what} {found}"


def _refuse(candidate: Candidate, differences: Iterator[str]) -> None:
    if lines := list(differences):
        heading = f"expert {candidate.expert} ({candidate.skill}) cannot be merged; train it again"
        raise ResultRefusedError("\n".join([heading, *lines]))
