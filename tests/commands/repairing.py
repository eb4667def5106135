"""What the tests of fsck, rollback and recover share."""

from __future__ import annotations

from pathlib import Path

from flowrl import cli
from flowrl.experts import manifest as manifests
from flowrl.experts.store import ExpertStore
from flowrl.parallel.state import StateFile
from flowrl.paths import GraphPaths


def flowrl(capsys, *words) -> tuple[int, str]:
    """The exit code of a command, and what it said."""
    code = cli.main([str(word) for word in words])
    said = capsys.readouterr()
    return code, said.out + said.err


def fsck(capsys, graph_paths: GraphPaths, *flags: str) -> tuple[int, str]:
    return flowrl(capsys, "fsck", graph_paths.root, *flags)


def statuses(graph_paths: GraphPaths) -> dict[str, str]:
    state = StateFile(graph_paths.scheduler_state).load()
    assert state is not None
    return {entry.skill: entry.status.kind for entry in state.entries.values()}


def flip(path: Path, bit: int = 0) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1 << bit
    path.write_bytes(content)


def version_file(graph_paths: GraphPaths, expert: int, generation: int | None = None) -> Path:
    store = ExpertStore(graph_paths)
    known = store.manifest()
    if generation is not None:
        known = manifests.read_file(manifests.history_file(graph_paths, generation))
    return store.path_of(known.experts[expert]) / "arrays" / "d0"


def write_ahead(graph_paths: GraphPaths) -> None:
    present = ExpertStore(graph_paths).manifest()
    manifests.write_history(graph_paths, present.after("dead", {}))
