"""SkillScheduler, beat by beat: adding, order, slots, expert numbers, persistence, completion."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from flowrl.errors import GraphError, NameRefusedError, SkillError
from flowrl.launchers.base import Lost
from flowrl.launchers.tmux import TmuxLauncher
from flowrl.parallel import SkillScheduler
from flowrl.parallel.events import Verb
from flowrl.parallel.status import (
    CANCELLED,
    NOT_ASKED_FOR,
    PAUSED,
    Completed,
    Entry,
    Failed,
    Held,
    StopReason,
    sentence,
)
from tests.commands.making import running
from tests.parallel.making import make_skill
from tests.parallel.scheduling import FakeBackend, lines, saved, status, words

NOW = datetime(2030, 1, 1, tzinfo=UTC)
DATA = {
    "requirements": {},
    "gain": {"wood": "lambda n: n + 0"},
    "is_done": "def task_is_done(inventory, n):\n    return inventory.wood >= n",
    "reward": "def task_reward(inventory_diff):\n    return inventory_diff.wood",
}


def test_an_added_skill_waits_and_is_in_the_state_file(start):
    scheduler = start("Collect Wood", "Make Pickaxe < Collect Wood")
    assert words(scheduler) == {"Collect Wood": "waiting", "Make Pickaxe": "waiting"}
    assert lines(scheduler)["Make Pickaxe"]["waits_for"] == ["Collect Wood"]


def test_what_a_skill_is_said_to_be_is_checked_and_kept_for_the_backend(start):
    scheduler = start()
    scheduler.add_skill("Collect Wood", DATA, [])
    scheduler.add_skill("Place Table", make_skill("Place Table"), ["Collect Wood"])
    scheduler.add_skill("Unsaid")
    assert set(scheduler.skills) == {"Collect Wood", "Place Table"}
    assert str(scheduler.skills["Collect Wood"].gain["wood"]) == "n"
    assert scheduler.skills["Place Table"] == make_skill("Place Table")


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ({"gain": {"wood": "n"}}, "task_is_done is missing"),
        (DATA | {"gian": {}}, "unknown key 'gian'"),
        (DATA | {"is_done": "import os"}, "import does not belong"),
        (make_skill("Another"), "that of 'Another'"),
    ],
    ids=["missing", "unknown", "hostile", "another"],
)
def test_malformed_skill_data_is_refused_and_nothing_is_added(start, data, complaint):
    scheduler = start()
    with pytest.raises(SkillError, match=re.escape(complaint)):
        scheduler.add_skill("Collect Wood", data, [])
    assert scheduler.skills == {}
    assert not scheduler.state.entries


def test_skills_train_in_the_order_of_their_needs_and_the_run_ends(start, world):
    scheduler = start("Wood", "Table < Wood")
    scheduler.tick()
    assert words(scheduler) == {"Wood": "running", "Table": "waiting"}
    world.end("Wood")
    scheduler.tick()
    assert words(scheduler) == {"Wood": "completed", "Table": "running"}
    world.end("Table")
    assert scheduler.run().complete
    assert len(world.ledger) == 2


def test_expert_numbers_come_with_training_and_stay(start, world, clock):
    scheduler = start("A", "B", max_parallel_skills=1)
    assert lines(scheduler)["A"]["expert"] is None
    scheduler.tick()
    assert lines(scheduler)["A"]["expert"] == 0
    world.end("A", Lost())
    scheduler.tick()
    assert lines(scheduler)["B"]["expert"] == 1
    clock.pass_seconds(60)
    world.end("B")
    scheduler.tick()
    assert words(scheduler) == {"A": "running", "B": "completed"}
    assert [entry.expert for entry in start().state.entries.values()] == [0, 1]


def test_no_more_runs_than_slots_and_the_higher_priority_first(start, world):
    scheduler = start(max_parallel_skills=2)
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", 9)):
        scheduler.add_skill(name, priority=priority)
    scheduler.tick()
    assert [process.task.skill for process in world.living()] == ["d", "b"]
    world.end("b")
    scheduler.tick()
    assert [process.task.skill for process in world.living()] == ["d", "a"]


@pytest.mark.parametrize(
    ("add", "error", "named"),
    [
        (lambda s: s.add_skill("B", {}, ["Nobody"]), GraphError, "Nobody"),
        (lambda s: s.add_skill("A", {}, ["A"]), GraphError, "needs"),
        (lambda s: s.add_skill("C", {}, ["C"]), GraphError, "C → C"),
        (
            lambda s: s.add_skills(
                [Entry(skill="X", needs=("Y",)), Entry(skill="Y", needs=("X",))]
            ),
            GraphError,
            "circle",
        ),
        (lambda s: s.add_skill("a\nb"), NameRefusedError, "control"),
        (lambda s: s.add_skill("A_b"), NameRefusedError, "'A b' and 'A_b'"),
        (lambda s: s.add_skills([Entry(skill="N"), Entry(skill="N")]), GraphError, "N"),
        (lambda s: s.add_skills([Entry(skill="N", expert=7)]), GraphError, "expert 7"),
        (lambda s: s.ask("Nobody", Verb.RETRY), GraphError, "Nobody"),
    ],
    ids=["unknown", "changed", "itself", "circle", "newline", "slug", "twice", "expert", "ask"],
)
def test_what_cannot_be_added_is_refused_whole(start, add, error, named):
    scheduler = start("A")
    scheduler.add_skills([Entry(skill="A b", needs=("A",), expert=7)])
    before, text = scheduler.state, saved(scheduler)
    with pytest.raises(error, match=re.escape(named)):
        add(scheduler)
    assert scheduler.state is before
    assert saved(scheduler) == text


def test_a_dependant_may_be_added_late(start, world):
    scheduler = start("A")
    scheduler.tick()
    world.end("A")
    scheduler.tick()
    scheduler.add_skill("A")  # again: nothing changes
    scheduler.add_skill("B", {}, ["A"])
    scheduler.tick()
    assert words(scheduler) == {"A": "completed", "B": "running"}


def test_a_restart_adopts_running_skills_with_the_same_run(start, world):
    scheduler = start("A", "B < A")
    scheduler.tick()
    run_id = world.folders["A"]
    scheduler = start()
    scheduler.tick()
    assert status(scheduler, "A").run_id == run_id
    assert [process.launches for process in world.runs.values()] == [1]
    world.end("A")
    scheduler = start()
    scheduler.tick()
    assert words(scheduler) == {"A": "completed", "B": "running"}
    assert world.ledger == [run_id]


def test_what_a_callback_adds_starts_before_what_waits_with_less_priority(start, world):
    scheduler = start(max_parallel_skills=1)
    scheduler.set_callbacks(
        on_skill_complete=lambda skill: (
            skill == "A" and scheduler.add_skill("B", {}, ["A"], priority=1)
        )
    )
    scheduler.add_skill("A", priority=1)
    scheduler.add_skill("other")
    scheduler.tick()
    world.end("A")
    scheduler.tick()
    assert words(scheduler) == {"A": "completed", "other": "waiting", "B": "running"}


def test_callbacks_hear_of_ends_and_may_add_skills(start, world):
    scheduler = start(max_retries=0)
    heard = []

    def on_complete(skill):
        heard.append(skill)
        if skill == "A":
            scheduler.add_skill("B", {}, ["A"])

    scheduler.set_callbacks(on_skill_complete=on_complete, on_skill_failed=heard.append)
    scheduler.add_skill("A")
    scheduler.tick()
    world.end("A")
    scheduler.tick()
    scheduler.tick()
    world.end("B", Lost())
    scheduler.tick()
    assert heard == ["A", "B"]
    assert words(scheduler) == {"A": "completed", "B": "failed"}


def test_a_skill_trained_before_the_state_was_lost_is_known_again(start, world, clock):
    scheduler = start()
    done = Completed(
        run_id="e4.a1.0", attempt=1, frames=9, success_rate=1.0, wall_seconds=1.0, at=clock.now
    )
    scheduler.add_skills([Entry(skill="A", expert=4, status=done)])
    scheduler.add_skill("B", {}, ["A"])
    scheduler.tick()
    assert words(scheduler) == {"A": "completed", "B": "running"}
    assert lines(scheduler)["B"]["expert"] == 5


def test_every_move_is_one_line_of_the_story(start, world):
    scheduler = start("木を集める")
    scheduler.tick()
    world.end("木を集める")
    scheduler.tick()
    story = [json.loads(line) for line in scheduler.graph_paths.events.read_text().splitlines()]
    moves = ["waiting", "preparing", "running", "merging", "completed"]
    assert [line["status"] for line in story] == moves
    assert [line["before"] for line in story] == [None, *moves[:-1]]
    assert "is done: expert 0, 90% success in training after 1,000 frames" in story[-1]["text"]


def test_the_story_tells_how_long_preparing_takes(start, world, clock, monkeypatch):
    prepare = FakeBackend.prepare

    def slowly(backend, request):
        clock.pass_seconds(7)
        return prepare(backend, request)

    monkeypatch.setattr(FakeBackend, "prepare", slowly)
    scheduler = start("A")
    scheduler.tick()
    story = [json.loads(line) for line in scheduler.graph_paths.events.read_text().splitlines()]
    begun = {line["status"]: datetime.fromisoformat(line["at"]) for line in story}
    assert begun["running"] - begun["preparing"] == timedelta(seconds=7)


def held(why):
    return Held(why=why, attempt=1, at=NOW)


def failed(why):
    return Failed(why=why, attempt=3, at=NOW)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (held(NOT_ASKED_FOR), f"is held until a start asks for it: {NOT_ASKED_FOR}"),
        (held(PAUSED), f"is held until `flowrl resume`: {PAUSED}"),
        (held("Ctrl-C"), "is held until `flowrl retry`: Ctrl-C"),
        (failed(CANCELLED), "is cancelled on request; `flowrl retry` trains it anew"),
        (failed("exit 1"), "has failed, attempt 3: exit 1"),
    ],
)
def test_a_line_of_the_story_says_how_the_skill_goes_on(status, said):
    assert sentence(None, Entry(skill="A", status=status), NOW) == said


@pytest.mark.parametrize(("pane", "where"), [("%1", ", session a, gpu 0"), (None, ", gpu 0")])
def test_a_session_is_told_where_there_is_one(pane, where):
    """`--launcher local` has none."""
    begun = running()
    assert begun.handle
    begun = replace(begun, handle=replace(begun.handle, session="a", pane=pane), devices=("0",))
    entry = Entry(skill="A", expert=3, status=begun)
    assert sentence(None, entry, NOW) == f"is training as expert 3, attempt 1{where}"


def test_a_run_is_said_to_be_asked_to_end_once():
    before = running()
    asked = replace(before, stop_reason=StopReason.PAUSE)
    entry = Entry(skill="A", status=asked)
    assert sentence(before, entry, NOW) == "is asked to end (pause)"
    assert not sentence(replace(asked, trains_since=NOW), entry, NOW)


def test_a_scheduler_uses_tmux_unless_it_is_given_a_launcher(tmp_path):
    assert isinstance(SkillScheduler(tmp_path).launcher, TmuxLauncher)


def test_an_unknown_callback_is_refused(start):
    with pytest.raises(TypeError, match="on_skill_completed"):
        start().set_callbacks(on_skill_completed=print)
