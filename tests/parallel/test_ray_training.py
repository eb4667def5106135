"""Real skills as jobs of a real Ray cluster: the experts are those of this machine, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from flowrl.experts.store import ExpertStore
from flowrl.launchers.ray import RayLauncher
from flowrl.paths import GraphPaths
from tests.games.installing import installed
from tests.launchers.ray_cluster import RayCluster, missing, ray_cluster
from tests.parallel.test_slurm_training import experts, train

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def machines() -> Iterator[RayCluster]:
    with ray_cluster() as made:
        yield made


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--target_skill=Pick Berry", "--total_timesteps=4k"), id="one skill"),
        pytest.param((), id="two skills", marks=pytest.mark.slow),
    ],
)
def test_experts_are_those_of_this_machine(machines, tmp_path, words):
    env = {**os.environ, "PYTHONPATH": installed(tmp_path)}
    on_ray = ("--launcher=ray", f"--ray_address={machines.address}")
    places = {"local": ("--launcher=local",), "ray": on_ray}
    daemons = [train(tmp_path, name, *at, *words, env=env) for name, at in places.items()]
    for daemon in daemons:
        _, said = daemon.communicate()
        assert daemon.returncode == 0, said
    assert experts(tmp_path / "ray") == experts(tmp_path / "local")
    merged = ExpertStore(GraphPaths(tmp_path / "ray")).manifest().merged
    assert len(merged) == (1 if words else 2)
    jobs = RayLauncher(machines.address).list_jobs()
    assert all(any(job.startswith(f"{run}.") for job in jobs) for run in merged)
    assert not list((tmp_path / "ray" / "training_runs").iterdir())
