"""The scheduler's core as a pure function, and its file."""

from __future__ import annotations

import json
import typing
import zlib
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Timer

import pytest

from flowrl import storage
from flowrl.config import ScheduleConfig
from flowrl.errors import FileRefusedError, FormatVersionError
from flowrl.launchers.base import ExitCause, Exited, Handle, Lost
from flowrl.parallel import events
from flowrl.parallel.events import Response, StopMode, Verb
from flowrl.parallel.outcomes import described
from flowrl.parallel.state import SchedulerState, StateFile, decode, next_due
from flowrl.parallel.status import (
    Blocked,
    Completed,
    Entry,
    Failed,
    Held,
    Merging,
    Preparing,
    Running,
    StopReason,
    Waiting,
)
from flowrl.parallel.transitions import HANDLERS, step
from tests.parallel.scheduling import NOW, finished, state_of_entries

DATA = Path(__file__).parents[1] / "data"
FROZEN = DATA / "scheduler_state_v1.json"
RULES = ScheduleConfig()
HANDLE = Handle(
    run_id="e3.a2.0badcafe", session="s", pid=7, start_time="b 1", pane="%4", server_pid=9
)
EVERY_STATUS = (
    Waiting(),
    Waiting(attempt=3, not_before=NOW, why="exit 1", run_id="e1.a3.x", alone=True),
    Preparing(attempt=2, devices=("0",), since=NOW, run_id=None),
    Running(run_id="e3.a2.0badcafe", attempt=2, handle=HANDLE, devices=("GPU-1",), since=NOW),
    Running(
        run_id="e4.a1.1",
        attempt=1,
        handle=None,
        since=NOW + timedelta(microseconds=1),
        stop_reason=StopReason.PAUSE,
    ),
    Merging(
        run_id="e5.a1.1", attempt=1, frames=8, success_rate=0.1, wall_seconds=0.5, since=NOW,
        not_before=NOW, why="disk full",
    ),
    Completed(run_id="e6.a1.1", attempt=1, frames=8, success_rate=1.0, wall_seconds=2.5, at=NOW),
    Failed(why="exit 1 – „ü“", attempt=3, at=NOW),
    Held(why="session killed", attempt=1, at=NOW, run_id="e8.a1.1"),
    Blocked(blocked_by=("skill 7",)),
)  # fmt: skip


def state_of_all() -> SchedulerState:
    """One skill in each status."""
    entries = [
        Entry(
            skill=f"skill {number}",
            needs=("skill 7",) if isinstance(status, Blocked) else (),
            status=status,
            priority=-number,
            expert=number,
            failures=number % 3,
            frames_used=number,
        )
        for number, status in enumerate(EVERY_STATUS)
    ]
    return state_of_entries(entries, next_expert=40)


def encode(state: SchedulerState) -> bytes:
    return StateFile(Path()).encode(state)


def full_state() -> SchedulerState:
    """Every field with a value of its own."""
    entries = [
        *state_of_all().entries.values(),
        Entry(skill="skill 10", expert=10,
              status=Failed(why="exit 1", attempt=2, at=NOW, log=("Traceback", "ValueError: ü"))),
        Entry(skill="skill 11", expert=11,
              status=Running(run_id="e11.a1.1", attempt=1, handle=HANDLE, since=NOW,
                             stop_reason=StopReason.CANCEL)),
        Entry(skill="skill 12", expert=12,
              status=Running(run_id="e12.a1.1", attempt=1, handle=HANDLE, since=NOW,
                             stop_reason=StopReason.OVERDUE)),
    ]  # fmt: skip
    responses = (
        Response(id="1-0badcafe", verb="pause", skill="skill 4", at=NOW, outcome="done"),
        Response(id="2-0badcafe", verb="", skill=None, at=NOW, outcome="refused: who knows"),
    )
    return state_of_entries(entries, next_expert=40, stop_mode=StopMode.STOP, responses=responses)


def test_the_frozen_state_file_loads_and_is_written_again_as_it_is():
    assert decode(FROZEN.read_bytes(), "v1") == full_state()
    frozen, now = json.loads(FROZEN.read_bytes()), json.loads(encode(full_state()))
    assert frozen | {"crc32": now["crc32"]} == now


def test_a_state_file_of_another_format_is_refused():
    with pytest.raises(FormatVersionError, match="has format 2, this flowrl reads 1"):
        decode(FROZEN.read_bytes().replace(b'"format": 1', b'"format": 2'), "there")


def test_a_line_leaves_out_what_says_nothing_beyond_what_every_line_has():
    state = state_of_entries([Entry(skill="A", needs=())], next_expert=0)
    (line,) = json.loads(encode(state))["skills"]
    assert line.keys() == {"skill", "status", "expert", "attempt", "needs", "waits_for"}
    assert decode(encode(state), "there") == state


