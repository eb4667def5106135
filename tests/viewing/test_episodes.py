"""Recorded episodes: what is written can be read, and what is no recording is one line."""

from __future__ import annotations

import contextlib
import io
import json
import zipfile
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.agent import Agent
from flowrl.envs.world_digest import world_digest
from flowrl.errors import ConfigError, FileRefusedError
from flowrl.evaluation import ROWS, Tally, _chosen, _columns
from flowrl.measures.episodes import EpisodesOrigin, RecordedEpisodes, decode_episodes
from flowrl.output import check_kept
from tests.viewing.test_film import bare, packed

ORIGIN = EpisodesOrigin(skill="Bake Pie", env_name="Tiny", module="00", generation=1, seed=7)


def recorded(lengths: Sequence[int]) -> RecordedEpisodes:
    total = sum(lengths)
    columns = {
        "world_keys": np.arange(2 * len(lengths), dtype=np.uint32).reshape(-1, 2),
        "lengths": np.array(lengths, np.int32),
        "success": np.arange(len(lengths)) % 2 == 0,
        "actions": np.arange(total, dtype=np.int16),
        "steps": np.arange(total, dtype=np.int16) // 2,
        "step_keys": np.arange(2 * total, dtype=np.uint32).reshape(-1, 2),
        "rewards": np.arange(total, dtype=np.float32),
        "digests": np.arange(total, dtype=np.uint32),
    }
    return RecordedEpisodes(origin=ORIGIN, columns=columns)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_episodes_are_read_as_they_were_written(lengths):
    found = decode_episodes(recorded(lengths).encode(), "episodes.npz")
    assert found.origin == ORIGIN
    assert len(found) == len(lengths)
    begun = 0
    for number, (episode, length) in enumerate(zip(found, lengths, strict=True), 1):
        assert episode.number == number
        assert episode.success == (number % 2 == 1)
        assert episode.world_key.tolist() == [2 * number - 2, 2 * number - 1]
        assert episode.actions.tolist() == [*range(begun, begun + length)]
        assert episode.steps.tolist() == [n // 2 for n in range(begun, begun + length)]
        assert len(episode.step_keys) == len(episode.digests) == len(episode.rewards) == length
        begun += length


@settings(max_examples=150)
@given(st.data())
def test_a_damaged_file_is_a_recording_or_one_line(data):
    content = bytearray(recorded([3, 2]).encode())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(content))))
    with contextlib.suppress(FileRefusedError):
        found = decode_episodes(bytes(content[:cut]), "episodes.npz")
        assert sum(len(episode.actions) for episode in found) == found.columns["lengths"].sum()


COLUMNS = sorted(recorded([3, 2]).columns)
ARRAYS = st.builds(
    lambda kind, shape: np.ones(shape, kind),
    st.sampled_from(["u4", "i4", "i2", "f4", "f8", "b1", "U3", "i8", "V4"]),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
)


@settings(max_examples=150)
@given(changed=st.dictionaries(st.sampled_from([*COLUMNS, "record"]), ARRAYS, min_size=1))
def test_a_column_of_another_form_is_refused(changed):
    good = recorded([3, 2])
    said = {"record": np.array(json.dumps({**vars_of(ORIGIN)})), **good.columns}
    same = all(
        name in good.columns
        and array.dtype == good.columns[name].dtype
        and array.shape == good.columns[name].shape
        for name, array in changed.items()
    )
    content = packed(**(said | changed))
    if same and "lengths" not in changed:
        assert len(decode_episodes(content, "episodes.npz")) == 2
    else:
        with pytest.raises(FileRefusedError, match=r"episodes\.npz.*; record again"):
            decode_episodes(content, "episodes.npz")


def vars_of(record: EpisodesOrigin) -> dict[str, object]:
    return {name: getattr(record, name) for name in EpisodesOrigin.__slots__}


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", bare(), packed(), packed(record=["a"])])
def test_what_is_no_recording_is_refused(content):
    with pytest.raises(FileRefusedError, match=r"episodes\.npz.*; record again"):
        decode_episodes(content, "episodes.npz")


