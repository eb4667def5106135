"""Runs that train as threads of one process, by the programs that users call."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.config import BottomUpConfig, LaunchConfig, PPOConfig, checked, to_argv
from flowrl.errors import EXIT_RESUMABLE, ConfigError, LaunchError, TrainingError
from flowrl.experts.store import ExpertStore
from flowrl.games.base import find_game
from flowrl.launchers import process
from flowrl.launchers.base import Job, Lost
from flowrl.launchers.local import LocalLauncher
from flowrl.launchers.run_status import read_start
from flowrl.launchers.tmux import TmuxLauncher
from flowrl.multiagent import packed
from flowrl.paths import GraphPaths
from flowrl.ppo import trainer
from flowrl.runs import read_progress, read_result, read_run
from flowrl.skills.graph import SkillGraph
from tests.parallel.making import LIBRARY, prepare
from tests.test_story import TINY
from tests.waiting import limit, until

SAPLING, DRINK = "Collect Sapling", "Collect Drink"
CONFIG = PPOConfig(
    total_timesteps=8 * 8 * 16,
    num_envs=8,
    num_steps=16,
    num_minibatches=2,
    update_epochs=2,
    max_task_steps=32,
    success_state_rate=1.0,
    log_seconds=0,
    acting_threads=1,
)
ENV = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
pytestmark = [pytest.mark.craftax, pytest.mark.timeout(900)]


def prepared(folder: Path, skill: str = SAPLING):
    graph = SkillGraph([LIBRARY[skill]])
    return prepare(GraphPaths(folder), skill, 0, {}, graph=graph, config=CONFIG).layout


def command(layout, pack: Path | None, config: PPOConfig, *, most: int = 2) -> list[str]:
    words = ["--module_path", str(layout.module), *to_argv(config)]
    packing = [f"--pack={most}", f"--pack_folder={pack}"] if pack else []
    return [sys.executable, "-m", "flowrl.ppo_flow", *words, *packing]


def begin(layout, pack: Path | None, config: PPOConfig = CONFIG) -> subprocess.Popen[str]:
    words = command(layout, pack, config)
    return subprocess.Popen(words, env=ENV, stderr=subprocess.PIPE, text=True)


def shared_trainer(pack: Path) -> list[int]:
    words = ["-m", "flowrl.multiagent.packed", str(pack)]
    own, found = "\0".join(words).encode(), []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # the process has ended
            found += [int(path.parent.name)] if own in path.read_bytes() else []
    return found


def is_training(layout) -> bool:
    found = read_progress(layout)
    return found is not None and found.updates > 0


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The result of a run in a process of its own."""
    layout = prepared(tmp_path_factory.mktemp("alone"))
    run = begin(layout, None)
    said = run.communicate(timeout=limit(300))[1]
    assert run.returncode == 0, said
    return read_result(layout)


def same(result, other) -> bool:
    one, two = (replace(it, run_id="", wall_seconds=0.0, experts=()) for it in (result, other))
    contents = [[expert.content for expert in it.experts] for it in (result, other)]
    return one == two and contents[0] == contents[1]


def test_a_packed_run_ends_with_the_bits_of_one_by_itself_and_fails_alone(tmp_path, alone):
    good, bad = prepared(tmp_path / "good"), prepared(tmp_path / "bad", DRINK)
    diverging = replace(CONFIG, lr=1e12, vf_coef=1e12, max_grad_norm=1e12)
    runs = [begin(good, tmp_path / "pack"), begin(bad, tmp_path / "pack", diverging)]
    until(lambda: len(shared_trainer(tmp_path / "pack")) == 1, seconds=60)
    said = [run.communicate(timeout=limit(300))[1] for run in runs]
    assert [run.returncode for run in runs] == [0, TrainingError.exit_code], said
    assert "not finite; lower --lr" in said[1]
    assert "not finite" not in said[0]
    assert "Collect Sapling" in said[0]
    assert "Collect Sapling" not in said[1]
    assert same(read_result(good), alone)
    assert not bad.result_json.exists()
    until(lambda: not shared_trainer(tmp_path / "pack"), seconds=30)
    assert not (tmp_path / "pack" / "socket").exists()


@pytest.mark.slow
def test_a_run_whose_shared_trainer_is_killed_goes_on_from_its_checkpoint(tmp_path):
    layout, pack = prepared(tmp_path), tmp_path / "pack"
    longer = replace(CONFIG, total_timesteps=64 * CONFIG.total_timesteps)
    run = begin(layout, pack, longer)
    until(lambda: is_training(layout) or run.poll() is not None, seconds=200)
    run.send_signal(signal.SIGTERM)
    said = run.communicate(timeout=limit(60))[1]
    assert run.returncode == EXIT_RESUMABLE, said
    done = read_progress(layout).updates
    run = begin(layout, pack, longer)
    until(lambda: read_progress(layout).updates > done + 1 or run.poll() is not None, seconds=200)
    (killed,) = shared_trainer(pack)
    os.kill(killed, signal.SIGKILL)
    said = run.communicate(timeout=limit(60))[1]
    assert run.returncode == LaunchError.exit_code, said
    assert "the shared trainer was killed" in said
    assert int(re.search(r"training · update (\d+)", said)[1]) >= done > 0
    run = begin(layout, pack, longer)
    said = run.communicate(timeout=limit(300))[1]
    assert run.returncode == 0, said
    assert read_result(layout).frames == longer.total_timesteps


