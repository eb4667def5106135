"""What a page is told of a change."""

from __future__ import annotations

import copy

from hypothesis import given
from hypothesis import strategies as st

from flowrl.serving.events import changes


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
