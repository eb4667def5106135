"""The transcript of a wish: each question, answer and verdict is one sealed line of a file.

It is all that `flowrl write` remembers. The program goes the same way again from the beginning;
as long as the transcript has the next event, that event must be the same, and an answer is taken
from it instead of asked for. So a program that was killed goes on without paying twice, and
`--llm_replay` follows the transcript of another one to the same files. What was spent is the sum
over the lines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from flowrl import storage
from flowrl.errors import FileRefusedError, closest
from flowrl.llm.exchange import Completion, Cost, Form
from flowrl.paths import GraphPaths, is_graph
from flowrl.storage import records
from flowrl.storage.records import Natural, Positive

NEXT = "choose the skill to learn next, new and within reach of what the skills gain"  # a wish
_SHOWN = 40  # characters of two texts that differ
_REMEDY = "restore it from a copy, or move it away to ask anew"


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A wish, the game and the model; `context` is what the model is told of the graph."""

    kind: ClassVar[str] = "begun"
    wish: str
    env_name: str
    model: str
    candidates: Positive
    repairs: Natural
    temperature: float | None = None
    seed: int | None = None
    context: str

    def asks_as(self, other: Begun) -> bool:
        """Return whether both are about the same but for the context."""
        return self == replace(other, context=self.context)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Messages that a model is asked by, and about how many tokens that takes."""

    kind: ClassVar[str] = "prompt"
    purpose: Literal["contract", "rewards"]
    messages: tuple[dict[str, str], ...]
    tokens: Natural


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A model's answer, and what it has cost."""

    kind: ClassVar[str] = "answered"
    text: str
    finish: str
    form: Form
    calls: Natural
    tokens: Natural
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLost:
    """A question that has cost something and has no answer; a replay leaves it out."""

    kind: ClassVar[str] = "call_lost"
    calls: Natural
    tokens: Natural
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The refusals of an answer, one line each; of rewards, also beside one that is accepted."""

    kind: ClassVar[str] = "checked"
    refusals: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The skill that is to be kept, by the file of the candidate beside the transcript.

    `others` are further candidates that pass all checks, with their digests.
    """

    kind: ClassVar[str] = "accepted"
    skill: str
    file: str
    digest: str
    others: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The candidate that is kept after all were trained, and a line for each; no replay has it."""

    kind: ClassVar[str] = "chosen"
    file: str
    standings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a wish: the reasons why it was given up, or none."""

    kind: ClassVar[str] = "ended"
    reasons: tuple[str, ...] = ()


TranscriptEvent = Begun | Prompt | Answered | CallLost | Checked | Accepted | Chosen | Ended
EventKind = TypeVar("EventKind", bound=TranscriptEvent)


class Transcript:
    """The events of one wish, in their order; those of `source` go before what is new."""

    def __init__(self, path: Path, source: Path | None = None) -> None:
        self.path = path
        self.kept = read_events(path, mend=True) if path.exists() else []
        self._source, self._at = source, 0
        self._others = read_events(source) if source else []
        last = self.kept[-1] if self.kept else None
        if isinstance(last, Prompt):  # the program was killed before its answer was kept
            self._append(CallLost(calls=1, tokens=last.tokens))

    @property
    def folder(self) -> Path:
        """The folder of the candidates."""
        return self.path.with_suffix("")

    @property
    def spent(self) -> Cost:
        """The sum over all answers, and over questions without one."""
        paid = [each for each in self.kept if isinstance(each, Answered | CallLost)]
        return sum((Cost(e.calls, e.tokens, e.seconds) for e in paid), start=Cost())

    def find(self, kind: type[EventKind]) -> EventKind | None:
        """Return the first event of a kind that is kept."""
        return next((event for event in self.kept if isinstance(event, kind)), None)

    def note(self, event: TranscriptEvent) -> None:
        """Keep an event; FileRefusedError if the transcript that is followed has another one."""
        place, followed = self._followed()
        if followed not in (None, event):
            raise FileRefusedError(f"{place} departs: {_difference(followed, event)}; {_REMEDY}")
        if self._at == len(_settled(self.kept)):
            self._append(event)
        self._at += 1

    def answer(self, ask: Callable[[], Completion]) -> Answered:
        """Return the answer to the last question: the one that is followed, or a new one."""
        place, followed = self._followed()
        if followed is None and self._source is not None:
            raise FileRefusedError(f"{place}: it ends before its wish does; {_REMEDY}")
        if followed is None:
            said = ask()
            told = {"text": said.text, "finish": said.finish, "form": said.form}
            followed = Answered(**told, **said.cost.facts)
        if not isinstance(followed, Answered):
            raise FileRefusedError(f"{place} departs: it has no answer there; {_REMEDY}")
        self.note(followed)
        return followed

    @property
    def ended(self) -> bool:
        """True if the wish was granted or given up."""
        return self.find(Ended) is not None

    def end(self) -> None:
        """Keep the end of a wish that is granted."""
        self._at = len(_settled(self.kept))
        self.note(Ended())

    def choose(self, chosen: Chosen) -> None:
        """Keep the candidate that was best in training; once."""
        if self.find(Chosen) is None:
            self._append(chosen)

    def lose(self, cost: Cost) -> None:
        """Keep what the last question has cost, which has no answer; once, if it was nothing."""
        if cost == Cost() and isinstance(self.kept[-1], CallLost):
            return
        self._append(CallLost(**cost.facts))

    def _followed(self) -> tuple[str, TranscriptEvent | None]:
        """Return the next event that was, and its place."""
        for path, events in ((self.path, self.kept), (self._source, self._others)):
            if self._at < len(events := _settled(events)):
                return f"{path}: event {self._at + 1}", events[self._at]
        return f"{self._source or self.path}: event {self._at + 1}", None

    def _append(self, event: TranscriptEvent) -> None:
        storage.make_dir(self.path.parent)
        sealed = records.sealed({"format": 1, **records.to_json(event)})
        storage.append_line(self.path, json.dumps(sealed))
        self.kept.append(event)
        storage.fault_point(f"transcript.{event.kind}")


