"""Verdicts: which pairs of skill functions have passed the gate and the trial, by their digest.

A verdict is about code and not about a file or a name: the digest is taken of both functions'
syntax, without comments, docstrings and the count, together with the game and the versions of the
gate and of JAX. So a skill and the generated modules of all its runs share one verdict, and code
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
from typing import Any

from flowrl import storage
from flowrl.errors import FileRefusedError, SkillError
from flowrl.runs import Verdict
from flowrl.storage import records

GATE_VERSION = 2  # raised whenever gate or trial refuse what they admitted before
SHIPPED = Path(__file__).parent / "library" / "verdicts.json"
_ROLES = ("task_is_done", "task_reward")
_LIMIT_BYTES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptVerdict:
    """The file of one verdict; `skill` says for people whose code it is about."""

    skill: str
    verdict: Verdict


class VerdictStore:
    """The verdicts kept in a folder, one sealed file each; those of the library are shipped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, digest: str) -> Verdict | None:
        """The verdict on this code, if it has one.

        Raises:
          FileRefusedError: a kept verdict is damaged; says which.
        """
        path = self._folder / f"{digest}.json"
        if digest in shipped():
            return shipped()[digest]
        if not path.exists():
            return None
        kept = records.read(path, KeptVerdict, limit_bytes=_LIMIT_BYTES, remedy="remove it")
        if kept.verdict.digest != digest:
            raise FileRefusedError(f"{path} is about {kept.verdict.digest}; remove it")
        return kept.verdict

    def keep(self, verdict: Verdict, *, skill: str) -> None:
        """Remember a verdict; `skill` says for people whose code it is about."""
        storage.make_dir(self._folder)
        kept = KeptVerdict(skill=skill, verdict=verdict)
        records.write(self._folder / f"{verdict.digest}.json", kept)


@functools.cache
def shipped() -> Mapping[str, Verdict]:
    """The verdicts on the embedded library, by digest."""
    verdicts = storage.read_json(SHIPPED)["verdicts"]
    return {item["digest"]: _shipped_verdict(item) for item in verdicts.values()}


def code_digest(is_done: ast.FunctionDef, reward: ast.FunctionDef, env_name: str) -> str:
    """The digest of two functions in a game, whatever they are called and their count is."""
    sources = [_normal(part, role) for part, role in zip((is_done, reward), _ROLES, strict=True)]
    facts = [GATE_VERSION, jax_version(), env_name, *sources]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def parsed_function(source: str, place: str) -> ast.FunctionDef:
    """The one function that a source defines.

    Raises:
      SkillError: it is not Python, or not one function.
    """
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SkillError(f"{place}: its code is not Python: {error}; correct the skill") from error
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef):
        raise SkillError(f"{place}: a function must be one `def` and nothing beside it")
    return body[0]


@functools.cache
def jax_version() -> str:
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


def _shipped_verdict(item: Mapping[str, Any]) -> Verdict:
    names = ("digest", "trusted", "most_count")
    return records.from_json(Verdict, {name: item[name] for name in names})
