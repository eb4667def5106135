"""Places of skills in a picture of their graph."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowrl.viewing.layout import graph_of, places


@st.composite
def graphs(draw) -> dict[str, list[str]]:
    size = draw(st.integers(0, 40))
    earlier = {
        n: st.sets(st.integers(0, max(n - 1, 0)), max_size=3 if n else 0) for n in range(size)
    }
    return {f"S{n}": [f"S{need}" for need in draw(each)] for n, each in earlier.items()}


@given(graphs())
def test_each_skill_has_a_place_of_its_own_right_of_its_needs(needs):
    found = places(graph_of(needs))
    assert found.keys() == needs.keys()
    assert len({*found.values()}) == len(needs)
    for name, own in needs.items():
        assert all(found[need][0] < found[name][0] for need in own)


def test_a_long_layer_has_several_columns():
    found = places(graph_of({f"S{n}": [] for n in range(100)}))
    assert len({x for x, _ in found.values()}) > 3


def test_neighbours_are_brought_near():
    needs = {"a": [], "b": [], "c": [], "x": ["c"], "y": ["b"], "z": ["a"]}
    found = places(graph_of(needs))
    assert all(found[name][1] == found[own[0]][1] for name, own in needs.items() if own)
