"""A real daemon, steered from another terminal while it runs and while it is down."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from flowrl import cli, storage
from flowrl.errors import EXIT_RESUMABLE
from flowrl.parallel.events import Verb
from flowrl.parallel.requests import send_request
from flowrl.parallel.skill_sources import SkillSources
from flowrl.runs import read_run
from flowrl.skills.amount import Amount
from tests.launchers.conftest import until
from tests.parallel.making import LIBRARY, PICKAXE, TABLE, WOOD, approve, make_skill
from tests.parallel.stand_in_story import Place, ended
from tests.skills.making import skill_text

LOCAL = ("--launcher=local", "--retry_backoff=0.05", f"--target_skill={WOOD}")
WAIT = ("--wait", "240", "--json")


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path)
    place.order({WOOD: {"gate": "gate"}})
    yield place
    place.end()


def say(place, capsys, *words):
    """A command's exit code and what it said."""
    code = cli.main([*words, "--graph-path", str(place.graph_paths.root)])
    return code, capsys.readouterr().out


def test_a_daemon_is_paused_resumed_and_stopped_from_another_terminal(place, capsys):
    daemon = place.start(*LOCAL)
    until(lambda: place.statuses().get(WOOD) == "running" and place.launches(), seconds=60)
    code, said = say(place, capsys, "pause", WOOD, *WAIT)
    facts = json.loads(said)
    assert (code, facts["outcome"]) == (0, "done")
    assert facts["daemon"]["pid"] == daemon.pid
    assert ended(daemon)[0] == 1, "nothing is left that moves"
    assert place.lines()[WOOD]["why"] == "paused on request"

    code, said = say(place, capsys, "resume", WOOD)
    assert code == 0
    assert "done when you start python -m flowrl.bottomup" in said
    assert "--launcher" in said, "the whole command of the last start"
    code, said = say(place, capsys, "priority", WOOD, "5", "--wait", "0.2")
    assert (code, "done when you start" in said) == (75, True)

    daemon = place.start(*LOCAL)
    until(lambda: len(place.launches()) == 2, seconds=60)
    assert place.lines()[WOOD]["priority"] == 5
    code, said = say(place, capsys, "stop", "--now", *WAIT)
    assert (code, json.loads(said)["outcome"]) == (0, "done")
    code, said = ended(daemon)
    assert code == EXIT_RESUMABLE
    last = "".join(said.split())  # without breaks of lines
    assert "noscheduler:nothingisstartedormergeduntilpython-mflowrl.bottomup" in last

    place.open("gate")
    code, said = place.run(*LOCAL)
    assert code == 0, said
    assert len(place.merged()) == 1
    assert place.merged()[0].startswith("e0.a1."), "it was one attempt all along"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_program_that_is_interrupted_before_its_story_leaves_no_traceback(number):
    slow = (
        "import sys, time; from flowrl import console; from flowrl.config import BottomUpConfig\n"
        "def parse(*args, **facts):\n"
        "    print('parsing', flush=True)\n"
        "    time.sleep(60)\n"
        "console.parse = parse\n"
        "sys.exit(console.run_program('x', BottomUpConfig, lambda config: 0, []))"
    )
    program = subprocess.Popen(
        [sys.executable, "-c", slow], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "parsing\n"
    began = time.monotonic()
    program.send_signal(number)
    _, said = program.communicate(timeout=30)
    assert (program.returncode, said) == (130, "")
    assert time.monotonic() - began < 20


@pytest.fixture
def mine(place):
    """A folder with a skill that no library has, and whose code the graph knows as tried."""
    folder = place.folder / "mine"
    folder.mkdir()
    text = skill_text().replace(WOOD, "Stack Wood").replace('{"wood": "n"}', '{"stack": "n"}')
    (folder / "stack.py").write_text(text)
    approve(place.graph_paths, text)
    return folder


def test_a_skill_is_added_to_a_graph_that_trains_and_to_one_that_does_not(place, mine, capsys):
    storage.remove_tree(place.graph_paths.approvals)  # a dry run says so here
    daemon = place.start(*LOCAL)
    until(lambda: place.statuses().get(WOOD) == "running" and place.launches(), seconds=60)
    code, said = say(place, capsys, "add", str(mine), *WAIT)
    assert (code, json.loads(said)["outcome"]) == (0, "done")
    assert len([*place.graph_paths.approvals.iterdir()]) == 1
    until(lambda: "Stack Wood" in place.launches(), seconds=60)
    code, said = say(place, capsys, "add", str(mine), *WAIT)
    assert (code, json.loads(said)["outcome"]) == (0, "done"), "the same file may be sent again"

    other = (mine / "stack.py").read_text().replace("Stack Wood", "Pile Wood")
    (mine / "stack.py").write_text(other.replace('"stack"', '"pile"'))
    place.open("gate")
    assert ended(daemon)[0] == 0
    assert set(place.statuses()) == {WOOD, "Stack Wood"}
    code, said = say(place, capsys, "add", str(mine / "stack.py"))
    assert (code, "Pile Wood: done when you start python -m flowrl" in said) == (0, True)
    code, said = place.run(*LOCAL)
    assert code == 0, said
    assert place.statuses() == dict.fromkeys((WOOD, "Stack Wood", "Pile Wood"), "completed")
    assert len(place.merged()) == 3


def test_an_added_skill_is_asked_for_at_every_start_until_it_is_cancelled(place, mine, capsys):
    place.order({WOOD: {"gate": "gate"}, "Stack Wood": {"gate": "gate"}})
    daemon = place.start(*LOCAL)
    until(lambda: place.statuses().get(WOOD) == "running" and place.launches(), seconds=60)
    assert say(place, capsys, "add", str(mine), *WAIT)[0] == 0
    until(lambda: "Stack Wood" in place.launches(), seconds=60)
    assert say(place, capsys, "stop", "--now", *WAIT)[0] == 0
    assert ended(daemon)[0] == EXIT_RESUMABLE
    daemon = place.start(*LOCAL)
    until(lambda: set(place.statuses().values()) == {"running"}, seconds=60)
    assert say(place, capsys, "cancel", "Stack Wood", *WAIT)[0] == 0
    until(lambda: place.statuses()["Stack Wood"] == "failed")  # or its trainer may be quicker
    place.open("gate")
    assert ended(daemon)[0] == 1
    code, said = place.run(*LOCAL)
    assert code == 0, said
    assert place.statuses() == {WOOD: "completed", "Stack Wood": "failed"}


def test_skills_that_need_one_another_are_added_together(place, mine, capsys):
    daemon = place.start(*LOCAL)
    until(lambda: place.statuses().get(WOOD) == "running" and place.launches(), seconds=60)
    first = (
        (mine / "stack.py").read_text().replace("requirements = {}", 'requirements = {"log": 1}')
    )
    (mine / "stack.py").write_text(first)
    text = first.replace("Stack Wood", "Hew Logs").replace('"log": 1', "").replace("stack", "log")
    (mine / "hew.py").write_text(text.replace("inventory.log", "inventory.wood"))
    code, said = say(place, capsys, "add", str(mine / "stack.py"), str(mine / "hew.py"), *WAIT[:2])
    assert (code, said.count(": done")) == (0, 2), said
    place.open("gate")
    assert ended(daemon)[0] == 0
    assert place.statuses() == dict.fromkeys((WOOD, "Hew Logs", "Stack Wood"), "completed")
    assert place.launches() == [WOOD, "Hew Logs", "Stack Wood"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("return inventory.wood >= n", "return open('/etc/passwd')"), "a call of 'open'"),
        (("Stack Wood", "Place Table"), "the graph has 'Place Table' already"),
        (('{"stack": "n"}', '{"wood": "n"}'), "would need Stack Wood instead of Collect Wood"),
    ],
    ids=["hostile", "taken", "rewires"],
)
def test_a_skill_that_does_not_fit_changes_nothing(place, mine, flowrl, change, complaint):
    place.open("gate")
    assert place.run(*LOCAL)[0] == 0
    (mine / "stack.py").write_text((mine / "stack.py").read_text().replace(*change))
    before = storage.tree_digest(place.graph_paths.root)
    assert complaint in flowrl("add", place.graph_paths.root, mine, code=1).err
    assert storage.tree_digest(place.graph_paths.root) == before


