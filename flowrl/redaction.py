"""Removing secrets, a leaf for all that write texts: logs, the state, events, notices.

A secret is the value of an environment variable whose name matches `_SECRET_NAME`, that is passed
by `--pass_env`, or that looks like a token, and the password in any value that is a URL, or a proxy
without `http://`; a URL's user name of 16 characters or more is one, too. Values below
`_LEAST_LENGTH` characters are not secrets: replacing them would tear ordinary words apart. A value
is found as it is, as Python and JSON quote it, and line by line; a secret in another encoding is
not found. Passwords of URLs and tokens of well-known services are found in any text, wherever they
come from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any
from urllib.parse import unquote

_REDACTED = "[redacted]"
_NO_PORT, _LONG = r"(?!\d{1,5}[/?#,])", r"[^/:@]{16,}"  # a user name that long may be a token
_USER = re.compile(rf"://(?:[^/:@]{{0,15}}:{_NO_PORT}|(?={_LONG}(?:@|:{_NO_PORT})))")
_KNOWN_TOKEN = re.compile(
    r"\b(?:sk-|gh[oprsu]_|github_pat_|glpat-|hf_|xox[abprs]-|AKIA|AIza|eyJ)[\w.-]{16,}"
)
_TOKEN, _RUN = re.compile(r"[A-Za-z0-9][\w.~+/=-]{19,}"), re.compile(r"[A-Za-z0-9]{20,}")
_SECRET_NAME = re.compile(r"(?i)key|token|secret|passw|credential")
_LEAST_LENGTH = 8
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
    secrets: set[str] = set()
    for name, value in environ.items():
        whole = [value] if is_secret(name, passed) or _is_token(value.strip()) else []
        url = value if "://" in value or not name.lower().endswith("_proxy") else f"://{value}"
        words = (word[_password(word)] for word in (url, *re.split(r"[,;\s]+", url)))
        for secret in (
            *whole,
            *(part for word in words for part in (word, word.partition(":")[2])),
        ):
            secrets |= _spellings(secret) | _spellings(unquote(secret))
    return tuple(sorted(secrets, key=lambda word: (-len(word), word)))


def has_secret(name: str, value: str) -> bool:
    """Return whether a variable's value holds a secret, however short its password is."""
    return redacted(value, secrets_of({name: value})) != value


def redacted(text: str, secrets: Sequence[str]) -> str:
    """Return the text without the secrets, which `secrets_of` returned, and others it shows.

    >>> redacted("401 for hunter2hunter2", ["hunter2hunter2"])
    '401 for [redacted]'
    >>> redacted("no route to http://ann:pw@proxy:3128", [])
    'no route to http://ann:[redacted]@proxy:3128'
    """
    if any(secret in text for secret in secrets):  # first, or a part of one hides the rest
        text = re.sub("|".join(map(re.escape, secrets)), _REDACTED, text)
    text = _KNOWN_TOKEN.sub(_REDACTED, text)
    if "://" in text:
        text = re.sub(r"\S+", _without_password, text)
    return text


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


def _password(word: str) -> slice:
    """Return where the password of a URL is, up to the last @, or a user name that is a token."""
    end = word.rfind("@")
    user = _USER.search(word, 0, end + 1)
    return slice(user.end(), end) if user else slice(0)


def _without_password(match: re.Match[str]) -> str:
    word, place = match[0], _password(match[0])
    return f"{word[: place.start]}{_REDACTED}{word[place.stop :]}" if word[place] else word


def _spellings(value: str) -> set[str]:
    """Return the forms in which a value may occur in a text; a terminal ends lines by `\\r\\n`."""
    lines = (line.strip() for line in value.splitlines())
    plain = {value, value.strip(), *lines}
    quoted = {json.dumps(word)[1:-1] for word in plain} | {repr(word)[1:-1] for word in plain}
    # A value that is not UTF-8 cannot occur in a text.
    words = (word for word in plain | quoted if len(word) >= _LEAST_LENGTH)
    return {word for word in words if not re.search("[\ud800-\udfff]", word)}
