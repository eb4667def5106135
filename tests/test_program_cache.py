"""Kept programs do the same as new ones, and wrong ones are never used."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl import program_cache
from flowrl.program_cache import Program, ProgramCache, ProgramSpec, register_results
from flowrl.storage import locks


class Pair(NamedTuple):
    left: jax.Array
    right: dict[str, jax.Array]


class Hidden(NamedTuple):
    value: jax.Array
    key: jax.Array


register_results(Pair)
TRACED: list[str] = []
TWO = jnp.full((), 2.0)  # an array that a program closes over


def spec(name: str = "sums", *, key=None, donate=()) -> ProgramSpec:
    def function(pair: Pair, number):
        TRACED.append(name)
        hidden = Hidden(pair.left.sum() + number, jax.random.key(3))
        return Pair(pair.left * TWO, {"sum": pair.right["a"] + 1}), hidden

    return ProgramSpec(name, function, arguments, key or {}, donate)


def arguments() -> tuple[Pair, np.ndarray]:
    return Pair(jnp.arange(4.0), {"a": jnp.ones(2)}), np.ones((), np.float32)


@pytest.fixture
def folder(tmp_path):
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    TRACED.clear()
    yield tmp_path / "programs"
    jax.config.update("jax_compilation_cache_dir", before)


def programs(folder) -> list:
    return sorted(folder.glob(f"*{program_cache.SUFFIX}"))


def made(folder, wanted: ProgramSpec | None = None):
    """A program as a process of its own gets it."""
    return ProgramCache(folder).begin(wanted or spec())


def test_a_kept_program_is_not_traced_again(folder):
    first = made(folder)(*arguments())
    assert TRACED == ["sums"]
    second = made(folder)(*arguments())
    assert TRACED == ["sums"]
    pair, hidden = second
    assert isinstance(pair, Pair)
    assert pair.left.tolist() == [0, 2, 4, 6]
    assert pair.right["sum"].tolist() == [2, 2]
    assert type(hidden) is tuple, "a type that is not registered comes out as its leaves"
    assert float(hidden[0]) == 7
    assert jax.random.key_data(hidden[1]).tolist() == jax.random.key_data(first[1][1]).tolist()


def test_programs_take_any_tree_of_the_right_leaves(folder):
    program = made(folder)
    pair, number = arguments()
    assert program(tuple(pair), number)[0].left.tolist() == [0, 2, 4, 6]
    with pytest.raises(TypeError):
        program(Pair(jnp.arange(5.0), pair.right), number)


def test_another_key_name_source_or_setting_is_another_program(folder, monkeypatch):
    made(folder)(*arguments())
    others = [
        (ProgramCache(folder), spec(key={"num_envs": 2})),
        (ProgramCache(folder, {"judges": ["x 1"]}), spec()),
        (ProgramCache(folder), spec("others")),
        (ProgramCache(folder), spec(donate=(0,))),
    ]
    for count, (cache, other) in enumerate(others, start=2):
        cache.begin(other)(*arguments())
        assert len(programs(folder)) == count
    monkeypatch.setattr(program_cache, "digest_of_sources", lambda: "changed")
    made(folder)(*arguments())
    assert len(programs(folder)) == 6
    with jax.numpy_rank_promotion("raise"):
        made(folder).wait()
    assert len(programs(folder)) == 7
    assert len(TRACED) == 7


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[:200] + bytes([content[200] ^ 1]) + content[201:],
        lambda content: b"",
        lambda content: content.partition(b"\n")[2],
    ],
    ids=["cut", "a bit", "empty", "no digest"],
)
def test_a_damaged_program_is_made_again_with_a_line_in_the_log(folder, caplog, damage):
    made(folder).wait()
    (path,) = programs(folder)
    path.write_bytes(damage(path.read_bytes()))
    assert made(folder)(*arguments())[0].left.tolist() == [0, 2, 4, 6]
    assert len(TRACED) == 2
    assert [path.name in line for line in caplog.messages] == [True]
    made(folder).wait()
    assert len(TRACED) == 2, "it is whole again"


def test_a_link_among_the_programs_is_not_followed(folder, tmp_path):
    made(folder).wait()
    (path,) = programs(folder)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    made(folder).wait()
    assert len(TRACED) == 2
    assert not path.is_symlink()


def test_a_folder_that_cannot_be_written_is_done_without(folder, caplog, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(program_cache.storage, "write_atomic", full)
    assert made(folder)(*arguments())[0].left.tolist() == [0, 2, 4, 6]
    assert "cannot be kept" in caplog.text
    assert not programs(folder)


def test_donated_arguments_are_given_up_and_others_are_not(folder):
    def function(kept, lost):
        return kept["a"] + 1, lost + 1

    like = ({"a": jnp.ones(3)}, jnp.ones(3))
    for _ in range(2):
        program = made(folder, ProgramSpec("gives", function, lambda: like, donate=(1,)))
        kept, lost = {"a": jnp.ones(3)}, jnp.ones(3)
        program(kept, lost)
        assert lost.is_deleted()
        assert not kept["a"].is_deleted()


def test_a_program_is_made_in_a_thread_and_an_error_comes_to_the_caller(folder):
    go_on = threading.Event()

    def waits(number):
        assert go_on.wait(60)
        return number + 1

    pending = made(folder, ProgramSpec("waits", waits, lambda: (jnp.ones(2),)))
    assert isinstance(pending, Program)
    go_on.set()
    assert pending(jnp.ones(2)).tolist() == [2, 2]

    def fails(number):
        raise ValueError("no such skill")

    failing = made(folder, ProgramSpec("fails", fails, lambda: (jnp.ones(2),)))
    with pytest.raises(ValueError, match="no such skill"):
        failing.wait()


def test_programs_are_traced_one_at_a_time(folder):
    tracing, most = [0], [0]

    def traced(name, number):
        tracing[0] += 1
        most[0] = max(most[0], tracing[0])
        threading.Event().wait(0.05)
        tracing[0] -= 1
        return number + 1

    names = ("first", "second", "third", "fourth")
    cache = ProgramCache(folder)
    pending = [
        cache.begin(ProgramSpec(name, partial(traced, name), lambda: (jnp.ones(2),)))
        for name in names
    ]
    for program in pending:
        assert program(jnp.ones(2)).tolist() == [2, 2]
    assert most == [1]


def test_a_program_that_another_process_makes_holds_up_no_other(folder):
    made(folder, spec("taken")).wait()
    (path,) = programs(folder)
    path.unlink()
    with locks.held(folder / "locks" / path.name, timeout_seconds=5):
        taken = made(folder, spec("taken"))
        made(folder, spec("free"))(*arguments())
        assert TRACED == ["taken", "free"]
    taken(*arguments())
    assert TRACED == ["taken", "free", "taken"]


def test_a_process_that_has_waited_too_long_makes_the_program_too(folder, monkeypatch):
    monkeypatch.setattr(program_cache, "_WAIT_SECONDS", 0.05)
    made(folder).wait()
    (path,) = programs(folder)
    path.unlink()
    with locks.held(folder / "locks" / path.name, timeout_seconds=5):
        assert made(folder)(*arguments())[0].left.tolist() == [0, 2, 4, 6]


def test_without_a_folder_a_program_is_a_jitted_function_and_keeps_its_trees():
    pair, hidden = made(None)(*arguments())
    assert isinstance(hidden, Hidden)
    assert pair.left.tolist() == [0, 2, 4, 6]


ASK = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
from flowrl.program_cache import ProgramCache, ProgramSpec

def function(x):
    print("traced")
    return jnp.sin(x) @ x

spec = ProgramSpec("sine", function, lambda: (jnp.ones(4),))
program = ProgramCache(Path(sys.argv[1], "programs")).begin(spec)
print(float(program(jnp.ones(4))))
"""


def test_processes_that_start_together_trace_a_program_once(tmp_path):
    asks = [
        subprocess.Popen([sys.executable, "-c", ASK, str(tmp_path)], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    said = [ask.communicate(timeout=120)[0].decode().split() for ask in asks]
    assert sorted(len(words) for words in said) == [1, 2]
    assert len({words[-1] for words in said}) == 1


def test_the_digest_covers_the_flags_of_xla(monkeypatch):
    before = program_cache.digest_of_sources()
    program_cache.digest_of_sources.cache_clear()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    assert program_cache.digest_of_sources() != before
    program_cache.digest_of_sources.cache_clear()
