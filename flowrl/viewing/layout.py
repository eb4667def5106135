"""Places of skills in a picture of their graph; alone, because page and file share it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import networkx as nx

_PASSES = 4
_LEAST_ROWS = 12


def graph_of(needs: Mapping[str, Sequence[str]]) -> nx.DiGraph:
    """Return the graph from each skill to those that need it; no state has a circle."""
    graph = nx.DiGraph((need, name) for name, own in needs.items() for need in own)
    graph.add_nodes_from(needs)
    return graph


def places(graph: nx.DiGraph) -> dict[str, tuple[int, float]]:
    """Return the column and the row of each skill: it stands right of its needs.

    Rows are ordered by the mean place of neighbours; 0 is in the middle of a column. A layer that
    is too long has several columns.
    """
    layers = [list(layer) for layer in nx.topological_generations(graph)]
    for number in range(_PASSES):
        _order(layers, graph.pred) if number % 2 == 0 else _order(layers[::-1], graph.succ)
    most = max(_LEAST_ROWS, round((2 * len(graph)) ** 0.5))
    columns = [
        layer[start : start + size]
        for layer in layers
        for size in [-(-len(layer) // -(-len(layer) // most))]  # as even as can be
        for start in range(0, len(layer), size)
    ]
    return {
        name: (column, row - (len(names) - 1) / 2)
        for column, names in enumerate(columns)
        for row, name in enumerate(names)
    }


def _order(layers: Iterable[list[str]], neighbours: Mapping[str, Iterable[str]]) -> None:
    """Sort each layer by where its neighbours in the layers before it stand."""
    place: dict[str, float] = {}
    for layer in layers:
        own = {name: (row + 0.5) / len(layer) for row, name in enumerate(layer)}
        for name in layer:
            near = [place[each] for each in neighbours[name] if each in place]
            own[name] = fmean(near) if near else own[name]
        layer.sort(key=own.__getitem__)
        place |= {name: (row + 0.5) / len(layer) for row, name in enumerate(layer)}
