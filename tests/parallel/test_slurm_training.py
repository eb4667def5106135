"""Real skills as jobs of a real Slurm: the experts are those of this machine, bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flowrl.experts.store import ExpertStore
from flowrl.paths import GraphPaths
from tests.games.installing import installed
from tests.launchers.slurm_cluster import Cluster, cluster, missing
from tests.machine import program
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


def test_an_sbatch_that_fails_in_the_middle_of_a_graph_costs_no_attempt(machines, tmp_path):
    """Slurm is silent at the second submission, and refuses the third."""
    real, calls = shutil.which("sbatch"), tmp_path / "calls"
    lines = [
        f'case "$*" in *--test-only*) exec {real} "$@" ;; esac',
        f"echo x >> {calls}",
        f"case $(wc -l < {calls}) in",
        "2) echo 'sbatch: error: Unable to contact slurm controller' >&2; exit 1 ;;",
        "3) echo 'sbatch: error: Batch job submission failed: QOSMax' >&2; exit 1 ;;",
        "esac",
        f'exec {real} "$@"',
    ]
    program(tmp_path / "bin" / "sbatch", "\n".join(lines))
    env = {**os.environ, "PYTHONPATH": installed(tmp_path)}
    env["PATH"] = f"{tmp_path / 'bin'}:{env['PATH']}"
    daemon = train(tmp_path, "graph", "--launcher=slurm", "--max_retries=0", env=env)
    _, said = daemon.communicate()
    assert daemon.returncode == 0, said
    assert calls.read_text().count("x") == 4
    merged = ExpertStore(GraphPaths(tmp_path / "graph")).manifest().merged
    assert [run.split(".")[1] for run in merged] == ["a1", "a1"]


def test_a_skill_asks_slurm_for_what_its_table_says(machines, tmp_path):
    (tmp_path / "skills.toml").write_text(
        '["Pick Berry"]\ncpus_per_run = 2\nslurm_args = ["partition=high", "time=9"]\n'
    )
    env = {**os.environ, "PYTHONPATH": installed(tmp_path)}
    words = ("--launcher=slurm", "--slurm_args", "partition=low", "--skill_config=skills.toml")
    daemon = train(tmp_path, "graph", *words, env=env)
    _, said = daemon.communicate()
    assert daemon.returncode == 0, said
    listed = machines.call("squeue", "--noheader", "--states=all", "--format=%k %P %c %l")
    jobs = [line.split() for line in listed.splitlines()]
    merged = ExpertStore(GraphPaths(tmp_path / "graph")).manifest().merged
    asked = [job[1:] for run in merged for job in jobs if job[0].startswith(f"{run}.")]
    assert [words[:2] for words in asked] == [["high", "2"], ["low", "1"]]
    assert asked[0][2] == "9:00"


def test_a_run_over_two_nodes_goes_on_once_a_process_on_the_second_is_lost(machines, tmp_path):
    env = {**os.environ, "PYTHONPATH": installed(tmp_path), "KEY": "7f3a"}
    words = ("--launcher=slurm", "--nodes_per_run=2", "--sandbox=none", "--pass_env=KEY")
    daemon = train(tmp_path, "graph", *words, "--target_skill=Pick Berry", env=env)
    second = until(of_second_node, every=0.1)
    assert "KEY" not in second.environ(), "it went through Slurm"
    assert machines.call("squeue", "--noheader", "--format=%D").split() == ["2"]
    second.kill()
    _, said = daemon.communicate()
    assert daemon.returncode == 0, said
    rows = [json.loads(line) for line in GraphPaths(tmp_path / "graph").events.open()]
    assert [row["status"] for row in rows].count("running") == 2, "it was started again"
    assert {row["attempt"] for row in rows} == {1}, "nothing is charged"
    assert list(experts(tmp_path / "graph")) == ["Pick Berry"]


def of_second_node() -> psutil.Process | None:
    """Return the trainer's second process, which a node has started."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            if "--process_id=1" in line and line[0] == sys.executable:
                return process
    return None


def test_status_tells_what_a_queued_run_waits_for_and_attach_what_shows_it(machines, tmp_path):
    env = {**os.environ, "PYTHONPATH": installed(tmp_path)}
    blocker = machines.call(
        *("sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null"),
        *("--chdir=/", "--wrap=sleep 600"),
    ).strip()
    until(lambda: machines.idle() == 0, every=0.1)
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


@pytest.mark.parametrize(
    "words", [("--slurm_args", "partition=none"), ("--skill_config=skills.toml",)]
)
def test_a_bad_partition_is_one_line_and_nothing_on_disk(machines, tmp_path, words):
    (tmp_path / "skills.toml").write_text('["Bake Pie"]\nslurm_args = ["partition=none"]\n')
    env = {**os.environ, "PYTHONPATH": installed(tmp_path)}
    daemon = train(tmp_path, "graph", "--launcher=slurm", *words, env=env)
    _, said = daemon.communicate()
    assert daemon.returncode == 2
    assert len(said.strip().split("\n")) == 1
    assert "invalid partition" in said.lower()
    assert not (tmp_path / "graph" / "scheduler_state.json").exists()
