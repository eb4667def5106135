"""Skill files compared with the facts of their game: amounts, achievements and floors."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence

from flowrl.games.base import Game, known_games
from flowrl.knowledge.facts import Bound, Facts, Recipe
from flowrl.skills.skill import ON_FLOOR, Amount, Skill

_COUNTS = (1, 2)  # of a plan's step, at which amounts are compared
_FLOOR = "floor"  # the need of a recipe that is one
_NEAR = "near_"  # before the name of a thing that the player must stand beside


def speaks_of(skill: Skill, game: Game) -> bool:
    """Return whether no word of a skill is an item of other games alone."""
    others = frozenset[str]().union(*(other.items for other in known_games())) - game.items
    return not others & {*skill.requirements, *skill.consumption, *skill.gain}


def remarks(skill: Skill, facts: Facts, items: Iterable[str]) -> list[str]:
    """Return how a skill differs from the recipe that it is closest to; [] if facts agree.

    Args:
      skill: one for the game of the facts.
      facts: those of `facts_of`.
      items: the game's items, whose amounts a skill has to say.
    """
    yielding = [recipe for recipe in facts.recipes if _times(recipe, skill, 1)]
    certain = [recipe for recipe in yielding if any(_sure(recipe, item) for item in skill.gain)]
    asked = _achievements(skill)
    giving = [recipe for recipe in facts.recipes if asked & recipe.achievements.keys()]
    if yielding and asked and not any(recipe in giving for recipe in yielding):
        given = sorted({name for recipe in certain or yielding for name in recipe.achievements})
        gained = ", ".join(skill.gain)
        what = f"is_done asks for {', '.join(sorted(asked))}, but what yields {gained} gives"
        return [f"{what} {', '.join(given) or 'no achievement'}"]
    meant = [recipe for recipe in certain or yielding if not asked or recipe in giving] or giving
    told = frozenset(item for each in facts.recipes for item in (*each.changes, *each.needs))
    found = [_amounts(skill, recipe, told.intersection(items)) for recipe in meant]
    return [*min(found, key=len, default=[]), *_elsewhere(skill, meant, facts)]


def _achievements(skill: Skill) -> frozenset[str]:
    """The achievements that `task_is_done` names."""
    return frozenset(
        node.attr
        for node in ast.walk(ast.parse(skill.is_done))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "Achievement"
    )


def _elsewhere(skill: Skill, recipes: Sequence[Recipe], facts: Facts) -> Iterator[str]:
    """Yield the floors of a skill on which none of the recipes can be done, if there are any."""
    every = range(len(facts.names.get(_FLOOR, ())))
    can = set[int]().union(*(_floors(recipe, facts, every) for recipe in recipes))
    exact = skill.requirements.get(ON_FLOOR)
    alone = every if exact is None or exact.per else (exact.base,)
    wrong = sorted({*(skill.floors or alone)} - can) if recipes else []
    if wrong:
        told = dict.fromkeys(map(_told, recipes))
        where = f"{', '.join(told)} can be done on {', '.join(map(str, sorted(can)))} alone"
        yield f"is done on floor {', '.join(map(str, wrong))}, {where}; say so in floors"


def _floors(recipe: Recipe, facts: Facts, every: range) -> set[int]:
    """The floors where a recipe can be done; of many things ahead one is everywhere."""
    ahead = recipe.ahead if _names_ahead(recipe) else ()
    there = [facts.floors.get(name, every) for name in ahead]
    bound = recipe.needs.get(_FLOOR, Bound())
    most = every.stop if bound.most is None else bound.most + 1
    return set[int]().union(*there or [every]).intersection(range(bound.least or 0, most))


def _sure(recipe: Recipe, item: str) -> bool:
    change = recipe.changes.get(item)
    return change is not None and change.most > 0 and change.chance == 1


def _times(recipe: Recipe, skill: Skill, n: int) -> int:
    """The times that a recipe is done to gain what a skill does at count n; 0: it cannot."""
    times = 0
    for item, amount in skill.gain.items():
        change = recipe.changes.get(item)
        if change is None or change.most <= 0:
            continue
        often = -int(-amount.at(n) // change.most)
        bound = recipe.needs.get(item)
        limit = bound.most if bound else None
        if limit is None or (often - 1) * change.most <= limit:
            times = max(times, often)
    return times


def _amounts(skill: Skill, recipe: Recipe, items: frozenset[str]) -> list[str]:
    """The amounts of a skill that are not those of a recipe."""
    said: dict[str, str] = {}
    for n in _COUNTS:
        times = _times(recipe, skill, n) or 1
        uses = {
            item: round(-change.most) * times
            for item, change in recipe.changes.items()
            if change.most < 0 and change.chance == 1
        }
        for item, bound in recipe.needs.items():
            known = item in items or item.startswith(_NEAR) or item in skill.requirements
            need = (bound.least or 0) + uses.get(item, 0) // times * (times - 1)
            # What is consumed must be there, so it need not be required as well.
            said_in = skill.requirements if item in skill.requirements else skill.consumption
            if known and (has := _at(said_in, item, n)) < need:
                said.setdefault(
                    f"requirement {item}", f"requires {item} {has}, {_told(recipe)} needs {need}"
                )
        for item in sorted((uses.keys() | skill.consumption.keys()) & items):
            takes = uses.get(item, 0)
            if (has := _at(skill.consumption, item, n)) != takes:
                said.setdefault(
                    f"consumption {item}", f"consumes {item} {has}, {_told(recipe)} uses {takes}"
                )
    return list(said.values())


def _at(amounts: Mapping[str, Amount], item: str, n: int) -> int:
    return amounts[item].at(n) if item in amounts else 0


def _told(recipe: Recipe) -> str:
    ahead = f" at {recipe.ahead[0]}" if _names_ahead(recipe) else ""
    return f"{recipe.action}{ahead}"


def _names_ahead(recipe: Recipe) -> bool:
    """Return whether a recipe is about one thing ahead, or one of two."""
    return len(recipe.ahead) in (1, 2)
