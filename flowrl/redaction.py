"""Secrets and the texts in which they must not appear: logs, states, stories, notices.

A secret is the value of an environment variable whose name says so, or that a user passes on by
`--pass_env`. Short values are no secrets: replacing them would tear ordinary words apart. Only the
value as it is, as Python and JSON quote it, and line by line is found; whoever encodes a secret
otherwise before he writes it down is not stopped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

REDACTED = "[redacted]"
_SECRET_NAME = re.compile(r"(?i)key|token|secret|passw|credential")
LEAST_LENGTH = 8
# Escape sequences whole, else what is left of them would be read as text.
_CONTROL = re.compile(
    r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)
_TEXTS = frozenset({"why", "detail", "lines", "log", "text", "outcome"})

Value = TypeVar("Value")


def is_secret(name: str, passed: Collection[str] = ()) -> bool:
    """Whether a variable's value is a secret; `passed` are so whatever their names say."""
    return name in passed or _SECRET_NAME.search(name) is not None


def secrets_of(environ: Mapping[str, str], passed: Collection[str] = ()) -> tuple[str, ...]:
    """All spellings of the secrets in an environment, the longest first."""
    found: set[str] = set()
    for name, value in environ.items():
        if is_secret(name, passed):
            found |= _spellings(value)
    return tuple(sorted(found, key=lambda word: (-len(word), word)))


def redacted(text: str, secrets: Sequence[str]) -> str:
    """The text without the secrets, which are given as `secrets_of` gives them.

    >>> redacted("401 for hunter2hunter2", ["hunter2hunter2"])
    '401 for [redacted]'
    """
    if not any(secret in text for secret in secrets):
        return text
    return re.sub("|".join(map(re.escape, secrets)), REDACTED, text)


def cleaned(value: Value, secrets: Sequence[str]) -> Value:
    """The same record, its texts for people without secrets and without words for terminals.

    They may come from a trainer's log or files, and are shown in the terminals of others.
    """
    return _cleaned(value, secrets)


def _cleaned(value: Any, secrets: Sequence[str]) -> Any:
    if isinstance(value, str):
        return redacted(_CONTROL.sub("", value), secrets)
    if isinstance(value, tuple):
        return tuple(_cleaned(item, secrets) for item in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    texts = {field.name: getattr(value, field.name) for field in fields(value)}
    clean = {name: _cleaned(text, secrets) for name, text in texts.items() if name in _TEXTS}
    changed = {name: text for name, text in clean.items() if text != texts[name]}
    return replace(value, **changed) if changed else value


def _spellings(value: str) -> set[str]:
    """How a value may come to stand in a text; a terminal ends its lines by `\\r\\n`."""
    lines = (line.strip() for line in value.splitlines())
    plain = {value, value.strip(), *lines}
    quoted = {json.dumps(word)[1:-1] for word in plain} | {repr(word)[1:-1] for word in plain}
    # What is no UTF-8 in an environment has no place in a text either.
    return {word for word in plain | quoted if len(word) >= LEAST_LENGTH and _is_text(word)}


def _is_text(word: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in word)
