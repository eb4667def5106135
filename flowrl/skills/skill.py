"""Skills, and the one form in which they are written.

A skill is a file: constants and two functions. The same text ships with flowrl, is put into a
folder by a user or a program. Reading it executes nothing.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flowrl import arguments, storage
from flowrl.config import MOST_STEPS, PPOConfig
from flowrl.errors import (
    CodeRefusedError,
    ConfigError,
    FileRefusedError,
    NameRefusedError,
    SkillError,
    closest,
    closest_file,
)
from flowrl.games.base import Game, find_game, known_games
from flowrl.paths import display_name, printable
from flowrl.skills.amount import Amount
from flowrl.skills.validation.syntax import (
    CONSTANTS,
    SOURCE_LIMIT_BYTES,
    check_skill_source,
    fitting_games,
    literal,
)

AMOUNTS = ("requirements", "consumption", "gain")
_ITEM = re.compile(r"[a-z][a-z0-9_]{0,63}")
ON_FLOOR = "on_floor"  # an item whose amount is exact: the floor that the player is on
_CODE = ("is_done", "reward", "code")  # keys of skill data
_SETTINGS = """
total_timesteps success_state_rate lr anneal_lr num_envs num_steps update_epochs num_minibatches
gamma gae_lambda clip_eps ent_coef vf_coef max_grad_norm coverage_bonus max_task_steps world_pool
"""
SKILL_SETTINGS = tuple(_SETTINGS.split())  # flags that may differ from skill to skill
_OF_GRAPH = ("env_name", "layer_size", "activation", "sight", "egocentric")
_MOST_FLOORS, _MOST_AT_ONCE = 99, 1_000
_MOST_FRAMES, _MOST_OF_SETTING = 10**12, 100_000
_MOST_ROWS = 2**22  # of an update


@dataclass(frozen=True, slots=True)
class CodeOrigin:
    """The place of a skill's functions: a file or another place, and their first lines.

    Those with helpers of their file are not `exact`: their other lines stand elsewhere.
    """

    place: str
    is_done: int = 1
    reward: int = 1
    exact: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Skill:
    """A thing that an agent can learn, with its needs and its yield.

    `requirements` must hold when the skill starts, `consumption` is used up, `gain` holds when it
    is done; `ephemeral` names those gains that last only while nothing moves the player. It can be
    done on `floors` of the game; without, on all, or where `on_floor` is required. A step of a plan
    may take `max_steps` environment steps; None leaves it to `--max_task_steps`. A plan fetches at
    most `max_count` at once, where that is possible.
    `provided_by` names the skill that an item of its needs must come from, `like` the skill whose
    expert a new one begins as a copy of, `training` the settings with which it is trained.
    """

    name: str
    description: str
    requirements: Mapping[str, Amount]
    consumption: Mapping[str, Amount]
    gain: Mapping[str, Amount]
    ephemeral: frozenset[str]
    is_done: str  # source of the predicate, `def task_is_done(…)`
    reward: str  # source of the reward, `def task_reward(…)`
    floors: tuple[int, ...] = ()
    max_count: int | None = None
    max_steps: int | None = None
    provided_by: Mapping[str, str] = field(default_factory=dict)  # item → name of a skill
    like: str | None = None
    training: Mapping[str, Any] = field(default_factory=dict)  # flag → value
    embedded: bool = field(default=False, compare=False)  # it comes with the game
    trusted: bool = False  # its author lifted the syntax check for it
    origin: CodeOrigin | None = field(default=None, compare=False, repr=False)

    def to_json(self) -> dict[str, Any]:
        """The skill as plain data; `from_json` reads it back."""
        return {
            "name": self.name,
            "description": self.description,
            **{
                key: {item: str(amount) for item, amount in getattr(self, key).items()}
                for key in AMOUNTS
            },
            "ephemeral": sorted(self.ephemeral),
            "is_done": self.is_done,
            "reward": self.reward,
            **({"floors": list(self.floors)} if self.floors else {}),
            **({} if self.max_count is None else {"max_count": self.max_count}),
            **({} if self.max_steps is None else {"max_steps": self.max_steps}),
            **({"training": dict(self.training)} if self.training else {}),
            **({"provided_by": dict(self.provided_by)} if self.provided_by else {}),
            **({} if self.like is None else {"like": self.like}),
            **({"trusted": True} if self.trusted else {}),
        }

    def with_contract_of(self, other: Skill) -> Skill:
        """The same skill with the amounts of another."""
        return replace(self, **{key: getattr(other, key) for key in AMOUNTS})

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Skill:
        """The skill that `to_json` wrote; its syntax is checked again, unless it is trusted."""
        data = dict(fields)
        trusted = data.pop("trusted", False) is True
        return skill_from_data(data.get("name"), data, trusted=trusted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One line of an execution plan: which skill, and up to which count."""

    skill: str
    count: int


