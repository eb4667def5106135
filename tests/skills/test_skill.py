"""Skill files, skill data and libraries."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flowrl.commands.check import check_files
from flowrl.errors import CodeRefusedError, ConfigError, FlowrlError, SkillError
from flowrl.skills.skill import (
    Amount,
    Skill,
    load_library,
    load_skill,
    parse_skill,
    skill_from_data,
)
from tests.skills.making import IS_DONE, REWARD, skill_text

CLASSIC = "Craftax-Classic-Symbolic-v1"
FULL = "Craftax-Symbolic-v1"
TABLE = '''"""Put a table down.

Two pieces of wood.
"""
name = "Place Table"
requirements = {"wood": "2"}
consumption = {"wood": 2}
gain = {"near_table": "lambda n: 0*n + 1"}
ephemeral = ["near_table"]
max_count = 3
max_steps = 450

def task_is_done(n, inventory):
    """Reads well."""
    wood = inventory.wood  # as it was written
    return wood >= n

def task_reward(inventory_diff):
    return 1.0 * inventory_diff.wood
'''


def test_a_skill_is_read_from_its_text():
    skill = parse_skill(TABLE, place="table.py")
    assert skill.name == "Place Table"
    assert skill.description == "Put a table down.\n\nTwo pieces of wood."
    assert skill.requirements == skill.consumption == {"wood": Amount(per=0, base=2)}
    assert skill.gain == {"near_table": Amount(per=0, base=1)}
    assert skill.ephemeral == {"near_table"}
    assert (skill.max_count, skill.max_steps) == (3, 450)
    assert skill.is_done.endswith("wood  # as it was written\n    return wood >= n")
    assert skill.reward.startswith("def task_reward(inventory_diff):")


def test_a_skill_survives_its_own_json():
    skill = parse_skill(TABLE, place="table.py")
    assert Skill.from_json(json.loads(json.dumps(skill.to_json()))) == skill


def test_nothing_of_a_skill_is_executed(tmp_path):
    trace = tmp_path / "trace"
    text = skill_text(head=f"open({str(trace)!r}, 'w')\n")
    with pytest.raises(SkillError, match="does not belong in a skill file"):
        parse_skill(text, place="evil.py")
    assert not trace.exists()


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('name = "Place Table"', 'name = ""', "empty"),
        ('name = "Place Table"', "name = 3", "name is missing or not text"),
        ('name = "Place Table"', 'name = "3"', "3 is the number of an expert; choose a name"),
        ('name = "Place Table"', 'name = "a\\nb"', "control characters"),
        ('name = "Place Table"\n', "", "name is missing"),
        ('{"near_table": "lambda n: 0*n + 1"}', "{}", "gain is empty"),
        ('{"near_table": "lambda n: 0*n + 1"}', '["near_table"]', "gain is not a dict"),
        ('{"near_table": "lambda n: 0*n + 1"}', '{"a b": 1}', "'a b'"),
        ('{"near_table": "lambda n: 0*n + 1"}', '{"near_table": "n*n"}', "gain of near_table"),
        ('{"near_table": "lambda n: 0*n + 1"}', "dict(a=1)", "not a literal"),
        ('ephemeral = ["near_table"]', 'ephemeral = ["wood"]', "not in gain"),
        ('ephemeral = ["near_table"]', 'ephemeral = "near_table"', "not a list"),
        ('ephemeral = ["near_table"]', 'ephemeral = [["near_table"]]', "not in gain"),
        ("max_steps = 450", "max_steps = 0", "max_steps is not a whole number from 1 to 100000"),
        ("max_steps = 450", "max_steps = 100_001", "max_steps is not a whole number"),
        ("max_steps = 450", "max_steps = True", "max_steps is not a whole number"),
        ("max_steps = 450", "max_steps = 3.0", "max_steps is not a whole number"),
        ("max_steps = 450", "max_steps = 9 * 50", "not a literal"),
        ("max_count = 3", "max_count = 0", "max_count is not a whole number from 1 to 1000"),
        ("max_count = 3", "max_count = '3'", "max_count is not a whole number"),
        ("consumption", "consumed", "did you mean consumption"),
        ("def task_reward(inventory_diff)", "def reward(inventory_diff)", "task_reward is missing"),
        ('name = "Place Table"', 'name = "A"\nname = "B"', "name appears twice"),
    ],
)
def test_a_malformed_skill_is_refused_by_place_and_cause(old, new, complaint):
    assert old in TABLE
    with pytest.raises(SkillError, match=re.escape(complaint)) as caught:
        parse_skill(TABLE.replace(old, new), place="table.py")
    assert str(caught.value).startswith("table.py:")


def test_a_skill_is_made_from_the_documented_mapping():
    data = {
        "description": "Harvest wood.",
        "requirements": {},
        "consumption": {},
        "gain": {"wood": "lambda n: 4*n + 0"},
        "ephemeral": [],
        "is_done": IS_DONE,
        "reward": REWARD,
    }
    skill = skill_from_data("Collect Wood", data)
    assert skill.gain == {"wood": Amount(per=4, base=0)}
    assert (skill.is_done, skill.reward, skill.max_steps) == (IS_DONE, REWARD, None)
    assert "max_steps" not in skill.to_json()
    assert skill_from_data("Collect Wood", data | {"max_steps": 7}).max_steps == 7
    both = {"gain": data["gain"], "code": f"{IS_DONE}\n\n{REWARD}"}
    assert skill_from_data("Collect Wood", both).to_json() == {
        **skill.to_json(),
        "description": "Collect Wood",
    }


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"gian": {}}, "unknown key 'gian'"),
        ({"gain": {}}, "gain is empty"),
        ({"is_done": 3}, "is_done is missing or not text"),
        ({"is_done": "import os"}, "import"),
        ({"is_done": IS_DONE + "\nimport os"}, "import"),
        ({"is_done": REWARD}, "task_reward appears twice"),
        ({"gain": {"wood": object()}}, "correct the syntax"),
        ({"gain": {"wood": print}}, "correct the syntax"),
        ({"description": "x\n'''\nimport os"}, None),
    ],
    ids=lambda change: str(change)[:30],
)
def test_a_mapping_that_is_no_skill_is_refused(change, complaint):
    data = {"gain": {"wood": "n"}, "is_done": IS_DONE, "reward": REWARD} | change
    if complaint is None:
        assert skill_from_data("Wood", data).description == change["description"]
        return
    with pytest.raises(SkillError, match=complaint):
        skill_from_data("Wood", data)


@pytest.mark.parametrize(
    "name", ["../../x", "a;rm -rf ~", "$(id)", "-t", "木を集める", '"""', "\\", "'"]
)
def test_a_hostile_name_stays_text(name):
    skill = skill_from_data(name, {"gain": {"wood": 1}, "is_done": IS_DONE, "reward": REWARD})
    assert skill.name == name
    assert Skill.from_json(json.loads(json.dumps(skill.to_json()))) == skill


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x" * 30_000, b""], ids=["binary", "huge", ""])
def test_a_file_that_is_no_skill_is_refused(tmp_path, content):
    path = tmp_path / "skill.py"
    path.write_bytes(content)
    with pytest.raises(FlowrlError, match=re.escape(str(path))):
        load_skill(path)


