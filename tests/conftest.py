"""How the suite is compiled and in which order it is run: it takes as long as XLA does.

Programs are compiled lightly and once: by LLVM without optimizing, and kept in the user's cache,
which workers and the trainers that tests start share. What a program computes is asked here and
not how fast; `-m slow`, or XLA_FLAGS set to anything, compiles as users do.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from flowrl import cli, storage
from flowrl.launchers.sandbox import Confinement, compile_cache, confinement
from tests.games.installing import tiny_game  # noqa: F401
from tests.machine import HOST
from tests.waiting import limit

LIGHT = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
# The files that take longest, longest first: none of them is to be begun when all else has ended.
LONGEST = (
    "test_story.py",
    "ppo/test_sharded_update.py",
    "games/test_gymnax.py",
    "parallel/test_integration.py",
    "ppo/test_processes.py",
    "chaos/test_processes.py",
    "launchers/test_ray.py",
    "ppo/test_trainer.py",
    "parallel/test_writing.py",
    "parallel/test_slurm_training.py",
    "games/test_a_game_of_ones_own.py",
    "serving/test_page.py",
    "averaging/test_replicas.py",
    "commands/test_write.py",
    "parallel/test_train_more.py",
    "parallel/test_steering.py",
    "commands/test_improve.py",
    "ppo/test_replica.py",
    "commands/test_judge.py",
    "chaos/test_slurm.py",
    "skills/test_library.py",
    "skills/test_dry_run.py",
    "skills/test_hostile_skills.py",
    "skills/test_honest_skills.py",
    "analysis/test_analyse.py",
    "ppo/test_learning.py",
    "tuning/test_sweep.py",
    "test_ppo_flow.py",
    "ppo/test_sharded_game.py",
)

# JAX reads these as it is imported, which the tests do next.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(compile_cache(None, os.environ)))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# How long an example takes is the machine's affair, and each run tries the same ones.
settings.register_profile(
    "flowrl", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("flowrl")


@pytest.fixture(autouse=True)
def damage_is_told_at_once(monkeypatch):
    """No other host replaces the files that a test damages."""
    monkeypatch.setattr(storage, "CACHED_SECONDS", 0.0)


@pytest.fixture
def memory(tmp_path) -> Iterator[Path]:
    """A folder in memory where there is one, for what flushes thousands of times."""
    place = Path("/dev/shm")
    if not os.access(place, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


@pytest.fixture
def flowrl(capsys):
    """A function that gives the command line these words, and returns what it printed."""

    def command(*words, code=0):
        assert cli.main([*map(str, words)]) == code
        return capsys.readouterr()

    return command


@pytest.fixture(scope="session")
def bubblewrap() -> Confinement:
    """A confinement by bubblewrap, for tests that are skipped where it does not work."""
    found = confinement("auto", Path("/nowhere"))
    if found.program is None:
        pytest.skip(found.described)
    return found


@pytest.fixture(scope="session")
def hosts() -> None:
    """Skips tests of several hosts where this machine lets us make no namespaces."""
    true = [*HOST, "true"]
    found = shutil.which(HOST[0])
    if not found or subprocess.run(true, capture_output=True, check=False).returncode:
        pytest.skip("unshare is not allowed here")


@pytest.fixture
def unchanged_sigterm():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def pytest_configure(config: pytest.Config) -> None:
    quick = config.option.markexpr == "not slow"
    if quick and not Path("/dev/nvidiactl").exists():  # to a GPU's compiler the level means more
        os.environ.setdefault("XLA_FLAGS", LIGHT)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    ranks = {here / name: rank for rank, name in enumerate(LONGEST)}
    for item in items:
        marker = item.get_closest_marker("timeout")
        seconds = marker.args[0] if marker else float(item.config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(limit(seconds)), append=False)
        if item.get_closest_marker("craftax"):
            ranks.setdefault(item.path, len(LONGEST))
    items.sort(key=lambda item: ranks.get(item.path, len(LONGEST) + 1))