def parse_skill(
    text: str, *, place: str, env_name: str | None = None, trusted: bool = False
) -> Skill:
    """The skill that a file's text defines, for one game or for any; nothing of it is executed.

    The syntax of a trusted skill's functions is not checked. Raises SkillError for malformed text.
    """
    games = known_games() if env_name is None else (find_game(env_name),)
    return _parsed(text, place, games, trusted=trusted)


@functools.lru_cache(maxsize=512)  # a start reads the library twice
def _parsed(text: str, place: str, games: tuple[Game, ...], *, trusted: bool) -> Skill:
    module = check_skill_source(text, place, games=games, trusted=trusted)
    functions: dict[str, str] = {}
    lines: dict[str, int] = {}
    exact = True
    constants: dict[str, Any] = {"description": ast.get_docstring(module)}
    for node in module.body:
        match node:
            case ast.FunctionDef(name=name):
                functions[name] = ast.get_source_segment(text, node) or ast.unparse(node)
                exact &= node.end_lineno is not None
                lines[name] = node.lineno
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                constants[name] = literal(value, place)
                lines[name] = node.lineno
    skill = Skill(
        **_read_constants(constants, lambda name: f"{place}:{lines.get(name, 1)}"),
        is_done=functions["task_is_done"],
        reward=functions["task_reward"],
        trusted=trusted,
        origin=CodeOrigin(place, lines["task_is_done"], lines["task_reward"], exact),
    )
    bodies = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    fitting = games if len(games) == 1 else fitting_games(bodies, games, trusted=trusted)
    if all(problems := [missing_in(game, skill) for game in fitting]):
        raise SkillError(f"{place}:{lines.get('gain', 1)}: {problems[-1]}")
    return skill


def missing_in(game: Game, skill: Skill) -> str:
    """Return what a skill needs that a game does not have, its inventory or floors; "" if none."""
    for item, amount in skill.gain.items():
        most = game.limits.get(item, amount.at(1))
        if item in game.items and amount.at(1) > most:
            what = f"{skill.name} gains {amount.at(1)} {item}, and {game.name} holds {most} of it"
            return f"{what}; gain no more"
    exact = [skill.requirements.get(ON_FLOOR), skill.gain.get(ON_FLOOR)]
    named = [amount.base for amount in exact if amount is not None and not amount.per]
    floor = max([*named, min(skill.floors, default=0)])
    if floor < game.floors:
        return ""
    return f"{game.name} has no floor {floor}; its floors are 0 to {game.floors - 1}"


def skill_from_data(skill_name: Any, data: Mapping[str, Any], *, trusted: bool = False) -> Skill:
    """The skill that a mapping describes, as `SkillScheduler.add_skill` and `Flow` pass it.

    Keys: `description`, `requirements`, `consumption`, `gain` (amounts as numbers or strings such
    as `"lambda n: 4*n + 0"`), `ephemeral`, `max_steps`, and the sources of the two functions:
    `is_done` and `reward`, or both in one text under `code`. `gain` and the functions are required.
    Raises SkillError for other keys and values.
    """
    place = f"skill {skill_name!r}"
    for key in data:
        if key not in (*CONSTANTS, *_CODE):
            known = ", ".join((*CONSTANTS, *_CODE))
            raise SkillError(f"{place}: unknown key {key!r}; known are {known}")
    code = [_text_of(data[key], key, place) for key in _CODE if key in data]
    constants = {"description": "", **data, "name": skill_name}
    lines = [f"{key} = {value!r}" for key, value in constants.items() if key not in _CODE]
    skill = parse_skill("\n".join([*lines, "", *code, ""]), place=place, trusted=trusted)
    return replace(skill, origin=CodeOrigin(place))


