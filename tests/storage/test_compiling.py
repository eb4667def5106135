"""Two processes that need one program: the second waits, and loads what the first compiled."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import jax
import pytest

from flowrl import compiling
from flowrl.storage import locks

ASK = """
import sys, jax, jax.numpy as jnp
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from flowrl.compiling import compiled
print(float(compiled(jax.jit(lambda x: jnp.sin(x) @ x).trace(jnp.ones(4)))(jnp.ones(4))))
"""


@pytest.fixture
def cache(tmp_path):
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def test_a_program_waits_while_another_process_compiles_it(cache):
    traced = jax.jit(lambda x: x + 1).trace(1.0)
    assert compiling.compiled(traced)(1.0) == 2.0
    (place,) = Path(cache, "locks").iterdir()
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(compiling.compiled(traced)(2.0)))
    with locks.held(place, timeout_seconds=5):
        waiting.start()
        waiting.join(0.3)
        assert not answers
    waiting.join(30)
    assert answers == [3.0]


def test_who_has_waited_too_long_compiles_too(cache, monkeypatch):
    monkeypatch.setattr(compiling.once, "_WAIT_SECONDS", 0.05)
    traced = jax.jit(lambda x: x + 2).trace(1.0)
    compiling.compiled(traced)
    (place,) = Path(cache, "locks").iterdir()
    with locks.held(place, timeout_seconds=5):
        assert compiling.compiled(traced)(1.0) == 3.0


def test_without_a_cache_there_is_nothing_to_wait_for(tmp_path):
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        assert compiling.compiled(jax.jit(lambda x: x * 2).trace(1.0))(4.0) == 8.0
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_processes_that_start_together_compile_a_program_once(tmp_path):
    asks = [
        subprocess.Popen([sys.executable, "-c", ASK, str(tmp_path)], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    answers = {ask.communicate(timeout=120)[0] for ask in asks}
    assert len(answers) == 1
    assert len(list(Path(tmp_path, "locks").iterdir())) == 1
