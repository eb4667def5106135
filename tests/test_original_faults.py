"""Laws of the package's own text that faults of the original research code have taught."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from flowrl.config import BottomUpConfig, flags, with_flags
from flowrl.errors import ConfigError
from flowrl.parallel.events import RunRequest
from flowrl.parallel.training import SequentialConfig
from flowrl.parallel.training_backend import TrainingBackend
from flowrl.paths import GraphPaths
from flowrl.runs import TrainConfig
from tests.parallel.making import GRAPH, WOOD

ROOT = Path(__file__).parents[1]


@functools.cache
def sources():
    """The syntax tree of each module."""
    return {
        path.relative_to(ROOT): ast.parse(path.read_text())
        for path in sorted((ROOT / "flowrl").rglob("*.py"))
        if "library" not in path.parts
    }


def calls():
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield path.as_posix(), node


def test_fault_08_every_flag_is_read_by_somebody():
    names = {"module_path", "resume", *flags(SequentialConfig())}
    read = {
        node.attr
        for path, tree in sources().items()
        if path.name != "config.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
    } | {
        node.slice.value
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
    }
    assert names <= read


def test_fault_09_there_is_one_place_that_sanitises():
    places = {
        path
        for path, call in calls()
        if ast.unparse(call.func).endswith(".replace")
        and [ast.unparse(word) for word in call.args] == ["' '", "'_'"]
    }
    assert places == {"flowrl/paths.py"}


def test_fault_14_a_spent_budget_is_never_taken_for_no_budget(tmp_path):
    config = with_flags(BottomUpConfig(), total_timesteps=5000, skill_timesteps_budget=2000)
    backend = TrainingBackend(GraphPaths(tmp_path), config, GRAPH)
    left = RunRequest(skill=WOOD, expert=0, attempt=1, frames_left=700)
    assert TrainConfig.read(backend.prepare(left).argv[3:], prog="").ppo.total_timesteps == 700
    with pytest.raises(ConfigError, match="total_timesteps is 0"):
        backend.prepare(RunRequest(skill=WOOD, expert=0, attempt=2, frames_left=0))


def test_fault_17_nothing_stops_in_a_debugger():
    called = {ast.unparse(call.func).rpartition(".")[2] for _, call in calls()}
    assert not called & {"breakpoint", "set_trace", "post_mortem", "embed"}


def test_fault_19_the_loop_never_asks_nvidia_smi():
    """Only what runs before the loop may: `start.py`, which `training.py` alone calls."""
    names = {
        path.name: {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        for path, tree in sources().items()
        if path.parts[1] == "parallel"
    }
    assert [name for name in names if "flowrl.launchers.gpus" in names[name]] == ["start.py"]
    assert [name for name in names if "flowrl.parallel.start" in names[name]] == ["training.py"]


def test_fault_21_no_root_of_a_repository_is_guessed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    backend = TrainingBackend(GraphPaths(Path("graph")), BottomUpConfig(), GRAPH)
    job = backend.prepare(RunRequest(skill=WOOD, expert=0, attempt=1))
    assert job.argv[1:3] == ("-m", "flowrl.ppo_flow")
    assert job.cwd == tmp_path  # whose parent is no checkout of anything
    assert job.folder == tmp_path / "graph" / "training_runs" / "skill_0_Collect_Wood"
    assert job.argv[job.argv.index("--module_path") + 1] == str(job.folder / "0.py")


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