def test_a_packed_file_is_refused_unread(tmp_path):
    """A thousandth of its size can be written; what it would fill is memory."""
    np.savez_compressed(tmp_path / "bomb.npz", record=np.zeros(10**7))
    content = (tmp_path / "bomb.npz").read_bytes()
    with pytest.raises(FileRefusedError, match=r"is packed, and could be of any size"):
        decode_episodes(content, "episodes.npz")


def test_a_length_that_no_array_has_is_refused():
    remade = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(packed(record=np.array("a")))) as found:
        member = found.read("record.npy").replace(
            b"(), }" + b" " * 30, b"(1" + b"0" * 28 + b",), }"
        )
    with zipfile.ZipFile(remade, "w") as made:
        made.writestr("record.npy", member)
    with pytest.raises(FileRefusedError, match=r"episodes\.npz cannot be read.*; record again"):
        decode_episodes(remade.getvalue(), "episodes.npz")


def test_nothing_recorded_is_read_as_it_was_written():
    """No episode has failed, and none but those were asked for."""
    assert len(decode_episodes(recorded([]).encode(), "episodes.npz")) == 0


@given(
    success=st.lists(st.booleans(), min_size=1, max_size=40),
    first=st.integers(0, 50),
    failed=st.integers(0, 50),
)
def test_the_first_episodes_and_the_first_failures_are_chosen(success, first, failed):
    found = _chosen(np.array(success), first, failed)
    failures = [number for number, good in enumerate(success) if not good]
    assert found == sorted({*range(min(first, len(success))), *failures[:failed]})


@given(st.data())
def test_chosen_episodes_have_their_own_timesteps(data):
    """Each cell holds the number of its episode and timestep."""
    count = data.draw(st.integers(1, 3))
    tallies = []
    for block in range(count):
        rows = 4
        lengths = np.array(data.draw(st.lists(st.integers(1, 9), min_size=rows, max_size=rows)))
        numbers = ROWS * block + np.arange(rows)
        cells = 100 * numbers[None] + np.arange(9)[:, None]
        good = np.ones((rows, 2), bool)
        tally = Tally(*[None] * 7)._replace(length=lengths, success=good)
        tallies.append(tally._replace(seen={"actions": cells}, world_keys=numbers[:, None]))
    everything = [ROWS * block + row for block in range(count) for row in range(4)]
    chosen = data.draw(st.lists(st.sampled_from(everything), unique=True))
    columns = _columns(tallies, chosen)
    assert columns["world_keys"][:, 0].tolist() == chosen
    want = [
        100 * number + timestep
        for number, length in zip(chosen, columns["lengths"], strict=True)
        for timestep in range(length)
    ]
    assert columns["actions"].tolist() == want


WORLD = {
    "map": np.arange(24, dtype=np.int32).reshape(4, 6),
    "light": np.linspace(0, 1, 5, dtype=np.float32),
    "asleep": np.array(False),
    "health": np.array(9, np.int8),
    "key": jax.random.key(3),
}
DIGEST = jax.jit(world_digest)


@given(st.data())
def test_one_changed_number_changes_the_digest(data):
    name = data.draw(st.sampled_from(["map", "light", "asleep", "health"]))
    leaf = np.array(WORLD[name])
    place = data.draw(st.integers(0, leaf.size - 1))
    old = leaf.reshape(-1)[place]
    new = data.draw(st.integers(0, 100)) if leaf.dtype != bool else not old
    new = np.asarray(new, leaf.dtype)
    leaf.reshape(-1)[place] = new
    changed = int(DIGEST({**WORLD, name: leaf}, np.int32(1))) != int(DIGEST(WORLD, np.int32(1)))
    assert changed == (old != new)
    assert int(DIGEST(WORLD, np.int32(2))) != int(DIGEST(WORLD, np.int32(1)))


@pytest.mark.parametrize("given", [None, 0, "episodes.npz", [1]])
def test_only_a_recorded_episode_is_replayed(given):
    agent: Any = Agent(record=None, params={}, modules={})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not a recorded episode; take one of read_episodes"):
        next(agent.replay("Collect Wood", given))


def test_a_folder_in_the_place_of_a_kept_file_is_named(tmp_path):
    assert check_kept(tmp_path / "video.mp4") == tmp_path / "video.mp4"
    with pytest.raises(FileRefusedError, match=r"is a folder, where a file belongs; move it away"):
        check_kept(tmp_path)
