"""The whole chain with stand-in trainers: daemon, run folders, processes, merges, archive."""

from __future__ import annotations

import json
import os
import shlex
import signal

import pytest

from flowrl import cli
from flowrl.config import BottomUpConfig
from flowrl.envs.skill_module import load_module
from flowrl.errors import EXIT_BUSY
from flowrl.launchers.local import LocalLauncher
from flowrl.launchers.run_status import lock_held
from flowrl.launchers.tmux import TmuxLauncher
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.parallel.status import Entry
from flowrl.paths import RunPaths, session_name
from flowrl.runs import read_run
from flowrl.skills.graph import SkillGraph
from tests.launchers.conftest import nothing_survives, server_folder, until  # noqa: F401
from tests.parallel.making import GRAPH, LIBRARY, PICKAXE, SWORD, TABLE, WOOD, make_skill
from tests.parallel.stand_in_story import REAL_READERS, Place, StandInBackend, ended

STONE, SAPLING = "Collect Stone", "Collect Sapling"
TO_PICKAXE = f"--target_skill={PICKAXE}"  # collect wood, place a table, make the pickaxe
LOCAL = ("--launcher=local", "--retry_backoff=0.05")
TMUX = ("--launcher=tmux", "--tmux_socket=test", "--retry_backoff=0.05")
_TMUX = pytest.mark.tmux
BOTH = [pytest.param(LOCAL, id="local"), pytest.param(TMUX, id="tmux", marks=_TMUX)]


@pytest.fixture
def place(tmp_path, server_folder, monkeypatch):  # noqa: F811
    monkeypatch.setenv(REAL_READERS, "1")
    place = Place(tmp_path)
    yield place
    place.end()


@pytest.fixture(params=["local", pytest.param("tmux", marks=pytest.mark.tmux)])
def launcher(request, server_folder):  # noqa: F811
    return TmuxLauncher("test") if request.param == "tmux" else LocalLauncher()


def scheduler_of(place, launcher, skills, **settings):
    """A daemon in this process, with the backend that makes real run folders."""
    graph = SkillGraph(skills)
    daemon = SkillScheduler(
        place.graph_paths.root, launcher=launcher, retry_backoff=0.05, **settings
    )
    daemon.set_callbacks(backend=StandInBackend(place.graph_paths, BottomUpConfig(), graph))
    for name in graph.order():
        daemon.add_skill(name, {}, graph.needs(name))
    return daemon


def up_to(skill):
    """The skills of the library that are handed out until this one is, too."""
    order = GRAPH.order()
    return order[: order.index(skill) + 1]


def is_running(place, skill):
    """Its trainer has told its progress, and the daemon has written down who trains it."""
    line = place.lines().get(skill, {})
    if line.get("status") != "running" or line["handle"] is None:
        return False
    return place.graph_paths.run(line["expert"], skill).progress.exists()


def is_alive(place, skill):
    return lock_held(place.graph_paths.run(place.lines()[skill]["expert"], skill).folder)


def most_at_once(place):
    """How many runs were under way at the same time, by the story of the daemon."""
    now, most = set(), 0
    for line in place.graph_paths.events.read_text().splitlines():
        event = json.loads(line)
        (now.add if event["status"] == "running" else now.discard)(event["skill"])
        most = max(most, len(now))
    return most


def test_skills_train_one_after_another_when_each_needs_the_last(place, launcher):
    chain = [make_skill("A", gain="a"), make_skill("B", needs=("a",), gain="b")]
    chain.append(make_skill("C", needs=("b",), gain="c"))
    with scheduler_of(place, launcher, chain, max_parallel_skills=3) as daemon:
        assert daemon.run().complete
    assert place.launches() == ["A", "B", "C"]
    assert place.experts() == {0: ("A", 100), 1: ("B", 100), 2: ("C", 100)}
    assert list(place.graph_paths.training_runs.glob("skill_*")) == []


def test_experts_0_5_10_and_50_become_five_networks_with_the_new_one(place):
    items = {0: "i", 5: "ii", 10: "iii", 50: "iv"}
    providers = {number: make_skill(f"Skill {item}", gain=item) for number, item in items.items()}
    last = make_skill("Last", needs=tuple(items.values()), gain="last")
    place.order({"Last": {"acted": {"0": 1, "5": 2, "10": 3, "50": 4, "51": 10}}})
    with scheduler_of(place, LocalLauncher(), [], max_parallel_skills=4) as daemon:
        graph = SkillGraph([*providers.values(), last])
        daemon.set_callbacks(backend=StandInBackend(place.graph_paths, BottomUpConfig(), graph))
        for number, skill in providers.items():
            daemon.add_skills([Entry(skill=skill.name, expert=number)])
        daemon.add_skill("Last", {}, graph.needs("Last"))
        assert daemon.run().complete
    archive = RunPaths(place.graph_paths.skill_folder(51, "Last"), 51)
    assert read_run(archive).experts == (0, 5, 10, 50, 51)
    module = load_module(archive.module)
    assert module.experts == (0, 5, 10, 50, 51)
    frames = {number: frames for number, (_, frames) in place.experts().items()}
    assert frames == {0: 101, 5: 102, 10: 103, 50: 104, 51: 10}


