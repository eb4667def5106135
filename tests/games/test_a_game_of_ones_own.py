"""A package with a game of its own is all that it takes to train, evaluate and check its skills.

Nothing of flowrl is changed or patched for it: the processes find the game as they find an
installed one, by the entry point of a distribution on the Python path.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from flowrl.experts.manifest import read as read_manifest
from flowrl.paths import GraphPaths
from flowrl.skills.skill import load_library
from flowrl.skills.validation.cache import shipped
from flowrl.skills.validation.dry_run import SkillCode
from tests.games.installing import HERE, forget_games, installed

FLAGS = (
    *("--env_name=Tiny-v1", "--launcher=local", "--no_use_wandb", "--max_nodes=2"),
    *("--total_timesteps=4e4", "--num_envs=32", "--num_steps=32", "--max_task_steps=40"),
    *("--layer_size=16", "--lr=3e-3", "--success_state_rate=0.9", "--min_success_rate=0.5"),
)


REPLAYS = """
import sys
from dataclasses import replace
from pathlib import Path
from flowrl.errors import FileRefusedError
from flowrl.experts.store import ExpertStore
from flowrl.measures.episodes import read_episodes
from flowrl.paths import GraphPaths
from flowrl.runs import read_run
from flowrl.viewing.pictures import open_agent

graph_paths = GraphPaths(Path(sys.argv[1]))
run = read_run(ExpertStore(graph_paths).archive_of("Bake Pie"))
agent = open_agent(graph_paths.root, "Bake Pie", trust_skills=False)
episodes = [*read_episodes(graph_paths, run)]
assert len(episodes) == 200
for episode in episodes:
    steps = [*agent.replay("Bake Pie", episode)]
    assert [step.reward for step in steps] == episode.rewards.tolist()
    assert [step.step for step in steps] == episode.steps.tolist()
    assert steps[-1].success == episode.success
digests = episodes[6].digests.copy()
digests[1] += 1
for changed in ({"digests": digests}, {"world_key": episodes[6].world_key.repeat(2)}):
    try:
        [*agent.replay("Bake Pie", replace(episodes[6], **changed))]
    except FileRefusedError as error:
        print(error)
"""

DRAWS = """
import sys
from flowrl import cli

graph, *pictures = sys.argv[1:]
metric = ("--metric", "episodes", "--x", "minutes")
for words, picture in zip(((), ("Bake Pie",), ("Bake Pie", *metric)), pictures, strict=True):
    assert cli.main(["plot", graph, *words, "-o", picture]) == 0
"""


@pytest.fixture
def run(tmp_path):
    """Runs a command of flowrl where the tiny game's package is installed."""
    env = {**os.environ, "PYTHONPATH": installed(tmp_path)}

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, words)]
        return subprocess.run(command, env=env, text=True, capture_output=True, check=False)

    return run


