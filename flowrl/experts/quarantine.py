"""Where damaged files go: aside, at the same place below `quarantine/`, with the reason beside.

Nothing in it is used again. What lies there is a loss that is known: `flowrl fsck` names it, and
no longer counts it as something to be put right.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from flowrl import storage
from flowrl.errors import FileRefusedError
from flowrl.paths import GraphPaths

_REASON = ".why.txt"


def make_ready(layout: GraphPaths, path: Path) -> Path:
    """The place that `path` would be moved to, once it is sure that nothing is in the way.

    Raises:
      FileRefusedError: a link, a file or another disk is in the place of a folder of quarantine/.
    """
    place = _place(layout, path)
    for folder in reversed((place, *place.parents)):
        if folder.is_relative_to(layout.quarantine) and folder != place and os.path.lexists(folder):
            _check_folder(layout, folder)
    storage.make_dir(place.parent)
    return place


def _check_folder(layout: GraphPaths, folder: Path) -> None:
    if folder.is_symlink() or not folder.is_dir():
        what = "is no folder of its own"
    elif folder.stat().st_dev != layout.root.stat().st_dev:
        what = "is on another disk than the graph"
    else:
        return
    raise FileRefusedError(
        f"{folder} {what}, and damaged files cannot be moved into it; move it away: it is made "
        "again"
    )


def put(layout: GraphPaths, path: Path, why: str) -> Path:
    """Move a damaged file or folder of the graph aside; of a lost one, keep the reason alone.

    Raises:
      FileRefusedError: as `make_ready`.
    """
    place = make_ready(layout, path)
    if os.path.lexists(path):
        for number in itertools.count(1):
            if not os.path.lexists(place):
                break
            place = _place(layout, path).with_name(f"{path.name}.{number}")
        storage.move_dir(path, place)
    storage.write_atomic(_reason(_place(layout, path)), why.rstrip() + "\n")
    return place


def holds(layout: GraphPaths, path: Path) -> bool:
    """Whether what was at `path` is known to be damaged or lost."""
    return _reason(_place(layout, path)).exists()


def _place(layout: GraphPaths, path: Path) -> Path:
    return layout.quarantine / path.relative_to(layout.root)


def _reason(place: Path) -> Path:
    return place.with_name(place.name + _REASON)
