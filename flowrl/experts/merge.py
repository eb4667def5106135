"""What becomes of an expert that a run brings back: pure rules, no disk.

Several runs may start from one version of an expert (their *ancestor*) and finish in any order. A
policy looks at the ancestor, at the version that counts now and at the candidate, and says whether
the candidate takes its place. The default is the frame rule: the version with most frames stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from flowrl.config import FrameAccounting
from flowrl.runs import Ancestor, Shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What one run gave to an expert: so many frames of learning."""

    run_id: str
    frames: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertVersion:
    """One immutable version of an expert; the frames of its lineage sum up to `frames`."""

    index: int
    skill: str
    version: str
    frames: int
    sha256: str  # of its files
    content: str  # digest of its arrays
    shapes: Shapes
    lineage: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An expert as a run brings it back; a new expert has no ancestor."""

    expert: int
    skill: str
    ancestor: Ancestor | None
    acted: int  # environment steps of the run in which this expert acted
    total: int  # environment steps of the whole run
    sha256: str  # of its files
    content: str  # digest of its arrays
    shapes: Shapes

    @property
    def ancestor_frames(self) -> int:
        """The frames that the expert had before the run."""
        return self.ancestor.frames if self.ancestor else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What is there stays."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """The candidate becomes the expert's newest version, with so many frames."""

    frames: int
    why: str


Verdict = Keep | Take


class MergePolicy(Protocol):
    """Judges a candidate; pure, so that a merge can be repeated after a crash."""

    def __call__(
        self, ancestor: Ancestor | None, current: ExpertVersion | None, candidate: Candidate, /
    ) -> Verdict:
        """Whether the candidate takes the place of `current`, None for a new expert."""
        ...


@dataclass(frozen=True, slots=True)
class FrameRule:
    """The frame-count heuristic: keep the version with most frames; ties keep what is there.

    `accounting` says what a run adds to its ancestor's frames: "acted" the steps in which this
    expert acted, "total" all steps of the run. Crediting unused experts with every step lets an
    unused copy win over one that learned, so "acted" is the default.
    """

    accounting: FrameAccounting = "acted"

    def __call__(
        self, ancestor: Ancestor | None, current: ExpertVersion | None, candidate: Candidate, /
    ) -> Verdict:
        """Take the candidate when it has more frames than the version that counts now."""
        frames = self.frames(candidate)
        if current is None:
            return Take(frames=frames, why="new expert")
        if candidate.content in {current.content, ancestor.content if ancestor else ""}:
            return Keep(why="the run did not change it")
        if frames > current.frames:
            return Take(frames=frames, why=f"{frames} frames over {current.frames}")
        return Keep(why=f"{current.frames} frames, the run's has {frames}")

    def frames(self, candidate: Candidate) -> int:
        """The candidate's frames: those of its ancestor and what the run added."""
        gained = candidate.acted if self.accounting == "acted" else candidate.total
        return candidate.ancestor_frames + gained
