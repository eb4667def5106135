"""Programs kept between processes: found ones do the same, and wrong ones are never used."""

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

from flowrl.compiling import Draft, Pending, Shelf, known, shelf, sources
from flowrl.storage import locks


class Pair(NamedTuple):
    left: jax.Array
    right: dict[str, jax.Array]


class Hidden(NamedTuple):
    value: jax.Array
    key: jax.Array


known(Pair)
TRACED: list[str] = []


def draft(name: str = "sums", *, facts=None, factor: float = 2.0) -> Draft:
    def function(pair: Pair, number):
        TRACED.append(name)
        hidden = Hidden(pair.left.sum() + number, jax.random.key(3))
        return Pair(pair.left * factor, {"sum": pair.right["a"] + 1}), hidden

    return Draft(name, function, arguments, facts or {})


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
    return sorted(folder.glob(f"*{shelf.SUFFIX}"))


def test_a_program_of_the_shelf_is_not_traced_again(folder):
    first = Shelf(folder).ready(draft())(*arguments())
    assert TRACED == ["sums"]
    second = Shelf(folder).ready(draft())(*arguments())
    assert TRACED == ["sums"]
    pair, hidden = second
    assert isinstance(pair, Pair)
    assert pair.left.tolist() == [0, 2, 4, 6]
    assert pair.right["sum"].tolist() == [2, 2]
    assert type(hidden) is tuple, "what is not known comes out as its leaves"
    assert float(hidden[0]) == 7
    assert jax.random.key_data(hidden[1]).tolist() == jax.random.key_data(first[1][1]).tolist()


def test_programs_take_any_tree_of_the_right_leaves(folder):
    program = Shelf(folder).ready(draft())
    pair, number = arguments()
    assert program(tuple(pair), number)[0].left.tolist() == [0, 2, 4, 6]
    with pytest.raises(TypeError):
        program(Pair(jnp.arange(5.0), pair.right), number)


def test_other_facts_shelves_names_sources_or_settings_are_other_programs(folder, monkeypatch):
    Shelf(folder).ready(draft())
    others = [
        (Shelf(folder), draft(facts={"num_envs": 2})),
        (Shelf(folder, {"judges": ["x 1"]}), draft()),
        (Shelf(folder), draft("others")),
        (Shelf(folder), draft()._replace(donate=(0,))),
        (Shelf(folder), draft()._replace(effort=0)),
    ]
    for count, (place, other) in enumerate(others, start=2):
        place.ready(other)
        assert len(programs(folder)) == count
    monkeypatch.setattr(shelf, "digest_of_sources", lambda: "changed")
    Shelf(folder).ready(draft())
    assert len(programs(folder)) == 7
    with jax.numpy_rank_promotion("raise"):
        Shelf(folder).ready(draft())
    assert len(programs(folder)) == 8
    assert len(TRACED) == 8


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[:200] + bytes([content[200] ^ 1]) + content[201:],
        lambda content: b"",
        lambda content: b"[]\n" + content.partition(b"\n")[2],
        lambda content: content.replace(b'"donated": []', b'"donated": ["x"]'),
        lambda content: content.replace(b'"format": 1', b'"format": 2'),
    ],
    ids=["cut", "a bit", "empty", "no header", "wrong leaves", "another format"],
)
def test_a_damaged_program_is_made_anew_with_a_line_in_the_log(folder, caplog, damage):
    Shelf(folder).ready(draft())
    (path,) = programs(folder)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    program = Shelf(folder).ready(draft())
    assert program(*arguments())[0].left.tolist() == [0, 2, 4, 6]
    assert len(TRACED) == 2
    assert [path.name in line for line in caplog.messages] == [True] * 2  # it looks twice
    assert shelf._read(path) is not None


def test_a_link_on_the_shelf_is_not_followed(folder, tmp_path):
    Shelf(folder).ready(draft())
    (path,) = programs(folder)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    Shelf(folder).ready(draft())
    assert len(TRACED) == 2
    assert not path.is_symlink()


def test_a_shelf_that_cannot_be_written_is_done_without(folder, caplog, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shelf.durable, "write_atomic", full)
    assert Shelf(folder).ready(draft())(*arguments())[0].left.tolist() == [0, 2, 4, 6]
    assert "cannot be kept" in caplog.text
    assert not programs(folder)


def test_given_up_arguments_are_given_up_and_others_are_not(folder):
    def function(kept, lost):
        return kept["a"] + 1, lost + 1

    like = ({"a": jnp.ones(3)}, jnp.ones(3))
    for _ in range(2):
        program = Shelf(folder).ready(Draft("gives", function, lambda: like, donate=(1,)))
        kept, lost = {"a": jnp.ones(3)}, jnp.ones(3)
        program(kept, lost)
        assert lost.is_deleted()
        assert not kept["a"].is_deleted()


