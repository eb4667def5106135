"""Finished agents play in fresh worlds: `python -m flowrl.independent evaluate`."""

from __future__ import annotations

import json
import shutil

import pytest

from flowrl import independent
from flowrl.multiagent.own_worlds import TURNS
from flowrl.paths import IndependentPaths
from tests.multiagent.test_run import TINY

LEARNT = (
    *TINY,
    *("--epochs=40", "--num_envs=8", "--num_steps=16", "--lr=1e-2", "--gamma=0.8"),
    *("--num_minibatches=2", "--update_epochs=4"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run whose agents have learnt their signs."""
    folder = tmp_path_factory.mktemp("learnt") / "run"
    assert independent.main([*LEARNT, f"--run_folder={folder}"]) == 0
    return folder


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """A run whose agents still guess."""
    folder = tmp_path_factory.mktemp("untrained") / "run"
    words = [word for word in LEARNT if not word.startswith(("--epochs", "--lr"))]
    assert independent.main([*words, "--epochs=1", "--lr=1e-9", f"--run_folder={folder}"]) == 0
    return folder


def told(capsys, folder, *words: str) -> dict:
    assert independent.main(["evaluate", str(folder), "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_agents_that_have_learnt_get_the_best_return(capsys, folder):
    report = told(capsys, folder, "--episodes=128")
    assert (report["world"], report["epochs"], report["episodes"]) == ("match_the_sign", 40, 128)
    assert [row["agent"] for row in report["agents"]] == [0, 1, 2]
    for row in report["agents"]:
        assert row["low"] <= row["mean_return"] <= row["high"] <= 1.05 * TURNS
        assert row["mean_return"] > 0.9 * TURNS
        assert row["mean_episode_length"] == TURNS


def test_an_agent_that_has_not_learnt_guesses(capsys, untrained):
    rows = told(capsys, untrained, "--episodes=512")["agents"]
    for row, guessed in zip(rows, (4, 8 / 3, 2), strict=True):
        assert row["mean_return"] == pytest.approx(guessed, abs=0.6)


def test_the_same_seed_plays_the_same_episodes(capsys, untrained):
    first = told(capsys, untrained, "--episodes=16", "--seed=3")
    assert told(capsys, untrained, "--episodes=16", "--seed=3") == first
    assert told(capsys, untrained, "--episodes=16", "--seed=4") != first


def test_lines_name_each_agent(capsys, folder):
    assert independent.main(["evaluate", str(folder), "--episodes=8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "match_the_sign: 8 episodes after 40 epochs"
    assert [line.split(":")[0] for line in lines[1:]] == ["agent 0", "agent 1", "agent 2"]


def changed(folder, **facts):
    run_paths = IndependentPaths(folder)
    run = json.loads(run_paths.run_json.read_text())
    run_paths.run_json.write_text(json.dumps(run | facts))


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (shutil.rmtree, "has no run.json; name the folder of a run"),
        (lambda folder: IndependentPaths(folder).result_json.unlink(), "has no finished run"),
        (lambda folder: changed(folder, actions=[9, 9, 9]), "run.json"),
        (lambda folder: changed(folder, layer_size="wide"), "run.json"),
        (lambda folder: shutil.rmtree(IndependentPaths(folder).final(1)), "agent_1"),
    ],
    ids=["no folder", "not finished", "edited sizes", "edited flag", "an agent is gone"],
)
def test_a_run_that_cannot_be_played_is_one_line(capsys, tmp_path, folder, spoil, problem):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    spoil(copy)
    assert independent.main(["evaluate", str(copy), "--episodes=8"]) != 0
    said = capsys.readouterr()
    assert said.out == ""
    assert problem in said.err
    assert "Traceback" not in said.err
    assert len(said.err.splitlines()) == 1
