"""A daemon under load and faults, in its small form; `scripts/chaos_load.py` is the large one."""

from __future__ import annotations

import random

import pytest

from tests.chaos.load import FAULTS, Load, play, temp_files
from tests.waiting import limit

LEFT = ("run_folders_left", "processes_left", "temp_files_left")
ZERO = ("lost", "merged_twice", "gave_up", *LEFT)


@pytest.fixture
def load(tmp_path):
    load = Load(root=tmp_path, skills=200, runs=100, slots=4, chance=random.Random(1))
    yield load
    load.end()


def test_a_loaded_daemon_loses_nothing_and_leaves_nothing(load):
    found = play(load, every_seconds=(0.2, 0.5), limit_seconds=limit(240))
    assert found["runs"] == load.runs
    assert {name: found[name] for name in ZERO} == dict.fromkeys(ZERO, 0), temp_files(load.root)
    assert len(found["faults"]) >= len(FAULTS) - 1
    most = max(phase["most_fds"] for phase in found["phases"])
    assert most < 4 + 4 * load.slots, "descriptors leak"
