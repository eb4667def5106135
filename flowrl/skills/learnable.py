"""Which skills can be learned, after which others: the rounds behind the skill graph."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flowrl.errors import CycleError, GraphError, UnknownNeedError
from flowrl.skills.planning import count_for
from flowrl.skills.simulation import entry_needs
from flowrl.skills.skill import Skill


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnable:
    """The skills that can be learned, found round by round.

    The first round takes the skills that need nothing, each next one those whose every need is
    yielded, in the amount asked for, by a skill of an earlier round.
    """

    rank: Mapping[str, int]  # skill → its place in the order of rounds; none for the impossible
    direct: Mapping[str, tuple[str, ...]]  # skill → the providers of its needs
    gainers: Mapping[str, tuple[str, ...]]  # item → the skills that yield it, preferred first


def direct_needs(skill: Skill) -> dict[str, int]:
    """What a skill takes at count 1, and 1 of what it takes at higher counts only."""
    amounts = (*skill.requirements.items(), *skill.consumption.items())
    return {item: 1 for item, amount in amounts if amount} | entry_needs(skill, 1)


def able(skills: Iterable[Skill], item: str, need: int, *, capacity: int) -> tuple[str, ...]:
    """Those of the skills that can yield this much of an item at some count."""
    counts = ((skill, count_for(skill, item, need, capacity=capacity)) for skill in skills)
    return tuple(skill.name for skill, count in counts if count is not None)


def learnable(skills: Mapping[str, Skill], *, capacity: int) -> Learnable:
    """Who can be learned, and from whom each need comes, always in the same way."""
    direct: dict[str, tuple[str, ...]] = {}
    yielders: dict[str, list[Skill]] = {}
    learned = _next_round(skills, direct, yielders, capacity=capacity)
    while learned:
        direct |= learned
        for skill in _growing_first(skills[name] for name in learned):
            for item in _yields(skill):
                yielders.setdefault(item, []).append(skill)
        learned = _next_round(skills, direct, yielders, capacity=capacity)
    for skill in skills.values():
        for item in _yields(skill) if skill.name not in direct else ():
            yielders.setdefault(item, []).append(skill)
    return Learnable(
        rank={name: place for place, name in enumerate(direct)},
        direct=direct,
        gainers={item: tuple(skill.name for skill in offers) for item, offers in yielders.items()},
    )


def why_impossible(
    name: str, skills: Mapping[str, Skill], found: Learnable, *, capacity: int
) -> GraphError:
    """Follow needs that cannot be provided until one is unknown or the path closes."""
    path = [name]
    while True:
        skill = skills[path[-1]]
        offers = {
            (item, need): able(
                (skills[gainer] for gainer in found.gainers.get(item, ())),
                item,
                need,
                capacity=capacity,
            )
            for item, need in direct_needs(skill).items()
        }
        (item, need), gainers = next(
            (wanted, names)
            for wanted, names in offers.items()
            if found.rank.keys().isdisjoint(names)
        )
        if not gainers:
            return UnknownNeedError(_missing(skill, item, need, found))
        path.append(next((other for other in gainers if other != skill.name), skill.name))
        if path[-1] in path[:-1]:
            drawn = " → ".join(path[path.index(path[-1]) :])
            return CycleError(f"skills need one another in a circle: {drawn}; drop one need")


def _next_round(
    skills: Mapping[str, Skill],
    direct: Mapping[str, tuple[str, ...]],
    yielders: Mapping[str, list[Skill]],
    *,
    capacity: int,
) -> dict[str, tuple[str, ...]]:
    learned: dict[str, tuple[str, ...]] = {}
    for name, skill in skills.items():
        if name in direct:
            continue
        offers = [
            able(yielders.get(item, ()), item, need, capacity=capacity)
            for item, need in direct_needs(skill).items()
        ]
        if all(offers):
            learned[name] = tuple(dict.fromkeys(names[0] for names in offers))
    return learned


def _growing_first(skills: Iterable[Skill]) -> list[Skill]:
    """Skills whose gain grows with the count before those that yield a fixed amount."""
    return sorted(skills, key=lambda skill: not any(gain.per for gain in skill.gain.values()))


def _yields(skill: Skill) -> list[str]:
    return [item for item, amount in skill.gain.items() if amount]


def _missing(skill: Skill, item: str, need: int, found: Learnable) -> str:
    close = difflib.get_close_matches(item, found.gainers, n=3, cutoff=0.5)
    offers = ", ".join(f"{gain} ({found.gainers[gain][0]})" for gain in close) or "none"
    amount = f"{need} {item}" if item in found.gainers else repr(item)
    return f"{skill.name!r} requires {amount}, which no skill gains; closest are {offers}"
