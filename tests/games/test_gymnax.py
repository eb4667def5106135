"""Games of gymnax: the adapter, and the package that `flowrl new game` writes for one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from flowrl.cli import main
from flowrl.errors import ConfigError
from flowrl.games import base
from flowrl.games.adapters.gymnax import CONTINUOUS, SHORT, SIZES, game
from flowrl.games.base import WorldStep
from tests.games.installing import installed

NOWHERE = Path("nowhere")
FLAGS = ("--launcher=local", "--no_use_wandb", "--num_envs=32", "--layer_size=32")


def words(*given: object) -> list[str]:
    return [sys.executable, "-m", "flowrl", *map(str, given)]


@pytest.fixture
def gymnax():
    return pytest.importorskip("gymnax", reason="needs the extra gymnax: pip install '.[gymnax]'")


@pytest.mark.parametrize("name", SIZES)
def test_the_sizes_that_are_known_without_gymnax_are_gymnaxs(gymnax, name):
    environment, params = gymnax.make(name)
    known = game(name, library_folder=NOWHERE)
    assert environment.action_space(params).n == known.num_actions
    engine = known.make()
    seen = jax.eval_shape(lambda key: engine.observe(engine.reset(key)), jax.random.key(0))
    assert (seen.shape, seen.dtype) == (known.observation_shape, np.float32)


@pytest.mark.parametrize("name", SIZES)
def test_a_new_game_s_skill_ends_within_an_episode(gymnax, tmp_path, monkeypatch, name):
    """The environment's limit and what random play sees say when all episodes have ended."""
    monkeypatch.chdir(tmp_path)
    assert main(["new", "game", "New-v1", f"--environment={name}"]) == 0
    skill = (tmp_path / "new_v1" / "new_v1_skills" / "00_hold_on.py").read_text()
    (timesteps,) = map(int, re.findall(r"timestep >= (\d+)", skill))
    assert f"for {timesteps} timesteps" in skill
    _, params = gymnax.make(name)
    if name not in SHORT:
        assert timesteps == 100 < params.max_steps_in_episode
        return
    engine = game(name, library_folder=NOWHERE).make()
    reset, step, is_over = (
        jax.jit(jax.vmap(each)) for each in (engine.reset, engine.step, engine.is_over)
    )
    worlds = reset(jax.random.split(jax.random.key(0), 64))
    over, ended = is_over(worlds), []
    for number in range(timesteps + 1):
        keys = jax.random.split(jax.random.key(number), 64)
        actions = jax.random.randint(jax.random.key(number), 64, 0, SIZES[name][1])
        worlds, _ = step(keys, worlds, actions)
        over |= is_over(worlds)
        ended.append(bool(over.any()))
    assert ended.index(True) == timesteps, "an episode goes on for so long, and no longer"
    assert over.all()


@pytest.mark.parametrize("name", sorted(CONTINUOUS))
def test_continuous_actions_are_refused_in_a_line(gymnax, name):
    environment, params = gymnax.make(name)
    assert not hasattr(environment.action_space(params), "n")
    with pytest.raises(ConfigError, match=f"^{name} has continuous actions, .*; cut them into"):
        game(name, library_folder=NOWHERE)
    one = game(name, library_folder=NOWHERE, observation_size=3, num_actions=2)
    with pytest.raises(ConfigError, match="and experts choose one of N; cut them into levels"):
        one.make()


def test_an_environment_that_is_not_known_needs_its_sizes(gymnax):
    with pytest.raises(ConfigError, match=r"closest are 'Breakout-MinAtar'.*give obs"):
        game("Breakot-MinAtar", library_folder=NOWHERE)
    own = game(
        "Mine-v1",
        library_folder=NOWHERE,
        environment=own_environment,
        observation_size=(10, 10, 4),
        num_actions=6,
    )
    assert own.sources == ("gymnax", "tests")
    assert own.make().observe(own.make().reset(jax.random.key(0))).shape == (10, 10, 4)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            {"features": {"pos": "pos"}},
            "feature 'pos' is 'pos', no function .* lambda state: state",
        ),
        ({"features": {"score": len}}, "every game has the feature 'score'; give yours another"),
        ({"library_folder": "skills"}, r"is 'skills', no path; write Path.__file__.\.parent"),
        ({"num_actions": 4}, "Breakout-MinAtar has 3 actions, and num_actions says 4"),
    ],
    ids=["feature", "name", "folder", "actions"],
)
def test_what_does_not_fit_an_environment_is_refused(gymnax, fields, why):
    given = {"library_folder": NOWHERE, "observation_size": (10, 10, 4), "num_actions": 3}
    with pytest.raises(ConfigError, match=why):
        game("Breakout-MinAtar", **{**given, **fields}).make()