def test_a_game_of_ones_own_is_checked_trained_and_evaluated(run, tmp_path):
    checked = run(
        "-m", "flowrl.cli", "check", *sorted((HERE / "tiny_skills").glob("*.py")), "--json"
    )
    assert checked.returncode == 0, checked.stderr
    assert [each["games"] for each in json.loads(checked.stdout)] == [["Tiny-v1"], ["Tiny-v1"]]

    graph = tmp_path / "graph"
    told = tmp_path / "told"
    notify = f"--notify=tee -a {told}"
    trained = run("-m", "flowrl.bottomup_parallel", f"--graph-path={graph}", *FLAGS, notify)
    assert trained.returncode == 0, trained.stderr
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    ends = {("completed", "Pick Berry"), ("completed", "Bake Pie"), ("ended", None)}
    assert {(line["event"], line.get("skill")) for line in lines} == ends
    module = next((graph / "skills").glob("*_Bake_Pie/*.py")).read_text()
    assert "from tiny_engine import Cell\n\nGAME = 'Tiny-v1'\n" in module

    played = run(
        *("-m", "flowrl.cli", "evaluate", graph, "--skill=Bake Pie"),
        *("--episodes=300", "--at_least=0.5", "--json", "--record=200"),
    )
    assert played.returncode == 0, played.stdout + played.stderr
    assert [step["skill"] for step in json.loads(played.stdout)["steps"]] == [
        *("Pick Berry", "Bake Pie"),
    ]

    repeated = run("-c", REPLAYS, graph)
    assert repeated.returncode == 0, repeated.stderr
    assert "recorded episode 7 departs from its record at timestep 2: other" in repeated.stdout
    assert "recorded episode 7 has keys of 4 words, which this JAX does not" in repeated.stdout
    film = tmp_path / "film.mp4"
    shown = run("-m", "flowrl.cli", "play", graph, "Bake Pie", "-o", film, "--recorded")
    assert shown.returncode == 0, shown.stderr
    assert film.read_bytes()[4:8] == b"ftyp"
    assert f"{film}: " in shown.stdout

    pictures = [tmp_path / f"picture{number}.svg" for number in range(4)]
    drawn = run("-m", "flowrl.cli", "plot", graph, "--graph", "-o", pictures[3])
    assert drawn.returncode == 0, drawn.stderr
    drawn = run("-c", DRAWS, graph, *pictures[:3])
    assert drawn.returncode == 0, drawn.stderr
    assert all("Bake Pie" in picture.read_text() for picture in pictures)

    changed, berry = tmp_path / "changed", HERE / "tiny_skills" / "00_pick_berry.py"
    changed.mkdir()
    (changed / berry.name).write_text(berry.read_text().replace("+ 0.1 *", "+ 0.2 *"))
    before = read_manifest(GraphPaths(graph)).experts
    asked = run("-m", "flowrl.cli", "retrain", graph, "Pick Berry", f"--skills_dir={changed}")
    assert asked.returncode == 0, asked.stderr
    retrained = run("-m", "flowrl.bottomup_parallel", f"--graph-path={graph}", *FLAGS)
    assert retrained.returncode == 0, retrained.stderr
    after = read_manifest(GraphPaths(graph)).experts
    assert len(after[0].lineage) == 1
    assert after[0].content != before[0].content
    assert after[1] == before[1]

    agent = tmp_path / "agent"
    exported = run("-m", "flowrl.cli", "export", graph, "-o", agent)
    assert exported.returncode == 0, exported.stderr
    shutil.rmtree(graph)
    acting = (
        "import flowrl\n"
        f"agent = flowrl.load_agent('{agent}')\n"
        "wins = 0\n"
        "for seed in range(8):\n"
        "    episode = list(agent.play('Bake Pie', seed=seed))\n"
        "    assert {step.skill for step in episode} <= {'Pick Berry', 'Bake Pie'}\n"
        "    assert [step.done for step in episode[-2:]] in ([False, True], [True])\n"
        "    wins += episode[-1].success\n"
        "assert agent.skills == ('Pick Berry', 'Bake Pie')\n"
        "assert wins >= 3, wins\n"
    )
    acted = run("-c", acting)
    assert acted.returncode == 0, acted.stderr
    film = tmp_path / "film.gif"
    shown = run("-m", "flowrl.cli", "play", agent, "Bake Pie", "-o", film, "--seed=3")
    assert shown.returncode == 0, shown.stderr
    assert film.read_bytes().startswith(b"GIF89a")


def test_the_wheel_of_the_tiny_game_has_all_of_it(tmp_path, monkeypatch):
    [wheel] = WheelBuilder(str(HERE)).build(directory=str(tmp_path))
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    assert (site / "tiny_skills" / "approvals.json").exists()
    monkeypatch.setenv("PYTHONPATH", str(site))
    words = (sys.executable, "-m", "flowrl.cli", "check", str(site / "tiny_skills"), "--no_trace")
    checked = subprocess.run(words, text=True, capture_output=True, check=False)
    assert checked.stdout.count(": ok: ") == 2, checked.stdout + checked.stderr
    assert "for Tiny-v1; plan: Pick Berry × 1, Bake Pie × 1" in checked.stdout


