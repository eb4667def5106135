"""Removing secrets, a leaf for all that write texts: logs, the state, events, notices.

A secret is the value of an environment variable whose name matches `_SECRET_NAME`, that is passed
by `--pass_env`, or that looks like a token, and the password in any value that is a URL. Values
below `LEAST_LENGTH` characters are not secrets: replacing them would tear ordinary words apart. A
value is found as it is, as Python and JSON quote it, and line by line; a secret in another encoding
is not found. Passwords of URLs and tokens of well-known services are found in any text, wherever
they come from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any
from urllib.parse import unquote

REDACTED = "[redacted]"
_URL_PASSWORD = re.compile(r"(://[^/\s:@]*:)([^/\s@]+)(?=@)")  # as of a proxy
_KNOWN_TOKEN = re.compile(
    r"\b(?:sk-|gh[oprsu]_|github_pat_|glpat-|hf_|xox[abprs]-|AKIA|AIza|eyJ)[\w.-]{16,}"
)
_TOKEN, _RUN = re.compile(r"[A-Za-z0-9][\w.~+/=-]{19,}"), re.compile(r"[A-Za-z0-9]{20,}")
_SECRET_NAME = re.compile(r"(?i)key|token|secret|passw|credential")
LEAST_LENGTH = 8
# Escape sequences whole, else their remainder would be read as text.
_CONTROL = re.compile(
    r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)
_TEXTS = frozenset({"why", "detail", "lines", "log", "text", "outcome"})


def is_secret(name: str, passed: Collection[str] = ()) -> bool:
    """Return whether a variable's value is a secret; those of `passed` are, whatever their name."""
    return name in passed or _SECRET_NAME.search(name) is not None


def _is_token(value: str) -> bool:
    """Return whether a value is one word with a long run of letters and digits mixed."""
    runs = _RUN.findall(value) if _TOKEN.fullmatch(value) else []
    return any(not run.isalpha() and not run.isdigit() for run in runs)


def secrets_of(environ: Mapping[str, str], passed: Collection[str] = ()) -> tuple[str, ...]:
    """Return all spellings of the secrets in an environment, the longest first."""
    found: set[str] = set()
    for name, value in environ.items():
        whole = [value] if is_secret(name, passed) or _is_token(value.strip()) else []
        for secret in [*whole, *(match[2] for match in _URL_PASSWORD.finditer(value))]:
            found |= _spellings(secret) | _spellings(unquote(secret))
    return tuple(sorted(found, key=lambda word: (-len(word), word)))


def redacted(text: str, secrets: Sequence[str]) -> str:
    """Return the text without the secrets, which `secrets_of` returned, and others it shows.

    >>> redacted("401 for hunter2hunter2", ["hunter2hunter2"])
    '401 for [redacted]'
    >>> redacted("no route to http://ann:pw@proxy:3128", [])
    'no route to http://ann:[redacted]@proxy:3128'
    """
    text = _URL_PASSWORD.sub(rf"\g<1>{REDACTED}", _KNOWN_TOKEN.sub(REDACTED, text))
    if not any(secret in text for secret in secrets):
        return text
    return re.sub("|".join(map(re.escape, secrets)), REDACTED, text)


def cleaned(value: Any, secrets: Sequence[str]) -> Any:
    """Return a record without secrets and terminal control sequences in its texts for people.

    They may come from a trainer's log or files, and are shown in the terminals of others.
    """
    if isinstance(value, str):
        return redacted(_CONTROL.sub("", value), secrets)
    if isinstance(value, tuple):
        return tuple(cleaned(item, secrets) for item in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    texts = {item.name: getattr(value, item.name) for item in fields(value) if item.name in _TEXTS}
    changed = {
        name: clean for name, text in texts.items() if (clean := cleaned(text, secrets)) != text
    }
    return replace(value, **changed) if changed else value


def _spellings(value: str) -> set[str]:
    """Return the forms in which a value may occur in a text; a terminal ends lines by `\\r\\n`."""
    lines = (line.strip() for line in value.splitlines())
    plain = {value, value.strip(), *lines}
    quoted = {json.dumps(word)[1:-1] for word in plain} | {repr(word)[1:-1] for word in plain}
    # A value that is not UTF-8 cannot occur in a text.
    words = (word for word in plain | quoted if len(word) >= LEAST_LENGTH)
    return {word for word in words if not re.search("[\ud800-\udfff]", word)}
