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
_IMPORTS = ("import jax", "import jax.numpy as jnp")
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
    read.frame.check_functions(read.functions, read.plan, trusted=trusted)
    check_names(read.functions, read.frame.place, games=(read.game,))
    return TaskModule(
        game=read.game,
        global_to_local=read.global_to_local,
        local_to_global=read.local_to_global,
        tasks=_tasks(read, cache(partial(_executed, read, trusted))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadModule:
    """A module that has the form of the frame; its functions are not checked yet."""

    frame: Frame
    game: Game
    global_to_local: Mapping[int, int]
    local_to_global: Mapping[int, int]
    plan: Sequence[Mapping[str, Any]]
    functions: Sequence[ast.FunctionDef]

    @property
    def pairs(self) -> list[tuple[ast.FunctionDef, ast.FunctionDef]]:
        """The two functions of every step."""
        return list(zip(self.functions[::2], self.functions[1::2], strict=True))


def read_module(source: Path | str) -> ReadModule:
    """The parts of a generated module, of which nothing is executed.

    Raises:
      SkillError: the module departs from the frame; says file, line and remedy.
    """
    if isinstance(source, Path):
        text, place = _read(source), str(source)
    else:
        text, place = source, "<module>"
    frame = Frame(place)
    statements = frame.parse(text).body
    game, rest = frame.read_head(statements)
    global_to_local, local_to_global, plan = frame.read_constants(rest[:3])
    frame.check_remapping(rest[0], global_to_local, local_to_global)
    frame.check_plan(rest[2], plan, global_to_local)
    return ReadModule(
        frame=frame,
        game=game,
        global_to_local=global_to_local,
        local_to_global=local_to_global,
        plan=plan,
        functions=frame.read_functions(rest[3:], plan),
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
            raise SkillError(f"{read.frame.place}:{done.lineno}: {what}")
        if approval.most_count is not None and step["count"] > approval.most_count:
            what = f"{step['skill']!r} chooses by n and was tried up to n={approval.most_count}"
            remedy = f"not to n={step['count']}; write it without if"
            raise SkillError(f"{read.frame.place}:{done.lineno}: {what}, {remedy}")
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
        called = execute_functions(functions, read.game, place=read.frame.place, trusted=lifted)
        found |= {function.name: call for function, call in zip(functions, called, strict=True)}
    return [[found[function.name] for function in pair] for pair in read.pairs]


def _read(path: Path) -> str:
    try:
        return read_bytes(path, limit_bytes=MODULE_LIMIT_BYTES).decode()
    except UnicodeDecodeError as error:
        raise SkillError(f"{path}: {error}; {REMEDY}") from error


class Frame:
    """Compares a module with the frame, statement by statement, and says where it departs."""

    def __init__(self, place: str) -> None:
        self.place = place

    def refusal(self, line: int, why: str) -> SkillError:
        """The error for a line: why it departs, and the remedy."""
        return SkillError(f"{self.place}:{line}: {why}; {REMEDY}")

    def parse(self, text: str) -> ast.Module:
        """The syntax tree of a bounded text."""
        tree = parse_source(text, self.place, limit_bytes=MODULE_LIMIT_BYTES)
        if len(tree.body) < 10:
            raise self.refusal(1, "it ends before the first task's functions")
        return tree

    def read_head(self, lines: Sequence[ast.stmt]) -> tuple[Game, Sequence[ast.stmt]]:
        """The game that the module is for, and the statements after the one that names it."""
        head = lines[0]
        if not (isinstance(head, ast.Expr) and isinstance(head.value, ast.Constant)):
            raise self.refusal(head.lineno, "it does not begin with a docstring")
        enums = isinstance(lines[3], ast.ImportFrom)
        rest = lines[4:] if enums else lines[3:]
        game = self._game(rest[0])
        expected = (*_IMPORTS, game.import_line) if game.import_line else _IMPORTS
        for line, text in zip(lines[1 : 4 if enums else 3], expected, strict=False):
            if ast.unparse(line) != text:
                raise self.refusal(line.lineno, f"here stands `{text}`, not `{_short(line)}`")
        if enums is not bool(game.import_line):
            raise self.refusal(rest[0].lineno, f"before GAME stands `{expected[-1]}`")
        return game, rest[1:]

    def _game(self, line: ast.stmt) -> Game:
        name = self._constant(line, _CONSTANTS[0])
        try:
            return find_game(name)
        except ConfigError as error:
            raise SkillError(f"{self.place}:{line.lineno}: {error}") from error

    def read_constants(self, lines: Sequence[ast.stmt]) -> list[Any]:
        """The values of the remapping and of the plan, in their order."""
        return [
            self._constant(line, name) for line, name in zip(lines, _CONSTANTS[1:], strict=True)
        ]

    def _constant(self, line: ast.stmt, name: str) -> Any:
        match line:
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                return literal(value, self.place)
        raise self.refusal(line.lineno, f"here stands `{name} = …`, not `{_short(line)}`")

    def check_remapping(self, line: ast.stmt, to_local: Any, to_global: Any) -> None:
        """Refuse maps that do not number the experts, or are not inverse."""
        if not (_maps_naturals(to_local) and _maps_naturals(to_global)):
            raise self.refusal(
                line.lineno, "GLOBAL_TO_LOCAL and LOCAL_TO_GLOBAL map indices to indices"
            )
        experts = sorted(to_local)
        if to_local != {expert: local for local, expert in enumerate(experts)}:
            raise self.refusal(
                line.lineno,
                f"GLOBAL_TO_LOCAL {to_local} does not number the experts {experts} in order from 0",
            )
        if to_global != dict(enumerate(experts)):
            raise self.refusal(
                line.lineno,
                f"LOCAL_TO_GLOBAL {to_global} is not the inverse of GLOBAL_TO_LOCAL {to_local}",
            )

    def check_plan(self, line: ast.stmt, plan: Any, to_local: Mapping[int, int]) -> None:
        """Refuse a plan whose steps do not say skill, count and a known expert."""
        if not isinstance(plan, list) or not plan:
            raise self.refusal(line.lineno, "PLAN is not a list of steps")
        for k, step in enumerate(plan):
            if not isinstance(step, dict) or set(step) - {"max_steps"} != _KEYS:
                raise self.refusal(
                    line.lineno, f"step {k} of PLAN does not say skill, count and expert"
                )
            if "max_steps" in step and not _is_natural(step["max_steps"], least=1, most=MOST_STEPS):
                raise self.refusal(
                    line.lineno, f"step {k} of PLAN has no max_steps from 1 to {MOST_STEPS}"
                )
            if not isinstance(step["skill"], str) or not _is_natural(step["count"], least=1):
                raise self.refusal(
                    line.lineno, f"step {k} of PLAN has no name or no count of 1 or more"
                )
            if not _is_natural(step["expert"]) or step["expert"] not in to_local:
                raise self.refusal(
                    line.lineno,
                    f"step {k} of PLAN names expert {step['expert']}, which is not in "
                    f"GLOBAL_TO_LOCAL {sorted(to_local)}",
                )

    def read_functions(
        self, lines: Sequence[ast.stmt], plan: Sequence[Mapping[str, Any]]
    ) -> list[ast.FunctionDef]:
        """The skill functions of every task, in order, not looked into yet."""
        names = [
            f"task_{k}_{part}"
            for k in range(len(plan))
            for part in ("is_done", "reward", "network_number")
        ]
        for line, name in zip(lines, names, strict=False):
            if not isinstance(line, ast.FunctionDef) or line.name != name:
                raise self.refusal(line.lineno, f"here stands `def {name}`, not `{_short(line)}`")
        if len(lines) < len(names):
            raise self.refusal(lines[-1].lineno, f"`def {names[len(lines)]}` is missing")
        if len(lines) > len(names):
            extra = lines[len(names)]
            raise self.refusal(
                extra.lineno, f"`{_short(extra)}` is beyond the {len(plan)} tasks of PLAN"
            )
        found: list[ast.FunctionDef] = [line for line in lines if isinstance(line, ast.FunctionDef)]
        for k, step in enumerate(plan):
            self._check_network_number(found[3 * k + 2], k, step["expert"])
        return [function for i, function in enumerate(found) if i % 3 != 2]

    def check_functions(
        self,
        functions: Sequence[ast.FunctionDef],
        plan: Sequence[Mapping[str, Any]],
        *,
        trusted: Collection[int],
    ) -> None:
        """Check the syntax of every step's functions; it is lifted for the trusted ones."""
        for k, step in enumerate(plan):
            for function in functions[2 * k : 2 * k + 2]:
                self._check_default(function, step["count"])
                check_function(function, self.place, trusted=k in trusted)

    def _check_default(self, function: ast.FunctionDef, count: int) -> None:
        """The only default of a function, if any, is `n=<the step's count>`."""
        asks_for_n = any(argument.arg == COUNT for argument in function.args.args)
        match function.args.defaults:
            case [] if not asks_for_n:
                pass
            case [ast.Constant(value=default)] if asks_for_n and _is_natural(default):
                if default != count:
                    raise self.refusal(
                        function.lineno, f"{function.name} has n={default}, PLAN says {count}"
                    )
            case _:
                raise self.refusal(
                    function.lineno, f"{function.name} must have no default but n={count}"
                )

    def _check_network_number(self, function: ast.FunctionDef, k: int, expert: int) -> None:
        wanted = f"def task_{k}_network_number():\n    return GLOBAL_TO_LOCAL[{expert}]"
        if ast.unparse(function) != wanted:
            raise self.refusal(
                function.lineno,
                f"task_{k}_network_number does not return GLOBAL_TO_LOCAL[{expert}], as PLAN says",
            )


def _is_natural(value: Any, *, least: int = 0, most: float = math.inf) -> bool:
    return type(value) is int and least <= value <= most


def _maps_naturals(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_natural(number) for pair in value.items() for number in pair
    )


def _short(line: ast.stmt) -> str:
    first = ast.unparse(line).splitlines()[0]
    return first if len(first) <= 60 else first[:59] + "…"
