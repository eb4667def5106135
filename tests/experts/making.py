"""Small real experts and graphs for the tests of this room and of `parallel`."""

from __future__ import annotations

import hashlib
import shutil
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from flowrl import storage
from flowrl.experts import array_check
from flowrl.experts.array_check import ArrayReport
from flowrl.experts.merge import Candidate
from flowrl.experts.store import ExpertStore
from flowrl.games.craftax import CLASSIC
from flowrl.paths import GraphPaths
from flowrl.runs import ExpertVersion, Shapes, expert_shapes

SHAPES = expert_shapes(CLASSIC.observed(sight=True, egocentric=True), CLASSIC.num_actions, 64)


def skill_name(expert: int) -> str:
    return f"Skill {expert}"


STAND_IN = Path(__file__).parents[1] / "data" / "stand_in_expert"
MARKED = "actor/dense_3/bias"  # all other leaves of a stand-in are zero
MARK = b"FLOWRL-STAND-IN-" * 4 + b"****"


def make_expert(folder: Path, content: str, values: tuple[float, ...] | None = None) -> Path:
    """A real Orbax checkpoint of `SHAPES` that says `content`, or holds `values`; in a millisecond.

    Its one leaf that is not zero stands uncompressed in a tree node with a checksum at its end.
    """
    shutil.copytree(STAND_IN, folder)
    (node,) = (folder / "arrays").iterdir()
    node.write_bytes(_marked_with(node.read_bytes(), _bytes(content, values)))
    (folder / "arrays" / "d0").write_text(content)
    return folder


def random_expert(seed: int, shapes: Shapes = SHAPES) -> dict:
    """The arrays of an expert, of which every bit is told by the seed."""
    import numpy as np  # stand-in trainers need none of these
    from flax.traverse_util import unflatten_dict

    luck = np.random.default_rng(seed)
    leaves = {path: luck.standard_normal(shape).astype("f4") for path, shape in shapes.items()}
    return unflatten_dict(leaves, sep="/")


def content_of(folder: Path) -> str:
    return (folder / "arrays" / "d0").read_text()


def content_digest(folder: Path) -> str:
    """The digest of the arrays of what `make_expert` made, as `checkpoint.array_digest` says.

    For any other folder it is a word for its files.
    """
    if not _is_stand_in(folder):
        return hashlib.sha256(storage.tree_digest(folder).encode()).hexdigest()
    total = hashlib.sha256()
    for leaf, shape in sorted(SHAPES.items()):
        total.update(f"{leaf}\0<f4\0{shape}\n".encode())
        total.update(_marked(folder) if leaf == MARKED else bytes(4 * _size(shape)))
    return total.hexdigest()


def digest_of_arrays(folder: Path) -> str:
    """The digest of the arrays in a checkpoint of `SHAPES` that Orbax wrote."""
    from flowrl.experts import checkpoint

    return checkpoint.array_digest(checkpoint.load_expert(folder, checkpoint.like_of(SHAPES)))


_known: dict[str, ArrayReport] = {}
_read_by_a_child = array_check.read_arrays


def tell_arrays(folder: Path) -> None:
    """Let this process know the arrays of a stand-in, so that no reader is started for them."""
    if not _is_stand_in(folder):
        return
    array_check.read_arrays = _read_what_is_unknown
    _known[storage.tree_digest(folder)] = ArrayReport(content=content_digest(folder))


def _read_what_is_unknown(folders: Sequence[Path], expected: Shapes) -> tuple[ArrayReport, ...]:
    digests = [storage.tree_digest(folder) for folder in folders]
    if expected == SHAPES and _known.keys() >= set(digests):
        return tuple(_known[digest] for digest in digests)
    return _read_by_a_child(folders, expected)


def is_whole(folder: Path) -> bool:
    """True for a stand-in that has each byte as `make_expert` makes it."""
    files, made = all_files(folder), all_files(STAND_IN)
    if files.keys() != {*made, "arrays/d0"}:
        return False
    (node,) = (name for name in made if name.startswith("arrays/"))
    made[node] = _marked_with(made[node], _marked(folder))
    return files.items() >= made.items()


def _is_stand_in(folder: Path) -> bool:
    return (folder / "arrays" / "d0").exists()


def _marked(folder: Path) -> bytes:
    (node,) = (path for path in (folder / "arrays").iterdir() if path.name != "d0")
    place = (STAND_IN / "arrays" / node.name).read_bytes().index(MARK)
    return node.read_bytes()[place : place + len(MARK)]


def _marked_with(node: bytes, values: bytes) -> bytes:
    raw = node.replace(MARK, values)[:-4]
    return raw + struct.pack("<I", crc32c(raw))


def _bytes(content: str, values: tuple[float, ...] | None) -> bytes:
    """Seventeen small floats that are the content's own, or as many copies as fit of `values`."""
    if values is None:
        digest = hashlib.sha512(content.encode()).digest()
        values = tuple(number / 2**16 for number in struct.unpack("<32H", digest)[:17])
    return struct.pack("<17f", *(values * 17)[:17])


def _size(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


@cache
def _crc_table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [(word >> 1) ^ (0x82F63B78 if word & 1 else 0) for word in table]
    return table


def crc32c(data: bytes) -> int:
    """The checksum of an OCDBT node."""
    table, word = _crc_table(), 0xFFFFFFFF
    for byte in data:
        word = table[(word ^ byte) & 255] ^ (word >> 8)
    return word ^ 0xFFFFFFFF


def candidate_in(
    folder: Path,
    expert: int,
    acted: int,
    ancestor: ExpertVersion | None = None,
    *,
    content: str | None = None,
) -> Candidate:
    """The expert in a folder, as a run of `acted` steps brings it back."""
    return Candidate(
        expert=expert,
        skill=skill_name(expert),
        ancestor=ancestor,
        gained=acted,
        sha256=storage.tree_digest(folder),
        shapes=SHAPES,
        content=content_digest(folder) if content is None else content,
        folder=folder,
    )


def contents(graph_paths: GraphPaths) -> dict[int, tuple[int, str]]:
    """What a reader finds: frames and content of every expert, each verified."""
    store = ExpertStore(graph_paths)
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
