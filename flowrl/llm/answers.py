"""The two answers of a model, read without trust, and the skill file that they make together.

The first answer is a skill's contract, with the predicate; the second has rewards. The file has the
form of the library's. What an answer says is put into it as literals, so no text of a model becomes
code but the two functions, which the gate reads.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from types import MappingProxyType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from flowrl.errors import SkillError
from flowrl.llm.transcript import Answered
from flowrl.skills.skill import AMOUNTS, Skill
from flowrl.storage import records
from flowrl.storage.records import Positive

_QUOTED = 80  # characters of an answer
PLACEHOLDER = "def task_reward():\n    return 0.0"  # until there is a reward
Said = TypeVar("Said")


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemAmount:
    """An item and its amount, linear in the count."""

    item: str
    amount: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A flag of a skill's training and its value."""

    flag: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """All of a skill but its reward."""

    name: str
    description: str
    requirements: tuple[ItemAmount, ...]
    consumption: tuple[ItemAmount, ...]
    gain: tuple[ItemAmount, ...]
    ephemeral: tuple[str, ...]
    max_steps: Positive | None
    training: tuple[Setting, ...]
    task_is_done: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedReward:
    """A reward and its idea."""

    idea: str
    task_reward: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """Rewards of one skill, which compete."""

    rewards: tuple[ProposedReward, ...]


def schema_of(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of an answer's type, as strict endpoints take it."""
    if is_dataclass(kind):
        properties = {name: schema_of(hint) for name, hint in get_type_hints(kind).items()}
        told = {"properties": properties, "required": list(properties)}
        return {"type": "object", **told, "additionalProperties": False}
    if get_origin(kind) is tuple:
        return {"type": "array", "items": schema_of(get_args(kind)[0])}
    return {"type": "string"} if kind is str else {"type": ["integer", "null"]}


SCHEMAS = {"contract": schema_of(Contract), "rewards": schema_of(Rewards)}


def read_answer(answer: Answered, kind: type[Said]) -> Said:
    """Return what an answer says; SkillError, with the remedy, if it is of another form."""
    if answer.finish == "length":
        raise SkillError("the answer was cut off at its greatest length; write a shorter one")
    quoted = " ".join(answer.text.split())[:_QUOTED]
    try:
        if answer.finish == "refusal":
            raise ValueError("it is prose")
        return records.from_json(kind, json.loads(answer.text))
    except records.MalformedError as error:
        keys = ", ".join(kind.__dataclass_fields__)  # type: ignore[attr-defined]
        raise SkillError(f"the answer: {error}; give an object with the keys {keys}") from error
    except (ValueError, RecursionError) as error:
        raise SkillError(f"the answer {quoted!r} is no JSON; give one JSON object") from error


def text_of(skill: Skill, reward: str) -> str:
    """Return the file of a skill with another reward."""
    amounts = {
        key: tuple(ItemAmount(item=item, amount=str(n)) for item, n in getattr(skill, key).items())
        for key in AMOUNTS
    }
    settings = {flag: json.dumps(value) for flag, value in skill.training.items()}
    contract = Contract(
        name=skill.name,
        description=skill.description,
        ephemeral=tuple(sorted(skill.ephemeral)),
        max_steps=skill.max_steps,
        training=tuple(Setting(flag=flag, value=value) for flag, value in settings.items()),
        task_is_done=skill.is_done,
        **amounts,
    )
    others = {key: getattr(skill, key) for key in ("floors", "max_count", "provided_by", "like")}
    return skill_text(contract, reward, others)


def skill_text(
    contract: Contract, reward: str = PLACEHOLDER, others: Mapping[str, Any] = MappingProxyType({})
) -> str:
    """Return the file of a skill; what is not valid in it is refused where it is read."""
    lines = [_docstring(contract.description), "", f"name = {_literal(contract.name)}"]
    for key in AMOUNTS:
        lines.append(f"{key} = {_amounts(getattr(contract, key), key)}")
    if contract.ephemeral:
        lines.append(f"ephemeral = [{', '.join(map(_literal, contract.ephemeral))}]")
    if contract.max_steps is not None:
        lines.append(f"max_steps = {contract.max_steps}")
    if contract.training:
        pairs = [f"{_literal(each.flag)}: {_value(each.value)}" for each in contract.training]
        lines.append(f"training = {{{', '.join(pairs)}}}")
    lines += [f"{key} = {value!r}" for key, value in others.items() if value]
    functions = [textwrap.dedent(code).strip() for code in (contract.task_is_done, reward)]
    return "\n".join(lines) + "".join(f"\n\n\n{code}" for code in functions) + "\n"


def _docstring(text: str) -> str:
    text = " ".join(text.split())
    plain = text.isprintable() and not set(text) & {'"', "\\"}
    return f'"""{text}"""' if plain else _literal(text)


def _amounts(amounts: Sequence[ItemAmount], key: str) -> str:
    items = [each.item for each in amounts]
    if len(set(items)) < len(items):
        raise SkillError(f"{key} names an item twice; name each once")
    pairs = [f"{_literal(each.item)}: {_literal(each.amount)}" for each in amounts]
    return f"{{{', '.join(pairs)}}}"


def _value(text: str) -> str:
    """Return the literal of a setting's value: a number, True or False, else text."""
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        if isinstance(value, bool | int | float) and abs(value) < 1e13:
            return repr(value)
    return _literal(text)


def _literal(text: str) -> str:
    """Return the literal of a text, as the library quotes it."""
    return json.dumps(text, ensure_ascii=False) if text.isprintable() else repr(text)
