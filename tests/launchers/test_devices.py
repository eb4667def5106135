"""GPUs by a fake nvidia-smi, and the environment that trainers get."""

from __future__ import annotations

import platform
import subprocess
import sys
import time

import pytest

from flowrl.errors import ConfigError
from flowrl.launchers import gpus
from flowrl.launchers.gpus import Device, slots, visible_devices
from flowrl.launchers.sandbox import child_env
from tests.machine import program

TWO = "0, GPU-aa11, 81559\n1, GPU-bb22, 40960\n"
FIRST = Device(id="0", memory_mb=81559, uuid="GPU-aa11")
SECOND = Device(id="1", memory_mb=40960, uuid="GPU-bb22")

WITHHELD = """
OPENAI_API_KEY ANTHROPIC_API_KEY AWS_SECRET_ACCESS_KEY GITHUB_TOKEN PGPASSWORD SSH_AUTH_SOCK
FLOWRL_LLM_API_KEY JAX_SECRET TMUX TMUX_PANE DATABASE_URL PYTHONSTARTUP MY_PATH HOMEX
"""
PASSED_ON = """
PATH HOME USER LANG LC_ALL TERM TZ TMPDIR XDG_CACHE_HOME VIRTUAL_ENV PYTHONPATH LD_LIBRARY_PATH
SSL_CERT_FILE https_proxy HTTPS_PROXY no_proxy WANDB_API_KEY WANDB_MODE JAX_COMPILATION_CACHE_DIR
XLA_FLAGS CUDA_HOME NVIDIA_TF32_OVERRIDE FLOWRL_FAULT
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Replaces nvidia-smi by a shell script."""

    def install(script: str) -> None:
        program(tmp_path / "nvidia-smi", script)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return install


def test_all_gpus_are_used_when_none_is_named(nvidia_smi):
    nvidia_smi(f"printf '{TWO}'")
    assert visible_devices(environ={}) == (FIRST, SECOND)


def test_nvidia_smi_is_asked_by_words_it_knows(nvidia_smi, tmp_path):
    nvidia_smi(f"echo \"$@\" > {tmp_path}/asked; printf '{TWO}'")
    visible_devices(environ={})
    asked = (tmp_path / "asked").read_text()
    assert asked == "--query-gpu=index,uuid,memory.total --format=csv,noheader,nounits\n"


def test_named_gpus_are_used_in_the_order_named(nvidia_smi):
    nvidia_smi(f"printf '{TWO}'")
    assert visible_devices((1, 0, 1), environ={"CUDA_VISIBLE_DEVICES": "0"}) == (SECOND, FIRST)


@pytest.mark.parametrize(
    ("script", "match"),
    [
        (f"printf '{TWO}'", "--gpu_ids 7: no such GPU; present: 0, 1"),
        ("exit 9", "--gpu_ids 1 7: no such GPU; present: none"),
    ],
    ids=["other GPUs", "no GPU"],
)
def test_a_gpu_that_is_not_there_is_refused_by_name(nvidia_smi, script, match):
    nvidia_smi(script)
    with pytest.raises(ConfigError, match=match):
        visible_devices((1, 7), environ={})


@pytest.mark.parametrize(
    "script",
    [
        "exit 9",
        f"printf '{TWO}'; exit 9",
        "echo No devices were found",
        "head -c 1000 /dev/urandom",
        "printf '0, GPU-aa11\\n'",
        "printf 'x, GPU-aa11, 5\\n'",
        "printf '1, 2, 3\\n'",
        "sleep 60",
        "trap '' TERM INT; sleep 60; sleep 60",
    ],
)
def test_an_nvidia_smi_that_fails_leaves_no_gpu_and_does_not_hang(nvidia_smi, script, monkeypatch):
    nvidia_smi(script)
    monkeypatch.setattr(gpus, "TIMEOUT_SECONDS", 0.5)
    began = time.monotonic()
    assert visible_devices(environ={}) == ()
    assert time.monotonic() - began < 30.0


def test_nvidia_smi_has_five_seconds():
    assert gpus.TIMEOUT_SECONDS == 5.0


def test_a_machine_without_nvidia_smi_has_no_gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_devices(environ={}) == ()


def test_shared_memory_is_unknown_memory(nvidia_smi):
    nvidia_smi("printf '0, GPU-aa11, [N/A]\\n'")
    assert visible_devices(environ={})[0].memory_mb == 0


