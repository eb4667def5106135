"""Places of skills, and what a page is told of a change."""

from __future__ import annotations

import copy

from hypothesis import given
from hypothesis import strategies as st

from flowrl.serving.events import changes
from flowrl.serving.layout import places


@st.composite
def graphs(draw) -> dict[str, list[str]]:
    size = draw(st.integers(0, 40))
    earlier = {
        n: st.sets(st.integers(0, max(n - 1, 0)), max_size=3 if n else 0) for n in range(size)
    }
    return {f"S{n}": [f"S{need}" for need in draw(each)] for n, each in earlier.items()}


@given(graphs())
def test_each_skill_has_a_place_of_its_own_right_of_its_needs(needs):
    found = places(needs)
    assert found.keys() == needs.keys()
    assert len({*found.values()}) == len(needs)
    for name, own in needs.items():
        assert all(found[need][0] < found[name][0] for need in own)


def test_a_long_layer_has_several_columns():
    found = places({f"S{n}": [] for n in range(100)})
    assert len({x for x, _ in found.values()}) > 3


def test_neighbours_are_brought_near():
    needs = {"a": [], "b": [], "c": [], "x": ["c"], "y": ["b"], "z": ["a"]}
    found = places(needs)
    assert all(found[name][1] == found[own[0]][1] for name, own in needs.items() if own)


@st.composite
def documents(draw):
    names = draw(st.lists(st.sampled_from("ABC"), unique=True))
    rows = [
        {"skill": name, "needs": [], "status": draw(st.sampled_from(["waiting", "running"]))}
        for name in names
    ]
    return {
        "ended": draw(st.booleans()),
        "skills": rows,
        **draw(st.sampled_from([{}, {"more": 1}])),
    }


def applied(old, news):
    """The document as a page has it after the news."""
    if news.pop("whole", False):
        return news
    new = copy.deepcopy(old)
    rows = {row["skill"]: row for row in news.pop("skills")}
    new["skills"] = [rows.get(row["skill"], row) for row in new["skills"]]
    return {**new, **news}


@given(documents(), documents())
def test_changes_make_the_new_document_of_the_old_one(old, new):
    assert applied(None, changes(None, new)) == new
    assert applied(old, changes(old, new)) == new
    assert changes(new, copy.deepcopy(new)) == {"skills": []}