def test_every_file_is_checked_and_told_apart(tmp_path):
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(skill_text())
    bad.write_text(skill_text(head="import os\n"))
    fine, wrong, missing = check_files([good, bad, tmp_path / "none.py"], trace=False)
    assert fine.why is None
    assert fine.games == (CLASSIC, FULL)
    assert wrong.why is not None
    assert wrong.why.startswith(f"{bad}:2: import")
    assert missing.why is not None


NAMES = {
    "a block": ("BlockType.TREEE.value", f"BlockType.TREEE is not in {CLASSIC}; closest are TREE"),
    "an action": ("Action.PLACE_STON.value", "closest are PLACE_STONE"),
    "an achievement": ("Achievement.EAT_COWS.value", "closest are EAT_COW"),
    "a block of the other enum": ("BlockType.NOOP.value", "BlockType.NOOP is not in Craftax"),
    "an item": ("inventory.wod", f"inventory.wod is not in {CLASSIC}; closest are wood"),
    "two games at once": (
        "inventory.wood_sword + inventory.sword",
        "inventory.sword is not in Craftax-Classic-Symbolic-v1; closest are ",
    ),
}


@pytest.mark.parametrize(("value", "complaint"), NAMES.values(), ids=NAMES)
def test_what_neither_game_has_is_refused_with_its_line_and_the_closest_name(value, complaint):
    text = skill_text(is_done=f"def task_is_done(inventory):\n    return {value} > 0")
    with pytest.raises(CodeRefusedError, match=re.escape(complaint)) as caught:
        parse_skill(text, place="wood.py")
    assert str(caught.value).startswith("wood.py:9: ")


@pytest.mark.parametrize(
    ("value", "belongs", "lacks"),
    [
        ("inventory.pickaxe", FULL, CLASSIC),
        ("inventory.wood_pickaxe", CLASSIC, FULL),
        ("BlockType.CHEST.value", FULL, CLASSIC),
        ("Achievement.FIND_BOW.value", FULL, CLASSIC),
        ("Action.REST.value", FULL, CLASSIC),
    ],
)
def test_a_skill_of_one_game_is_no_skill_of_the_other(tmp_path, value, belongs, lacks):
    path = tmp_path / "own.py"
    is_done = f"def task_is_done(inventory):\n    kept = inventory\n    return {value} > 0"
    text = skill_text(is_done=is_done.replace("inventory.", "kept."))
    path.write_text(text.replace("Collect Wood", "Own Skill"))
    [checked] = check_files([path], trace=False)
    assert (checked.games, checked.why) == ((belongs,), None)
    assert "Own Skill" in load_library(belongs, tmp_path)
    with pytest.raises(
        CodeRefusedError, match=rf"own\.py:10: .* is not in {lacks}; (closest|there) are "
    ):
        load_library(lacks, tmp_path)


