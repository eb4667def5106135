"""Graphs of the original's sequential code: one folder per iteration, all experts in its tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flowrl.layout import display_name
from flowrl.migration.networks import leaves_of, numbered_networks
from flowrl.migration.old_expert import Found, LeftOut, OldExpert, saved_tree
from flowrl.migration.old_files import (
    facts,
    frames_in,
    is_folder,
    mapping,
    newest_step,
    numbered,
    settings,
    share_in,
)
from flowrl.migration.pickles import read_pickle

_ITERATION = re.compile(r"(0|[1-9][0-9]{0,5})")
_SUCCESS = re.compile(r"successful_skill_([0-9]{1,6})_.*\.pkl", re.DOTALL)
_CODE_LIMIT = 20_000


def in_folder(old: Path) -> Found:
    """The experts of the newest iterations, by the skills that the newest records name.

    Raises:
      FileRefusedError: a file cannot be trusted.
    """
    steps = dict(_steps(old))
    if not steps:
        return Found()
    networks = _newest_networks(steps)
    skills = _skills(old)
    experts: dict[int, OldExpert] = {}
    left_out: list[LeftOut] = []
    for name, data in skills.items():
        index, iteration = _numbers(data)
        if index not in networks or index in experts:
            taken = f"expert {index} is {experts[index].name!r}'s" if index in experts else ""
            why = taken or "no iteration has an expert for it"
            left_out.append(LeftOut(f"skill {name[:80]!r}", why))
            continue
        experts[index] = _expert(
            index, name, found=networks[index], policies=_policies(old, iteration), data=data
        )
    for index in sorted(networks.keys() - experts.keys()):
        left_out.append(LeftOut(f"expert {index} of {networks[index][0]}", "no skill names it"))
    said = settings(_policies(old, max(steps)) / "config.yaml")
    return Found(
        words=f"{len(experts)} experts of the sequential code (<i>/<i>_policies)",
        experts=tuple(experts.values()),
        left_out=tuple(left_out),
        activation=said.get("ACTIVATION", ""),
    )


def _policies(old: Path, iteration: int) -> Path:
    return old / str(iteration) / f"{iteration}_policies"


def _steps(old: Path) -> Iterator[tuple[int, Path]]:
    """The newest whole checkpoint of every iteration."""
    for iteration, _, _ in numbered(old, _ITERATION):
        policies = _policies(old, iteration)
        place = newest_step(policies) if is_folder(policies) else None
        if place is not None:
            yield iteration, place


def _newest_networks(steps: Mapping[int, Path]) -> dict[int, tuple[Path, Any]]:
    """Where each expert was last seen, with its networks there."""
    found: dict[int, tuple[Path, Any]] = {}
    for iteration in sorted(steps, reverse=True):
        place = steps[iteration]
        for index, network in numbered_networks(saved_tree(place), str(place)).items():
            found.setdefault(index, (place, network))
    return found


def _skills(old: Path) -> dict[str, Any]:
    """The skills of the newest skills.json; without one, of the newest pickled checkpoint."""
    iterations = [folder for _, _, folder in numbered(old, _ITERATION)]
    for folder in reversed(iterations):
        skills = mapping(facts(folder / "skills.json").get("data"))
        if skills:
            return {name: data for name, data in skills.items() if isinstance(name, str)}
    checkpoints = old / "checkpoints"
    names = [path.name for path in checkpoints.iterdir()] if is_folder(checkpoints) else []
    matches = [match for name in names if (match := _SUCCESS.fullmatch(name))]
    for match in sorted(matches, key=lambda match: (int(match[1]), match[0]), reverse=True):
        skills = mapping(mapping(read_pickle(checkpoints / match[0])).get("skills"))
        return {name: data for name, data in skills.items() if isinstance(name, str)}
    return {}


def _numbers(data: Any) -> tuple[int, int]:
    """A skill's expert and the iteration that trained it; -1 where nothing says it.

    The expert is what the third of its functions returns, `task_network_number`; read as text.
    """
    iteration = mapping(data).get("iteration")
    iteration = iteration if type(iteration) is int else -1
    functions = mapping(data).get("functions")
    if isinstance(functions, list) and len(functions) > 2 and isinstance(functions[2], str):
        number = _returned(functions[2])
        if number is not None:
            return number, iteration
    return iteration, iteration


def _returned(source: str) -> int | None:
    try:
        body = ast.parse(source).body if len(source) <= _CODE_LIMIT else []
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    match body:
        case [ast.FunctionDef(body=[*_, ast.Return(value=ast.Constant(value=number))])]:
            return number if type(number) is int and number >= 0 else None
    return None


def _expert(
    index: int, name: str, *, found: tuple[Path, Any], policies: Path, data: Any
) -> OldExpert:
    place, network = found
    said = settings(policies / "config.yaml") if is_folder(policies) else {}
    return OldExpert(
        index=index,
        name=display_name(name),
        place=place,
        leaves=leaves_of(network, f"{place}, expert {index}"),
        frames=frames_in(said.get("TRAINED_TIMESTEPS", said.get("TOTAL_TIMESTEPS")), policies),
        success_rate=share_in(said.get("SUCCESS_RATE")),
        data=data,
    )
