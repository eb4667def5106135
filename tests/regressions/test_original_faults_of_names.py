"""Faults 8, 9 and 17 to 22 of the original: flags, names, shells, GPUs, roots, its own tests."""

from __future__ import annotations

import ast
import dataclasses
import os
import time
from pathlib import Path

import pytest

from flowrl.config import BottomUpConfig, flags, with_flags
from flowrl.errors import NameRefusedError
from flowrl.launchers import gpus
from flowrl.launchers.gpus import visible_devices
from flowrl.launchers.sandbox import child_env
from flowrl.parallel.events import RunRequest
from flowrl.parallel.training import SequentialConfig
from flowrl.parallel.training_backend import TrainingBackend
from flowrl.parallel.training_setup import generate_module_with_remapping
from flowrl.paths import GraphPaths, session_name
from flowrl.runs import TrainConfig
from flowrl.skills.graph import SkillGraph
from tests.launchers.conftest import SLEEP, end_of, start_of, until
from tests.launchers.tmux_sessions import sessions
from tests.parallel.making import GRAPH, WOOD, a_run, finish, make_skill, merge, prepare

ROOT = Path(__file__).parents[2]
SOURCES = {
    path.relative_to(ROOT): ast.parse(path.read_text())
    for path in sorted((ROOT / "flowrl").rglob("*.py"))
    if "library" not in path.parts
}


def job_of(tmp_path, config=None, **changes):
    config = config or with_flags(BottomUpConfig(), **changes)
    backend = TrainingBackend(GraphPaths(tmp_path), config, GRAPH)
    return backend.prepare(RunRequest(skill=WOOD, expert=0, attempt=1))


def test_fault_08_the_trainer_gets_the_flags(tmp_path):
    wanted = {"lr": 0.0123, "num_envs": 24, "total_timesteps": 4321}
    arrived = TrainConfig.read(job_of(tmp_path, **wanted).argv[3:], prog="ppo_flow")
    assert {name: flags(arrived)[name] for name in wanted} == wanted


def test_fault_08_every_flag_is_read_by_somebody():
    names = {"module_path", "resume", *flags(SequentialConfig())}
    read = {
        node.attr
        for path, tree in SOURCES.items()
        if path.name != "config.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
    }
    assert names <= read


@pytest.mark.parametrize("name", ["Collect  Wood, twice", "a/b", "木を集める", "-t", "x" * 150])
def test_fault_09_the_folder_written_is_the_folder_recorded(tmp_path, name):
    layout = GraphPaths(tmp_path)
    graph = SkillGraph([make_skill(name)])
    ready = prepare(layout, name, 3, {}, graph=graph)
    finish(ready.layout, {3: 10})
    merge(layout, ready)
    machine = session_name(3, name).removeprefix("flowrl_e3_")
    assert [path.name for path in layout.skills.iterdir()] == [f"3_{machine}"]
    assert ready.run_folder.name == f"skill_3_{machine}"


def test_fault_09_two_names_that_share_an_id_are_refused_by_both_names(start):
    scheduler = start()
    scheduler.add_skill("a b")
    with pytest.raises(NameRefusedError, match="'a b' and 'a_b'"):
        scheduler.add_skill("a_b")
    assert list(scheduler.state.entries) == ["a b"]


def test_fault_09_there_is_one_place_that_sanitises():
    places = {
        path.as_posix()
        for path, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".replace")
        if [ast.unparse(word) for word in node.args] == ["' '", "'_'"]
    }
    assert places == {"flowrl/paths.py"}


def test_fault_17_nothing_stops_in_a_debugger():
    stops = {"breakpoint", "set_trace", "post_mortem", "embed"}
    called = {
        ast.unparse(node.func).rpartition(".")[2]
        for tree in SOURCES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }
    assert not called & stops


def test_fault_18_a_newline_in_a_name_is_refused_and_never_becomes_code(start):
    name = 'Wood\nimport os; os.system("touch owned")'
    with pytest.raises(NameRefusedError, match="control characters"):
        start().add_skill(name)
    skills = {name: dataclasses.replace(GRAPH.skills[WOOD], name=name)}
    text = generate_module_with_remapping(a_run((name, 1, 0)), skills)
    imported = [
        ast.unparse(n) for n in ast.parse(text).body if isinstance(n, ast.Import | ast.ImportFrom)
    ]
    assert not any("import os" in line for line in imported)


@pytest.mark.parametrize("word", ["$(touch owned)", "; touch owned;", "`touch owned`", "'\"\n&|"])
def test_fault_18_no_shell_reads_a_trainers_words(local, make_job, word):
    job = make_job(
        "import pathlib, sys; pathlib.Path('said').write_text(sys.argv[1])", argv=(word,)
    )
    local.launch(job)
    until((job.folder / "exit.json").exists)
    assert (job.folder / "said").read_text() == word
    assert not list(job.folder.glob("owned*"))


def test_fault_19_nvidia_smi_has_a_time_limit_and_cudas_order_is_set(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    monkeypatch.setattr(gpus, "TIMEOUT_SECONDS", 0.2)
    began = time.monotonic()
    assert visible_devices(environ={}) == ()
    assert time.monotonic() - began < 30.0
    assert child_env(("1",), environ={})["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_fault_19_the_loop_never_asks_nvidia_smi():
    """Only what runs before the loop may: `start.py`, which `training.py` alone calls."""
    names = {
        path.name: {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        for path, tree in SOURCES.items()
        if path.parts[1] == "parallel"
    }
    assert [name for name in names if "flowrl.launchers.gpus" in names[name]] == ["start.py"]
    assert [name for name in names if "flowrl.parallel.start" in names[name]] == ["training.py"]


@pytest.mark.tmux
def test_fault_20_ending_one_session_never_ends_one_whose_name_begins_alike(tmux, make_job):
    long = make_job(SLEEP, name="flowrl_e1_Collect_Wood", run_id="e1.a1.long")
    short = make_job("raise SystemExit(1)", name="flowrl_e1_Collect", run_id="e1.a1.short")
    alive = tmux.launch(long)
    start_of(long)
    ended = tmux.launch(short)
    until(lambda: tmux.poll(ended, short.folder))
    tmux.stop(ended, short.folder)
    succeeding = make_job("pass", name="flowrl_e1_Collect", run_id="e1.a2.short")
    end_of(tmux, tmux.launch(succeeding), succeeding)
    left = {"flowrl_e1_Collect", "flowrl_e1_Collect_Wood"}  # one failed, and stays to be read
    until(lambda: tmux.wait([], timeout_seconds=0) or set(sessions(tmux)) == left)
    assert tmux.poll(alive, long.folder) is None


def test_fault_21_no_root_of_a_repository_is_guessed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shallow = job_of(Path("graph"))  # whose grandparent is no checkout of anything
    assert shallow.argv[1:3] == ("-m", "flowrl.ppo_flow")
    assert shallow.cwd == tmp_path
    assert shallow.folder == tmp_path / "graph" / "training_runs" / "skill_0_Collect_Wood"
    module = shallow.argv[shallow.argv.index("--module_path") + 1]
    assert module == str(shallow.folder / "0.py")


def test_fault_22_no_test_is_given_up():
    """Tests that fail are mended or removed; a skip says what it lacks."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute | ast.Call):
                continue
            words = ast.unparse(node.func if isinstance(node, ast.Call) else node)
            assert not words.endswith("mark.xfail"), path
            if isinstance(node, ast.Call) and words.endswith(("mark.skipif", "mark.skip")):
                assert any(keyword.arg == "reason" for keyword in node.keywords), path
