"""A text that teaches nothing is replaced by one that trains well, with real trainings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.paths import GraphPaths
from flowrl.runs import read_run
from tests.games.test_a_game_of_ones_own import FLAGS, installed

BASKET = '''"""Pick berries until the basket is full."""

name = "Fill Basket"
gain = {"basket": 1}
max_steps = 30


def task_is_done(inventory):
    return inventory.berry >= 8


def task_reward(cell):
    return 0.1 * (cell == Cell.OVEN.value)
'''
GOOD = BASKET.replace("(cell):", "(inventory_diff, cell_diff):").replace(
    "0.1 * (cell == Cell.OVEN.value)", "inventory_diff.berry + 0.1 * cell_diff"
)


@pytest.mark.slow  # six trainings and an evaluation
def test_a_misleading_text_is_replaced_by_one_that_also_needs_another_skill(tmp_path):
    env = {**os.environ, "PYTHONPATH": installed(tmp_path)}
    graph, mine, proposals = (tmp_path / name for name in ("graph", "mine", "proposals"))
    mine.mkdir()
    proposals.mkdir()
    (mine / "basket.py").write_text(BASKET)
    (proposals / "picks.py").write_text(GOOD.replace("gain", 'requirements = {"berry": 2}\ngain'))
    (proposals / "stays.py").write_text(BASKET.replace("0.1", "0.2"))

    def flowrl(*words: str | Path, code: int = 0) -> str:
        argv = [sys.executable, "-m", "flowrl", *map(str, words)]
        ended = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        assert ended.returncode == code, ended.stderr
        return ended.stdout

    own = ("--max_nodes", "--min_success", "--max_task", "--total_timesteps")
    flags = [flag for flag in FLAGS if not flag.startswith(own)]
    flags += ["--max_task_steps=30", "--min_success_rate=0"]
    flowrl("train", graph, *flags, "--target_skill=Pick Berry", "--total_timesteps=2e4")
    told = ["train", graph, *flags, f"--skills_dir={mine}", "--target_skill=Fill Basket"]
    flowrl(*told, "--total_timesteps=8e3")
    words = ["improve", graph, "Fill Basket", "--proposals", proposals]
    report = json.loads(flowrl(*words, "--candidate_timesteps=20k", "--json"))
    assert report["chosen"] == "picks.py"
    rows = {row["candidate"]: row for row in report["candidates"]}
    assert rows["picks.py"]["success_rate"] > 0.8
    assert rows["present text"]["success_rate"] < 0.1
    assert rows["stays.py"]["success_rate"] < 0.1
    berries, steps = rows["picks.py"]["terms"]
    assert berries["source"] == "inventory_diff.berry"
    assert berries["mean"] == pytest.approx(berries["share"])  # one berry at a time
    assert steps["source"] == "0.1 * cell_diff"
    flowrl(*told, "--total_timesteps=4e4")
    run = read_run(GraphPaths(graph).archive(1, "Fill Basket"))
    assert run.anew
    assert [(step.skill, step.count) for step in run.plan] == [
        ("Pick Berry", 2),
        ("Fill Basket", 1),
    ]
    [state] = [
        row for row in json.loads(flowrl("status", graph, "--json"))["skills"] if row["expert"] == 1
    ]
    assert state["success_rate"] > 0.8
