"""What people should know of a graph besides its skills: one small file per notice.

`flowrl status` shows them all; nothing decides by them.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from flowrl import storage
from flowrl.errors import FileRefusedError
from flowrl.paths import GraphPaths
from flowrl.redaction import redacted, secrets_of
from flowrl.storage import records

logger = logging.getLogger(__name__)
_KEY = re.compile(r"[a-z0-9_]{1,80}")
_LIMIT_BYTES = 10_000
# What is wrong with the place itself; a full or broken disk is another matter.
_NO_PLACE = (NotADirectoryError, IsADirectoryError, FileExistsError, PermissionError)


@dataclass(frozen=True, slots=True)
class Notice:
    """What the file of one notice holds."""

    text: str


def tell(layout: GraphPaths, key: str, text: str) -> None:
    """Show `text` until it is withdrawn; `key` is a word of lower case letters, digits and `_`.

    Secrets of this process's environment are left out. If something else is in its place it
    is logged: nobody stops because of a notice.

    Raises:
      OSError: the disk is full, broken or read-only.
    """
    said = redacted(text, secrets_of(os.environ))[:2_000]
    try:
        storage.make_dir(layout.notices)
        records.write(layout.notice(key), Notice(text=said))
    except _NO_PLACE as error:
        logger.warning("a notice cannot be shown (%s): %s", error, said)


def withdraw(layout: GraphPaths, key: str) -> None:
    """Show this notice no more; one that is not there is not missed."""
    try:
        storage.remove_file(layout.notice(key))
    except _NO_PLACE as error:
        logger.warning("a notice cannot be withdrawn: %s", error)


def read(layout: GraphPaths) -> Mapping[str, str]:
    """Every notice by its key, sorted; one that cannot be read says so instead."""
    if not layout.notices.is_dir():
        return {}
    keys = (path.stem for path in layout.notices.glob("*.json"))
    return {key: _read(layout, key) for key in sorted(keys) if _KEY.fullmatch(key)}


def _read(layout: GraphPaths, key: str) -> str:
    try:
        return records.read(layout.notice(key), Notice, sealed=False, limit_bytes=_LIMIT_BYTES).text
    except FileRefusedError as error:
        return f"a notice cannot be read: {error}"
