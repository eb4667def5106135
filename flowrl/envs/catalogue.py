"""Plans as data: one compiled program for every plan of library skills.

Compiling a step of Craftax takes half a minute of CPU time, running it a millisecond. So the
trainer's program does not hold one plan. It holds a catalogue of judges, the functions of all
library skills, and which of them judge an episode, in what order and with which counts, is data
that the program is given. The judges cost next to nothing beside a step of the game.

A skill of a user's own is judged by functions that are compiled in, with its count as a constant;
plans with the same such skills share a program too.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from flowrl.envs.module_frame import ENVS
from flowrl.envs.skill_module import Functions, Judging, Task, TaskModule, namespace_of
from flowrl.skills.skill import load_library
from flowrl.skills.verdicts import code_digest, parsed_function

LEAST_COLUMNS = 8


class Plan(NamedTuple):
    """A plan as arrays; rows beyond `last` stand for nothing and are never come to."""

    judge: Any  # int32[columns]: which of the judges
    count: Any  # int32[columns]: n
    limit: Any  # int32[columns]: most environment steps
    expert: Any  # int32[columns]: local index of the one who acts
    last: Any  # int32[]: the plan's last step


@dataclass(frozen=True, slots=True)
class Judge(Judging):
    """The two functions of a skill; `counted` ones take n from the plan, others have it."""

    skill: str
    functions: Callable[[], Functions]  # run when first asked for
    counted: bool = False


def alone(module: TaskModule, *, max_task_steps: int) -> tuple[tuple[Judge, ...], Plan]:
    """The judges of this very plan, in its order."""
    judges = tuple(map(_own, module.tasks))
    return judges, _plan(module, range(len(judges)), max_task_steps, columns=len(judges))


def shared(module: TaskModule, *, max_task_steps: int) -> tuple[tuple[Judge, ...], Plan]:
    """The judges of the game's library, and after them those that this plan has besides.

    The number of columns is a power of two, 8 at least.
    """
    library = library_judges(module.game)
    numbers = {digest: number for number, digest in enumerate(library)}
    judges = list(library.values())
    chosen: list[int] = []
    for task in module.tasks:
        key = task.digest if task.digest in library else _own_key(task)
        if key not in numbers:
            numbers[key] = len(judges)
            judges.append(_own(task))
        chosen.append(numbers[key])
    columns = max(LEAST_COLUMNS, 1 << (len(chosen) - 1).bit_length())
    return tuple(judges), _plan(module, chosen, max_task_steps, columns=columns)


def own_judges(module: TaskModule) -> list[str]:
    """What tells the judges that a plan has besides the library's, in their order."""
    library = library_judges(module.game)
    own = (_own_key(task) for task in module.tasks if task.digest not in library)
    return list(dict.fromkeys(own))


def _own_key(task: Task) -> str:
    return f"{task.digest} {task.count}"


@cache
def library_judges(game: str) -> dict[str, Judge]:
    """The judges of all library skills of a game by the digest of their code, in its order."""
    found: dict[str, Judge] = {}
    for skill in load_library(ENVS[game]).values():
        place = f"the library's {skill.name}"
        done, reward = (parsed_function(text, place) for text in (skill.is_done, skill.reward))
        judge = Judge(skill.name, cache(partial(_pair, done, reward, game)), counted=True)
        found.setdefault(code_digest(done, reward, ENVS[game]), judge)
    return found


def _pair(done: ast.FunctionDef, reward: ast.FunctionDef, game: str) -> Functions:
    return Functions(_run(done, game), _run(reward, game))


def _run(function: ast.FunctionDef, game: str) -> Callable[..., Any]:
    """A library function, which has passed the gate; n, if asked for, gets a default."""
    asked = [argument for argument in function.args.args if argument.arg != "n"]
    with_count = copy.deepcopy(function)
    if len(asked) < len(function.args.args):
        with_count.args.args = [*asked, ast.arg(arg="n")]
        with_count.args.defaults = [ast.Constant(value=1)]
    body = ast.fix_missing_locations(ast.Module(body=[with_count], type_ignores=[]))
    namespace = namespace_of(game)
    exec(compile(body, function.name, "exec", dont_inherit=True), namespace)  # noqa: S102 - as above
    return namespace[function.name]


def _own(task: Task) -> Judge:
    return Judge(task.skill, task.functions)


def _plan(module: TaskModule, judges: Sequence[int], max_task_steps: int, *, columns: int) -> Plan:
    tasks = module.tasks
    return Plan(
        judge=_row(judges, columns),
        count=_row([task.count for task in tasks], columns),
        limit=_row([task.max_steps or max_task_steps for task in tasks], columns),
        expert=_row([task.expert_local for task in tasks], columns),
        last=np.asarray(len(tasks) - 1, np.int32),
    )


def _row(values: Sequence[int], columns: int) -> np.ndarray:
    row = np.zeros(columns, np.int32)
    row[: len(values)] = values
    return row
