"""Several processes that train one run: real ones on the loopback, with tiny environments."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
from contextlib import suppress

import pytest

from flowrl import runs
from flowrl.command_line import parse
from flowrl.errors import EXIT_RESUMABLE, EXIT_USAGE, ConfigError
from flowrl.experts import checkpoint
from flowrl.ppo.processes import common_digest
from flowrl.ppo_flow import refuse_used_port
from flowrl.runs import TrainConfig
from tests.ppo.chaos_pair import FRAMES, begin, ended, follower_of, lives, one_of_two
from tests.ppo.modules import run_folder
from tests.waiting import AT_ONCE, until

FOREVER = ("--total_timesteps=1e9", "--no_anneal_lr", "--success_state_rate=1")
pytestmark = pytest.mark.timeout(300)


def errors(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("flowrl: ")]


def free_port() -> str:
    """A port that nobody listens on, below those that the system gives to whoever asks for any."""
    for port in random.sample(range(20_000, 32_000), 99):
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"
    raise AssertionError("no free port")


@pytest.fixture
def run_paths(tmp_path):
    return run_folder(tmp_path / "run")


def training(run_paths, trainer: subprocess.Popen[str]) -> int:
    """Wait until both processes train; the other's pid."""
    until(
        lambda: run_paths.metrics.exists() or trainer.poll() is not None, seconds=120, every=AT_ONCE
    )
    assert trainer.poll() is None, ended(trainer)
    return follower_of(trainer)


def updates(run_paths) -> int:
    return json.loads(run_paths.metrics.read_text().splitlines()[-1])["updates"]


def test_two_processes_train_what_two_devices_of_one_process_do(run_paths, tmp_path):
    one = run_folder(tmp_path / "one")
    hosts = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    alone = begin(one.folder, "--num_devices=2", XLA_FLAGS=hosts)
    assert ended(alone)[0] == 0
    late = {"LATE_PROCESS": "1", "LATE_SECONDS": "3"}
    code, said = ended(begin(run_paths.folder, "--num_processes=2", **late))
    assert (code, errors(said)) == (0, [])
    found, expected = (runs.read_result(folder) for folder in (run_paths, one))
    assert [e.content for e in found.experts] == [e.content for e in expected.experts]
    assert (found.updates, found.frames) == (6, 6 * FRAMES)


@pytest.mark.slow
@pytest.mark.parametrize("process", ["0", "1"])
def test_a_process_that_compiles_40_seconds_longer_is_waited_for(run_paths, process):
    late = {"LATE_PROCESS": process, "LATE_SECONDS": "40"}
    where = ("--num_processes=2", f"--coordinator={free_port()}")
    both = [begin(run_paths.folder, *where, f"--process_id={i}", **late) for i in (0, 1)]
    assert [ended(one)[0] for one in both] == [0, 0]
    assert runs.read_result(run_paths).updates == 6


def test_processes_that_differ_are_all_refused(run_paths, tmp_path):
    other = run_folder(tmp_path / "other")
    other.module.write_text(other.module.read_text() + "# another\n")
    where = ("--num_processes=2", f"--coordinator={free_port()}", "--num_devices=2")
    both = [
        begin(run_paths.folder, *where, "--process_id=0"),
        begin(other.folder, *where, "--process_id=1"),
    ]
    for code, said in map(ended, both):
        assert code == EXIT_USAGE, said
        (line,) = errors(said)
        assert "the 2 processes have different command lines, modules or sources; start all" in line
        assert "Traceback" not in said


def test_processes_differ_by_their_flags_their_modules_and_their_records(run_paths):
    def digest(*flags: str) -> str:
        words = [f"--module_path={run_paths.module}", "--num_processes=2", *flags]
        return common_digest(parse(TrainConfig, words))

    first, module = digest(), run_paths.module.read_text()
    where = ("--coordinator=127.0.0.1:9", "--process_id=1")
    assert digest(*where[:1]) == digest(*where)
    others = {digest("--lr=0.1"), digest(*where)}
    run_paths.module.write_text(f"{module}# another\n")
    others.add(digest())
    run_paths.module.write_text(module)
    assert digest() == first
    run_paths.run_json.write_text("{}")
    others.add(digest())
    assert len(others - {first}) == 4


