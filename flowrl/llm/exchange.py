"""Endpoints, messages, completions and their cost; alone, because a replay has no client."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from flowrl.errors import EXIT_UNAVAILABLE, ConfigError, FlowrlError
from flowrl.paths import printable
from flowrl.redaction import redacted, secrets_of

Message = Mapping[str, str]  # role and content
Form = Literal["json_schema", "tools", "fenced"]  # the way in which an answer is asked to be JSON
MALFORMED = "malformed"  # the finish of an answer that is no completion
KEY = "OPENAI_API_KEY"
RETRIES, TIMEOUT_SECONDS = 4, 60.0
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class EndpointError(FlowrlError):
    """An endpoint cannot be asked; the message begins with its verb."""

    exit_code = EXIT_UNAVAILABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An endpoint and a model, and how they are asked; ConfigError if it cannot be."""

    base_url: str
    model: str
    api_key_env: str = KEY
    temperature: float | None = None
    seed: int | None = None
    timeout_seconds: float = TIMEOUT_SECONDS
    retries: int = RETRIES

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.base_url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # no port, or half an IPv6 address
            raise ConfigError("--base_url is no address; give one such as https://x/v1") from None
        if not good or "@" in parts.netloc:
            given = f"{parts.scheme}://…@{parts.hostname}" if "@" in parts.netloc else self.base_url
            raise ConfigError(
                f"an endpoint is asked that you name, and --base_url is {printable(given)!r}; "
                "give one such as https://api.openai.com/v1, without a user or a password"
            )
        if not self.model:
            raise ConfigError(f"--model is missing; give a name that {self.place} knows")
        if not _VARIABLE.fullmatch(self.api_key_env):
            raise ConfigError(
                "--api_key_env is not the name of a variable; give the name, never the key itself"
            )
        if not self.key.isascii() or not self.key.isprintable():
            raise ConfigError(f"{self.api_key_env} holds no key: it has characters that no key has")
        if not self.key:
            raise ConfigError(
                f"{self.api_key_env} is not set; export the key, or any word if none is needed"
            )

    @property
    def place(self) -> str:
        """The host and port; the rest of the address may hold a secret."""
        return urlsplit(self.base_url).netloc

    @property
    def key(self) -> str:
        """The key, which is nowhere but in the environment."""
        return os.environ.get(self.api_key_env, "").strip()

    def redacted(self, text: str) -> str:
        """Return a text of the endpoint's, or of an error's, without secrets."""
        return redacted(text, secrets_of(os.environ, [self.api_key_env]))


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of questions to an endpoint, or its bound."""

    calls: float = 0
    tokens: float = 0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: Cost) -> Cost:
        return Cost(*map(operator.sub, astuple(self), astuple(other)))

    @property
    def facts(self) -> dict[str, Any]:
        """It as it is kept: in whole calls, tokens and milliseconds."""
        whole = {"calls": int(self.calls), "tokens": int(self.tokens)}
        return {**whole, "seconds": round(self.seconds, 3)}


@dataclass(slots=True)
class Budget:
    """The budget of all that ask an endpoint together, and its use."""

    most: Cost
    spent: Cost = field(default_factory=Cost)

    @property
    def left(self) -> bool:
        """True if nothing of it is used up."""
        return all(map(operator.lt, astuple(self.spent), astuple(self.most)))

    def spend(self, **amounts: float) -> None:
        """Count calls, tokens or seconds."""
        self.spent += Cost(**amounts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A model's answer, and the reason why it ended: stop, length, refusal or malformed."""

    text: str
    finish: str
    form: Form
    cost: Cost


def tokens_of(text: str) -> int:
    """Return about how many tokens a text takes: one for four characters."""
    return -(-len(text) // 4)