@pytest.mark.parametrize("first", [PICKAXE, SWORD])
def test_of_two_runs_that_train_one_expert_the_longer_one_counts(place, first):
    """50M frames, then 80M more in one run and 100M more in another: 150M, in any order."""
    million = 1_000_000
    place.order(
        {
            WOOD: {"acted": {"0": 50 * million}},
            PICKAXE: {"acted": {"0": 80 * million, "2": 7}, "gate": PICKAXE},
            SWORD: {"acted": {"0": 100 * million, "3": 7}, "gate": SWORD},
        }
    )
    second = SWORD if first == PICKAXE else PICKAXE
    skills = [LIBRARY[name] for name in (WOOD, TABLE, PICKAXE, SWORD)]
    merged = []

    def on_skill_complete(skill):
        merged.append((skill, place.experts()[0][1]))
        place.open(second if skill == first else first if skill == TABLE else "")

    with scheduler_of(place, LocalLauncher(), skills, max_parallel_skills=2) as daemon:
        daemon.set_callbacks(on_skill_complete=on_skill_complete)
        assert daemon.run().complete
    assert most_at_once(place) == 2
    after_first = 130 if first == PICKAXE else 150
    assert merged[2:] == [(first, after_first * million), (second, 150 * million)]
    assert place.experts()[0] == (WOOD, 150 * million)


@pytest.mark.tmux
def test_a_graph_of_eight_real_skills_trains_two_at_a_time(place):
    place.order({WOOD: {"gate": "gate"}})
    daemon = place.start(*TMUX, "--max_nodes=8", "--max_parallel_skills=2")
    until(lambda: is_running(place, WOOD), seconds=60)
    sessions = TmuxLauncher("test").server.run("list-sessions", "-F", "#{session_name}").stdout
    assert "flowrl_e0_Collect_Wood" in sessions.splitlines()
    place.open("gate")
    assert ended(daemon)[0] == 0
    lines = place.lines()
    assert set(place.statuses().values()) == {"completed"}
    assert most_at_once(place) == 2
    assert sorted(place.launches()) == sorted(lines)
    assert place.experts() == {line["expert"]: (skill, 100) for skill, line in lines.items()}
    assert sorted(line["expert"] for line in lines.values()) == list(range(8))
    assert sorted(place.merged()) == sorted(line["run_id"] for line in lines.values())
    events = [json.loads(line) for line in place.graph_paths.events.read_text().splitlines()]
    told = [event["text"] for event in events if event["status"] == "running"]
    names = [f"session {session_name(line['expert'], skill)}" for skill, line in lines.items()]
    assert sorted(text.rpartition(", ")[2] for text in told) == sorted(names)
    for skill, line in lines.items():
        archive = RunPaths(place.graph_paths.skill_folder(line["expert"], skill), line["expert"])
        assert load_module(archive.module).tasks[-1].skill == skill
        assert f"training {skill}" in archive.training_log.read_text()


def test_a_skill_that_keeps_failing_blocks_only_those_that_need_it(place, flowrl):
    skills = up_to(STONE)
    blocked = [name for name in skills if PICKAXE in GRAPH.all_needs(name)]
    place.order({PICKAXE: {"fails": 99}})
    flags = (*LOCAL, f"--max_nodes={len(skills)}", "--max_retries=2")
    code, said = place.run(*flags)
    assert code == 1
    assert place.launches().count(PICKAXE) == 3, "two retries after the first attempt"
    expected = dict.fromkeys(skills, "completed") | {PICKAXE: "failed"}
    assert place.statuses() == expected | dict.fromkeys(blocked, "blocked")
    assert f"{PICKAXE} has failed, attempt 3: exit 1" in said
    assert flowrl("logs", PICKAXE, "--graph-path", place.graph_paths.root).out.endswith(
        "another error than before\n"
    )
    place.order()
    assert cli.main(["retry", PICKAXE, "--graph-path", str(place.graph_paths.root)]) == 0
    assert place.run(*flags)[0] == 0
    assert set(place.statuses().values()) == {"completed"}
    assert place.launches()[-1 - len(blocked) :] == [PICKAXE, *blocked]


def test_an_attempt_that_failed_is_tried_again_and_merged_once(place):
    place.order({WOOD: {"fails": 2}})
    assert place.run(*LOCAL, f"--target_skill={WOOD}", "--max_retries=2")[0] == 0
    assert place.launches() == [WOOD] * 3
    assert place.lines()[WOOD]["attempt"] == 3
    assert place.merged() == (place.lines()[WOOD]["run_id"],)


