"""Read a generated module: its game, its plan, its experts and its tasks' functions.

A generated module is never imported. Its text is parsed and compared with the one frame that flowrl
writes, statement by statement; every skill function passes the syntax check again, and only those
functions are executed, in a namespace of their own (`flowrl.skills.validation.execution`). Trainers
and evaluations run approved functions only. A run's approvals are in its run.json, which was
written with the module; code of a module without a run.json is tried here and now.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from flowrl.config import MOST_STEPS
from flowrl.errors import ConfigError, SkillError
from flowrl.games.base import COUNT, Game, find_game
from flowrl.paths import RunPaths
from flowrl.runs import CodeApproval, PlannedStep, read_run
from flowrl.skills.skill import CodeOrigin
from flowrl.skills.validation.cache import ApprovalStore, code_digest
from flowrl.skills.validation.dry_run import SkillCode, approvals_of
from flowrl.skills.validation.execution import execute_functions
from flowrl.skills.validation.syntax import check_function, literal, parse_source
from flowrl.storage import read_bytes, records

_MODULE_LIMIT_BYTES = 2_000_000
_REMEDY = "flowrl alone writes plans, as RUN/2.py: name one, or train or export its skill again"
_DOCSTRING = '"""…"""'
_CONSTANTS = ("GAME", "GLOBAL_TO_LOCAL", "LOCAL_TO_GLOBAL", "PLAN")


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
        """True if the step is done."""
        return self.load()[0]

    @property
    def reward(self) -> Callable[..., Any]:
        """Return the reward of a timestep of the environment."""
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
    max_steps: int | None
    gains: Mapping[str, int]  # item → how much of it the inventory must hold when the step is done
    keeps: Mapping[str, int]  # item → how much of it later steps need besides
    facts: Mapping[str, int]  # that later steps need → the step before whose done-condition says it
    digest: str  # of the code of both functions, as `code_digest` computes it


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskModule:
    """The contents of a generated module."""

    game: Game
    experts: tuple[int, ...]  # global indices of the run's experts, by their local index
    plan: tuple[PlannedStep, ...]
    tasks: tuple[Task, ...]  # the steps of the plan with their functions


def open_module(path: Path) -> TaskModule:
    """The tasks of a generated module whose functions are all approved.

    Raises:
      SkillError: the module departs from the frame, or a step's functions are not approved.
      CodeRefusedError: a function contains something that is not admitted.
    """
    approvals = _approvals_of(path)
    if approvals is not None:
        return load_module(path, approvals=approvals)
    return open_modules([path], ApprovalStore(path.parent / "approvals"))[0]


def _approvals_of(path: Path) -> Sequence[CodeApproval] | None:
    """The approvals in the run.json of a module, None without one."""
    if not (path.stem.isascii() and path.stem.isdecimal()):
        return None
    run_paths = RunPaths(path.parent, int(path.stem))
    return read_run(run_paths).approvals if run_paths.run_json.exists() else None


def terms_of(path: Path) -> tuple[list[str], Callable[..., Any]]:
    """The terms that the reward of a module's last step sums up, and a function that returns them.

    A name that is returned stands for what it was assigned, if that was once. Without a single
    return there are no terms. The module is one that `open_module` admits.
    """
    frame = _read(path)
    reward = copy.deepcopy(frame.functions[-2])
    *_, last = reward.body
    returns = sum(isinstance(node, ast.Return) for node in ast.walk(reward))
    if not isinstance(last, ast.Return) or last.value is None or returns != 1:
        return [], lambda: ()
    assigned = [node for node in ast.walk(reward) if isinstance(node, ast.Assign | ast.AugAssign)]
    stored = Counter(
        node.id
        for each in assigned
        for node in ast.walk(each)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    once = {
        target.id: each.value
        for each in assigned
        if each in reward.body and isinstance(each, ast.Assign)
        for target in each.targets
        if isinstance(target, ast.Name) and stored[target.id] == 1
    }
    terms = list(_summed(last.value, once))
    last.value = ast.Tuple(terms, ast.Load())
    digest = code_digest(frame.functions[-3], frame.functions[-2], frame.game.name)
    trusted = any(each.digest == digest and each.trusted for each in _approvals_of(path) or ())
    [function] = execute_functions([reward], frame.game, place=frame.place, trusted=trusted)
    return [ast.unparse(term) for term in terms], function


def _summed(value: ast.expr, once: Mapping[str, ast.expr]) -> Iterator[ast.expr]:
    """The terms of a sum, as far as the source shows it."""
    match value:
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as sign, right=right):
            yield from _summed(left, once)
            for term in _summed(right, once):
                yield term if isinstance(sign, ast.Add) else ast.UnaryOp(ast.USub(), term)
        case ast.Name(id=name) if isinstance(once.get(name), ast.BinOp):
            terms = list(_summed(once[name], once))
            yield from terms if len(terms) > 1 else [value]
        case _:
            yield value


def open_modules(paths: Sequence[Path], store: ApprovalStore) -> list[TaskModule]:
    """The tasks of modules without a run.json; what the store does not approve is tried now.

    Raises:
      SkillError: a module departs from the frame, or the dry run refuses a step's functions.
      CodeRefusedError: a function contains something that is not admitted.
    """
    for path in paths:
        load_module(path)  # the syntax check comes before the dry run
    codes = {code.digest: code for path in paths for code in _codes(path)}
    approvals = []
    for outcome in approvals_of(list(codes.values()), store):
        if isinstance(outcome, str):
            raise SkillError(outcome)
        approvals.append(outcome)
    return [load_module(path, approvals=approvals) for path in paths]


def load_module(
    source: Path | str, *, approvals: Collection[CodeApproval] | None = None
) -> TaskModule:
    """The tasks of a generated module, given as a file or as its text.

    With `approvals`, the functions of every step must have one of them, which also lifts the syntax
    check for those it trusts.

    Raises:
      SkillError: the module departs from the frame, or a step's functions have no approval; says
        file, line and remedy.
      CodeRefusedError: a function contains something that is not admitted.
    """
    frame = _read(source)
    known = None if approvals is None else {each.digest: each for each in approvals}
    return TaskModule(
        game=frame.game,
        experts=tuple(frame.experts),
        plan=tuple(frame.plan),
        tasks=tuple(_task(frame, k, known) for k in range(len(frame.plan))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """A module that has the form of the frame; its functions are not checked yet."""

    place: str
    game: Game
    experts: Sequence[int]
    plan: Sequence[PlannedStep]
    functions: Sequence[ast.FunctionDef]  # of each step: predicate, reward, its expert's number


def _task(frame: _Frame, k: int, approvals: Mapping[str, CodeApproval] | None) -> Task:
    """Step k of the plan; its functions are checked, but not executed yet."""
    step, pair, place = frame.plan[k], frame.functions[3 * k : 3 * k + 2], frame.place
    digest = code_digest(pair[0], pair[1], frame.game.name)
    if approvals is not None and digest not in approvals:
        what = f"the code of step {step.skill!r} has no approval; prepare the run again"
        raise SkillError(f"{place}:{pair[0].lineno}: {what}")
    trusted = approvals is not None and approvals[digest].trusted
    for function in pair:
        _check_default(function, step.count, place)
        check_function(function, place, game=frame.game, trusted=trusted)
    load = cache(partial(execute_functions, pair, frame.game, place=place, trusted=trusted))
    return Task(
        skill=step.skill,
        count=step.count,
        functions=SuccessFunctions(step.skill, load),
        expert_local=frame.experts.index(step.expert),
        max_steps=step.max_steps,
        gains=step.gains,
        keeps=step.keeps,
        facts=step.facts,
        digest=digest,
    )


def _codes(path: Path) -> list[SkillCode]:
    frame = _read(path)
    return [
        SkillCode(
            env_name=frame.game.name,
            is_done=ast.unparse(done),
            reward=ast.unparse(reward),
            origin=CodeOrigin(frame.place, done.lineno, reward.lineno),
        )
        for done, reward in zip(frame.functions[::3], frame.functions[1::3], strict=True)
    ]


def _read(source: Path | str) -> _Frame:
    """The parts of a generated module, of which nothing is executed."""
    place = str(source) if isinstance(source, Path) else "<module>"
    if isinstance(source, Path):
        content = read_bytes(source, limit_bytes=_MODULE_LIMIT_BYTES, remedy=_REMEDY)
        source = content.decode(errors="replace")
    body = parse_source(source, place, limit_bytes=_MODULE_LIMIT_BYTES).body
    lines = {name: _assignment(body, name, place) for name in _CONSTANTS}
    values = {name: literal(line.value, place) for name, line in lines.items()}
    try:
        game = find_game(values["GAME"])
    except ConfigError as error:
        raise SkillError(f"{place}:{lines['GAME'].lineno}: {error}") from error
    to_local, plan = values["GLOBAL_TO_LOCAL"], values["PLAN"]
    if not isinstance(to_local, dict) or not all(
        type(expert) is int and expert >= 0 for expert in to_local
    ):
        raise _refusal(place, lines["GLOBAL_TO_LOCAL"], "GLOBAL_TO_LOCAL does not map indices")
    experts = sorted(to_local)
    if not isinstance(plan, list) or not plan:
        raise _refusal(place, lines["PLAN"], "PLAN is not a list of steps")
    steps: list[PlannedStep] = []
    for value in plan:
        if (step := _step(value, game, experts, before=len(steps))) is None:
            what = f"step {len(steps)} of PLAN needs a skill, a count up to {game.largest_count} "
            what += f"and an expert of {experts}; it may have max_steps, up to {MOST_STEPS}, and "
            raise _refusal(place, lines["PLAN"], f"{what}gains, keeps and facts")
        steps.append(step)
    _compare(body, _frame_of(game, experts, lines["PLAN"], steps), place)
    functions = [line for line in body[-3 * len(plan) :] if isinstance(line, ast.FunctionDef)]
    return _Frame(place=place, game=game, experts=experts, plan=steps, functions=functions)


def _step(value: Any, game: Game, experts: Collection[int], *, before: int) -> PlannedStep | None:
    """A step of PLAN after some others; None if it is malformed or not for this game."""
    try:
        step = records.from_json(PlannedStep, value)
    except records.MalformedError:
        return None
    amounts = [step.max_steps or 1, *step.gains.values(), *step.keeps.values()]
    fits = step.expert in experts and 0 < step.count <= game.largest_count
    fits &= None not in value.values() and {*step.gains, *step.keeps} <= game.items
    fits &= all(number < before for number in step.facts.values())
    return step if fits and max(amounts) <= MOST_STEPS else None


def _frame_of(
    game: Game, experts: Sequence[int], plan_line: ast.Assign, plan: Sequence[PlannedStep]
) -> list[str]:
    """The statements of a module; of a docstring and of a skill's function only the beginning."""
    head = [_DOCSTRING, "import jax", "import jax.numpy as jnp"]
    head += [game.import_line] if game.import_line else []
    to_local = {expert: local for local, expert in enumerate(experts)}
    head += [f"GAME = {game.name!r}", f"GLOBAL_TO_LOCAL = {to_local}"]
    head += [f"LOCAL_TO_GLOBAL = {dict(enumerate(experts))}", ast.unparse(plan_line)]
    for k, step in enumerate(plan):
        number = f"    return GLOBAL_TO_LOCAL[{step.expert}]"
        head += [f"def task_{k}_is_done", f"def task_{k}_reward"]
        head += [f"def task_{k}_network_number():\n{number}"]
    return head


def _compare(body: Sequence[ast.stmt], frame: Sequence[str], place: str) -> None:
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
        raise _refusal(place, extra, f"`{_short(ast.unparse(extra))}` is beyond the tasks of PLAN")


def _assignment(body: Sequence[ast.stmt], name: str, place: str) -> ast.Assign:
    for line in body:
        match line:
            case ast.Assign(targets=[ast.Name(id=found)]) if found == name:
                return line
    raise _refusal(place, body[0] if body else None, f"`{name} = …` is missing")


def _check_default(function: ast.FunctionDef, count: int, place: str) -> None:
    """The only default of a function, if any, is `n=<the step's count>`."""
    asks_for_n = any(argument.arg == COUNT for argument in function.args.args)
    defaults = [ast.unparse(default) for default in function.args.defaults]
    if defaults != [str(count)] * asks_for_n:
        raise _refusal(place, function, f"{function.name} must have no default but n={count}")


def _refusal(place: str, line: ast.stmt | None, why: str) -> SkillError:
    return SkillError(f"{place}:{line.lineno if line else 1}: {why}; {_REMEDY}")


def _short(text: str) -> str:
    first = text.splitlines()[0]
    return first if len(first) <= 60 else first[:59] + "…"
