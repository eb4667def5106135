"""Recipes of a game, found by single actions in built worlds.

Every action is tried at every place of `Probes`. What it changes beyond what idling changes in the
same world and with the same key is its effect. Then one dial at a time is lowered, then raised,
and bisected to the least and the most at which the effect still occurs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.games.probes import Place, Probes
from flowrl.knowledge.facts import Bound, Change, Facts, Recipe

_ROWS = 2048  # that are stepped at once
_KEYS = 8  # tried for the one with which most happens
_SAMPLE = 16  # keys that show whether there is chance
_DRAWS = 256  # keys of a chance
_LEAST = 1e-4  # change of an amount
_FEW = 12  # things ahead: of more with one effect, one stands for all
_AHEAD = "ahead"  # in an effect, with the number of the block that is there afterwards
_GOT = "+"  # before the name of an achievement
Effect = frozenset[tuple[str, float]]  # what changes, and its sign


class Case(NamedTuple):
    """One action in one built world."""

    dials: tuple[int, ...]
    ahead: int
    action: int
    key: int = 0


class Changes(NamedTuple):
    """The changes of N cases, `[N]` each: amounts, the block ahead, new achievements.

    The block is -1 where it is the same.
    """

    values: dict[str, Any]
    block: Any
    new: dict[str, Any]

    def effects(self) -> list[Effect]:
        """Everything that changes in each case: amounts by their sign, the block, achievements."""
        found: list[set[tuple[str, float]]] = [set() for _ in self.block]
        for name, column in self.values.items():
            for row in np.flatnonzero(np.abs(column) > _LEAST):
                found[row].add((name, float(np.sign(column[row]))))
        for row in np.flatnonzero(self.block >= 0):
            found[row].add((_AHEAD, float(self.block[row])))
        for name, column in self.new.items():
            for row in np.flatnonzero(column):
                found[row].add((_GOT + name, 1.0))
        return list(map(frozenset, found))


class _Found(NamedTuple):
    """The effect that a case always has, and the things ahead with which it does."""

    case: Case
    core: Effect
    ahead: tuple[int, ...]
    anything: bool


def probed(name: str, probes: Probes, *, cache: Path | None = None) -> Facts:
    """Return the facts of a game; its program is compiled into the folder `cache`."""
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(cache))
    prober = _Prober(probes)
    found = _split(prober.found())
    recipes, apart = prober.recipes(found, prober.needs(found))
    silent = {*probes.actions} - {recipe.action for recipe in recipes} - {probes.idle}
    return Facts(
        game=name,
        recipes=_merged(recipes),
        tables=probes.tables(),
        unprobed={
            **probes.unprobed,
            **dict.fromkeys(sorted(apart), "the least of all its needs at once are not enough"),
            **dict.fromkeys(sorted(silent), "it changed nothing at any place that was tried"),
        },
        names=probes.names,
        floors=probes.floors,
    )


class _Prober:
    """Steps cases and compares; its one program is compiled once."""

    def __init__(self, probes: Probes) -> None:
        self._probes = probes
        self._names = tuple(probes.dials)
        self._idle = probes.actions.index(probes.idle)
        self._program = jax.jit(self._changes)

    def _changes(self, dials: Any, ahead: Any, action: Any, key: Any) -> Changes:
        """The changes of cases beyond those of idling; of idling, those of time."""
        probes, count = self._probes, len(action)

        def world(row: Any, ahead: Any, key: Any) -> Any:
            values = dict(zip(self._names, row, strict=True))
            return probes.world(values, ahead, jax.random.key(key))

        def step(key: Any, world: Any, action: Any) -> Any:
            return probes.step(jax.random.key(key), world, action)

        before = jax.vmap(world)(dials, ahead, key)
        keys, worlds = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), (key, before))
        actions = jnp.concatenate([action, jnp.full_like(action, self._idle)])
        both = jax.vmap(probes.measure)(jax.vmap(step)(keys, worlds, actions))
        was = jax.vmap(probes.measure)(before)
        after = jax.tree.map(lambda leaf: leaf[:count], both)
        other = jax.tree.map(
            lambda leaf, old: jnp.where(action == self._idle, old, leaf[count:]), both, was
        )
        values = {name: after[0][name] * 1.0 - other[0][name] for name in after[0]}
        return Changes(
            values,
            jnp.where(after[1] == other[1], -1, after[1]),
            {name: after[2][name] & ~other[2][name] for name in after[2]},
        )

    def _run(self, cases: Sequence[Case]) -> Changes:
        parts = []
        for start in range(0, len(cases), _ROWS):
            part = list(cases[start : start + _ROWS])
            part += part[:1] * (_ROWS - len(part))
            columns = [np.array(column, np.int32) for column in zip(*part, strict=True)]
            parts.append(jax.tree.map(np.asarray, self._program(*columns)))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves)[: len(cases)], *parts)

    def _effects(self, cases: Sequence[Case]) -> list[Effect]:
        return self._run(cases).effects() if cases else []

    def _drawn(self, cases: Sequence[Case]) -> list[Changes]:
        """The changes of each case with several keys, with more of them where they differ."""
        drawn = self._with_keys(cases, _SAMPLE)
        varied = [number for number, each in enumerate(drawn) if len({*each.effects()}) > 1]
        again = self._with_keys([cases[number] for number in varied], _DRAWS)
        for number, changes in zip(varied, again, strict=True):
            drawn[number] = changes
        return drawn

    def _with_keys(self, cases: Sequence[Case], count: int) -> list[Changes]:
        """The changes of each case with its own key and others; of all that count for chance."""
        if not cases:
            return []
        others = range(_DRAWS, _DRAWS + count - 1)
        keyed = [
            each._replace(key=key)
            for each in cases
            for key in (range(count) if count == _DRAWS else (each.key, *others))
        ]
        whole = self._run(keyed)
        return [
            jax.tree.map(lambda leaf, at=at: leaf[at : at + count], whole)
            for at in range(0, len(keyed), count)
        ]

    def _cases(self, place: Place, key: int = 0) -> list[Case]:
        dials = tuple(
            place.dials.get(name, dial.usual) for name, dial in self._probes.dials.items()
        )
        actions = place.actions or self._probes.actions
        return [
            Case(dials, self._probes.ahead.index(ahead), self._probes.actions.index(action), key)
            for ahead in place.ahead
            for action in actions
        ]

    def _telling_key(self) -> int:
        """The key with which most happens in the first place: what is rare is then seen."""
        rich = self._probes.places[0]
        counts = [
            len(list(filter(None, self._effects(self._cases(rich, k))))) for k in range(_KEYS)
        ]
        return int(np.argmax(counts))

    def found(self) -> list[_Found]:
        """Every effect of every action, each once, and what always happens with it."""
        key = self._telling_key()
        tried = [
            (number, case)
            for number, place in enumerate(self._probes.places)
            for case in self._cases(place, key)
        ]
        seen: dict[tuple[int, Effect], list[tuple[int, Case]]] = {}
        effects = self._effects([case for _, case in tried])
        for (number, case), effect in zip(tried, effects, strict=True):
            if effect:
                seen.setdefault((case.action, effect), []).append((number, case))
        drawn = self._drawn([group[0][1] for group in seen.values()])
        # Places in which more may happen come first: with fewer tools, chests hold more.
        cores: dict[tuple[int, Effect], list[tuple[int, list[tuple[int, Case]]]]] = {}
        for (action, effect), changes in zip(list(seen), drawn, strict=True):
            effects = changes.effects()
            core = frozenset.intersection(*effects) or effect
            size = len(frozenset.union(*effects))
            cores.setdefault((action, core), []).append((-size, seen[action, effect]))
        found = []
        for (_, core), groups in sorted(cores.items(), key=lambda each: each[0][0]):
            ordered = sorted(groups, key=lambda each: each[0])
            group = [each for _, several in ordered for each in several]
            found.append(_Found(group[0][1], core, *self._around(group)))
        return found

    def _around(self, group: list[tuple[int, Case]]) -> tuple[tuple[int, ...], bool]:
        """The things ahead of a group of cases, and True if it does not matter what is there."""
        probes = self._probes
        ahead = tuple(sorted({case.ahead for _, case in group}))
        names = {probes.ahead[number] for number in ahead}
        tried = {number for number, _ in group}
        covers = all(names.issuperset(probes.places[number].ahead) for number in tried)
        return ahead, covers and probes.free in names

    def needs(self, found: Sequence[_Found]) -> list[dict[str, Bound]]:
        """The bounds of each effect, also those that show only where other dials are low."""
        needs = self.bounds(found)
        tight = [
            each._replace(case=self._least(each.case, bounds, only_bound=True))
            for each, bounds in zip(found, needs, strict=True)
        ]
        effects = self._effects([each.case for each in tight])
        holds = [each.core <= effect for each, effect in zip(tight, effects, strict=True)]
        rows = [row for row, held in enumerate(holds) if held]
        for row, more in zip(rows, self.bounds([tight[row] for row in rows]), strict=True):
            needs[row] |= more
        return needs

    def bounds(self, found: Sequence[_Found]) -> list[dict[str, Bound]]:
        """The least and the most of each dial at which the core of an effect still occurs."""
        needs: list[dict[str, Bound]] = [{} for _ in found]
        for side in ("least", "most"):
            ends = {
                (row, column): end
                for row, each in enumerate(found)
                for column, dial in enumerate(self._probes.dials.values())
                if (end := getattr(dial, side)) != each.case.dials[column]
                if (end < each.case.dials[column]) == (side == "least")
            }
            for (row, column), value in self._bisected(found, ends).items():
                name = self._names[column]
                needs[row][name] = replace(needs[row].get(name, Bound()), **{side: value})
        return needs

    def _bisected(
        self, found: Sequence[_Found], ends: Mapping[tuple[int, int], int]
    ) -> dict[tuple[int, int], int]:
        """Of each dial that cannot go to its end, the last value with the effect."""
        holds = self._hold(found, ends)
        bad = {at: ends[at] for at in ends if not holds[at]}
        good = {at: found[at[0]].case.dials[at[1]] for at in bad}
        while middle := {
            at: (good[at] + bad[at]) // 2 for at in bad if abs(good[at] - bad[at]) > 1
        }:
            for at, held in self._hold(found, middle).items():
                (good if held else bad)[at] = middle[at]
        return good

    def _hold(
        self, found: Sequence[_Found], values: Mapping[tuple[int, int], int]
    ) -> dict[tuple[int, int], bool]:
        """True where the effect still occurs with one dial at this value."""
        cases = []
        for (row, column), value in values.items():
            case = found[row].case
            dials = (*case.dials[:column], value, *case.dials[column + 1 :])
            cases.append(case._replace(dials=dials))
        return {
            at: self._wanted(found[at[0]], at[1], values[at]) <= effect
            for at, effect in zip(values, self._effects(cases), strict=True)
        }

    def _wanted(self, found: _Found, column: int, value: int) -> Effect:
        """The core; of an amount that is raised, not its own gain: a full bag gains none.

        Nor are the achievements wanted that come with the amount, unless nothing else is left.
        """
        name = self._names[column]
        own = (name, 1.0) in found.core and name not in self._probes.names
        if not own or value < found.case.dials[column]:
            return found.core
        rest = found.core - {(name, 1.0)}
        return frozenset(each for each in rest if each[0][0] != _GOT) or rest

    def recipes(
        self, found: Sequence[_Found], needs: Sequence[Mapping[str, Bound]]
    ) -> tuple[list[Recipe], set[str]]:
        """The recipes of effects, and the actions that need more than all their least amounts.

        Amounts and chances are those with plenty and with the least.
        """
        rich = [each.case for each in found]
        poor = [self._least(*each) for each in zip(rich, needs, strict=True)]
        drawn = self._drawn(rich + poor)
        made, apart, names = [], set(), self._probes.ahead
        for each, bounds, most, least in zip(
            found, needs, drawn, drawn[len(found) :], strict=False
        ):
            action = self._probes.actions[each.case.action]
            if not any(each.core <= effect for effect in least.effects()):
                apart.add(action)
            changes = {name: _change(most.values[name], least.values[name]) for name in most.values}
            becomes = {names[number] for number in most.block if number >= 0}
            recipe = Recipe(
                action=action,
                ahead=() if each.anything else tuple(names[number] for number in each.ahead),
                needs=dict(bounds),
                changes={name: change for name, change in changes.items() if change},
                becomes=min(becomes, default=None),
                achievements={
                    name: round(float(column.mean()), 4)
                    for name, column in least.new.items()
                    if column.any()
                },
            )
            made.append(recipe)
        return made, apart

    def _least(self, case: Case, needs: Mapping[str, Bound], *, only_bound: bool = False) -> Case:
        """The same case with no more than it needs; or only with less of what it needs."""
        dials = []
        for (name, dial), value in zip(self._probes.dials.items(), case.dials, strict=True):
            least = needs.get(name, Bound()).least
            dials.append(
                least if least is not None else value if only_bound else min(dial.least, value)
            )
        return case._replace(dials=tuple(dials))


def _split(found: Sequence[_Found]) -> list[_Found]:
    """The same, with one entry for each thing ahead where these are few: needs may differ."""
    apart = []
    for each in found:
        if each.anything or len(each.ahead) > _FEW:
            apart.append(each)
            continue
        for ahead in each.ahead:
            apart.append(each._replace(case=each.case._replace(ahead=ahead), ahead=(ahead,)))
    return apart


def _merged(made: Sequence[Recipe]) -> tuple[Recipe, ...]:
    """The same, with one recipe for things ahead that differ in nothing else."""
    kept: dict[str, Recipe] = {}
    for recipe in made:
        alike = repr(replace(recipe, ahead=()))
        before = kept.get(alike)
        kept[alike] = replace(recipe, ahead=(*before.ahead, *recipe.ahead)) if before else recipe
    return tuple(kept.values())


def _change(rich: Any, poor: Any) -> Change | None:
    """The change of an amount, if any: a limit of bag or body only ever makes it smaller."""
    both = np.concatenate([rich, poor])
    seen = both[np.abs(both) > _LEAST].astype(float).round(2)
    if not len(seen):
        return None
    chance = max(float((np.abs(column) > _LEAST).mean()) for column in (rich, poor))
    if all(len({*column.round(2)}) == 1 for column in (rich, poor)):
        seen = seen[[np.argmax(np.abs(seen))]]
    return Change(least=float(seen.min()), most=float(seen.max()), chance=round(chance, 4))
