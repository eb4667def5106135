"""Skills, and the one form in which they are written.

A skill is a file: constants and two functions. The same text ships with flowrl, is put into a
folder by a user or is written by a language model. Reading it executes nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flowrl import storage
from flowrl.errors import CodeRefusedError, FileRefusedError, NameRefusedError, SkillError
from flowrl.games.base import find_game, known_games
from flowrl.paths import display_name
from flowrl.skills.validation.syntax import SOURCE_LIMIT_BYTES, check_skill_source, literal

MOST_STEPS = 100_000
_AMOUNT_LIMIT = 1_000  # of either coefficient
_AMOUNT_TEXT_LIMIT = 100
_ITEM = re.compile(r"[a-z][a-z0-9_]{0,63}")
_KEYS = frozenset(
    {"name", "description", "requirements", "consumption", "gain", "ephemeral"}
    | {"max_steps", "is_done", "reward", "code"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How much of an item at count n: `per * n + base`, never negative for n ≥ 1.

    >>> Amount.parse("lambda n: 4*n + 0").at(2)
    8
    >>> str(Amount.parse("1 + 4 * n"))
    '4*n + 1'
    """

    per: int
    base: int

    def __post_init__(self) -> None:
        if (
            not 0 <= self.per <= _AMOUNT_LIMIT
            or abs(self.base) > _AMOUNT_LIMIT
            or self.per + self.base < 0
        ):
            raise SkillError(f"the amount {self} is negative or over {_AMOUNT_LIMIT}; correct it")

    def __bool__(self) -> bool:
        return self.per > 0 or self.base > 0

    def __str__(self) -> str:
        if self.per == 0:
            return str(self.base)
        linear = "n" if self.per == 1 else f"{self.per}*n"
        sign = "-" if self.base < 0 else "+"
        return f"{linear} {sign} {abs(self.base)}" if self.base else linear

    def at(self, n: int) -> int:
        """The amount at count `n`."""
        return self.per * n + self.base

    def least_n(self, need: int) -> int | None:
        """The least count ≥ 1 whose amount is at least `need`; None when no count will do."""
        if self.at(1) >= need:
            return 1
        return None if self.per == 0 else -((self.base - need) // self.per)

    @staticmethod
    def parse(written: object) -> Amount:
        """The amount in a number or a text such as `n`, `4*n + 1` or `lambda n: 4*n + 0`.

        Raises:
          SkillError: it is negative, absurd, not linear in n, or not an amount at all.
        """
        if isinstance(written, Amount):
            return written
        if isinstance(written, int | float) and not isinstance(written, bool):
            if not abs(written) <= _AMOUNT_LIMIT or written != int(written):
                raise SkillError(f"{written!r} is not a whole number up to {_AMOUNT_LIMIT}")
            return Amount(per=0, base=int(written))
        if not isinstance(written, str) or len(written) > _AMOUNT_TEXT_LIMIT:
            raise SkillError(f"{str(written)[:40]!r} is not an amount; write {'4*n + 1'!r}")
        per, base = _linear(_expression(written), written)
        return Amount(per=per, base=base)


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
    trusted: bool = False  # its author lifted the syntax check for it
    origin: Origin | None = field(default=None, compare=False, repr=False)

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
    def from_json(fields: Mapping[str, Any]) -> Skill:
        """The skill that `to_json` wrote; its syntax is checked again, unless it is a trusted one.

        Raises:
          SkillError: the data is not a skill.
        """
        data = {key: value for key, value in fields.items() if key != "trusted"}
        trusted = fields.get("trusted") is True
        name = _text_of(fields.get("name"), "name", "skill data")
        return skill_from_data(name, data, trusted=trusted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One line of an execution plan: which skill, and up to which count."""

    skill: str
    count: int


def parse_skill(
    text: str, *, place: str, env_name: str | None = None, trusted: bool = False
) -> Skill:
    """The skill that a file's text defines, for one game or for any; nothing of it is executed.

    The syntax of a trusted skill's functions is not checked.

    Raises:
      SkillError: the text is malformed, or its syntax is not admitted.
    """
    games = known_games() if env_name is None else (find_game(env_name),)
    module = check_skill_source(text, place, games=games, trusted=trusted)
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
        **_read_constants(constants, lambda name: f"{place}:{lines.get(name, 1)}"),
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
      SkillError: a key is unknown, missing or malformed, or the code's syntax is not admitted.
    """
    place = f"skill {skill_name!r}"
    for key in data:
        if key not in _KEYS:
            raise SkillError(f"{place}: unknown key {key!r}; known are {', '.join(sorted(_KEYS))}")
    code = [_text_of(data[key], key, place) for key in ("is_done", "reward", "code") if key in data]
    constants = {key: data[key] for key in data if key not in {"is_done", "reward", "code"}}
    constants = {"description": "", **constants, "name": skill_name}
    lines = [f"{key} = {_plain_literal(value, key, place)!r}" for key, value in constants.items()]
    skill = parse_skill("\n".join([*lines, "", *code, ""]), place=place, trusted=trusted)
    return replace(skill, origin=Origin(place))


def load_skill(path: Path, *, env_name: str | None = None, trust: bool = False) -> Skill:
    """The skill in a file, for one game or for any.

    With `trust`, functions whose syntax is refused make a trusted skill.

    Raises:
      FlowrlError: the file cannot be read, is malformed, or its syntax is not admitted.
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
    except CodeRefusedError:
        if not trust:
            raise
    return parse_skill(text, place=str(path), env_name=env_name, trusted=True)


def load_library(
    env_name: str, skills_dir: Path | None = None, *, trust: bool = False
) -> dict[str, Skill]:
    """All skills for a game, by name: the embedded ones, then those of `skills_dir`.

    Files are read in the order of their names. A user's skill replaces the embedded one that has
    the same name, in its place.

    Raises:
      ConfigError: the game is unknown.
      SkillError: no such folder, or a skill that is not for this game.
    """
    skills = _load_folder(find_game(env_name).library, env_name)
    if skills_dir is not None:
        if not Path(skills_dir).is_dir():
            raise SkillError(f"{skills_dir} is not a folder; name a folder of skill files")
        skills |= _load_folder(Path(skills_dir), env_name, trust=trust)
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


def _written(amounts: Mapping[str, Amount]) -> dict[str, str]:
    return {item: str(amount) for item, amount in amounts.items()}


def _read_constants(constants: Mapping[str, Any], at: Callable[[str], str]) -> dict[str, Any]:
    """The fields of a skill that its constants say; `at` is the place of each by its name.

    Raises:
      SkillError: a constant is missing or malformed.
    """
    name = _name(constants.get("name"), at("name"))
    gain = _amounts(constants.get("gain"), "gain", at("gain"))
    if not any(gain.values()):
        raise SkillError(f"{at('gain')}: gain is empty; say what the skill {name!r} yields")
    described = _text_of(constants.get("description") or name, "description", at("description"))
    return {
        "name": name,
        "description": described.strip(),
        "requirements": _amounts(
            constants.get("requirements", {}), "requirements", at("requirements")
        ),
        "consumption": _amounts(constants.get("consumption", {}), "consumption", at("consumption")),
        "gain": gain,
        "ephemeral": _ephemeral(constants.get("ephemeral", ()), gain, at("ephemeral")),
        "max_steps": _max_steps(constants.get("max_steps"), at("max_steps")),
    }


def _text_of(value: Any, key: str, place: str) -> str:
    """The value, provided that it is text.

    Raises:
      SkillError: it is not.
    """
    if not isinstance(value, str):
        raise SkillError(f"{place}: {key} is missing or not text; write it as a string")
    return value


def _plain_literal(value: Any, key: str, place: str) -> Any:
    """The value made of plain literals only, so that its repr is a literal.

    Raises:
      SkillError: it holds something else.
    """
    if isinstance(value, Mapping):
        return {
            _plain_literal(item, key, place): _plain_literal(part, key, place)
            for item, part in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain_literal(part, key, place) for part in value]
    if isinstance(value, Amount):
        return str(value)
    if value is None or type(value) in {str, int, float, bool}:
        return value
    raise SkillError(f"{place}: {key} holds a {type(value).__name__}; use text and numbers")


def _name(value: Any, place: str) -> str:
    try:
        return display_name(_text_of(value, "name", place))
    except NameRefusedError as error:
        raise SkillError(f"{place}: {_with_remedy(str(error))}") from error


def _amounts(value: Any, key: str, place: str) -> dict[str, Amount]:
    if not isinstance(value, Mapping):
        raise SkillError(f'{place}: {key} is not a dict; write {{"wood": "n"}} or {{}}')
    amounts: dict[str, Amount] = {}
    for item, amount in value.items():
        if not isinstance(item, str) or not _ITEM.fullmatch(item):
            raise SkillError(f"{place}: {key} names {item!r}; use words such as wood or near_table")
        try:
            amounts[item] = Amount.parse(amount)
        except SkillError as error:
            raise SkillError(f"{place}: {key} of {item}: {_with_remedy(str(error))}") from error
    return amounts


def _ephemeral(value: Any, gain: Mapping[str, Amount], place: str) -> frozenset[str]:
    if not isinstance(value, list | tuple | set | frozenset):
        raise SkillError(f'{place}: ephemeral is not a list; write ["near_table"]')
    for item in value:
        if not isinstance(item, str) or item not in gain:
            raise SkillError(f"{place}: ephemeral names {item!r}, which is not in gain; add it")
    return frozenset(value)


def _max_steps(value: Any, place: str) -> int | None:
    if value is None or (type(value) is int and 0 < value <= MOST_STEPS):
        return value
    raise SkillError(f"{place}: max_steps is not a whole number from 1 to {MOST_STEPS}; write one")


def _with_remedy(text: str) -> str:
    return text if ";" in text else f"{text}; choose another"


def _expression(written: str) -> ast.expr:
    try:
        node = ast.parse(written.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SkillError(f"{written!r} is not an amount; write '4*n + 1'") from error
    match node:
        case ast.Lambda(
            args=ast.arguments(
                posonlyargs=[], args=[ast.arg(arg="n")], vararg=None, kwonlyargs=[], kwarg=None
            ),
            body=body,
        ):
            return body
    return node


def _linear(node: ast.expr, written: str) -> tuple[int, int]:
    """The coefficients (per, base) of an expression in n."""
    match node:
        case ast.Constant(value=int(value)) if type(value) is int and value <= _AMOUNT_LIMIT:
            return 0, value
        case ast.Name(id="n"):
            return 1, 0
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            (per, base), (other_per, other_base) = _linear(left, written), _linear(right, written)
            sign = 1 if isinstance(op, ast.Add) else -1
            return per + sign * other_per, base + sign * other_base
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            (per, base), (other_per, other_base) = _linear(left, written), _linear(right, written)
            if not per or not other_per:
                return per * other_base + other_per * base, base * other_base
    raise SkillError(f"{written!r} is not linear in n; write '4*n + 1'")
