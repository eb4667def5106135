"""One skill's trouble is its own: what its files or callbacks raise never stops the others."""

from __future__ import annotations

import errno
import os

import pytest

from flowrl.errors import FileRefusedError, GraphDamagedError, GraphError, LaunchError
from flowrl.launchers.base import ExitCause
from flowrl.parallel.events import Verb
from tests.parallel.scheduling import FakeBackend, exited, status, words

BUGS = (AssertionError, AttributeError, NotImplementedError, MemoryError)
DATA_ERRORS = (ValueError, KeyError, TypeError, ZeroDivisionError, RecursionError, GraphError)


@pytest.mark.parametrize("error", [*DATA_ERRORS, OSError], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("hook", ["on_skill_complete", "on_skill_failed"])
def test_a_callback_that_meets_bad_data_is_logged_and_the_others_go_on(
    start, world, caplog, hook, error
):
    def bad(skill):
        raise error("bad data")

    scheduler = start(max_retries=0)
    scheduler.set_callbacks(**{hook: bad})
    for name in "ABC":
        scheduler.add_skill(name)
    scheduler.tick()
    world.end("A")
    world.end("B", exited(ExitCause.EXIT, code=1))
    scheduler.tick()
    world.end("C")
    scheduler.tick()
    assert words(scheduler) == {"A": "completed", "B": "failed", "C": "completed"}
    assert "its callback has failed" in caplog.text
    assert "bad data" in caplog.text


@pytest.mark.parametrize("error", BUGS, ids=lambda kind: kind.__name__)
def test_a_bug_in_a_callback_ends_the_daemon_and_the_next_one_goes_on(start, world, error):
    def buggy(skill):
        raise error("a bug")

    scheduler = start()
    scheduler.set_callbacks(on_skill_complete=buggy)
    for name in "AB":
        scheduler.add_skill(name)
    scheduler.tick()
    world.end("A")
    with pytest.raises(error, match="a bug"):
        scheduler.tick()
    scheduler = start()
    scheduler.tick()
    assert words(scheduler) == {"A": "completed", "B": "running"}
    assert len(world.runs) == 2


@pytest.mark.parametrize("verb", ["prepare", "launch", "merge"])
@pytest.mark.parametrize("error", DATA_ERRORS, ids=lambda kind: kind.__name__)
def test_a_run_whose_files_cannot_be_understood_is_the_fate_of_its_skill(
    start, world, clock, caplog, verb, error
):
    scheduler = start("B", max_retries=0)
    scheduler.tick()
    scheduler.add_skill("A")
    world.refusals[verb] = [error("bad data") for _ in range(6)]
    for _ in range(8):
        scheduler.tick()
        clock.pass_seconds(3600)
        if world.folders.get("A") and world.of("A") in world.living():
            world.end("A")
    assert status(scheduler, "A").kind == "failed"
    assert "bad data" in status(scheduler, "A").why
    world.refusals.clear()
    world.end("B")
    scheduler.tick()
    assert words(scheduler) == {"B": "completed", "A": "failed"}


@pytest.mark.parametrize("verb", ["prepare", "launch", "merge"])
def test_a_damaged_graph_is_of_no_one_skill_and_ends_the_daemon(start, world, verb):
    scheduler = start("A", max_retries=0)
    world.refusals[verb] = [GraphDamagedError("global_latest.json is lost")]
    with pytest.raises(GraphDamagedError, match="is lost"):  # noqa: PT012 — in one of the two
        scheduler.tick()
        world.end("A")
        scheduler.tick()
    scheduler = start(max_retries=0)
    scheduler.tick()
    if world.living():
        world.end("A")
        scheduler.tick()
    assert words(scheduler) == {"A": "completed"}
    assert len(world.runs) == len(world.ledger) == 1


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM])
@pytest.mark.parametrize("verb", ["prepare", "launch", "merge", "poll"])
def test_a_limit_of_the_machine_is_met_again_and_nothing_is_lost(start, world, clock, verb, number):
    """FAULTS 45: too many open files or processes."""
    scheduler = start("A", max_retries=0)
    refused = FileRefusedError("run.json cannot be read")
    refused.__cause__ = OSError(number, "limit")
    world.refusals[verb] = [OSError(number, "limit"), refused, OSError(number, "limit")]
    for _ in range(8):
        scheduler.tick()
        if world.living():
            world.end("A")
        clock.pass_seconds(3600)
    assert words(scheduler) == {"A": "completed"}
    assert len(world.runs) == len(world.ledger) == 1


def test_a_run_whose_record_the_machine_cannot_read_now_is_not_lost(start, world, monkeypatch):
    scheduler = start("A", max_retries=0)
    scheduler.tick()
    scheduler = start(max_retries=0)
    with monkeypatch.context() as limited:

        def refuse(*_):
            raise FileRefusedError("run.json cannot be read") from OSError(errno.EMFILE, "limit")

        limited.setattr(FakeBackend, "reopen", refuse)
        scheduler.tick()
        assert words(scheduler) == {"A": "running"}
    world.end("A")
    scheduler.tick()
    assert words(scheduler) == {"A": "completed"}


def test_an_end_that_the_machine_cannot_look_at_now_is_seen_later(start, world, monkeypatch):
    scheduler = start("A", max_retries=0)
    scheduler.tick()
    world.of("A").job.folder.mkdir(parents=True, exist_ok=True)
    world.end("A", exited(ExitCause.EXIT, code=1))
    with monkeypatch.context() as limited:

        def refuse(*_):
            raise OSError(errno.EMFILE, "limit")

        limited.setattr(os, "scandir", refuse)
        scheduler.tick()
        assert words(scheduler) == {"A": "running"}
    scheduler.tick()
    assert words(scheduler) == {"A": "failed"}


def test_a_cancel_that_does_not_arrive_is_sent_again(start, world):
    scheduler = start("A")
    scheduler.tick()
    scheduler.ask("A", Verb.PAUSE)
    world.refusals["stop"] = [LaunchError("no answer"), LaunchError("no answer")]
    for _ in range(4):
        scheduler.tick()
    assert world.of("A").asked_to_end
    assert not world.refusals["stop"]


def test_a_callback_that_lacks_room_is_called_again(start, world):
    heard = []

    def on_complete(skill):
        heard.append(skill)
        if len(heard) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        scheduler.add_skill("B", {}, ["A"])

    scheduler = start()
    scheduler.set_callbacks(on_skill_complete=on_complete)
    scheduler.add_skill("A")
    scheduler.tick()
    world.end("A")
    scheduler.launcher.on_wait = lambda: [world.end(p.task.skill) for p in world.living()]
    assert scheduler.run().complete
    assert heard == ["A", "A", "A", "B"]