def test_an_environment_may_come_with_its_parameters(gymnax):
    sizes = {"observation_size": 4, "num_actions": 2}
    pair = lambda: gymnax.make("CartPole-v1")  # noqa: E731
    own = game("Mine-v1", library_folder=NOWHERE, environment=pair, **sizes).make()
    known = game("CartPole-v1", library_folder=NOWHERE).make()
    seen = [engine.observe(engine.reset(jax.random.key(0))) for engine in (own, known)]
    assert np.array_equal(*seen)


def own_environment():
    """Breakout with all of MinAtar's actions."""
    from gymnax.environments.minatar.breakout import MinBreakout

    return MinBreakout(use_minimal_action_set=False)


def test_features_are_functions_of_the_state_and_their_changes(gymnax):
    one = game(
        "Breakout-MinAtar",
        library_folder=NOWHERE,
        features={"bricks": lambda state: state.brick_map.sum(), "paddle": lambda state: state.pos},
    )
    engine = one.make()
    world = engine.reset(jax.random.key(0))
    after, reward = engine.step(jax.random.key(1), world, 1)
    step = WorldStep(world, after, reward, 1, 1)
    found = engine.features(["bricks", "paddle", "paddle_diff", "score", "alive", "timestep"], step)
    assert jax.tree.map(float, found) == {
        **{"bricks": 30, "paddle": 3, "paddle_diff": -1, "score": 0, "alive": 1, "timestep": 1},
    }
    assert found["paddle"].dtype == np.int32
    assert set(one.features) >= set(found) | {"bricks_diff", "reward"}
    assert one.renderer()(world).shape == (160, 160, 3)


