"""Whether a folder holds the very files of an expert's version."""

from __future__ import annotations

from pathlib import Path

from flowrl import storage
from flowrl.errors import ExpertCorruptError, FileRefusedError
from flowrl.runs import ExpertVersion

REMEDY = "restore it from a backup, or let flowrl fsck GRAPH_PATH --repair find a whole version"


def check_digest(folder: Path, version: ExpertVersion) -> None:
    """Raise ExpertCorruptError when a folder is not a version's, or holds a link or the like."""
    try:
        found = storage.tree_digest(folder)
    except FileRefusedError as error:
        raise ExpertCorruptError(f"expert {version.index} ({version.skill}): {error}") from error
    refuse_other(found, folder, version)


def refuse_other(found: str, folder: Path, version: ExpertVersion) -> None:
    """Raise ExpertCorruptError when the digest of a folder's files is not that of the version."""
    if found != version.sha256:
        raise ExpertCorruptError(
            f"expert {version.index} ({version.skill}): {folder} has sha256 {found[:12]}…, "
            f"{version.sha256[:12]}… was committed; {REMEDY}"
        )
