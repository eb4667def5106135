"""A damaged manifest is restored, and never at the price of a merge."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl import storage
from flowrl.errors import FileRefusedError
from flowrl.experts.store import ExpertStore
from flowrl.parallel.training_processor import recover_graph
from tests.commands.repairing import flip, flowrl, fsck, write_ahead
from tests.experts.making import all_files
from tests.parallel.making import frames


def test_a_merge_that_was_about_to_count_counts_when_the_manifest_is_restored(graph_paths, capsys):
    write_ahead(graph_paths)
    flip(graph_paths.manifest)
    code, said = fsck(capsys, graph_paths, "--repair")
    assert code == 0
    assert "the manifest is generation 4 of its history again" in said
    assert ExpertStore(graph_paths).manifest().merged[-1] == "dead"


def test_a_manifest_is_not_restored_when_a_merge_would_be_lost(graph_paths, capsys):
    for path in (graph_paths.manifest, graph_paths.history / "3.json"):
        flip(path)
    before = all_files(graph_paths.root)
    code, said = fsck(capsys, graph_paths, "--repair")
    assert code == 1
    assert "these later versions would be lost: " in said
    assert all_files(graph_paths.root) == before
    source, target = said.partition("cp ")[2].split()[:2]
    Path(target).write_bytes(Path(source).read_bytes())
    assert ExpertStore(graph_paths).manifest().generation == 2


def test_an_older_manifest_is_restored_when_only_a_rollback_is_lost(graph_paths, capsys):
    assert flowrl(capsys, "rollback", graph_paths.root, 2)[0] == 0
    for path in (graph_paths.manifest, graph_paths.history / "4.json"):
        flip(path)
    code, said = fsck(capsys, graph_paths, "--repair")
    assert code == 0
    assert "generation 3 of its history again" in said
    assert frames(graph_paths) == {0: 70, 1: 20}


def test_experts_are_not_garbage_because_the_manifest_and_its_history_are_gone(graph_paths, capsys):
    storage.remove_tree(graph_paths.checkpoints)
    before = all_files(graph_paths.root)
    with pytest.raises(FileRefusedError, match="is lost"):
        recover_graph(graph_paths)
    code, said = fsck(capsys, graph_paths, "--repair")
    assert code == 1
    assert "restore" in said
    assert before.items() <= all_files(graph_paths.root).items()
