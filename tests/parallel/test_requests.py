"""What users ask from other terminals, as a daemon hears it: obeyed once, answered in the state."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

import pytest

from flowrl import storage
from flowrl.errors import BusyError, LaunchError
from flowrl.launchers.base import ExitCause
from flowrl.launchers.local import LocalLauncher
from flowrl.llm.flow import Flow
from flowrl.parallel import health, requests
from flowrl.parallel.events import Response, StopMode, Verb
from flowrl.parallel.health import daemon_of
from flowrl.parallel.requests import MOST_AT_ONCE, log_responses, send_request
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.parallel.skill_sources import SkillSources
from flowrl.parallel.status import Completed, StopReason
from tests.parallel.making import GRAPH, TABLE, WOOD, feeder_of
from tests.parallel.scheduling import Killed, exited, finished, lines, saved, status, words


def outcomes(scheduler):
    return {line["id"]: line["outcome"] for line in saved(scheduler)["requests"]}


def asked(scheduler, verb, skill=None, **facts):
    """The answer to a request, after a beat."""
    name = send_request(scheduler.graph_paths, verb, skill, **facts)
    scheduler.tick()
    assert not list(scheduler.graph_paths.requests.iterdir())
    return outcomes(scheduler)[name]


def two_skills(start, **settings):
    scheduler = start(**settings)
    scheduler.add_skill("A")
    scheduler.add_skill("B", {}, ["A"])
    scheduler.tick()
    return scheduler


def test_a_paused_running_skill_goes_on_from_its_run_when_it_is_resumed(start, world):
    scheduler = two_skills(start)
    run_id = world.folders["A"]
    assert asked(scheduler, Verb.PAUSE, "A") == "done"
    assert world.of("A").asked_to_end
    world.end("A", exited(ExitCause.STOPPED))
    scheduler.tick()
    assert words(scheduler) == {"A": "held", "B": "blocked"}
    assert asked(scheduler, Verb.RESUME, "A") == "done"
    assert words(scheduler) == {"A": "running", "B": "waiting"}
    assert world.folders["A"] == run_id


def test_a_run_that_is_resumed_before_it_has_ended_goes_on_by_itself(start, world):
    scheduler = two_skills(start)
    run_id = world.folders["A"]
    asked(scheduler, Verb.PAUSE, "A")
    assert asked(scheduler, Verb.RESUME, "A") == "done"
    world.end("A", exited(ExitCause.STOPPED))
    scheduler.tick()
    assert words(scheduler)["A"] == "running"
    assert world.folders["A"] == run_id


def test_a_run_that_is_pruned_is_told_so_once_and_merged_with_what_it_has(start, world):
    scheduler = two_skills(start)
    folder = world.of("A").job.folder
    folder.mkdir(parents=True)
    assert asked(scheduler, Verb.PRUNE, "A") == "done"
    assert asked(scheduler, Verb.PRUNE, "A") == "done"
    assert (folder / "prune.json").exists()
    assert status(scheduler, "A").stop_reason is StopReason.PRUNE
    world.end("A")
    scheduler.tick()
    assert words(scheduler) == {"A": "completed", "B": "running"}


def test_a_pruned_run_that_leaves_no_result_is_charged(start, world):
    scheduler = two_skills(start)
    asked(scheduler, Verb.PRUNE, "A")
    world.end("A", exited(ExitCause.SIGNAL))
    scheduler.tick()
    assert "left no result" in status(scheduler, "A").why


def test_a_waiting_skill_that_is_paused_does_not_start(start, world):
    scheduler = two_skills(start)
    assert asked(scheduler, Verb.PAUSE, "B") == "done"
    world.end("A")
    scheduler.tick()
    assert words(scheduler) == {"A": "completed", "B": "held"}
    assert "is held until `flowrl resume`" in scheduler.graph_paths.events.read_text()
    asked(scheduler, Verb.RESUME, "B")
    assert words(scheduler)["B"] == "running"


def test_a_cancelled_run_is_not_kept_and_a_retry_starts_anew(start, world):
    scheduler = two_skills(start)
    run_id = world.folders["A"]
    assert asked(scheduler, Verb.CANCEL, "A") == "done"
    world.end("A", exited(ExitCause.STOPPED))
    scheduler.tick()
    assert words(scheduler) == {"A": "failed", "B": "blocked"}
    assert status(scheduler, "A").why == "cancelled on request"
    assert scheduler.state.entries["A"].failures == 0
    assert world.discarded == [run_id]
    asked(scheduler, Verb.RETRY, "A")
    assert world.of("A").task.attempt == 2
    assert world.folders["A"] != run_id


@pytest.mark.parametrize("verb", [Verb.CANCEL, Verb.PRUNE])
def test_a_run_that_ends_for_good_is_not_paused_meanwhile(start, world, verb):
    scheduler = start("A", max_retries=0)
    scheduler.tick()
    asked(scheduler, verb, "A")
    assert asked(scheduler, Verb.PAUSE, "A") == "refused: it was asked to end for good"
    asked(scheduler, Verb.PAUSE)
    asked(scheduler, Verb.PRUNE, "A")
    world.end("A", exited(ExitCause.STOPPED))
    scheduler.tick()
    assert words(scheduler) == {"A": "failed"}
    asked(scheduler, Verb.RESUME)
    assert words(scheduler) == {"A": "failed"}


@pytest.mark.parametrize("refusal", [LaunchError("no tmux"), BusyError("not now")])
@pytest.mark.parametrize(("verb", "word"), [(Verb.CANCEL, "failed"), (Verb.PAUSE, "held")])
def test_a_run_that_cannot_be_launched_obeys_what_was_asked_meanwhile(
    start, world, clock, verb, word, refusal
):
    world.refusals["launch"] = [Killed(), refusal]
    scheduler = start("A")
    with pytest.raises(Killed):
        scheduler.tick()
    scheduler = start()
    asked(scheduler, verb, "A")
    assert not world.refusals["launch"]
    clock.pass_seconds(3600)
    scheduler.tick()
    assert words(scheduler) == {"A": word}


def test_a_run_that_has_finished_before_it_could_be_cancelled_is_merged(start, world):
    scheduler = two_skills(start)
    asked(scheduler, Verb.CANCEL, "A")
    world.end("A")
    scheduler.tick()
    assert words(scheduler)["A"] == "completed"
    assert asked(scheduler, Verb.CANCEL, "A").startswith("refused: it is completed")


def test_a_new_priority_decides_who_starts_next(start, world):
    scheduler = start("A", "B", "C", max_parallel_skills=1)
    scheduler.tick()
    assert asked(scheduler, Verb.PRIORITY, "C", number=7) == "done"
    world.end("A")
    scheduler.tick()
    assert words(scheduler) == {"A": "completed", "B": "waiting", "C": "running"}
    assert lines(scheduler)["C"]["priority"] == 7


def test_stop_lets_what_runs_be_merged_and_starts_nothing_new(start, world):
    scheduler = two_skills(start)
    scheduler.launcher.on_wait = lambda: world.end("A")
    send_request(scheduler.graph_paths, Verb.STOP)
    scheduler.run()
    assert words(scheduler) == {"A": "completed", "B": "waiting"}
    assert scheduler.stopped_on_request
    assert scheduler.state.stop_mode is StopMode.NONE
    start().tick()
    assert len(world.living()) == 1, "the next start goes on"


def test_stop_now_lets_runs_save_what_they_have_and_the_next_start_goes_on(start, world):
    scheduler = two_skills(start)
    run_id = world.folders["A"]

    def play():
        assert world.of("A").asked_to_end
        assert saved(scheduler)["stop_mode"] == "stop_now"
        world.end("A", exited(ExitCause.STOPPED))

    scheduler.launcher.on_wait = play
    send_request(scheduler.graph_paths, Verb.STOP_NOW)
    scheduler.run()
    assert words(scheduler)["A"] == "waiting"
    assert saved(scheduler)["stop_mode"] == ""
    start().tick()
    assert world.folders["A"] == run_id
    assert len(world.living()) == 1


def test_a_daemon_that_is_killed_while_it_stops_goes_on_stopping(start, world):
    scheduler = two_skills(start)
    asked(scheduler, Verb.STOP)
    scheduler = start()
    world.end("A")
    scheduler.run()
    assert scheduler.stopped_on_request
    assert words(scheduler)["B"] == "waiting"


def test_resume_all_takes_a_stop_back_and_wakes_only_what_was_paused(start, world):
    scheduler = start("A", "B", "C")
    scheduler.ask("C", Verb.PAUSE, why="not asked for")
    scheduler.tick()
    assert asked(scheduler, Verb.PAUSE) == "done"
    for name in "AB":
        world.end(name, exited(ExitCause.STOPPED))
    scheduler.tick()
    assert words(scheduler) == dict.fromkeys("ABC", "held")
    asked(scheduler, Verb.STOP)
    assert asked(scheduler, Verb.RESUME) == "done"
    assert scheduler.state.stop_mode is StopMode.NONE
    assert words(scheduler) == {"A": "running", "B": "running", "C": "held"}


@pytest.mark.parametrize(
    ("verb", "skill", "why"),
    [
        (Verb.PAUSE, "Nobody", "no such skill"),
        (Verb.RETRY, "A", "it is running; retry is for skills that are failed, held, waiting"),
        (Verb.RESUME, "A", "nobody asked it to pause"),
        (Verb.RESUME, "B", "it is waiting"),
        (Verb.PRUNE, "B", "it is waiting"),
        (Verb.CANCEL, None, "name it"),
        (Verb.PRIORITY, None, "name it"),
    ],
)
def test_what_makes_no_sense_is_refused_in_the_state(start, verb, skill, why):
    scheduler = two_skills(start)
    before = words(scheduler)
    said = asked(scheduler, verb, skill)
    assert said.startswith("refused: ")
    assert why in said
    assert words(scheduler) == before


def test_every_request_is_heard_by_a_daemon_that_starts_later(start, world):
    scheduler = start("A", "B", "C", "D")
    graph_paths = scheduler.graph_paths
    scheduler.close()
    assert daemon_of(graph_paths.daemon_lock) is None
    names = [
        send_request(graph_paths, Verb.PAUSE, "A"),
        send_request(graph_paths, Verb.CANCEL, "B"),
        send_request(graph_paths, Verb.PRIORITY, "D", number=3),
        send_request(graph_paths, Verb.RETRY, "B"),
        send_request(graph_paths, Verb.RESUME, "A"),
        send_request(graph_paths, Verb.STOP),
    ]
    scheduler = start()
    _ = scheduler.state
    daemon = daemon_of(graph_paths.daemon_lock)
    assert (daemon["pid"], daemon["host"]) == (os.getpid(), os.uname().nodename)
    scheduler.run()
    assert [outcomes(scheduler)[name] for name in names] == ["done"] * 6
    assert words(scheduler) == dict.fromkeys("ABCD", "waiting")
    assert scheduler.state.entries["D"].priority == 3
    assert scheduler.state.entries["B"].status.attempt == 2


@pytest.mark.parametrize("fatal", ["save", "unlink"])
def test_a_request_is_obeyed_once_though_the_daemon_dies_around_its_acknowledgement(
    start, world, monkeypatch, fatal
):
    scheduler = start("A", max_retries=0)
    scheduler.tick()
    world.end("A", exited(ExitCause.EXIT, code=1))
    scheduler.tick()
    name = send_request(scheduler.graph_paths, Verb.RETRY, "A")
    place = scheduler.inbox if fatal == "unlink" else scheduler.state_file

    def die(*_):
        raise Killed(fatal)

    monkeypatch.setattr(place, "done" if fatal == "unlink" else "save", die)
    with pytest.raises(Killed):
        scheduler.tick()
    assert (scheduler.graph_paths.requests / f"{name}.json").exists()
    scheduler = start(max_retries=0)
    scheduler.tick()
    world.end("A", exited(ExitCause.EXIT, code=1))
    scheduler.tick()
    scheduler.tick()
    assert words(scheduler) == {"A": "failed"}, "it was retried once, not twice"
    assert [task.attempt for task in world.prepared] == [1, 2]
    assert list(outcomes(scheduler).values()) == ["done"]
    assert not list(scheduler.graph_paths.requests.iterdir())


HOSTILE = {
    "unknown verb": '{"format": 1, "verb": "rm -rf /", "skill": "A"}',
    "no verb": '{"format": 1, "skill": "A"}',
    "list": "[]",
    "torn": '{"format": 1',
    "deep": "[" * 4000,
    "newer": '{"format": 2, "verb": "pause", "skill": "A"}',
    "skill is a list": '{"format": 1, "verb": "pause", "skill": ["A"]}',
    "skill is a path": '{"format": 1, "verb": "pause", "skill": "../../etc/passwd"}',
    "newline": '{"format": 1, "verb": "pause", "skill": "A\\nB"}',
    "huge number": '{"format": 1, "verb": "priority", "skill": "A", "number": 1e999}',
    "a large number": f'{{"format": 1, "verb": "priority", "skill": "A", "number": {10**9}}}',
    "true": '{"format": 1, "verb": "priority", "skill": "A", "number": true}',
    "too large": '{"format": 1, "verb": "pause", "skill": "A", "x": "' + "x" * 5000 + '"}',
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_request_does_nothing_and_is_answered(start, world, text):
    scheduler = two_skills(start)
    before = words(scheduler)
    storage.make_dir(scheduler.graph_paths.requests)
    (scheduler.graph_paths.requests / "1-0badcafe.json").write_text(text)
    scheduler.tick()
    assert outcomes(scheduler)["1-0badcafe"].startswith("refused: ")
    assert words(scheduler) == before
    assert not list(scheduler.graph_paths.requests.iterdir())


def test_links_folders_pipes_and_strange_names_are_no_requests(start, tmp_path, caplog):
    scheduler = two_skills(start)
    folder = storage.make_dir(scheduler.graph_paths.requests)
    good = '{"format": 1, "verb": "cancel", "skill": "A"}'
    secret = tmp_path / "secret.json"
    secret.write_text(good)
    (folder / "1-0badcafe.json").symlink_to(secret)
    (folder / "2-0badcafe.json").mkdir()
    os.mkfifo(folder / "3-0badcafe.json")
    (folder / "x;reboot.json").write_text(good)
    (folder / f"{'9' * 30}-0badcafe.json").write_text(good)
    scheduler.tick()
    scheduler.tick()
    assert words(scheduler)["A"] == "running"
    assert secret.read_text() == good
    assert all(said.startswith("refused") for said in outcomes(scheduler).values())
    assert caplog.text.count("x;reboot.json' is ignored: no request has this name; remove it") == 1
    assert not scheduler.inbox.waiting, "what stays there does not keep the daemon awake"
    assert asked_beside(scheduler, Verb.PAUSE, "A") == "done"


def asked_beside(scheduler, verb, skill):
    name = send_request(scheduler.graph_paths, verb, skill)
    scheduler.tick()
    return outcomes(scheduler)[name]


def test_a_request_that_the_disk_cannot_read_is_read_later(start, monkeypatch):
    scheduler = two_skills(start)
    name = send_request(scheduler.graph_paths, Verb.PRIORITY, "A", number=3)

    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(requests.records, "read", fail)
        scheduler.tick()
    scheduler.tick()
    assert outcomes(scheduler)[name] == "done"


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [FULL, OSError(errno.EIO, "Input/output error")])
def test_a_skill_that_the_machine_cannot_add_now_is_added_later(start, error):
    heard, errors = [], [error]

    def on_add(skill):
        heard.append(skill)
        if errors:
            raise errors.pop()
        scheduler.add_skill(skill)

    scheduler = two_skills(start)
    scheduler.set_callbacks(on_add=on_add)
    add = send_request(scheduler.graph_paths, Verb.ADD, "C")
    pause = send_request(scheduler.graph_paths, Verb.PAUSE, "B")
    scheduler.tick()
    assert outcomes(scheduler) == {pause: "done"}, "the others do not wait"
    assert not scheduler.inbox.waiting, "what has to wait does not keep the daemon awake"
    scheduler.tick()
    assert outcomes(scheduler) == {pause: "done", add: "done"}
    assert heard == ["C", "C"]
    assert not list(scheduler.graph_paths.requests.iterdir())


def test_no_skill_is_added_while_the_disk_is_full(start, monkeypatch):
    scheduler = two_skills(start)
    scheduler.set_callbacks(on_add=scheduler.add_skill)
    with monkeypatch.context() as full:
        full.setattr(health, "disk_shortage", lambda _: ("disk", "it is full"))
        add = send_request(scheduler.graph_paths, Verb.ADD, "C")
        scheduler.tick()
        assert outcomes(scheduler) == {}
        assert "C" not in words(scheduler)
    scheduler.tick()
    assert outcomes(scheduler) == {add: "done"}
    assert words(scheduler)["C"] == "running"


def test_a_skill_that_cannot_be_added_for_another_reason_is_refused(start):
    def on_add(skill):
        raise OSError(errno.ENAMETOOLONG, "File name too long")

    scheduler = two_skills(start)
    scheduler.set_callbacks(on_add=on_add)
    assert asked(scheduler, Verb.ADD, "C") == "refused: File name too long"


@pytest.mark.parametrize("asked_later", [False, True])
def test_a_skill_whose_source_cannot_be_kept_now_is_added_later(tmp_path, monkeypatch, asked_later):
    errors, record = [FULL], SkillSources.record

    def record_later(*args):
        if errors:
            raise errors.pop()
        record(*args)

    with SkillScheduler(tmp_path, launcher=LocalLauncher()) as scheduler:
        flow = Flow(GRAPH, known=(), target=WOOD if asked_later else TABLE)
        feeder = feeder_of(flow, scheduler)
        if asked_later:
            feeder.begin()
        monkeypatch.setattr(SkillSources, "record", record_later)
        add = partial(feeder.add, GRAPH, TABLE) if asked_later else feeder.begin
        with pytest.raises(OSError, match="No space left"):
            add()
        add()
        assert list(words(scheduler)) == [WOOD, TABLE]


def test_a_requests_folder_that_is_a_link_is_not_followed(start, tmp_path):
    scheduler = two_skills(start)
    elsewhere = storage.make_dir(tmp_path / "elsewhere")
    (elsewhere / "1-0badcafe.json").write_text('{"format": 1, "verb": "cancel", "skill": "A"}')
    scheduler.graph_paths.requests.symlink_to(elsewhere)
    scheduler.tick()
    assert words(scheduler)["A"] == "running"
    assert list(elsewhere.iterdir())


def test_a_flood_of_requests_is_taken_piece_by_piece_and_the_answers_stay_few(start):
    scheduler = two_skills(start)
    for number in range(3 * MOST_AT_ONCE):
        send_request(scheduler.graph_paths, Verb.PRIORITY, "A", number=number)
    scheduler.tick()
    assert len(list(scheduler.graph_paths.requests.iterdir())) == 2 * MOST_AT_ONCE
    scheduler.tick()
    scheduler.tick()
    assert not list(scheduler.graph_paths.requests.iterdir())
    assert len(saved(scheduler)["requests"]) == 100
    assert scheduler.state.entries["A"].priority == 3 * MOST_AT_ONCE - 1


def test_a_users_wish_is_not_replaced_by_the_schedulers_own(start, world):
    scheduler = start("A", stall_timeout=1e-9)
    scheduler.tick()
    asked(scheduler, Verb.PAUSE, "A")
    scheduler.tick()
    assert status(scheduler, "A").stop_reason is StopReason.PAUSE
    world.end("A", finished(world.folders["A"]))
    scheduler.tick()
    assert isinstance(status(scheduler, "A"), Completed)


def test_a_request_is_logged_in_the_words_of_the_command_line(caplog):
    caplog.set_level("INFO", logger="flowrl")
    at = datetime(2030, 1, 1, tzinfo=UTC)
    stop = Response(id="x", verb="stop_now", skill=None, at=at, outcome="done")
    log_responses([], [stop, replace(stop, verb="pause", skill="A")])
    assert caplog.messages == ["request stop --now: done", "request pause A: done"]
