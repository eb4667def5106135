"""What no repair may go past: flowrl says what is in the way, and changes nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flowrl.errors import FileRefusedError
from flowrl.experts import repair
from flowrl.experts.store import ExpertStore
from flowrl.parallel.health import DaemonLock
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.parallel.training_processor import recover_graph
from flowrl.paths import GraphPaths
from tests.commands.repairing import flip, flowrl, fsck, statuses, version_file
from tests.experts.making import contents
from tests.parallel.making import PICKAXE, TABLE, WOOD, frames, prepare

Damage = Callable[[GraphPaths], object]


def move_away(path: Path, elsewhere: Path) -> None:
    """To the bigger disk: a link is left in its place."""
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def make_odd(kind: str, path: Path) -> None:
    """Put something else in the place of a file or a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    {
        "a file": lambda: path.write_text("x"),
        "a folder": path.mkdir,
        "a link": lambda: path.symlink_to("/nowhere"),
        "a pipe": lambda: os.mkfifo(path),
    }[kind]()


def linked(*words: str) -> Damage:
    return lambda g: move_away(g.root.joinpath(*words), g.root.with_name("big"))


def odd(kind: str, *words: str) -> Damage:
    return lambda g: make_odd(kind, g.root.joinpath(*words))


IN_THE_WAY: dict[str, Damage] = {
    "linked skills": linked("skills"),
    "linked checkpoints": linked("checkpoints"),
    "linked history": linked("checkpoints", "history"),
    "linked skill files": linked("skill_files"),
    "linked runs": odd("a link", "training_runs"),
    "history is a file": odd("a file", "checkpoints", "history"),
}


@pytest.mark.parametrize("damage", IN_THE_WAY.values(), ids=IN_THE_WAY.keys())
def test_a_folder_that_is_elsewhere_stops_every_repair(graph_paths, capsys, damage):
    flip(version_file(graph_paths, 1))  # of which a repair would make the best it can
    damage(graph_paths)
    before = everything(graph_paths)
    for command in (("fsck",), ("fsck", "--repair"), ("recover",), ("rollback", "1")):
        code, said = flowrl(capsys, command[0], graph_paths.root, *command[1:])
        assert (code, said.count("\n")) == (1, 1), said
        assert "flowrl follows no links inside a graph" in said
    assert everything(graph_paths) == before


NOT_SET_ASIDE: dict[str, Damage] = {
    "linked expert": linked("skills", "1_Place_Table"),
    "linked quarantine": odd("a link", "quarantine"),
    "quarantine is a file": odd("a file", "quarantine"),
    "global.lock is a folder": odd("a folder", "checkpoints", "global.lock"),
}


@pytest.mark.parametrize("damage", NOT_SET_ASIDE.values(), ids=NOT_SET_ASIDE.keys())
def test_an_expert_is_not_given_up_that_cannot_be_set_aside(graph_paths, damage):
    flip(version_file(graph_paths, 1))
    damage(graph_paths)
    store = ExpertStore(graph_paths)
    with pytest.raises(FileRefusedError, match=r"follows no links|not a plain file"):
        repair.drop(store, store.manifest().experts[1], "it is damaged")
    assert frames(graph_paths) == {0: 70, 1: 20}


@pytest.mark.parametrize("kind", ["a pipe", "a link", "a folder"])
def test_a_lock_that_is_no_file_stops_every_repair(graph_paths, capsys, kind):
    odd(kind, "daemon.lock")(graph_paths)
    for command in (("fsck", "--repair"), ("recover",), ("rollback", "1")):
        code, said = flowrl(capsys, command[0], graph_paths.root, *command[1:])
        assert (code, said.count("\n")) == (1, 1), said
        assert "daemon.lock is not a plain file" in said


def everything(graph_paths: GraphPaths) -> dict[str, object]:
    """All that a graph's folder holds, links and pipes too, but for who held the claim last."""
    found: dict[str, object] = {}
    for path in sorted(graph_paths.root.rglob("*")):
        plain = path.is_file() and not path.is_symlink()
        if path != graph_paths.daemon_lock or not plain:
            found[str(path)] = path.read_bytes() if plain else path.lstat().st_mode
    return found


def test_a_moved_folder_that_is_moved_back_is_as_it_was(graph_paths, capsys):
    whole = contents(graph_paths)
    elsewhere = graph_paths.root.with_name("big")
    graph_paths.skills.rename(elsewhere)
    graph_paths.skills.symlink_to(elsewhere)
    for _ in range(2):
        assert fsck(capsys, graph_paths, "--repair")[0] == 1
    graph_paths.skills.unlink()
    elsewhere.rename(graph_paths.skills)
    assert fsck(capsys, graph_paths)[0] == 0
    assert contents(graph_paths) == whole


def test_neither_the_scheduler_nor_a_run_starts_over_a_moved_folder(graph_paths):
    linked("skills")(graph_paths)
    for start in (
        lambda: SkillScheduler(graph_paths.root).state,
        lambda: recover_graph(graph_paths),
        lambda: prepare(graph_paths, PICKAXE, 2, {WOOD: 0, TABLE: 1}),
    ):
        with pytest.raises(FileRefusedError, match="follows no links inside a graph"):
            start()
    assert frames(graph_paths) == {0: 70, 1: 20}


def test_a_whole_graph_behind_a_link_is_fine(graph_paths, capsys):
    link = graph_paths.root.with_name("link")
    link.symlink_to(graph_paths.root)
    assert flowrl(capsys, "fsck", link, "--repair")[0] == 0


def test_what_cannot_be_set_aside_is_said_and_the_rest_is_mended(graph_paths, capsys):
    flip(version_file(graph_paths, 1))
    (graph_paths.quarantine / "skills").mkdir(parents=True, mode=0o700)
    make_odd("a file", graph_paths.quarantine / "skills" / "1_Place_Table")
    graph_paths.scheduler_state.unlink()
    code, said = fsck(capsys, graph_paths, "--repair")
    assert code == 1
    assert "not repaired: " in said
    assert frames(graph_paths) == {0: 70, 1: 20}
    assert statuses(graph_paths) == {WOOD: "completed", TABLE: "completed"}
    (graph_paths.quarantine / "skills" / "1_Place_Table").unlink()
    assert fsck(capsys, graph_paths, "--repair")[0] == 0


def test_a_lock_that_is_a_pipe_is_refused_at_once(tmp_path):
    make_odd("a pipe", tmp_path / "daemon.lock")
    with pytest.raises(FileRefusedError, match="not a plain file"):
        DaemonLock(tmp_path / "daemon.lock").acquire()
