"""Imports go downstairs and never in a circle; the name of a class or type stands once."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "flowrl"
# Rooms and single files from the ground to the roof; a file's floor goes before its room's.
FLOORS = [
    "errors redaction storage paths arguments calls config command_line games notices console"
    " rates runs output llm/exchange",
    "skills launchers measures program_cache llm/client",
    "experts networks envs averaging judging llm knowledge",
    "parallel ppo",
    "replicas multiagent reports evaluation agent",
    "tuning api",
    "analysis",
    "viewing llm/asking",
    "serving",
    # Programs: nothing but the command line `flowrl` imports them.
    "bottomup bottomup_parallel ppo_flow independent comparing"
    " commands analysis/command judging/command llm/command llm/improve tuning/command"
    " serving/command",
    "cli",
    "orchestrator __init__ __main__",
]
FLOOR_OF = {place: floor for floor, places in enumerate(FLOORS) for place in places.split()}
PROGRAMS = FLOOR_OF["commands"]
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
    "evaluation",
    "multiagent",
}
JAX_FILES = {
    "analysis/replaying.py",
    "experts/checkpoint.py",
    "games/adapters/gymnax_engine.py",
    "games/adapters/navix_engine.py",
    "games/craftax_engine.py",
    "games/craftax_probes.py",
    "games/fast_craftax.py",
    "games/random_play.py",
    "skills/validation/contract.py",
    "skills/validation/execution.py",
    "skills/validation/indices.py",
    "skills/validation/worker.py",
    "judging/learned.py",
    "knowledge/probing.py",
    "replicas/trainer.py",
    "viewing/pictures.py",
}


def place_of(path: Path) -> str:
    """The path's longest part that has a floor of its own: a file without suffix, or its room."""
    inside = path.relative_to(PACKAGE)
    file = inside.with_suffix("").as_posix()
    return file if file in FLOOR_OF else inside.parts[0].removesuffix(".py")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """What a file imports, also by a string: `import_module("a.b")`, tables of "a.b:Name"."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if named := re.fullmatch(r"(?:flowrl\.)?([a-z_.]+):\w+", node.value):
                names.add(f"flowrl.{named[1]}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names |= {word.value for word in node.args if isinstance(word, ast.Constant)}
    return frozenset(names)


def files_imported(path: Path) -> set[Path]:
    """Files of the package that a file imports; of a package that is named, its face."""
    found = set()
    for name in imported(path):
        words = name.split(".")
        for count in range(len(words), 0, -1):
            place = PACKAGE.parent.joinpath(*words[:count])
            file = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place
            file = file / "__init__.py" if (file / "__init__.py").is_file() else file
            if file.is_file():
                found.add(file)
                break
    return found - {path, PACKAGE / "__init__.py"}  # which has the version


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


def test_a_name_of_a_class_or_type_stands_once_in_the_package(house):
    assert house.classes_twice(house.modules()) == []


def test_no_module_or_function_is_too_long(house, tmp_path):
    assert house.too_long(house.modules()) == []
    (tmp_path / "a.py").write_text("def f():\n" + "    1\n" * 50 + "\n" * 450)
    assert house.too_long(house.modules(tmp_path)) == ["flowrl.a", "flowrl.a:f"]


def test_a_type_alias_that_stands_twice_is_found(house, tmp_path):
    (tmp_path / "a.py").write_text("Curve = list[int]\nLIMIT = 1\n")
    (tmp_path / "b.py").write_text("Curve: TypeAlias = 'tuple'\nLIMIT: int = 1\n")
    (tmp_path / "c.py").write_text("class Kind: ...\n")
    (tmp_path / "d.py").write_text("Kind = TypeVar('Kind')\n")
    assert house.classes_twice(house.modules(tmp_path)) == ["Curve", "Kind"]


def test_every_module_has_a_floor():
    assert {place_of(path) for path in MODULES} <= set(FLOOR_OF)


def test_imports_that_are_given_as_strings_are_read():
    assert PACKAGE / "tuning" / "command.py" in files_imported(PACKAGE / "cli.py")
    assert PACKAGE / "agent.py" in files_imported(PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_lower_floors_and_its_own_room(path):
    floor = FLOOR_OF[place_of(path)]
    for other in files_imported(path):
        below = FLOOR_OF[place_of(other)] < floor
        inside = place_of(other) == place_of(path) and floor != PROGRAMS
        ground = floor == FLOOR_OF[place_of(other)] == 0
        assert below or inside or ground, f"{path} imports {other}"


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
