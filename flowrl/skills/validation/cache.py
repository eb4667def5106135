"""Approvals of skill code: which pairs of functions have passed all checks, by their digest.

An approval is about code and not about a file or a name: the digest is taken of both functions'
syntax, without comments, docstrings and the count, together with the game and the versions of the
checks and of JAX. So a skill and the generated modules of all its runs share one approval, and code
that was changed afterwards has none.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flowrl import storage
from flowrl.errors import FileRefusedError
from flowrl.games.base import find_game, game_names
from flowrl.runs import CodeApproval
from flowrl.skills.validation.syntax import without_annotations
from flowrl.storage import records

_CHECKS_VERSION = 1  # raised only where a kept approval must not count any more: all are void then
_ROLES = ("task_is_done", "task_reward")
_LIMIT_BYTES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryApprovals:
    """The file `approvals.json` in the folder of a game's library."""

    approvals: tuple[CodeApproval, ...]


class ApprovalStore:
    """The approvals kept in a folder, one sealed file each; games bring those of their library."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, digest: str) -> CodeApproval | None:
        """The approval of this code, if it has one; raises FileRefusedError if it is damaged."""
        for name in game_names():
            if digest in shipped(name):
                return shipped(name)[digest]
        path = self._folder / f"{digest}.json"
        if not path.exists():
            return None
        kept = records.read(path, CodeApproval, limit_bytes=_LIMIT_BYTES, remedy="remove it")
        if kept.digest != digest:
            raise FileRefusedError(f"{path} is about {kept.digest}; remove it")
        return kept

    def keep(self, approval: CodeApproval) -> None:
        """Write an approval, unless this code has one that says as much."""
        kept = self.find(approval.digest)
        if kept is None or (approval.begins_anew and not kept.begins_anew):
            storage.make_dir(self._folder)
            records.write(self._folder / f"{approval.digest}.json", approval)


@functools.cache
def shipped(env_name: str) -> Mapping[str, CodeApproval]:
    """The approvals that come with a game's library, by digest; it may have none."""
    path = find_game(env_name).library_folder / "approvals.json"
    kept = records.read(path, LibraryApprovals).approvals if path.exists() else ()
    return {each.digest: each for each in kept}


def code_digest(is_done: ast.FunctionDef, reward: ast.FunctionDef, env_name: str) -> str:
    """The digest of two functions in a game, whatever their names and their count are."""
    sources = [_normal(part, role) for part, role in zip((is_done, reward), _ROLES, strict=True)]
    parts = [_CHECKS_VERSION, _jax_version(), env_name, *sources]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def parsed_function(source: str) -> ast.FunctionDef:
    """The one function that a skill's source of a function defines."""
    [function] = without_annotations(ast.parse(source)).body
    assert isinstance(function, ast.FunctionDef)
    return function


@functools.cache
def _jax_version() -> str:
    """JAX's version without its last number, read without loading it."""
    return ".".join(importlib.metadata.version("jax").split(".")[:2])


def _normal(function: ast.FunctionDef, role: str) -> str:
    normal = copy.copy(function)  # as deep as it is changed
    normal.name = role
    normal.args = copy.copy(function.args)
    normal.args.defaults = []
    normal.args.args = sorted(function.args.args, key=lambda argument: argument.arg)
    if ast.get_docstring(function, clean=False) is not None and len(function.body) > 1:
        normal.body = function.body[1:]
    return ast.unparse(normal)
