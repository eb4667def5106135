"""Read a generated module: its game, its plan, its remapping and its tasks' functions.

A generated module is never imported. Its text is parsed and compared with the one frame that flowrl
writes, statement by statement; every skill function passes the syntax check again, and only those
functions are executed, in a namespace of their own (`flowrl.skills.validation.execution`).
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError, SkillError
from flowrl.games.base import COUNT, Game, find_game
from flowrl.runs import CodeApproval
from flowrl.skills.skill import MOST_STEPS
from flowrl.skills.validation.allowed import check_names
from flowrl.skills.validation.cache import code_digest
from flowrl.skills.validation.execution import execute_functions
from flowrl.skills.validation.syntax import check_function, literal, parse_source
from flowrl.storage import read_bytes

MODULE_LIMIT_BYTES = 2_000_000
REMEDY = "write it again with generate_module_with_remapping"
_DOCSTRING = '"""…"""'
_CONSTANTS = ("GAME", "GLOBAL_TO_LOCAL", "LOCAL_TO_GLOBAL", "PLAN")
_KEYS = {"skill", "count", "expert"}  # of a step; it may also have max_steps


@dataclass(frozen=True, slots=True)
class SuccessFunctions:
    """The two functions of a skill, which are executed when they are first asked for.

    Those with `takes_count` get n from the plan; the others have it as a default.
    """

    skill: str
    load: Callable[[], Sequence[Callable[..., Any]]]
    takes_count: bool = False

    @property
    def is_done(self) -> Callable[..., Any]:
        """Whether the step is done."""
        return self.load()[0]

    @property
    def reward(self) -> Callable[..., Any]:
        """What a timestep of the environment earns."""
        return self.load()[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One step of the plan: a skill, its count and the expert that carries it out.

    It may take `max_steps` environment steps; None stands for the run's `--max_task_steps`.
    """

    skill: str
    count: int
    functions: SuccessFunctions
    expert_local: int
    max_steps: int | None = None
    digest: str = ""
    """Of the code of both functions, as `code_digest` computes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskModule:
    """The contents of a generated module."""

    game: Game
    global_to_local: Mapping[int, int]
    local_to_global: Mapping[int, int]
    tasks: tuple[Task, ...]


def load_module(
    source: Path | str, *, approvals: Collection[CodeApproval] | None = None
) -> TaskModule:
    """The tasks of a generated module, given as a file or as its text.

    With `approvals`, the functions of every step must have one of them, which also lifts the syntax
    check for those it trusts. `flowrl.envs.admission` finds the approvals that a file has.

    Raises:
      SkillError: the module departs from the frame, or a step's functions have no approval; says
        file, line and remedy.
      CodeRefusedError: a function contains something that is not admitted.
    """
    read = read_module(source)
    trusted = {k for k, approval in enumerate(_found(read, approvals)) if approval.trusted}
    for k, (pair, step) in enumerate(zip(read.pairs, read.plan, strict=True)):
        for function in pair:
            _check_default(function, step["count"], read.place)
            check_function(function, read.place, trusted=k in trusted)
    check_names(read.functions, read.place, games=(read.game,))
    return TaskModule(
        game=read.game,
        global_to_local=read.global_to_local,
        local_to_global=dict(enumerate(sorted(read.global_to_local))),
        tasks=_tasks(read, cache(partial(_executed, read, trusted))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadModule:
    """A module that has the form of the frame; its functions are not checked yet."""

    place: str
    game: Game
    global_to_local: Mapping[int, int]
    plan: Sequence[Mapping[str, Any]]
    pairs: Sequence[tuple[ast.FunctionDef, ast.FunctionDef]]
    """The two functions of every step."""

    @property
    def functions(self) -> list[ast.FunctionDef]:
        """The functions of all steps, in order."""
        return [function for pair in self.pairs for function in pair]


def read_module(source: Path | str) -> ReadModule:
    """The parts of a generated module, of which nothing is executed.

    Raises:
      SkillError: the module departs from the frame; says file, line and remedy.
    """
    if isinstance(source, Path):
        text, place = _read(source), str(source)
    else:
        text, place = source, "<module>"
    body = parse_source(text, place, limit_bytes=MODULE_LIMIT_BYTES).body
    lines = {name: _assignment(body, name, place) for name in _CONSTANTS}
    values = {name: literal(line.value, place) for name, line in lines.items()}
    game = _game(values["GAME"], lines["GAME"], place)
    experts = _experts(values["GLOBAL_TO_LOCAL"], lines["GLOBAL_TO_LOCAL"], place)
    _check_plan(values["PLAN"], lines["PLAN"], experts, place)
    plan = values["PLAN"]
    _compare(body, _frame(game, experts, lines["PLAN"], plan), len(plan), place)
    functions = [line for line in body[-3 * len(plan) :] if isinstance(line, ast.FunctionDef)]
    return ReadModule(
        place=place,
        game=game,
        global_to_local=values["GLOBAL_TO_LOCAL"],
        plan=plan,
        pairs=list(zip(functions[::3], functions[1::3], strict=True)),
    )


def _found(read: ReadModule, approvals: Collection[CodeApproval] | None) -> list[CodeApproval]:
    """The approval of every step; none is asked for when none are given."""
    if approvals is None:
        return []
    known = {approval.digest: approval for approval in approvals}
    found = []
    for (done, reward), step in zip(read.pairs, read.plan, strict=True):
        approval = known.get(code_digest(done, reward, read.game.name))
        if approval is None:
            what = f"the code of step {step['skill']!r} has no approval; prepare the run again"
            raise SkillError(f"{read.place}:{done.lineno}: {what}")
        if approval.most_count is not None and step["count"] > approval.most_count:
            what = f"{step['skill']!r} chooses by n and was tried up to n={approval.most_count}"
            remedy = f"not to n={step['count']}; write it without if"
            raise SkillError(f"{read.place}:{done.lineno}: {what}, {remedy}")
        found.append(approval)
    return found


def _tasks(
    read: ReadModule, load: Callable[[], Sequence[Sequence[Callable[..., Any]]]]
) -> tuple[Task, ...]:
    return tuple(
        Task(
            skill=step["skill"],
            count=step["count"],
            functions=SuccessFunctions(step["skill"], lambda k=k: load()[k]),
            expert_local=read.global_to_local[step["expert"]],
            max_steps=step.get("max_steps"),
            digest=code_digest(*read.pairs[k], read.game.name),
        )
        for k, step in enumerate(read.plan)
    )


def _executed(read: ReadModule, trusted: Collection[int]) -> list[list[Callable[..., Any]]]:
    """The checked functions of every step, in two namespaces: one is for the trusted ones."""
    found: dict[str, Callable[..., Any]] = {}
    for lifted in (False, True):
        pairs = [pair for k, pair in enumerate(read.pairs) if (k in trusted) is lifted]
        functions = [function for pair in pairs for function in pair]
        called = execute_functions(functions, read.game, place=read.place, trusted=lifted)
        found |= {function.name: call for function, call in zip(functions, called, strict=True)}
    return [[found[function.name] for function in pair] for pair in read.pairs]


def _read(path: Path) -> str:
    try:
        return read_bytes(path, limit_bytes=MODULE_LIMIT_BYTES).decode()
    except UnicodeDecodeError as error:
        raise SkillError(f"{path}: {error}; {REMEDY}") from error


def _frame(
    game: Game, experts: Sequence[int], plan_line: ast.Assign, plan: Sequence[Mapping[str, Any]]
) -> list[str]:
    """The statements of a module; of a docstring and of a skill's function only the beginning."""
    head = [_DOCSTRING, "import jax", "import jax.numpy as jnp"]
    head += [game.import_line] if game.import_line else []
    to_local = {expert: local for local, expert in enumerate(experts)}
    head += [f"GAME = {game.name!r}", f"GLOBAL_TO_LOCAL = {to_local}"]
    head += [f"LOCAL_TO_GLOBAL = {dict(enumerate(experts))}", ast.unparse(plan_line)]
    for k, step in enumerate(plan):
        number = f"    return GLOBAL_TO_LOCAL[{step['expert']}]"
        head += [f"def task_{k}_is_done", f"def task_{k}_reward"]
        head += [f"def task_{k}_network_number():\n{number}"]
    return head


