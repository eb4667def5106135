"""Facts of a game as a page of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from flowrl.knowledge.facts import Bound, Change, Facts, Recipe

_MOB = "mob_health"
_INTRODUCTION = """# Facts of {game}

<!-- made by `flowrl facts {game} -o FILE`; write nothing here -->

The tables are read from the installed game. The recipes are probed: one action in a built world,
compared with idling there. A need is the least, or the most, with which the effect still occurs.
Chances are over 256 keys.
"""
_COLUMNS = ("action", "ahead", "needs", "uses", "yields", "becomes", "achievements")


def page_of(facts: Facts) -> str:
    """Return the page of a game."""
    fights = [recipe for recipe in facts.recipes if _MOB in recipe.changes]
    others = [recipe for recipe in facts.recipes if _MOB not in recipe.changes]
    parts = [_INTRODUCTION.format(game=facts.game)]
    parts.append(_section("Recipes", _COLUMNS, (_cells(each, facts) for each in others)))
    about = "The mob ahead has one point of health; `…` stands for its name."
    parts.append(_section("Hunting and fighting", _COLUMNS, _fights(fights, facts), (about,)))
    for table in facts.tables:
        notes = (f"Read from `{table.source}`.", *table.notes)
        parts.append(_section(table.title, table.columns, table.rows, notes))
    parts.append(_section("Not probed", ("what", "reason"), facts.unprobed.items()))
    return "\n".join(parts)


def recipe_rows(facts: Facts) -> list[dict[str, str]]:
    """Return the recipes as the page has them, each by its columns; an empty cell is left out."""
    cells = (_cells(each, facts) for each in facts.recipes)
    named = (zip(_COLUMNS, row, strict=True) for row in cells)
    return [{column: cell for column, cell in row if cell} for row in named]


def _section(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], notes: Sequence[str] = ()
) -> str:
    lines = [f"## {title}", "", *(f"{note}\n" for note in notes)]
    lines += [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in rows:
        lines.append(f"| {' | '.join(f'`{cell}`' if cell else '' for cell in row)} |")
    return "\n".join([*lines, ""])


def _cells(recipe: Recipe, facts: Facts) -> tuple[str, ...]:
    uses = {name: each for name, each in recipe.changes.items() if each.most < 0}
    yields = {name: each for name, each in recipe.changes.items() if name not in uses}
    got = (f"{name}{_share(chance)}" for name, chance in recipe.achievements.items())
    return (
        recipe.action,
        _ahead(recipe.ahead, facts),
        _needs(recipe.needs, facts.names),
        _changes(uses),
        _changes(yields),
        recipe.becomes or "",
        ", ".join(got),
    )


def _ahead(names: Sequence[str], facts: Facts) -> str:
    """The things ahead, or the others if these are fewer."""
    known = dict.fromkeys(name for recipe in facts.recipes for name in recipe.ahead)
    others = [name for name in known if name not in names]
    if len(names) > len(others):
        return f"all but {', '.join(others)}"
    return ", ".join(names) or "anything"


def _fights(recipes: Iterable[Recipe], facts: Facts) -> list[tuple[str, ...]]:
    """The rows of fights, those that differ in the mob alone as one."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for recipe in recipes:
        action, ahead, *rest = _cells(recipe, facts)
        hidden = [cell.replace(ahead, "…") for cell in rest]
        rows.setdefault((action, *hidden), []).append(ahead)
    return [(action, ", ".join(ahead), *rest) for (action, *rest), ahead in rows.items()]


def _needs(needs: Mapping[str, Bound], names: Mapping[str, Sequence[str]]) -> str:
    """Needs as text, for instance `wood ≥ 2, pickaxe ≤ 1`."""
    return ", ".join(f"{each} {_bound(bound, names.get(each))}" for each, bound in needs.items())


def _bound(bound: Bound, names: Sequence[str] | None) -> str:
    least, most = (
        value if names is None or value is None else names[value]
        for value in (bound.least, bound.most)
    )
    if least == most:
        return f"= {least}"
    if least is not None and most is not None:
        return f"{least} to {most}"
    return f"≥ {least}" if most is None else f"≤ {most}"


def _changes(changes: Mapping[str, Change]) -> str:
    return ", ".join(
        f"{name} {_amount(each)}{_share(each.chance)}" for name, each in changes.items()
    )


def _amount(change: Change) -> str:
    if change.least == change.most:
        return f"{change.least:+g}"
    return f"{change.least:+g} to {change.most:+g}"


def _share(chance: float) -> str:
    return "" if chance == 1 else f" ({chance:.0%})"
