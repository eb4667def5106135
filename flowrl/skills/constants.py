"""The constants of a skill file: what each may be, and what is said when it is something else."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from flowrl.errors import NameRefusedError, SkillError
from flowrl.paths import display_name
from flowrl.skills.amount import Amount

MOST_STEPS = 100_000
_ITEM = re.compile(r"[a-z][a-z0-9_]{0,63}")


def read_constants(constants: Mapping[str, Any], at: Callable[[str], str]) -> dict[str, Any]:
    """The fields of a skill that its constants say; `at` is the place of each by its name.

    Raises:
      SkillError: a constant is missing or malformed.
    """
    name = _name(constants.get("name"), at("name"))
    gain = _amounts(constants.get("gain"), "gain", at("gain"))
    if not any(gain.values()):
        raise SkillError(f"{at('gain')}: gain is empty; say what the skill {name!r} yields")
    described = text_of(constants.get("description") or name, "description", at("description"))
    return {
        "name": name,
        "description": described.strip(),
        "requirements": _given_amounts(constants, "requirements", at),
        "consumption": _given_amounts(constants, "consumption", at),
        "gain": gain,
        "ephemeral": _ephemeral(constants.get("ephemeral", ()), gain, at("ephemeral")),
        "max_steps": _max_steps(constants.get("max_steps"), at("max_steps")),
    }


def text_of(value: Any, key: str, place: str) -> str:
    """The value, provided that it is text.

    Raises:
      SkillError: it is not.
    """
    if not isinstance(value, str):
        raise SkillError(f"{place}: {key} is missing or not text; write it as a string")
    return value


def plain_literal(value: Any, key: str, place: str) -> Any:
    """The value made of plain literals only, so that its repr is a literal.

    Raises:
      SkillError: it holds something else.
    """
    if isinstance(value, Mapping):
        return {
            plain_literal(item, key, place): plain_literal(part, key, place)
            for item, part in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_literal(part, key, place) for part in value]
    if isinstance(value, Amount):
        return str(value)
    if value is None or type(value) in {str, int, float, bool}:
        return value
    raise SkillError(f"{place}: {key} holds a {type(value).__name__}; use text and numbers")


def _name(value: Any, place: str) -> str:
    try:
        return display_name(text_of(value, "name", place))
    except NameRefusedError as error:
        raise SkillError(f"{place}: {_with_remedy(str(error))}") from error


def _given_amounts(
    constants: Mapping[str, Any], key: str, at: Callable[[str], str]
) -> dict[str, Amount]:
    return _amounts(constants.get(key, {}), key, at(key))


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
