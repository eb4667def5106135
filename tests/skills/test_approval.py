"""New skill code is tried before anything is written, and kept with the graph afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flowrl import bottomup_parallel, console, notices
from flowrl.command_line import parse
from flowrl.config import BottomUpConfig, PPOConfig
from flowrl.errors import SkillError
from flowrl.parallel.skill_sources import SkillSources
from flowrl.parallel.training_setup import prepare_training_run
from flowrl.paths import GraphPaths
from flowrl.runs import read_run
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import load_library
from flowrl.skills.validation import dry_run
from flowrl.skills.validation.cache import ApprovalStore
from tests.parallel.making import GRAPH, PICKAXE, WOOD, prepare
from tests.skills.hostile import reward
from tests.skills.making import skill_text

CLASSIC = "Craftax-Classic-Symbolic-v1"
NEW = reward("return 0.25 * inventory_diff.wood")
TRUSTED = reward("return sorted([float(k) for k in range(3)])[1] * 0.25")
BAD = reward("return 1.0 / inventory.wood")


@pytest.fixture
def graph_paths(tmp_path):
    return GraphPaths(tmp_path / "graph")


@pytest.fixture
def folder(tmp_path) -> Callable[..., object]:
    def written(**texts: str):
        folder = tmp_path / "mine"
        folder.mkdir(exist_ok=True)
        for name, text in texts.items():
            own = text.replace("Collect Wood", name.title())
            (folder / f"{name}.py").write_text(own)
        return folder

    return written


def never(*_):
    raise AssertionError("nothing is left to be tried")


def test_the_library_needs_no_dry_run(graph_paths, monkeypatch):
    monkeypatch.setattr(dry_run, "run_worker", never)
    skills = load_library(CLASSIC)
    approvals = dry_run.approve_skills(graph_paths, skills.values(), CLASSIC, trust=False)
    assert set(approvals) == set(skills)
    dry_run.keep_approvals(graph_paths, approvals)
    assert not graph_paths.approvals.exists(), "they are shipped"


def test_new_code_is_tried_once_and_then_kept_with_the_graph(graph_paths, folder, monkeypatch):
    skills = load_library(CLASSIC, folder(fell=NEW)).values()
    approvals = dry_run.approve_skills(graph_paths, skills, CLASSIC, trust=False)
    assert not graph_paths.root.exists()
    dry_run.keep_approvals(graph_paths, approvals)
    assert [path.stem for path in graph_paths.approvals.iterdir()] == [approvals["Fell"].digest]
    monkeypatch.setattr(dry_run, "run_worker", never)
    assert dry_run.approve_skills(graph_paths, skills, CLASSIC, trust=False) == approvals


def test_a_refused_skill_ends_the_program_before_anything_is_written(graph_paths, folder, capsys):
    words = [f"--graph_path={graph_paths.root}", f"--skills_dir={folder(fell=NEW, chop=BAD)}"]
    parsed = parse(BottomUpConfig, [*words, "--launcher=local"])
    code = console.guarded(lambda: bottomup_parallel.train(parsed))
    said = capsys.readouterr().err
    assert code == 1
    assert said.count("\n") == 1
    assert "chop.py:12: task_reward is not finite in" in said
    assert "; divide by what is never 0" in said
    assert not graph_paths.root.exists()


def test_a_skill_without_a_plan_ends_the_program_before_anything_is_written(
    graph_paths, folder, capsys
):
    mine = folder(wood=skill_text().replace('{"wood": "n"}', '{"wood": 2}'))
    (mine / "wood.py").write_text((mine / "wood.py").read_text().replace('"Wood"', f'"{WOOD}"'))
    words = [f"--graph_path={graph_paths.root}", f"--skills_dir={mine}", "--launcher=local"]
    parsed = parse(BottomUpConfig, [*words, f"--target_skill={PICKAXE}"])
    assert console.guarded(lambda: bottomup_parallel.train(parsed)) == 1
    assert "nothing can provide" in capsys.readouterr().err
    assert not graph_paths.root.exists()


def test_trusted_code_is_admitted_by_the_flag_alone_and_the_status_says_so(graph_paths, folder):
    mine = folder(fell=TRUSTED)
    with pytest.raises(SkillError, match=r"fell\.py:13: "):
        load_library(CLASSIC, mine)
    skills = load_library(CLASSIC, mine, trust=True)
    assert [name for name, skill in skills.items() if skill.trusted] == ["Fell"]
    with pytest.raises(SkillError, match="start with --trust_skills, or rewrite it"):
        dry_run.approve_skills(graph_paths, skills.values(), CLASSIC, trust=False)
    dry_run.keep_approvals(
        graph_paths, dry_run.approve_skills(graph_paths, skills.values(), CLASSIC, trust=True)
    )
    assert notices.read(graph_paths) == {
        "trusted_skills": "--trust_skills: the syntax check is lifted for Fell"
    }
    dry_run.keep_approvals(graph_paths, {})
    assert notices.read(graph_paths) == {}


def test_a_trusted_skill_that_is_kept_with_the_graph_asks_for_the_flag_again(graph_paths, folder):
    skills = load_library(CLASSIC, folder(fell=TRUSTED), trust=True)
    book = SkillSources(graph_paths)
    book.record(skills["Fell"])
    kept = book.recorded()["Fell"]
    assert kept == skills["Fell"]
    with pytest.raises(SkillError, match="--trust_skills"):
        dry_run.approve_skills(graph_paths, [kept], CLASSIC, trust=False)


def test_a_run_carries_the_approvals_of_its_plan(graph_paths):
    ready = prepare(graph_paths, WOOD, 0, {})
    [found] = read_run(ready.run_paths).approvals
    assert ApprovalStore(graph_paths.approvals).find(found.digest) == found


def test_a_run_with_code_that_nobody_tried_carries_no_approval_of_it(graph_paths, folder):
    skills = load_library(CLASSIC, folder(fell=NEW))
    ready = prepare_training_run(
        graph_paths=graph_paths,
        graph=SkillGraph(skills.values()),
        skill="Fell",
        expert=0,
        attempt=1,
        completed={},
        config=PPOConfig(),
    )
    assert read_run(ready.run_paths).approvals == ()


def test_every_skill_of_the_library_is_planned_with_approvals_on_all_steps(graph_paths):
    names = [step.skill for step in GRAPH.plan(PICKAXE)]
    codes = [dry_run.SkillCode.of(GRAPH.skills[name], CLASSIC) for name in dict.fromkeys(names)]
    store = ApprovalStore(graph_paths.approvals)
    assert all(store.find(code.digest) for code in codes)


def test_a_file_that_the_syntax_check_admits_is_not_called_trusted(folder):
    skills = load_library(CLASSIC, folder(fell=NEW, chop=skill_text()), trust=True)
    assert not any(skill.trusted for skill in skills.values())