def _compare(body: Sequence[ast.stmt], frame: Sequence[str], tasks: int, place: str) -> None:
    """Refuse a module at the first statement that is not the frame's."""
    for line, expected in zip(body, frame, strict=False):
        if isinstance(line, ast.FunctionDef) and expected == f"def {line.name}":
            continue
        if expected == _DOCSTRING and ast.get_docstring(ast.Module([line], [])) is not None:
            continue
        if ast.unparse(line) != expected:
            what = f"here stands `{_short(expected)}`, not `{_short(ast.unparse(line))}`"
            raise _refusal(place, line, what)
    if len(body) < len(frame):
        raise _refusal(place, body[-1], f"`{_short(frame[len(body)])}` is missing")
    if len(body) > len(frame):
        extra = body[len(frame)]
        what = f"`{_short(ast.unparse(extra))}` is beyond the {tasks} tasks of PLAN"
        raise _refusal(place, extra, what)


def _assignment(body: Sequence[ast.stmt], name: str, place: str) -> ast.Assign:
    for line in body:
        match line:
            case ast.Assign(targets=[ast.Name(id=found)]) if found == name:
                return line
    raise _refusal(place, body[0] if body else None, f"`{name} = …` is missing")


def _game(name: Any, line: ast.stmt, place: str) -> Game:
    try:
        return find_game(name)
    except ConfigError as error:
        raise SkillError(f"{place}:{line.lineno}: {error}") from error


