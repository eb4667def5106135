"""`flowrl new game`: a package with a game of one's own, small and ready to train."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from flowrl import storage
from flowrl.console import print_report
from flowrl.errors import ConfigError
from flowrl.games.adapters.gymnax import CONTINUOUS, SHORT, SIZES, sizes_of
from flowrl.games.base import game_names
from flowrl.output import check_output

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
_ENVIRONMENT = "CartPole-v1"
_TIMESTEPS = 100  # that the skill lasts, in a game whose episodes do
_OF_GYMNAX = re.compile(r".+-(bsuite|MinAtar|misc)")
_FILES = {
    "pyproject.toml": """[build-system]
requires = ["hatchling>=1.25"]
build-backend = "hatchling.build"

[project]
name = "{project}"
version = "0.1"
requires-python = ">=3.11"
dependencies = ["flowrl", "gymnax>=1,<2"]

[project.entry-points."flowrl.games"]
"{name}" = "{module}:GAME"

[tool.hatch.build.targets.wheel]
include = ["{module}.py", "{module}_skills/*"]
""",
    "{module}.py": '''"""{name}: gymnax's {environment}. This module does not import JAX."""

from pathlib import Path

from flowrl.games.adapters.gymnax import game

GAME = game(
    "{name}",
    environment="{environment}",
    features={{"time": lambda state: state.time}},  # skills ask for time, and for time_diff
    library_folder=Path(__file__).parent / "{module}_skills",
)
''',
    "{module}_skills/00_hold_on.py": '''"""Keep the game going for {timesteps} timesteps."""

name = "Hold On"
gain = {{"held_on": 1}}


def task_is_done(timestep, alive):
    return alive & (timestep >= {timesteps})


def task_reward(alive):
    return 0.01 * alive - 1.0 * ~alive
''',
    "test_{module}.py": '''"""{name} keeps its contract, and its skills pass their checks."""

import subprocess
import sys
from pathlib import Path

import pytest

SKILLS = Path(__file__).parent / "{module}_skills"


@pytest.mark.parametrize("words", [("--game", "{name}"), (SKILLS,)], ids=["game", "skills"])
def test_flowrl_has_nothing_to_say_against_it(words):
    command = [sys.executable, "-m", "flowrl", "check", *map(str, words)]
    checked = subprocess.run(command, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
''',
}


@dataclass(frozen=True, kw_only=True)
class NewGameCommand:
    """Write a package with a game of your own that trains.

    Examples:
      flowrl new game Balance-v1
      flowrl new game Breakout-MinAtar -o breakout
      flowrl new game Duel-v1 --environment SpaceInvaders-MinAtar
    """

    name: tyro.conf.Positional[str]
    """The game's name, as `--env_name` takes it."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Folder to write, a new one (default: the name as a module's)."""
    environment: str | None = None
    """The environment of gymnax to begin with (default: that of this name, else CartPole-v1)."""

    def __call__(self) -> int:
        """Write the package; prints the commands that follow."""
        module = _module_of(self.name)
        folder = self.output or Path(module)
        known = self.name in SIZES.keys() | CONTINUOUS or _OF_GYMNAX.fullmatch(self.name)
        environment = self.environment or (self.name if known else _ENVIRONMENT)
        sizes_of(environment)
        if os.path.lexists(folder):
            raise ConfigError(f"-o {folder} exists already; choose a new folder")
        check_output(folder)
        timesteps = min(_TIMESTEPS, SHORT.get(environment, _TIMESTEPS + 1) - 1)
        words = {"name": self.name, "module": module, "environment": environment}
        words |= {"project": module.replace("_", "-"), "timesteps": str(timesteps)}
        with storage.building(folder.absolute()) as prepared:
            for file, text in _FILES.items():
                path = prepared / file.format_map(words)
                storage.make_dir(path.parent)
                storage.write_atomic(path, text.format_map(words))
        train = f"flowrl train exp/{module} --env_name {self.name} --no_use_wandb"
        steps = (f"pip install -e {folder}", f"flowrl check --game {self.name}", train)
        what = f"gymnax's {environment}, with a skill to hold on for {timesteps} timesteps"
        lines = [f"{folder}: {what}; change it to your game's", "next"]
        lines += [f"  {step}" for step in steps]
        print_report({}, lines, as_json=False)
        return 0


def _module_of(name: str) -> str:
    """The name of the game's module; raises ConfigError if either name is no good."""
    if not _NAME.fullmatch(name):
        what = "a letter, then letters, digits, '.', '_' and '-', 64 at most"
        raise ConfigError(f"the game's name {name[:80]!r} is not {what}; choose another")
    if name in game_names():
        raise ConfigError(f"there is a game {name} already; choose another name")
    module = re.sub(r"\W+", "_", name).strip("_").lower()
    if keyword.iskeyword(module) or importlib.util.find_spec(module) is not None:
        raise ConfigError(f"{name} makes a module {module}, a name that is taken; choose another")
    return module