def test_a_request_for_a_skill_that_nobody_checked_is_refused(place):
    daemon = place.start(*LOCAL)
    until(place.launches, seconds=60)
    SkillSources(place.graph_paths).record(make_skill("Tried By Nobody"))
    for name in ("Steal Wood", "Tried By Nobody"):
        send_request(place.graph_paths, Verb.ADD, name)

    def outcomes():
        document = json.loads(place.graph_paths.scheduler_state.read_text())
        return [response["outcome"] for response in document["requests"]]

    until(lambda: len(outcomes()) == 2, seconds=60)
    place.open("gate")
    assert ended(daemon)[0] == 0
    assert "no skill 'Steal Wood' is kept with the graph" in outcomes()[0]
    assert "the code of 'Tried By Nobody' has no approval" in outcomes()[1]
    assert set(place.statuses()) == {WOOD}


def test_a_corrected_contract_changes_later_plans_and_not_a_running_one(place):
    place.order({TABLE: {"gate": "gate"}})
    daemon = place.start(*LOCAL[:2], f"--target_skill={PICKAXE}")
    until(lambda: place.statuses().get(TABLE) == "running", seconds=60)
    (running,) = place.graph_paths.training_runs.glob("skill_*_Place_Table")
    before = (running / "run.json").read_bytes()
    wood = replace(LIBRARY[WOOD], gain={"wood": Amount.parse("2*n")})
    SkillSources(place.graph_paths).correct(wood, ["gain of wood: 40 of 40 had 2"])
    for _ in range(2):  # twice is once
        send_request(place.graph_paths, Verb.ADD, WOOD)

    def outcomes():
        document = json.loads(place.graph_paths.scheduler_state.read_text())
        return [response["outcome"] for response in document["requests"]]

    until(lambda: outcomes() == ["done"] * 2, seconds=60)
    assert (running / "run.json").read_bytes() == before
    place.open("gate")
    assert ended(daemon)[0] == 0
    assert place.launches() == [WOOD, TABLE, PICKAXE], "no expert is trained anew"
    plans = [
        read_run(place.graph_paths.archive(n, name)).plan for n, name in ((1, TABLE), (2, PICKAXE))
    ]
    assert [plan[0].count for plan in plans] == [2, 2], "two wood, then three of them"
    (former,) = (place.graph_paths.skill_files / "former").iterdir()
    told = json.loads(former.read_text())
    assert (former.name, told["gain"]) == ("Collect_Wood.1.json", {"wood": "n"})
    assert told["evidence"] == ["gain of wood: 40 of 40 had 2"]
