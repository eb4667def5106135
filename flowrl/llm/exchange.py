"""Messages, completions and their cost; alone, because a replay has no client."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any, Literal

from flowrl.errors import EXIT_UNAVAILABLE, FlowrlError

Message = Mapping[str, str]  # role and content
Form = Literal["json_schema", "tools", "fenced"]  # the way in which an answer is asked to be JSON
MALFORMED = "malformed"  # the finish of an answer that is no completion


class EndpointError(FlowrlError):
    """An endpoint cannot be asked; the message begins with its verb."""

    exit_code = EXIT_UNAVAILABLE


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