def test_a_program_is_got_ready_in_a_thread_and_an_error_comes_to_the_caller(folder):
    go_on = threading.Event()

    def waits(number):
        assert go_on.wait(60)
        return number + 1

    pending = Shelf(folder).begin(Draft("waits", waits, lambda: (jnp.ones(2),)))
    assert isinstance(pending, Pending)
    go_on.set()
    assert pending(jnp.ones(2)).tolist() == [2, 2]

    def fails(number):
        raise ValueError("no such skill")

    failing = Shelf(folder).begin(Draft("fails", fails, lambda: (jnp.ones(2),)))
    with pytest.raises(ValueError, match="no such skill"):
        failing.wait()  # type: ignore[attr-defined]


def test_less_effort_is_told_to_xla_and_changes_no_result(folder, monkeypatch):
    told: list[dict | None] = []

    def compile_as(lowered, options=None):
        told.append(options)
        return compile_lowered(lowered, options)

    compile_lowered = shelf.Lowered.compile
    monkeypatch.setattr(shelf.Lowered, "compile", compile_as)
    found = []
    for effort in (3, 1, 0):
        for place in (Shelf(folder), Shelf()):
            pair, _ = place.ready(draft(factor=1 / 3)._replace(effort=effort))(*arguments())
            found.append(pair.left.tolist())
    level = "xla_backend_optimization_level"
    assert told == [None, None, {level: 1}, {level: 1}, {level: 0}, {level: 0}]
    assert found == [found[0]] * 6


def test_programs_are_traced_in_the_order_in_which_they_were_begun(folder):
    go_on, order = threading.Event(), []

    def traced(name, number):
        assert name != "first" or go_on.wait(60)
        order.append(name)
        return number + 1

    names = ("first", "second", "third", "fourth")
    pending = [
        Shelf(folder).begin(Draft(name, partial(traced, name), lambda: (jnp.ones(2),)))
        for name in names
    ]
    go_on.set()
    for program in pending:
        assert program(jnp.ones(2)).tolist() == [2, 2]
    assert tuple(order) == names


def test_a_program_that_another_process_makes_holds_up_no_other(folder):
    Shelf(folder).ready(draft("taken"))
    (path,) = programs(folder)
    path.unlink()
    with locks.held(folder / "locks" / path.name, timeout_seconds=5):
        taken = Shelf(folder).begin(draft("taken"))
        Shelf(folder).begin(draft("free"))(*arguments())
        assert TRACED == ["taken", "free"]
    taken(*arguments())
    assert TRACED == ["taken", "free", "taken"]


def test_without_a_folder_a_program_is_compiled_and_keeps_its_trees():
    pair, hidden = Shelf().begin(draft())(*arguments())
    assert isinstance(hidden, Hidden)
    assert pair.left.tolist() == [0, 2, 4, 6]


def test_only_so_many_programs_are_kept(folder, monkeypatch):
    monkeypatch.setattr(shelf, "_MOST_KEPT", 2)
    for name in ("one", "two", "three"):
        Shelf(folder).ready(draft(name))
    assert sorted(path.name.partition("-")[0] for path in programs(folder)) == ["three", "two"]


def test_a_program_that_another_process_removes_meanwhile_is_no_trouble(
    folder, monkeypatch, caplog
):
    monkeypatch.setattr(shelf, "_MOST_KEPT", 1)
    Shelf(folder).ready(draft("kept"))
    glob = type(folder).glob
    gone = folder / f"gone{shelf.SUFFIX}"
    monkeypatch.setattr(type(folder), "glob", lambda *args: [gone, *glob(*args)])
    Shelf(folder).ready(draft("next"))
    monkeypatch.undo()
    assert "cannot be kept" not in caplog.text
    assert [path.name.partition("-")[0] for path in programs(folder)] == ["next"]


def test_sources_are_those_of_every_room_that_is_compiled(tmp_path, monkeypatch):
    sources.digest_of_sources.cache_clear()
    before = sources.digest_of_sources()
    sources.digest_of_sources.cache_clear()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    assert sources.digest_of_sources() != before
    sources.digest_of_sources.cache_clear()


ASK = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
from flowrl.compiling import Draft, Shelf

def function(x):
    print("traced")
    return jnp.sin(x) @ x

draft = Draft("sine", function, lambda: (jnp.ones(4),))
program = Shelf(Path(sys.argv[1], "programs")).ready(draft)
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


def test_a_program_that_is_begun_twice_is_made_once_for_all_runs(folder):
    one, other = Shelf(folder).begin(draft()), Shelf(folder).begin(draft())
    one(*arguments())
    other(*arguments())
    assert TRACED == ["sums"]
    assert one is other
    assert Shelf(folder).begin(draft(facts={"other": 1})) is not one


def test_a_program_that_failed_is_begun_again(folder):
    ready: list[bool] = []

    def fails(left):
        if not ready:
            raise ValueError("not yet")
        return left + 1

    again = Draft("again", fails, lambda: (jnp.ones(2),))
    with pytest.raises(ValueError, match="not yet"):
        Shelf(folder).begin(again)(jnp.ones(2))
    ready.append(True)
    assert Shelf(folder).begin(again)(jnp.ones(2)).tolist() == [2, 2]
