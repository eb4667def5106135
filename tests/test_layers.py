"""Imports go downstairs and never in a circle; a class name stands once."""

from __future__ import annotations

import ast
import functools
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "flowrl"
FLOORS = [
    {
        "__init__",
        "errors",
        "redaction",
        "storage",
        "paths",
        "arguments",
        "config",
        "games",
        "notices",
    },
    {"runs", "skills", "launchers", "measures", "program_cache"},
    {"experts", "networks", "envs", "averaging", "judging", "llm"},
    {"parallel", "ppo"},
    {"replicas"},
    {
        "agent",
        "ppo_flow",
        "evaluate",
        "comparing",
        "console",
        "commands",
        "tuning",
        "bottomup_parallel",
        "multiagent",
        "independent",
    },
    {"bottomup", "cli", "orchestrator", "__main__"},
]
COMMANDS = {"judging/command.py", "tuning/command.py"}  # programs, each in the room that it serves
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
GROUND = FLOORS[0] | {"runs"}
MODULES = sorted(
    path for path in PACKAGE.rglob("*.py") if "library" not in path.relative_to(PACKAGE).parts
)
JAX_ROOMS = {
    "agent",
    "program_cache",
    "comparing",
    "networks",
    "envs",
    "ppo",
    "ppo_flow",
    "evaluate",
    "multiagent",
}
JAX_FILES = {
    "experts/checkpoint.py",
    "games/craftax_engine.py",
    "games/fast_craftax.py",
    "skills/validation/execution.py",
    "skills/validation/worker.py",
    "judging/learned.py",
    "replicas/trainer.py",
}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def rooms_imported(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imported(path) if name.startswith("flowrl.")}


@pytest.fixture(scope="module")
def house():
    """scripts/measure_house.py, which counts what the next tests ask for."""
    path = PACKAGE.parent / "scripts" / "measure_house.py"
    spec = importlib.util.spec_from_file_location("measure_house", path)
    measure = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = measure  # its dataclasses look it up
    spec.loader.exec_module(measure)
    yield measure
    del sys.modules[spec.name]


def test_no_files_import_one_another_in_a_circle(house):
    assert house.circles(house.modules()) == []


def test_a_circle_for_types_alone_is_found(house, tmp_path):
    (tmp_path / "a.py").write_text("from flowrl import b\n")
    (tmp_path / "b.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from flowrl.a import A\n"
    )
    (tmp_path / "c.py").write_text("from flowrl.a import A\n")
    assert house.circles(house.modules(tmp_path)) == [["flowrl.a", "flowrl.b"]]


def test_a_class_name_stands_once_in_the_package(house):
    assert house.classes_twice(house.modules()) == []


def test_every_module_has_a_floor():
    assert {room_of(path) for path in MODULES} <= set(FLOOR_OF)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_lower_floors_and_itself(path):
    room = "commands" if path.relative_to(PACKAGE).as_posix() in COMMANDS else room_of(path)
    same_floor_allowed = GROUND if room in GROUND else set()
    for other in rooms_imported(path) - {room, room_of(path), "__version__"}:
        lower = FLOOR_OF[other] < FLOOR_OF[room] or other in GROUND
        stories = {room, other} <= FLOORS[6] or {room, other} <= FLOORS[5]
        assert lower or other in same_floor_allowed or stories, f"{room} imports {other}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_checkpoint_module_imports_orbax(path):
    allowed = path == PACKAGE / "experts" / "checkpoint.py"
    assert allowed or not any("orbax" in name for name in imported(path))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_reader_of_arrays_imports_tensorstore(path):
    assert path == PACKAGE / "experts" / "array_reader.py" or "tensorstore" not in imported(path)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrays_stay_in_the_rooms_that_compute(path):
    heavy = {name.split(".")[0] for name in imported(path)} & {"jax", "flax", "optax", "craftax"}
    by_file = path.relative_to(PACKAGE).as_posix() in JAX_FILES
    assert room_of(path) in JAX_ROOMS or by_file or not heavy


@pytest.mark.parametrize(
    "argv",
    [
        ["flowrl.cli", "--help"],
        ["flowrl.cli", "--version"],
        ["flowrl.ppo_flow", "--help"],
        ["flowrl.independent", "--help"],
        ["flowrl.bottomup", "--help"],
        ["flowrl.orchestrator", "--help"],
        ["flowrl.bottomup_parallel", "--help"],
        ["flowrl.bottomup_parallel", "--version"],
    ],
    ids=" ".join,
)
def test_help_and_version_load_no_jax(argv):
    code = (
        "import runpy, sys\n"
        f"sys.argv = {[argv[0], *argv[1:]]!r}\n"
        "try:\n"
        f"    runpy.run_module({argv[0]!r}, run_name='__main__')\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code, stop.code\n"
        "assert 'jax' not in sys.modules and 'orbax' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_scheduler_and_the_reports_load_no_jax():
    code = (
        "import sys\n"
        "from flowrl import cli\n"
        "cli.command_of('status', [])\n"
        "assert not {'networkx', 'flowrl.parallel.scheduler'} & set(sys.modules)\n"
        "for name in cli.ALL: cli.class_of(name)\n"
        "import flowrl.parallel.training_setup, flowrl.parallel.training_processor\n"
        "heavy = {'jax', 'orbax', 'flax', 'craftax', 'openai', 'dspy', 'sklearn', 'optuna'}\n"
        "heavy = (heavy | {'ray', 'scipy'}) & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
