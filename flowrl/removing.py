"""Taking files and folders away, so that a crash leaves nothing half there that is read.

Only `flowrl.durable` uses this.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from flowrl.errors import FileRefusedError
from flowrl.faults import fault_point
from flowrl.flushing import fsync_dir
from flowrl.parts import PART_SUFFIX, remove_dead_part

TRASH_SUFFIX = ".trash"


def remove_file(path: Path) -> None:
    """Remove a file or a link for good; one that is not there is not missed."""
    try:
        path.unlink()
    except FileNotFoundError:
        return
    fsync_dir(path.parent)


def remove_tree(path: Path) -> None:
    """Remove a folder: first it loses its name at one stroke, then its content.

    A link is removed itself, never what it points to.
    """
    if not os.path.lexists(path):
        return
    trash = path if path.name.endswith(TRASH_SUFFIX) else _free_name(path)
    if trash != path:
        try:
            path.rename(trash)
        except FileNotFoundError:
            return  # another process removed it first
        fsync_dir(path.parent)
    fault_point("remove_tree.renamed")
    _empty_out(trash)
    fsync_dir(trash.parent)


def sweep(folder: Path) -> None:
    """Remove what a crash left half-removed or half-written directly below `folder`."""
    if not folder.is_dir():
        return
    for entry in list(folder.iterdir()):
        if entry.name.endswith(TRASH_SUFFIX) or entry.name.startswith(".tmp-"):
            remove_tree(entry)
    sweep_parts(folder)


def sweep_parts(folder: Path) -> None:
    """Remove the half-written files that dead writers left directly below `folder`."""
    if not folder.is_dir():
        return
    for entry in list(folder.iterdir()):
        if entry.name.startswith(".") and entry.name.endswith(PART_SUFFIX):
            remove_dead_part(entry)


def _empty_out(trash: Path) -> None:
    if trash.is_symlink() or not trash.is_dir():
        trash.unlink(missing_ok=True)
        return
    while os.path.lexists(trash):
        with suppress(FileNotFoundError):  # another process removes it, too
            shutil.rmtree(trash)


def _free_name(path: Path) -> Path:
    for number in range(1_000_000):
        trash = path.with_name(f"{path.name}.{number}{TRASH_SUFFIX}")
        if not os.path.lexists(trash):
            return trash
    raise FileRefusedError(f"{path.parent} is full of *.trash folders; remove them")
