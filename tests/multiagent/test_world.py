"""Worlds are found by their names."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from flowrl.errors import ConfigError
from flowrl.multiagent import world as worlds
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
    assert said.endswith("(JaxMARL is not installed: pip install 'flowrl[marl]' for its worlds)")


def test_a_world_of_jaxmarl_asks_for_the_extra(no_jaxmarl):
    with pytest.raises(ConfigError, match=r"^--world hanabi: .* pip install 'flowrl\[marl\]'$"):
        open_world("hanabi", 2)


def test_another_package_can_bring_a_world_and_replaces_none(monkeypatch):
    value = f"{__name__}:three_alone"
    points = [EntryPoint(name, value, worlds.GROUP) for name in ("garden", "only_apple")]
    monkeypatch.setattr(worlds, "entry_points", lambda group: points)
    assert open_world("garden", 3).sizes == OnlyApple("garden", 3).sizes
    with pytest.raises(ConfigError, match="--agents 2: the world garden has 3 agents; set 3"):
        open_world("garden", 2)
    assert len(open_world("only_apple", 2).sizes.actions) == 2


def three_alone(name, agents):
    return OnlyApple(name, 3)


@pytest.mark.parametrize("value", ["no_such_module:open", f"{__name__}:no_such_function"])
def test_a_world_that_cannot_be_loaded_is_named(monkeypatch, value):
    broken = EntryPoint("broken", value, worlds.GROUP)
    monkeypatch.setattr(worlds, "entry_points", lambda group: [broken])
    with pytest.raises(
        ConfigError, match=r"the world 'broken' \(.*\) cannot be loaded: .*; repair"
    ):
        open_world("broken", 1)


def even(name, agents):
    if agents % 2:
        raise AssertionError("agents must be even")  # as hanabi does
    return OnlyApple(name, agents)


def test_what_a_world_says_of_its_agents_is_one_line(monkeypatch):
    points = [EntryPoint("even", f"{__name__}:even", worlds.GROUP)]
    monkeypatch.setattr(worlds, "entry_points", lambda group: points)
    said = "--world even --agents 3: AssertionError: agents must be even; choose another number"
    with pytest.raises(ConfigError, match=f"^{said}"):
        open_world("even", 3)


@pytest.mark.skipif(not find_spec("jaxmarl"), reason="needs the extra marl")
def test_hanabi_with_one_agent_is_one_line():
    with pytest.raises(ConfigError, match="--world hanabi --agents 1: AssertionError: "):
        open_world("hanabi", 1)


def test_the_list_of_worlds_loads_no_jax():
    code = "import sys, flowrl.multiagent.world as worlds; worlds._entry_points()"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'jax' not in sys.modules"], check=True)
