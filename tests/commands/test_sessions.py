"""`flowrl logs`: which log, and as what it is printed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from flowrl import cli
from flowrl.commands import sessions
from flowrl.launchers import process
from flowrl.launchers.run_status import LOG_WRITER
from tests.commands.making import DONE, FAILED, WAITING, running, save, write_log
from tests.waiting import until


def logged(root, skill="A", *words):
    return cli.main(["logs", skill, "--graph-path", str(root), *words])


def test_the_log_of_a_live_run_comes_before_all_others(tmp_path, capsys):
    graph_paths = save(tmp_path, ("A", running()))
    write_log(graph_paths.run(0, "A").training_log, "live\n")
    write_log(graph_paths.skill_folder(0, "A") / "training.log", "archived\n")
    write_log(graph_paths.failed_run(0, "A", 1) / "training.log", "failed\n")
    assert logged(tmp_path) == 0
    assert capsys.readouterr().out == "live\n"


def test_the_archived_log_of_a_trained_skill_is_printed(tmp_path, capsys):
    graph_paths = save(tmp_path, ("A", DONE))
    write_log(graph_paths.skill_folder(0, "A") / "training.log", "archived\n")
    write_log(graph_paths.failed_run(0, "A", 1) / "training.log", "failed\n")
    assert logged(tmp_path, "0") == 0
    assert capsys.readouterr().out == "archived\n"


def test_of_failed_attempts_the_newest_is_printed(tmp_path, capsys):
    graph_paths = save(tmp_path, ("A", FAILED), ("A A", FAILED))
    for age, place in enumerate(
        [
            graph_paths.failed_run(0, "A", 1).with_name("skill_0_A.attempt1.1"),
            graph_paths.failed_run(0, "A", 10),
            graph_paths.failed_run(0, "A", 9),
        ]
    ):
        log = write_log(place / "training.log", f"{place.name}\n")
        os.utime(log, (1000 - age, 1000 - age))
    write_log(graph_paths.failed_run(1, "A A", 1) / "training.log", "of another skill\n")
    assert logged(tmp_path) == 0
    assert capsys.readouterr().out == "skill_0_A.attempt1.1\n"


@pytest.mark.parametrize("status", [WAITING, FAILED, DONE], ids=lambda status: status.kind)
def test_a_skill_without_a_log_says_what_it_is(tmp_path, capsys, status):
    save(tmp_path, ("A", status))
    assert logged(tmp_path) == 1
    assert f"A has no training log: it is {status.kind}" in capsys.readouterr().err


def test_bytes_that_are_no_text_are_replaced(tmp_path, capsys):
    graph_paths = save(tmp_path, ("A", DONE))
    log = write_log(graph_paths.skill_folder(0, "A") / "training.log", "")
    log.write_bytes(b"good\n\xff\xfe\n")
    assert logged(tmp_path) == 0
    assert capsys.readouterr().out == "good\n\ufffd\ufffd\n"


def test_following_prints_what_is_added_until_the_run_has_ended(tmp_path, capsys, monkeypatch):
    graph_paths = save(tmp_path, ("A", running()))
    log = write_log(graph_paths.run(0, "A").training_log, "one\n")
    steps = iter(["two\n", "three\n"])

    def pass_time(_):
        with log.open("a") as file:
            file.write(next(steps))
        if "three" in log.read_text():
            # The run ends, and a merge moves its log away from under the reader.
            save(tmp_path, ("A", DONE))
            log.rename(tmp_path / "moved")

    monkeypatch.setattr(time, "sleep", pass_time)
    assert logged(tmp_path, "A", "-f") == 0
    assert capsys.readouterr().out == "one\ntwo\nthree\n"


def test_following_goes_on_in_the_next_log_once_one_is_long(tmp_path, capsys, monkeypatch):
    graph_paths = save(tmp_path, ("A", running()))
    log = write_log(graph_paths.run(0, "A").training_log, "")
    lines = [f"line {number}\n" for number in range(40)]
    left = iter(lines)
    words = [sys.executable, "-I", "-S", LOG_WRITER, log, "120"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as writer:

        def pass_time(_):
            if (line := next(left, None)) is None:
                save(tmp_path, ("A", DONE))
                return
            writer.stdin.write(line.encode())
            writer.stdin.flush()
            until(lambda: log.exists() and line in log.read_text())

        monkeypatch.setattr(sessions, "time", SimpleNamespace(sleep=pass_time))
        assert logged(tmp_path, "A", "-f") == 0
        writer.stdin.close()
    assert log.with_name("training.log.1").exists()
    assert capsys.readouterr().out == "".join(lines)


def test_following_ends_with_the_run_while_no_scheduler_says_so(tmp_path, capsys, monkeypatch):
    child = subprocess.Popen(["sleep", "600"])
    status = running()
    handle = replace(status.handle, pid=child.pid, start_time=process.start_time_of(child.pid))
    graph_paths = save(tmp_path, ("A", replace(status, handle=handle)))
    log = write_log(graph_paths.run(0, "A").training_log, "one\n")

    def pass_time(_):
        with log.open("a") as file:
            file.write("two\n")
        child.kill()
        child.wait()

    monkeypatch.setattr(time, "sleep", pass_time)
    assert logged(tmp_path, "A", "-f") == 0
    assert capsys.readouterr().out == "one\ntwo\n"


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("", ""),
        ("a\nb\n", "a\nb\n"),
        ("a\r\nb\r\n", "a\nb\n"),
        ("10 %\r20 %\n", "10 %\n20 %\n"),
        ("\x1b[1;32mgreen\x1b[0m plain\n", "green plain\n"),
        ("\x1b[2K\x1b[9Aabove\n", "above\n"),
        ("\x1b]52;c;aGk=\x07 \x9b1m\n", "]52;c;aGk= 1m\n"),
        ("ü – 漢\n", "ü – 漢\n"),
        ("  wide   \x1b[0m \r\n\n as the pane  ", "  wide\n\n as the pane  "),
    ],
    ids=repr,
)
def test_a_log_does_nothing_to_the_terminal(tmp_path, capsys, raw, text):
    graph_paths = save(tmp_path, ("A", DONE))
    log = write_log(graph_paths.skill_folder(0, "A") / "training.log", "")
    log.write_bytes(raw.encode())
    assert logged(tmp_path) == 0
    assert capsys.readouterr().out == text
