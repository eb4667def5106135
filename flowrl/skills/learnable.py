"""The skills that can be learned, the provider of each need, and the reason where there is none."""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

from flowrl.errors import GraphError
from flowrl.skills.floors import START, Floors, reached_by
from flowrl.skills.levels import able, count_for, direct_needs, ephemeral_items
from flowrl.skills.skill import ON_FLOOR, Skill

_ADD = "add a skill that gains it, or correct the name"
_DRAWN = 4  # skills of a long circle that are named, at either end


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnable:
    """The skills that can be learned, found round by round.

    The first round takes the skills that need nothing, each next one those whose every need is
    yielded, in the amount asked for, by a skill of an earlier round, and to whose floors earlier
    ones lead. Then skills of the user's own take the place of embedded providers, unless they
    depend on the skill that has the need. Moves that a skill needs are chosen by their own names.
    """

    rank: Mapping[str, int]  # skill → its place in the order of rounds; none for the impossible
    chosen: Mapping[str, Mapping[str, str]]  # skill → item that it needs → provider
    gainers: Mapping[str, tuple[str, ...]]  # item → the skills that yield it, preferred first


def learnable(skills: Mapping[str, Skill], *, capacity: int) -> Learnable:
    """Return the skills that can be learned and the provider of each need, deterministically."""
    search = _Search(skills, capacity)
    ready: Iterable[str] = skills
    while ready:
        ready = search.learn(ready)
    chosen, yielders = search.chosen, search.yielders
    _prefer_own(skills, chosen, capacity=capacity)
    for skill in skills.values():
        for item in _yields(skill) if skill.name not in chosen else ():
            yielders.setdefault(item, []).append(skill)
    return Learnable(
        rank={name: place for place, name in enumerate(in_order(chosen, by=chosen))},
        chosen=chosen,
        gainers={item: tuple(skill.name for skill in offers) for item, offers in yielders.items()},
    )


def in_order(chosen: Mapping[str, Mapping[str, str]], *, by: Iterable[str]) -> tuple[str, ...]:
    """The skills, each after the providers chosen for it, else in the order of `by`."""
    place = {name: place for place, name in enumerate(by)}
    sorter = TopologicalSorter({name: own.values() for name, own in chosen.items()})
    sorter.prepare()
    ordered: list[str] = []
    ready: list[tuple[int, str]] = []
    while sorter.is_active():
        for name in sorter.get_ready():
            heapq.heappush(ready, (place[name], name))
        ordered.append(heapq.heappop(ready)[1])
        sorter.done(ordered[-1])
    return tuple(ordered)


def all_providers(name: str, chosen: Mapping[str, Mapping[str, str]]) -> set[str]:
    """The skills that provide a skill's needs, and theirs."""
    providers: set[str] = set()
    unseen = [name]
    while unseen:
        new = set(chosen[unseen.pop()].values()) - providers
        providers |= new
        unseen.extend(new)
    return providers


