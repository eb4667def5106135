"""Typical mistakes on the command line: each is answered in one line that says the remedy."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from flowrl import bottomup_parallel, cli, independent, orchestrator, ppo_flow
from flowrl.config import PPOConfig
from flowrl.parallel.health import DaemonLock
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.parallel.skill_sources import record_graph
from flowrl.paths import GraphPaths
from flowrl.skills.skill import load_library
from flowrl.storage import records
from tests.commands.conftest import template  # noqa: F401 — the fixture
from tests.commands.making import DONE, FAILED, HELD, WAITING, running, save
from tests.skills.making import skill_text

TABLE = tomllib.loads((Path(__file__).parent / "mistakes.toml").read_text())["mistake"]
PROGRAMS = {
    "flowrl.bottomup_parallel": bottomup_parallel.main,
    "flowrl.ppo_flow": ppo_flow.main,
    "flowrl.independent": independent.main,
    "flowrl.orchestrator": orchestrator.main,
}
LOG = re.compile(r"\d\d:\d\d:\d\d ")
BAD = {
    "no_end.py": skill_text().replace("def task_is_done", "def is_done"),
    "syntax.py": '"""Harvest wood."""\nname = "Wood"\ngain = {"wood": "n"\n',
    "imports.py": "import os\n" + skill_text(),
    "item.py": skill_text().replace("inventory.wood ", "inventory.woood "),
    "feature.py": skill_text().replace("(inventory_diff", "(inventry_diff"),
    "hoard.py": skill_text().replace('"n"', '"200"'),
    "photo.py": "\x89PNG\udcff\r\n",
    "config.json": '{"lr": 0.001}\n',
    "rounds.toml": "average_every = 9\n",
    "flags.toml": "learning_rat = 1e-3\n",
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory, template) -> Path:  # noqa: F811
    """The folder that mistakes.toml describes."""
    place = tmp_path_factory.mktemp("mistakes")
    shutil.copytree(template.root, place / "graph")
    save(
        place / "steer",
        ("Collect Wood", DONE),
        ("Place Table", running()),
        ("Collect Iron", FAILED),
        ("Collect Coal", HELD),
        ("Make Wood Pickaxe", WAITING, ("Collect Wood", "Place Table")),
    )
    for name in ("empty", "skills", "bad", "bad_skill", "typo", "bonus"):
        (place / name).mkdir()
    (place / "FILE").touch()
    (place / "skills" / "tea.py").write_text(skill_text())
    bonus = skill_text().replace(
        "consumption", 'training = {"coverage_bonus": 0.1}\nconsumption', 1
    )
    (place / "bonus" / "tea.py").write_text(bonus)
    (place / "bad_skill" / "imports.py").write_text(BAD["imports.py"])
    (place / "typo" / "tea.py").write_text(skill_text().replace("nts = {}", 'nts = {"woood": "n"}'))
    for name, text in BAD.items():
        (place / "bad" / name).write_text(text, errors="surrogateescape")
    return place


def world_writable(monkeypatch):
    Path("graph").chmod(0o777)


def locked(monkeypatch):
    lock = DaemonLock(GraphPaths(Path("graph")).daemon_lock)
    lock.acquire()
    monkeypatch.setattr(locked, "held", lock, raising=False)


def edited_state(monkeypatch):
    state = GraphPaths(Path("graph")).scheduler_state
    state.write_text(state.read_text().replace("Collect Wood", "Collect Wool"))


def born(monkeypatch):
    record_graph(GraphPaths(Path("graph")), PPOConfig())


def newer_manifest(monkeypatch):
    GraphPaths(Path("graph")).manifest.write_text('{"format": 99}')


def without_generations(monkeypatch):
    shutil.rmtree(GraphPaths(Path("graph")).checkpoints)


def notices_in_a_file(monkeypatch):
    notices = GraphPaths(Path("graph")).notices
    shutil.rmtree(notices, ignore_errors=True)
    notices.touch()


def swapped_sources(monkeypatch):
    graph_paths = GraphPaths(Path("graph"))
    graph_paths.skill_files.mkdir(exist_ok=True)
    skill = load_library(PPOConfig().env_name)["Place Table"]
    records.write(graph_paths.skill_file("Collect Wood"), skill.to_json())


def an_agent_in_a_fifo(monkeypatch):
    Path("agent").mkdir()
    os.mkfifo("agent/agent.json")


def without_state(monkeypatch):
    GraphPaths(Path("graph")).scheduler_state.unlink()


def without_format(monkeypatch):
    GraphPaths(Path("graph")).graph_json.write_text("{}")


def without_wandb(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)


def without_programs(monkeypatch):
    monkeypatch.setenv("PATH", "")


def everything() -> dict[Path, object]:
    """All that is here, by path: what is refused changes nothing."""
    return {
        path: path.read_bytes() if path.is_file() else path.lstat().st_mode
        for path in Path().rglob("*")
    }


@dataclasses.dataclass
class Answer:
    code: int
    lines: list[str]


def answer(capfd, command: str) -> Answer:
    program, *words = shlex.split(command)
    main = cli.main
    if program == "python":
        _, module, *words = words
        main = PROGRAMS[module]
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    said = capfd.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if line and not LOG.match(line)]
    return Answer(code, lines)


@pytest.mark.parametrize("mistake", TABLE, ids=lambda mistake: mistake["command"])
def test_a_mistake_is_answered_in_one_line(folders, tmp_path, monkeypatch, capfd, mistake):
    monkeypatch.chdir(shutil.copytree(folders, tmp_path / "here"))
    for name in [name for name in os.environ if name.startswith("FLOWRL_")]:
        monkeypatch.delenv(name)
    for name, value in mistake.get("env", {}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(SkillScheduler, "run", lambda _: pytest.fail("it begins to train"))
    if "world" in mistake:
        globals()[mistake["world"]](monkeypatch)
    before = everything()
    got = answer(capfd, mistake["command"])
    assert everything() == before
    assert len(got.lines) == 1, got
    assert [words for words in mistake["says"] if words not in got.lines[0]] == [], got
    assert got.code == mistake["code"], got


def test_no_mistake_stands_twice():
    assert len(TABLE) == len({str(mistake) for mistake in TABLE})
