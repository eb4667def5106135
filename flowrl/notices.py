"""Messages to users that stay until withdrawn, one file each: a leaf that several packages use.

`flowrl status` shows them; no decision depends on them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

from flowrl import storage
from flowrl.errors import FileRefusedError
from flowrl.paths import GraphPaths
from flowrl.redaction import redacted, secrets_of
from flowrl.storage import records

STAGES = "stages"  # which stage runs; of no account without an orchestrator
SWEEP = "sweep"  # in a sweep's folder: how far it is


def publish(graph_paths: GraphPaths, key: str, text: str) -> None:
    """Show `text`, without secrets of this process's environment, until it is withdrawn.

    The key is a word of lower case letters, digits and `_`. FileNotFoundError: the graph is gone.
    """
    storage.make_dir(graph_paths.notices, parents=False)
    shown = redacted(text, secrets_of(os.environ))[:2_000]
    records.write(graph_paths.notice(key), {"text": shown})


def withdraw(graph_paths: GraphPaths, key: str) -> None:
    """Remove a notice, if it is there."""
    storage.remove_file(graph_paths.notice(key))


def read(graph_paths: GraphPaths) -> Mapping[str, str]:
    """Return all notices by key, sorted; the text of a damaged one is the error."""
    return {
        path.stem: _text(graph_paths, path.stem)
        for path in sorted(graph_paths.notices.glob("*.json"))
    }


def find(graph_paths: GraphPaths, key: str) -> str | None:
    """Return the text of one notice; None if it is missing or damaged."""
    with suppress(FileRefusedError):
        return _read(graph_paths, key)
    return None


def _text(graph_paths: GraphPaths, key: str) -> str:
    try:
        return _read(graph_paths, key)
    except FileRefusedError as error:
        return f"a notice cannot be read: {error}"


def _read(graph_paths: GraphPaths, key: str) -> str:
    return str(records.read_document(graph_paths.notice(key)).get("text"))
