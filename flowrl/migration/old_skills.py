"""The original's skills as flowrl's: taken over where they pass the gate and fit the graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flowrl.errors import FlowrlError, SkillError
from flowrl.layout import slug
from flowrl.migration.old_expert import OldExpert
from flowrl.migration.old_files import mapping
from flowrl.runs import Verdict
from flowrl.skills.games import GAMES
from flowrl.skills.graph import SkillGraph
from flowrl.skills.judging import Refusal, Subject, judge
from flowrl.skills.skill import Skill, parse_skill, skill_from_data
from flowrl.skills.verdicts import shipped

Origin = Literal["own", "library", "none"]
Trial = Callable[[Sequence[Subject]], Sequence[Verdict | Refusal]]
_PASSES = 10  # over the skills: each lets those in that need the ones before it
_PREFIX = re.compile(r"inventory[:.]")
_NO_WORD = re.compile(r"[^a-z0-9]+")
_AMOUNT_LIMIT = 100
_MOST_ITEMS = 100


@dataclass(frozen=True, slots=True)
class Decision:
    """Where an expert's skill comes from; `why` says what speaks against its own."""

    origin: Origin
    name: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Skills:
    """The graph that the migrated experts belong to, and what became of each skill, by index."""

    graph: SkillGraph
    decisions: Mapping[int, Decision]
    verdicts: Mapping[str, Verdict]  # on the skills that are their own, by name


def tried(subjects: Sequence[Subject]) -> list[Verdict | Refusal]:
    """What a trial says of skill code that has passed the gate, in a process of its own."""
    fresh = iter(judge([subject for subject in subjects if subject.digest not in shipped()]))
    return [shipped().get(subject.digest) or next(fresh) for subject in subjects]


def decide(
    experts: Iterable[OldExpert],
    library: Mapping[str, Skill],
    *,
    env_name: str,
    trial: Trial = tried,
) -> Skills:
    """Take the old skills over as far as the graph with them can still be learned.

    A skill whose name is one of the library's but for punctuation takes the library's name.

    Raises:
      LaunchError: the trial does not start.
    """
    names = {slug(name): name for name in library}
    known: dict[int, str] = {}
    own: dict[int, Skill] = {}
    why: dict[int, str] = {}
    for expert in experts:
        known[expert.index] = names.get(slug(expert.name), expert.name)
        try:
            own[expert.index] = _converted(known[expert.index], expert.data, env_name)
        except FlowrlError as error:
            why[expert.index] = str(error)
    verdicts, refused = _vouched(own, env_name, trial)
    own = {index: skill for index, skill in own.items() if index not in refused}
    why |= refused
    graph, misfits = _fitted(own, library, GAMES[env_name].capacity)
    why |= {
        index: f"the graph cannot be learned with it: {text}" for index, text in misfits.items()
    }
    decisions = {index: _decision(name, why.get(index), library) for index, name in known.items()}
    return Skills(
        graph,
        decisions,
        {made.name: verdicts[made.name] for made in decisions.values() if made.origin == "own"},
    )


def _vouched(
    own: Mapping[int, Skill], env_name: str, trial: Trial
) -> tuple[dict[str, Verdict], dict[int, str]]:
    """The verdicts by skill, and why the trial refuses others, by index."""
    answers = trial([Subject.of(skill, env_name) for skill in own.values()]) if own else []
    verdicts: dict[str, Verdict] = {}
    refused: dict[int, str] = {}
    for (index, skill), answer in zip(own.items(), answers, strict=True):
        if isinstance(answer, Refusal):
            refused[index] = answer.text
        else:
            verdicts[skill.name] = answer
    return verdicts, refused


def _decision(name: str, why: str | None, library: Mapping[str, Skill]) -> Decision:
    if why is None:
        return Decision("own", name)
    return Decision("library" if name in library else "none", name, why)


def _fitted(
    own: Mapping[int, Skill], library: Mapping[str, Skill], capacity: int
) -> tuple[SkillGraph, dict[int, str]]:
    """The library with every old skill that leaves all of it learnable; why others are not in."""
    graph = SkillGraph(library.values(), capacity=capacity)
    misfits = dict.fromkeys(own, "")
    for _ in range(_PASSES):
        before = len(misfits)
        for index in sorted(misfits):
            skills = {**graph.skills, own[index].name: own[index]}
            try:
                grown = SkillGraph(skills.values(), capacity=capacity)
                grown.check()
            except FlowrlError as error:
                misfits[index] = str(error)
                continue
            graph = grown
            del misfits[index]
        if len(misfits) == before:
            break
    return graph, misfits


def _converted(name: str, data: Any, env_name: str) -> Skill:
    """The original's data of a skill in flowrl's form, once it has passed the gate.

    Raises:
      SkillError: it is incomplete, of another form, or asks for what the gate does not admit.
    """
    told = mapping(mapping(data).get("skill_with_consumption"))
    functions = mapping(data).get("functions")
    if not told or not isinstance(functions, list) or len(functions) < 2:
        raise SkillError("the original's files do not say what the skill needs, gains and rewards")
    gain = mapping(told.get("gain"))
    skill = skill_from_data(
        name,
        {
            "description": _text(told.get("description")),
            "requirements": _amounts(told.get("requirements")),
            "consumption": _amounts(told.get("consumption")),
            "gain": _amounts(gain),
            "ephemeral": [_item(key) for key in gain if _kind(gain[key]) == "ephemeral"],
            "is_done": _code(functions[0]),
            "reward": _code(functions[1]),
        },
    )
    return parse_skill(skill.source, place=f"skill {name!r}", env_name=env_name)


def _amounts(value: Any) -> dict[str, Any]:
    """Items with their amounts; an amount may stand in a mapping with its kind."""
    items = mapping(value)
    if len(items) > _MOST_ITEMS:
        raise SkillError("it names too many items")
    amounts: dict[str, Any] = {}
    for key, told in items.items():
        amount = told.get("expression") if isinstance(told, dict) else told
        if not isinstance(amount, str | int) or (isinstance(amount, str) and _is_long(amount)):
            raise SkillError(f"the amount of {_item(key)} is no text such as 'lambda n: 4*n'")
        amounts[_item(key)] = amount
    return amounts


def _is_long(text: str) -> bool:
    return len(text) > _AMOUNT_LIMIT


def _item(key: Any) -> str:
    """The original's "inventory:wood" and "achievement:PLACE_TABLE" as words of flowrl."""
    if not isinstance(key, str) or _is_long(key):
        raise SkillError("an item's name is no short text")
    return _NO_WORD.sub("_", _PREFIX.sub("", key.strip().lower())).strip("_")


def _kind(told: Any) -> Any:
    return mapping(told).get("type")


def _text(value: Any) -> str:
    return value[:2_000] if isinstance(value, str) else ""


def _code(value: Any) -> str:
    if not isinstance(value, str):
        raise SkillError("a function of the skill is no text")
    return value
