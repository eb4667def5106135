"""Checks of files to write, before a command works for minutes; alone, because four use them."""

from __future__ import annotations

from pathlib import Path

from flowrl import storage
from flowrl.errors import ConfigError, FileRefusedError, classify_io_error, format_error
from flowrl.paths import graph_around


def check_output(path: Path, *, endings: tuple[str, ...] = ()) -> None:
    """Make sure that a folder can be made, or with `endings` a file; raises ConfigError."""
    if endings:
        _check_file(path, endings)
    if outer := graph_around(path):
        what = f"-o {path} is inside the graph {outer.root}, where flowrl alone writes"
        raise ConfigError(f"{what}; choose a folder outside")
    try:
        storage.try_writing(path.parent if endings else path)
    except OSError as error:
        if classify_io_error(error) == "disk":
            raise
        why = f"({format_error(error)})"
        raise ConfigError(f"-o {path} cannot be written {why}; choose another") from error


def _check_file(path: Path, endings: tuple[str, ...]) -> None:
    """Make sure of the name's ending, and that no folder, pipe or device has the name."""
    if path.name in endings:
        raise ConfigError(f"-o {path} is an ending alone; put a name before it")
    if path.suffix not in endings:
        raise ConfigError(f"-o {path} does not end in {' or '.join(endings)}; choose one")
    if path.is_dir():
        raise ConfigError(f"-o {path} is a folder; name a file")
    if path.exists() and not path.is_file():
        raise ConfigError(f"-o {path} is a pipe or a device; name a file")


def check_kept(path: Path) -> Path:
    """Return the path of a file that flowrl keeps in a graph; FileRefusedError for a folder."""
    if path.is_dir():
        raise FileRefusedError(f"{path} is a folder, where a file belongs; move it away")
    return path
