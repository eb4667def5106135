"""The one frame that generated modules are written in, statement by statement."""

from __future__ import annotations

import ast
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flowrl.errors import SkillError
from flowrl.skills.games import GAMES
from flowrl.skills.gate import check_function, literal, parse_source
from flowrl.skills.skill import MOST_STEPS

MODULE_LIMIT_BYTES = 2_000_000
REMEDY = "write it again with generate_module_with_remapping"
ENVS = {game.package: env_name for env_name, game in GAMES.items()}
ENUMS = ("Achievement", "Action", "BlockType")
CONSTANTS = ("GLOBAL_TO_LOCAL", "LOCAL_TO_GLOBAL", "PLAN")
KEYS = {"skill", "count", "expert"}  # of a step; it may also say max_steps


class Frame:
    """Holds a module against the frame, statement by statement, and says where it departs."""

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
        """The values of the remapping and of the plan, in their order."""
        return [self._constant(line, name) for line, name in zip(lines, CONSTANTS, strict=True)]

    def _constant(self, line: ast.stmt, name: str) -> Any:
        match line:
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                pass
            case _:
                raise self.refusal(line.lineno, f"here stands `{name} = …`, not `{_short(line)}`")
        return literal(value, self.place)

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
        """Pass the functions of every step through the gate, which is lifted for the trusted."""
        for k, step in enumerate(plan):
            for function in functions[2 * k : 2 * k + 2]:
                self._check_skill_function(function, step["count"], trusted=k in trusted)

    def _check_skill_function(
        self, function: ast.FunctionDef, count: int, *, trusted: bool
    ) -> None:
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
        check_function(function, self.place, trusted=trusted)

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
