"""`flowrl check` says of every file of a folder whether it is a good skill, or why it is none."""

from __future__ import annotations

import json

import pytest

from flowrl.cli import main
from flowrl.games.base import find_game
from tests.skills.making import skill_text


def written(folder, **texts: str | bytes):
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        content = text if isinstance(text, bytes) else text.encode()
        (folder / f"{name}.py").write_bytes(content)
    return folder


def test_every_file_of_a_folder_is_told_by_a_line(tmp_path, flowrl):
    folder = written(tmp_path / "mine", b=skill_text(head="import os\n"), a=skill_text())
    (folder / "notes.txt").write_text("no skill")
    first, second = flowrl("check", folder, "--no_trace", code=1).out.splitlines()
    games = "Craftax-Classic-Symbolic-v1, Craftax-Symbolic-v1"
    assert first == f"{folder / 'a.py'}: ok: Collect Wood, for {games}; plan: Collect Wood × 1"
    assert second.startswith(f"{folder / 'b.py'}:2: import does not belong in a skill file; remove")


def test_files_and_folders_may_be_mixed_and_are_told_as_json(tmp_path, flowrl):
    folder = written(tmp_path / "mine", a=skill_text())
    other = written(tmp_path, c=skill_text(head="import os\n")) / "c.py"
    good, bad = json.loads(flowrl("check", folder, other, "--no_trace", "--json", code=1).out)
    assert (good["skill"], bad["skill"]) == ("Collect Wood", None)
    assert good["why"] is None
    assert set(good["plans"].values()) == {"Collect Wood × 1"}
    assert bad["games"] == []


def test_code_of_flowrls_own_library_is_not_run_again(tmp_path, monkeypatch, flowrl):
    tried = []

    def try_codes(codes, *_, **__):
        tried.extend(codes)
        return [None] * len(codes)

    monkeypatch.setattr("flowrl.commands.check.try_codes", try_codes)
    library = find_game("Craftax-Classic-Symbolic-v1").library_folder
    own = (library / "00_collect_wood.py").read_text()
    folder = written(tmp_path / "mine", same=own, changed=own.replace(">= n", "> n - 1"))
    flowrl("check", folder / "same.py", "--env_name", "Craftax-Classic-Symbolic-v1")
    assert tried == []
    flowrl("check", folder / "changed.py", "--env_name", "Craftax-Classic-Symbolic-v1")
    assert [code.origin.place for code in tried] == [str(folder / "changed.py")]


def test_the_plan_is_one_among_the_librarys_skills(tmp_path, flowrl):
    wants = skill_text().replace("requirements = {}", 'requirements = {"wood_pickaxe": "1"}')
    folder = written(tmp_path / "mine", a=wants.replace("Collect Wood", "Fell Trees"))
    assert "Make Wood Pickaxe × 1, Fell Trees × 1" in flowrl("check", folder, "--no_trace").out


def needing(name, gain, need):
    text = (
        skill_text().replace('"Collect Wood"', f'"{name}"').replace('"wood": "n"', f'"{gain}": 1')
    )
    return text.replace("requirements = {}", f'requirements = {{"{need}": 1}}')


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ("egg", "skills need one another in a circle: Egg → Hen → Egg; drop one need"),
        ("dream", "'Hen' requires 'dream', which no skill gains; "),
    ],
    ids=["a circle", "an unknown need"],
)
def test_a_folders_skill_that_can_never_be_learned_is_refused(tmp_path, flowrl, second, why):
    egg, hen = needing("Egg", "egg", "hen"), needing("Hen", "hen", second)
    folder = written(tmp_path / "mine", egg=egg, hen=hen)
    lines = flowrl("check", folder, "--no_trace", code=1).out.splitlines()
    assert lines[0].startswith(f"{folder}/egg.py:1: {why}")
    assert lines[1].startswith(f"{folder}/hen.py:1: ")
    # A graph may have what yields a hen.
    assert ": ok: Egg, " in flowrl("check", folder / "egg.py", "--no_trace").out


def test_a_skill_that_is_like_none_has_no_plan_yet(tmp_path, flowrl):
    egg = needing("Egg", "egg", "wood").replace("gain", 'like = "Lay Eggs"\ngain')
    folder = written(tmp_path / "mine", egg=egg)
    why = "'Egg' is like 'Lay Eggs', which is no skill here"
    said = flowrl("check", folder, "--no_trace", code=1).out
    assert said.startswith(f"{folder}/egg.py:1: {why}")
    assert f"no plan yet: {why}" in flowrl("check", folder / "egg.py", "--no_trace").out


@pytest.mark.parametrize(
    ("reward", "warned"),
    [
        ("def task_reward(inventory_diff):\n    return 0.5", True),
        ("def task_reward():\n    return 1.0", True),
        ("def task_reward(n):\n    return 0.1 * n", True),
        ("def task_reward(inventory_diff):\n    return inventory_diff.wood", False),
    ],
)
def test_a_reward_without_a_feature_is_warned_of(tmp_path, flowrl, reward, warned):
    folder = written(tmp_path / "mine", a=skill_text(reward=reward))
    told = flowrl("check", folder, "--no_trace").out
    assert ("; warning: task_reward is the same in every timestep, " in told) == warned


