"""What a merge asks of the program that compares experts, and what it answers: two files.

They lie in a folder of the graph and not in the run's, where a trainer could have put answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flowrl.errors import FileRefusedError
from flowrl.experts.merge import Blended, Compared, Evidence, Question, Unanswered
from flowrl.storage import records

FORMAT = 1


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


def write_inquiry(desk: Desk, inquiry: Inquiry) -> None:
    """Write the questions."""
    records.write(desk.inquiry, {"format": FORMAT, **asdict(inquiry)})


def read_inquiry(desk: Desk) -> Inquiry | None:
    """The questions that were written; None without any.

    Raises:
      FileRefusedError: the file is damaged.
    """
    if not desk.inquiry.exists():
        return None
    facts = records.read(desk.inquiry, formats=(FORMAT,), sealed_from=FORMAT)
    try:
        return Inquiry(
            run_id=str(facts["run_id"]),
            run_folder=str(facts["run_folder"]),
            expert=int(facts["expert"]),
            limit_seconds=float(facts["limit_seconds"]),
            questions=tuple(_question(item) for item in facts["questions"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(desk.inquiry, error) from error


def write_answers(desk: Desk, answers: Sequence[Evidence]) -> None:
    """Write what was found out."""
    records.write(desk.answers, {"format": FORMAT, "answers": [_plain(item) for item in answers]})


def read_answers(desk: Desk) -> dict[int, Evidence] | None:
    """What was found out, by expert; None as long as it is not.

    Raises:
      FileRefusedError: the file is damaged.
    """
    if not desk.answers.exists():
        return None
    facts = records.read(desk.answers, formats=(FORMAT,), sealed_from=FORMAT)
    try:
        answers = [_evidence(desk, item) for item in facts["answers"]]
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(desk.answers, error) from error
    return {answer.question.expert: answer for answer in answers}


def _plain(answer: Evidence) -> dict[str, Any]:
    facts = asdict(answer)
    facts.pop("folder", None)
    return {"kind": type(answer).__name__.lower(), **facts}


def _evidence(desk: Desk, facts: Mapping[str, Any]) -> Evidence:
    question = _question(facts["question"])
    match facts["kind"]:
        case "blended":
            return Blended(
                question=question,
                folder=desk.blend(question.expert),
                sha256=str(facts["sha256"]),
                content=str(facts["content"]),
            )
        case "compared":
            return Compared(
                question=question,
                wins=int(facts["wins"]),
                losses=int(facts["losses"]),
                ties=int(facts["ties"]),
            )
        case "unanswered":
            return Unanswered(question=question, why=str(facts["why"]))
        case kind:
            raise ValueError(f"{kind!r} is no kind of answer")


def _question(facts: Mapping[str, Any]) -> Question:
    if facts["kind"] not in ("blend", "compare"):
        raise ValueError(f"{facts['kind']!r} is no kind of question")
    current, candidate = facts["gains"]
    return Question(
        kind=facts["kind"],
        expert=int(facts["expert"]),
        current=str(facts["current"]),
        candidate=str(facts["candidate"]),
        gains=(int(current), int(candidate)),
    )


def _malformed(path: Path, error: Exception) -> FileRefusedError:
    return FileRefusedError(f"{path} is malformed: {type(error).__name__}: {error}")