def test_a_skill_for_the_tiny_game_is_for_no_other(run, tmp_path):
    skill = tmp_path / "pick.py"
    text = (HERE / "tiny_skills" / "00_pick_berry.py").read_text()
    skill.write_text(text.replace("inventory_diff.berry", "inventory_diff.wood"))
    refused = run("-m", "flowrl.cli", "check", skill, "--no_trace")
    assert refused.returncode == 1
    assert "inventory_diff.wood is not in Tiny-v1; " in refused.stdout


def test_a_game_of_ones_own_is_loaded_without_jax_and_draws_its_worlds(run):
    code = (
        "import sys\n"
        "from flowrl.games.base import find_game\n"
        "game = find_game('Tiny-v1')\n"
        "assert 'jax' not in sys.modules\n"
        "import jax\n"
        "picture = game.renderer()(game.make().reset(jax.random.key(0)))\n"
        "assert picture.shape == (8, 40, 3) and picture.max() == 255\n"
        "assert len(game.code_digest()) == 64\n"
    )
    assert run("-c", code).returncode == 0


def test_an_unknown_game_is_refused_with_all_that_are_installed(run, tmp_path):
    refused = run(
        "-m", "flowrl.bottomup_parallel", f"--graph-path={tmp_path}/g", "--env_name=Chess"
    )
    assert refused.returncode == 2
    assert "Tiny-v1, or add a game" in refused.stderr
    broken = tmp_path / "site" / "tiny_game-1.0.dist-info" / "entry_points.txt"
    broken.write_text("[flowrl.games]\nChess = no_such_module:CHESS\n")
    refused = run(
        "-m", "flowrl.bottomup_parallel", f"--graph-path={tmp_path}/g", "--env_name=Chess"
    )
    assert refused.returncode == 2
    assert "(no_such_module:CHESS) cannot be loaded: ModuleNotFoundError" in refused.stderr


def cannot_be_loaded(folder: Path, why: str) -> str:
    where = rf"\({re.escape(str(folder))}/tiny_game.py:2\)"
    return rf"the game 'Tiny-v1' \(tiny_game:TINY\) cannot be loaded: {why} {where}; "


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import gymnaxx\n", r"ModuleNotFoundError: No module named 'gymnaxx'"),
        ("TINY = Gane()\n", r"NameError: name 'Gane' is not defined"),
        ("int('x')\n", r"ValueError: invalid literal for int\(\) .*"),
        ("from flowrl.games.base import Game; Game(name='x')\n", r"TypeError: .* missing .*"),
    ],
    ids=["import", "name", "value", "field"],
)
def test_a_game_that_cannot_be_loaded_is_told_with_its_error_and_place(
    tmp_path, monkeypatch, flowrl, code, why
):
    for place in installed(tmp_path).replace(str(HERE), str(tmp_path)).split(os.pathsep)[:2]:
        monkeypatch.syspath_prepend(place)
    (tmp_path / "tiny_game.py").write_text(f"x = 1\n{code}")
    forget_games()
    try:
        said = flowrl("check", "--game=Tiny-v1", code=2).err
    finally:
        forget_games()
    assert re.search(cannot_be_loaded(tmp_path, why), said), said


