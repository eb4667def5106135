"""A folder held in memory, to be laid out again and again, and what is found in one."""

from __future__ import annotations

import os
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEFTOVERS = (".part", ".trash")


@dataclass(frozen=True, slots=True)
class Frozen:
    """Every folder, file and link below a root, by relative name."""

    folders: tuple[str, ...]
    files: tuple[tuple[str, bytes], ...]
    links: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, root: Path) -> Frozen:
        """What is below `root` now."""
        folders, files, links = [], [], []
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.is_symlink():
                links.append((name, str(path.readlink())))
            elif path.is_dir():
                folders.append(name)
            else:
                files.append((name, path.read_bytes()))
        return cls(tuple(folders), tuple(files), tuple(links))

    def lay_out(self, root: Path) -> None:
        """Make `root` this very folder, whatever it was."""
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(mode=0o700)
        for name in self.folders:
            (root / name).mkdir(mode=0o700)
        for name, content in self.files:
            (root / name).write_bytes(content)
        for name, target in self.links:
            (root / name).symlink_to(target)


def content(root: Path) -> dict[str, Any]:
    """Every folder and file below `root` but lock files; the content of files."""
    found: dict[str, Any] = {}
    for folder, folders, files in os.walk(root):
        inside = folder[len(str(root)) :]
        found |= dict.fromkeys(f"{inside}/{name}" for name in folders)
        for name in files:
            if not name.endswith(".lock"):
                found[f"{inside}/{name}"] = _meaning(f"{folder}/{name}")
    return found


def _meaning(path: str) -> Any:
    """A file's bytes; of the pickle its facts, which have more than one form."""
    found = Path(path).read_bytes()
    return pickle.loads(found) if path.endswith(".pkl") else found


def leftovers(root: Path, *, parts_only: bool = False) -> list[str]:
    """The names below `root` that only a write or a removal under way may have."""
    suffixes = LEFTOVERS[:1] if parts_only else LEFTOVERS
    return [
        f"{folder}/{name}"
        for folder, folders, files in os.walk(root)
        for name in (*folders, *files)
        if name.endswith(suffixes) or (not parts_only and name.startswith(".tmp-"))
    ]