@pytest.mark.parametrize(
    ("words", "devices"),
    [
        ("1", (SECOND,)),
        ("1,0", (SECOND, FIRST)),
        ("GPU-bb", (SECOND,)),
        ("0,9,1", (FIRST,)),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("MIG-c0ffee", (Device(id="MIG-c0ffee", memory_mb=0),)),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(nvidia_smi, words, devices):
    nvidia_smi(f"printf '{TWO}'")
    assert visible_devices(environ={"CUDA_VISIBLE_DEVICES": words}) == devices


@pytest.mark.parametrize("name", WITHHELD.split())
def test_what_is_not_for_trainers_stays_with_the_daemon(name):
    assert name not in child_env(environ={name: "x"})
    assert name not in child_env(("0",), environ={name: "x"})


@pytest.mark.parametrize("name", PASSED_ON.split())
def test_what_trainers_need_is_passed_on(name):
    assert child_env(environ={name: "x"})[name] == "x"


def test_a_trainer_on_a_gpu_sees_it_alone_in_the_order_of_nvidia_smi():
    env = child_env(("3",), skills_per_gpu=2, environ={"CUDA_VISIBLE_DEVICES": "1,3"})
    assert env["CUDA_VISIBLE_DEVICES"] == "3"
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert env["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.4500"
    assert env["PYTHONUNBUFFERED"] == "1"
    assert "JAX_PLATFORMS" not in env


def test_a_users_share_of_memory_is_divided_among_the_runs():
    env = child_env(("0",), skills_per_gpu=3, environ={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"})
    assert env["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.2000"


@pytest.mark.parametrize("text", ["much", "0", "1.5", "-1", "nan", ""])
def test_a_share_of_memory_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="XLA_PYTHON_CLIENT_MEM_FRACTION"):
        child_env(("0",), environ={"XLA_PYTHON_CLIENT_MEM_FRACTION": text})


def test_a_trainer_without_a_gpu_uses_the_cpu_unless_told_otherwise():
    assert child_env(environ={})["JAX_PLATFORMS"] == "cpu"
    assert child_env(environ={"JAX_PLATFORMS": "tpu"})["JAX_PLATFORMS"] == "tpu"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told so")
def test_a_trainers_memory_grows_in_large_pieces_unless_told_otherwise():
    told = {"MALLOC_TOP_PAD_": str(2**16)}
    heaps = {}
    for name, env in (("ours", child_env()), ("theirs", child_env(environ=told, passed=told))):
        words = [sys.executable, "-I", "-S", "-c", "print(open('/proc/self/maps').read())"]
        maps = subprocess.run(words, env=env, check=True, capture_output=True, text=True).stdout
        (heap,) = (line.split()[0] for line in maps.splitlines() if line.endswith("[heap]"))
        first, _, end = heap.partition("-")
        heaps[name] = int(end, 16) - int(first, 16)
    assert heaps["ours"] > 2**26 > heaps["theirs"]


@pytest.mark.parametrize(
    ("wishes", "runs"),
    [
        ({}, (1, 1)),
        ({"most": 3}, (3, 3)),
        ({"memory_mb": 8000}, (9, 4)),
        ({"memory_mb": 8000, "most": 6}, (6, 4)),
        ({"memory_mb": 36864}, (1, 1)),
    ],
    ids=str,
)
def test_a_gpu_takes_as_many_runs_as_fit_by_what_they_declare(wishes, runs):
    assert tuple(slots((FIRST, SECOND), **wishes, environ={}).values()) == runs


def test_headroom_follows_the_share_of_memory_that_a_user_sets():
    half = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}
    assert slots((FIRST, SECOND), memory_mb=8000, environ=half) == {FIRST.id: 5, SECOND.id: 2}


def test_what_its_runs_may_take_of_a_gpu_is_at_least_what_they_declare():
    for memory_mb in (3000, 5640, 8000, 30_000):
        runs = slots((FIRST, SECOND), memory_mb=memory_mb, environ={})
        for device in (FIRST, SECOND):
            env = child_env((device.id,), skills_per_gpu=runs[device.id], environ={})
            assert float(env["XLA_PYTHON_CLIENT_MEM_FRACTION"]) * device.memory_mb >= memory_mb


@pytest.mark.parametrize(
    ("memory_mb", "words"),
    [(36865, "GPU 1 has 40960 MB, of which 36864 are for runs"), (10**6, "GPU 0 has 81559 MB")],
)
def test_a_run_that_fits_on_no_gpu_is_refused_with_both_sizes(memory_mb, words):
    with pytest.raises(ConfigError, match=words):
        slots((FIRST, SECOND), memory_mb=memory_mb, environ={})


def test_a_gpu_of_unknown_memory_is_refused_with_the_flag_to_use(nvidia_smi):
    nvidia_smi("printf '0, GPU-aa11, [N/A]\\n'")
    with pytest.raises(ConfigError, match="use --skills_per_gpu"):
        slots(visible_devices(environ={}), memory_mb=4000)


def test_without_gpus_nothing_has_to_fit():
    assert slots((), memory_mb=4000) == {}
