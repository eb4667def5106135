"""What a page is told of a change."""

from __future__ import annotations

import asyncio
import copy
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.serving import events
from flowrl.serving.events import GraphWatch, changes
from tests.commands.making import DONE, WAITING, save


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


@pytest.mark.parametrize(("age_seconds", "is_read"), [(0, False), (100, True), (-60, True)])
def test_a_change_is_read_once_it_has_settled(tmp_path, monkeypatch, age_seconds, is_read):
    """A hand-over comes before its page; a file of a host whose clock is ahead is read at once."""
    monkeypatch.setattr(events, "_SETTLE_SECONDS", 60.0)
    graph_paths = save(tmp_path, ("A", WAITING))
    watch = GraphWatch(tmp_path)

    def told():
        watch._due = 0.0
        return [row["status"] for row in asyncio.run(watch.newest())["skills"]]

    assert told() == ["waiting"]  # the first look waits for nothing
    save(tmp_path, ("A", DONE))
    changed = time.time() - age_seconds
    os.utime(graph_paths.scheduler_state, (changed, changed))
    assert told() == ["completed" if is_read else "waiting"]
    os.utime(graph_paths.scheduler_state, (changed - 200, changed - 200))
    assert told() == ["completed"]
