"""`flowrl retry` and `flowrl check`."""

from __future__ import annotations

import dataclasses
import json
import time
from datetime import UTC, datetime, timedelta

import pytest

from flowrl import cli
from flowrl.commands import control
from flowrl.parallel.events import Response, StopMode, Verb
from flowrl.parallel.requests import Inbox
from flowrl.parallel.state import StateFile
from flowrl.parallel.status import StopReason, Waiting
from flowrl.runs import TrainingRun, write_run
from tests.commands.making import DONE, FAILED, HELD, NOW, WAITING, running, save
from tests.skills.making import skill_text


@pytest.mark.parametrize("status", [FAILED, HELD], ids=lambda status: status.kind)
@pytest.mark.parametrize("word", ["A B", "a_b", "0"])
def test_a_retry_is_left_for_the_scheduler(tmp_path, capsys, status, word):
    graph_paths = save(tmp_path, ("A B", status))
    assert cli.main(["retry", word, "--graph-path", str(tmp_path)]) == 0
    assert [(r.verb, r.skill) for r in Inbox(graph_paths).take()] == [(Verb.RETRY, "A B")]
    said = capsys.readouterr().out
    assert "retry A B: done when you start" in said
    assert "done when you start the same command as before" in said


@pytest.mark.parametrize("status", [DONE, running()], ids=lambda status: status.kind)
def test_only_what_failed_or_is_held_can_be_retried(tmp_path, capsys, status):
    graph_paths = save(tmp_path, ("A", status))
    assert cli.main(["retry", "A", "--graph-path", str(tmp_path)]) == 1
    assert (
        f"it is {status.kind}; retry is for skills that are failed, held" in capsys.readouterr().err
    )
    assert not graph_paths.requests.exists()


def test_a_run_with_replicas_cannot_be_pruned(tmp_path, flowrl):
    graph_paths = save(tmp_path, ("A", running()))
    prepared = graph_paths.run(0, "A")
    prepared.folder.mkdir(parents=True)
    facts = {"run_id": "r", "skill": "A", "expert": 0, "attempt": 1, "plan": (), "ancestors": ()}
    write_run(prepared, TrainingRun(**facts, experts=(0,), config={"replicas": 2}))
    said = flowrl("prune", tmp_path, "A", code=2).err
    assert "a run with --replicas cannot end with what it has" in said
    assert not graph_paths.requests.exists()
    write_run(prepared, TrainingRun(**facts, experts=(0,), config={"replicas": 1}))
    assert cli.main(["prune", str(tmp_path), "A"]) == 0


def test_two_retries_at_once_are_two_requests(tmp_path):
    graph_paths = save(tmp_path, ("A", FAILED))
    for _ in range(2):
        assert cli.main(["retry", "A", "--graph-path", str(tmp_path)]) == 0
    assert len(Inbox(graph_paths).take()) == 2


@pytest.mark.parametrize(("goal", "warned"), [(0.8, True), (0.9, False), (0.0, False)])
def test_training_on_says_that_the_goal_is_reached(tmp_path, capsys, goal, warned):
    save(tmp_path, ("A", dataclasses.replace(DONE, goal=goal)))
    assert cli.main(["train-more", str(tmp_path), "A"]) == 0
    said = (
        "A has 87.5% success of its goal 80.0% already, so this would end after one update; raise "
    )
    assert (said + "--success_state_rate" in capsys.readouterr().err) == warned


def test_settings_that_make_no_sense_together_are_refused_by_a_check(tmp_path, flowrl):
    file = tmp_path / "wood.py"
    file.write_text(skill_text(head='training = {"num_minibatches": 7}\n'))
    assert f"{file}:1: training: --num_envs 64" in flowrl("check", file, "--no_trace", code=1).out


