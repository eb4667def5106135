"""The record of a comparison: a leaf that the scheduler and the program that compares share.

It holds what a merge asks about two copies of an expert, and the answers. It lies in a folder of
the graph and not in the run's, where a trainer could put answers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from flowrl.experts.merge import Blended, Evidence, Question
from flowrl.storage import records

LOG = "comparison.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The questions of one merge, how often their job was launched, and their answers."""

    run_id: str
    run_folder: str  # its name among the training runs
    expert: int  # the run's new expert, by global index
    limit_seconds: float  # after which the job ends itself
    questions: tuple[Question, ...]
    launches: int = 0
    answers: tuple[Evidence, ...] = ()  # one for each question, or none yet

    def asks_the_same(self, other: Comparison) -> bool:
        """Whether the answers to one are the answers to the other."""
        return replace(self, launches=0, answers=()) == replace(other, launches=0, answers=())


def record_of(folder: Path) -> Path:
    """The record's file in the folder of a comparison."""
    return folder / "comparison.json"


def blend_of(folder: Path, expert: int) -> Path:
    """Where the job saves a blended expert."""
    return folder / "blends" / f"expert_{expert}"


def write(folder: Path, comparison: Comparison) -> None:
    """Write the record."""
    records.write(record_of(folder), comparison)


def read(folder: Path) -> Comparison | None:
    """The record of a comparison; None without one.

    Raises:
      FileRefusedError: the file is damaged.
    """
    if not record_of(folder).exists():
        return None
    found = records.read(record_of(folder), Comparison)
    # The graph's folder may have moved since the record was written.
    answers = tuple(
        replace(answer, folder=blend_of(folder, answer.question.expert))
        if isinstance(answer, Blended)
        else answer
        for answer in found.answers
    )
    return replace(found, answers=answers)
