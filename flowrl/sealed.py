"""Records with a seal: JSON files that carry the sha256 of their own content.

A flipped bit in a JSON file may still parse, as another number. The seal tells it from what was
written. It guards against accidents, not against people: whoever edits a file can seal it again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from flowrl import durable
from flowrl.errors import FileRefusedError, FormatVersionError

KEY = "sha256"


def seal_of(document: Mapping[str, Any]) -> str:
    """sha256 over the content of a JSON object, whatever its spaces and the order of its keys.

    >>> seal_of({"a": 1, "b": [2.5]}) == seal_of({"b": [2.5], "a": 1, "sha256": "…"})
    True
    """
    content = {key: value for key, value in document.items() if key != KEY}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with its seal, which comes last."""
    plain = json.loads(json.dumps({key: document[key] for key in document if key != KEY}))
    return {**plain, KEY: seal_of(plain)}


def write(path: Path, document: Mapping[str, Any], *, lasting: bool = True) -> None:
    """Write a JSON object with its seal, as `durable.write_json` does."""
    durable.write_json(path, sealed(document), lasting=lasting)


def read(
    path: Path,
    *,
    formats: Collection[int | None],
    sealed_from: int,
    limit_bytes: int = durable.READ_LIMIT_BYTES,
) -> dict[str, Any]:
    """The JSON object in a file, without its seal.

    Args:
      path: the file.
      formats: the values of its key `format` that can be read; None stands for no such key.
      sealed_from: files of this format and later ones must have a seal. An older file may have
        none; one that is there is checked.
      limit_bytes: larger files are refused.

    Raises:
      FormatVersionError: another version of flowrl wrote it.
      FileRefusedError: it cannot be read, or its seal is wrong or missing.
    """
    facts = durable.read_json(path, limit_bytes=limit_bytes)
    found = facts.get("format")
    if isinstance(found, bool | float) or found not in formats:
        wanted = " or ".join(str(known) for known in formats if known is not None)
        raise FormatVersionError(
            f"{path} has format {found!r}, this flowrl reads {wanted}; "
            "use the version of flowrl that wrote it"
        )
    seal = facts.pop(KEY, None)
    if seal is None and (found is None or found < sealed_from):
        return facts
    if seal != seal_of(facts):
        what = "has no seal" if seal is None else "is not what its seal says"
        raise FileRefusedError(
            f"{path} is damaged or was edited: it {what}; restore it from a copy "
            "(flowrl fsck says what else is damaged)"
        )
    return facts