class _Search:
    """The rounds in which skills are learned; each looks only at skills that need what is new."""

    def __init__(self, skills: Mapping[str, Skill], capacity: int) -> None:
        self.chosen: dict[str, dict[str, str]] = {}
        self.yielders: dict[str, list[Skill]] = {}  # learned ones
        self.leading: list[str] = []  # learned ones that lead to another floor
        self._skills, self._capacity = skills, capacity
        self._floors, self._ephemeral = Floors(skills.values()), ephemeral_items(skills.values())
        self._place = {name: place for place, name in enumerate(skills)}
        self._needing: dict[str, list[str]] = {}
        for name, skill in skills.items():
            for item in direct_needs(skill):
                self._needing.setdefault(item, []).append(name)

    def learn(self, names: Iterable[str]) -> list[str]:
        """Learn those of the skills that have their providers; returns which to look at next."""
        offers = {name: self._providers(self._skills[name]) for name in names}
        learned = {name: providers for name, providers in offers.items() if providers is not None}
        self.chosen |= learned
        new: dict[str, None] = {}
        for skill in _growing_first(self._skills[name] for name in learned):
            for item in _yields(skill):
                self.yielders.setdefault(item, []).append(skill)
                new[item] = None
        needing = {name for item in new for name in self._needing.get(item, ())}
        if leading := [name for name in learned if ON_FLOOR in self._skills[name].gain]:
            self.leading += leading
            needing |= self._skills.keys()
        return sorted(needing - self.chosen.keys(), key=self._place.__getitem__)

    def _providers(self, skill: Skill) -> dict[str, str] | None:
        """The learned provider of each need of a skill; None while one is missing."""
        providers: dict[str, str] = {}
        for item, need in direct_needs(skill).items():
            named = skill.provided_by.get(item)
            learned = (e for e in self.yielders.get(item, ()) if named in (None, e.name))
            offers = able(learned, item, need, capacity=self._capacity)
            fit = (name for name in offers if self._can_be_done(skill, {item: name}, self.leading))
            if (provider := next(fit, None)) is None:
                return None
            providers[item] = provider
        if not self._can_be_done(skill, providers, self.leading):
            return None
        return providers | {f"{ON_FLOOR} by {name}": name for name in self._ways(skill, providers)}

    def _ways(self, skill: Skill, providers: Mapping[str, str]) -> list[str]:
        """The learned skills that must lead to where this one is done, beside what it needs.

        Those that lead back up are left out before others, late ones before early ones.
        """
        if not self.leading:
            return []
        needed = self._needed(providers)
        ways = [name for name in self.leading if name not in needed]
        up = {move.step.skill for move in self._floors.moves if move.target < move.source}
        for name in sorted(reversed(ways), key=lambda name: name not in up):
            if self._can_be_done(skill, providers, needed.union(ways) - {name}):
                ways.remove(name)
        return ways

    def _needed(self, providers: Mapping[str, str]) -> set[str]:
        named = set(providers.values())
        return named.union(*(all_providers(name, self.chosen) for name in named))

    def _can_be_done(
        self, skill: Skill, providers: Mapping[str, str], leading: Collection[str]
    ) -> bool:
        """Return whether there is a floor on which the skill can be done, led by some skills.

        What lasts can be brought there; an ephemeral item must be provided there.
        """
        if not self.leading:  # there is one floor
            return START in self._floors.places(skill)
        moves = [move for move in self._floors.moves if move.step.skill in leading]
        needed = self._needed(providers)
        ends: dict[str, set[int]] = {}
        for name in (*(each for each in self.chosen if each in needed), skill.name):
            chosen = providers if name == skill.name else self.chosen[name]
            made = self._skills[name]
            starts = reached_by(moves) & self._floors.places(made)
            for item, other in chosen.items():
                lasts = item not in self._ephemeral
                starts &= reached_by(moves, ends[other]) if lasts else ends[other]
            ends[name] = set(starts)
            if ON_FLOOR in made.gain and name != skill.name:
                own = [move for move in moves if move.step.skill == name]
                ends[name] = {move.target for move in own if move.source in starts}
        return bool(ends[skill.name])


def _prefer_own(
    skills: Mapping[str, Skill], chosen: dict[str, dict[str, str]], *, capacity: int
) -> None:
    """Let the user's own skills provide what embedded ones do, where that closes no circle.

    One that yields a fixed amount does not take the place of one that yields as much as is asked,
    nor one that is done on fewer floors.
    """
    floors = Floors(skills.values())
    served: dict[str, list[str]] = {}  # item → skills that have it from an embedded one
    for name, providers in chosen.items():
        for item, provider in providers.items():
            if skills[provider].embedded and item not in skills[name].provided_by:
                served.setdefault(item, []).append(name)
    for own in [skills[name] for name in chosen if not skills[name].embedded]:
        for item in [item for item in _yields(own) if item in served]:
            needed = {own.name, *all_providers(own.name, chosen)}
            for name in [name for name in served[item] if name not in needed]:
                need = direct_needs(skills[name])[item]
                other = skills[chosen[name][item]]
                good = own.gain[item].per or not other.gain[item].per
                good = good and floors.ends(own) >= floors.ends(other)
                if good and count_for(own, item, need, capacity=capacity) is not None:
                    chosen[name][item] = own.name
                    served[item].remove(name)


