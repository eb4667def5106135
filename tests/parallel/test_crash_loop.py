"""The same error twice ends the retries; what killed a run from outside does not."""

from __future__ import annotations

import pytest

from flowrl import storage
from flowrl.launchers.base import ExitCause, Lost
from flowrl.parallel.health import error_digest, read_log_tail
from flowrl.paths import RunPaths
from tests.parallel.scheduling import exited, lines, status, words

ERROR = """\x1b[32mupdate {n}\x1b[0m 10 %\rupdate {n} 99 %\r
Traceback (most recent call last):
  File "/graph/training_runs/e0.a{n}.0badcaf{n}/0.py", line 3, in reward
ValueError: {n} rows at 0x7f{n}, not 8
"""


def write_log(world, skill, text):
    job = world.of(skill).job
    storage.make_dir(job.folder)
    RunPaths(job.folder, 0).training_log.write_text(text)


def fail_again_and_again(scheduler, world, clock, texts, end):
    for text in texts:
        scheduler.tick()
        if not world.living():
            return
        write_log(world, "A", text)
        world.end("A", end)
        scheduler.tick()
        clock.pass_seconds(3600)


def test_the_same_error_twice_is_not_tried_a_third_time(start, world, clock):
    scheduler = start(max_retries=9)
    scheduler.add_skill("A")
    texts = [ERROR.format(n=n) for n in range(1, 9)]
    fail_again_and_again(scheduler, world, clock, texts, exited(ExitCause.EXIT, code=1))
    assert [task.attempt for task in world.prepared] == [1, 2]
    failed = status(scheduler, "A")
    assert failed.why == "exit 1: ValueError: 2 rows at 0x7f2, not 8; the same error twice"
    assert failed.log[-1] == "ValueError: 2 rows at 0x7f2, not 8"
    assert failed.log[0] == "update 2 99 %", "as a terminal shows it"
    assert lines(scheduler)["A"]["log"] == list(failed.log)
    scheduler.retry("A")
    assert scheduler.state.entries["A"].error == ""


def test_another_error_each_time_uses_up_the_retries(start, world, clock):
    scheduler = start(max_retries=3)
    scheduler.add_skill("A")
    texts = [f"{ERROR.format(n=1)}{word}Error: x\n" for word in ("One", "Two", "One", "Two")]
    fail_again_and_again(scheduler, world, clock, texts, exited(ExitCause.EXIT, code=1))
    assert len(world.prepared) == 4
    assert "attempt 4 of 4" in status(scheduler, "A").why


@pytest.mark.parametrize(
    "end",
    [exited(ExitCause.SIGNAL, signal=9), exited(ExitCause.OOM), Lost()],
    ids=["killed", "out of memory", "lost"],
)
def test_what_killed_a_run_from_outside_is_no_error_of_its_own(start, world, clock, end):
    scheduler = start(max_retries=2)
    scheduler.add_skill("A")
    fail_again_and_again(scheduler, world, clock, ["update 1\n"] * 3, end)
    assert len(world.prepared) == 3


def test_a_segmentation_fault_is_an_error_of_its_own(start, world, clock):
    scheduler = start(max_retries=2)
    scheduler.add_skill("A")
    end = exited(ExitCause.SIGNAL, signal=11)
    fail_again_and_again(scheduler, world, clock, ["Fatal Python error\n"] * 3, end)
    assert len(world.prepared) == 2


def test_runs_without_a_log_are_never_taken_for_the_same_error(start, world, clock):
    scheduler = start(max_retries=2)
    scheduler.add_skill("A")
    fail_again_and_again(scheduler, world, clock, [""] * 3, exited(ExitCause.EXIT, code=1))
    assert len(world.prepared) == 3
    assert words(scheduler) == {"A": "failed"}


def test_the_digest_is_of_the_last_traceback_and_not_of_numbers_or_addresses():
    said = ERROR.format(n=3).splitlines()
    assert error_digest(said) == error_digest(
        ["other", "words", *ERROR.format(n=4).splitlines()[1:]]
    )
    assert error_digest(said) != error_digest([*said[:-1], "ValueError: other"])
    assert error_digest([]) == ""


def test_a_hostile_log_is_read_in_bounds(tmp_path):
    log = tmp_path / "training.log"
    log.write_bytes(b"\xff\x1b[2J\x07" + b"x" * 10**6 + b"\n" + b"\n" * 5 + b"end\x00\n")
    said = read_log_tail(log)
    assert said.lines[-1] == "end"
    assert all(len(line) <= 300 and line.isprintable() for line in said.lines)
    log.unlink()
    log.symlink_to("/etc/passwd")
    assert read_log_tail(log).lines == ()