@pytest.mark.parametrize(
    ("words", "verb", "number"),
    [
        (["pause", "A"], Verb.PAUSE, 0),
        (["cancel", "0"], Verb.CANCEL, 0),
        (["priority", "a", "-7"], Verb.PRIORITY, -7),
        (["pause", "--all"], Verb.PAUSE, 0),
        (["resume", "--all"], Verb.RESUME, 0),
    ],
)
def test_every_command_leaves_its_request_and_says_that_nobody_is_up(
    tmp_path, flowrl, words, verb, number
):
    graph_paths = save(tmp_path, ("A", running()))
    said = json.loads(flowrl(*words, "--graph-path", tmp_path, "--json").out)
    (request,) = Inbox(graph_paths).take()
    skill = None if "--all" in words else "A"
    assert (request.verb, request.skill, request.number) == (verb, skill, number)
    assert (said["id"], said["skill"], said["daemon"]) == (request.id, skill, None)
    assert said["outcome"] is None


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["pause", "A"], 1, "it is completed"),
        (["resume", "A"], 1, "it is completed"),
        (["cancel", "A"], 1, "it is completed"),
        (["priority", "A", "3"], 1, "it is completed"),
        (["pause", "Nobody"], 1, "has no skill 'Nobody'"),
        (["pause"], 2, "name one skill, or say --all"),
        (["resume", "A", "--all"], 2, "name one skill, or say --all"),
        (["priority", "B", "9999999"], 2, "must lie in [-1000000, 1000000]"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_it_is_asked(tmp_path, flowrl, words, code, why):
    graph_paths = save(tmp_path, ("A", DONE), ("B", WAITING))
    assert why in flowrl(*words, "--graph-path", tmp_path, code=code).err
    assert not graph_paths.requests.exists()


def test_the_answer_is_waited_for_and_a_refusal_is_an_error(tmp_path, flowrl, monkeypatch):
    graph_paths = save(tmp_path, ("A", WAITING))
    response = Response(id="1-0badcafe", verb="pause", skill="A", at=NOW, outcome="refused: no")
    monkeypatch.setattr(control, "send_request", lambda *_, **__: response.id)
    flowrl("pause", "A", "--graph-path", tmp_path, "--wait", "0.1", code=75)
    file = StateFile(graph_paths.scheduler_state)
    state = file.load()
    assert state is not None
    file.save(dataclasses.replace(state, responses=(response,)))
    said = flowrl("pause", "A", "--graph-path", tmp_path, "--wait", "9", code=1).out
    assert "pause A: refused: no" in said


def test_a_skill_that_is_to_train_more_is_asked_and_not_done(tmp_path, flowrl, monkeypatch):
    graph_paths = save(tmp_path, ("A", DONE))
    response = Response(id="1-0badcafe", verb="train-more", skill="A", at=NOW, outcome="done")
    monkeypatch.setattr(control, "send_request", lambda *_, **__: response.id)
    file = StateFile(graph_paths.scheduler_state)
    file.save(dataclasses.replace(file.load(), responses=(response,)))
    words = ["train-more", str(tmp_path), "A", "--wait", "9"]
    assert flowrl(*words).out == "train-more A: asked\n"
    assert json.loads(flowrl(*words, "--json").out)["outcome"] == "asked"


@pytest.mark.parametrize("verb", ["pause", "cancel"])
def test_a_request_is_not_done_while_the_run_that_it_ends_still_saves(tmp_path, capsys, verb):
    asked = dataclasses.replace(running(), stop_reason=StopReason(verb))
    graph_paths = save(tmp_path, ("A", asked))
    response = Response(id="1-0badcafe", verb=verb, skill="A", at=NOW, outcome="done")
    file = StateFile(graph_paths.scheduler_state)
    file.save(dataclasses.replace(file.load(), responses=(response,)))
    code, said = control.await_response(graph_paths, response.id, 0.1)
    assert (code, said) == (None, "asked; still saving: A")
    file.save(dataclasses.replace(file.load(), entries={}))
    assert control.await_response(graph_paths, response.id, 0.1) == (response, "")


def test_status_says_how_it_is_stopped_and_what_each_skill_waits_for(tmp_path, flowrl):
    soon = datetime.now(UTC) + timedelta(hours=1)
    asked = dataclasses.replace(running("e2.a1.x"), stop_reason=StopReason.PAUSE)
    failed = dataclasses.replace(FAILED, log=("Traceback", "ValueError: x"))
    graph_paths = save(
        tmp_path, ("A", WAITING), ("B", Waiting(not_before=soon)), ("C", asked), ("D", failed)
    )
    file = StateFile(graph_paths.scheduler_state)
    state = file.load()
    assert state is not None
    file.save(dataclasses.replace(state, stop_mode=StopMode.STOP))
    said = flowrl("status", tmp_path, code=69).out
    for words in ("stopping on request", "a free slot", f"its next try at {soon:%H:%M:%S} UTC",
                  "asked to pause", "the last lines of its log", "ValueError: x"):  # fmt: skip
        assert words in said
    facts = json.loads(flowrl("status", tmp_path, "--json", code=69).out)
    assert facts["stopping"].startswith("stopping on request")
    assert facts["skills"][3]["log"] == ["Traceback", "ValueError: x"]


@pytest.mark.parametrize("words", [["stop"], ["stop", "--now", "--wait", "60"]])
def test_a_stop_without_a_scheduler_leaves_nothing_for_the_next_one(tmp_path, flowrl, words):
    graph_paths = save(tmp_path, ("A", WAITING))
    assert f"no scheduler is running for {tmp_path}" in flowrl(*words, tmp_path, code=1).err
    assert not graph_paths.requests.exists()


def test_nobody_waits_for_a_scheduler_that_is_not_there(tmp_path, flowrl):
    save(tmp_path, ("A", HELD))
    began = time.monotonic()
    assert "done when you start" in flowrl("retry", tmp_path, "A", "--wait", "60", code=75).out
    assert time.monotonic() - began < 30
