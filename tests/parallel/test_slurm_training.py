"""Real skills as jobs of a real Slurm: the experts are those of this machine, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowrl.experts.store import ExpertStore
from flowrl.paths import GraphPaths
from tests.games.test_a_game_of_ones_own import installed
from tests.launchers.slurm_cluster import Cluster, cluster, missing
from tests.waiting import until

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.xdist_group("slurm"),
]
TINY = (
    *("--env_name=Tiny-v1", "--num_envs=32", "--num_steps=32", "--total_timesteps=40k"),
    *(
        "--max_task_steps=40",
        "--layer_size=16",
        "--lr=3e-3",
        "--success_state_rate=0.9",
        "--seed=5",
    ),
    *("--scheduler_poll_interval=1", "--retry_backoff=0.1"),
)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


def train(folder: Path, name: str, *words: str, env: dict[str, str]) -> subprocess.Popen[str]:
    argv = (sys.executable, "-m", "flowrl", "train", name, *TINY, *words)
    return subprocess.Popen(argv, cwd=folder, env=env, stderr=subprocess.PIPE, text=True)


def experts(graph: Path) -> dict[str, str]:
    manifest = ExpertStore(GraphPaths(graph)).manifest()
    return {version.skill: version.content for version in manifest.experts.values()}


def test_experts_are_those_of_this_machine_and_a_killed_scheduler_adopts_its_jobs(
    machines, tmp_path
):
    env = {**os.environ, "PYTHONPATH": installed(tmp_path)}
    local = train(tmp_path, "local", "--launcher=local", env=env)
    _, said = local.communicate()
    assert local.returncode == 0, said
    first = train(tmp_path, "slurm", "--launcher=slurm", env=env)
    state = tmp_path / "slurm" / "scheduler_state.json"
    until(lambda: "engine_id" in (state.read_text() if state.exists() else ""))
    first.send_signal(signal.SIGKILL)
    first.communicate()
    again = train(tmp_path, "slurm", "--launcher=slurm", env=env)
    _, said = again.communicate()
    assert again.returncode == 0, said
    assert experts(tmp_path / "slurm") == experts(tmp_path / "local")
    assert len(experts(tmp_path / "slurm")) == 2
    assert not list((tmp_path / "slurm" / "training_runs").glob("*.engine.json"))
    assert not list((tmp_path / "slurm" / "training_runs").glob("*.beat"))


def test_status_tells_what_a_queued_run_waits_for_and_attach_what_shows_it(machines, tmp_path):
    env = {**os.environ, "PYTHONPATH": installed(tmp_path)}
    blocker = machines.call(
        *("sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null"),
        *("--chdir=/", "--wrap=sleep 600"),
    ).strip()
    until(lambda: machines.idle() == 0)
    daemon = train(tmp_path, "graph", "--launcher=slurm", env=env)

    def shown() -> str:
        words = (sys.executable, "-m", "flowrl", "status", "graph", "--json")
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, check=False)
        rows = json.loads(done.stdout)["skills"] if done.returncode == 0 else []
        return next((row["waits"] for row in rows if "Slurm" in row["waits"]), "")

    assert until(shown) in ("Slurm: Resources", "Slurm: Priority", "Slurm: None")
    words = (sys.executable, "-m", "flowrl", "attach", "graph", "Pick Berry")
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "srun --jobid=" in done.stderr
    assert shutil.which("tail")
    machines.call("scancel", blocker)
    _, said = daemon.communicate()
    assert daemon.returncode == 0, said


def test_a_bad_partition_is_one_line_and_nothing_on_disk(machines, tmp_path):
    env = {**os.environ, "PYTHONPATH": installed(tmp_path)}
    daemon = train(tmp_path, "graph", "--launcher=slurm", "--slurm_args", "partition=none", env=env)
    _, said = daemon.communicate()
    assert daemon.returncode == 2
    assert len(said.strip().split("\n")) == 1
    assert "invalid partition" in said.lower()
    assert not (tmp_path / "graph" / "scheduler_state.json").exists()
