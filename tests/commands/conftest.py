"""A graph with merged experts, as the tests of fsck, rollback and recover spoil it."""

from __future__ import annotations

import shutil

import pytest

from flowrl.config import PPOConfig
from flowrl.parallel.recovery import recover_state
from flowrl.parallel.skill_sources import SkillSources, record_graph
from flowrl.paths import GraphPaths
from flowrl.storage import records
from tests.parallel.making import LIBRARY, TABLE, WOOD, train


@pytest.fixture(scope="session")
def template(tmp_path_factory) -> GraphPaths:
    """Expert 0 in two versions, of generations 1 and 3, and expert 1 in one of generation 2."""
    graph_paths = GraphPaths(tmp_path_factory.mktemp("template") / "graph")
    book = SkillSources(graph_paths)
    train(graph_paths, WOOD, 0, {}, acted={0: 50})
    train(graph_paths, TABLE, 1, {WOOD: 0}, acted={1: 20})
    train(graph_paths, WOOD, 0, {}, acted={0: 20})
    for skill in (WOOD, TABLE):
        book.record(LIBRARY[skill])
    flags = {"env_name": "Craftax-Classic-Symbolic-v1", "egocentric": True}
    records.write(graph_paths.config_json, {"format": 1, **flags})
    record_graph(graph_paths, PPOConfig())
    recover_state(graph_paths)
    return graph_paths


@pytest.fixture
def graph_paths(template, tmp_path) -> GraphPaths:
    shutil.copytree(template.root, tmp_path / "graph")
    return GraphPaths(tmp_path / "graph")