@pytest.mark.parametrize("stopped", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stop_of_one_process_stops_all_and_the_run_goes_on(run_paths, stopped):
    trainer = begin(run_paths.folder, "--num_processes=2", *FOREVER)
    other = training(run_paths, trainer)
    os.kill(other if stopped else trainer.pid, signal.SIGTERM)
    code, said = ended(trainer)
    assert (code, errors(said)) == (EXIT_RESUMABLE, [])
    assert not lives(other)
    assert checkpoint.has_resume(run_paths.resume)
    before = updates(run_paths)
    budget = f"--total_timesteps={(before + 3) * FRAMES}"
    assert ended(begin(run_paths.folder, "--num_processes=2", *FOREVER, budget))[0] == 0
    result = runs.read_result(run_paths)
    assert (result.updates, result.frames) == (before + 3, (before + 3) * FRAMES)


def test_a_process_that_is_killed_ends_the_other_with_85_and_the_run_goes_on(run_paths):
    trainer = begin(run_paths.folder, "--num_processes=2", *FOREVER)
    os.kill(training(run_paths, trainer), signal.SIGKILL)
    code, said = ended(trainer)
    assert code == EXIT_RESUMABLE
    assert "another process of this run is lost" in said.splitlines()[-1]
    assert "Traceback" not in said
    whole = (updates(run_paths) + 3) * FRAMES
    again = begin(run_paths.folder, "--num_processes=2", *FOREVER, f"--total_timesteps={whole}")
    assert ended(again)[0] == 0
    result = runs.read_result(run_paths)
    assert result.frames == sum(expert.acted for expert in result.experts) == whole


def test_no_process_outlives_the_one_that_started_it(run_paths):
    trainer = begin(run_paths.folder, "--num_processes=2", *FOREVER)
    other = training(run_paths, trainer)
    trainer.kill()
    until(lambda: not lives(other))


def test_a_port_that_is_in_use_is_refused(run_paths):
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"--coordinator {where}: process 0 cannot listen"):
            refuse_used_port(where)


@pytest.mark.parametrize("where", ["127.0.0.1:0", "[::1]:0", "localhost:0"])
def test_an_address_of_this_machine_can_be_the_coordinators(where):
    refuse_used_port(where)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("--replica=0",), "--replica 0 needs --replicas 2 or more"),
        (("--replica=3", "--replicas=3"), "--replica 3 needs --replicas 4 or more"),
        (("--num_processes=2", "--replicas=2"), "--replicas 2 and --num_processes 2 exclude"),
        (("--num_processes=2", "--process_id=2"), "--process_id 2 must be below --num_processes 2"),
        (("--num_processes=2", "--process_id=1"), "--process_id 1 needs --coordinator HOST:PORT"),
        (("--num_processes=2", "--coordinator=here"), "--coordinator here is no HOST:PORT"),
        (("--num_processes=2", "--num_devices=3"), "choose a multiple of 2"),
        (("--num_processes=2", "--num_devices=0"), "does not say how many devices"),
        (("--num_processes=3", "--num_envs=10"), "--num_envs 10 cannot be shared evenly"),
    ],
)
def test_processes_that_cannot_share_a_run_are_refused(flags, error):
    with pytest.raises(ConfigError, match=error):
        parse(TrainConfig, ["--module_path=9.py", *flags])


def test_every_process_has_a_device_unless_more_are_asked_for():
    def devices(*flags: str) -> int:
        return parse(TrainConfig, ["--module_path=9.py", *flags]).ppo_of_all().num_devices

    assert [devices(), devices("--num_processes=2"), devices("--num_devices=0")] == [1, 2, 0]
    assert devices("--num_processes=2", "--num_devices=4") == 4


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_of_two_processes_is_whole_after_a_fault_at_a_random_instant(tmp_path, number):
    (found,) = one_of_two(tmp_path, random.Random(4), number)
    assert (found.lost, found.merged_twice, found.left_over) == (0, 0, 0), found
