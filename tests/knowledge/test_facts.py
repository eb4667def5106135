"""`flowrl facts` shows a game's facts, keeps them, and says in one line why there are none."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from flowrl.games import craftax
from flowrl.games.craftax import CLASSIC, FULL
from flowrl.knowledge import asking
from flowrl.knowledge.asking import facts_of
from flowrl.knowledge.facts import Facts

ROOT = Path(__file__).parents[2]
PAGES = {FULL.name: "craftax.md", CLASSIC.name: "craftax-classic.md"}
pytestmark = pytest.mark.timeout(600)


@pytest.mark.craftax
def test_the_page_of_the_documentation_is_what_the_command_writes(game, tmp_path, flowrl):
    flowrl("facts", game.name, "-o", tmp_path / "page.md")
    kept = (ROOT / "docs" / PAGES[game.name]).read_text()
    remedy = f"run flowrl facts {game.name} -o docs/{PAGES[game.name]}"
    assert (tmp_path / "page.md").read_text() == kept, remedy
    assert flowrl("facts", game.name).out == kept


@pytest.mark.craftax
def test_json_has_the_same_facts(game, facts, flowrl):
    told = json.loads(flowrl("facts", game.name, "--json").out)
    assert [each["action"] for each in told["recipes"]] == [each.action for each in facts.recipes]
    assert told["game"] == game.name


@pytest.mark.craftax
def test_tables_are_those_of_the_installed_modules():
    tables = {table.title: table for table in facts_of(FULL.name).tables}
    floors = {row[0]: row for row in tables["Floors"].rows}
    assert floors["0 OVERWORLD"][2] == "COAL 3.00%, IRON 2.00%, DIAMOND 0.10%"
    assert "ENCHANTMENT_TABLE_ICE" in floors["3 SEWERS"][1]
    assert "ENCHANTMENT_TABLE_FIRE" in floors["4 VAULT"][1]
    mobs = {row[0]: row for row in tables["Mobs"].rows}
    assert mobs["KNIGHT"] == ("KNIGHT", "melee", "4", "12", "6 0 0", "0.5 0 0")
    assert mobs["BAT"][1:4] == ("passive", "2 5 6 7", "4")
    limits = dict(tables["Limits"].rows)
    assert limits["bag_of_each_item"] == "99"
    assert (limits["monsters_killed_to_clear_level"], limits["max_attribute"]) == ("8", "5")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "Craftax-Symbolc-v1",
            "the game Craftax-Symbolc-v1 is unknown; closest are 'Craftax-Symbolic-v1'",
        ),
        ("Navix-DoorKey-Random-8x8-v0", "has no probes, so its facts are not known; give it some"),
    ],
    ids=["unknown", "without probes"],
)
def test_a_game_without_facts_is_refused_in_one_line(name, why, flowrl):
    error = flowrl("facts", name, code=2).err
    assert why in error
    assert error.count("\n") == 1


def test_another_version_of_craftax_is_refused_in_one_line(monkeypatch, tmp_path, flowrl):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    real = metadata.version
    monkeypatch.setattr(craftax, "version", lambda name: "1.7.2")
    assert real("craftax").startswith(craftax._PINNED)
    error = flowrl("facts", FULL.name, code=2).err
    assert "craftax 1.7.2 is installed, but its rules are probed as of 1.6.x; pip install" in error
    assert error.count("\n") == 1


def test_the_pinned_version_is_the_one_of_the_package():
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    least, _ = next(each for each in needs if each.startswith("craftax")).split(",")
    assert least.removeprefix("craftax>=") + "." == craftax._PINNED


def test_a_page_is_written_to_no_other_kind_of_file(tmp_path, flowrl):
    error = flowrl("facts", FULL.name, "-o", tmp_path / "page.txt", code=2).err
    assert "does not end in .md; choose one" in error


class Counted:
    """Probes of a game of one dial, whose maker counts how often it is asked."""

    made = 0

    def __new__(cls):
        cls.made += 1
        raise RuntimeError("probed")


def test_kept_facts_are_read_and_damaged_ones_made_again(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    game = replace(FULL, name="Mine-v1", probes=Counted)
    monkeypatch.setattr(asking, "find_game", lambda name: game)
    path = tmp_path / "facts" / f"Mine-v1-{asking._digest(game)}.json"
    facts = Facts(game="Mine-v1", recipes=(), tables=(), unprobed={"luck": "it is"}, names={})
    path.parent.mkdir()
    asking.records.write(path, facts)
    assert facts_of("Mine-v1") == facts
    path.write_text(path.read_text().replace("luck", "lock"))
    with pytest.raises(RuntimeError, match="probed"):
        facts_of("Mine-v1")
    assert "is damaged; the game is probed again" in caplog.text
