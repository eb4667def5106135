"""`flowrl check`: what is wrong with skill files, one line each."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flowrl.errors import ConfigError, FlowrlError, GateError
from flowrl.skills.games import GAMES
from flowrl.skills.gate import check_names
from flowrl.skills.judging import Limits, Refusal, Subject, judge
from flowrl.skills.skill import Skill, load_skill
from flowrl.skills.verdicts import parsed_function


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A file, the games that it is a good skill for, and what is wrong when there is none."""

    file: str
    games: tuple[str, ...] = ()
    why: str | None = None


def show(files: Sequence[Path], *, trace: bool, as_json: bool) -> int:
    """Print one line per refused file; 1 when there is one, else 0.

    Raises:
      ConfigError: no file is named.
    """
    if not files:
        raise ConfigError("no file is named; name at least one: flowrl check my_skills/*.py")
    checked = check_files(files, trace=trace)
    refused = [each.why for each in checked if each.why is not None]
    if as_json:
        sys.stdout.write(json.dumps([asdict(each) for each in checked], indent=2) + "\n")
    else:
        sys.stdout.writelines(f"{why}\n" for why in refused)
    return 1 if refused else 0


def check_files(
    files: Sequence[Path], *, trace: bool = True, limits: Limits | None = None
) -> list[Checked]:
    """Every file through the gate and, with `trace`, through the trial: all of them in one."""
    read = [_read(path) for path in files]
    subjects = [
        (number, Subject.of(skill, env_name))
        for number, skill in enumerate(read)
        if isinstance(skill, Skill)
        for env_name in _games(skill)
    ]
    answers = (
        judge([subject for _, subject in subjects], limits) if trace else [None] * len(subjects)
    )
    good: dict[int, list[str]] = {}
    why = {number: each for number, each in enumerate(read) if isinstance(each, str)}
    for (number, subject), answer in zip(subjects, answers, strict=True):
        if isinstance(answer, Refusal):
            why.setdefault(number, answer.text)
        else:
            good.setdefault(number, []).append(subject.env_name)
    return [
        Checked(
            file=str(path),
            games=tuple(good.get(number, ())),
            why=None if number in good else why[number],
        )
        for number, path in enumerate(files)
    ]


def _read(path: Path) -> Skill | str:
    """The skill that passes the gate, or why it does not."""
    try:
        return load_skill(path)
    except FlowrlError as error:
        return str(error)


def _games(skill: Skill) -> list[str]:
    """The games that have all that the skill names: one at least, or it had been refused."""
    functions = [parsed_function(code, skill.name) for code in (skill.is_done, skill.reward)]
    return [env_name for env_name in GAMES if _fits(functions, env_name)]


def _fits(functions: list, env_name: str) -> bool:
    try:
        check_names(functions, "skill", env_name=env_name)
    except GateError:
        return False
    return True
