"""A sealed record comes back as written, or is refused by its name."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import FileRefusedError, FormatVersionError
from flowrl.storage import records

FACTS = {"format": 2, "name": "木", "list": [1, 2.5, None, True], "deep": {"b": 1, "a": {}}}


def read(path):
    return records.read(path, formats=(1, 2), sealed_from=2)


def test_a_record_comes_back_as_written(tmp_path):
    records.write(tmp_path / "x.json", FACTS)
    assert read(tmp_path / "x.json") == FACTS


def test_the_seal_is_of_the_content_and_not_of_its_form(tmp_path):
    path = tmp_path / "x.json"
    records.write(path, FACTS)
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(facts.items())), ensure_ascii=False))
    assert read(path) == FACTS


@pytest.mark.parametrize("wrong", ["0" * 64, "", 7, None], ids=repr)
def test_a_wrong_seal_is_refused_by_the_file_s_name(tmp_path, wrong):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({**FACTS, "sha256": wrong}))
    with pytest.raises(FileRefusedError, match=r"x\.json is damaged or was edited"):
        read(path)


def test_only_a_format_from_before_the_seals_may_lack_one(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({**FACTS, "format": 1}))
    assert read(path)["format"] == 1
    path.write_text(json.dumps(FACTS))
    with pytest.raises(FileRefusedError, match="has no seal"):
        read(path)


@pytest.mark.parametrize("found", [3, 0, None, True, "2", [2], 2.0], ids=repr)
def test_a_format_that_is_not_known_is_refused_and_not_guessed(tmp_path, found):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(records.sealed({**FACTS, "format": found})))
    with pytest.raises(FormatVersionError, match="format"):
        read(path)


@given(st.integers(min_value=0), st.integers(0, 7))
def test_no_flipped_bit_is_read_as_something_else(tmp_path_factory, place, bit):
    path = tmp_path_factory.mktemp("record") / "x.json"
    records.write(path, FACTS)
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 1 << bit
    path.write_bytes(content)
    try:
        found = read(path)
    except FileRefusedError:
        return
    assert found == FACTS
