"""The averager with replicas that need no game: real processes, killed by real signals."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flowrl import storage
from flowrl.averaging.rules import OuterStep, Rule
from flowrl.command_line import to_argv
from flowrl.config import PPOConfig, quorum_of
from flowrl.errors import EXIT_DISK_FULL, EXIT_RESUMABLE, ConfigError
from flowrl.parallel.executor import newest_checkpoint
from flowrl.paths import RunPaths
from flowrl.ppo_flow import refuse_other_form
from flowrl.replicas.rounds import Round, Rounds, fold
from flowrl.runs import TrainConfig
from flowrl.storage import records
from tests.averaging import stand_in
from tests.waiting import AT_ONCE, limit, until

REPLACE = OuterStep()
STEPS = 64 * 64 * 10  # of one replica in one round


def config_of(replicas: int, rounds: int, **settings) -> PPOConfig:
    steps, envs = STEPS * replicas * rounds, 64 * replicas
    sizes = {"replicas": replicas, "num_envs": envs, "total_timesteps": steps}
    return PPOConfig(**sizes, average_every=10, **settings)


class Run:
    """A run whose replicas are stand-ins."""

    def __init__(self, folder: Path, config: PPOConfig, faults: str = "") -> None:
        self.run_paths = RunPaths(folder, 0)
        config_words = to_argv(TrainConfig(ppo=config, module_path=self.run_paths.module))
        self.words = (sys.executable, "-m", "tests.averaging.stand_in", faults, *config_words)
        self.start()

    def start(self) -> None:
        self.averager = subprocess.Popen(self.words, stderr=subprocess.PIPE, text=True)

    def pid(self, replica: int) -> int:
        """The process of a replica, once it lives."""
        path = self.run_paths.replica(replica).folder / "pid"
        return int(until(lambda: path.exists() and path.read_text()))

    def kill(self, replica: int, number: int = signal.SIGKILL) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid(replica), number)

    def ended(self, each_time: Callable[[], object] = lambda: None) -> tuple[int, str]:
        """The exit code, and what the averager said last."""
        deadline = time.monotonic() + limit(60)
        while self.averager.poll() is None:
            each_time()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        said = self.averager.stderr.read()
        return self.averager.returncode, said.strip().rpartition("\n")[2]

    def seen(self) -> list[Round]:
        """Every round that replica 0 has seen."""
        numbers = range(len(list((self.run_paths.folder / "seen").glob("*.json"))))
        return [records.read(self.run_paths.folder / "seen" / f"{n}.json", Round) for n in numbers]

    def final(self) -> dict[str, np.ndarray]:
        with np.load(self.run_paths.folder / "final.npz") as arrays:
            return dict(arrays)


def expected_mean(replicas: int, rounds: int, outer: OuterStep = REPLACE) -> dict[str, np.ndarray]:
    """What so many rounds of all replicas come to, computed without any process or file."""
    mean = stand_in.first_mean()
    for number in range(rounds):
        offers = {
            k: (stand_in.offer_of(Round(number=0), k), stand_in.learned(mean, number, k))
            for k in range(replicas)
        }
        mean = fold(mean, offers, Rule(), outer)
    return mean


def assert_whole(run: Run, replicas: int, rounds: int, outer: OuterStep = REPLACE) -> None:
    """All rounds were made, each once and of all replicas, and nothing else is left."""
    seen = run.seen()
    assert [record.number for record in seen] == list(range(rounds + 1))
    assert all(len(record.members) == replicas for record in seen[1:])
    frames = sum(sum(member.acted) for record in seen for member in record.members)
    assert seen[-1].frames == sum(seen[-1].acted) == frames
    wanted, found = expected_mean(replicas, rounds, outer), run.final()
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name]) for name in found)
    assert not run.run_paths.rounds.exists()
    assert not run.run_paths.replicas.exists()


def test_every_round_is_the_mean_of_all_replicas(tmp_path):
    run = Run(tmp_path, config_of(3, 4))
    assert run.ended()[0] == 0
    assert_whole(run, 3, 4)
    assert run.seen()[-1].acted == (4 * 330, 4 * 150, 4 * 25)


def test_success_ends_the_run_early(tmp_path):
    run = Run(tmp_path, config_of(2, 40, success_state_rate=0.05))
    assert run.ended()[0] == 0
    last = run.seen()[-1]
    assert (last.number, last.ended, last.reached) == (1, True, True)


def test_the_best_round_is_the_result(tmp_path):
    run = Run(tmp_path, config_of(2, 6), "0=peak,1=peak")
    assert run.ended()[0] == 0
    assert [record.best for record in run.seen()] == [None, 1, 2, 2, 2, 2, 2]
    wanted, found = expected_mean(2, 2), run.final()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_faulty_replicas_are_left_out_and_named(tmp_path):
    run = Run(
        tmp_path,
        config_of(9, 4, average_quorum=2, average_deadline=1.0),
        "1=nan,2=shape,3=stale,4=dead,7=boast,8=plan",
    )
    stopped = []

    def stop_one() -> None:
        if not stopped and (tmp_path / "seen" / "1.json").exists():
            run.kill(5, signal.SIGSTOP)
            stopped.append(5)

    assert run.ended(stop_one)[0] == 0
    last = run.seen()[-1]
    assert [member.replica for member in last.members] == [0, 6]
    why = {int(replica): said for replica, said in last.left_out.items()}
    found = [word in why[k] for k, word in enumerate(
        ["NaN", "other shapes", "did not begin with", "no offer", "no offer"], 1)]  # fmt: skip
    assert all(found), why
    assert "more than a round has" in why[7]
    assert "a plan with other steps" in why[8]
    late = [record.seconds for record in run.seen()][1:]  # the first has the replicas' start
    assert all(b - a < 1.0 + limit(4) for a, b in itertools.pairwise(late))


def test_without_a_quorum_the_run_ends_with_an_error(tmp_path):
    code, said = Run(tmp_path, config_of(2, 9), "1=dead").ended()
    assert code == 1
    assert "it ended with 1" in said
    assert "replica 1; 1 of 2 are left, and a round needs 2" in said


def test_a_full_disk_ends_the_run_as_one(tmp_path):
    assert Run(tmp_path, config_of(2, 9), "1=full").ended()[0] == EXIT_DISK_FULL


@pytest.mark.parametrize("outer", ["replace", "sgd"])
def test_killed_replicas_and_averagers_change_no_bit(tmp_path, outer):
    config = config_of(2, 5, average_deadline=1000.0, average_outer=outer)
    slow = "0=slow,1=slow"  # or they may have ended before they are killed
    run, draws, kills = Run(tmp_path, config, slow), random.Random(0), []

    def kill_one() -> None:
        rounds = len(list((tmp_path / "seen").glob("*.json")))
        if len(kills) < 4 and rounds > len(kills) and draws.random() < 0.2:
            kills.append(draws.choice([0, 1]))
            run.kill(kills[-1])

    until((tmp_path / "seen" / "1.json").exists, every=AT_ONCE)
    pids = [run.pid(0), run.pid(1)]
    run.averager.kill()
    until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in pids))
    run.averager.communicate()
    run.start()
    assert run.ended(kill_one)[0] == 0
    assert_whole(run, 2, 5, OuterStep(name=outer))


@pytest.mark.slow
def test_a_hundred_kills_at_random_instants_change_no_bit(tmp_path):
    rounds, draws = 250, random.Random(1)
    run = Run(tmp_path, config_of(2, rounds, average_deadline=1000.0), "0=slow,1=slow")
    until((tmp_path / "seen" / "0.json").exists, every=AT_ONCE)
    kills = 0
    while kills < 100 and run.averager.poll() is None:
        time.sleep(draws.random() * 0.4)
        kills += 1
        if draws.random() < 0.7:
            run.kill(draws.choice([0, 1]))
            continue
        run.averager.kill()
        run.averager.communicate()
        run.start()
    assert kills == 100
    assert run.ended()[0] == 0
    assert_whole(run, 2, rounds)


@pytest.mark.parametrize(
    ("replicas", "saved", "before"),
    [(1, "rounds/0/round.json", "replicas"), (2, "0_policies/resume/12", "one trainer")],
)
def test_a_run_never_begins_anew_without_a_word(tmp_path, replicas, saved, before):
    storage.make_dir(tmp_path / saved)
    config = TrainConfig(ppo=config_of(replicas, 1), module_path=tmp_path / "0.py")
    with pytest.raises(ConfigError, match=f"was begun by {before}; give --replicas as before"):
        refuse_other_form(config)
    refuse_other_form(replace(config, ppo=config_of(3 - replicas, 1)))
    refuse_other_form(replace(config, resume=False))
    refuse_other_form(config)


def test_damaged_progress_of_a_replica_ends_no_run(tmp_path):
    run = Run(tmp_path, config_of(2, 400), "0=slow")
    path = run.run_paths.replica(0).progress
    until(path.parent.exists)
    path.write_text("{")
    until((tmp_path / "seen" / "20.json").exists)  # two seconds; it is read once a second
    assert run.averager.poll() is None
    run.averager.kill()
    run.averager.communicate()


def test_a_run_that_is_asked_to_stop_goes_on_later(tmp_path):
    began = time.monotonic()
    run = Run(tmp_path, config_of(2, 6), "0=slow,1=slow")
    until((tmp_path / "seen" / "2.json").exists, every=AT_ONCE)
    pids = [run.pid(0), run.pid(1)]
    run.averager.terminate()
    assert run.ended()[0] == EXIT_RESUMABLE
    assert not any(Path(f"/proc/{pid}/exe").exists() for pid in pids)
    run.start()
    assert run.ended()[0] == 0
    assert_whole(run, 2, 6)
    # Of both starts: 0.1 s of each round, but for one that was stopped and may not count.
    assert 5 * 0.1 <= run.seen()[-1].seconds <= time.monotonic() - began


def test_the_quorum_is_all_but_one_and_two_at_least():
    assert [quorum_of(None, n) for n in (2, 3, 4, 8)] == [2, 2, 3, 7]
    assert quorum_of(4, 8) == 4


@pytest.mark.parametrize(("more", "rounds"), [(0, 2), (1, 3)])
def test_the_rounds_of_a_run_take_its_steps(tmp_path, more, rounds):
    config = config_of(2, 2)
    run = Run(tmp_path, replace(config, total_timesteps=config.total_timesteps + more))
    assert run.ended()[0] == 0
    assert [record.updates for record in run.seen()] == [0, 10, 20, 21][: rounds + 1]


OTHERS = [
    {"average_every": 25},
    {"average_every": 1, "average_rule": "median"},
    {"average_outer": "sgd"},
    {"replicas": 4, "num_envs": 128},
    {"total_timesteps": 64 * 128, "average_every": 1},
]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The folder of a run that is killed in its midst."""
    folder = tmp_path_factory.mktemp("begun")
    run = Run(folder, config_of(2, 6), "0=slow")
    until((folder / "seen" / "2.json").exists, every=AT_ONCE)
    pids = [run.pid(0), run.pid(1)]
    run.averager.kill()
    run.averager.communicate()
    until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in pids))
    return folder


@pytest.mark.parametrize("change", OTHERS, ids=lambda change: "_".join(map(str, change)))
def test_a_run_goes_on_with_other_settings_of_rounds(begun, tmp_path, change):
    config = config_of(2, 6)
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    known = len([*(tmp_path / "seen").glob("*.json")])
    other = Run(tmp_path, replace(config, **change))
    assert other.ended()[0] == 0
    last = other.seen()[-1]
    total = -(-change.get("total_timesteps", config.total_timesteps) // (64 * 128))
    assert (last.ended, last.updates) == (True, total)
    assert last.number >= known
    assert not other.run_paths.rounds.exists()


def test_a_round_counts_as_progress_of_a_run_that_failed(tmp_path):
    run_paths = RunPaths(tmp_path, 0)
    assert newest_checkpoint(run_paths) == 0
    Rounds(run_paths.rounds).commit(Round(number=6), {"a": np.zeros(1)})
    (run_paths.rounds / "7" / "offers").mkdir(parents=True)
    assert newest_checkpoint(run_paths) == 7
