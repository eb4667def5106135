"""A graph of the tiny game asks for a skill once all are trained, and trains it, for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from flowrl.experts.manifest import read as read_manifest
from flowrl.paths import GraphPaths
from tests.games.test_a_game_of_ones_own import FLAGS, installed
from tests.judging.endpoint import KEY, FakeEndpoint, needs_openai, serving
from tests.llm.making import amounts, contract, rewards, scripted

pytestmark = needs_openai
DONE = "def task_is_done(inventory):\n    return inventory.berry >= 2\n"
REWARD = (
    "def task_reward(inventory_diff, cell_diff):\n    return inventory_diff.berry + 0.1 * cell_diff"
)


def test_a_skill_is_written_trained_and_merged_once_all_are_trained(tmp_path):
    """The first reward fails the checks, the second is taken."""
    text = contract("Fill Cup", gain=amounts({"cup": 1}), task_is_done=DONE)
    env = {**os.environ, "PYTHONPATH": installed(tmp_path), "OPENAI_API_KEY": KEY}
    graph = tmp_path / "graph"
    with serving(FakeEndpoint()) as endpoint:
        scripted(endpoint, [text, rewards("def task_reward(n):\n    return open('x')", REWARD)])
        told = f"--base_url {endpoint.url} --model m"
        words = ["-m", "flowrl", "train", str(graph), *FLAGS, "--max_nodes=1", "--write_skills=1"]
        trained = subprocess.run(
            [sys.executable, *words, "--write_flags", told],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert trained.returncode == 0, trained.stderr
        assert len(endpoint.asked) == 2
    experts = read_manifest(GraphPaths(graph)).experts
    assert [each.skill for each in experts.values()] == ["Pick Berry", "Fill Cup"]
    shown = [sys.executable, "-m", "flowrl", "status", str(graph), "--json"]
    found = subprocess.run(shown, env=env, capture_output=True, text=True, check=True)
    rates = {row["skill"]: row["success_rate"] for row in json.loads(found.stdout)["skills"]}
    assert rates["Fill Cup"] > 0.5