def test_a_request_to_retry_reaches_a_daemon_that_is_up(place):
    place.order({PICKAXE: {"fails": 99}, SAPLING: {"gate": "gate"}})
    flags = (f"--max_nodes={len(up_to(PICKAXE))}", "--max_retries=0")
    daemon = place.start(*LOCAL, *flags, "--scheduler_poll_interval=600")
    until(lambda: place.statuses().get(PICKAXE) == "failed", seconds=60)
    place.order()
    assert cli.main(["retry", PICKAXE, "--graph-path", str(place.graph_paths.root)]) == 0
    until(lambda: place.statuses()[PICKAXE] == "completed", seconds=60)
    place.open("gate")
    assert ended(daemon)[0] == 0
    assert list(place.graph_paths.requests.iterdir()) == []


@pytest.mark.parametrize("flags", BOTH)
def test_a_daemon_killed_in_mid_run_is_replaced_by_one_that_adopts(place, flags):
    place.order({TABLE: {"gate": "gate"}})
    daemon = place.start(*flags, TO_PICKAXE)
    until(lambda: is_running(place, TABLE), seconds=60)
    run_id = place.lines()[TABLE]["run_id"]
    daemon.kill()
    daemon.wait()
    assert is_alive(place, TABLE)
    place.open("gate")
    assert place.run(*flags, TO_PICKAXE)[0] == 0
    assert place.lines()[TABLE]["run_id"] == run_id
    assert place.launches() == [WOOD, TABLE, PICKAXE]
    assert place.merged().count(run_id) == 1


@pytest.mark.parametrize(
    ("flags", "state", "ends"),
    [
        pytest.param(LOCAL, "kept", "meanwhile", id="ended meanwhile"),
        pytest.param(LOCAL, "deleted", "meanwhile", id="ended meanwhile, state deleted"),
        pytest.param(TMUX, "deleted", "later", id="alive in tmux, state deleted", marks=_TMUX),
    ],
)
def test_ctrl_c_leaves_runs_alive_and_the_same_command_goes_on(place, flags, state, ends):
    place.order({TABLE: {"gate": "gate"}})
    flags = (*flags, TO_PICKAXE)
    daemon = place.start(*flags)
    until(lambda: is_running(place, TABLE), seconds=60)
    before = place.lines()
    daemon.send_signal(signal.SIGINT)
    code, said = ended(daemon)
    assert code == 130
    assert "python -m flowrl.bottomup_parallel" in said
    assert shlex.join(flags) in said
    assert is_alive(place, TABLE)
    if state == "deleted":
        place.graph_paths.scheduler_state.unlink()
    if ends == "meanwhile":
        place.open("gate")
        until(lambda: not lock_held(place.graph_paths.run(1, TABLE).folder), seconds=60)
    daemon = place.start(*flags)
    until(lambda: place.statuses().get(TABLE) in ("running", "merging", "completed"), seconds=60)
    place.open("gate")
    assert ended(daemon)[0] == 0
    assert place.launches() == [WOOD, TABLE, PICKAXE], "nothing is trained twice"
    after = place.lines()
    for skill in (WOOD, TABLE):
        assert after[skill]["run_id"] == before[skill]["run_id"]
        assert after[skill]["expert"] == before[skill]["expert"]
    assert sorted(place.merged()) == sorted(line["run_id"] for line in after.values())


def test_a_second_daemon_ends_at_once_and_names_the_first(place):
    place.order({WOOD: {"gate": "gate"}})
    daemon = place.start(*LOCAL, TO_PICKAXE)
    until(lambda: is_running(place, WOOD), seconds=60)
    before = place.graph_paths.scheduler_state.read_bytes()
    code, said = place.run(*LOCAL, TO_PICKAXE)
    assert code == EXIT_BUSY
    assert f"process {daemon.pid} on {os.uname().nodename}" in said
    assert len(said.splitlines()) == 1
    assert place.graph_paths.scheduler_state.read_bytes() == before
    place.open("gate")
    assert ended(daemon)[0] == 0
    assert place.launches() == [WOOD, TABLE, PICKAXE]


def test_status_can_be_read_at_any_moment(place, flowrl):
    """Fifty looks while ten skills move: each is a whole picture."""
    daemon = place.start(*LOCAL, "--max_nodes=10", "--max_parallel_skills=2")
    until(place.graph_paths.scheduler_state.exists, seconds=60)
    looks = completed = 0
    while True:
        looks += 1
        running = daemon.poll() is None
        skills = json.loads(flowrl("status", place.graph_paths.root, "--json").out)["skills"]
        fresh = sum(skill["status"] == "completed" for skill in skills)
        assert fresh >= completed
        completed = fresh
        if not running:
            break
    assert looks > 50
    assert completed == 10
    assert ended(daemon)[0] == 0
