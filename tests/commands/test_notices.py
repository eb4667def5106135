from __future__ import annotations

import json

import pytest

from flowrl import notices
from flowrl.launchers import sandbox
from flowrl.paths import GraphPaths
from tests.commands.making import DONE, running, save


def test_a_notice_is_shown_until_it_is_withdrawn(tmp_path, flowrl):
    graph_paths = save(tmp_path, ("A", DONE))
    notices.publish(graph_paths, "disk", "paused (disk): no room in the graph's folder")
    assert "paused (disk): no room" in flowrl("status", tmp_path).out
    assert list(json.loads(flowrl("status", tmp_path, "--json").out)["notices"]) == ["disk"]
    notices.withdraw(graph_paths, "disk")
    notices.withdraw(graph_paths, "disk")
    assert notices.read(graph_paths) == {}


@pytest.mark.parametrize("key", ["disk", "command"])
def test_a_forged_notice_cannot_command_the_terminal(tmp_path, flowrl, key):
    graph_paths = save(tmp_path, ("A", DONE), ("B", running()))
    notices.publish(graph_paths, key, "flowrl \x1b[2Jtrain \x9b1m\u202e")
    said = flowrl("status", tmp_path, code=69).out
    assert "train" in said
    assert not {"\x1b", "\x9b", "\u202e"} & set(said)


def test_status_alone_says_how_trainers_are_confined(tmp_path, flowrl):
    graph_paths = save(tmp_path, ("A", DONE))
    notices.publish(graph_paths, sandbox.NOTICE, "trainers are not confined: no bubblewrap")
    assert "no bubblewrap" in flowrl("status", tmp_path).out
    assert "no bubblewrap" not in "".join(flowrl("skills", tmp_path))


def test_a_damaged_notice_says_so_and_hides_nothing(tmp_path):
    graph_paths = GraphPaths(tmp_path)
    notices.publish(graph_paths, "one", "first")
    graph_paths.notice("two").write_text("{")
    read = notices.read(graph_paths)
    assert read["one"] == "first"
    assert "cannot be read" in read["two"]


def test_a_notice_makes_no_graph_that_is_gone(tmp_path):
    with pytest.raises(FileNotFoundError):
        notices.publish(GraphPaths(tmp_path / "gone"), "filming", "no film")
    assert list(tmp_path.iterdir()) == []
