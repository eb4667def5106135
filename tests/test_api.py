"""The Python functions do what their commands do, in a script and in a notebook's thread."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flowrl
from flowrl import api, config
from flowrl.errors import ConfigError, FileRefusedError
from tests.games.installing import installed
from tests.launchers.test_confined import on_a_terminal

SCRIPT = """
import json, sys, threading
import flowrl
assert "jax" not in sys.modules
found = {}

def in_a_cell():
    rows = flowrl.train(
        "sub/../graph", target_skill="Pick Berry", show=False, env_name="Tiny-v1", launcher="local",
        total_timesteps=40_000, num_envs=32, num_steps=32, max_task_steps=40, layer_size=16,
        lr=3e-3, success_state_rate=0.9,
    )
    found["rows"] = [(row.skill, row.status) for row in rows]

cell = threading.Thread(target=in_a_cell)
cell.start()
cell.join()
in_a_cell()  # the same call goes on
found["same"] = flowrl.status("graph") == flowrl.status("sub/../graph")
report = flowrl.evaluate("graph", "Pick Berry", episodes=32, seed=3)
found["success"] = report.success_rate
assert "jax" not in sys.modules
print(json.dumps(found))
"""


def test_a_graph_is_trained_looked_at_and_measured_from_python(tmp_path):
    (tmp_path / "sub").mkdir()
    env = {**os.environ, "PYTHONPATH": installed(tmp_path)}

    def run(*words):
        ended = subprocess.run(
            (sys.executable, *words), cwd=tmp_path, env=env, capture_output=True, check=False
        )
        assert ended.returncode == 0, ended.stderr.decode()
        return ended.stdout

    found = json.loads(run("-c", SCRIPT))
    assert found["rows"] == [["Pick Berry", "completed"]]
    assert found["same"]
    words = ("evaluate", "graph", "Pick Berry", "--episodes=32", "--seed=3", "--json")
    command = [sys.executable, "-m", "flowrl", *words]
    printed, shown = on_a_terminal(command, cwd=tmp_path, env=env)
    said = json.loads(printed)
    assert b"32/32" in shown
    assert said["steps"][-1]["success_rate"] == found["success"] > 0.5


def test_what_cannot_be_is_an_error_of_flowrl_and_changes_nothing(tmp_path):
    with pytest.raises(ConfigError, match="has no flag 'learning_rat'"):
        flowrl.train(tmp_path / "graph", learning_rat=1)
    with pytest.raises(ConfigError, match="no flag 'learning_rate'; it is called lr; see"):
        flowrl.train(tmp_path / "graph", learning_rate=1)
    with pytest.raises(ConfigError, match="lr takes one value, not 2"):
        flowrl.train(tmp_path / "g", lr=[1e-3, 2e-3])
    with pytest.raises(ConfigError, match="no flag 'graph_path'"):
        flowrl.train(tmp_path / "graph", graph_path="other")
    for no_path in (None, 3, b"graph", "~nobody-here/x"):
        for call in (flowrl.status, flowrl.train, lambda path: flowrl.evaluate(path, "X")):
            with pytest.raises(
                ConfigError, match=r"which is no path \(.*\); name a folder or a file"
            ):
                call(no_path)
    with pytest.raises(ConfigError, match="--lr"):
        flowrl.train(tmp_path / "graph", lr=-1.0)
    with pytest.raises(FileRefusedError, match="is no graph"):
        flowrl.status(tmp_path)
    with pytest.raises(FileRefusedError):
        flowrl.evaluate(tmp_path, "Collect Wood")
    with pytest.raises(FileRefusedError):
        flowrl.evaluate(tmp_path, 7)
    with pytest.raises(AttributeError, match="it has evaluate, load_agent, status, train"):
        flowrl.trian  # noqa: B018
    assert list(tmp_path.iterdir()) == []


def test_flags_are_those_of_the_command_with_environment_and_file(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(api, "train_graph", lambda found, screen: seen.append(found))
    monkeypatch.setattr(api, "status", lambda graph: [])
    monkeypatch.setenv("FLOWRL_LR", "0.5")
    file = tmp_path / "mine.toml"
    file.write_text("seed = 7\n")
    given = {"skills_dir": "own", "gpu_ids": [0, 1], "total_timesteps": "5M", "use_wandb": False}
    flowrl.train(tmp_path / "graph", config=file, **given)
    flags = config.flags(seen[0])
    assert (flags["lr"], flags["seed"], flags["total_timesteps"]) == (0.5, 7, 5_000_000)
    assert (flags["skills_dir"], flags["gpu_ids"]) == (Path("own"), (0, 1))
    assert seen[0].origins["lr"] == "environment"
    assert seen[0].command.startswith("flowrl train GRAPH --")
    with pytest.raises(ConfigError, match="nowhere"):
        flowrl.train(tmp_path / "graph", config="nowhere.toml")


@pytest.mark.parametrize("call", ["train", "status", "evaluate", "load_agent"])
def test_a_call_with_arguments_that_do_not_fit_says_which_fit(call):
    function = getattr(flowrl, call)
    known = inspect.signature(function).parameters.values()
    words = (f"{each.name}=…" if each.kind == each.KEYWORD_ONLY else each.name for each in known)
    takes = re.escape(", ".join(words))
    for given in ((), ("a", "b", "c", "d")):
        with pytest.raises(TypeError, match=rf"^flowrl\.{call}: .*; it takes {takes}$"):
            function(*given)


@pytest.mark.parametrize(
    ("call", "words", "said"),
    [
        ("train", {"lr": []}, "flowrl.train: lr is empty; give a value, or None to leave it out"),
        ("train", {"gpu_ids": [[0, 1]]}, "gpu_ids is [[0, 1]]; give a value or a plain list of"),
        ("train", {"gpu_ids": ()}, "flowrl.train: gpu_ids is empty; give a value, or None"),
        ("train", {"graph": ""}, "flowrl.train: graph is '', which is no path; name a folder"),
        ("train", {"show": "no"}, "flowrl.train: show is 'no', not true or false"),
        ("train", {"target_skill": 3}, "flowrl.train: target_skill is 3, not text"),
        ("train", {"use_wandb": "no"}, "flowrl.train: use_wandb is 'no', not true or false"),
        ("train", {"strict": 1}, "flowrl.train: strict is 1, not true or false"),
        ("train", {"skills_dir": 3}, "flowrl.train: skills_dir is 3, which is no path"),
        ("train", {"config": ""}, "flowrl.train: config is '', which is no path"),
        ("train", {"average_every": 9}, "--average_every does nothing without --replicas 2"),
        ("status", {"graph": ""}, "flowrl.status: graph is ''"),
        ("evaluate", {"skill": 1.5}, "flowrl.evaluate: skill is 1.5, not text"),
        ("evaluate", {"skill": "A", "episodes": True}, "flowrl.evaluate: episodes is True, not"),
        ("evaluate", {"skill": "A", "seed": -1}, "flowrl.evaluate: seed is -1: must lie in"),
        ("evaluate", {"skill": "A", "seed": "x"}, "flowrl.evaluate: seed is 'x', not a whole"),
        ("evaluate", {"skill": "A", "sandbox": "docker"}, "sandbox is 'docker', not one of auto"),
        ("load_agent", {"path": ""}, "flowrl.load_agent: path is ''"),
        ("load_agent", {"path": "x", "trust_skills": "no"}, "trust_skills is 'no', not true or"),
    ],
)
def test_each_argument_is_read_by_its_annotation(tmp_path, monkeypatch, call, words, said):
    monkeypatch.chdir(tmp_path)
    graph = {} if call == "load_agent" else {"graph": "graph"}
    with pytest.raises(ConfigError, match=re.escape(said)):
        getattr(flowrl, call)(**{**graph, **words})
    assert list(tmp_path.iterdir()) == []
