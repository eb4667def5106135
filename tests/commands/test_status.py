"""`flowrl status`, the scheduler's own screen and its last word."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from dataclasses import replace

import pytest
from rich.console import Console

from flowrl import cli, command_line, notices
from flowrl.config import BottomUpConfig
from flowrl.experts.store import ExpertStore
from flowrl.parallel.health import DaemonLock
from flowrl.parallel.status import CANCELLED, PAUSED, Failed
from flowrl.reports import status
from flowrl.reports.status import clock, read_rows, skill_table, tally, training_screen
from tests.commands.making import DONE, FAILED, HELD, NOW, WAITING, running, save, tell_progress
from tests.parallel.making import TABLE, WOOD
from tests.serving.making import a_judge

HOSTILE = ["[red]x[/red]", "[/]", "[link=file:///etc/passwd]x[/link]", ":skull:", "\\[b]", "{0}%s"]


def manifest_of(graph_paths):
    return ExpertStore(graph_paths).manifest()


def shown(thing, **facts) -> str:
    """What a terminal of 140 columns shows."""
    console = Console(file=io.StringIO(), record=True, width=140, **facts)
    console.print(thing)
    return console.export_text()


def test_json_says_all_that_is_known_of_every_skill(tmp_path, flowrl):
    graph_paths = save(tmp_path, ("A", running()), ("B", WAITING, ("A",)))
    tell_progress(graph_paths.run(0, "A"))
    facts = json.loads(flowrl("status", tmp_path, "--json", code=69).out)
    assert (facts["graph"], facts["ended"]) == (str(tmp_path), False)
    first, second = facts["skills"]
    assert (first["skill"], first["session"], first["frames"]) == ("A", "flowrl_e0_A", 512)
    assert first["step_success"] == [0.9, 0.25]
    assert (second["status"], second["waits_for"], second["expert"]) == ("waiting", ["A"], None)
    assert set(first) == set(second)


def test_json_says_what_is_in_use_and_left_and_how_good_judges_are(tmp_path, flowrl):
    two = replace(running("e1.a1.y"), devices=("0", "1"))
    graph_paths = save(tmp_path, ("A", running()), ("B", two), ("C", DONE))
    tell_progress(graph_paths.run(0, "A"), frames=24, eta_seconds=7200.0)
    tell_progress(graph_paths.run(1, "B"), "e1.a1.y")
    facts = json.loads(flowrl("status", tmp_path, "--json", code=69).out)
    assert facts["runs_left"] == {"frames": 1000 + 512, "hours": 2.0}
    machine = facts["machine"]
    assert machine["cpu_load"]["total"] == len(os.sched_getaffinity(0))
    assert machine["gpus"]["used"] == 2
    assert 0 < machine["memory_gb"]["used"] < machine["memory_gb"]["total"]
    assert facts["judges"] == []
    a_judge(graph_paths, answered=60)
    (line,) = json.loads(flowrl("status", tmp_path, "--json", code=69).out)["judges"]
    assert line.startswith("rule, 60 of 200 unseen episodes: AUC 0.")
    (graph_paths.judging / "rule.json").write_text("{")
    (line,) = json.loads(flowrl("status", tmp_path, "--json", code=69).out)["judges"]
    assert "rule.json" in line


def test_a_graph_without_runs_has_nothing_left_of_them(tmp_path, flowrl):
    facts = json.loads(flowrl("status", save(tmp_path, ("A", DONE)).root, "--json").out)
    assert facts["runs_left"] == {"frames": None, "hours": None}


def test_a_table_has_one_line_per_skill_and_no_empty_columns(tmp_path, flowrl):
    save(tmp_path, ("Boil Water", DONE), ("Make Tea", FAILED))
    head, sums, _, columns, first, second, *_ = flowrl("status", tmp_path).out.splitlines()
    assert head == f"{tmp_path}: 1 completed, 1 failed"
    assert sums.startswith("0 frames merged · ")
    assert sums.endswith(" GB free")
    assert " ".join(columns.split()) == (
        "skill status expert attempt run frames success time waits for / why"
    )
    assert " ".join(first.split()) == "Boil Water completed 0 1 2,000 87.5% 0:01:30"
    assert " ".join(second.split()) == "Make Tea failed 1 3 exit 1"


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_shown_and_not_interpreted(tmp_path, flowrl, name):
    root = tmp_path / name.replace("/", "")
    graph_paths = save(root, (name, FAILED), ("B", WAITING, (name,)))
    head, *_, first, second = flowrl("status", root, code=69).out.splitlines()
    assert head.startswith(f"{root}: ")
    assert first.startswith(f"{name}  ")
    assert second.rstrip().endswith(name)
    plain = shown(status.screen(graph_paths, read_rows(graph_paths)))
    coloured = shown(status.screen(graph_paths, read_rows(graph_paths)), force_terminal=True)
    assert name in plain
    assert name in coloured


def test_json_has_the_frames_of_a_run_and_those_of_its_expert(graph_paths, flowrl):
    wood, table = json.loads(flowrl("status", graph_paths.root, "--json").out)["skills"]
    merged = {
        version.skill: version.frames for version in manifest_of(graph_paths).experts.values()
    }
    assert (wood["expert_frames"], table["expert_frames"]) == (merged[WOOD], merged[TABLE])


def test_hints_name_the_command_of_the_last_start(tmp_path, flowrl):
    """Another command would ask for other skills."""
    graph_paths = save(tmp_path, ("A", WAITING), ("B", replace(HELD, why=PAUSED)))
    said = " ".join(flowrl("status", tmp_path, code=69).out.split())
    assert "merged until the same command as before" in said
    words = ["elsewhere", "--target_skill", "Collect Wood", "--lr=3e-4"]
    config = command_line.parse(BottomUpConfig, words, prog="flowrl train")
    last = f"flowrl train {tmp_path} --target_skill 'Collect Wood' --lr 3e-4"
    notices.publish(graph_paths, "command", config.command)
    said = " ".join(flowrl("status", tmp_path, code=69).out.split())
    assert f"merged until {last}" in said
    assert f"to go on with paused skills: flowrl resume {tmp_path} --all" in said
    assert f"done when you start {last}" in flowrl("resume", tmp_path, "B").out
    graph_paths = save(tmp_path, ("B", replace(HELD, why=PAUSED)))
    assert f"--all, then {last}" in " ".join(
        shown(status.screen(graph_paths, read_rows(graph_paths))).split()
    )


def test_a_graph_says_whether_somebody_schedules_it(tmp_path, flowrl):
    graph_paths = save(tmp_path, ("A", running()))
    assert "no scheduler: runs go on" in " ".join(flowrl("status", tmp_path, code=69).out.split())
    daemon = DaemonLock(graph_paths.daemon_lock)
    daemon.acquire()
    assert "no scheduler" not in flowrl("status", tmp_path).out
    assert json.loads(flowrl("status", tmp_path, "--json").out)["scheduler"]["pid"] == os.getpid()
    daemon.release()
    assert json.loads(flowrl("status", tmp_path, "--json", code=69).out)["scheduler"] is None


@pytest.mark.parametrize("width", [60, 80, 100, 150])
def test_a_narrow_table_keeps_skill_status_success_and_reason(tmp_path, width):
    graph_paths = save(tmp_path, ("Collect Wood", running()), ("Make Tea", FAILED), ("B", DONE))
    tell_progress(graph_paths.run(0, "Collect Wood"))
    console = Console(file=io.StringIO(), record=True, width=width)
    console.print(skill_table(read_rows(graph_paths), width))
    head, *lines = console.export_text().splitlines()
    assert len(head.rstrip()) <= width
    for name in ("skill", "status", "success", "waits for / why"):
        assert name in head
    assert "Collect Wood  compiling" in lines[0]
    assert ("attempt" in head) == (width == 150)
    assert (" gpu " in head) == (width == 150)


def test_gpus_have_a_column_while_a_run_has_some(tmp_path):
    def lines(**facts):
        running_on = replace(running(), **facts)
        graph_paths = save(tmp_path, ("A", running_on), ("B", WAITING))
        return shown(skill_table(read_rows(graph_paths))).splitlines()

    head, first, _ = lines(devices=("0", "1", "2", "7"))
    assert first[head.index(" gpu ") + 1 :].startswith("0-2,7 ")
    assert "gpu" not in lines(devices=())[0]


def test_the_frames_of_the_heading_are_those_of_merged_experts(graph_paths, flowrl):
    merged = sum(version.frames for version in manifest_of(graph_paths).experts.values())
    assert merged
    assert f"{merged:,} frames merged · " in flowrl("status", graph_paths.root).out


def test_a_success_rate_below_100_percent_is_never_shown_as_that(tmp_path, flowrl):
    save(tmp_path, ("A", replace(DONE, success_rate=0.996, goal=0.999)))
    assert "99.6%" in flowrl("status", tmp_path).out


def test_the_heading_says_goal_slots_frames_and_room(tmp_path, flowrl):
    graph_paths = save(tmp_path, ("A", running()), ("B", DONE))
    tell_progress(graph_paths.run(0, "A"))
    notices.publish(graph_paths, "requested", "skills asked for: 2; goal: 99.5% success; slots: 3")
    said = flowrl("status", tmp_path, code=69).out
    assert "\nslots in use: 1 · 0 frames merged · " in said
    assert "\nskills asked for: 2; goal: 99.5% success; slots: 3\n" in said


def test_columns_stay_where_they_are_while_figures_come_and_go(tmp_path):
    graph_paths = save(tmp_path, ("Collect Wood", running()), ("B", WAITING))
    heads = [head_of(graph_paths)]
    tell_progress(graph_paths.run(0, "Collect Wood"), frames=9)
    heads.append(head_of(graph_paths))
    tell_progress(graph_paths.run(0, "Collect Wood"), frames=1_000_000, step_success=(1.0,))
    heads.append(head_of(graph_paths))
    save(tmp_path, ("Collect Wood", DONE), ("B", running()))
    assert {*heads, head_of(graph_paths)} == {heads[0]}
    assert "steps/s" in heads[0]


def head_of(graph_paths) -> str:
    return shown(skill_table(read_rows(graph_paths))).splitlines()[0].rstrip()


def test_a_cancelled_skill_is_not_shown_as_failed(tmp_path, flowrl):
    save(tmp_path, ("A", Failed(why=CANCELLED, attempt=1, at=NOW)))
    said = flowrl("status", tmp_path).out
    assert "1 cancelled" in said
    assert "failed" not in said


def test_a_failure_text_is_shown_as_it_is(tmp_path, flowrl):
    why = "KeyError: [bold]'x'[/bold] :boom:"
    save(tmp_path, ("A", type(FAILED)(why=why, attempt=1, at=FAILED.at)))
    assert why in flowrl("status", tmp_path).out


@pytest.mark.parametrize("words", [["status"], ["logs", "B"], ["plan", "B"], ["fsck"]])
def test_a_folder_with_a_terminal_escape_in_its_name_is_shown_without(tmp_path, capfd, words):
    for root in (tmp_path / "a\x1b[31mb", tmp_path / "missing\x1b[2J"):
        if "missing" not in root.name:
            save(root, ("A", running()))
        cli.main([words[0], str(root), *words[1:]])
        said = capfd.readouterr()
        assert "\x1b" not in said.out + said.err


@pytest.mark.parametrize("command", [["status"], ["logs", "A", "--graph-path"]])
def test_a_folder_that_is_no_graph_ends_in_one_line(tmp_path, flowrl, command):
    said = flowrl(*command, tmp_path, code=1)
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith(f"flowrl: {tmp_path} is no graph")


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["table", "json"])
def test_watching_ends_when_nothing_moves_any_more(tmp_path, capsys, monkeypatch, form):
    save(tmp_path, ("A", running()))
    looks = []

    def pass_time(seconds):
        looks.append(seconds)
        save(tmp_path, ("A", DONE if len(looks) == 3 else running()))

    monkeypatch.setattr(time, "sleep", pass_time)
    assert cli.main(["status", str(tmp_path), "--watch", *form]) == 0
    assert looks == [1.0] * 3
    assert "completed" in capsys.readouterr().out


def test_status_never_fails_while_the_state_is_swapped(tmp_path):
    """A writer swaps state and progress as fast as it can; every look is a whole picture."""
    graph_paths = save(tmp_path, ("A", running()), ("B", WAITING))
    stop = threading.Event()

    def swap():
        while not stop.is_set():
            tell_progress(graph_paths.run(0, "A"))
            save(tmp_path, ("A", running()), ("B", WAITING), ("C", DONE))
            graph_paths.run(0, "A").progress.unlink()
            save(tmp_path, ("A", running()), ("B", WAITING))

    writer = threading.Thread(target=swap)
    writer.start()
    try:
        seen = {
            (len(rows), rows[0].phase) for rows in (read_rows(graph_paths) for _ in range(1000))
        }
    finally:
        stop.set()
        writer.join()
    assert seen == {(2, ""), (3, ""), (2, "compiling"), (3, "compiling")} & seen
    assert {size for size, _ in seen} == {2, 3}


def test_an_empty_graph_has_a_table_without_lines(tmp_path):
    rows = read_rows(save(tmp_path))
    assert tally(rows) == "no skills yet"
    assert shown(skill_table(rows)).strip() == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (0.0, "0:00:00"), (59.9, "0:00:59"), (90061, "1 day, 1:01:01")],
)
def test_a_time_is_shown_in_hours_minutes_and_seconds(seconds, text):
    assert clock(seconds) == text


@pytest.mark.parametrize("terminal", [False, True])
def test_the_last_word_of_a_training_counts_all_that_is_completed(tmp_path, terminal):
    graph_paths = save(tmp_path, ("A", DONE), ("B", WAITING), ("C", WAITING))
    console = Console(file=io.StringIO(), record=True, width=140, force_terminal=terminal)
    with training_screen(graph_paths, console):
        save(tmp_path, ("A", DONE), ("B", DONE), ("C", DONE))
    text = console.export_text()
    assert "3 completed" in text
    assert text.endswith("\n"), "what comes next is on a line of its own"


def test_the_screen_of_a_training_names_a_failed_runs_log_and_does_not_show_it(tmp_path):
    graph_paths = save(tmp_path, ("A", replace(FAILED, log=("ValueError: x",))))
    console = Console(file=io.StringIO(), record=True, width=200)
    with training_screen(graph_paths, console):
        pass
    assert "last lines" in shown(status.screen(graph_paths, read_rows(graph_paths)))
    text = console.export_text()
    assert f"to read a failed skill's log: flowrl logs {tmp_path} A" in text
    assert "last lines" not in text


def test_without_runs_no_run_is_said_to_go_on(tmp_path, flowrl):
    save(tmp_path / "graph", ("A", WAITING))
    said = " ".join(flowrl("status", tmp_path / "graph", code=69).out.split())
    assert "no scheduler: nothing is started" in said
