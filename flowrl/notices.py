"""Messages to users that stay until withdrawn, one file each: a leaf that several packages use.

`flowrl status` shows them; no decision depends on them.
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
# The path cannot be used. A full or broken disk raises other errors, which are not caught.
_UNUSABLE = (NotADirectoryError, IsADirectoryError, FileExistsError, PermissionError)


@dataclass(frozen=True, slots=True)
class Notice:
    """The content of a notice's file."""

    text: str


def publish(layout: GraphPaths, key: str, text: str) -> None:
    """Show `text` until it is withdrawn; `key` is a word of lower case letters, digits and `_`.

    Secrets of this process's environment are left out. If the path cannot be used, the text is
    logged instead.

    Raises:
      OSError: the disk is full, broken or read-only.
    """
    shown = redacted(text, secrets_of(os.environ))[:2_000]
    try:
        storage.make_dir(layout.notices)
        records.write(layout.notice(key), Notice(text=shown))
    except _UNUSABLE as error:
        logger.warning("a notice cannot be shown (%s): %s", error, shown)


def withdraw(layout: GraphPaths, key: str) -> None:
    """Remove a notice, if it is there."""
    try:
        storage.remove_file(layout.notice(key))
    except _UNUSABLE as error:
        logger.warning("a notice cannot be withdrawn: %s", error)


def read(layout: GraphPaths) -> Mapping[str, str]:
    """Return all notices by key, sorted; the text of a damaged one is the error."""
    if not layout.notices.is_dir():
        return {}
    keys = (path.stem for path in layout.notices.glob("*.json"))
    return {key: _read(layout, key) for key in sorted(keys) if _KEY.fullmatch(key)}


def _read(layout: GraphPaths, key: str) -> str:
    try:
        return records.read(layout.notice(key), Notice, sealed=False, limit_bytes=_LIMIT_BYTES).text
    except FileRefusedError as error:
        return f"a notice cannot be read: {error}"
