"""`flowrl retry` and `flowrl check`."""

from __future__ import annotations

import pytest

from flowrl import cli
from flowrl.parallel.asks import Verb
from flowrl.parallel.requests import Inbox
from tests.report.making import DONE, FAILED, HELD, WAITING, running, save
from tests.skills.making import skill_text


@pytest.mark.parametrize("status", [FAILED, HELD], ids=lambda status: status.word)
@pytest.mark.parametrize("word", ["A B", "a_b", "0"])
def test_a_retry_is_left_for_the_scheduler(tmp_path, capsys, status, word):
    layout = save(tmp_path, ("A B", status))
    assert cli.main(["retry", word, "--graph-path", str(tmp_path)]) == 0
    assert [(r.verb, r.skill) for r in Inbox(layout).take()] == [(Verb.RETRY, "A B")]
    said = capsys.readouterr().out
    assert "A B will be tried again" in said
    assert f"python -m flowrl.bottomup_parallel --graph_path {tmp_path}" in said


@pytest.mark.parametrize("status", [DONE, WAITING, running()], ids=lambda status: status.word)
def test_only_what_failed_or_is_held_can_be_retried(tmp_path, capsys, status):
    layout = save(tmp_path, ("A", status))
    assert cli.main(["retry", "A", "--graph-path", str(tmp_path)]) == 1
    assert f"A is {status.word}; only failed and held skills" in capsys.readouterr().err
    assert not layout.requests.exists()


def test_two_retries_at_once_are_two_requests(tmp_path):
    layout = save(tmp_path, ("A", FAILED))
    for _ in range(2):
        assert cli.main(["retry", "A", "--graph-path", str(tmp_path)]) == 0
    assert len(Inbox(layout).take()) == 2


def test_good_skill_files_are_passed_in_silence(tmp_path, capsys):
    file = tmp_path / "good.py"
    file.write_text(skill_text())
    assert cli.main(["check", str(file)]) == 0
    assert capsys.readouterr().out == ""


def test_a_check_of_no_files_is_refused(capsys):
    assert cli.main(["check"]) == 2
    assert "name at least one" in capsys.readouterr().err


def test_a_skill_that_names_what_no_game_has_is_refused(tmp_path, capsys):
    file = tmp_path / "wood.py"
    file.write_text(
        skill_text(is_done="def task_is_done(n):\n    return BlockType.TREEE.value > n")
    )
    assert cli.main(["check", str(file)]) == 1
    assert "BlockType.TREEE is not in either game; closest are TREE" in capsys.readouterr().out


def test_every_bad_skill_file_gets_one_line_that_names_it(tmp_path, capsys):
    good, torn, evil = (tmp_path / name for name in ("good.py", "torn.py", "evil.py"))
    good.write_text(skill_text())
    torn.write_text("def (")
    evil.write_text(
        skill_text().replace("return inventory.wood >= n", "return open('/etc/passwd')")
    )
    words = [str(path) for path in (good, torn, evil, tmp_path / "missing.py")]
    assert cli.main(["check", *words]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(".py")[0].rpartition("/")[2] for line in lines] == [
        "torn",
        "evil",
        "missing",
    ]
    assert "good" not in "".join(lines)