def test_without_gymnax_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnax", None)
    one = game("CartPole-v1", library_folder=NOWHERE)
    with pytest.raises(ConfigError, match=r"CartPole-v1 needs gymnax: pip install '\.\[gymnax\]'"):
        one.make()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("frames", "success"),
    [("1e5", 0.3), pytest.param("4e5", 0.7, marks=pytest.mark.slow)],
    ids=["begun", "learned"],
)
def test_a_new_game_is_checked_trained_and_taken_out(gymnax, tmp_path, frames, success):
    """The package as it is written, found by its entry point; random play hardly ever succeeds."""
    package = tmp_path / "balance_v1"
    written = subprocess.run(
        words("new", "game", "Balance-v1"), cwd=tmp_path, text=True, capture_output=True, check=True
    )
    assert "flowrl train exp/balance_v1 --env_name Balance-v1" in written.stdout
    assert "balance_v1: gymnax's CartPole-v1, with a skill" in written.stdout
    env = {**os.environ, "PYTHONPATH": installed(tmp_path, package)}

    def run(*given: object) -> str:
        ended = subprocess.run(given, env=env, text=True, capture_output=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", package)
    graph = tmp_path / "graph"
    run(*words("train", graph, "--env_name=Balance-v1", f"--total_timesteps={frames}", *FLAGS))
    shown = run(*words("evaluate", graph, "Hold On", "--episodes=100", "--json"))
    assert json.loads(shown)["steps"][0]["success_rate"] > success
    run(*words("export", graph, "-o", tmp_path / "agent"))
    acting = f"import flowrl\nagent = flowrl.load_agent({str(tmp_path / 'agent')!r})\n"
    run(sys.executable, "-c", acting + "assert len([*agent.play('Hold On', seed=0)]) > 30\n")
    env["JAX_PLATFORMS"] = "none"  # told before JAX does anything
    for place in (graph, tmp_path / "agent"):
        played = words("play", place, "Hold On", "-o", tmp_path / "film.gif")
        refused = subprocess.run(played, env=env, text=True, capture_output=True, check=False)
        assert refused.returncode == 2
        said = "flowrl: the game Balance-v1 draws no pictures; give it a renderer (docs/how-to.md, "
        assert refused.stderr == f"{said}Train your own game), or use flowrl evaluate\n"


SKILL = """name = "Break Bricks"
gain = {"bricks_broken": 1}


def task_is_done(score):
    return score >= 1


def task_reward(reward, alive):
    return 1.0 * reward - 1.0 * ~alive
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_game_that_is_seen_as_a_grid_trains_and_is_taken_out(gymnax, tmp_path):
    subprocess.run(words("new", "game", "Breakout-MinAtar"), cwd=tmp_path, check=True)
    package = tmp_path / "breakout_minatar"
    assert 'environment="Breakout-MinAtar"' in (package / "breakout_minatar.py").read_text()
    (package / "breakout_minatar_skills" / "01_break_bricks.py").write_text(SKILL)
    env = {**os.environ, "PYTHONPATH": installed(tmp_path, package)}
    graph, agent, film = (tmp_path / name for name in ("graph", "agent", "film.gif"))

    def run(*given: object, code: int = 0) -> str:
        ended = subprocess.run(given, env=env, text=True, capture_output=True, check=False)
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

    train = words("train", graph, "--env_name=Breakout-MinAtar", "--target_skill=Break Bricks")
    train += [*FLAGS, "--total_timesteps=2e5"]
    said = run(*train, "--sight", code=2)
    assert "--sight: the game Breakout-MinAtar is seen as a grid" in said
    said = run(*train, "--coverage_bonus=0.1", code=2)
    assert "has no cells to visit; leave it out" in said
    assert not graph.exists()
    run(*train)
    run(*words("export", graph, "-o", agent))
    record = json.loads((agent / "agent.json").read_text())
    assert record["env_name"] == "Breakout-MinAtar"
    code = (
        f"import flowrl\nagent = flowrl.load_agent({str(agent)!r})\n"
        "assert agent.params[0]['trunk']['conv']['kernel'].shape == (3, 3, 4, 16)\n"
        "ends = [[*agent.play('Break Bricks', seed=seed)][-1].success for seed in range(8)]\n"
        "assert sum(ends) >= 5, ends\n"
    )
    run(sys.executable, "-c", code)
    run(*words("play", agent, "Break Bricks", "-o", film))
    assert film.read_bytes().startswith(b"GIF89a")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["Swing-v1", "--environment=Pendulum-v1"], "Pendulum-v1 has continuous actions"),
        (["Swing-v1", "--environment=Pendlum"], "the sizes of Pendlum are not known"),
        (["a b"], "the game's name 'a b' is not a letter, then letters, digits"),
        (["../x"], "the game's name '../x' is not a letter"),
        (["Swing-v1", "--environment=Pendlum"], "or name one of CartPole-v1, Acrobot-v1, "),
        (["Pendulum-v1"], "Pendulum-v1 has continuous actions"),
        (["Cach-bsuite"], "the sizes of Cach-bsuite are not known; closest are 'Catch-bsuite'"),
        (["Pong-misc"], "the sizes of Pong-misc are not known"),
        (["json"], "json makes a module json, a name that is taken"),
        (["Class"], "Class makes a module class, a name that is taken"),
        (["Craftax-Symbolic-v1"], "there is a game Craftax-Symbolic-v1 already"),
        (["New-v1", "-o=taken"], "-o taken exists already; choose a new folder"),
    ],
)
def test_a_game_that_cannot_be_new_is_refused_and_nothing_is_written(
    tmp_path, monkeypatch, capsys, given, why
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    assert main(["new", "game", *given]) == 2
    assert why in capsys.readouterr().err
    assert [*tmp_path.rglob("*")] == [tmp_path / "taken"]


def test_new_alone_says_what_can_be_new(capsys):
    assert main(["new"]) == 2
    assert "flowrl new game NAME writes a game of your own" in capsys.readouterr().err


def test_the_folder_of_an_installed_game_is_known_wherever_it_lies(tmp_path, monkeypatch):
    """A confined process sees it; `pip install -e` leaves it where it is."""
    assert main(["new", "game", "Away-v1", "-o", str(tmp_path / "away")]) == 0
    for place in installed(tmp_path, tmp_path / "away").split(os.pathsep)[:2]:
        monkeypatch.syspath_prepend(place)
    base._entry_points.cache_clear()
    try:
        assert tmp_path / "away" in base.game_folders()
    finally:
        base._entry_points.cache_clear()
