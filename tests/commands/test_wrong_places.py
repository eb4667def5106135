"""Any file or folder of a graph is something else: no command ends in a traceback or waits."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowrl import cli
from flowrl.paths import GraphPaths

COMMANDS = [
    ["status", "GRAPH"],
    ["status", "GRAPH", "--json"],
    ["skills", "GRAPH"],
    ["plan", "GRAPH", "Place Table"],
    ["why", "GRAPH", "Place Table"],
    ["logs", "GRAPH", "Collect Wood"],
    ["pause", "GRAPH", "Place Table"],
    ["retry", "GRAPH", "Place Table"],
    ["stop", "GRAPH"],
    ["fsck", "GRAPH"],
    ["fsck", "GRAPH", "--repair"],
    ["recover", "GRAPH"],
    ["rollback", "GRAPH", "1"],
    ["export", "GRAPH", "-o", "agent"],
    ["sweep", "status", "GRAPH"],
]
KINDS = ["file", "empty", "folder", "full folder", "dangling", "loop", "pipe"]
TEXTS = ["[1]", "{}", "[" * 5000, '{"a": "\\ud800"}', "\0" * 300]
KNOWN = (0, 1, 2, 69, 73, 74, 75)


def places_of(graph_paths: GraphPaths) -> list[Path]:
    """Every file that is there, and every place of a file that a graph may have."""
    there = [path for path in graph_paths.root.rglob("*") if "arrays" not in path.parts]
    holders = (graph_paths, graph_paths.archive(1, "Place Table"), graph_paths.run(2, "X"))
    named = [getattr(holder, name) for holder in holders for name in dir(type(holder))]
    each = {*there, *(path for path in named if isinstance(path, Path))} - {graph_paths.root}
    return sorted(path.relative_to(graph_paths.root) for path in each)


def spoil(path: Path, kind: str) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    match kind:
        case "folder" | "full folder":
            path.mkdir()
            if kind == "full folder":
                (path / "mine").touch()
        case "dangling" | "loop":
            path.symlink_to("/nowhere" if kind == "dangling" else path)
        case "pipe":
            os.mkfifo(path)
        case _:
            path.write_text({"file": "x", "empty": ""}.get(kind, kind))


@pytest.mark.timeout(300)
@given(data=st.data())
@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_whatever_is_in_a_files_place_a_command_says_so_and_ends(
    template, tmp_path, monkeypatch, capsys, data
):
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    monkeypatch.chdir(tmp_path)
    graph = shutil.copytree(template.root, tmp_path / "graph")
    place = data.draw(st.sampled_from(places_of(GraphPaths(template.root))))
    kind = data.draw(st.sampled_from([*KINDS, *TEXTS]))
    words = data.draw(st.sampled_from(COMMANDS))
    spoil(graph / place, kind)
    code = cli.main([word.replace("GRAPH", "graph") for word in words])
    said = capsys.readouterr().err
    assert code in KNOWN, said
    assert "Traceback" not in said
    assert "Paths(" not in said
