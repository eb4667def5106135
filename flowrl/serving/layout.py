"""Places of skills in a picture of their graph; alone, since all else here reads files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import networkx as nx

_COLUMN, _ROW = 220, 56  # pixels between neighbours
_PASSES = 4
_LEAST_ROWS = 12


def places(needs: Mapping[str, Sequence[str]]) -> dict[str, tuple[float, float]]:
    """Return x and y of each skill in pixels: each stands to the right of its needs.

    Rows are ordered by the mean place of neighbours. A layer that is too long has several columns.
    """
    graph: nx.DiGraph = nx.DiGraph()
    graph.add_nodes_from(needs)
    graph.add_edges_from((need, name) for name, own in needs.items() for need in own)
    layers = [list(layer) for layer in nx.topological_generations(graph)]
    for number in range(_PASSES):
        _order(layers, graph.pred) if number % 2 == 0 else _order(layers[::-1], graph.succ)
    most = max(_LEAST_ROWS, round((2 * len(needs)) ** 0.5))
    columns = [
        layer[start : start + size]
        for layer in layers
        for size in [-(-len(layer) // -(-len(layer) // most))]  # as even as can be
        for start in range(0, len(layer), size)
    ]
    return {
        name: (column * _COLUMN, (row - (len(names) - 1) / 2) * _ROW)
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