def load_skill(path: Path, *, env_name: str | None = None, trust: bool = False) -> Skill:
    """The skill in a file, for one game or for any; raises SkillError if it cannot be read.

    With `trust`, functions whose syntax is refused make a trusted skill.
    """
    place, most = printable(str(path)), SOURCE_LIMIT_BYTES
    remedy = f"name a plain file of at most {most:,} bytes{closest_file(path)}"
    try:
        text = storage.read_bytes(path, limit_bytes=most, remedy=remedy).decode("utf-8-sig")
    except FileRefusedError as error:
        raise SkillError(printable(f"{place}:1: {error}")) from error
    except UnicodeDecodeError as error:
        raise SkillError(f"{place}:1: not UTF-8; save the file as UTF-8") from error
    try:
        return parse_skill(text, place=place, env_name=env_name)
    except CodeRefusedError:
        if not trust:
            raise
    return parse_skill(text, place=place, env_name=env_name, trusted=True)


def skill_files(paths: Sequence[Path]) -> list[Path]:
    """The files that are named, and those in folders; raises ConfigError where there are none."""
    files = []
    for path in paths:
        if path.suffix != ".py" and not path.is_dir():
            raise ConfigError(
                f"{printable(str(path))} is no folder and no file *.py{closest_file(path)}; "
                "name skill files, or folders that exist"
            )
        inside = _files_of(path) if path.is_dir() else [path]
        if not inside:
            raise ConfigError(f"{printable(str(path))} has no file *.py; name skill files")
        files += inside
    if not files:
        raise ConfigError("no file is named; name files or a folder: flowrl check my_skills")
    return files


def load_library(
    env_name: str, skills_dir: Path | None = None, *, trust: bool = False
) -> dict[str, Skill]:
    """All skills for a game, by name: the embedded ones, then those of `skills_dir`.

    Files are read in the order of their names. A user's skill replaces the embedded one that has
    the same name, in its place. Raises SkillError for a skill that is not for this game.
    """
    embedded = _load_folder(find_game(env_name).library_folder, env_name)
    skills = {name: replace(skill, embedded=True) for name, skill in embedded.items()}
    if skills_dir is not None:
        if not Path(skills_dir).is_dir():
            raise SkillError(f"--skills_dir {skills_dir} is not a folder; name one of skill files")
        if not (own := _load_folder(Path(skills_dir), env_name, trust=trust)):
            raise SkillError(f"--skills_dir {skills_dir} has no file *.py; name a folder that has")
        skills |= own
    return skills


def _files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("[!.]*.py") if not path.is_dir())


def _load_folder(folder: Path, env_name: str, *, trust: bool = False) -> dict[str, Skill]:
    places: dict[str, Path] = {}
    skills: dict[str, Skill] = {}
    for path in _files_of(folder):
        skill = load_skill(path, env_name=env_name, trust=trust)
        if skill.name in skills:
            raise SkillError(f"{places[skill.name]} and {path} are both {skill.name!r}; rename one")
        skills[skill.name], places[skill.name] = skill, path
    return skills


def _read_constants(constants: Mapping[str, Any], at: Callable[[str], str]) -> dict[str, Any]:
    """The fields of a skill that its constants say; `at` is the place of each by its name."""
    name = _text_of(constants.get("name"), "name", at("name"))
    try:
        name = display_name(name)
    except NameRefusedError as error:
        raise SkillError(f"{at('name')}: {error}; choose another") from error
    if name.isdecimal():
        raise SkillError(f"{at('name')}: {name} is the number of an expert; choose a name")
    amounts = {key: _amounts(constants.get(key, {}), key, at(key)) for key in AMOUNTS}
    if not any(amounts["gain"].values()) and ON_FLOOR not in amounts["gain"]:
        raise SkillError(f"{at('gain')}: gain is empty; say what the skill {name!r} yields")
    described = _text_of(constants.get("description") or name, "description", at("description"))
    ephemeral = constants.get("ephemeral", ())
    if not isinstance(ephemeral, list | tuple | set):
        raise SkillError(f'{at("ephemeral")}: ephemeral is not a list; write ["near_table"]')
    for item in ephemeral:
        if item not in list(amounts["gain"]) or item == ON_FLOOR:
            why = "ends by itself; leave it out" if item == ON_FLOOR else "is not in gain; add it"
            what = f"ephemeral names {item!r}, which {why}"
            raise SkillError(f"{at('ephemeral')}: {what}")
    needs = amounts["requirements"].keys() | amounts["consumption"].keys()
    return {
        "name": name,
        "description": described.strip(),
        **amounts,
        "ephemeral": frozenset(ephemeral),
        "floors": _floors(constants.get("floors"), amounts, at),
        "max_count": _limit(constants, "max_count", _MOST_AT_ONCE, at),
        "max_steps": _limit(constants, "max_steps", MOST_STEPS, at),
        **_other_skills(constants, needs, at),
        "training": _training(constants.get("training", {}), at("training")),
    }