def _experts(to_local: Any, line: ast.stmt, place: str) -> list[int]:
    """The global indices of the run's experts, in order."""
    if not isinstance(to_local, dict) or not all(_is_natural(expert) for expert in to_local):
        raise _refusal(place, line, "GLOBAL_TO_LOCAL does not map indices")
    return sorted(to_local)


def _check_plan(plan: Any, line: ast.stmt, experts: Collection[int], place: str) -> None:
    """Refuse a plan whose steps do not say skill, count and a known expert."""
    if not isinstance(plan, list) or not plan:
        raise _refusal(place, line, "PLAN is not a list of steps")
    for k, step in enumerate(plan):
        if not isinstance(step, dict) or set(step) - {"max_steps"} != _KEYS:
            what = f"step {k} of PLAN does not say skill, count and expert"
        elif "max_steps" in step and not _is_natural(step["max_steps"], least=1, most=MOST_STEPS):
            what = f"step {k} of PLAN has no max_steps from 1 to {MOST_STEPS}"
        elif not isinstance(step["skill"], str) or not _is_natural(step["count"], least=1):
            what = f"step {k} of PLAN has no name or no count of 1 or more"
        elif not _is_natural(step["expert"]) or step["expert"] not in experts:
            what = f"step {k} of PLAN names expert {step['expert']}, which is not in {experts}"
        else:
            continue
        raise _refusal(place, line, what)


def _check_default(function: ast.FunctionDef, count: int, place: str) -> None:
    """The only default of a function, if any, is `n=<the step's count>`."""
    asks_for_n = any(argument.arg == COUNT for argument in function.args.args)
    match function.args.defaults:
        case [] if not asks_for_n:
            return
        case [ast.Constant(value=default)] if asks_for_n and _is_natural(default):
            if default == count:
                return
            what = f"{function.name} has n={default}, PLAN says {count}"
        case _:
            what = f"{function.name} must have no default but n={count}"
    raise _refusal(place, function, what)


def _refusal(place: str, line: ast.stmt | None, why: str) -> SkillError:
    return SkillError(f"{place}:{line.lineno if line else 1}: {why}; {REMEDY}")


def _is_natural(value: Any, *, least: int = 0, most: float = math.inf) -> bool:
    return type(value) is int and least <= value <= most


def _short(text: str) -> str:
    first = text.splitlines()[0]
    return first if len(first) <= 60 else first[:59] + "…"