def test_every_flipped_bit_of_a_state_file_is_refused_with_a_remedy(tmp_path):
    entries = [state_of_all().entries["skill 3"], state_of_all().entries["skill 7"]]
    response = Response(id="1-0badcafe", verb="stop", skill=None, at=NOW, outcome="done")
    content = encode(state_of_entries(entries, next_expert=40, responses=(response,)))
    assert decode(content, "there").next_expert == 40
    for place in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[place] ^= 1 << bit
            with pytest.raises(FileRefusedError, match=r"flowrl recover /graph"):
                decode(bytes(flipped), "/graph/scheduler_state.json")


@pytest.mark.parametrize("change", [lambda text: text[:-20], lambda text: text + b" "])
def test_a_state_file_that_was_cut_or_grew_is_refused(change):
    with pytest.raises(FileRefusedError, match="checksum does not hold"):
        decode(change(encode(state_of_all())), "there")


def test_a_state_that_another_host_has_just_replaced_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "CACHED_SECONDS", 1.0)
    path, content = tmp_path / "scheduler_state.json", encode(state_of_all())
    path.write_bytes(content[:-20])  # as a disk shows it that still has the old one's size
    replacing = Timer(0.3, path.write_bytes, [content])
    replacing.start()
    assert StateFile(path).load() == state_of_all()
    replacing.join()


def test_a_state_goes_to_its_file_and_back():
    state = full_state()
    back = decode(encode(state), "there")
    assert back == state
    assert {type(entry.status) for entry in back.entries.values()} == set(
        typing.get_args(events.Status)
    )


def test_the_file_is_json_with_one_line_per_skill_and_plain_fields():
    text = encode(state_of_all())
    skills = json.loads(text)["skills"]
    assert len(text.splitlines()) == len(skills) + 5
    by_name = {line["skill"]: line for line in skills}
    assert by_name["skill 4"]["session"] == "flowrl_e4_skill_4"
    assert by_name["skill 3"] | {} == by_name["skill 3"] | {
        "status": "running",
        "session": "s",
        "devices": ["GPU-1"],
        "since": "2030-01-01T00:00:00Z",
    }
    assert by_name["skill 9"]["blocked_by"] == by_name["skill 9"]["waits_for"] == ["skill 7"]
    common = {"skill", "status", "expert", "attempt", "needs", "waits_for"}
    assert all(common <= line.keys() for line in skills)


def damaged(**changes):
    document = json.loads(encode(full_state()))
    document["skills"][3] |= changes
    return sealed(document)


def sealed(document):
    """The document with a checksum that holds."""
    rest = json.dumps(document).removeprefix("{").encode()
    return b'{"format": 1, "crc32": "%08x",\n%s' % (zlib.crc32(rest), rest)


@pytest.mark.parametrize(
    "text",
    [
        damaged(status="dancing"),
        damaged(needs=["nobody"]),
        damaged(needs=["skill 3"]),
        damaged(expert=1),
        damaged(expert=True),
        damaged(attempt=-1),
        damaged(since="yesterday"),
        damaged(since="2030-01-01T00:00:00"),
        damaged(handle={"pid": 3}),
        damaged(skill="a\nb"),
        sealed({"next_expert": 0}),
        sealed({"next_expert": 0, "stop_mode": "", "requests": [], "skills": [3]}),
        b'{"format": 1, "next_expert": 0, "skills": []}',
    ],
)
def test_a_damaged_state_is_refused_with_its_place_and_a_remedy(text):
    with pytest.raises(FileRefusedError, match=r"^there is damaged .*restore it"):
        decode(text, "there")


@pytest.mark.parametrize("status", [each for each in EVERY_STATUS if not isinstance(each, Blocked)])
def test_a_run_or_a_merged_skill_without_an_expert_is_refused(status):
    content = encode(state_of_entries([Entry(skill="A", status=status)]))
    if isinstance(status, Waiting | Failed | Held):
        assert decode(content, "there").entries["A"].expert is None
        return
    with pytest.raises(FileRefusedError, match=f"'A' is {status.kind} without an expert"):
        decode(content, "there")


def test_saved_lines_are_made_anew_when_what_they_say_changes(tmp_path):
    file = StateFile(tmp_path / "state.json")
    added = events.SkillsAdded((Entry(skill="A"), Entry(skill="B", needs=("A",))))
    state, _ = step(SchedulerState(), [added], NOW, ScheduleConfig())
    assert file.encode(state) == encode(state)
    state = through(state, "A", launching=False)
    assert state.entries["B"].status == Waiting()
    assert file.encode(state) == encode(state)
    assert b'"waits_for":["A"]' not in file.encode(state)


