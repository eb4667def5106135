"""A graph on a simulated cluster: nothing is lost or merged twice, and saves grow with skills."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from flowrl.parallel.status import Completed

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def scale():
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("scale_simulation")
    sys.path.remove(str(SCRIPTS))


HARD = {"lost_a_day": 2.0, "preempted_an_hour": 0.5, "crashes": 0.05, "unheard": 0.5}


@pytest.mark.parametrize(
    ("faults", "slot_minutes"),
    [({}, 0.0), (HARD, 0.0), (HARD, 10.0)],
    ids=["calm", "hard", "slots"],
)
def test_every_skill_is_merged_once_whatever_befalls_its_nodes(scale, faults, slot_minutes):
    cluster = scale.Cluster(nodes=20, **faults)
    simulation = scale.Simulation(scale.wide_graph(120), cluster, slot_minutes=slot_minutes)
    found = simulation.play()
    entries = simulation.state.entries
    completed = {name for name, entry in entries.items() if isinstance(entry.status, Completed)}
    assert set(found.merges) == completed
    assert found.merges.total() == len(completed) >= (100 if faults else 120)
    assert found.makespan >= found.ideal > 0
    assert found.launches - 120 >= found.charged > 0


def test_without_faults_the_nodes_are_kept_busy(scale):
    quiet = scale.Cluster(nodes=20, lost_a_day=0.0, preempted_an_hour=0.0, crashes=0.0)
    found = scale.Simulation(scale.wide_graph(200), quiet).play()
    assert (found.launches, found.charged, found.queued) == (200, 0, 0)
    assert found.makespan < 1.5 * found.ideal
    assert found.ready > 0
