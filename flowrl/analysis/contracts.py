"""Disproofs of a skill's contract by recorded episodes and experiments; pure functions.

An amount is changed only if it is disproved. A tolerance of 5 % keeps a single odd episode from
doing so. What a skill uses is what is lost in the timesteps in which its gain comes; what is lost
in any timestep may be waste. A need counts as superfluous only if an experiment says so.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.experts.merge import newcombe, wilson
from flowrl.skills.amount import Amount
from flowrl.skills.skill import ON_FLOOR, Skill

LEAST = 32  # successes that disprove
_ODD = 0.05  # share of successes that may differ
_CHANCE = 0.05  # of any false need, over all facts that are compared
_BEARABLE = 0.15  # share of the successes that a superfluous need may cost, at most
_RARE = 0.2  # share of the successes that remain without a need
_MOST_SUSPECTS = 3
_NONE = Amount(per=0, base=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedStep:
    """One step of a plan in one episode; amounts of items, and 1 of facts that hold, but no 0."""

    skill: str
    count: int
    is_goal: bool
    """It is the last step of its plan."""
    done: bool
    timesteps: int
    start: Mapping[str, int]
    end: Mapping[str, int]
    spent: Mapping[str, int]
    """What was lost in any timestep."""
    won: Mapping[str, int]
    """What was gained in any timestep."""
    used: Mapping[str, int]
    """What was lost in the timesteps in which the gain came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Episodes from the same states: as they were, and with at most `most` of one need."""

    need: str
    most: int
    episodes: int
    before: int
    """Successes as it was."""
    without: int
    """Successes with at most `most` of it."""

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the change of the success rate."""
        n = self.episodes
        return newcombe((self.before / n, n), (self.without / n, n))

    @property
    def verdict(self) -> str:
        """The need's effect: "needed", "helps", "superfluous", or "unclear"."""
        was, (low, high) = self.before / self.episodes, self.interval
        if high < 0:
            rare = wilson(self.without, self.episodes)[1] <= max(_RARE * was, 2 * _ODD)
            return "needed" if rare else "helps"
        return "superfluous" if was and low >= -_BEARABLE * was else "unclear"

    @property
    def line(self) -> str:
        """The experiment in words."""
        low, high = self.interval
        rates = f"{self.without / self.episodes:.0%} instead of {self.before / self.episodes:.0%}"
        return (
            f"with at most {self.most} {self.need} {rates} of {self.episodes} episodes succeed "
            f"(95 % interval of the change {low:+.0%} to {high:+.0%}): {self.verdict}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Disproof:
    """An amount of a contract that is disproved; `now` is None where no amount is proposed."""

    key: str
    item: str
    was: str
    now: str | None
    evidence: str


def experiments_of(
    needs: Mapping[str, int], gain: Collection[str], played: Sequence[PlayedStep]
) -> dict[str, int]:
    """Return what to take away from the states in which a goal begins: need → amount left.

    These are the needs of more than is used, and what nobody wrote but successes began with.
    """
    goals = [step for step in played if step.is_goal]
    done = _fresh(goals, gain)
    if len(done) < LEAST:
        return {}
    left = {name: _low(step.used.get(name, 0) for step in done) for name in needs}
    asked = {name: least for name, least in left.items() if needs[name] > least}
    suspects = [name for name, _ in unwritten(goals, but=(*needs, *gain))][:_MOST_SUSPECTS]
    return asked | dict.fromkeys(suspects, 0)


def unwritten(goals: Sequence[PlayedStep], *, but: Iterable[str]) -> list[tuple[str, float]]:
    """Return what successes began with more often than failures, and the chance of that.

    Fisher's exact test, one-sided, each chance corrected by Holm for all that is compared.
    """
    names = {name for step in goals for name in step.start} - {*but}
    names = {name for name in names if not name.startswith(ON_FLOOR)}  # floors are planned apart
    chances = sorted((_fisher(goals, name), name) for name in names)
    found, least = [], 0.0
    for number, (chance, name) in enumerate(chances):
        least = max(least, min(1.0, chance * (len(chances) - number)))
        if least < _CHANCE:
            found.append((name, least))
    return found


def _fisher(goals: Sequence[PlayedStep], name: str) -> float:
    """The chance of so many successes among the starts with a thing, were it of no effect."""
    have = sum(name in step.start for step in goals)
    wins = sum(step.done for step in goals)
    both = sum(step.done and name in step.start for step in goals)
    total = math.comb(len(goals), wins)
    ways = (
        math.comb(have, k) * math.comb(len(goals) - have, wins - k)
        for k in range(both, min(have, wins) + 1)
    )
    return sum(ways) / total


def disproofs(
    skill: Skill,
    played: Sequence[PlayedStep],
    experiments: Sequence[Experiment],
    *,
    items: Collection[str],
) -> tuple[Disproof, ...]:
    """Return what steps of a skill and experiments on it disprove of its contract."""
    by_need = {each.need: each for each in experiments}
    by_count: dict[int, list[PlayedStep]] = {}
    for step in _fresh(played, skill.gain):
        by_count.setdefault(step.count, []).append(step)
    seen = {n: steps for n, steps in sorted(by_count.items()) if len(steps) >= LEAST}
    used = sorted({name for steps in seen.values() for step in steps for name in step.used})
    found: list[Disproof] = []
    for item in dict.fromkeys([*skill.requirements, *skill.consumption, *used]) if seen else ():
        if item in items:
            found += _of_item(skill, item, seen, by_need.get(item))
        elif item in by_need and by_need[item].verdict == "superfluous":
            found += _change(skill, item, "requirements", amounts={1: 0}, said=[by_need[item].line])
    for item in [item for item in skill.gain if item in items] if seen else ():
        found += _of_gain(skill, item, seen)
    return (*found, *_of_unwritten(skill, played, by_need))


def corrected(skill: Skill, found: Sequence[Disproof]) -> dict[str, dict[str, Amount]]:
    """Return the amounts of a contract's changed parts, as the disproofs propose them."""
    parts: dict[str, dict[str, Amount]] = {}
    for each in found:
        if each.now is not None:
            part = parts.setdefault(each.key, dict(getattr(skill, each.key)))
            part[each.item] = Amount.parse(each.now)
            if not part[each.item]:
                del part[each.item]
    return parts


def _fresh(played: Iterable[PlayedStep], gain: Collection[str]) -> list[PlayedStep]:
    """The successes that began without any of the gain: others may have had nothing to do."""
    return [step for step in played if step.done and not step.start.keys() & {*gain}]


def _change(
    skill: Skill, item: str, key: str, *, amounts: Mapping[int, int], said: Sequence[str]
) -> Iterable[Disproof]:
    """Yield the disproof of an amount that is another at some counts."""
    was = getattr(skill, key).get(item, _NONE)
    if said and any(was.at(n) != amount for n, amount in amounts.items()):
        now = fitted(amounts, was)
        told = None if now is None else str(now)
        yield Disproof(key=key, item=item, was=str(was), now=told, evidence="; ".join(said))


def _of_item(
    skill: Skill,
    item: str,
    seen: Mapping[int, Sequence[PlayedStep]],
    experiment: Experiment | None,
) -> Iterable[Disproof]:
    """Disproofs of an item's requirement and consumption, by the successes at each count."""
    required, consumed = skill.requirements.get(item, _NONE), skill.consumption.get(item, _NONE)
    spare = experiment is not None and experiment.verdict == "superfluous"
    needs, uses, said = dict[int, int](), dict[int, int](), list[str]()
    for n, steps in seen.items():
        used = _low(step.used.get(item, 0) for step in steps)
        most = max(used, _high(step.spent.get(item, 0) for step in steps))
        began = _low(step.start.get(item, 0) for step in steps)
        of = f"95 % of {len(steps)} successes at n = {n}"
        needs[n], uses[n] = required.at(n), min(max(consumed.at(n), used), most)
        if uses[n] != consumed.at(n):
            said.append(f"{of} used {used} or more and lost {most} or fewer")
        if experiment is None and began < needs[n]:
            needs[n] = began
            said.append(f"{of} began with {began} or more")
        needs[n] = max(needs[n], uses[n])
    if spare and experiment is not None:
        proved = [n for n in seen if n == 1 or uses[n] != consumed.at(n)]
        uses = {n: min(uses[n], experiment.most) if n == 1 else uses[n] for n in proved}
        needs = {n: experiment.most if n == 1 else uses[n] for n in proved}
        said.append(experiment.line)
    yield from _change(skill, item, "requirements", amounts=needs, said=said)
    yield from _change(skill, item, "consumption", amounts=uses, said=said)


def _of_gain(
    skill: Skill, item: str, seen: Mapping[int, Sequence[PlayedStep]]
) -> Iterable[Disproof]:
    """Yield the disproof of a promise that fewer than 95 % of the successes have."""
    amounts, said = dict[int, int](), list[str]()
    for n, steps in seen.items():
        amounts[n] = promised = skill.gain[item].at(n)
        had = sum(step.end.get(item, 0) >= promised for step in steps)
        if had < (1 - _ODD) * len(steps):
            amounts[n] = _low(step.end.get(item, 0) for step in steps)
            said.append(f"{had} of {len(steps)} successes at n = {n} had {promised}")
    yield from _change(skill, item, "gain", amounts=amounts, said=said)


def _of_unwritten(
    skill: Skill, played: Sequence[PlayedStep], by_need: Mapping[str, Experiment]
) -> Iterable[Disproof]:
    """Disproofs of needs that nobody wrote, and that an experiment confirms."""
    goals = [step for step in played if step.is_goal]
    for name, chance in unwritten(
        goals, but=(*skill.requirements, *skill.consumption, *skill.gain)
    ):
        experiment = by_need.get(name)
        if experiment is not None and experiment.verdict in ("needed", "helps"):
            said = f"successes begin with it more often than failures (p = {chance:.1g})"
            yield Disproof(
                key="requirements",
                item=name,
                was="0",
                now="1",
                evidence=f"{said}; {experiment.line}",
            )


def fitted(amounts: Mapping[int, int], was: Amount) -> Amount | None:
    """The line a·n + b through the amounts at all counts that were seen; None if there is none.

    Of one count alone, an amount that grew with n still does.

    >>> str(fitted({1: 2, 3: 6}, Amount(per=0, base=2)))
    '2*n'
    >>> str(fitted({1: 1}, Amount(per=3, base=0)))
    'n'
    """
    counts = sorted(amounts)
    first, last = counts[0], counts[-1]
    if first == last:
        grows = was.per and amounts[first] and amounts[first] % first == 0
        per, base = (amounts[first] // first, 0) if grows else (0, amounts[first])
    else:
        per = (amounts[last] - amounts[first]) // (last - first)
        base = amounts[first] - per * first
    line = {"per": per, "base": base}
    if per < 0 or per + base < 0 or any(per * n + base != amount for n, amount in amounts.items()):
        return None
    return Amount(**line)


def _low(values: Iterable[int]) -> int:
    """The amount that 95 % of the values reach."""
    ordered: list[Any] = sorted(values)
    return ordered[int(_ODD * len(ordered))]


def _high(values: Iterable[int]) -> int:
    return -_low(-value for value in values)