def test_a_game_that_is_no_python_is_told_without_a_traceback(tmp_path):
    env = {**os.environ, "PYTHONPATH": installed(tmp_path).replace(str(HERE), str(tmp_path))}
    (tmp_path / "tiny_game.py").write_text("x = 1\nTINY = (\n")
    words = (sys.executable, "-m", "flowrl.cli", "check", "--game=Tiny-v1")
    refused = subprocess.run(words, env=env, text=True, capture_output=True, check=False)
    assert refused.returncode == 2, refused.stderr
    why = r"SyntaxError: '\(' was never closed"
    assert re.search(cannot_be_loaded(tmp_path, why), refused.stderr), refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("file", "found", "instead", "why"),
    [
        (
            *("tiny_engine.py", "import jax.numpy as jnp\n"),
            *("import jax.numpy as jnp\nimport gymnaxx\n",),
            r"ModuleNotFoundError: No module named 'gymnaxx' \(\S*tiny_engine.py:\d+\)",
        ),
        (
            *("tiny_engine.py", "counts = np.arange(30, dtype=np.int32) % 10\n"),
            *("counts = np.arange(30) % self.bag\n",),
            r"AttributeError: 'TinyEngine' object has no attribute 'bag' \(\S*tiny_engine.py:\d+\)",
        ),
    ],
    ids=["an import", "moments"],
)
def test_a_games_own_error_is_told_with_its_place(tmp_path, file, found, instead, why):
    game = tmp_path / "game"
    shutil.copytree(HERE, game)
    (game / file).write_text((game / file).read_text().replace(found, instead))
    env = {**os.environ, "PYTHONPATH": installed(tmp_path).replace(str(HERE), str(game))}
    words = (sys.executable, "-m", "flowrl.cli", "check", str(game / "tiny_skills"))
    refused = subprocess.run(words, env=env, text=True, capture_output=True, check=False)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert re.search(f"the game Tiny-v1 fails in the dry run of skill code: {why}", refused.stderr)
    assert "Traceback" not in refused.stderr


def test_a_backend_that_is_not_here_is_told_once(tmp_path):
    env = {**os.environ, "PYTHONPATH": installed(tmp_path), "JAX_PLATFORMS": "nonsense"}
    graph, run = tmp_path / "graph", tmp_path / "run"
    for words, code in (
        (("flowrl.bottomup_parallel", f"--graph-path={graph}", *FLAGS), 1),
        (("flowrl.independent", "--world=only_apple", f"--run_folder={run}"), 2),
    ):
        ended = subprocess.run(
            (sys.executable, "-m", *words), env=env, text=True, capture_output=True, check=False
        )
        assert ended.returncode == code
        assert "JAX finds no device (JAX_PLATFORMS='nonsense': " in ended.stderr
        assert "attempt 2" not in ended.stderr
        assert "Traceback" not in ended.stderr + ended.stdout


@pytest.mark.tmux
def test_odd_paths_lead_to_the_same_graph(tmp_path):
    """A server of another folder, `..` after a link, spaces, unicode, `.` and `//`."""
    env = {**os.environ, "PYTHONPATH": installed(tmp_path)}
    here, away = tmp_path / "木 here", tmp_path / "far" / "away"
    away.mkdir(parents=True)
    (here / "sub").mkdir(parents=True)
    (here / "link").symlink_to(away)
    skills = tmp_path / "far" / "my skills"
    skills.mkdir()
    text = (HERE / "tiny_skills" / "00_pick_berry.py").read_text()
    (skills / "own.py").write_text(text.replace('"Pick Berry"', '"Take Berry"'))
    socket = ("tmux", "-S", str(tmp_path / "socket"))
    subprocess.run((*socket, "new-session", "-d", "-s", "other"), cwd=away, check=True)
    words = [*("-m", "flowrl.bottomup_parallel", "sub/..//./link/../a graph"), *FLAGS]
    words += ["--total_timesteps=4k", "--min_success_rate=0"]
    words += ["--launcher=tmux", f"--tmux_socket={here}/sub/../../socket", "--max_nodes=1"]
    words += ["--skills_dir", "link/../my skills", "--target_skill", "Take Berry"]
    try:
        trained = subprocess.run(
            (sys.executable, *words), cwd=here, env=env, text=True, capture_output=True, check=False
        )
    finally:
        subprocess.run((*socket, "kill-server"), check=False)
    assert trained.returncode == 0, trained.stderr
    manifest = tmp_path / "far" / "a graph" / "checkpoints" / "global_latest.json"
    assert "Take Berry" in manifest.read_text()


def test_the_approvals_of_the_tiny_game_are_those_of_its_skills_today(tiny_game):
    """When this fails: `python scripts/write_approvals.py Tiny-v1`, where it is installed."""
    codes = [SkillCode.of(skill, "Tiny-v1") for skill in load_library("Tiny-v1").values()]
    assert [code.digest for code in codes] == [*shipped("Tiny-v1")]