def _limit(
    constants: Mapping[str, Any], key: str, most: int, at: Callable[[str], str]
) -> int | None:
    limit = constants.get(key)
    if limit is None or (type(limit) is int and 0 < limit <= most):
        return limit
    raise SkillError(f"{at(key)}: {key} is not a whole number from 1 to {most}; write one")


def _floors(
    written: object, amounts: Mapping[str, Mapping[str, Amount]], at: Callable[[str], str]
) -> tuple[int, ...]:
    """The floors on which a skill can be done; none if it does not say."""
    if ON_FLOOR in amounts["consumption"]:
        what = f"{ON_FLOOR} is not used up; write it among the requirements, or in gain"
        raise SkillError(f"{at('consumption')}: {what}")
    if written is None:
        return ()
    floors = list(written) if isinstance(written, list | tuple | set) else []
    if not floors or not all(type(floor) is int and 0 <= floor <= _MOST_FLOORS for floor in floors):
        raise SkillError(f"{at('floors')}: floors is no list of floors; write [0, 2, 5]")
    if ON_FLOOR in amounts["requirements"]:
        what = f"floors and a required {ON_FLOOR} both say where it is done; keep one of them"
        raise SkillError(f"{at('floors')}: {what}")
    return tuple(sorted(set(floors)))


def _other_skills(
    constants: Mapping[str, Any], needs: Set[str], at: Callable[[str], str]
) -> dict[str, Any]:
    """The fields that name other skills."""
    provided_by, like = constants.get("provided_by", {}), constants.get("like")
    good = isinstance(provided_by, dict) and provided_by.keys() <= needs
    if not good or not all(isinstance(other, str) for other in provided_by.values()):
        what = "provided_by does not name a skill for items that are required or consumed"
        raise SkillError(f'{at("provided_by")}: {what}; write {{"wood": "Collect Wood"}}')
    if not (like is None or (isinstance(like, str) and like)):
        raise SkillError(f'{at("like")}: like names no skill; write "Collect Stone"')
    return {"provided_by": provided_by, "like": like}


def skill_settings(written: object) -> dict[str, Any]:
    """Return the settings of one skill's training, as values of flags.

    Raises ConfigError for one that is unknown, the whole graph's, or cannot be used.

    >>> skill_settings({"total_timesteps": "3e6", "lr": 1e-4})
    {'total_timesteps': 3000000, 'lr': 0.0001}
    """
    if not isinstance(written, Mapping):
        raise ConfigError('training is no dict; write {"lr": 3e-4}')
    settings: dict[str, Any] = {}
    for name, value in written.items():
        if name in _OF_GRAPH:
            raise ConfigError(
                f"{name} is the same for all skills of a graph, whose experts work together; "
                f"leave it out and use --{name}"
            )
        if name not in SKILL_SETTINGS:
            near = closest(str(name), SKILL_SETTINGS)
            raise ConfigError(
                f"{name!r} is no setting of a skill{near}; there are {', '.join(SKILL_SETTINGS)}"
            )
        number = arguments.value_of(PPOConfig, name, [str(value)])
        most = _MOST_FRAMES if name == "total_timesteps" else _MOST_OF_SETTING
        if abs(number) > most:
            raise ConfigError(f"{name} is over {most}; choose less")
        settings[name] = number
    steps = [settings.get(name, getattr(PPOConfig, name)) for name in ("num_envs", "num_steps")]
    if math.prod(steps) > _MOST_ROWS:
        raise ConfigError(f"num_envs × num_steps is over {_MOST_ROWS}; choose less")
    return settings


def _training(written: object, place: str) -> dict[str, Any]:
    try:
        return skill_settings(written)
    except ConfigError as error:
        remedy = "" if ";" in str(error) else "; correct the value"
        raise SkillError(f"{place}: {error}{remedy}") from error


def _text_of(value: Any, key: str, place: str) -> str:
    """The value; raises SkillError unless it is text."""
    if not isinstance(value, str):
        raise SkillError(f"{place}: {key} is missing or not text; write it as a string")
    return value


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
            raise SkillError(f"{place}: {key} of {item}: {error}") from error
    return amounts