def test_a_users_folder_adds_skills_and_replaces_those_of_the_same_name(tmp_path):
    (tmp_path / "b.py").write_text(skill_text())
    (tmp_path / "a.py").write_text(skill_text().replace("Collect Wood", "Own Skill"))
    skills = load_library(CLASSIC, tmp_path)
    embedded = load_library(CLASSIC)
    assert list(skills) == [*embedded, "Own Skill"]
    assert skills["Collect Wood"].description == "Harvest wood."
    assert embedded["Collect Wood"].description != "Harvest wood."


def test_two_files_with_one_skill_are_refused(tmp_path):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(skill_text().replace("Collect Wood", "A B"))
    with pytest.raises(SkillError, match=r"a.py and .*b.py are both 'A B'; rename one"):
        load_library(CLASSIC, tmp_path)


def test_an_unknown_environment_or_folder_is_named():
    with pytest.raises(ConfigError, match=r"Pong is unknown; .*Craftax-Classic-Symbolic-v1"):
        load_library("Pong")
    with pytest.raises(SkillError, match="nowhere is not a folder"):
        load_library(CLASSIC, Path("nowhere"))


def test_a_skill_file_says_how_the_skill_is_trained():
    head = 'training = {"lr": 3e-4, "total_timesteps": "3e6", "anneal_lr": False}\n'
    found = parse_skill(skill_text(head=head), place="x.py")
    assert found.training == {"lr": 3e-4, "total_timesteps": 3_000_000, "anneal_lr": False}
    assert Skill.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        ('{"layer_size": 32}', "layer_size is the same for all skills of a graph, whose experts"),
        ('{"env_name": "Craftax-Symbolic-v1"}', "leave it out and use --env_name"),
        ('{"learning_rate": 1}', "'learning_rate' is no setting of a skill; there are total_time"),
        ('{"gama": 0.9}', "'gama' is no setting of a skill; closest is 'gamma'"),
        ('{"compile_cache": "/"}', "'compile_cache' is no setting"),
        ('{"lr": -1}', "--lr "),
        ('{"lr": "fast"}', "--lr is 'fast', not a number"),
        ('{"lr": "nan"}', "--lr "),
        ('{"gamma": 1.5}', "--gamma "),
        ('{"num_envs": 2.5}', "--num_envs is '2.5', not a whole number"),
        ('{"num_envs": 10**9}', "a constant is not a literal"),
        ('{"num_envs": 1000000}', "num_envs is over 100000"),
        ('{"num_envs": 100000, "num_steps": 100000}', "num_envs × num_steps is over 4194304"),
        ('{"num_envs": 100000}', "num_envs × num_steps is over 4194304; choose less"),
        ('{"world_pool": 100000}', "--world_pool is 100000: must lie in [0, 16384]"),
        ('{"lr": [1]}', "not a number"),
        ("[1]", "training is no dict"),
    ],
)
def test_settings_that_are_none_of_a_skill_are_refused(written, complaint):
    with pytest.raises(SkillError, match=re.escape(complaint)) as caught:
        parse_skill(skill_text(head=f"training = {written}\n"), place="x.py")
    assert str(caught.value).startswith("x.py:2: ")


@pytest.mark.parametrize("written", ['{"stone": "Dig"}', '{"wood": 1}', "[]", '"Dig"'])
def test_only_needs_have_a_named_provider(written):
    head = f"provided_by = {written}\n"
    with pytest.raises(SkillError, match="provided_by does not name a skill for items"):
        parse_skill(skill_text(head=head), place="x.py")


@pytest.mark.parametrize("written", ["3", '""', '["Dig"]', "None"])
def test_like_is_the_name_of_a_skill(written):
    text = skill_text(head=f"like = {written}\n")
    if written == "None":
        assert parse_skill(text, place="x.py").like is None
    else:
        with pytest.raises(SkillError, match=r"x\.py:2: like names no skill"):
            parse_skill(text, place="x.py")


def test_names_of_other_skills_survive_json():
    text = skill_text(head='provided_by = {"axe": "Forge"}\nlike = "Dig"\n').replace(
        "requirements = {}", 'requirements = {"axe": 1}'
    )
    found = parse_skill(text, place="x.py")
    assert (found.provided_by, found.like) == ({"axe": "Forge"}, "Dig")
    assert Skill.from_json(found.to_json()) == found
