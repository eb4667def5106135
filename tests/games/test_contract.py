"""`flowrl check --game` names each promise that a game breaks."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import pytest

from flowrl.cli import main
from flowrl.commands.check import check_files
from flowrl.games.base import Game, find_game
from flowrl.games.craftax import CLASSIC
from flowrl.skills.validation import contract
from flowrl.skills.validation.dry_run import check_game
from tests.games.installing import HERE, forget_games, installed

# The file of the tiny game, the text in it, another text, and what the check says of it.
ENGINE, GAME = "tiny_engine.py", "tiny_game.py"
CLIP = "cell = jnp.clip("
RESET = "def reset(self, key: jax.Array) -> World:\n"
STEP = "        del key\n"
SEEN = "return jnp.concatenate([jax.nn.one_hot(world.cell, CELLS), carried.astype(jnp.float32)])"
KNOWN = "return {name: known[name] for name in names}"
OVER = "return jnp.zeros_like(world.cell, bool)"
HEAD = """import itertools
NUMBERS = itertools.count()
LEAKED = []
import jax.custom_batching
@jax.custom_batching.custom_vmap
def batched(x):
    return x
@batched.def_vmap
def _(size, batched, x):
    return x + 1, True
CELLS = 5"""
MUTABLE = "import dataclasses\n@jax.tree_util.register_dataclass\n@dataclasses.dataclass"
BREAKS = {
    "size": (GAME, "observation_size=7", "observation_size=6", "observe: it is float32[7]; "),
    "view": (GAME, "num_actions=4", "num_actions=4, view=(3, 3, 3)", "observe: view is (3, 3, 3)"),
    "heading": (GAME, "num_actions=4", "num_actions=4, heading=4", "observe: heading is 4; "),
    "no place": (GAME, "num_actions=4", "num_actions=4, cells=(2, 1)", "position: raises Attrib"),
    "two names": (GAME, '"cell_diff": "int', '"Cell": "int', "names: 'Cell' is taken twice"),
    "source": (GAME, '("tiny_game", "', '("tiny", "', "sources: there is no module tiny; "),
    "enum": (GAME, '{"OVEN", ', '{"STOVE", ', "enums: Cell of tiny_engine lacks STOVE"),
    "item": (
        GAME,
        '{"berry", "pie"}',
        '{"berry", "pie", "ale"}',
        "features: inventory: lacks ale; ",
    ),
    "feature": (GAME, '"cell_diff":', '"mood": "", "cell_diff":', "raises KeyError: 'mood' ("),
    "no library": (GAME, '"tiny_skills"', '"skills"', "library_folder: there is no folder "),
    "library": (GAME, '{"berry", "pie"}', '{"berry"}', "library_folder: "),
    "make": (GAME, "return TinyEngine()", "return TinyEngine(1)", "make: raises TypeError: "),
    "reset raises": (ENGINE, RESET, RESET + "        1 / 0\n", "reset: raises ZeroDivisionError: "),
    "reset random": (
        *(ENGINE, RESET, RESET + "        key = jax.random.key(np.random.randint(1 << 30))\n"),
        "reset: is another computation each time; ",
    ),
    "observe pair": (ENGINE, SEEN, SEEN + ", 0", "observe: has another structure than "),
    "observe int": (ENGINE, SEEN, SEEN + ".astype(int)", "observe: it is int32[7]; "),
    "observe nan": (ENGINE, SEEN, SEEN + " / world.cell", "observe: it is not finite in "),
    "print": (ENGINE, OVER, f"jax.debug.print('x'); {OVER}", "is_over: uses debug_"),
    "over kind": (ENGINE, OVER, OVER.replace(", bool", ""), "is_over: it is int32[]; the contract"),
    "python if": (ENGINE, CLIP, f"assert world.cell < 9; {CLIP}", "step: raises TracerBoolConv"),
    "world kind": (ENGINE, "cell.astype(jnp.int32)", "cell * 1.0", "step: .cell is float32[]; re"),
    "no reward": (ENGINE, ", bakes.astype(jnp.float32)", "", "step: has another structure"),
    "reward": (
        ENGINE,
        "bakes.astype(jnp.float32)",
        "bakes * jnp.ones(2)",
        "step: the reward is no number",
    ),
    "leak": (
        *(ENGINE, STEP, "        LEAKED.append(action)\n        action += LEAKED[0]\n"),
        "step: keeps a traced array from one call to the next (UnexpectedTracerError); ",
    ),
    "counter": (ENGINE, STEP, "        action += next(NUMBERS)\n", "step: is another computation"),
    "features": (ENGINE, KNOWN, "return known", "features: inventory: is not returned alone"),
    "text": (
        *(ENGINE, KNOWN, KNOWN.replace("known[name]", "'far' if name == 'cell' else known[name]")),
        "features: cell: raises TypeError: ",
    ),
    "no moment": (ENGINE, '"cell": cells,', "", "moments: cell: is missing; add it"),
    "short moment": (ENGINE, '"cell": cells,', '"cell": cells[:9],', "moments: the leaves begin"),
    "moment kind": (ENGINE, '"cell": cells,', '"cell": cells / 1,', "moments: cell: it is float"),
    "vmap": (
        ENGINE,
        "now.cell - before.cell",
        "batched(now.cell)",
        "features: is another value under jax.vmap",
    ),
}


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Installs a changed copy of the tiny game for this process; returns the game."""

    def install(file, text, instead) -> Game:
        shutil.copytree(HERE, tmp_path / "game")
        for name in (ENGINE, GAME):
            path = tmp_path / "game" / name
            code = path.read_text()
            if name == file:
                assert text in code
                code = code.replace(text, instead, 1)
            path.write_text(code.replace("CELLS = 5", HEAD, 1))
        for place in (installed(tmp_path).split(os.pathsep)[0], str(tmp_path / "game")):
            monkeypatch.syspath_prepend(place)
        return find_game("Tiny-v1")

    forget_games()
    yield install
    forget_games()


