"""How every part of the gate refuses: place, line, what is wrong, remedy."""

from __future__ import annotations

import ast

from flowrl.errors import GateError


def refusal(place: str, node: ast.AST | None, what: str, remedy: str) -> GateError:
    """The error for a node: its line, what is wrong with it, and the remedy."""
    return GateError(f"{place}:{getattr(node, 'lineno', 1)}: {what}; {remedy}")
