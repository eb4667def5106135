"""`flowrl plan`, `skills`, `ps`, `attach` and `completion`."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

from flowrl import cli
from flowrl.config import BottomUpConfig, to_json, with_flags
from flowrl.parallel.health import DaemonLock
from flowrl.storage import records
from tests.commands.making import DONE, FAILED, WAITING, running, save
from tests.parallel.making import LIBRARY, WOOD
from tests.skills.making import skill_text
from tests.waiting import until


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """No graph lies where commands look by default."""
    monkeypatch.chdir(tmp_path)


def test_a_plan_says_the_steps_their_counts_and_who_provides_what(flowrl):
    assert flowrl("plan", "make wood pickaxe").out.splitlines() == [
        "  1  Collect Wood × 3, not begun",
        "  2  Place Table × 1, not begun; wood from Collect Wood",
        "  3  Make Wood Pickaxe × 1, not begun; "
        "wood from Collect Wood, near_table from Place Table",
    ]


def test_a_plan_shows_the_choice_of_an_own_skill_and_the_state(tmp_path, flowrl):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "fell.py").write_text(skill_text().replace(WOOD, "Fell A Tree"))
    graph = save(tmp_path / "graph", ("Fell A Tree", DONE)).root
    words = ["plan", str(graph), "Place Table", "--skills_dir", str(mine)]
    said = flowrl(*words).out
    assert "1  Fell A Tree × 2, completed" in said
    assert "Place Table has wood from Fell A Tree, not Collect Wood: your own skill goes" in said
    data = json.loads(flowrl(*words, "--json").out)
    assert data["steps"][-1] == {"skill": "Place Table", "count": 1}
    assert data["choices"][0]["others"] == [WOOD]


def test_an_unknown_skill_has_no_plan(flowrl):
    said = flowrl("plan", "Place Tabel", code=1).err
    assert "no skill 'Place Tabel'; closest are 'Place Table'" in said


def test_a_plan_of_another_game_than_the_graphs_is_refused(graph_paths, flowrl):
    records.write(
        graph_paths.graph_json,
        {"env_name": "Craftax-Classic-Symbolic-v1", "layer_size": 64, "activation": "tanh"},
    )
    said = flowrl("plan", graph_paths.root, WOOD, "--env_name=Craftax-Symbolic-v1", code=2).err
    assert "was begun with --env_name Craftax-Classic-Symbolic-v1, not" in said


def test_skills_are_listed_with_their_state_and_where_they_come_from(tmp_path, flowrl):
    graph = save(tmp_path / "graph", (WOOD, DONE), ("Place Table", FAILED)).root
    lines = flowrl("skills", graph).out.splitlines()
    assert lines[1].split() == ["Collect", "Wood", "library", "completed"]
    assert len(lines) == 1 + len(LIBRARY)
    rows = {row["skill"]: row for row in json.loads(flowrl("skills", graph, "--json").out)}
    assert rows["Place Table"]["status"] == "failed"
    assert rows["Place Table"]["needs"] == [WOOD]


def test_ps_shows_the_graphs_that_have_a_scheduler(tmp_path, flowrl):
    root = save(tmp_path / "graph", (WOOD, DONE)).root
    lock = DaemonLock(root / "daemon.lock")
    lock.acquire()
    try:
        found = [
            each for each in json.loads(flowrl("ps", "--json").out) if each["graph"] == str(root)
        ]
        assert found[0]["scheduler"]["pid"] == os.getpid()
        assert found[0]["skills"] == "1 completed"
    finally:
        lock.release()
    assert str(root) not in flowrl("ps").out


def a_session(tmux: list[str], folder: Path) -> None:
    """A session of expert 0, `A`, for the run in a folder."""
    target, option = "=flowrl_e0_A:", ["@flowrl_folder", quote(str(folder))]
    subprocess.run([*tmux, "new-session", "-d", "-s", "flowrl_e0_A"], check=True)
    subprocess.run([*tmux, "set-option", "-p", "-t", target, *option], check=True)


@pytest.mark.tmux
@pytest.mark.parametrize("flag", ["-L", "-S"])
def test_attach_becomes_a_client_of_the_runs_session(tmp_path, monkeypatch, flag):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    socket = "test" if flag == "-L" else "./test"
    monkeypatch.delenv("TMUX", raising=False)
    graph_paths = save(tmp_path / "graph", ("A", running()))
    config = with_flags(BottomUpConfig(), tmux_socket=socket)
    records.write(graph_paths.config_json, to_json(config))
    tmux = ["tmux", "-f", "/dev/null", flag, socket]
    a_session(tmux, graph_paths.run(0, "A").folder)
    screen, terminal = os.openpty()
    client = subprocess.Popen(
        [sys.executable, "-m", "flowrl", "attach", str(graph_paths.root), "a"],
        env={**os.environ, "TERM": "xterm"},
        **dict.fromkeys(("stdin", "stdout", "stderr"), terminal),
    )
    os.close(terminal)
    try:
        count = [*tmux, "display-message", "-p", "-t", "=flowrl_e0_A:", "#{session_attached}"]
        until(lambda: subprocess.getoutput(shlex.join(count)) == "1", every=0.1)
    finally:
        subprocess.run([*tmux, "kill-server"], check=True)
        client.wait()
        os.close(screen)


@pytest.mark.tmux
@pytest.mark.parametrize("server", ["same", "other"])
def test_attach_inside_tmux_switches_its_client_or_says_why_not(tmp_path, monkeypatch, server):
    """Typed in a pane, to which a client is attached."""
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    monkeypatch.delenv("TMUX", raising=False)
    graph_paths = save(tmp_path / "graph", ("A", running()))
    outer = ["tmux", "-f", "/dev/null", *(["-L", "other"] if server == "other" else [])]
    a_session(["tmux", "-f", "/dev/null"], graph_paths.run(0, "A").folder)
    subprocess.run([*outer, "new", "-d", "-s", "user", "bash --norc"], check=True)
    screen, terminal = os.openpty()
    client = subprocess.Popen(
        [*outer, "attach", "-t", "=user"],
        env={**os.environ, "TERM": "xterm"},
        **dict.fromkeys(("stdin", "stdout", "stderr"), terminal),
    )
    os.close(terminal)
    try:
        until(lambda: subprocess.getoutput(shlex.join([*outer, "list-clients"])), every=0.1)
        typed = f"{sys.executable} -m flowrl attach {graph_paths.root} a 2> {tmp_path}/said"
        subprocess.run([*outer, "send-keys", "-t", "=user:", typed, "Enter"], check=True)
        if server == "same":
            seen = [*outer, "list-clients", "-F", "#{session_name}"]
            until(lambda: subprocess.getoutput(shlex.join(seen)) == "flowrl_e0_A", every=0.1)
        else:
            said = tmp_path / "said"
            until(lambda: said.exists() and "inside another tmux server" in said.read_text())
    finally:
        subprocess.run([*outer, "kill-server"], check=True)
        subprocess.run(["tmux", "kill-server"], check=False)
        client.wait()
        os.close(screen)


@pytest.mark.tmux
def test_neither_another_graphs_session_nor_no_terminal_is_attached(tmp_path, monkeypatch, flowrl):
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    monkeypatch.delenv("TMUX", raising=False)
    graph_paths = save(tmp_path / "my graph é", ("A", running()))
    other = save(tmp_path / "other", ("A", running()))
    a_session(["tmux", "-f", "/dev/null"], graph_paths.run(0, "A").folder)
    try:
        said = flowrl("attach", other.root, "A", code=1).err
        assert "A is running and has no tmux session" in said
        said = flowrl("attach", graph_paths.root, "A", code=2).err
        assert "a session is attached to a terminal, and this is none; see flowrl logs" in said
    finally:
        subprocess.run(["tmux", "kill-server"], check=True)


@pytest.mark.parametrize("status", [DONE, running(), WAITING], ids=lambda status: status.kind)
def test_a_skill_without_a_session_is_not_attached_to(tmp_path, monkeypatch, flowrl, status):
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    save(tmp_path / "graph", ("A", status))
    said = flowrl("attach", tmp_path / "graph", "A", code=1).err
    assert f"A is {status.kind} and has no tmux session" in said
    assert ("; flowrl logs" in said) == (status != WAITING)


def test_a_completion_script_completes_commands_and_flags(tmp_path):
    script = subprocess.run(
        [sys.executable, "-m", "flowrl", "completion", "bash"], capture_output=True, check=True
    ).stdout.decode()
    (tmp_path / "flowrl.bash").write_text(script)
    ask = """source flowrl.bash
    python3() { "$PYTHON" "$@"; }
    words() {
      COMP_WORDS=(flowrl "$@"); COMP_CWORD=$#; COMPREPLY=()
      _tyro_flowrl; echo "${COMPREPLY[@]}"
    }
    words st; words status --w; words train --target"""
    env = {**os.environ, "PYTHON": sys.executable}
    found = subprocess.check_output([shutil.which("bash"), "-c", ask], env=env)
    assert found.decode().split() == ["status", "stop", "--watch", "--target-skill"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script_too(capsys, shell):
    with pytest.raises(SystemExit) as ended:
        cli.main(["completion", shell])
    assert not ended.value.code
    assert "flowrl" in capsys.readouterr().out


def test_the_overview_fits_on_a_screen(capsys):
    assert cli.main([]) == cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    half = lines[: len(lines) // 2]
    assert half == lines[len(half) :]
    assert len(half) <= 39
    assert max(map(len, half)) <= 80
    for name in cli.ALL:  # sweep tells its own words
        assert any(name.split()[0] in line.split()[:2] for line in half), name


def test_an_unknown_command_is_answered_with_the_closest(flowrl):
    assert "there is no command 'statsu'; closest is 'status'" in flowrl("statsu", code=2).err
    assert "there are train, sequential, sweep, add, write, status" in flowrl("xyzzy", code=2).err


@pytest.mark.parametrize("command", ["status", "logs", "evaluate", "export", "plan", "fsck"])
def test_a_file_is_no_graph(tmp_path, capsys, command):
    file = tmp_path / "notes.txt"
    file.touch()
    words = {"logs": [WOOD], "evaluate": [WOOD], "plan": [WOOD]}.get(command, [])
    assert cli.main([command, str(file), *words]) != 0
    said = capsys.readouterr().err
    assert f"{file} is no graph, which is a folder; name the folder of a graph" in said
    assert len(said.splitlines()) == 1


def test_export_of_nothing_says_at_once_that_there_is_no_graph(tmp_path, flowrl):
    said = flowrl("export", tmp_path / "nothing", "-o", tmp_path / "agent", code=1).err
    assert "nothing is no graph" in said
    assert not list(tmp_path.iterdir())
