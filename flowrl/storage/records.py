"""Records with a seal: JSON files that carry the sha256 of their own content.

A flipped bit in a JSON file may still parse, as another number. The seal tells it from what was
written. It guards against accidents, not against people: whoever edits a file can seal it again.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from flowrl.errors import FileRefusedError, FormatVersionError
from flowrl.storage.atomic import write_json
from flowrl.storage.reading import READ_LIMIT_BYTES, read_json

KEY = "sha256"
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # fit to be part of a path
_PHASE = re.compile(r"[a-z]{1,20}")
_MOST = 2**63 - 1
_LARGEST = 1e12  # seconds, steps: beyond it, dates and clocks have no words


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


def write(path: Path, document: Mapping[str, Any], *, durable: bool = True) -> None:
    """Write a JSON object with its seal, as `write_json` does."""
    write_json(path, sealed(document), durable=durable)


def read(
    path: Path,
    *,
    formats: Collection[int | None],
    sealed_from: int,
    limit_bytes: int = READ_LIMIT_BYTES,
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
    facts = read_json(path, limit_bytes=limit_bytes)
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


def text(value: Any) -> str:
    """Text."""
    if not isinstance(value, str):
        raise TypeError(f"{_shown(value)} is not text")
    return value


def word(value: Any) -> str:
    """A plain word, fit to be part of a path."""
    if not isinstance(value, str) or not _WORD.fullmatch(value):
        raise ValueError(f"{_shown(value)} is not a plain word")
    return value


def phase(value: Any) -> str:
    """A word to be shown on a terminal."""
    if not isinstance(value, str) or not _PHASE.fullmatch(value):
        raise ValueError(f"{_shown(value)} is no phase")
    return value


def _shown(value: Any) -> str:
    """The beginning of what was found, for a message."""
    return repr(value)[:100]


def natural(value: Any) -> int:
    """A whole number that fits into 64 bits, from 0."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
        raise TypeError(f"{_shown(value)} is not a natural number, or too large")
    return value


def figure(value: Any) -> float:
    """A number that can be counted with; it may be infinite or none at all."""
    if isinstance(value, int) and abs(value) > _MOST:
        raise ValueError(f"{_shown(value)} is too large")
    found = float(value)
    if math.isfinite(found) and abs(found) > _LARGEST:
        raise ValueError(f"{found} is too large")
    return found


def finite(value: Any) -> float:
    """A number."""
    found = figure(value)
    if not math.isfinite(found):
        raise ValueError(f"{found} is not finite")
    return found


def share(value: Any) -> float:
    """A number from 0 to 1."""
    found = figure(value)
    if not 0.0 <= found <= 1.0:
        raise ValueError(f"{found} is not a share between 0 and 1")
    return found
