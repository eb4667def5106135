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
from flowrl.errors import EXIT_IO, EXIT_RESUMABLE, ConfigError, TrainingError
from flowrl.experts.store import ExpertStore
from flowrl.games.base import find_game
from flowrl.launchers import process
from flowrl.launchers.base import ExitCause, Exited, Job, Lost
from flowrl.launchers.local import LocalLauncher
from flowrl.launchers.run_status import read_start
from flowrl.launchers.tmux import TmuxLauncher
from flowrl.multiagent import packed
from flowrl.parallel import outcomes
from flowrl.parallel.events import RunEnded
from flowrl.paths import GraphPaths, RunPaths
from flowrl.ppo import trainer
from flowrl.runs import digest_of_sources, read_progress, read_result, read_run
from flowrl.skills.graph import SkillGraph
from flowrl.storage import locks
from tests.parallel.making import LIBRARY, prepare
from tests.parallel.test_outcomes import ENTRY, RUNNING, context
from tests.test_story import TINY
from tests.waiting import limit, until

SAPLING, DRINK = "Collect Sapling", "Collect Drink"
CONFIG = PPOConfig(  # of the shapes of TINY, so programs are shared with the story
    total_timesteps=8 * 16 * 16,
    num_envs=16,
    num_steps=16,
    num_minibatches=4,
    update_epochs=1,
    max_task_steps=32,
    success_state_rate=1.0,
    log_seconds=0,
    acting_threads=1,
)
ENV = {**os.environ, "JAX_PLATFORMS": "cpu"}
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
    log = tmp_path / "pack" / "trainer.log"
    log.parent.mkdir()
    log.write_text("of the trainer before\n")
    runs = [begin(good, tmp_path / "pack"), begin(bad, tmp_path / "pack", diverging)]
    until(lambda: len(shared_trainer(tmp_path / "pack")) == 1, seconds=60)
    said = [run.communicate(timeout=limit(300))[1] for run in runs]
    assert [run.returncode for run in runs] == [0, TrainingError.exit_code], said
    assert "not finite; lower --lr" in said[1]
    assert "not finite" not in said[0]
    assert "trains in this process" not in "".join(said)
    before, *lines = log.read_text().splitlines()
    assert before == "of the trainer before"
    assert {line.split()[1] for line in lines if SAPLING in line} == {f"{good.folder.name}:"}
    assert {line.split()[1] for line in lines if DRINK in line} == {f"{bad.folder.name}:"}
    assert "Collect Sapling" in said[0]
    assert "Collect Sapling" not in said[1]
    assert same(read_result(good), alone)
    assert not bad.result_json.exists()
    until(lambda: not shared_trainer(tmp_path / "pack"), seconds=30)


