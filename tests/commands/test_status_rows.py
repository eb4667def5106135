"""What is read from a graph's folder."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from flowrl.errors import FileRefusedError, GraphError
from flowrl.launchers.base import Handle
from flowrl.launchers.process import start_time_of
from flowrl.parallel.status import Blocked
from flowrl.paths import GraphPaths
from flowrl.reports.status import all_ended, find_row, read_rows, screen
from tests.commands.making import DONE, FAILED, HELD, WAITING, running, save, tell_progress

FROZEN = Path(__file__).parents[1] / "data" / "scheduler_state_v1.json"


def test_the_frozen_state_file_is_read_row_by_row(tmp_path):
    graph_paths = GraphPaths(tmp_path)
    shutil.copy(FROZEN, graph_paths.scheduler_state)
    rows = read_rows(graph_paths)
    assert [row.skill for row in rows] == [f"skill {number}" for number in range(13)]
    words = "waiting waiting preparing running running merging completed failed held blocked"
    words += " failed running running"
    assert [row.status for row in rows] == words.split()
    assert [row.expert for row in rows] == list(range(13))
    assert (rows[1].attempt, rows[1].why) == (3, "exit 1")
    assert (rows[3].session, rows[3].devices, rows[3].frames) == ("s", ("GPU-1",), None)
    assert (rows[6].frames, rows[6].success_rate, rows[6].seconds) == (8, 1.0, 2.5)
    assert rows[7].why == "exit 1 – „ü“"
    assert (rows[9].waits_for, rows[9].attempt) == (("skill 7",), None)
    assert not all_ended(rows)


def test_a_running_skill_has_the_figures_of_its_own_trainer(tmp_path):
    since = datetime.now(UTC) - timedelta(seconds=100)
    graph_paths = save(tmp_path, ("A", running(since=since)))
    tell_progress(graph_paths.run(0, "A"))
    (row,) = read_rows(graph_paths)
    assert (row.phase, row.frames, row.total_frames) == ("compiling", 512, 1024)
    assert row.waits.startswith("its programs to compile")
    assert (row.steps_per_second, row.eta_seconds) == (1234.5, 61.0)
    assert (row.success_rate, row.step_success) == (0.25, (0.9, 0.25))
    assert row.seconds is not None
    assert 100 <= row.seconds < 160


def test_a_running_skill_says_which_replicas_it_waits_for(tmp_path):
    graph_paths = save(tmp_path, ("A", running()))
    tell_progress(graph_paths.run(0, "A"), waits_for="replica 2, 3")
    (row,) = read_rows(graph_paths)
    assert row.waits == "replica 2, 3"


@pytest.mark.parametrize(
    ("lives", "locked", "phase"),
    [(True, False, "compiling"), (False, True, "compiling"), (False, False, "ended")],
)
def test_a_run_none_of_whose_processes_lives_is_not_in_training(tmp_path, lives, locked, phase):
    """Its end may come while no scheduler sees it."""
    time = start_time_of(os.getpid())
    handle = Handle(
        run_id="e0.a1.x", session="s", pid=os.getpid(), start_time=time + "0" * (not lives)
    )
    graph_paths = save(tmp_path, ("A", replace(running(), handle=handle)))
    tell_progress(graph_paths.run(0, "A"))
    with (graph_paths.run(0, "A").folder / "run.lock").open("w") as lock:
        if locked:
            fcntl.flock(lock, fcntl.LOCK_EX)
        (row,) = read_rows(graph_paths)
        text = " ".join(str(line) for line in screen(graph_paths, [row]).renderables)
    assert (row.phase, row.frames) == (phase, 512)
    assert (row.eta_seconds is None, "runs go on" not in text) == (phase == "ended",) * 2


def test_the_time_of_a_run_that_has_ended_stands_still(tmp_path):
    since = datetime.now(UTC) - timedelta(hours=1)
    handle = Handle(run_id="e0.a1.x", session="s", pid=os.getpid(), start_time="before")
    graph_paths = save(tmp_path, ("A", replace(running(), handle=handle, since=since)))
    tell_progress(graph_paths.run(0, "A"))
    facts = {"run_id": "e0.a1.x", "code": 1, "signal": None, "oom": False, "received": []}
    record = {"format": 1, **facts, "detail": "", "ended_at": since.timestamp() + 90}
    (graph_paths.run(0, "A").folder / "exit.json").write_text(json.dumps(record))
    assert read_rows(graph_paths)[0].seconds == pytest.approx(90)


@pytest.mark.parametrize("text", [None, "{", "[]", '{"format": 2}', '{"format": 1}', "\x00"])
def test_figures_that_cannot_be_read_are_left_out(tmp_path, text):
    graph_paths = save(tmp_path, ("A", running()))
    if text is not None:
        tell_progress(graph_paths.run(0, "A"))
        graph_paths.run(0, "A").progress.write_text(text)
    (row,) = read_rows(graph_paths)
    assert (row.status, row.phase, row.frames, row.success_rate) == ("running", "", None, None)


def test_figures_of_another_attempt_are_left_out(tmp_path):
    graph_paths = save(tmp_path, ("A", running("e0.a2.y")))
    tell_progress(graph_paths.run(0, "A"), "e0.a1.x")
    assert read_rows(graph_paths)[0].phase == ""


def test_figures_left_behind_by_an_ended_run_are_left_out(tmp_path):
    graph_paths = save(tmp_path, ("A", DONE))
    tell_progress(graph_paths.run(0, "A"))
    (row,) = read_rows(graph_paths)
    assert (row.frames, row.success_rate, row.eta_seconds) == (2000, 0.875, None)


def test_a_blocked_skill_says_who_blocks_it_rather_than_all_it_waits_for(tmp_path):
    graph_paths = save(
        tmp_path,
        ("A", FAILED),
        ("B", WAITING),
        ("C", Blocked(blocked_by=("A",)), ("A", "B")),
        ("D", WAITING, ("B",)),
    )
    rows = read_rows(graph_paths)
    assert rows[2].waits_for == ("A",)
    assert rows[3].waits_for == ("B",)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"skills": [1]}', '{"skills": [{"skill": "A"}]}', '{"skills": null}'],
)
def test_a_damaged_state_is_named(tmp_path, text):
    graph_paths = GraphPaths(tmp_path)
    graph_paths.scheduler_state.write_text(text)
    with pytest.raises(FileRefusedError, match=r"scheduler_state\.json"):
        read_rows(graph_paths)


@pytest.mark.parametrize(
    "wanted", ["Make Tea", "make tea", " MAKE TEA ", "Make_Tea", "make_tea", "1"]
)
def test_a_skill_is_found_by_name_machine_name_or_expert_number(tmp_path, wanted):
    rows = read_rows(save(tmp_path, ("Boil", DONE), ("Make Tea", DONE), ("Drink Tea", WAITING)))
    assert find_row(rows, wanted, tmp_path).skill == "Make Tea"


def test_a_name_that_is_a_number_wins_over_an_expert_number(tmp_path):
    rows = read_rows(save(tmp_path, ("A", DONE), ("B", DONE), ("1", DONE)))
    assert find_row(rows, "1", tmp_path).skill == "1"


@pytest.mark.parametrize("wanted", ["Tea", "7", "", "[red]"])
def test_an_unknown_skill_is_refused_with_the_names_there_are(tmp_path, wanted):
    rows = read_rows(save(tmp_path, ("Boil", DONE), ("Make Tea", DONE)))
    with pytest.raises(GraphError, match=r"has no skill .*; it has: Boil, Make Tea"):
        find_row(rows, wanted, tmp_path)


def test_an_empty_graph_says_that_it_has_none_yet(tmp_path):
    rows = read_rows(save(tmp_path))
    with pytest.raises(GraphError, match="it has: none yet"):
        find_row(rows, "A", tmp_path)


@pytest.mark.parametrize("status", [DONE, FAILED, HELD], ids=lambda status: status.kind)
def test_all_have_ended_when_none_will_move_by_itself(tmp_path, status):
    rows = read_rows(save(tmp_path, ("A", status)))
    assert all_ended(rows)
    assert not all_ended(read_rows(save(tmp_path, ("A", status), ("B", WAITING))))
