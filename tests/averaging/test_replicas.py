"""The averager with replicas that need no game: real processes, killed by real signals."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest

from flowrl.averaging.replicas import Averager
from flowrl.averaging.rounds import Rounds, fold
from flowrl.averaging.rules import Rule
from flowrl.config import PPOConfig
from flowrl.errors import EXIT_DISK_FULL, FileRefusedError, FlowrlError
from flowrl.launchers.process import die_with_parent
from flowrl.paths import RunPaths
from tests.averaging import stand_in
from tests.waiting import limit

STEPS = 64 * 64


def config_of(replicas: int, rounds: int, **settings) -> PPOConfig:
    steps = STEPS * replicas * rounds * 10
    return PPOConfig(replicas=replicas, total_timesteps=steps, **settings)


class Run:
    """A run whose replicas are stand-ins."""

    def __init__(self, folder, config: PPOConfig, faults: dict[int, str] | None = None) -> None:
        self.paths, self.config, self.faults = RunPaths(folder, 0), config, faults or {}
        self.rounds = Rounds(self.paths.rounds)
        self.started: list[subprocess.Popen] = []

    def start(self, replica: int) -> subprocess.Popen:
        command = (sys.executable, "-m", "tests.averaging.stand_in", str(self.rounds.folder))
        fault = self.faults.get(replica, "")
        dying = partial(die_with_parent, os.getpid())
        self.started.append(subprocess.Popen((*command, str(replica), fault), preexec_fn=dying))  # noqa: PLW1509
        return self.started[-1]

    def train(self, before_look=lambda averager: None) -> int:
        averager = Averager(self.config, self.paths, self.start)
        deadline = time.monotonic() + limit(60)
        try:
            while (code := averager.look()) is None:
                before_look(averager)
                assert time.monotonic() < deadline
                time.sleep(0.002)
            return code
        finally:
            averager.close()


def expected_mean(replicas: int, rounds: int) -> dict[str, np.ndarray]:
    """What so many rounds of all replicas come to, computed without any process or file."""
    mean = stand_in.first_mean()
    for number in range(rounds):
        offers = {
            k: (stand_in.offer_of(stand_in.Round(number=0), k), stand_in.learned(mean, number, k))
            for k in range(replicas)
        }
        mean = fold(mean, offers, Rule())
    return mean


def assert_same(one, other) -> None:
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_every_round_is_the_mean_of_all_replicas(tmp_path):
    run = Run(tmp_path, config_of(3, 4))
    assert run.train() == 0
    last = run.rounds.newest()
    assert (last.number, last.ended, last.reached) == (4, True, False)
    assert last.acted == (4 * 330, 4 * 150, 4 * 25)
    assert last.frames == sum(last.acted)
    assert_same(run.rounds.mean(last), expected_mean(3, 4))
    assert sorted(path.name for path in run.rounds.folder.iterdir()) == ["3", "4"]


def test_success_ends_the_run_early(tmp_path):
    run = Run(tmp_path, config_of(2, 40, success_state_rate=0.05))
    assert run.train() == 0
    assert (run.rounds.newest().number, run.rounds.newest().reached) == (1, True)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("nan", "NaN"),
        ("shape", "other shapes"),
        ("stale", "did not begin with"),
        ("dead", "no offer"),
    ],
)
def test_a_faulty_replica_is_left_out_and_named(tmp_path, fault, why):
    run = Run(tmp_path, config_of(4, 4), {2: fault})
    assert run.train() == 0
    last = run.rounds.newest()
    assert [member.replica for member in last.members] == [0, 1, 3]
    (left,) = last.left_out
    assert left.replica == 2
    assert why in left.why


def test_a_stopped_replica_does_not_hold_the_others(tmp_path):
    run, stopped = Run(tmp_path, config_of(4, 3)), []

    def stop_one(averager) -> None:
        if not stopped and averager._base and averager._base.number == 1:
            os.kill(run.started[3].pid, signal.SIGSTOP)
            stopped.append(time.monotonic())

    assert run.train(stop_one) == 0
    assert [left.replica for left in run.rounds.newest().left_out] == [3]


def test_without_a_quorum_the_run_ends_with_an_error(tmp_path):
    with pytest.raises(FlowrlError, match="1 of 2 are left"):
        Run(tmp_path, config_of(2, 9), {1: "dead"}).train()


def test_a_full_disk_ends_the_run_as_one(tmp_path):
    assert Run(tmp_path, config_of(2, 9), {1: "full"}).train() == EXIT_DISK_FULL


@pytest.mark.parametrize("seed", range(3))
def test_killed_replicas_change_no_bit(tmp_path, seed):
    run, draws = Run(tmp_path, config_of(2, 5, average_deadline=1000.0)), random.Random(seed)
    kills = []

    def kill_one(averager) -> None:
        if len(kills) < 4 and draws.random() < 0.02:
            kills.append(draws.choice(run.started))
            kills[-1].kill()
            averager._deaths = dict.fromkeys(averager._deaths, 0)

    assert run.train(kill_one) == 0
    assert_same(run.rounds.mean(run.rounds.newest()), expected_mean(2, 5))


def test_the_quorum_is_all_but_one_and_two_at_least():
    assert [config_of(n, 1).quorum for n in (2, 3, 4, 8)] == [2, 2, 3, 7]
    assert config_of(8, 1, average_quorum=4).quorum == 4


def test_a_damaged_round_is_refused(tmp_path):
    run = Run(tmp_path, config_of(2, 1))
    run.train()
    last = run.rounds.newest()
    mean = run.rounds.folder / "1" / "mean.safetensors"
    mean.write_bytes(mean.read_bytes()[:-1] + b"\1")
    with pytest.raises(FileRefusedError, match="not what its record says"):
        run.rounds.mean(last)
