"""`flowrl logs`: which log, and as what it is printed."""

from __future__ import annotations

import io
import os
import time

import pytest
from rich.console import Console
from rich.live import Live
from rich.table import Table

from flowrl import cli
from flowrl.commands.logs import as_shown
from tests.commands.making import DONE, FAILED, WAITING, running, save, write_log


def logged(root, skill="A", *words):
    return cli.main(["logs", skill, "--graph-path", str(root), *words])


def test_the_log_of_a_live_run_comes_before_all_others(tmp_path, capsys):
    layout = save(tmp_path, ("A", running()))
    write_log(layout.run(0, "A").training_log, "live\n")
    write_log(layout.skill_folder(0, "A") / "training.log", "archived\n")
    write_log(layout.failed_run(0, "A", 1) / "training.log", "failed\n")
    assert logged(tmp_path) == 0
    assert capsys.readouterr().out == "live\n"


def test_the_archived_log_of_a_trained_skill_is_printed(tmp_path, capsys):
    layout = save(tmp_path, ("A", DONE))
    write_log(layout.skill_folder(0, "A") / "training.log", "archived\n")
    write_log(layout.failed_run(0, "A", 1) / "training.log", "failed\n")
    assert logged(tmp_path, "0") == 0
    assert capsys.readouterr().out == "archived\n"


def test_of_failed_attempts_the_newest_is_printed(tmp_path, capsys):
    layout = save(tmp_path, ("A", FAILED), ("A A", FAILED))
    for age, place in enumerate(
        [
            layout.failed_run(0, "A", 1).with_name("skill_0_A.attempt1.1"),
            layout.failed_run(0, "A", 10),
            layout.failed_run(0, "A", 9),
        ]
    ):
        log = write_log(place / "training.log", f"{place.name}\n")
        os.utime(log, (1000 - age, 1000 - age))
    write_log(layout.failed_run(1, "A A", 1) / "training.log", "of another skill\n")
    assert logged(tmp_path) == 0
    assert capsys.readouterr().out == "skill_0_A.attempt1.1\n"


@pytest.mark.parametrize("status", [WAITING, FAILED, DONE], ids=lambda status: status.kind)
def test_a_skill_without_a_log_says_what_it_is(tmp_path, capsys, status):
    save(tmp_path, ("A", status))
    assert logged(tmp_path) == 1
    assert f"A has no training log: it is {status.kind}" in capsys.readouterr().err


def test_an_unknown_skill_is_refused_with_the_names_there_are(tmp_path, capsys):
    save(tmp_path, ("A", DONE))
    assert logged(tmp_path, "B") == 1
    assert "has no skill 'B'; it has: A" in capsys.readouterr().err


def test_a_log_that_is_a_link_is_not_followed(tmp_path, capsys):
    layout = save(tmp_path, ("A", running()))
    secret = write_log(tmp_path / "secret", "secret\n")
    write_log(layout.run(0, "A").training_log, "").unlink()
    layout.run(0, "A").training_log.symlink_to(secret)
    assert logged(tmp_path) == 1
    assert "secret" not in capsys.readouterr().out


def test_bytes_that_are_no_text_are_replaced(tmp_path, capsys):
    layout = save(tmp_path, ("A", DONE))
    log = write_log(layout.skill_folder(0, "A") / "training.log", "")
    log.write_bytes(b"good\n\xff\xfe\n")
    assert logged(tmp_path) == 0
    assert capsys.readouterr().out == "good\n\ufffd\ufffd\n"


def test_following_prints_what_is_added_until_the_run_has_ended(tmp_path, capsys, monkeypatch):
    layout = save(tmp_path, ("A", running()))
    log = write_log(layout.run(0, "A").training_log, "one\n")
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


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("", ""),
        ("a\nb\n", "a\nb\n"),
        ("a\r\nb\r\n", "a\nb\n"),
        ("10 %\r20 %\r30 %\n", "30 %\n"),
        ("\x1b[1;32mgreen\x1b[0m plain\n", "green plain\n"),
        ("\x1b[?25lhidden\x1b[?25h\n", "hidden\n"),
        ("a 1\nb 1\n\x1b[2A\r\x1b[2Ka 2\n\r\x1b[2Kb 2\n", "a 2\nb 2\n"),
        ("a\nb\n\x1b[1A\x1b[2K\x1b[1A\x1b[2Kc\n", "c\n\n"),
        ("\x1b[9Aabove\n", "above\n"),
        ("\x1b[Aabove\n", "above\n"),
        ("cut \x1b[", "cut ["),
        ("alone \x1b", "alone "),
        ("ü – 漢\n", "ü – 漢\n"),
    ],
    ids=repr,
)
def test_a_log_is_shown_as_a_terminal_shows_it_in_the_end(raw, text):
    assert as_shown(raw) == text


def test_a_live_table_that_was_redrawn_a_hundred_times_is_shown_once():
    def table(number):
        grid = Table.grid()
        grid.add_row(f"update {number}")
        grid.add_row("success [bold]")
        return grid

    file = io.StringIO()
    console = Console(force_terminal=True, width=60, file=file)
    with Live(table(0), console=console, auto_refresh=False) as live:
        for number in range(1, 101):
            live.update(table(number), refresh=True)
    lines = [line.rstrip() for line in as_shown(file.getvalue()).splitlines() if line.strip()]
    assert lines[0] == "update 100"
    assert len(lines) == 2
