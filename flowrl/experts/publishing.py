"""New versions of experts in their places, before the manifest names them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flowrl import storage
from flowrl.experts.wholeness import refuse_other
from flowrl.runs import ExpertVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A version that is to count, and the folder of its files."""

    version: ExpertVersion
    final: Path
    source: Path
    is_copy: bool  # the source is durable, checked and ours to move; else it is copied


def publish(run_id: str, taken: Collection[Taken]) -> None:
    """Give each version its folder; nothing is durable before `to_flush` is flushed."""
    prepared = {one.final: one.final.with_name(f".tmp-{run_id}") for one in taken}
    for left in (*prepared.values(), *prepared):  # of a merge that was killed before its swap
        storage.remove_tree(left)
    for one in taken:
        storage.make_dir(one.final.parent, durable=False)
    copied = [one for one in taken if not one.is_copy]
    found = storage.copy_trees({prepared[one.final]: one.source for one in copied}, durable=False)
    for one in copied:
        refuse_other(found[prepared[one.final]], prepared[one.final], one.version)
    storage.fault_point("commit.copied")
    copies = {one.final: one.source for one in taken if one.is_copy}
    storage.move_dirs({**prepared, **copies}, durable=False)
    storage.fault_point("commit.published")


def to_flush(taken: Collection[Taken]) -> Iterator[Path]:
    """What makes the versions durable, with their names up to the graph's folder."""
    for one in taken:
        yield from (one.final,) if one.is_copy else storage.everything(one.final)
    yield from {home for one in taken for home in one.final.parents[:4]}


def withdraw(taken: Collection[Taken]) -> None:
    """Give a full disk its room back; what cannot be removed is garbage."""
    for one in taken:
        with suppress(OSError):
            storage.remove_tree(one.final)
