"""Copying plain files byte by byte, their digests taken on the way; only `flowrl.durable` uses it.

What is copied has bytes of its own on the disk: nobody who can still write to the source, for
instance a process that a trainer left behind, can change the copy.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from flowrl.faults import fault_point
from flowrl.parts import PLAIN_NEW, write_all
from flowrl.reading import CHUNK_BYTES, open_plain


def copy_below(files: Iterable[Path], source: Path, target: Path) -> str:
    """Copy, without making it durable; returns the digest that the copy has as a tree."""
    total = hashlib.sha256()
    made = {target}
    for file in files:
        inside = str(file.relative_to(source))
        place = target / inside
        if place.parent not in made:
            made |= _make_folders(place.parent, target)
        descriptor = os.open(place, PLAIN_NEW | os.O_EXCL, 0o600)
        try:
            content = copy_content(file, descriptor, f"copy.{file.name}")
        finally:
            os.close(descriptor)
        total.update(f"{inside}\0{content}\n".encode())
    return total.hexdigest()


def _make_folders(folder: Path, root: Path) -> set[Path]:
    """Make a folder below `root`, and what is missing in between; returns all of them."""
    folders = {folder, *folder.parents} - {root, *root.parents}
    for missing in sorted(folders):
        missing.mkdir(mode=0o700, exist_ok=True)
    return folders


def copy_content(source: Path, descriptor: int, point: str) -> str:
    """Copy one file's bytes; returns their sha256."""
    content = hashlib.sha256()
    with open_plain(source) as reader:
        while chunk := reader.read(CHUNK_BYTES):
            content.update(chunk)
            write_all(descriptor, chunk, point)
            if len(chunk) == CHUNK_BYTES:  # let the disk begin while the next ones are read
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    fault_point(point)
    return content.hexdigest()
