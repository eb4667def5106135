"""Plans: what steps need and yield, which skills can be learned, which steps lead to one.

**Counts are levels.** A step with count n ends when its skill's done-condition holds at n, and
then the agent has *at least* `gain.at(n)` of each gained item: the level n is reached, not added.
Collect Wood × 3 with one wood in the bag yields three wood, not four. Before the step the agent
must have `requirements.at(n)`, and `consumption.at(n)` is taken away during it: the most that it
can cost, also where part of the level was there already. What is computed is thus a lower bound,
and a plan that succeeds here never asks for an item that it did not provide for.

So the count of a provider is the *whole* amount that later steps need of the item until the next
provider of it: what they consume together, or the largest amount that one of them must see.

**Facts.** Resources, tools and achievements are all items; no skill consumes a tool.
An ephemeral item (near a table) lasts only while the player stays. A step *stays* when it requires
or gains an ephemeral item (placing, crafting); any other step may walk away, and ends them all.

**Capacity.** No level can be above the capacity of the inventory.

**Planning.** A plan is built backwards from the goal. Of what is needed at a moment, the ephemeral
comes first, so that its provider stands right before its consumer; tools that are made at the same
place join it there; then the item whose provider needs the most other skills, so that what many
steps need is gathered once, early. What the inventory cannot hold at once is gathered again, as
early as possible. Then counts are the smallest that suffice, and steps that are
superfluous are removed until none is.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import networkx as nx

from flowrl.errors import GraphError
from flowrl.skills.skill import Skill, Step

CAPACITY = 9  # of each item, unless the game says another
_STEP_LIMIT = 1_000
_ADD = "add a skill that gains it, or correct the name"
_DRAWN = 4  # skills of a long circle that are named, at either end


def entry_needs(skill: Skill, count: int) -> dict[str, int]:
    """Return the items that must be there when a step starts: those it requires or consumes."""
    needs: dict[str, int] = {}
    for item, amount in chain(skill.requirements.items(), skill.consumption.items()):
        if amount.at(count) > 0:
            needs[item] = max(needs.get(item, 0), amount.at(count))
    return needs


def excess(skill: Skill, count: int, *, capacity: int) -> str:
    """Return which amount of a step is over the capacity of the inventory, "" for none."""
    levels = {item: amount.at(count) for item, amount in skill.gain.items()}
    for item, level in (*levels.items(), *entry_needs(skill, count).items()):
        if level > capacity:
            what = f"{skill.name} × {count} needs or yields {level} {item}"
            return f"{what}; at most {capacity} can be carried"
    return ""


def needs_before(
    needs: Mapping[str, int], skill: Skill, count: int, *, ephemeral: frozenset[str]
) -> dict[str, int] | None:
    """Return the items that must be there before a step so that `needs` holds after it.

    None when it cannot: the step would end an ephemeral item that is needed after it.
    """
    before = {
        item: need
        for item, need in needs.items()
        if item not in skill.gain or skill.gain[item].at(count) < need
    }
    if not stays(skill, ephemeral) and not ephemeral.isdisjoint(before):
        return None
    for item, amount in skill.consumption.items():
        if item in before:
            before[item] += amount.at(count)
    for item, need in entry_needs(skill, count).items():
        before[item] = max(before.get(item, 0), need)
    return before


def kept_needs(
    steps: Sequence[Step], skills: Mapping[str, Skill], *, ephemeral: frozenset[str]
) -> list[dict[str, int]]:
    """For each step of a plan, the items that it must leave for later steps, and how many.

    Items that the step itself yields in that amount are not among them.
    """
    kept: list[dict[str, int]] = []
    needs: dict[str, int] = {}
    for step in reversed(steps):
        gain = skills[step.skill].gain
        own = {item for item, need in needs.items() if item in gain}
        own = {item for item in own if gain[item].at(step.count) >= needs[item]}
        kept.append({item: need for item, need in needs.items() if item not in own})
        before = needs_before(needs, skills[step.skill], step.count, ephemeral=ephemeral)
        if before is None:
            raise GraphError(f"{step.skill} ends what a later step needs: {', '.join(needs)}")
        needs = before
    return kept[::-1]


def ephemeral_items(skills: Iterable[Skill]) -> frozenset[str]:
    """The items that any of the skills calls ephemeral."""
    return frozenset(chain.from_iterable(skill.ephemeral for skill in skills))


def stays(skill: Skill, ephemeral: frozenset[str]) -> bool:
    """Return whether ephemeral items outlast the skill: it requires or gains one itself."""
    return any(item in ephemeral for item in chain(skill.requirements, skill.gain))


def count_for(skill: Skill, item: str, need: int, *, capacity: int) -> int | None:
    """The least count at which a skill yields this much of an item; None when none does."""
    count = skill.gain[item].least_n(need) if item in skill.gain else None
    if count is None or any(amount.at(count) > capacity for amount in skill.gain.values()):
        return None
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnable:
    """The skills that can be learned, found round by round.

    The first round takes the skills that need nothing, each next one those whose every need is
    yielded, in the amount asked for, by a skill of an earlier round. Then skills of the user's own
    take the place of embedded providers, unless they depend on the skill that has the need.
    """

    rank: Mapping[str, int]  # skill → its place in the order of rounds; none for the impossible
    chosen: Mapping[str, Mapping[str, str]]  # skill → item that it needs → provider
    gainers: Mapping[str, tuple[str, ...]]  # item → the skills that yield it, preferred first


def direct_needs(skill: Skill) -> dict[str, int]:
    """Return the needs of a skill at count 1, and 1 of each need of higher counts only."""
    amounts = (*skill.requirements.items(), *skill.consumption.items())
    return {item: 1 for item, amount in amounts if amount} | entry_needs(skill, 1)


def able(skills: Iterable[Skill], item: str, need: int, *, capacity: int) -> Iterator[str]:
    """Those of the skills that can yield this much of an item at some count."""
    for skill in skills:
        if count_for(skill, item, need, capacity=capacity) is not None:
            yield skill.name


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
    edges = nx.DiGraph()
    edges.add_nodes_from(chosen)
    for name, providers in chosen.items():
        edges.add_edges_from((provider, name) for provider in providers.values())
    place = {name: place for place, name in enumerate(by)}
    return tuple(nx.lexicographical_topological_sort(edges, key=place.__getitem__))


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
        self._skills, self._capacity = skills, capacity
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
        return sorted(needing - self.chosen.keys(), key=self._place.__getitem__)

    def _providers(self, skill: Skill) -> dict[str, str] | None:
        """The learned provider of each need of a skill; None while one is missing."""
        providers: dict[str, str] = {}
        for item, need in direct_needs(skill).items():
            named = skill.provided_by.get(item)
            learned = (e for e in self.yielders.get(item, ()) if named in (None, e.name))
            provider = next(able(learned, item, need, capacity=self._capacity), None)
            if provider is None:
                return None
            providers[item] = provider
        return providers


def _prefer_own(
    skills: Mapping[str, Skill], chosen: dict[str, dict[str, str]], *, capacity: int
) -> None:
    """Let the user's own skills provide what embedded ones do, where that closes no circle.

    One that yields a fixed amount does not take the place of one that yields as much as is asked.
    """
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
                grows = own.gain[item].per or not skills[chosen[name][item]].gain[item].per
                if grows and count_for(own, item, need, capacity=capacity) is not None:
                    chosen[name][item] = own.name
                    served[item].remove(name)


def why_impossible(
    name: str, skills: Mapping[str, Skill], learned: Learnable, *, capacity: int
) -> GraphError:
    """Follow needs that cannot be provided until one is unknown or the path closes."""
    path = {name: 0}
    while True:
        skill = skills[name]
        offers = (
            (item, need, _offers(skill, item, skills, learned, capacity=capacity))
            for item, need in direct_needs(skill).items()
        )
        item, need, gainers = next(x for x in offers if learned.rank.keys().isdisjoint(x[2]))
        if not gainers:
            return GraphError(_missing(skill, item, need, learned))
        name = next((other for other in gainers if other != skill.name), skill.name)
        if name in path:
            return GraphError(
                f"skills need one another in a circle: {_drawn([*path][path[name] :])}; "
                "drop one need"
            )
        path[name] = len(path)


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
    return [item for item, amount in skill.gain.items() if amount]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A step of a plan under way, and what may come right before it."""

    step: Step
    needs: dict[str, int]  # what must be there when the step starts
    chosen: Mapping[str, str]  # the provider of each of them
    before: Iterator[tuple[Step, dict[str, int]]]  # the preferred first, each with its needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """The planner's input: the skills, those that may be steps, and how they were learned."""

    skills: Mapping[str, Skill]
    learned: Learnable
    needed: Collection[str]  # the skills that the goal's needs may come from
    ephemeral: frozenset[str]
    capacity: int

    def plan(self, goal: Step) -> tuple[Step, ...]:
        """The steps that make the goal's needs true from an empty inventory, then the goal.

        Raises GraphError if more of an item is needed at once than can be carried or provided.
        """
        if said := excess(self.skills[goal.skill], goal.count, capacity=self.capacity):
            raise GraphError(said)
        names = [step.skill for step in self._ordered(goal)]
        return self._pruned(names, goal)

    def _ordered(self, goal: Step) -> list[Step]:
        """The steps in order, found from the goal backwards, depth first.

        Where nothing can come before a step, because more would have to be carried than the
        inventory holds, the latest place that has another preferred step takes that one.
        """
        needs = entry_needs(self.skills[goal.skill], goal.count)
        path = [self._place(goal, needs, self.learned.chosen[goal.skill])]
        stuck = ""
        for _ in range(_STEP_LIMIT):
            place = path[-1]
            if not place.needs:
                return [each.step for each in reversed(path)]
            step, before = next(place.before, (None, {}))
            if step is not None:
                chosen = self._chosen(before, place.chosen, step.skill)
                path.append(self._place(step, before, chosen))
                continue
            stuck = stuck or self._nothing_before(place)
            path.pop()
            if not path:
                break
        raise GraphError(stuck or f"the plan for {goal.skill!r} has over {_STEP_LIMIT} steps")

    def _chosen(
        self, needs: Mapping[str, int], before: Mapping[str, str], skill: str
    ) -> dict[str, str]:
        """The provider of each need, also of those that the step of this skill added.

        Of the choices of two skills that of lower rank holds: it needs neither of them.
        """
        choices = (before, self.learned.chosen[skill])
        options = {item: [choice[item] for choice in choices if item in choice] for item in needs}
        return {
            item: min(names, key=self.learned.rank.__getitem__) for item, names in options.items()
        }

    def _place(self, step: Step, needs: dict[str, int], chosen: Mapping[str, str]) -> _Place:
        steps = self._by_preference(needs, chosen)
        options = ((each, self._before(needs, each)) for each in steps)
        before = ((each, needs) for each, needs in options if needs is not None)
        return _Place(step=step, needs=needs, chosen=chosen, before=before)

    def _nothing_before(self, place: _Place) -> str:
        wanted = ", ".join(f"{need} {item}" for item, need in sorted(place.needs.items()))
        return (
            f"nothing can provide {wanted} before {place.step.skill!r} within a capacity of "
            f"{self.capacity}; lower what the skills require or consume"
        )

    def _by_preference(self, needs: Mapping[str, int], chosen: Mapping[str, str]) -> list[Step]:
        providers = {item: self._provider(item, need, chosen[item]) for item, need in needs.items()}
        steps = {item: step for item, step in providers.items() if step is not None}

        def late_first(item: str) -> tuple[bool, int, str]:
            return item in self.ephemeral, -self.learned.rank[steps[item].skill], item

        return [steps[item] for item in sorted(steps, key=late_first)]

    def _before(self, needs: Mapping[str, int], step: Step) -> dict[str, int] | None:
        """Return the items that must be there before the step; None when that can never be."""
        skill = self.skills[step.skill]
        before = needs_before(needs, skill, step.count, ephemeral=self.ephemeral)
        if before is None or not all(self._provider(*need) for need in before.items()):
            return None
        return before

    def _provider(self, item: str, need: int, first: str | None = None) -> Step | None:
        """The preferred skill that can reach this level, at the smallest count that does."""
        gainers = [name for name in self.learned.gainers.get(item, ()) if name in self.needed]
        for name in [first, *gainers] if first else gainers:
            count = count_for(self.skills[name], item, need, capacity=self.capacity)
            if count is not None:
                return Step(skill=name, count=count)
        return None

    def _pruned(self, names: list[str], goal: Step) -> tuple[Step, ...]:
        steps = self._counted(names, goal)
        if steps is None:
            raise GraphError(f"no order of steps makes {goal.skill!r} possible")
        while shorter := next(self._shorter(names, goal), None):
            names, steps = shorter
        return steps

    def _shorter(
        self, names: list[str], goal: Step
    ) -> Iterator[tuple[list[str], tuple[Step, ...]]]:
        """The plans that succeed without one step, by names and steps; a late step goes first.

        A step on which alone a needed item hangs is not tried.
        """
        providers = Counter(item for name in names for item in self.skills[name].gain)
        needed = {item for name in names for item in entry_needs(self.skills[name], 1)}
        named = {other for name in names for other in self.skills[name].provided_by.values()}
        for place in range(len(names) - 2, -1, -1):
            gain = self.skills[names[place]].gain
            alone = any(item in needed and providers[item] == 1 for item in gain)
            rest = names[:place] + names[place + 1 :]
            if names[place] not in named and not alone and (steps := self._counted(rest, goal)):
                yield rest, steps

    def _counted(self, names: list[str], goal: Step) -> tuple[Step, ...] | None:
        """The steps in this order with the smallest counts; None when they do not succeed."""
        steps = [goal]
        needs: dict[str, int] | None = entry_needs(self.skills[goal.skill], goal.count)
        for name in reversed(names[:-1]):
            step = Step(skill=name, count=self._smallest_count(name, needs))
            gains = self.skills[name].gain.values()
            if any(amount.at(step.count) > self.capacity for amount in gains):
                return None
            needs = self._before(needs, step)
            if needs is None:
                return None
            steps.append(step)
        return tuple(reversed(steps)) if not needs else None

    def _smallest_count(self, name: str, needs: Mapping[str, int]) -> int:
        gain = self.skills[name].gain
        counts = [gain[item].least_n(needs[item]) or 1 for item in gain if item in needs]
        return max(counts, default=1)
