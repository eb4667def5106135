"""A record comes back as it was written, or is refused by file, key, value and remedy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl import storage
from flowrl.errors import FileRefusedError, FormatVersionError
from flowrl.storage import records
from flowrl.storage.records import Natural, Phase, Positive, Share, Word


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class Circle:
    kind: ClassVar[str] = "circle"
    radius: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Square:
    kind: ClassVar[str] = "square"
    side: Natural


def even(value: int) -> int:
    if value % 2:
        raise ValueError("it is odd")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Everything:
    name: str
    word: Word
    phase: Phase
    count: Natural
    most: Positive | None
    rates: tuple[Share, ...]
    pair: tuple[int, float]
    even: Annotated[int, even]
    shapes: Mapping[str, tuple[Natural, ...]]
    form: Circle | Square
    colour: Colour
    choice: Literal["a", "b"]
    folder: Path
    data: Mapping[str, Any]
    flag: bool = False

    def __post_init__(self) -> None:
        if self.flag and self.most is None:
            raise ValueError("a flag without most")


RECORD = Everything(
    name="木",
    word="v1.a_b-c",
    phase="training",
    count=3,
    most=None,
    rates=(0.0, 1.0),
    pair=(-2, 2.5),
    even=4,
    shapes={"actor/kernel": (4, 2)},
    form=Square(side=2),
    colour=Colour.RED,
    choice="b",
    folder=Path("a/b"),
    data={"deep": {"b": [1, None, True]}},
)
REFUSED = [
    ("name", 7, "name is 7, not text"),
    ("word", "../x", "word is '../x': must be a plain word"),
    ("word", "", "must be a plain word"),
    ("phase", "\x1b[2J", "must be a word of lower-case letters"),
    ("count", -1, "count is -1: must be at least 0"),
    ("count", True, "count is True, not a whole number"),
    ("count", 1.0, "not a whole number"),
    ("count", "1", "not a whole number"),
    ("count", 2**63, "not a whole number of 64 bits"),
    ("most", 0, "most is 0: must be at least 1"),
    ("rates", [0.5, 1.5], r"rates\[1\] is 1.5: must lie in \[0, 1\]"),
    ("rates", 0.5, "rates is 0.5, not a list"),
    ("pair", [1], "not a list of 2"),
    ("pair", [1, 1e13], r"pair\[1\] is 1\d*\.0, not a finite number"),
    ("pair", [1, "nan"], "not a finite number"),
    ("even", 3, "even is 3: it is odd"),
    ("shapes", {"k": [4, -2]}, r"shapes.k\[1\] is -2"),
    ("shapes", [], "not a JSON object"),
    ("form", {"kind": "line"}, "form.kind is 'line', not one of circle, square"),
    ("form", {"kind": "circle"}, "form.radius is missing"),
    ("form", 1, "form.kind is None"),
    ("colour", "blue", "colour is 'blue': .*Colour"),
    ("colour", ["red"], "is not a valid Colour"),
    ("choice", "c", "not one of a, b"),
    ("choice", ["a"], "not one of a, b"),
    ("flag", 1, "flag is 1, not true or false"),
    ("flag", True, "a flag without most"),
    ("flags", True, "flags is unknown"),
]


def write_changed(path: Path, **changes: object) -> None:
    document = {"format": 1, **records.to_json(RECORD), **changes}
    path.write_text(json.dumps(records.sealed(document)))


def test_a_record_comes_back_as_written(tmp_path):
    records.write(tmp_path / "x.json", RECORD)
    assert records.read(tmp_path / "x.json", Everything) == RECORD


@pytest.mark.parametrize(("key", "value", "problem"), REFUSED, ids=lambda value: repr(value)[:30])
def test_a_wrong_value_is_refused_by_file_key_and_remedy(tmp_path, key, value, problem):
    path = tmp_path / "x.json"
    write_changed(path, **{key: value})
    with pytest.raises(FileRefusedError, match=rf"x\.json is malformed: .*{problem}.*; try again"):
        records.read(path, Everything, remedy="try again")


@pytest.mark.parametrize("key", ["name", "most", "form"])
def test_a_missing_key_is_refused_and_a_default_is_not(tmp_path, key):
    document = {"format": 1, **records.to_json(RECORD)}
    del document["flag"]
    (tmp_path / "x.json").write_text(json.dumps(records.sealed(document)))
    assert records.read(tmp_path / "x.json", Everything) == RECORD
    del document[key]
    (tmp_path / "x.json").write_text(json.dumps(records.sealed(document)))
    with pytest.raises(FileRefusedError, match=f"{key} is missing"):
        records.read(tmp_path / "x.json", Everything)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused(tmp_path, number):
    path = tmp_path / "x.json"
    path.write_text(f'{{"format": 1, "kind": "circle", "radius": {number}}}')
    with pytest.raises(FileRefusedError, match=r"x\.json is (not valid JSON|malformed)"):
        records.read(path, Circle, sealed=False)
    with pytest.raises(ValueError, match="JSON"):
        records.write(path, Circle(radius=float(number)))


def test_the_seal_is_of_the_content_and_not_of_its_form(tmp_path):
    path = tmp_path / "x.json"
    records.write(path, RECORD)
    document = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(document.items())), ensure_ascii=False))
    assert records.read(path, Everything) == RECORD


@pytest.mark.parametrize("seal", ["0" * 64, "", 7], ids=repr)
@pytest.mark.parametrize("sealed", [True, False])
def test_a_wrong_seal_is_refused_by_the_file_s_name(tmp_path, seal, sealed):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"format": 1, "a": 1, "sha256": seal}))
    with pytest.raises(FileRefusedError, match=r"x\.json is damaged or was edited"):
        records.read_document(path, sealed=sealed)


def test_only_files_of_other_programs_may_lack_the_seal(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"format": 1, "a": 1}))
    assert records.read_document(path, sealed=False) == {"a": 1}
    with pytest.raises(FileRefusedError, match="has no seal"):
        records.read_document(path)


def test_what_runs_write_is_read_once(tmp_path, monkeypatch):
    (tmp_path / "progress.json").write_text("{")
    monkeypatch.setattr(storage.time, "sleep", lambda _: pytest.fail("it waits"))
    with pytest.raises(FileRefusedError, match="not valid JSON"):
        records.read(tmp_path / "progress.json", Circle, sealed=False)


@pytest.mark.parametrize("found", [2, 0, None, True, "1", [1], 1.0], ids=repr)
def test_a_format_that_is_not_known_is_refused_and_not_guessed(tmp_path, found):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(records.sealed({"format": found})))
    with pytest.raises(FormatVersionError, match="format"):
        records.read_document(path)


@given(st.integers(min_value=0), st.integers(0, 7))
def test_no_flipped_bit_is_read_as_something_else(tmp_path_factory, place, bit):
    path = tmp_path_factory.mktemp("record") / "x.json"
    records.write(path, RECORD)
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 1 << bit
    path.write_bytes(content)
    try:
        found = records.read(path, Everything)
    except FileRefusedError:
        return
    assert found == RECORD
