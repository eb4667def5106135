"""Small real experts and graphs for the tests of this room and of `parallel`."""

from __future__ import annotations

import hashlib
from pathlib import Path

from flowrl import durable
from flowrl.experts.merge import Candidate, ExpertVersion
from flowrl.experts.store import ExpertStore, Offer
from flowrl.layout import GraphLayout
from flowrl.models.shapes import env_sizes, expert_shapes
from flowrl.runs import Ancestor

SHAPES = expert_shapes(*env_sizes("Craftax-Classic-Symbolic-v1"), 64)


def skill_name(expert: int) -> str:
    return f"Skill {expert}"


def make_expert(folder: Path, content: str) -> Path:
    """A folder that stands for an expert's checkpoint: a few files, one of them nested."""
    (folder / "arrays").mkdir(parents=True)
    (folder / "_METADATA").write_text("{}")
    (folder / "arrays" / "d0").write_text(content)
    return folder


def content_of(folder: Path) -> str:
    return (folder / "arrays" / "d0").read_text()


def content_digest(folder: Path) -> str:
    """Stands for the digest of the arrays, which are the folder's files here."""
    return hashlib.sha256(durable.tree_digest(folder).encode()).hexdigest()


def ancestor_of(version: ExpertVersion) -> Ancestor:
    return Ancestor(
        expert=version.index,
        skill=version.skill,
        version=version.version,
        frames=version.frames,
        sha256=version.sha256,
        content=version.content,
    )


def offer(
    folder: Path,
    expert: int,
    acted: int,
    ancestor: Ancestor | None = None,
    *,
    content: str | None = None,
) -> Offer:
    """The folder's expert, offered as the fruit of a run of `acted` steps."""
    return Offer(
        candidate=Candidate(
            expert=expert,
            skill=skill_name(expert),
            ancestor=ancestor,
            acted=acted,
            total=acted,
            sha256=durable.tree_digest(folder),
            content=content_digest(folder) if content is None else content,
            shapes=SHAPES,
        ),
        folder=folder,
    )


def contents(layout: GraphLayout) -> dict[int, tuple[int, str]]:
    """What a reader finds: frames and content of every expert, each verified."""
    store = ExpertStore(layout)
    return {
        version.index: (version.frames, content_of(store.verify(version)))
        for version in store.manifest().experts.values()
    }


def all_files(root: Path) -> dict[str, bytes]:
    """Every file below `root`, except lock files."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.suffix != ".lock"
    }
