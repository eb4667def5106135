"""The scheduler over real processes: it is killed at its fault points and started again."""

from __future__ import annotations

import json

import pytest

from tests.parallel import daemon_of_scripts
from tests.parallel.faults import killed_at

POINTS = [
    "write.scheduler_state.json",
    "scheduler.prepared",
    "scheduler.launched",
    "scheduler.merged",
]


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_daemon_adopts_its_runs_and_merges_each_once(tmp_path, point):
    assert killed_at(point, "tests.parallel.daemon_of_scripts", tmp_path)
    assert daemon_of_scripts.main(tmp_path) == 0
    state = json.loads((tmp_path / "graph" / "scheduler_state.json").read_text())
    merged = [line["run_id"] for line in state["skills"]]
    assert (tmp_path / "ledger").read_text().split() == merged
    assert [line["attempt"] for line in state["skills"]] == [1, 1]
    for run_id in merged:
        launches = (tmp_path / "runs" / run_id / "launches").read_text().split()
        assert launches == [run_id], "it was launched again instead of adopted"