def open_transcript(folder: Path, begun: Begun, source: Path | None = None) -> Transcript:
    """Return the transcript of a wish in a folder, unless it was given up; or a new one."""
    numbers = sorted(int(path.stem) for path in folder.glob("*.jsonl") if path.stem.isdecimal())
    for path in (folder / f"{number}.jsonl" for number in numbers):
        events = read_events(path)
        asked = isinstance(events[0], Begun) and events[0].asks_as(begun) if events else False
        if asked and not (isinstance(events[-1], Ended) and events[-1].reasons):
            return Transcript(path, source)
    return Transcript(folder / f"{max(numbers, default=0) + 1}.jsonl", source)


def given_up(folder: Path) -> list[str]:
    """Return the reasons for which wishes were given up, by their transcripts in a folder."""
    ends = [event for path in sorted(folder.glob("*.jsonl")) for event in read_events(path)]
    return [why for event in ends if isinstance(event, Ended) for why in event.reasons]


def granted_next(folder: Path, known: Callable[[str], bool]) -> int:
    """Return how many wishes that leave the choice to the model were granted or given up.

    An accepted skill that is known counts, too: its writer was killed before the last line.
    """
    found = [read_events(path) for path in folder.glob("*.jsonl")]
    asked = [e for e in found if e and isinstance(e[0], Begun) and e[0].wish.startswith(NEXT)]
    return sum(
        any(isinstance(e, Ended) or (isinstance(e, Accepted) and known(e.skill)) for e in events)
        for events in asked
    )


def find_source(place: Path, wish: str, env_name: str) -> tuple[Path, Begun]:
    """Return the transcript of a wish in a folder, or a file; FileRefusedError without one."""
    if is_graph(place):
        place = GraphPaths(place).transcripts
    files = sorted(place.glob("*.jsonl")) if place.is_dir() else [place]
    found = {}
    for path in files:
        begun = next(iter(read_events(path)), None)
        if isinstance(begun, Begun):
            found.setdefault(begun.wish, (path, begun))
    if wish not in found:
        near = closest(wish, found) or f"; there are {', '.join(map(repr, found)) or 'none'}"
        raise FileRefusedError(f"{place} has no transcript of the wish {wish!r}{near}")
    path, begun = found[wish]
    if begun.env_name != env_name:
        what = f"{path} is of the game {begun.env_name}, not {env_name}"
        raise FileRefusedError(f"{what}; name a transcript of this game")
    return path, begun


def read_events(path: Path, *, mend: bool = False) -> list[TranscriptEvent]:
    """Return the events in a file; FileRefusedError if a line is damaged or was edited.

    A last line that a killed process tore does not count, and is removed to `mend` the file.
    """
    content = storage.read_bytes(path, remedy=_REMEDY)
    whole, newline, torn = content.rpartition(b"\n")
    lines = enumerate(whole.split(b"\n") if newline else [], 1)
    events = [_event(line, f"{path}: line {number}") for number, line in lines]
    if torn and mend:
        storage.write_atomic(path, whole + newline)
    return events


def _event(line: bytes, place: str) -> TranscriptEvent:
    try:
        document = json.loads(line)
        sealed = isinstance(document, dict) and records.sealed(document) == document
        if not sealed or document.pop("format") != 1:
            raise ValueError("it is not what its seal says")
        document.pop(records.SEAL)
        return records.from_json(TranscriptEvent, document)
    except (ValueError, KeyError, RecursionError) as error:
        what = f"{place} is damaged or was edited: {error}"
        raise FileRefusedError(f"{what}; {_REMEDY}") from error


def _settled(events: Sequence[TranscriptEvent]) -> list[TranscriptEvent]:
    return [event for event in events if not isinstance(event, CallLost | Chosen)]


def _difference(was: Any, now: Any) -> str:
    """Return the first field, and the place in its text, where two events differ."""
    if type(was) is not type(now):
        return f"it has {was.kind}, and now comes {now.kind}"
    names = [item.name for item in fields(was)]
    name = next(name for name in names if getattr(was, name) != getattr(now, name))
    texts = [json.dumps(getattr(each, name), ensure_ascii=False) for each in (was, now)]
    pairs = enumerate(zip(*texts, strict=False))
    same = next((n for n, (a, b) in pairs if a != b), min(map(len, texts)))
    said, says = (text[max(same - 10, 0) : same + _SHOWN] for text in texts)
    return f"{was.kind}.{name} at character {same}: {said!r} was, {says!r} is now"
