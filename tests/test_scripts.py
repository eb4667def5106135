"""The shell scripts and the source distribution: what they install, call and take."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.machine import program

WOOD, SAPLING, DRINK, TABLE = "Collect Wood", "Collect Sapling", "Collect Drink", "Place Table"
SCRIPTS = Path(__file__).parents[1] / "scripts"
PARTS = ("bash", "sed", "dirname", "cat", "cksum", "id", "mkdir")  # of the machine, for scripts


@pytest.fixture
def machine(tmp_path):
    """A machine with little on it, whose apt-get, pip and uv write down how they are called."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in PARTS:
        found = subprocess.run(["which", name], capture_output=True, text=True, check=True)
        (programs / name).symlink_to(found.stdout.strip())
    for name in ("apt-get", "uv", "sudo", "env"):
        program(programs / name, f'echo "CALL {name} $*" >&2')
    return programs


def lines_of(machine, command: str) -> list[str]:
    """What a script says, and which installers it calls, in order."""
    env = {"PATH": str(machine), "FLOWRL_VENV": str(machine.parent / "venv")}
    said = subprocess.run(
        ["bash", "-c", command], env=env, capture_output=True, text=True, check=False
    )
    return (said.stdout + said.stderr).splitlines()


@pytest.mark.parametrize("script", ["demo.sh", "test.sh", "test_parallel_training.sh"])
def test_help_installs_nothing(machine, script):
    said = lines_of(machine, f"bash {SCRIPTS / script} --help")
    assert any(f"bash scripts/{script} --help" in line for line in said)
    assert not [line for line in said if "CALL" in line]


def test_a_system_package_is_named_with_its_reason_before_it_is_installed(machine):
    said = lines_of(machine, f"source {SCRIPTS}/setup.sh; offer tmux tmux 'to try it'")
    assert said[0].startswith("flowrl: installing the system's package tmux with apt-get")
    assert said[0].endswith("to try it")
    assert "CALL" in said[1]


@pytest.mark.parametrize(
    ("script", "extras"),
    [("demo.sh", "[web]"), ("test_parallel_training.sh", ""), ("test.sh", "[dev]")],
)
def test_only_the_tests_install_what_developers_need(machine, script, extras):
    first = (SCRIPTS / script).read_text().partition("\nsource ")[0]  # up to setup.sh
    begin = re.sub(r"(?m)^#.*$", "", first)
    said = lines_of(machine, f"{begin}\nsource {SCRIPTS}/setup.sh\ninstall_package")
    (call,) = [line for line in said if line.startswith("CALL uv")]
    assert call.endswith(f"-e {SCRIPTS.parent}{extras}")
    assert "-q" not in shlex.split(call), "the installation shows how far it is"


@pytest.mark.parametrize(
    ("flags", "measured"), [("", [WOOD, SAPLING, DRINK, TABLE]), ("--max_nodes 2", [WOOD, DRINK])]
)
def test_a_smaller_demo_measures_the_skills_that_it_has_completed(tmp_path, flags, measured):
    done = [{"skill": name, "status": "completed"} for name in (WOOD, DRINK)]
    document = {"skills": [*done, {"skill": SAPLING, "status": "failed"}]}
    python = program(
        tmp_path / "python",
        f"""case "$*" in
          "-c "*) exec {sys.executable} "$@" ;;
          *--json) echo '{json.dumps(document)}' ;;
          *) echo "$*" ;;
        esac""",
    )
    work = (SCRIPTS / "demo.sh").read_text().partition("\nsetup\n")[2]
    begin = f"set -euo pipefail; set -- {flags}; PYTHON={python}; FLOWRL_ROOT={tmp_path}; fresh=\n"
    said = subprocess.check_output(["bash", "-c", begin + work], text=True)
    assert re.findall(r"evaluate exp/demo (.*) --episodes", said) == measured
    assert ("--at_least 0.8" in said) == (not flags)


@pytest.mark.parametrize(("code", "kept"), [(2, True), (75, False)])
def test_the_last_demo_is_removed_once_the_flags_are_read(tmp_path, code, kept):
    python = program(tmp_path / "python", f"exit {code}")
    (tmp_path / "exp" / "demo").mkdir(parents=True)
    work = (SCRIPTS / "demo.sh").read_text().partition("\nsetup\n")[2]
    begin = f"set -euo pipefail; set --; PYTHON={python}; FLOWRL_ROOT={tmp_path}; fresh=yes\n"
    ended = subprocess.run(["bash", "-c", begin + work], check=False)
    assert ended.returncode == code
    assert [path.name for path in (tmp_path / "exp").iterdir()] == ["demo"] * kept


@pytest.mark.parametrize("word", ["exp/mine", "fresh", "--graph_path=x", "--graph-path x"])
def test_the_demo_trains_in_its_own_folder_alone(machine, word):
    said = lines_of(machine, f"bash {SCRIPTS / 'demo.sh'} --fresh {word}")
    assert len(said) == 1
    assert said[0].endswith("elsewhere use flowrl train")


def test_the_environment_of_another_clone_is_left_alone(machine, tmp_path):
    other, venv = tmp_path / "other clone", machine.parent / "venv"
    program(venv / "bin" / "python", "exit 0")
    (venv / ".flowrl-installed").write_text(f"dev {other} 123 456\n")
    command = f"source {SCRIPTS}/setup.sh; setup"
    assert "CALL uv" in " ".join(lines_of(machine, command)), "that clone is gone"
    other.mkdir()
    (other / "pyproject.toml").touch()
    (venv / ".flowrl-installed").write_text(f"dev {other} 123 456\n")
    said = lines_of(machine, command)
    assert said[-1] == f"flowrl: {venv} belongs to {other}; name another folder with FLOWRL_VENV"
    assert "CALL uv" not in " ".join(said)


def test_a_python_that_is_named_and_unfit_is_refused(machine):
    said = lines_of(machine, f"FLOWRL_PYTHON=/nosuch; source {SCRIPTS}/setup.sh; find_python")
    assert said == [
        "flowrl: /nosuch is no Python 3.11 or newer; name one with FLOWRL_PYTHON=/path/to/python"
    ]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_sixteen_skills_of_classic_are_mastered_after_twenty_minutes(tmp_path):
    figures = tmp_path / "classic.json"
    program = [sys.executable, "scripts/learn_classic.py", "--folder", tmp_path / "graph"]
    subprocess.run([*program, "--json", figures], cwd=SCRIPTS.parent, check=True)
    (row,) = json.loads(figures.read_text())["rows"]
    assert row["ours"] >= 16


def test_what_a_script_imports_is_there():
    text = "\n".join(path.read_text() for path in SCRIPTS.glob("*.sh"))
    imports = re.findall(r"^from flowrl.* import .*$", text, flags=re.MULTILINE)
    assert imports
    subprocess.run([sys.executable, "-c", "\n".join(imports)], check=True, env=dict(os.environ))


@pytest.mark.skipif(not (SCRIPTS.parent / ".git").exists(), reason="this is no git clone")
def test_a_source_distribution_has_the_tracked_files_alone(tmp_path):
    pytest.importorskip("hatchling")
    clone, root = tmp_path / "clone", SCRIPTS.parent
    subprocess.run(["git", "clone", "-q", root, clone], check=True, capture_output=True)
    (clone / "notes.txt").write_text("a secret")
    (clone / "flowrl" / "draft.py").write_text("import os")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path]
    subprocess.run(build, cwd=clone, check=True, capture_output=True)
    listed = subprocess.check_output(["git", "ls-files"], cwd=clone, text=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names == {*listed.split("\n")} - {""} | {"PKG-INFO"}