def through(state, skill, rules=RULES, *, launching=True):
    """The state once this skill's next run has gone all the way."""
    handle = Handle(run_id="r", session="s", pid=1)
    for event in (
        events.RunPrepared(skill, "r"),
        events.RunLaunched(skill, "r", handle),
        events.RunEnded(skill, "r", finished("r")),
        events.MergeDone(skill, "r"),
    ):
        state, _ = step(state, [event], NOW, rules, launching=launching)
    return state


def test_every_event_is_heard():
    kinds = {kind for kind in vars(events).values() if isinstance(kind, type)}
    kinds = {kind for kind in kinds if issubclass(kind, events.Event)}
    bases = {events.Event, events.SkillEvent, events.RunEvent, events.NotDone}
    assert set(HANDLERS) == kinds - bases


def test_all_roots_of_a_blockage_are_named_and_lifted_one_by_one():
    skills = [Entry(skill=n) for n in "AB"] + [
        Entry(skill="C", needs=("A", "B")),
        Entry(skill="D", needs=("C",)),
    ]
    state, _ = step(SchedulerState(), [events.SkillsAdded(tuple(skills))], NOW, ScheduleConfig())
    refused = [events.PrepareRefused(n, "no") for n in "AB"]
    state, _ = step(state, refused, NOW, ScheduleConfig())
    assert state.entries["D"].status == Blocked(blocked_by=("A", "B"))
    state, _ = step(state, [events.Asked("A", Verb.RETRY)], NOW, ScheduleConfig())
    assert state.entries["D"].status == Blocked(blocked_by=("B",))
    state, _ = step(state, [events.Asked("B", Verb.RETRY)], NOW, ScheduleConfig())
    assert state.entries["D"].status == Waiting()
    state, _ = step(state, [events.Asked("C", Verb.PAUSE)], NOW, ScheduleConfig())
    assert state.entries["D"].status == Blocked(blocked_by=("C",))


def test_a_skill_that_is_no_longer_blocked_waits_as_it_did_before():
    skills = [Entry(skill="A"), Entry(skill="B", needs=("A",))]
    state, _ = step(SchedulerState(), [events.SkillsAdded(tuple(skills))], NOW, ScheduleConfig())
    retried = Waiting(attempt=3, alone=True, why="oom")
    b = replace(state.entries["B"], status=retried, failures=2)
    state = replace(state, entries={**state.entries, "B": b})
    for _ in range(2):
        state, _ = step(
            state, [events.Asked("A", Verb.PAUSE)], NOW, ScheduleConfig(), launching=False
        )
        state = decode(encode(state), "again")
        assert state.entries["B"].status == Blocked(blocked_by=("A",), waiting=retried)
        state, _ = step(
            state, [events.Asked("A", Verb.RETRY)], NOW, ScheduleConfig(), launching=False
        )
        assert state.entries["B"].status == retried


def test_nothing_is_due_but_what_lies_ahead():
    entry = replace(state_of_all().entries["skill 1"], skill="x")
    state = state_of_entries([entry], next_expert=2)
    assert next_due(state, after=NOW - timedelta(seconds=1)) == NOW
    assert next_due(state, after=NOW) is None


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (Exited(cause=ExitCause.EXIT, code=3), "exit 3"),
        (Exited(cause=ExitCause.EXIT, code=3, detail="exit code 3"), "exit 3"),
        (Exited(cause=ExitCause.INTERRUPTED, detail="interrupted by it"), "interrupted by it"),
        (Exited(cause=ExitCause.STOPPED), "stopped"),
        (Exited(cause=ExitCause.SIGNAL, signal=9, detail="killed"), "signal 9 (killed)"),
        (Exited(cause=ExitCause.NO_RESULT, code=0), "no result"),
        (Lost(), "it left no trace"),
    ],
)
def test_an_end_is_described_for_people(outcome, words):
    assert described(outcome) == words


def test_a_slot_that_a_merge_frees_goes_to_what_the_merge_makes_ready_when_that_ranks_higher():
    run = Running(run_id="r", attempt=1, handle=HANDLE, since=NOW)
    entries = [
        Entry(skill="Collect Wood", status=run, expert=0),
        Entry(skill="Collect Drink", needs=()),
        Entry(skill="Place Table", needs=("Collect Wood",), priority=3),
    ]
    rules = ScheduleConfig(max_parallel_skills=1)
    state = state_of_entries(entries, next_expert=1)
    ended = events.RunEnded("Collect Wood", "r", finished("r"))
    state, commands = step(state, [ended], NOW, rules)
    assert not [command for command in commands if isinstance(command, events.Prepare)]
    state, commands = step(state, [events.MergeDone("Collect Wood", "r")], NOW, rules)
    prepared = [c.request.skill for c in commands if isinstance(c, events.Prepare)]
    assert prepared == ["Place Table"]
