"""Read a generated module: its plan, its remapping and its tasks' functions.

A generated module is never imported. Its text is parsed, held against the one frame that flowrl
writes, every skill function passes the gate again, and only those functions are run, in a
namespace that holds jax, Craftax's enums and the few builtins the gate admits.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from flowrl.durable import read_bytes
from flowrl.errors import SkillError
from flowrl.skills.admitted import CALLS
from flowrl.skills.games import GAMES
from flowrl.skills.gate import check_function, check_names, literal, parse_source
from flowrl.skills.skill import MOST_STEPS

MODULE_LIMIT_BYTES = 2_000_000
REMEDY = "write it again with generate_module_with_remapping"
ENVS = {game.package: env_name for env_name, game in GAMES.items()}
ENUMS = ("Achievement", "Action", "BlockType")
CONSTANTS = ("GLOBAL_TO_LOCAL", "LOCAL_TO_GLOBAL", "PLAN")
KEYS = {"skill", "count", "expert"}  # of a step; it may also say max_steps
BUILTINS = {name: getattr(builtins, name) for name in (*sorted(CALLS), "range")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One step of the plan: a skill, its count and the expert that carries it out.

    It may take `max_steps` environment steps; None stands for the run's `--max_task_steps`.
    """

    skill: str
    count: int
    is_done: Callable[..., Any]
    reward: Callable[..., Any]
    expert_local: int
    max_steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskModule:
    """What a generated module says; `game` is the Craftax package its enums come from."""

    game: str
    global_to_local: Mapping[int, int]
    local_to_global: Mapping[int, int]
    tasks: tuple[Task, ...]


def load_module(source: Path | str) -> TaskModule:
    """The tasks of a generated module, given as a file or as its text.

    Raises:
      SkillError: the module departs from the frame; says file, line and remedy.
      GateError: a function asks for something the gate does not admit.
    """
    if isinstance(source, Path):
        text, place = _read(source), str(source)
    else:
        text, place = source, "<module>"
    frame = _Frame(place)
    tree = frame.parse(text)
    game = frame.read_imports(tree.body[:4])
    global_to_local, local_to_global, plan = frame.read_constants(tree.body[4:7])
    frame.check_remapping(tree.body[4], global_to_local, local_to_global)
    frame.check_plan(tree.body[6], plan, global_to_local)
    functions = frame.read_functions(tree.body[7:], plan)
    check_names(functions, place, env_name=ENVS[game])
    return TaskModule(
        game=game,
        global_to_local=global_to_local,
        local_to_global=local_to_global,
        tasks=_tasks(plan, global_to_local, _run(functions, game, place)),
    )


def _tasks(
    plan: Sequence[Mapping[str, Any]], to_local: Mapping[int, int], called: Mapping[str, Any]
) -> tuple[Task, ...]:
    return tuple(
        Task(
            skill=step["skill"],
            count=step["count"],
            is_done=called[f"task_{k}_is_done"],
            reward=called[f"task_{k}_reward"],
            expert_local=to_local[step["expert"]],
            max_steps=step.get("max_steps"),
        )
        for k, step in enumerate(plan)
    )


def _read(path: Path) -> str:
    try:
        return read_bytes(path, limit_bytes=MODULE_LIMIT_BYTES).decode()
    except UnicodeDecodeError as error:
        raise SkillError(f"{path}: {error}; {REMEDY}") from error


def _run(functions: Sequence[ast.FunctionDef], game: str, place: str) -> dict[str, Any]:
    """The checked functions as callables, in a namespace of their own."""
    constants = importlib.import_module(f"{game}.constants")
    namespace: dict[str, Any] = {name: getattr(constants, name) for name in ENUMS}
    namespace |= {"__builtins__": BUILTINS, "jax": jax, "jnp": jnp}
    body = ast.Module(body=list(functions), type_ignores=[])
    exec(compile(body, place, "exec", dont_inherit=True), namespace)  # noqa: S102 - passed the gate
    return namespace


class _Frame:
    """Holds a module against the frame, statement by statement, and says where it departs."""

    def __init__(self, place: str) -> None:
        self.place = place

    def refusal(self, line: int, why: str) -> SkillError:
        return SkillError(f"{self.place}:{line}: {why}; {REMEDY}")

    def parse(self, text: str) -> ast.Module:
        tree = parse_source(text, self.place, limit_bytes=MODULE_LIMIT_BYTES)
        if len(tree.body) < 10:
            raise self.refusal(1, "it ends before the first task's functions")
        return tree

    def read_imports(self, lines: Sequence[ast.stmt]) -> str:
        """The Craftax package named by the docstring-and-imports head of the module."""
        head = lines[0]
        if not (isinstance(head, ast.Expr) and isinstance(head.value, ast.Constant)):
            raise self.refusal(head.lineno, "it does not begin with a docstring")
        for line, wanted in zip(lines[1:3], ("import jax", "import jax.numpy as jnp"), strict=True):
            if ast.unparse(line) != wanted:
                raise self.refusal(line.lineno, f"here stands `{wanted}`, not `{_short(line)}`")
        for game in ENVS:
            if ast.unparse(lines[3]) == f"from {game}.constants import {', '.join(ENUMS)}":
                return game
        raise self.refusal(
            lines[3].lineno,
            f"here stands `from GAME.constants import {', '.join(ENUMS)}` with GAME one of "
            f"{', '.join(ENVS)}, not `{_short(lines[3])}`",
        )

    def read_constants(self, lines: Sequence[ast.stmt]) -> list[Any]:
        return [self._constant(line, name) for line, name in zip(lines, CONSTANTS, strict=True)]

    def _constant(self, line: ast.stmt, name: str) -> Any:
        match line:
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                pass
            case _:
                raise self.refusal(line.lineno, f"here stands `{name} = …`, not `{_short(line)}`")
        return literal(value, self.place)

    def check_remapping(self, line: ast.stmt, to_local: Any, to_global: Any) -> None:
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
        if not isinstance(plan, list) or not plan:
            raise self.refusal(line.lineno, "PLAN is not a list of steps")
        for k, step in enumerate(plan):
            if not isinstance(step, dict) or set(step) - {"max_steps"} != KEYS:
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
        """The skill functions of every task, in order, each through the gate."""
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
            for function in found[3 * k : 3 * k + 2]:
                self._check_skill_function(function, step["count"])
            self._check_network_number(found[3 * k + 2], k, step["expert"])
        return [function for i, function in enumerate(found) if i % 3 != 2]

    def _check_skill_function(self, function: ast.FunctionDef, count: int) -> None:
        """A gated function whose only default, if any, is `n=<the step's count>`."""
        asks_for_n = any(argument.arg == "n" for argument in function.args.args)
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
        check_function(function, self.place)

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
