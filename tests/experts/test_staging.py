from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl import storage
from flowrl.experts.merge import FrameRule
from flowrl.experts.staging import Staging
from flowrl.experts.store import ExpertStore, Offer
from flowrl.paths import GraphPaths
from tests.experts.making import content_of, make_expert, offer

RUN = "e0.a1.0f"


@pytest.fixture
def layout(tmp_path) -> GraphPaths:
    return GraphPaths(tmp_path / "graph")


def offer_of(source: Path, copy: Path | None) -> Offer:
    return replace(offer(source, expert=0, acted=10), copy=copy)


def staged(layout: GraphPaths) -> list[str]:
    return sorted(path.name for path in layout.checkpoints.glob(".tmp-*"))


def test_copies_have_the_digest_of_what_they_are_of_and_go_with_the_block(layout, tmp_path):
    one, other = (make_expert(tmp_path / name, name) for name in ("one", "other"))
    with Staging(layout, RUN) as staging:
        digests = staging.digests([one, other])
        assert digests == {path: storage.tree_digest(path) for path in (one, other)}
        copy = staging.copy_of(one)
        assert copy is not None
        (one / "arrays" / "d0").write_text("changed by a process that was left behind")
        assert content_of(copy) == "one"
        assert len(staged(layout)) == 1
    assert not staged(layout)


def test_what_cannot_be_copied_is_left_to_the_merge(layout, tmp_path, monkeypatch):
    source = make_expert(tmp_path / "one", "one")
    linked = make_expert(tmp_path / "linked", "linked")
    (linked / "link").symlink_to("d0")
    with Staging(layout, RUN) as staging:
        assert staging.digests([source, linked]) == {}
        assert staging.copy_of(source) is None
        assert not staged(layout)
        monkeypatch.setattr(os, "fsync", full)
        assert staging.digests([source]) == {}
        assert not staged(layout)


def test_nothing_is_copied_that_is_not_wanted(layout, tmp_path):
    with Staging(layout, RUN, wanted=False) as staging:
        assert staging.digests([make_expert(tmp_path / "one", "one")]) == {}
    assert not layout.root.exists()


def test_what_a_killed_merge_has_copied_is_swept_by_the_next_start(layout, tmp_path):
    staging = Staging(layout, RUN)
    staging.digests([make_expert(tmp_path / "one", "one")])
    assert staged(layout)
    ExpertStore(layout).recover()
    assert not staged(layout)


def test_a_copy_becomes_the_version_itself(layout, tmp_path):
    source = make_expert(tmp_path / "one", "one")
    with Staging(layout, RUN) as staging:
        staging.digests([source])
        copy = staging.copy_of(source)
        assert copy is not None
        inode = (copy / "arrays" / "d0").stat().st_ino
        done = ExpertStore(layout).commit(RUN, [offer_of(source, copy)], policy=FrameRule())
    version = ExpertStore(layout).verify(done.manifest.experts[0])
    assert (version / "arrays" / "d0").stat().st_ino == inode
    assert source.is_dir()


def test_a_merge_that_is_given_up_leaves_no_copy(layout, tmp_path, monkeypatch):
    source = make_expert(tmp_path / "one", "one")
    with Staging(layout, RUN) as staging:
        staging.digests([source])
        monkeypatch.setenv("FLOWRL_FAULT", "commit.copied:enospc")
        offers = [offer_of(source, staging.copy_of(source))]
        with pytest.raises(OSError, match="No space"):
            ExpertStore(layout).commit(RUN, offers, policy=FrameRule())
    assert not staged(layout)
    assert ExpertStore(layout).manifest().experts == {}


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")
