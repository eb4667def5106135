"""A transcript that was cut anywhere is gone on with; one that was edited is refused."""

from __future__ import annotations

import random

import pytest

from flowrl.errors import FileRefusedError
from flowrl.llm.transcript import Answered, CallLost, Ended, Prompt, Transcript, read_events
from tests.llm.making import Asked, Written, contract, rewards

ANSWERS = [contract(gain=[]), contract(), rewards("def task_reward(n):\n    return x"), rewards()]


@pytest.fixture(scope="module")
def write(tmp_path_factory) -> Written:
    return Written(tmp_path_factory.mktemp("cut"))


@pytest.fixture(scope="module")
def whole(write) -> bytes:
    assert write(ANSWERS, 0, repairs=3) is not None
    return (write.root / "0.jsonl").read_bytes()


def test_a_transcript_that_is_cut_anywhere_is_gone_on_with_and_kept_answers_are_not_asked(
    write, whole, monkeypatch
):
    """As by a disk that was full, or by a power cut: kills leave whole lines."""
    drawn = random.Random(0)
    edges = [place for place, byte in enumerate(whole) if byte == ord("\n")]
    cuts = {*edges, *(edge + 1 for edge in edges), *drawn.sample(range(len(whole)), 60), 0}
    for cut in sorted(cuts):
        path = write.root / f"{cut + 1}.jsonl"
        path.write_bytes(whole[:cut])
        lines = whole[:cut].splitlines(keepends=True)
        kept = sum(b'"kind": "answered"' in line and line.endswith(b"\n") for line in lines)
        asked = Asked(ANSWERS[kept:])
        monkeypatch.setattr("tests.llm.making.Asked", lambda _, asked=asked: asked)
        assert write([], cut + 1, repairs=3) is not None
        assert asked.answers == [], cut
        now = read_events(path)
        lost = [event for event in now if isinstance(event, CallLost)]
        assert [event for event in now if event not in lost] == read_events(write.root / "0.jsonl")
        asking = isinstance(read_whole(whole[:cut], path), Prompt)
        assert len(lost) == asking, "a call that may have been paid counts"


def read_whole(content: bytes, path) -> object:
    """The last event of the whole lines."""
    place = path.with_suffix(".whole")
    place.write_bytes(content[: content.rfind(b"\n") + 1])
    events = read_events(place)
    return events[-1] if events else None


def test_a_line_that_was_edited_or_flipped_is_refused_with_its_number(write, whole, tmp_path):
    drawn = random.Random(1)
    path = tmp_path / "1.jsonl"
    for place in drawn.sample(range(len(whole)), 100):
        bit = 1 << drawn.randrange(7)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        last = whole.rfind(b"\n", 0, -1) < place
        try:
            events = read_events(path)
        except FileRefusedError as error:
            number = whole[:place].count(b"\n") + 1
            assert f"line {number} is damaged or was edited" in str(error)  # noqa: PT017
            assert "; restore it from a copy" in str(error)  # noqa: PT017
        else:
            assert last, place
            assert len(events) < len(read_events(write.root / "0.jsonl"))


def test_what_is_new_in_a_followed_transcript_departs(write, whole, tmp_path):
    (tmp_path / "1.jsonl").write_bytes(whole)
    transcript = Transcript(tmp_path / "1.jsonl")
    transcript.note(transcript.kept[0])
    with pytest.raises(FileRefusedError, match="it has prompt, and now comes ended"):
        transcript.note(Ended())
    with pytest.raises(FileRefusedError, match="it has no answer there"):
        transcript.answer(lambda: pytest.fail("it is asked"))
    assert transcript.spent.calls == sum(isinstance(e, Answered) for e in transcript.kept) == 4
