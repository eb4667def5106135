"""What a run's devices must be, told of machines that are not here."""

from __future__ import annotations

import os
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import pytest

from flowrl.config import PPOConfig
from flowrl.errors import ConfigError
from flowrl.ppo.sharding import check_backend, place, verify_distributed_setup


@pytest.fixture
def machine(monkeypatch):
    """Pretends to be a machine with a device of each of these kinds, and with so many CPUs."""

    def pretend(*kinds: str, cpus: int = 1) -> None:
        devices = [SimpleNamespace(device_kind=kind, process_index=0) for kind in kinds]
        for name in ("devices", "local_devices"):
            monkeypatch.setattr(jax, name, lambda: devices)
        for name in ("device_count", "local_device_count"):
            monkeypatch.setattr(jax, name, lambda: len(devices))
        monkeypatch.setattr(jax, "default_backend", lambda: kinds[0])
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))

    return pretend


def test_where_there_is_one_device_all_are_one_and_a_warning_says_so(machine, caplog):
    machine("cpu")
    config = verify_distributed_setup(PPOConfig(num_devices=0))
    assert "--num_devices 0: there is one device, so the run trains on one" in caplog.text
    assert (config.num_devices, config.env_shards, place(config).mesh) == (1, 1, None)
    assert config == verify_distributed_setup(PPOConfig())


@pytest.mark.parametrize(
    ("kinds", "wanted", "said"),
    [
        (("cpu", "cpu"), 3, r"--num_devices 3: there are 2 \(cpu\); .* try it on a CPU, .*count=3"),
        (("gpu", "gpu"), 4, r"--num_devices 4: there are 2 \(gpu\); lower it$"),
        (("gpu", "other"), 2, r"--num_devices 2: the devices differ \(.* gpu, .* other\)"),
        (("gpu", "other"), 0, r"--num_devices 2: the devices differ \(.* gpu, .* other\)"),
    ],
)
def test_devices_that_are_not_there_or_differ_are_refused(machine, kinds, wanted, said):
    machine(*kinds)
    with pytest.raises(ConfigError, match=said):
        verify_distributed_setup(PPOConfig(num_envs=12, num_devices=wanted, num_minibatches=1))


def test_a_broken_driver_is_one_line_with_the_remedy(monkeypatch):
    monkeypatch.setattr(jax, "devices", Mock(side_effect=RuntimeError("no CUDA driver\nat 0x1")))
    with pytest.raises(ConfigError, match=r"no device \(.*: no CUDA driver\); unset JAX_PLATFORMS"):
        check_backend()


def test_half_precision_is_refused_on_a_cpu_alone(machine):
    half = PPOConfig(precision="bf16")
    machine("cpu")
    with pytest.raises(ConfigError, match=r"--precision bf16 is for GPUs, .* leave it out"):
        verify_distributed_setup(half)
    machine("gpu")
    assert verify_distributed_setup(half).precision == "bf16"


def test_threads_are_as_many_for_each_of_all_devices(machine):
    machine("cpu", "cpu", cpus=3)
    config = verify_distributed_setup(PPOConfig(num_devices=0, num_envs=96))
    assert (config.num_devices, config.env_shards, place(config).shards_each) == (2, 2, 1)
