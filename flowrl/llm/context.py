"""The words that a model is asked by: prompts, the reference of a game, and data without trust.

The prompts are files in `prompts/`. Names and texts of skills travel as JSON between two markers
that their authors cannot know. What exceeds the bound is left out, the least useful first.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.games.base import Game
from flowrl.llm.exchange import Message, tokens_of
from flowrl.skills.skill import AMOUNTS, SKILL_SETTINGS, Skill
from flowrl.skills.validation.allowed import CALLS, FUNCTIONS, METHODS

_PROMPTS = Path(__file__).parent / "prompts"
_LISTS = ("failed", "skills", "facts", "examples", "tried")  # the least useful first
_EXAMPLES = 2
_RECIPES = 12
_WORD = re.compile(r"[a-z]{3,}")


def system_message(purpose: str, game: Game, *, candidates: int) -> Message:
    """Return what a model is told of its task and of the game."""
    enums = (f"{name} ({' '.join(sorted(words))})" for name, words in sorted(game.enums.items()))
    reference = _prompt("reference").format(
        game=game.name,
        features="\n".join(f"- {name}: {said}" for name, said in game.features.items()),
        items=" ".join(sorted(game.items)) or "none",
        enums="; ".join(enums) or "none",
        calls=" ".join(sorted(CALLS)),
        functions=" ".join(sorted(FUNCTIONS)),
        methods=" ".join(sorted(METHODS)),
        settings=" ".join(SKILL_SETTINGS),
    )
    told = _prompt(purpose).format(reference=reference, candidates=candidates)
    return {"role": "system", "content": told}


def data_message(data: Any) -> Message:
    """Return data as JSON between two lines that are a digest of it."""
    text = json.dumps(data, ensure_ascii=False, indent=1)
    marker = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
    return {"role": "user", "content": f"{marker}\n{text}\n{marker}"}


def context_of(
    wish: str,
    skills: Mapping[str, Skill],
    *,
    said: Mapping[str, Mapping[str, Any]],
    failed: Iterable[str],
    recipes: Iterable[Mapping[str, str]] = (),
) -> dict[str, Any]:
    """Return what bears on a wish.

    Args:
      said: what a graph says of its skills besides, by name, such as success rates.
      failed: the reasons for which earlier proposals were given up.
      recipes: what the game's actions need, use and yield, by column.
    """
    near = nearest(wish, skills.values())
    return {
        "wish": wish,
        "skills": [_row(skill, said.get(skill.name, {})) for skill in near],
        "facts": _bearing(wish, near[:_EXAMPLES], recipes),
        "examples": [_example(skill) for skill in near[:_EXAMPLES]],
        "failed": list(failed),
    }


def bounded(data: dict[str, Any], most_tokens: int) -> dict[str, Any]:
    """Return data within about so many tokens: of lists the last rows are left out.

    The results of earlier candidates, `tried`, go last. ConfigError if the wish alone is too long.
    """
    data = {key: list(value) if key in _LISTS else value for key, value in data.items()}
    for key in _LISTS:
        while data.get(key) and _tokens(data) > most_tokens:
            data[key].pop()
    if (least := _tokens(data)) > most_tokens:
        raise ConfigError(f"the wish alone takes {least} tokens; raise --llm_context_tokens")
    return data


def _tokens(data: Any) -> float:
    return tokens_of(json.dumps(data, ensure_ascii=False, indent=1))


def nearest(wish: str, skills: Iterable[Skill]) -> Sequence[Skill]:
    """Return skills by the words that they share with a wish, in their names above all."""
    wanted = _words(wish)

    def shared(skill: Skill) -> float:
        name = _words(skill.name)
        rest = _words(" ".join([skill.description, *skill.gain, *skill.requirements]))
        return len(wanted & name) / (len(name) or 1) + len(wanted & rest) / (len(wanted) or 1)

    return sorted(skills, key=shared, reverse=True)


def _bearing(
    wish: str, near: Iterable[Skill], recipes: Iterable[Mapping[str, str]]
) -> list[Mapping[str, str]]:
    """The recipes that share most words with a wish and its nearest skills, those first."""
    names = (" ".join([skill.name, *skill.gain, *skill.requirements]) for skill in near)
    wanted = _words(" ".join([wish, *names]))
    rows = [(len(wanted & _words(" ".join(row.values()))), row) for row in recipes]
    rows = sorted((pair for pair in rows if pair[0]), key=lambda pair: -pair[0])
    return [row for _, row in rows[:_RECIPES]]


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower().replace("_", " ")))


def _row(skill: Skill, said: Mapping[str, Any]) -> dict[str, Any]:
    told = {key: {item: str(n) for item, n in getattr(skill, key).items()} for key in AMOUNTS}
    return {"name": skill.name, **{key: value for key, value in told.items() if value}, **said}


def _example(skill: Skill) -> dict[str, Any]:
    return {
        **_row(skill, {}),
        "description": skill.description,
        "task_is_done": skill.is_done,
        "task_reward": skill.reward,
    }


def _prompt(name: str) -> str:
    return (_PROMPTS / f"{name}.md").read_text(encoding="utf-8")