@pytest.mark.parametrize("words", [[], ["empty"]], ids=["nothing", "an empty folder"])
def test_a_check_of_nothing_is_refused(tmp_path, monkeypatch, flowrl, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert flowrl("check", *words, code=2).err.count("\n") == 1


def test_one_file_that_once_crashed_the_check_does_not_hide_the_others(tmp_path, flowrl):
    digits = skill_text().replace('"n"', "9" * 400)
    hexadecimal = skill_text().replace('"n"', "0x" + "f" * 4_000)
    folder = written(tmp_path / "mine", a=digits, b=hexadecimal, c=skill_text())
    lines = flowrl("check", folder, "--no_trace", code=1).out.splitlines()
    assert [": a literal is too large; " in line for line in lines] == [True, True, False]


def test_a_byte_order_mark_is_read(tmp_path, flowrl):
    folder = written(tmp_path / "mine", a=b"\xef\xbb\xbf" + skill_text().encode())
    assert ": ok: " in flowrl("check", folder, "--no_trace").out


@pytest.mark.parametrize("name", ["\x1b[2J", "a\nb", "\udcff"], ids=["escape", "line", "byte"])
@pytest.mark.parametrize("text", [skill_text(), "import os\n", "x = ("])
def test_a_files_name_cannot_command_the_terminal(tmp_path, capsys, name, text):
    folder = written(tmp_path / "mine", **{name: text})
    main(["check", str(folder), "--no_trace"])
    main(["check", str(folder / f"{name}.py"), str(folder / f"{name}0.py"), "--no_trace"])
    said = capsys.readouterr()
    for line in (said.out + said.err).split("\n"):
        assert not line or line.isprintable()
    assert len(said.out.splitlines()) == (1 if name == "\udcff" else 3), "no such word is taken"


def test_two_files_of_a_folder_with_one_name_are_refused(tmp_path, flowrl):
    folder = written(tmp_path / "mine", a=skill_text(), b=skill_text())
    first, second = flowrl("check", folder, "--no_trace", code=1).out.splitlines()
    assert first.startswith(f"{folder / 'a.py'}: ok: ")
    assert second == f"{folder / 'b.py'}: {folder / 'a.py'} is 'Collect_Wood', too; rename one"


FULL = "Craftax-Symbolic-v1"


@pytest.mark.parametrize(
    ("was", "now", "told"),
    [
        ('{"wood": "n"}', '{"bow": 2}', "gains 2 bow, and Craftax-Symbolic-v1 holds 1 of it; gain"),
        ('{"wood": "n"}', '{"wood": "n"}\nfloors = [12]', "has no floor 12; its floors are 0 to 8"),
        ('{"wood": "n"}', '{"on_floor": 9}', "has no floor 9; its floors are 0 to 8"),
        (
            "inventory.wood >= n",
            "Achievement.DEFEAT_ORC_SOLDIER.value > n",
            "closest are DEFEAT_ORC_SOLIDER, DEFEAT_ORC_MAGE, DEFEAT_KOBOLD, so spelt in the game",
        ),
        (
            "def task_is_done(inventory, n)",
            "def task_is_done(inventory, player_mna, n)",
            "closest are player_mana, player_mana_prev, player_mana_diff",
        ),
    ],
)
def test_a_check_for_one_game_speaks_of_that_game(tmp_path, flowrl, was, now, told):
    folder = written(tmp_path / "mine", a=skill_text().replace(was, now))
    said = flowrl("check", folder, "--no_trace", "--env_name", FULL, code=1).out
    assert told in said
    assert "Classic" not in said
    assert said.count("\n") == 1


def test_a_check_for_one_game_tells_its_plan_alone(tmp_path, flowrl):
    folder = written(tmp_path / "mine", a=skill_text())
    line = flowrl("check", folder, "--no_trace", "--env_name", FULL).out
    assert line == f"{folder / 'a.py'}: ok: Collect Wood, for {FULL}; plan: Collect Wood × 1\n"
    said = flowrl("check", "--game", FULL, "--env_name", FULL, code=2).err
    assert "--game takes no files and no --env_name" in said


def test_a_skill_of_a_floor_is_for_the_games_that_have_it(tmp_path, flowrl):
    text = skill_text().replace('{"wood": "n"}', '{"wood": "n"}\nfloors = [2]')
    text = text.replace("Collect Wood", "Fell Trees")
    folder = written(tmp_path / "mine", a=text)
    assert f": ok: Fell Trees, for {FULL}; plan: " in flowrl("check", folder, "--no_trace").out


def test_what_stands_twice_is_refused(tmp_path, flowrl):
    amounts = skill_text().replace('{"wood": "n"}', '{"wood": "n", "wood": "2*n"}')
    flags = skill_text() + '\ntraining = {"lr": 0.1, "lr": 0.2}\n'
    folder = written(tmp_path / "mine", a=amounts, b=flags)
    lines = flowrl("check", folder, "--no_trace", code=1).out.splitlines()
    assert ["stands twice; leave one of them out" in line for line in lines] == [True, True]


def test_two_names_of_one_folder_hide_no_other_skill(tmp_path, flowrl):
    names = {"a": "Tea For Two", "b": "Tea_For Two", "c": "Coffee"}
    texts = {key: skill_text().replace("Collect Wood", name) for key, name in names.items()}
    folder = written(tmp_path / "mine", **texts)
    lines = flowrl("check", folder, "--no_trace", code=1).out.splitlines()
    assert [": ok: " in line for line in lines] == [True, False, True]
    assert "a.py is 'Tea_For_Two', too; rename one" in lines[1]


def test_hidden_files_are_no_skills(tmp_path, flowrl):
    folder = written(tmp_path / "mine", a=skill_text(), **{"._a": b"\0\5\x16\7"})
    (line,) = flowrl("check", folder, "--no_trace").out.splitlines()
    assert ": ok: " in line


def test_a_name_beside_one_of_the_library_is_told_with_its_file(tmp_path, flowrl):
    folder = written(tmp_path / "mine", a=skill_text().replace("Collect Wood", "Collect_Wood"))
    said = flowrl("check", folder, "--no_trace", code=1).err
    assert f"{folder / 'a.py'}: the skills 'Collect Wood' and 'Collect_Wood' share" in said
