"""Read a generated module: its plan, its remapping and its tasks' functions.

A generated module is never imported. Its text is parsed, held against the one frame that flowrl
writes, every skill function passes the gate again, and only those functions are run, in a
namespace that holds jax, Craftax's enums and the few builtins the gate admits.
"""

from __future__ import annotations

import ast
import builtins
import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flowrl.envs.module_frame import ENUMS, ENVS, MODULE_LIMIT_BYTES, REMEDY, Frame
from flowrl.errors import SkillError
from flowrl.runs import Verdict
from flowrl.skills.admitted import CALLS, TRUSTED_CALLS
from flowrl.skills.gate import check_names
from flowrl.skills.verdicts import code_digest
from flowrl.storage import read_bytes

BUILTINS = {name: getattr(builtins, name) for name in (*sorted(CALLS), "range")}
TRUSTED_BUILTINS = {name: getattr(builtins, name) for name in sorted(TRUSTED_CALLS)}


class Functions(NamedTuple):
    """The two functions of a skill."""

    is_done: Callable[..., Any]
    reward: Callable[..., Any]


class Judging:
    """Whatever has the two functions of a skill, which are run when they are first asked for."""

    __slots__ = ()
    functions: Callable[[], Functions]

    @property
    def is_done(self) -> Callable[..., Any]:
        """Whether the step is done."""
        return self.functions().is_done

    @property
    def reward(self) -> Callable[..., Any]:
        """What a step of the environment earns."""
        return self.functions().reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(Judging):
    """One step of the plan: a skill, its count and the expert that carries it out.

    It may take `max_steps` environment steps; None stands for the run's `--max_task_steps`.
    """

    skill: str
    count: int
    functions: Callable[[], Functions]  # run, with all that they name, when first asked for
    expert_local: int
    max_steps: int | None = None
    digest: str = ""
    """Of the code of both functions, as `flowrl.skills.verdicts.code_digest` makes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskModule:
    """What a generated module says; `game` is the Craftax package its enums come from."""

    game: str
    global_to_local: Mapping[int, int]
    local_to_global: Mapping[int, int]
    tasks: tuple[Task, ...]


def load_module(source: Path | str, *, verdicts: Collection[Verdict] | None = None) -> TaskModule:
    """The tasks of a generated module, given as a file or as its text.

    With `verdicts`, the functions of every step must have one of them, which also lifts the syntax
    gate for those it trusts. `flowrl.envs.admission` finds the verdicts that a file has.

    Raises:
      SkillError: the module departs from the frame, or a step's functions have no verdict; says
        file, line and remedy.
      GateError: a function asks for something the gate does not admit.
    """
    read = read_module(source)
    trusted = {k for k, verdict in enumerate(_found(read, verdicts)) if verdict.trusted}
    read.frame.check_functions(read.functions, read.plan, trusted=trusted)
    check_names(read.functions, read.frame.place, env_name=read.env_name)
    return TaskModule(
        game=read.game,
        global_to_local=read.global_to_local,
        local_to_global=read.local_to_global,
        tasks=_tasks(read, cache(partial(_run, read, trusted))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadModule:
    """A module that keeps to the frame; nobody has looked into its functions yet."""

    frame: Frame
    game: str
    global_to_local: Mapping[int, int]
    local_to_global: Mapping[int, int]
    plan: Sequence[Mapping[str, Any]]
    functions: Sequence[ast.FunctionDef]

    @property
    def env_name(self) -> str:
        """The environment it was written for."""
        return ENVS[self.game]

    @property
    def pairs(self) -> list[tuple[ast.FunctionDef, ast.FunctionDef]]:
        """The two functions of every step."""
        return list(zip(self.functions[::2], self.functions[1::2], strict=True))


def read_module(source: Path | str) -> ReadModule:
    """The parts of a generated module, of which nothing is run.

    Raises:
      SkillError: the module departs from the frame; says file, line and remedy.
    """
    if isinstance(source, Path):
        text, place = _read(source), str(source)
    else:
        text, place = source, "<module>"
    frame = Frame(place)
    tree = frame.parse(text)
    game = frame.read_imports(tree.body[:4])
    global_to_local, local_to_global, plan = frame.read_constants(tree.body[4:7])
    frame.check_remapping(tree.body[4], global_to_local, local_to_global)
    frame.check_plan(tree.body[6], plan, global_to_local)
    return ReadModule(
        frame=frame,
        game=game,
        global_to_local=global_to_local,
        local_to_global=local_to_global,
        plan=plan,
        functions=frame.read_functions(tree.body[7:], plan),
    )


def _found(read: ReadModule, verdicts: Collection[Verdict] | None) -> list[Verdict]:
    """The verdict of every step; none is asked for when none are given."""
    if verdicts is None:
        return []
    known = {verdict.digest: verdict for verdict in verdicts}
    found = []
    for (done, reward), step in zip(read.pairs, read.plan, strict=True):
        verdict = known.get(code_digest(done, reward, read.env_name))
        if verdict is None:
            what = f"the code of step {step['skill']!r} has no verdict; prepare the run again"
            raise SkillError(f"{read.frame.place}:{done.lineno}: {what}")
        if verdict.most_count is not None and step["count"] > verdict.most_count:
            what = f"{step['skill']!r} chooses by n and was tried up to n={verdict.most_count}"
            remedy = f"not to n={step['count']}; write it without if"
            raise SkillError(f"{read.frame.place}:{done.lineno}: {what}, {remedy}")
        found.append(verdict)
    return found


def _tasks(read: ReadModule, called: Callable[[], Sequence[Functions]]) -> tuple[Task, ...]:
    return tuple(
        Task(
            skill=step["skill"],
            count=step["count"],
            functions=lambda k=k: called()[k],
            expert_local=read.global_to_local[step["expert"]],
            max_steps=step.get("max_steps"),
            digest=code_digest(*read.pairs[k], read.env_name),
        )
        for k, step in enumerate(read.plan)
    )


def _read(path: Path) -> str:
    try:
        return read_bytes(path, limit_bytes=MODULE_LIMIT_BYTES).decode()
    except UnicodeDecodeError as error:
        raise SkillError(f"{path}: {error}; {REMEDY}") from error


def namespace_of(game: str, *, trusted: bool = False) -> dict[str, Any]:
    """What skill functions of a game's package can name; trusted ones have more builtins."""
    with jax.ensure_compile_time_eval():  # its arrays outlive a trace that asks first
        constants = importlib.import_module(f"{game}.constants")
    namespace: dict[str, Any] = {name: getattr(constants, name) for name in ENUMS}
    known = {**BUILTINS, **TRUSTED_BUILTINS} if trusted else BUILTINS
    return namespace | {"__builtins__": dict(known), "jax": jax, "jnp": jnp}


def _run(read: ReadModule, trusted: Collection[int]) -> list[Functions]:
    """The checked functions as callables, in namespaces of their own."""
    called: dict[str, Any] = {}
    for lifted in (False, True):
        pairs = [pair for k, pair in enumerate(read.pairs) if (k in trusted) is lifted]
        functions = [function for pair in pairs for function in pair]
        namespace = namespace_of(read.game, trusted=lifted)
        body = ast.Module(body=[*functions], type_ignores=[])
        code = compile(body, read.frame.place, "exec", dont_inherit=True)
        exec(code, namespace)  # noqa: S102 - passed the gate, or its author vouches for it
        called |= {function.name: namespace[function.name] for function in functions}
    return [
        Functions(called[f"task_{k}_is_done"], called[f"task_{k}_reward"])
        for k in range(len(read.plan))
    ]
