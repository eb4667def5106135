"""Stages run one after another, each once, and a stop is gone on from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from flowrl import notices, orchestrator
from flowrl.experts.store import ExpertStore
from flowrl.paths import GraphPaths
from flowrl.reports.status import status_document
from tests.commands.making import DONE, save
from tests.waiting import until

# Stands for flowrl: it notes its words and ends as the file named after the stage says.
STAND_IN = """
import json, os, pathlib, sys, time
folder = pathlib.Path(os.environ["STAND_IN"])
with (folder / "calls").open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
while (folder / "wait").exists():
    time.sleep(0.02)
path = folder / sys.argv[1]
sys.exit(int(path.read_text()) if path.exists() else 0)
"""
WORDS = ("--stages", "train,evaluate", "--train=--max_nodes 3", "--evaluate='Place Table'")


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    (tmp_path / "flowrl.py").write_text(STAND_IN)
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    monkeypatch.setattr(orchestrator, "FLOWRL", (sys.executable, str(tmp_path / "flowrl.py")))
    return tmp_path


def calls(folder):
    path = folder / "calls"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(folder, *words):
    return orchestrator.main([str(folder / "g"), *(words or WORDS)])


def stage_in_status(folder):
    return status_document(save(folder / "g", ("A", DONE)))["notices"].get("stages")


def test_stages_run_in_order_with_their_words(stand_in):
    graph = f"--graph_path={stand_in / 'g'}"
    assert run(stand_in) == 0
    assert calls(stand_in) == [
        ["train", graph, "--max_nodes", "3"],
        ["evaluate", graph, "Place Table"],
    ]
    assert notices.read(GraphPaths(stand_in / "g")) == {}


def test_the_graph_is_that_of_the_environment_if_none_is_named(stand_in, monkeypatch, capsys):
    monkeypatch.setenv("FLOWRL_GRAPH", str(stand_in / "mine"))
    assert orchestrator.main(list(WORDS)) == 0
    assert {words[1] for words in calls(stand_in)} == {f"--graph_path={stand_in / 'mine'}"}
    monkeypatch.setenv("FLOWRL_GRPAH", "x")
    assert orchestrator.main(list(WORDS)) == 2
    assert "FLOWRL_GRPAH is no flag" in capsys.readouterr().err


def test_a_graph_of_one_word_is_not_taken_for_the_skill(stand_in, monkeypatch, capsys):
    monkeypatch.chdir(stand_in)
    assert orchestrator.main(["demo", "--stages", "train,evaluate"]) == 2
    assert "--evaluate: SKILL is missing" in capsys.readouterr().err
    assert calls(stand_in) == []


@pytest.mark.parametrize(("number", "code"), [("9", 137), ("2", 130), ("15", 130)])
def test_a_stage_that_a_signal_ends_says_by_which(stand_in, number, code):
    """As a shell does; what Ctrl-C or SIGTERM ends is no failure of a stage."""
    (stand_in / "flowrl.py").write_text(
        f"import os, signal; signal.signal({number}, 0) if {number} != 9 else 0\n"
        f"os.kill(os.getpid(), {number})\n"
    )
    assert run(stand_in) == code


def test_the_stage_that_does_not_end_well_ends_the_row_and_is_named(stand_in, caplog):
    (stand_in / "evaluate").write_text("1")
    (stand_in / "train").write_text("2")
    assert run(stand_in, "--stages", "train,evaluate", *WORDS[2:]) == 2
    assert not (stand_in / "g").exists(), "nothing was begun"
    (stand_in / "calls").unlink()
    (stand_in / "train").unlink()
    save(stand_in / "g", ("A", DONE))
    assert run(stand_in, "--stages", "evaluate,train", *WORDS[2:]) == 1
    shown = notices.read(GraphPaths(stand_in / "g"))["stages"]
    assert shown == "stage 1 of 2: evaluate (evaluate, train)"
    assert f"{shown} has ended with 1" in caplog.text
    assert stage_in_status(stand_in) is None
    assert [words[0] for words in calls(stand_in)] == ["evaluate"]
    (stand_in / "evaluate").unlink()
    assert run(stand_in, "--stages", "evaluate,train", *WORDS[2:]) == 0
    assert [words[0] for words in calls(stand_in)] == ["evaluate", "evaluate", "train"]
    assert notices.read(GraphPaths(stand_in / "g")) == {}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--stages", "trian"], "closest is 'train'"),
        (["--stages", ""], "has no value"),
        (["--stages", "train,train"], "has train twice"),
        (["--stages", "sweep"], "--sweep: name the --skill"),
        (["--stages", "train", "--train=--max_node 3"], "--max_node"),
        (["--stages", "train", "--train=--lr -1"], "--lr"),
        (["--stages", "evaluate", "--evaluate='Place Table"], "No closing quotation"),
        (["--stages", "evaluate"], "--evaluate: SKILL is missing"),
        (["--stages", "judge,sweep", "--sweep=--methid tpe"], "methid"),
    ],
)
def test_wrong_arguments_of_any_stage_are_refused_before_the_first(stand_in, capsys, words, named):
    assert run(stand_in, *words) == 2
    assert named in capsys.readouterr().err
    assert calls(stand_in) == []
    assert not (stand_in / "g").exists()


def started(folder):
    """The orchestrator in a process of its own, once its first stage waits."""
    (folder / "wait").touch()
    code = (
        "import sys; from flowrl import orchestrator\n"
        f"orchestrator.FLOWRL = (sys.executable, {str(folder / 'flowrl.py')!r})\n"
        f"sys.exit(orchestrator.main({[str(folder / 'g'), *WORDS]!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    until(lambda: len(calls(folder)) == 1)
    return process


def test_sigterm_ends_the_stage_and_a_start_goes_on(stand_in):
    process = started(stand_in)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 130
    (stand_in / "wait").unlink()
    assert run(stand_in) == 0
    assert [words[0] for words in calls(stand_in)] == ["train", "train", "evaluate"]


def test_a_second_orchestrator_of_the_graph_is_refused(stand_in, capsys):
    process = started(stand_in)
    assert run(stand_in) == 75
    assert "stages.lock" in capsys.readouterr().err
    (stand_in / "wait").unlink()
    assert process.wait(timeout=30) == 0


def test_a_killed_orchestrator_is_gone_on_from(stand_in):
    process = started(stand_in)
    assert stage_in_status(stand_in) == "stage 1 of 2: train (train, evaluate)"
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    assert stage_in_status(stand_in) is None
    (stand_in / "wait").unlink()
    assert run(stand_in) == 0
    assert [words[0] for words in calls(stand_in)] == ["train", "train", "evaluate"]


@pytest.mark.slow
@pytest.mark.craftax
@pytest.mark.timeout(900)
def test_real_stages_train_judge_and_evaluate(tmp_path, capfd):
    graph = tmp_path / "g"
    train = "--target_skill 'Collect Sapling' --total_timesteps 8192 --launcher local "
    words = [
        *("--stages", "train,judge,evaluate"),
        f"--train={train} --min_success_rate 0",
        "--judge=--judge rule --episodes 32",
        "--evaluate='Collect Sapling' --episodes 8 --json",
    ]
    assert orchestrator.main([str(graph), *words]) == 0
    assert (graph / "judging" / "rule.json").exists()
    assert '"episodes": 8' in capfd.readouterr().out
    merged = ExpertStore(GraphPaths(graph)).manifest()
    assert orchestrator.main([str(graph), *words]) == 0  # nothing is trained again
    assert ExpertStore(GraphPaths(graph)).manifest() == merged
