"""What a merge asks of the program that compares experts, and what it answers: two files.

They lie in a folder of the graph and not in the run's, where a trainer could have put answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flowrl.experts.merge import Blended, Evidence, Question
from flowrl.storage import records


@dataclass(frozen=True, slots=True)
class Desk:
    """The paths of what is found out for one run."""

    folder: Path

    @property
    def inquiry(self) -> Path:
        """What is asked."""
        return self.folder / "questions.json"

    @property
    def answers(self) -> Path:
        """What was found out; written last, at one stroke."""
        return self.folder / "answers.json"

    @property
    def tries(self) -> Path:
        """How often the program was started."""
        return self.folder / "tries.json"

    @property
    def worker(self) -> Path:
        """The program's process, by pid and birth."""
        return self.folder / "process.json"

    @property
    def lock(self) -> Path:
        """Held as long as the program lives."""
        return self.folder / "comparing.lock"

    @property
    def log(self) -> Path:
        """What the program said."""
        return self.folder / "comparing.log"

    def blend(self, expert: int) -> Path:
        """A blended expert."""
        return self.folder / "blends" / f"expert_{expert}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquiry:
    """Everything that one merge has to find out; equal inquiries have equal answers."""

    run_id: str
    run_folder: str  # its name among the training runs
    expert: int  # the run's new expert, by global index
    limit_seconds: float
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What was found out, an answer for each question."""

    answers: tuple[Evidence, ...]


def write_inquiry(desk: Desk, inquiry: Inquiry) -> None:
    """Write the questions."""
    records.write(desk.inquiry, inquiry)


def read_inquiry(desk: Desk) -> Inquiry | None:
    """The questions that were written; None without any.

    Raises:
      FileRefusedError: the file is damaged.
    """
    if not desk.inquiry.exists():
        return None
    return records.read(desk.inquiry, Inquiry)


def write_answers(desk: Desk, answers: Sequence[Evidence]) -> None:
    """Write what was found out."""
    records.write(desk.answers, Answers(answers=tuple(answers)))


def read_answers(desk: Desk) -> dict[int, Evidence] | None:
    """What was found out, by expert; None as long as it is not.

    Raises:
      FileRefusedError: the file is damaged.
    """
    if not desk.answers.exists():
        return None
    answers = {}
    for found in records.read(desk.answers, Answers).answers:
        expert = found.question.expert
        moved = isinstance(found, Blended)  # the graph may have moved since the file was written
        answers[expert] = replace(found, folder=desk.blend(expert)) if moved else found
    return answers
