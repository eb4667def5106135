"""Worlds are found by their names."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from flowrl.errors import ConfigError
from flowrl.multiagent.own_worlds import OnlyApple
from flowrl.multiagent.world import TurnWorld, World, open_world

find_spec = importlib.util.find_spec


@pytest.fixture
def no_jaxmarl(monkeypatch):
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "jaxmarl" else find_spec(name)
    )


@pytest.mark.parametrize("name", ["match_the_sign", "only_apple"])
@pytest.mark.parametrize("agents", [1, 3, 8])
def test_our_worlds_have_as_many_agents_as_one_likes(name, agents):
    world = open_world(name, agents)
    assert isinstance(world, World)
    assert isinstance(world, TurnWorld)
    assert len(world.sizes.observations) == len(world.sizes.actions) == agents


def test_an_unknown_world_is_told_those_installed(no_jaxmarl):
    with pytest.raises(ConfigError) as refused:
        open_world("onlyapple", 3)
    said = str(refused.value)
    assert said.startswith("--world onlyapple is unknown; closest is 'only_apple'; choose one of ")
    assert "match_the_sign, only_apple, Craftax-Classic-Symbolic-v1" in said
    remedy = "pip install '.[marl]' in flowrl's folder"
    assert said.endswith(f"(JaxMARL is not installed: {remedy} for its worlds)")
    assert ", or MODULE:CLASS" in said


def test_a_world_of_jaxmarl_asks_for_the_extra(no_jaxmarl):
    with pytest.raises(ConfigError, match=r"^--world hanabi: .* pip install '\.\[marl\]' in .*$"):
        open_world("hanabi", 2)


def test_a_class_of_another_module_is_a_world():
    name = f"{__name__}:three_alone"
    assert open_world(name, 3).sizes == OnlyApple(name, 3).sizes
    with pytest.raises(ConfigError, match=f"--agents 2: the world {name} has 3 agents; set 3"):
        open_world(name, 2)


def three_alone(name, agents):
    return OnlyApple(name, 3)


SOURCES = {
    "leaves": "raise SystemExit(3)",
    "breaks": "raise RuntimeError('no display\\nis there')",
    "misspelt": "improt jax",
    "forgets": "print(jaxx)",
    "asserts": "assert 1 > 2",
}


@pytest.mark.parametrize(
    "name",
    [
        *("no_such_module:Open", f"{__name__}:NoSuch", ":", "a:b:c", ".relative:Open"),
        *(f"world_that_{module}:Open" for module in SOURCES),
    ],
)
def test_a_world_that_cannot_be_loaded_is_named(name, tmp_path, monkeypatch):
    for module, source in SOURCES.items():
        (tmp_path / f"world_that_{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as refused:
        open_world(name, 1)
    assert str(refused.value).startswith(f"--world {name}: ")
    assert " cannot be loaded: " in str(refused.value)
    assert "\n" not in str(refused.value)


def even(name, agents):
    if agents % 2:
        raise AssertionError("agents must be even")  # as hanabi does
    return OnlyApple(name, agents)


def stops(name, agents):
    sys.exit(3)


class Unsized(OnlyApple):
    def __init__(self, name, agents):
        self.name = name

    @property
    def sizes(self):
        raise ZeroDivisionError("by agents")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("even", "AssertionError: agents must be even"),
        ("stops", "SystemExit: 3"),
        ("Unsized", "ZeroDivisionError: by agents"),
    ],
)
def test_what_a_world_says_of_its_agents_is_one_line(kind, said):
    name = f"{__name__}:{kind}"
    remedy = "choose another number of agents, or repair the world"
    with pytest.raises(ConfigError, match=f"^--world {name} --agents 3: {said}; {remedy}$"):
        open_world(name, 3)


class Sizeless:
    """All of a world but its sizes."""

    reset, observe, step = OnlyApple.reset, OnlyApple.observe, OnlyApple.step

    def __init__(self, name, agents):
        self.name = name


@pytest.mark.parametrize(
    ("name", "kind"), [(f"{__name__}:Sizeless", "Sizeless"), ("builtins:print", "NoneType")]
)
def test_what_is_no_world_is_refused(name, kind):
    said = f"^--world {name}: {kind} is no world, which has name, sizes, reset, observe and step; "
    with pytest.raises(ConfigError, match=said):
        open_world(name, 1)


@pytest.mark.skipif(not find_spec("jaxmarl"), reason="needs the extra marl")
def test_hanabi_with_one_agent_is_one_line():
    with pytest.raises(ConfigError, match="--world hanabi --agents 1: AssertionError: "):
        open_world("hanabi", 1)


def test_the_list_of_worlds_loads_no_jax():
    code = """
import sys
from flowrl.errors import ConfigError
from flowrl.multiagent.world import open_world
try:
    open_world("nowhere", 3)
except ConfigError:
    assert "jax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
