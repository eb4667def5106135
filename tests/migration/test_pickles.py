"""Pickles are read without unpickling; all but plain arrays and containers is refused."""

from __future__ import annotations

import pickle
import time
import tracemalloc
from collections import OrderedDict
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.errors import FileRefusedError
from flowrl.migration.networks import numbers
from flowrl.migration.pickles import read_pickle
from tests.migration.hostile import CANARY, DEEP, HOSTILE, MANY_OPCODES
from tests.migration.old_graphs import pair

PROTOCOLS = range(6)


def written(folder: Path, payload: bytes) -> Path:
    path = folder / "params.pkl"
    path.write_bytes(payload)
    return path


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_pickle_is_refused_in_one_line_and_runs_nothing(payload, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileRefusedError) as refusal:
        read_pickle(written(tmp_path, payload))
    assert "params.pkl is refused: " in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1
    assert str(refusal.value).isprintable()
    assert not (tmp_path / CANARY).exists()


def test_there_are_enough_hostile_pickles_and_all_differ():
    assert len(set(HOSTILE.values())) >= 80


def test_the_hostile_pickles_that_run_code_do_so_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pickle.loads(HOSTILE["os.system"])  # the canary is one
    assert (tmp_path / CANARY).exists()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        np.arange(6, dtype=">f4").reshape(3, 2),
        np.full((), 2.5, np.float32),
        jnp.arange(6.0).reshape(3, 2),
        np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2],
    ],
    ids=["rows first", "columns first", "big-endian", "no dimension", "of jax", "a view"],
)
def test_an_honest_array_is_read_as_it_was(array, protocol, tmp_path):
    found = read_pickle(written(tmp_path, pickle.dumps({"a": array}, protocol=protocol)))
    np.testing.assert_array_equal(numbers(found["a"]), np.asarray(array, np.float32))
    assert found["a"].shape == np.shape(array)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_experts_networks_are_read_bit_for_bit(protocol, tmp_path):
    actor, critic = pair(3)
    stored = {"actor_network": actor, "critic_network": critic}
    found = read_pickle(written(tmp_path, pickle.dumps(stored, protocol=protocol)))
    for part, layers in stored.items():
        for layer, arrays in layers.items():
            for kind, array in arrays.items():
                assert numbers(found[part][layer][kind]).tobytes() == array.tobytes()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_values_are_read_as_they_were(protocol, tmp_path):
    value = {
        "text": "木 ü\n",
        "numbers": [1, -1, 2**70, 255, 65536, 1.5, float("inf"), True, False, None],
        "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        7: {"empty": {}, "list": []},
        "rate": np.float64(0.75),
        "count": np.int64(7),
        "ordered": OrderedDict(a=1, b=2),
    }
    assert read_pickle(written(tmp_path, pickle.dumps(value, protocol=protocol))) == value


def test_a_deep_pickle_and_one_with_many_opcodes_end_soon(tmp_path):
    begin = time.monotonic()
    found = read_pickle(written(tmp_path, DEEP))
    assert isinstance(found, list)
    with pytest.raises(FileRefusedError, match="opcodes"):
        read_pickle(written(tmp_path, MANY_OPCODES))
    assert time.monotonic() - begin < 60


def test_no_refused_pickle_takes_more_memory_than_a_multiple_of_itself(tmp_path):
    path = tmp_path / "params.pkl"
    for payload in HOSTILE.values():
        path.write_bytes(payload)
        tracemalloc.start()
        with pytest.raises(FileRefusedError):
            read_pickle(path)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 2**20 + 100 * len(payload)


def test_a_link_in_the_place_of_a_pickle_is_not_followed(tmp_path):
    target = tmp_path / "elsewhere"
    target.write_bytes(pickle.dumps({}))
    (tmp_path / "params.pkl").symlink_to(target)
    with pytest.raises(FileRefusedError, match="cannot be read"):
        read_pickle(tmp_path / "params.pkl")