@pytest.mark.slow
def test_a_killed_run_ends_no_other_and_keeps_its_lock_until_its_thread_has_ended(tmp_path):
    layouts = [prepared(tmp_path / skill, skill) for skill in (SAPLING, DRINK)]
    launcher, pack = LocalLauncher(), tmp_path / "pack"
    longer = replace(CONFIG, total_timesteps=64 * CONFIG.total_timesteps)
    jobs = [
        Job(
            name=f"flowrl_e0_{layout.folder.name}",
            run_id=read_run(layout).run_id,
            argv=tuple(command(layout, pack, longer)),
            env=ENV,
            cwd=Path.cwd(),
            folder=layout.folder,
        )
        for layout in layouts
    ]
    handles = [launcher.launch(job) for job in jobs]
    until(lambda: all(map(is_training, layouts)), seconds=300)
    (trainer,) = shared_trainer(pack)
    assert trainer in process.with_open_file(layouts[0].folder / "run.lock")
    start = read_start(layouts[0].folder, jobs[0].run_id)
    for pid in (start.runner_pid, start.job_pid):
        os.kill(pid, signal.SIGKILL)
    killed = until(lambda: launcher.poll(handles[0], layouts[0].folder), seconds=60)
    assert isinstance(killed, Lost)
    assert not layouts[0].result_json.exists()
    assert shared_trainer(pack) == [trainer]
    assert launcher.poll(handles[1], layouts[1].folder) is None
    launcher.stop(handles[1], layouts[1].folder)
    assert until(lambda: launcher.poll(handles[1], layouts[1].folder), seconds=60).code == 85


def test_an_exception_of_a_run_is_in_its_log_and_ends_it_with_1(tmp_path, monkeypatch):
    def run(config, stop):
        raise MemoryError("no memory for this run")

    monkeypatch.setattr(trainer, "run", run)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, (tmp_path / "log").open("w") as log:
        thread = threading.Thread(target=packed._serve, args=(its,))
        thread.start()
        request = json.dumps({"argv": ["--module_path", "x/0.py"]}).encode()
        socket.send_fds(ours, [request], [log.fileno()])
        assert json.loads(ours.recv(1000)) == {"exit": 1}
        thread.join()
        assert ours.recv(1000) == b"", "the connection is closed"
    assert "MemoryError: no memory for this run" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_a_run_trains_by_itself_where_the_pack_is_full(tmp_path, alone):
    first, second = prepared(tmp_path / "first"), prepared(tmp_path / "second")
    pack, longer = tmp_path / "pack", replace(CONFIG, total_timesteps=10**6)
    runs = [subprocess.Popen(command(first, pack, longer, most=1), env=ENV)]
    until(lambda: is_training(first) or runs[0].poll() is not None, seconds=200)
    found = subprocess.run(
        command(second, pack, CONFIG, most=1),
        env=ENV,
        capture_output=True,
        text=True,
        timeout=limit(300),
        check=False,
    )
    runs[0].send_signal(signal.SIGTERM)
    assert found.returncode == 0, found.stderr
    assert "the pack is full" in found.stderr
    assert same(read_result(second), alone)
    assert runs[0].wait(timeout=limit(60)) == EXIT_RESUMABLE


@pytest.mark.parametrize(
    "limits", [{"cpus_per_run": 1}, {"run_memory": 2**30}, {"sandbox": "bwrap"}]
)
def test_limits_of_single_runs_are_refused_for_packed_ones(limits):
    with pytest.raises(ConfigError, match=r"--pack 4 and .* exclude each other"):
        checked(BottomUpConfig(launch=LaunchConfig(pack=4, **limits)))


@pytest.mark.slow
@pytest.mark.tmux
def test_a_packed_graph_merges_each_skill_once_and_trains_a_foreign_one_apart(tmp_path):
    mine, root = tmp_path / "mine", tmp_path / "graph"
    mine.mkdir()
    library = find_game(CONFIG.env_name).library_folder
    shutil.copy(library / "01_collect_sapling.py", mine)
    command = [sys.executable, "-m", "flowrl.bottomup_parallel", str(root), "--max_nodes", "4"]
    flags = ["--max_parallel_skills", "4", "--pack", "3", "--skills_dir", str(mine)]
    socket = str(tmp_path / "socket")
    try:
        found = subprocess.run(
            [*command, *flags, "--tmux_socket", socket, *TINY],
            check=False,
            capture_output=True,
            text=True,
            timeout=limit(500),
        )
    finally:
        TmuxLauncher(socket)._server.run("kill-server")
    assert found.returncode == 0, found.stderr
    manifest = ExpertStore(GraphPaths(root)).manifest()
    assert len(manifest.experts) == len(manifest.merged) == 4
    apart = [line for line in found.stderr.splitlines() if "in a process of its own" in line]
    assert len(apart) == 1
    assert f"{SAPLING} is no skill of the game's library" in apart[0]
    packed_runs = (root / "pack" / "trainer.log").read_text()
    assert "Collect Drink" in packed_runs
    assert SAPLING not in packed_runs