def test_the_tiny_game_keeps_its_contract(tiny):
    assert contract.broken_promises(tiny(GAME, "Tiny-v1", "Tiny-v1")) == []


@pytest.mark.parametrize(("file", "text", "instead", "why"), BREAKS.values(), ids=BREAKS)
def test_a_broken_promise_is_told_in_a_line(tiny, file, text, instead, why):
    lines = contract.broken_promises(tiny(file, text, instead))
    assert sum(why in line for line in lines) == 1, lines


def test_a_step_that_changes_its_world_is_told(tiny, tmp_path):
    game = tiny(ENGINE, "class World(NamedTuple):", f"{MUTABLE}\nclass World:")
    path = tmp_path / "game" / ENGINE
    path.write_text(path.read_text().replace(STEP, "        world.cell += 1\n"))
    what = "step: changes the world that it is given; return a new one"
    assert contract.broken_promises(game) == [what]


def test_without_moments_those_of_a_random_player_suffice_for_the_tiny_games_skills(
    tiny, tmp_path, monkeypatch
):
    game = tiny(ENGINE, "def moments(", "def unused_moments(")
    assert not hasattr(game.make(), "moments")
    assert contract.broken_promises(game) == []
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{tmp_path / 'game'}")
    checked = check_files(sorted((HERE / "tiny_skills").glob("*.py")))
    assert [each.why for each in checked] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Craftax-Classic-Symbolic-v1", "Craftax-Symbolic-v1"])
def test_the_games_of_craftax_keep_their_contract(name):
    assert check_game(name) == []


def test_the_command_tells_them_and_returns_1(tmp_path):
    game = tmp_path / "game"
    shutil.copytree(HERE, game)
    code = (game / GAME).read_text()
    code = code.replace("observation_size=7", "observation_size=6")
    (game / GAME).write_text(code.replace("from pathlib", "import jax\nfrom pathlib"))
    env = {**os.environ, "PYTHONPATH": installed(tmp_path).replace(str(HERE), str(game))}
    words = (sys.executable, "-m", "flowrl.cli", "check", "--game=Tiny-v1", "--json")
    told = subprocess.run(words, env=env, text=True, capture_output=True, check=False)
    broken = [
        "observe: it is float32[7]; observation_size says float32[6]",
        "make: its module imports JAX; import it inside of functions",
    ]
    assert (told.returncode, json.loads(told.stdout)) == (1, {"game": "Tiny-v1", "broken": broken})


def test_files_beside_a_game_and_unknown_games_are_refused(capsys):
    assert main(["check", "some.py", "--game", "Craftax-Symbolic-v1"]) == 2
    assert "--game takes no files" in capsys.readouterr().err
    assert main(["check", "--game", "Craftx-Symbolic-v1"]) == 2
    assert (
        "Craftx-Symbolic-v1 is unknown; closest are 'Craftax-Symbolic-v1'"
        in capsys.readouterr().err
    )


def test_moves_that_turn_the_player_another_way_are_told():
    moves = dataclasses.replace(CLASSIC, moves=(2, 1, 3, 4))
    with pytest.raises(contract._BrokenError, match=r"the player looks \[1, 0, 2, 3\], not left"):
        contract._check_moves(moves, CLASSIC.make())
    contract._check_moves(CLASSIC, CLASSIC.make())
