"""What a trainer or an evaluation runs is approved, or nothing of it runs."""

from __future__ import annotations

import ast
import re

import pytest

from flowrl import evaluation as evaluate
from flowrl.console import StopSignal
from flowrl.envs import skill_module
from flowrl.envs.skill_module import load_module, open_module
from flowrl.errors import CodeRefusedError, SkillError
from flowrl.ppo import trainer
from flowrl.runs import CodeApproval, TrainConfig
from flowrl.skills.validation.cache import ApprovalStore, code_digest
from tests.envs.making import CLASSIC, STONE, WOOD, module_text
from tests.ppo.modules import RELAY_PLAN, approved, relay_run, run_folder

TRUSTED = WOOD._replace(
    reward="(inventory):\n    return sorted([float(k) for k in range(3)])[0] + inventory.wood"
)


@pytest.fixture
def run_paths(tmp_path):
    return run_folder(tmp_path / "run")


def untried(*_):
    raise AssertionError("a run that has approvals is not tried again")


def test_a_run_whose_code_has_approvals_is_opened_without_a_dry_run(run_paths, monkeypatch):
    relay_run(run_paths)
    monkeypatch.setattr(skill_module, "approvals_of", untried)
    assert [task.skill for task in open_module(run_paths.module).tasks] == ["Go First", "Go Second"]


def test_the_trainer_refuses_a_run_whose_code_has_no_approval(run_paths):
    relay_run(run_paths, approvals=(CodeApproval(digest="0" * 64),))
    with pytest.raises(SkillError, match=r"9\.py:\d+: the code of step 'Go First' has no approval"):
        open_module(run_paths.module)
    with pytest.raises(SkillError, match="has no approval; prepare the run again"):
        trainer.run(TrainConfig(module_path=run_paths.module), StopSignal())


def test_a_run_of_today_without_any_approval_is_refused_and_not_tried(run_paths, monkeypatch):
    relay_run(run_paths, approvals=())
    monkeypatch.setattr(skill_module, "approvals_of", untried)
    with pytest.raises(SkillError, match="has no approval"):
        open_module(run_paths.module)


CHANGES = [
    ("inventory.wood >= n", "inventory.wood > n"),
    ("* 1.0", "* 9.0"),
    ("(inventory_diff)", "(inventory_diff, n=1)"),
]


@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_code_that_was_changed_afterwards_has_no_approval(run_paths, old, new):
    relay_run(run_paths)
    text = run_paths.module.read_text()
    assert old in text
    run_paths.module.write_text(text.replace(old, new))
    with pytest.raises(SkillError):
        open_module(run_paths.module)


def test_the_approval_heeds_neither_names_nor_counts_nor_comments(run_paths):
    relay_run(run_paths)
    text = run_paths.module.read_text()
    run_paths.module.write_text(text.replace("    return", "    # why\n    return"))
    assert len(open_module(run_paths.module).tasks) == len(RELAY_PLAN)
    assert len(approved(run_paths)) == 1, "both steps have the same code"


def test_a_module_of_its_own_is_tried_when_it_is_opened(tmp_path, monkeypatch):
    module = tmp_path / "0.py"
    module.write_text(module_text([WOOD, STONE]))
    assert len(open_module(module).tasks) == 2
    monkeypatch.setattr("flowrl.skills.validation.dry_run.run_worker", untried)
    with pytest.raises(AssertionError, match="not tried again"):
        open_module(module)


def test_a_module_of_its_own_that_fails_the_dry_run_is_refused(tmp_path):
    module = tmp_path / "0.py"
    step = WOOD._replace(reward="(inventory):\n    return 1 / inventory.wood")
    module.write_text(module_text([step]))
    with pytest.raises(SkillError, match=re.escape("task_reward is not finite")) as refused:
        open_module(module)
    assert str(refused.value).startswith(f"{module}:")


def test_a_damaged_approval_stops_and_says_which_file(run_paths):
    [path] = (run_paths.folder / "approvals").glob("*.json")
    path.write_text(path.read_text().replace('"trusted": false', '"trusted": true'))
    with pytest.raises(Exception, match=re.escape(str(path))):
        open_module(run_paths.module)


def digests(text: str) -> list[str]:
    """Of the two functions of every step."""
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    pairs = zip(functions[::3], functions[1::3], strict=True)
    return [code_digest(done, reward, CLASSIC) for done, reward in pairs]


def approval_of(text: str, **facts) -> CodeApproval:
    [digest] = digests(text)
    return CodeApproval(digest=digest, **facts)


def test_trust_is_the_approvals_to_give_and_not_the_modules():
    text = module_text([TRUSTED])
    with pytest.raises(CodeRefusedError):
        load_module(text)
    with pytest.raises(CodeRefusedError):
        load_module(text, approvals=[approval_of(text)])
    [task] = load_module(text, approvals=[approval_of(text, trusted=True)]).tasks
    names = task.functions.reward.__globals__["__builtins__"]
    assert "sorted" in names
    assert not {"__import__", "open", "eval", "exec", "getattr", "type", "compile"} & set(names)


def test_trust_of_one_step_reaches_no_other():
    text = module_text([WOOD, STONE._replace(reward=TRUSTED.reward)])
    approvals = [
        CodeApproval(digest=digest, trusted=k == 1) for k, digest in enumerate(digests(text))
    ]
    first, second = load_module(text, approvals=approvals).tasks
    assert "sorted" not in first.functions.reward.__globals__["__builtins__"]
    assert "sorted" in second.functions.reward.__globals__["__builtins__"]


def test_a_count_that_was_not_tried_is_refused():
    step = WOOD._replace(count=11, is_done="(inventory, n=11):\n    return inventory.wood >= n")
    with pytest.raises(SkillError, match="needs a skill, a count up to 10"):
        load_module(module_text([step]))


def test_an_evaluation_opens_modules_the_same_way():
    assert evaluate.open_module is trainer.open_module is open_module


def test_approvals_are_found_again_by_their_digest_alone(tmp_path):
    store = ApprovalStore(tmp_path / "approvals")
    assert store.find("a" * 64) is None
    approval = CodeApproval(digest="a" * 64, trusted=True)
    store.keep(approval)
    assert ApprovalStore(tmp_path / "approvals").find("a" * 64) == approval
    (tmp_path / "approvals" / f"{'b' * 64}.json").write_bytes(
        (tmp_path / "approvals" / f"{'a' * 64}.json").read_bytes()
    )
    with pytest.raises(Exception, match=r"json is about aaa.*; remove it"):
        store.find("b" * 64)