def why_impossible(
    name: str, skills: Mapping[str, Skill], learned: Learnable, *, capacity: int
) -> GraphError:
    """Follow needs that cannot be provided until one is unknown or the path closes."""
    path, floors = {name: 0}, Floors(skills.values())
    while True:
        skill = skills[name]
        offers = (
            (item, need, _offers(skill, item, skills, learned, capacity=capacity))
            for item, need in direct_needs(skill).items()
        )
        blocked = (each for each in offers if learned.rank.keys().isdisjoint(each[2]))
        item, need, gainers = next(blocked, (ON_FLOOR, 0, _leading_to(skill, floors, learned)))
        if not gainers:
            if item == ON_FLOOR:
                return GraphError(_no_way(skill, floors))
            return GraphError(_missing(skill, item, need, learned))
        name = next((other for other in gainers if other != skill.name), skill.name)
        if name in path:
            return GraphError(
                f"skills need one another in a circle: {_drawn([*path][path[name] :])}; "
                "drop one need"
            )
        path[name] = len(path)


def _leading_to(skill: Skill, floors: Floors, learned: Learnable) -> list[str]:
    """The skills that cannot be learned, but would lead to a skill's floors."""
    known = [move for move in floors.moves if move.step.skill in learned.rank]
    if reached_by(known) & floors.places(skill):
        return []
    leading = [move for move in floors.moves if move.target in floors.places(skill)]
    return [move.step.skill for move in leading if move.step.skill not in learned.rank]


def _no_way(skill: Skill, floors: Floors) -> str:
    on = ", ".join(map(str, sorted(floors.places(skill)))) or "that it leads to itself"
    reached = reached_by(floors.moves)
    if not reached & floors.places(skill):
        what = f"{skill.name!r} is done on floor {on}, where no skill leads"
        return f"{what}; add one that gains {ON_FLOOR}, or correct its floors"
    what = f"{skill.name!r} needs two floors at once: what it needs cannot be brought to floor {on}"
    return f"{what}; add a skill that leads back, or correct the floors"


def _offers(
    skill: Skill, item: str, skills: Mapping[str, Skill], learned: Learnable, *, capacity: int
) -> list[str]:
    """The skills that a need may come from: the named one, or all that yield enough."""
    gainers = learned.gainers.get(item, ())
    named = skill.provided_by.get(item)
    offered = (skills[name] for name in gainers if named in (None, name))
    return list(able(offered, item, direct_needs(skill)[item], capacity=capacity))


def _drawn(circle: Sequence[str]) -> str:
    """A circle of skills as a line, the middle of a long one left out."""
    names = list(circle)
    if len(names) > 2 * _DRAWN:
        names[_DRAWN:-_DRAWN] = [f"… {len(names) - 2 * _DRAWN} more …"]
    return " → ".join([*names, names[0]])


def _growing_first(skills: Iterable[Skill]) -> list[Skill]:
    """Skills whose gain grows with the count before those that yield a fixed amount."""
    return sorted(skills, key=lambda skill: not any(gain.per for gain in skill.gain.values()))


def _yields(skill: Skill) -> list[str]:
    return [item for item, amount in skill.gain.items() if amount and item != ON_FLOOR]


def _missing(skill: Skill, item: str, need: int, learned: Learnable) -> str:
    named = skill.provided_by.get(item)
    if named is not None:
        offers = ", ".join(learned.gainers.get(item, ()))
        return (
            f"{skill.name!r} says that {need} {item} is provided by {named!r}, which is no such "
            f"skill here; {f'skills that gain {item}: {offers}' if offers else _ADD}"
        )
    if offers := ", ".join(learned.gainers.get(item, ())):
        return f"{skill.name!r} requires {need} {item}, more than {offers} can yield; require less"
    close = difflib.get_close_matches(item, learned.gainers, n=3, cutoff=0.5)
    offers = ", ".join(f"{gain} ({learned.gainers[gain][0]})" for gain in close)
    remedy = f"closest are {offers}" if offers else _ADD
    return f"{skill.name!r} requires {item!r}, which no skill gains; {remedy}"
