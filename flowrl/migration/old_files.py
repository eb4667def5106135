"""Reading a stranger's folder: nothing is followed, executed or larger than expected."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flowrl import durable
from flowrl.errors import FileRefusedError

JSON_LIMIT_BYTES = 64 * 2**20
_SETTINGS_LIMIT_BYTES = 2**20
_MOST_FRAMES = 2**53
_SETTING = re.compile(r"([A-Za-z_]\w{0,60}):[ ]*([^\s#][^#\n]{0,200})?")
_NESTED_VALUE = re.compile(r"[ ]+value:[ ]*([^\s#][^#\n]{0,200})")
_STEP = re.compile(r"\d{1,15}")
_ORBAX_MARKS = ("_METADATA", "checkpoint", "manifest.ocdbt")


def is_folder(path: Path) -> bool:
    """Whether a plain folder is there.

    Raises:
      FileRefusedError: a link is in its place, which is not followed.
    """
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False
    if stat.S_ISLNK(mode):
        raise FileRefusedError(f"{path} is a link, which is not followed; put the folder there")
    return stat.S_ISDIR(mode)


def is_file(path: Path) -> bool:
    """Whether something is there that is to be read as a file; reading refuses what is none."""
    return path.is_symlink() or path.exists()


def numbered(folder: Path, pattern: re.Pattern[str]) -> Iterator[tuple[int, re.Match[str], Path]]:
    """The folders in a folder whose names match, with the number that is the first group."""
    if not is_folder(folder):
        return
    found = []
    for path in folder.iterdir():
        match = pattern.fullmatch(path.name)
        if match is not None and match[1].isascii() and is_folder(path):
            found.append((int(match[1]), match, path))
    yield from sorted(found, key=lambda item: (item[0], item[2].name))


def settings(path: Path) -> dict[str, str]:
    """The plain settings in a config.yaml, by upper-case name; everything else is passed over.

    No YAML is parsed: a line `NAME: value`, or `NAME:` with a line `value: …` below it, is read
    as text.
    """
    if not is_file(path):
        return {}
    text = durable.read_bytes(path, limit_bytes=_SETTINGS_LIMIT_BYTES).decode(errors="replace")
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        nested = _NESTED_VALUE.fullmatch(line.rstrip())
        match = _SETTING.fullmatch(line.rstrip())
        if nested is not None and name:
            found.setdefault(name, nested[1].strip("'\" "))
        elif match is not None:
            name = match[1].upper()
            if match[2] is not None:
                found[name] = match[2].strip("'\" ")
    return found


def facts(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty when there is none."""
    return durable.read_json(path, limit_bytes=JSON_LIMIT_BYTES) if is_file(path) else {}


def frames_in(value: Any, place: Path) -> int | None:
    """A count of frames; None where nothing is said.

    Raises:
      FileRefusedError: it is negative, absurd, or no number.
    """
    if value is None:
        return None
    if isinstance(value, str) and re.fullmatch(r"\d{1,16}(\.0*)?|\d(\.\d{1,15})?e[+]?\d\d?", value):
        value = float(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 <= value <= _MOST_FRAMES:
        raise FileRefusedError(f"{place} has frames that are no count; correct it")
    return value


def share_in(value: Any) -> float | None:
    """A success rate; None where nothing sensible is said, since nothing decides by it."""
    try:
        share = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return share if 0.0 <= share <= 1.0 else None


def newest_step(policies: Path) -> Path | None:
    """The newest whole checkpoint of a `<i>_policies` folder; None without one.

    Raises:
      FileRefusedError: it holds a link or a special file.
    """
    steps = numbered(policies / "policies", re.compile(f"({_STEP.pattern})"))
    for _, _, step in reversed(list(steps)):
        tree = saved_place(step)
        if tree is not None:
            return tree
    return None


def saved_place(folder: Path) -> Path | None:
    """The folder in or below `folder` in which Orbax wrote a tree; None where it did not.

    Raises:
      FileRefusedError: it holds a link or a special file.
    """
    for place in (folder / "default", folder):
        if is_folder(place) and any((place / mark).is_file() for mark in _ORBAX_MARKS):
            for _ in durable.plain_files(place):  # refuses links before Orbax would follow them
                pass
            return place
    return None


def mapping(value: Any) -> Mapping[Any, Any]:
    """The value where it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}
