"""Skills: the noun everything is about, and the one form in which skills are written.

A skill is a file: constants and two functions. The same text ships with flowrl, is dropped in a
folder by a user or is written by a language model. Reading it executes nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flowrl import storage
from flowrl.errors import FileRefusedError, GateError, SkillError
from flowrl.paths import slug
from flowrl.skills.amount import Amount
from flowrl.skills.constants import MOST_STEPS, plain_literal, read_constants, text_of
from flowrl.skills.games import GAMES
from flowrl.skills.gate import SOURCE_LIMIT_BYTES, check_skill_source, literal

__all__ = [
    "MOST_STEPS",
    "Amount",
    "Origin",
    "Skill",
    "Step",
    "load_library",
    "load_skill",
    "parse_skill",
]

_KEYS = frozenset(
    {"name", "description", "requirements", "consumption", "gain", "ephemeral"}
    | {"max_steps", "is_done", "reward", "code"}
)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a skill's functions stand: a file or another place, and their first lines."""

    place: str
    is_done: int = 1
    reward: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Skill:
    """What an agent can learn, what it takes and what it yields.

    `requirements` must hold when the skill starts, `consumption` is used up, `gain` holds when it
    is done; `ephemeral` names those gains that last only while nothing moves the player. A step of
    a plan may take `max_steps` environment steps; None leaves it to `--max_task_steps`.
    """

    name: str
    description: str
    requirements: Mapping[str, Amount]
    consumption: Mapping[str, Amount]
    gain: Mapping[str, Amount]
    ephemeral: frozenset[str]
    is_done: str  # source of the predicate, `def task_is_done(…)`
    reward: str  # source of the reward, `def task_reward(…)`
    max_steps: int | None = None
    trusted: bool = False  # its author lifted the syntax gate for it
    origin: Origin | None = field(default=None, compare=False, repr=False)

    @property
    def source(self) -> str:
        """The skill as a skill file; parsing it gives the same skill."""
        lines = [
            f"description = {self.description!r}",
            f"name = {self.name!r}",
            f"requirements = {_written(self.requirements)!r}",
            f"consumption = {_written(self.consumption)!r}",
            f"gain = {_written(self.gain)!r}",
            f"ephemeral = {sorted(self.ephemeral)!r}",
            *([] if self.max_steps is None else [f"max_steps = {self.max_steps}"]),
        ]
        return "\n".join(lines) + f"\n\n\n{self.is_done}\n\n\n{self.reward}\n"

    def to_json(self) -> dict[str, Any]:
        """The skill as plain data; `from_json` reads it back."""
        return {
            "name": self.name,
            "description": self.description,
            "requirements": _written(self.requirements),
            "consumption": _written(self.consumption),
            "gain": _written(self.gain),
            "ephemeral": sorted(self.ephemeral),
            "is_done": self.is_done,
            "reward": self.reward,
            **({} if self.max_steps is None else {"max_steps": self.max_steps}),
            **({"trusted": True} if self.trusted else {}),
        }

    @staticmethod
    def from_json(facts: Mapping[str, Any]) -> Skill:
        """The skill that `to_json` wrote; it passes the gate again, unless it is a trusted one.

        Raises:
          SkillError: the data is not a skill.
        """
        data = {key: value for key, value in facts.items() if key != "trusted"}
        trusted = facts.get("trusted") is True
        name = text_of(facts.get("name"), "name", "skill data")
        return skill_from_data(name, data, trusted=trusted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One line of an execution plan: which skill, and up to which count."""

    skill: str
    count: int


def parse_skill(
    text: str, *, place: str, env_name: str | None = None, trusted: bool = False
) -> Skill:
    """The skill that a file's text defines, for one game or either; nothing of it is executed.

    The gate does not look into the functions of a trusted one.

    Raises:
      SkillError: the text is malformed, or does not pass the gate.
    """
    module = check_skill_source(text, place, env_name=env_name, trusted=trusted)
    functions: dict[str, str] = {}
    lines: dict[str, int] = {}
    constants: dict[str, Any] = {"description": ast.get_docstring(module)}
    for node in module.body:
        match node:
            case ast.FunctionDef(name=name):
                functions[name] = ast.get_source_segment(text, node) or ast.unparse(node)
                lines[name] = node.lineno
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                constants[name] = literal(value, place)
                lines[name] = node.lineno
    return Skill(
        **read_constants(constants, lambda name: f"{place}:{lines.get(name, 1)}"),
        is_done=functions["task_is_done"],
        reward=functions["task_reward"],
        trusted=trusted,
        origin=Origin(place, lines["task_is_done"], lines["task_reward"]),
    )


def skill_from_data(skill_name: str, data: Mapping[str, Any], *, trusted: bool = False) -> Skill:
    """The skill that a mapping describes, as `SkillScheduler.add_skill` and `Flow` pass it.

    Keys: `description`, `requirements`, `consumption`, `gain` (amounts as numbers or strings such
    as `"lambda n: 4*n + 0"`), `ephemeral`, `max_steps`, and the sources of the two functions:
    `is_done` and `reward`, or both in one text under `code`. `gain` and the functions are required.

    Raises:
      SkillError: a key is unknown, missing or malformed, or the code does not pass the gate.
    """
    place = f"skill {skill_name!r}"
    for key in data:
        if key not in _KEYS:
            raise SkillError(f"{place}: unknown key {key!r}; known are {', '.join(sorted(_KEYS))}")
    code = [text_of(data[key], key, place) for key in ("is_done", "reward", "code") if key in data]
    constants = {key: data[key] for key in data if key not in {"is_done", "reward", "code"}}
    constants = {"description": "", **constants, "name": skill_name}
    lines = [f"{key} = {plain_literal(value, key, place)!r}" for key, value in constants.items()]
    skill = parse_skill("\n".join([*lines, "", *code, ""]), place=place, trusted=trusted)
    return replace(skill, origin=Origin(place))


def load_skill(path: Path, *, env_name: str | None = None, trust: bool = False) -> Skill:
    """The skill in a file, for one game or either.

    With `trust`, functions that the gate refuses make a trusted skill.

    Raises:
      FlowrlError: the file cannot be read, is malformed, or does not pass the gate.
    """
    try:
        text = storage.read_bytes(Path(path), limit_bytes=SOURCE_LIMIT_BYTES).decode()
    except FileRefusedError as error:
        remedy = f"name a plain file of at most {SOURCE_LIMIT_BYTES:,} bytes"
        raise SkillError(f"{path}:1: {error}; {remedy}") from error
    except UnicodeDecodeError as error:
        raise SkillError(f"{path}:1: not UTF-8; save the file as UTF-8") from error
    try:
        return parse_skill(text, place=str(path), env_name=env_name)
    except GateError:
        if not trust:
            raise
    return parse_skill(text, place=str(path), env_name=env_name, trusted=True)


def load_library(
    env_name: str, skills_dir: Path | None = None, *, trust: bool = False
) -> dict[str, Skill]:
    """All skills for an environment, by name: the embedded ones, then those of `skills_dir`.

    Files are read in the order of their names. A user's skill replaces the embedded one that has
    the same name, in its place.

    Raises:
      SkillError: no library for this environment, no such folder, a skill that is not for this
        game, or two skills with one slug.
    """
    if env_name not in GAMES:
        raise SkillError(f"no skills for {env_name!r}; known are {', '.join(GAMES)}")
    embedded = Path(__file__).parent / "library" / GAMES[env_name].folder
    skills = _load_folder(embedded, env_name)
    if skills_dir is not None:
        if not Path(skills_dir).is_dir():
            raise SkillError(f"{skills_dir} is not a folder; name a folder of skill files")
        skills |= _load_folder(Path(skills_dir), env_name, trust=trust)
    _refuse_shared_slugs(skills)
    return skills


def _load_folder(folder: Path, env_name: str, *, trust: bool = False) -> dict[str, Skill]:
    places: dict[str, Path] = {}
    skills: dict[str, Skill] = {}
    for path in sorted(folder.glob("*.py")):
        skill = load_skill(path, env_name=env_name, trust=trust)
        if skill.name in skills:
            raise SkillError(f"{places[skill.name]} and {path} are both {skill.name!r}; rename one")
        skills[skill.name], places[skill.name] = skill, path
    return skills


def _refuse_shared_slugs(skills: Mapping[str, Skill]) -> None:
    names: dict[str, str] = {}
    for name in skills:
        other = names.setdefault(slug(name), name)
        if other != name:
            raise SkillError(f"the skills {other!r} and {name!r} share the slug {slug(name)!r}")


def _written(amounts: Mapping[str, Amount]) -> dict[str, str]:
    return {item: str(amount) for item, amount in amounts.items()}
