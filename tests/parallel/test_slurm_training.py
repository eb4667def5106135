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
from tests.parallel.making import TABLE, WOOD
from tests.parallel.stand_in_story import Place, ended
from tests.waiting import until

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.xdist_group("slurm"),
]
SOON = ("--scheduler_poll_interval=1", "--retry_backoff=0.1")
TINY = (
    *("--env_name=Tiny-v1", "--num_envs=32", "--num_steps=32", "--total_timesteps=40k"),
    *(
        "--max_task_steps=40",
        "--layer_size=16",
        "--lr=3e-3",
        "--success_state_rate=0.9",
        "--seed=5",
    ),
    *SOON,
)
SLURM = ("--launcher=slurm", *SOON, f"--target_skill={TABLE}")


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A graph whose trainers are stand-ins; its jobs are real."""
    made = Place(tmp_path)
    yield made
    made.end()


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


def test_an_sbatch_that_fails_costs_no_attempt_and_each_skill_asks_for_its_own(
    machines, place, monkeypatch
):
    """Slurm is silent at the second submission, and refuses the third."""
    real, calls = shutil.which("sbatch"), place.folder / "calls"
    lines = [
        f'case "$*" in *--test-only*) exec {real} "$@" ;; esac',
        f"echo x >> {calls}",
        f"case $(wc -l < {calls}) in",
        "2) echo 'sbatch: error: Unable to contact slurm controller' >&2; exit 1 ;;",
        "3) echo 'sbatch: error: Batch job submission failed: QOSMax' >&2; exit 1 ;;",
        "esac",
        f'exec {real} "$@"',
    ]
    program(place.folder / "bin" / "sbatch", "\n".join(lines))
    monkeypatch.setenv("PATH", f"{place.folder / 'bin'}:{os.environ['PATH']}")
    table = place.folder / "skills.toml"
    table.write_text(f'["{WOOD}"]\ncpus_per_run = 2\nslurm_args = ["partition=high", "time=9"]\n')
    words = ("--slurm_args", "partition=low", f"--skill_config={table}", "--max_retries=0")
    code, said = place.run(*SLURM, *words)
    assert code == 0, said
    assert calls.read_text().count("x") == 4
    assert place.launches() == [WOOD, TABLE]
    assert [run.split(".")[1] for run in place.merged()] == ["a1", "a1"]
    listed = machines.call("squeue", "--noheader", "--states=all", "--format=%k %P %c %l")
    jobs = [line.split() for line in listed.splitlines()]
    asked = [job[1:] for run in place.merged() for job in jobs if job[0].startswith(f"{run}.")]
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


def test_status_tells_what_a_queued_run_waits_for_and_attach_what_shows_it(machines, place, flowrl):
    blocker = machines.call(
        *("sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null"),
        *("--chdir=/", "--wrap=sleep 600"),
    ).strip()
    until(lambda: machines.idle() == 0, every=0.1)
    daemon = place.start(*SLURM)
    until(lambda: WOOD in place.statuses())

    def shown() -> str:
        rows = json.loads(flowrl("status", place.graph_paths.root, "--json").out)["skills"]
        return next((row["waits"] for row in rows if "Slurm" in row["waits"]), "")

    assert until(shown, every=0.1) in ("Slurm: Resources", "Slurm: Priority", "Slurm: None")
    assert "srun --jobid=" in flowrl("attach", place.graph_paths.root, WOOD, code=1).err
    assert shutil.which("tail")
    machines.call("scancel", blocker)
    code, said = ended(daemon)
    assert code == 0, said


@pytest.mark.parametrize(
    "words", [("--slurm_args", "partition=none"), ("--skill_config=skills.toml",)]
)
def test_a_bad_partition_is_one_line_and_nothing_on_disk(
    machines, tmp_path, monkeypatch, unchanged_sigterm, flowrl, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "skills.toml").write_text(f'["{TABLE}"]\nslurm_args = ["partition=none"]\n')
    said = flowrl("train", "graph", "--launcher=slurm", *words, code=2).err
    assert len(said.strip().split("\n")) == 1
    assert "invalid partition" in said.lower()
    assert not (tmp_path / "graph" / "scheduler_state.json").exists()
