"""`flowrl analyse` on real training: wrong contracts are found, right ones are left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from flowrl.analysis import command
from flowrl.experts.store import ExpertStore
from flowrl.paths import GraphPaths
from flowrl.runs import read_run
from flowrl.skills.amount import Amount
from flowrl.skills.skill import load_skill
from tests.analysis.wrong import HERE, LIBRARY, text_of, wrong_contracts
from tests.games.test_a_game_of_ones_own import installed

WRONG = wrong_contracts()
SPARE = next(name for name, wrong in WRONG.items() if wrong.stem == "00_pick_berry")
FLAGS = (
    *("--env_name=Forge-v1", "--launcher=local", "--no_use_wandb", "--total_timesteps=6e4"),
    *("--num_envs=32", "--num_steps=32", "--max_task_steps=40", "--layer_size=16", "--lr=3e-3"),
    *("--success_state_rate=0.95", "--min_success_rate=0.2", "--max_parallel_skills=2"),
)
SHOWN = """\
-requirements = {"ore": "1"}
-consumption = {"ore": "1"}
+requirements = {}
+consumption = {}
"""


class Forge:
    """A graph of the forge's skills and of wrong ones."""

    def __init__(self, folder) -> None:
        self.env = {**os.environ, "PYTHONPATH": installed(folder, HERE)}
        self.graph, self.skills = folder / "graph", folder / "skills"
        self.skills.mkdir()

    def train(self, *names: str, target: str | None = None, flags: Sequence[str] = ()) -> None:
        for name in names:
            (self.skills / f"{name.replace(' ', '_')}.py").write_text(text_of(name, WRONG[name]))
        words = [f"--graph_path={self.graph}", f"--skills_dir={self.skills}", *FLAGS]
        words += [f"--target_skill={target}"] if target else []
        words += flags
        done = self._run("flowrl.bottomup_parallel", *words)
        assert done.returncode == 0, done.stderr

    def flowrl(self, *words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = self._run("flowrl.cli", *map(str, words))
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def analyse(self, *words: str) -> dict[str, dict]:
        told = json.loads(self.flowrl("analyse", self.graph, *words, "--json").stdout)
        return {each["skill"]: each for each in told}

    def _run(self, module: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", module, *words]
        return subprocess.run(command, env=self.env, text=True, capture_output=True, check=False)


def proposed(told: dict) -> dict[str, str]:
    """The amounts that an analysis proposes, by part of the contract and item."""
    return {f"{each['key']} {each['item']}": each["now"] for each in told["disproofs"]}


@pytest.fixture
def forge(tmp_path):
    return Forge(tmp_path)


@pytest.mark.timeout(300)
def test_a_superfluous_need_is_found_and_taken_out(forge):
    forge.train(SPARE, target=SPARE)
    graph_paths = GraphPaths(forge.graph)
    kept = graph_paths.skill_file(SPARE)
    before, manifest = json.loads(kept.read_text()), graph_paths.manifest.read_bytes()
    said = forge.flowrl("analyse", forge.graph, SPARE, "--apply")
    assert f"no episode of {SPARE} is recorded: 256 are now" in said.stderr
    assert "  with at most 0 ore " in said.stdout
    assert SHOWN in said.stdout
    assert said.stdout.endswith(f"{SPARE}: its contract is corrected; its expert stays\n")
    after = json.loads(kept.read_text())
    differs = {key for key in before if after[key] != before[key]} - {"sha256"}
    assert differs == {"requirements", "consumption"}
    assert after["requirements"] == after["consumption"] == {}
    [old] = (graph_paths.skill_files / "former").iterdir()
    former = json.loads(old.read_text())
    assert "superfluous" in former["evidence"][0]
    assert former["requirements"] == {"ore": "1"}
    assert graph_paths.manifest.read_bytes() == manifest
    assert "Dig Ore" not in forge.flowrl("plan", forge.graph, SPARE).stdout
    told = forge.analyse(SPARE)[SPARE]
    assert told["disproofs"] == [], "twice is once"
    assert (told["least"], told["spent"]) == ({"ore": 1}, {})
    assert told["won"]["berry"] > 0.9, "some find a berry while they dig"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_contract_is_corrected_between_two_runs_of_one_skill(forge):
    forge.train(SPARE, target=SPARE, flags=["--analyse_at=0.5"])
    graph_paths = GraphPaths(forge.graph)
    after = json.loads(graph_paths.skill_file(SPARE).read_text())
    assert after["requirements"] == after["consumption"] == {}
    version = next(
        v for v in ExpertStore(graph_paths).manifest().experts.values() if v.skill == SPARE
    )
    last = read_run(graph_paths.archive(version.index, SPARE))
    assert [step.skill for step in last.plan] == [SPARE], "its second run needs no other skill"
    assert last.config["success_state_rate"] == 0.95


def test_what_cannot_be_analysed_is_one_line(forge, flowrl):
    assert "is no graph" in flowrl("analyse", forge.skills, code=1).err


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_wrong_contracts_are_found_and_right_ones_are_left(forge):
    forge.train(*WRONG)
    told = forge.analyse()
    missed = [name for name, wrong in WRONG.items() if not is_found(told[name], wrong)]
    assert {"too dear", "too cheap", "missing", "superfluous"} == {w.kind for w in WRONG.values()}
    assert len(WRONG) >= 20
    assert len(missed) <= len(WRONG) // 20, missed
    right = [path.stem[3:].replace("_", " ").title() for path in LIBRARY.glob("*.py")]
    assert {name: told[name]["disproofs"] for name in right} == {name: [] for name in right}
    kinds = Counter(wrong.kind for name, wrong in WRONG.items() if name not in missed)
    sys.stdout.write(f"found of {len(WRONG)}: {dict(kinds)}; right ones: {len(right)}\n")


def is_found(told: dict, wrong) -> bool:
    """Whether the corrected contract is the recipe's: its needs, and what is used up."""
    now = proposed(told)
    for item, amount in wrong.right.items():
        used = 0 if item == "knife" else amount
        needs = now.get(f"requirements {item}", wrong.requirements.get(item, "0"))
        uses = now.get(f"consumption {item}", wrong.consumption.get(item, "0"))
        if (needs, uses) != (str(amount), str(used)):
            return False
    return True


GAIN = '{"stone": "n"}'
HEADS = {
    "plain": ('name = "Dig Rock"\ngain = GAIN\nrequirements = NEEDS\n', True),
    "annotated": ('name: str = "Dig Rock"\ngain: dict = GAIN\nrequirements: dict = NEEDS\n', True),
    "of two names": ('name, gain = "Dig Rock", GAIN\nrequirements = NEEDS\n', False),
    "on one line": ('name = "Dig Rock"; gain = GAIN; requirements = NEEDS\n', False),
    "without": ('name = "Dig Rock"\ngain = GAIN\n', True),
}


@pytest.mark.parametrize(("head", "in_place"), HEADS.values(), ids=HEADS)
def test_a_corrected_contract_is_a_diff_however_its_file_is_written(tmp_path, head, in_place):
    code = "\n\ndef task_is_done(inventory, n):\n    return inventory.stone >= n\n"
    code += "\n\ndef task_reward(inventory_diff):\n    return 1.0 * inventory_diff.stone\n"
    path = tmp_path / "dig.py"
    path.write_text(head.replace("GAIN", GAIN).replace("NEEDS", '{"wood": "n"}') + code)
    skill = load_skill(path)
    changed = replace(skill, requirements={"wood": Amount.parse("2*n")})
    diff = command._diff(skill, changed, {skill.name: skill})
    assert diff.startswith(f"--- {path}" if in_place else "--- Dig Rock.py")
    assert [line for line in diff.splitlines() if line.startswith("+r")] == [
        '+requirements = {"wood": "2*n"}'
    ]
    assert command._diff(skill, skill, {skill.name: skill}) == ""
