"""The log of a run that failed: what is shown of it."""

from __future__ import annotations

import pytest

from flowrl import storage
from flowrl.launchers.base import ExitCause
from flowrl.parallel.health import read_log_tail
from flowrl.paths import RunPaths
from flowrl.redaction import cleaned
from flowrl.runs import REPORT
from tests.parallel.scheduling import exited, lines, status

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


def test_the_last_lines_of_its_log_say_why_a_run_failed(start, world, clock):
    scheduler = start("A", max_retries=1)
    texts = [ERROR.format(n=n) for n in (1, 2)]
    fail_again_and_again(scheduler, world, clock, texts, exited(ExitCause.EXIT, code=1))
    assert [task.attempt for task in world.prepared] == [1, 2]
    failed = status(scheduler, "A")
    assert failed.why == "exit 1: ValueError: 2 rows at 0x7f2, not 8; attempt 2 of 2"
    assert failed.log[-1] == "ValueError: 2 rows at 0x7f2, not 8"
    assert failed.log[0] == "update 2 99 %", "as a terminal shows it"
    assert lines(scheduler)["A"]["log"] == list(failed.log)


BANNER = """--------------------
For simplicity, JAX has removed its internal frames from the traceback.
wandb: You can sync this run to the cloud by running:
"""


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("flowrl: --lr 0 must be above 0\n" + BANNER, "flowrl: --lr 0 must be above 0"),
        ("jax.errors.XlaError: no memory\n" + BANNER * 20, "jax.errors.XlaError: no memory"),
        (f"OSError: a tracker\n12:00:00 training{REPORT}7\nF0 Check failed\n", "F0 Check failed"),
        ("sh: bwrap: not found\n", "sh: bwrap: not found"),
    ],
)  # fmt: skip
def test_a_log_ends_with_the_reason_and_not_with_a_banner(tmp_path, text, last):
    (tmp_path / "training.log").write_text(text)
    assert read_log_tail(tmp_path / "training.log")[-1] == last


def test_a_hostile_log_is_read_in_bounds(tmp_path):
    log = tmp_path / "training.log"
    log.write_bytes(b"\xff\x1b[2J\x07" + b"x" * 10**6 + b"\n" + b"\n" * 5 + b"end\x00\n")
    said = cleaned(read_log_tail(log), ())
    assert said[-1] == "end"
    assert all(len(line) <= 300 and line.isprintable() for line in said)
    log.unlink()
    log.symlink_to("/etc/passwd")
    assert read_log_tail(log) == ()
