"""scheduler_state.json: one line per skill, valid JSON, for the scheduler, for people and for jq.

Every line has `skill`, `status`, `expert`, `attempt`, `needs` and `waits_for`, and what else is
true of its status: `session`, `device`, `blocked_by`, `frames`, `success_rate`, `why` and more.
What would say nothing is left out, which jq reads as null. Times are ISO 8601 in UTC. `requests`
holds the answers to the last requests, `wish` what a user wants of the daemon itself.

The first line holds a checksum of all that follows, so a flipped bit is never taken for a state:
the CRC32 of the CRC32s of the lines, each of four bytes, most significant first. A line that has
not changed is neither made nor summed up again. (Format 2 holds the CRC32 of the bytes.)
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowrl import storage
from flowrl.errors import FileRefusedError, FormatVersionError, GraphError, NameRefusedError
from flowrl.parallel.adding import checked
from flowrl.parallel.asks import Wish
from flowrl.parallel.board import SchedulerState
from flowrl.parallel.signals import NewSkill
from flowrl.parallel.state_lines import answer_line, answer_of, entry_of, line, natural
from flowrl.parallel.status import Entry, Merging, Preparing, Running

FORMAT = 3
READS = (1, 2, FORMAT)
_HEAD = re.compile(rb'\{"format": ([23]), "crc32": "([0-9a-f]{8})",\n')
_BETWEEN = b",\n"
_CRC_BYTES = 4
_Cell = tuple[Entry, int, bytes]  # what a line was made from, and the line
_Page = tuple[tuple[Entry, ...], tuple[int, ...], bytes, bytes]  # made from; lines, their CRC32s


class StateFile:
    """scheduler_state.json of one graph; remembers what it wrote, so that saving is quick."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: dict[str, _Cell] = {}
        self._pages: list[_Page] = []
        self._sheet = bytearray()

    def load(self) -> SchedulerState | None:
        """The saved state, or None when there is none.

        Raises:
          FileRefusedError: the file cannot be read or trusted; it is left as it is.
        """
        if not self.path.exists() and not self.path.is_symlink():
            return None
        return decode(storage.read_bytes(self.path), str(self.path))

    def save(self, state: SchedulerState) -> None:
        """Replace the file at one stroke."""
        storage.write_atomic(self.path, self._laid_out(state))

    def encode(self, state: SchedulerState) -> bytes:
        """The file's content."""
        return b"".join(self._parts(state))

    def _laid_out(self, state: SchedulerState) -> memoryview:
        """The content, where the one before was: clearing new memory would take longer."""
        parts = self._parts(state)
        size = sum(map(len, parts))
        if size > len(self._sheet):
            self._sheet = bytearray(size + size // 4)
        sheet, end = memoryview(self._sheet), 0
        for part in parts:
            begin, end = end, end + len(part)
            sheet[begin:end] = part
        return sheet[:size]

    def _parts(self, state: SchedulerState) -> list[bytes]:
        """The content in pieces."""
        head = f'"next_expert": {state.next_expert}, "wish": "{state.wish.value}", "requests": ['
        answers = _BETWEEN.join(map(answer_line, state.answers))
        start = head.encode() + (b"\n%s\n" % answers if answers else b"") + b'], "skills": ['
        pages = [self._page(state, number) for number in range(len(state.entries.pages))]
        checksum = zlib.crc32(_crcs(start) + _crcs_of(pages) + _crcs(b"]}\n"))
        lines = [piece for page in pages for piece in (_BETWEEN, page[2])][1:]
        first = b'{"format": %d, "crc32": "%08x",\n%s\n' % (FORMAT, checksum, start)
        return [first, *lines, b"\n]}\n"]

    def _page(self, state: SchedulerState, number: int) -> _Page:
        """The lines of one page of skills, made anew only when something in it has changed."""
        entries = state.entries.pages[number]
        missing = state.index.missing.pages[number]
        known = self._pages[number] if number < len(self._pages) else None
        if known is not None and known[0] is entries and known[1] is missing:
            return known
        made = _BETWEEN.join(map(self._line, [state] * len(entries), entries, missing))
        page = (entries, missing, made, _crcs(made + b","))
        self._pages[number : number + 1] = [page]
        return page

    def _line(self, state: SchedulerState, entry: Entry, missing: int) -> bytes:
        known = self._lines.get(entry.skill)
        if known is None or known[0] is not entry or known[1] != missing:
            known = (entry, missing, line(entry, state.waits_for(entry.skill)))
            self._lines[entry.skill] = known
        return known[2]


def _crcs(text: bytes) -> bytes:
    """The CRC32s of its lines."""
    crcs = (zlib.crc32(line) for line in text.split(b"\n"))
    return b"".join(crc.to_bytes(_CRC_BYTES, "big") for crc in crcs)


def _crcs_of(pages: Sequence[_Page]) -> bytes:
    """Those of all skills: every line but the very last ends in a comma."""
    if not pages:
        return _crcs(b"")
    last = pages[-1][2].rpartition(b"\n")[2]
    return b"".join(page[3] for page in pages)[:-_CRC_BYTES] + _crcs(last)


def encode(state: SchedulerState) -> bytes:
    """The state as the content of scheduler_state.json."""
    return StateFile(Path()).encode(state)


def decode(content: str | bytes, place: str) -> SchedulerState:
    """The state in the content of scheduler_state.json, which was found at `place`.

    Raises:
      FormatVersionError: another version of flowrl wrote it.
      FileRefusedError: it is damaged.
    """
    document = read_document(content, place)
    try:
        entries = [entry_of(facts, order) for order, facts in enumerate(document["skills"])]
        next_expert = natural(document["next_expert"])
        wish = Wish(document.get("wish", ""))
        answers = tuple(map(answer_of, document.get("requests", ())))
        _check(entries, next_expert)
    except (KeyError, TypeError, ValueError, GraphError, NameRefusedError) as error:
        raise _damaged(place, f"{type(error).__name__}: {error}") from error
    return SchedulerState.of(entries, next_expert=next_expert, wish=wish, answers=answers)


def read_document(content: str | bytes, place: str) -> dict[str, Any]:
    """The JSON in scheduler_state.json, once its checksum holds.

    Raises:
      FormatVersionError, FileRefusedError: as `decode`.
    """
    raw = content.encode() if isinstance(content, str) else content
    head = _HEAD.match(raw)
    if head is not None and int(head[2], 16) != _checksum(int(head[1]), raw[head.end() :]):
        raise _damaged(place, "its checksum does not hold")
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _damaged(place, f"{type(error).__name__}: {error}") from error
    found = document.get("format") if isinstance(document, dict) else None
    if found not in READS:
        raise FormatVersionError(
            f"{place} has format {found!r}, this flowrl reads 1 to {FORMAT}; go on with the "
            f"version of flowrl that wrote it, or move the file away and run {_recovery(place)}"
        )
    unsealed = found == 1 and "crc32" not in document
    if not (unsealed if head is None else found == int(head[1])):
        raise _damaged(place, "its first line is not as it was written")
    return document


def _checksum(form: int, rest: bytes) -> int:
    return zlib.crc32(rest if form == 2 else _crcs(rest))


def _check(entries: list[Entry], next_expert: int) -> None:
    """Names, needs and expert numbers fit together."""
    items = [NewSkill(skill=e.skill, needs=e.needs, expert=e.expert) for e in entries]
    checked(items, {}, {})
    for entry in entries:
        if entry.expert is not None and entry.expert >= next_expert:
            raise ValueError(f"expert {entry.expert} is not below next_expert {next_expert}")
        if entry.expert is None and isinstance(entry.status, Preparing | Running | Merging):
            raise ValueError(f"{entry.skill!r} is {entry.status.word} without an expert number")


def _damaged(place: str, why: str) -> FileRefusedError:
    return FileRefusedError(
        f"{place} is damaged ({why}); restore it from a copy, or run {_recovery(place)}: what has "
        "been trained is in checkpoints/ and is found again"
    )


def _recovery(place: str) -> str:
    return f"`flowrl recover {Path(place).parent}`"
