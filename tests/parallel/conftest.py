"""A daemon per test, in a folder and a world of its own."""

from __future__ import annotations

import pytest

from flowrl.parallel.scheduler import SkillScheduler
from flowrl.paths import GraphPaths
from tests.parallel.scheduling import Clock, FakeBackend, FakeLauncher, World


@pytest.fixture
def graph_paths(tmp_path) -> GraphPaths:
    return GraphPaths(tmp_path / "graph")


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def world(tmp_path):
    return World(root=tmp_path / "runs")


@pytest.fixture
def start(tmp_path, world, clock):
    """Start a daemon in the same folder, and add skills: "B < A" needs A.

    The daemon before it is gone by then.
    """
    daemons = []

    def start_one(*skills, **settings):
        while daemons:
            daemons.pop().close()
        settings = {"min_success_rate": 0.0, **settings}
        launcher = FakeLauncher(world, on_wait=lambda: clock.pass_seconds(1))
        daemon = SkillScheduler(tmp_path / "graph", launcher=launcher, clock=clock, **settings)
        daemon.set_callbacks(backend=FakeBackend(world))
        daemons.append(daemon)
        for name, _, need in (skill.partition(" < ") for skill in skills):
            daemon.add_skill(name, {}, [need] if need else [])
        return daemon

    yield start_one
    while daemons:
        daemons.pop().close()