@pytest.mark.slow
def test_a_run_whose_shared_trainer_is_killed_goes_on_as_one_by_itself(tmp_path):
    layout, pack = prepared(tmp_path), tmp_path / "pack"
    longer = replace(CONFIG, total_timesteps=32 * CONFIG.total_timesteps)
    run = begin(layout, pack, longer)
    until(lambda: is_training(layout) or run.poll() is not None, seconds=200)
    run.send_signal(signal.SIGTERM)
    said = run.communicate(timeout=limit(60))[1]
    assert run.returncode == EXIT_RESUMABLE, said
    done, apart = read_progress(layout).updates, RunPaths(tmp_path / "apart", 0)
    shutil.copytree(layout.folder, apart.folder)
    run = begin(layout, pack, longer)
    until(lambda: read_progress(layout).updates > done + 1 or run.poll() is not None, seconds=200)
    (killed,) = shared_trainer(pack)
    os.kill(killed, signal.SIGKILL)
    said = run.communicate(timeout=limit(60))[1]
    assert run.returncode == EXIT_IO, said
    assert "the shared trainer has ended" in said
    assert int(re.search(r"training · update (\d+)", said)[1]) >= done > 0
    runs = [begin(layout, pack, longer), begin(apart, None, longer)]
    said = [run.communicate(timeout=limit(300))[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    assert read_result(layout).frames == longer.total_timesteps
    assert same(read_result(layout), read_result(apart))


@pytest.mark.slow
def test_a_killed_run_ends_no_other_and_keeps_its_lock_until_its_thread_has_ended(tmp_path):
    layouts = [prepared(tmp_path / skill, skill) for skill in (SAPLING, DRINK)]
    launcher, pack = LocalLauncher(), tmp_path / "pack"
    longer = replace(CONFIG, total_timesteps=32 * CONFIG.total_timesteps)
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


def asking(connection, log: Path, code: str = "code") -> None:
    """Ask for a run as its own process does."""
    with log.open("w") as opened:
        words = json.dumps([code, "--module_path", "x/0.py"]).encode()
        socket.send_fds(connection, [words], [opened.fileno()])


def test_an_exception_of_a_run_is_in_its_log_and_ends_it_with_1(tmp_path, monkeypatch):
    def run(config, stop):
        raise MemoryError("no memory for this run")

    monkeypatch.setattr(trainer, "run", run)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    thread = threading.Thread(target=packed._serve, args=(its, "code"))
    with ours:
        asking(ours, tmp_path / "log")
        thread.start()
        assert json.loads(ours.recv(1000)) == 1
    thread.join()
    assert "MemoryError: no memory for this run" in (tmp_path / "log").read_text()


HANGING = """
import sys, time
from flowrl.multiagent import packed
from flowrl.parallel import outcomes
from flowrl.parallel.events import RunEnded

def hang(argv, stop, log):
    print("it hangs", file=log)
    time.sleep(600)

packed._train, packed._HUNG_SECONDS = hang, 0.1
sys.exit(packed.main(sys.argv[1:]))
"""


def test_a_run_that_hangs_ends_the_shared_trainer_and_charges_no_other_run(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(tmp_path / "socket"))
        server.listen()
        own = [str(tmp_path), "2", str(server.fileno()), digest_of_sources()]
        words = [sys.executable, "-c", HANGING, *own]
        shared = subprocess.Popen(
            words, pass_fds=[server.fileno()], stderr=subprocess.PIPE, text=True
        )
    words = [sys.executable, "-m", "flowrl.ppo_flow", "--module_path", str(tmp_path / "0.py")]
    words += ["--pack=2", f"--pack_folder={tmp_path}"]
    other = subprocess.Popen(words, env=ENV, stderr=subprocess.PIPE, text=True)
    assert other.stderr.readline() == "it hangs\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ours:
        ours.connect(str(tmp_path / "socket"))
        asking(ours, tmp_path / "log", digest_of_sources())
    said = shared.communicate(timeout=limit(60))[1]
    assert shared.returncode == 1
    (line,) = said.splitlines()
    assert "a run hangs, 0.1 s after its own process has ended: --module_path x/0.py;" in line
    assert "the shared trainer has ended; see" in other.communicate(timeout=limit(60))[1]
    entry = ENTRY
    for _ in range(4):
        ended = RunEnded("A", "e0.a1.x", Exited(cause=ExitCause.EXIT, code=other.returncode))
        entry = outcomes.after_end(replace(entry, status=RUNNING), ended, context())
    assert (entry.failures, entry.status.run_id) == (0, RUNNING.run_id)


class Served:
    """A shared trainer in a thread of this process; its runs last until they may end."""

    def __init__(self, folder: Path, monkeypatch) -> None:
        self.address, self.log, self.end = str(folder / "socket"), folder / "log", threading.Event()
        self._patch = monkeypatch
        monkeypatch.setattr(packed, "_train", self._run)
        monkeypatch.setattr(packed, "_IDLE_SECONDS", 60.0)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server.bind(self.address)
        server.listen()
        words = [str(folder), "1", str(server.detach()), "code"]
        self._thread = threading.Thread(target=packed.main, args=(words,))
        self._thread.start()

    def _run(self, *_) -> int:
        assert self.end.wait(limit(60))
        return 0

    def ask(self, code: str = "code") -> socket.socket:
        """A connection by which a run was asked for."""
        connection = self.connect()
        asking(connection, self.log, code)
        return connection

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(limit(60))
        connection.connect(self.address)
        return connection

    def listens(self) -> bool:
        with suppress(ConnectionRefusedError), self.connect():
            return True
        return False

    def close(self) -> None:
        self._patch.setattr(packed, "_IDLE_SECONDS", 0.0)
        self.end.set()
        self.listens()  # wakes it
        self._thread.join(limit(60))
        assert not self._thread.is_alive()


@pytest.fixture
def served(tmp_path, monkeypatch):
    made = Served(tmp_path, monkeypatch)
    yield made
    made.close()


def test_a_shared_trainer_of_other_code_takes_no_run(served):
    with served.ask("other code") as ours:
        assert json.loads(ours.recv(1000)) is None


def test_a_shared_trainer_ends_after_so_many_runs_that_it_had_room_for(served, monkeypatch):
    monkeypatch.setattr(packed, "_MOST_RUNS", 2)
    with served.ask() as first:
        for _ in range(3):
            with served.ask() as refused:
                assert json.loads(refused.recv(1000)) is None
        served.end.set()
        assert json.loads(first.recv(1000)) == 0
    until(lambda: not [it for it in threading.enumerate() if "_serve" in it.name], seconds=30)
    served.end.clear()
    with served.ask() as second:
        until(lambda: not served.listens(), seconds=30)
        served.end.set()
        assert json.loads(second.recv(1000)) == 0


def test_a_shared_trainer_goes_on_listening_while_a_run_asks_or_the_lock_is_held(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(packed, "_LOCK_SECONDS", 0.1)
    address = str(tmp_path / "socket")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ours,
    ):
        server.bind(address)
        server.listen()
        ours.connect(address)
        assert not packed._leave(tmp_path, server)
        server.accept()[0].close()
        with locks.held(tmp_path / "lock", timeout_seconds=0):
            assert not packed._leave(tmp_path, server)
        assert packed._leave(tmp_path, server)
        assert server.fileno() == -1


def test_a_shared_trainer_whose_loop_fails_listens_no_more_and_ends_its_run(served, monkeypatch):
    def fail(*_):
        raise OSError("the disk is away")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(packed, "_leave", fail)
    monkeypatch.setattr(packed, "_MOST_RUNS", 1)
    with served.ask() as ours:
        until(lambda: not served.listens(), seconds=30)
        served.end.set()
        assert json.loads(ours.recv(1000)) == 0


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
    code = (library / "01_collect_sapling.py").read_text()
    changed = code.replace("inventory.sapling >= n", "n <= inventory.sapling")
    (mine / "01_collect_sapling.py").write_text(changed)
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
    assert "Place Table" in packed_runs
    assert SAPLING not in packed_runs
