"""Programs kept between processes: found on the shelf, they are neither traced nor lowered again.

JAX's cache spares a process the compiling of a program, but not the tracing: to ask the cache, the
program must be there, and with it all that it is traced from, for instance Craftax. So a program is
also exported (`jax.export`: StableHLO in a flatbuffer, nothing pickled) and kept in the cache's
folder, under a digest of everything that goes into it. Whoever finds it there loads the executable
without knowing what it does.

Programs take and give trees of arrays. On the way out only what is registered (`known`) keeps its
form; any other node, such as Craftax's state, comes out as the tuple of its leaves. On the way in
leaves are all that counts.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export
from jax.stages import Lowered

from flowrl import storage
from flowrl.compiling import once
from flowrl.compiling.line import Line
from flowrl.compiling.sources import digest_of_sources
from flowrl.errors import FileRefusedError

logger = logging.getLogger(__name__)
SUFFIX = ".program"
_FORMAT = 1
_LIMIT_BYTES = 64 * 2**20
_HEADER_BYTES = 2**16
_MOST_KEPT = 256
_MOST_LOADED = 32
_FULL = 3
_MOST_THREADS = 16
_line = Line()  # for tracing: that is Python, and two threads at it only hinder each other
_known: set[type] = set()
_begun: dict[Path, Pending] = {}  # of this process, the newest last


class Draft(NamedTuple):
    """A program that can be made."""

    name: str
    function: Callable[..., Any]
    like: Callable[[], tuple[Any, ...]]  # the arguments, or their shapes; asked only to trace
    facts: Mapping[str, Any] = {}  # what is compiled in besides the shelf's own facts
    donate: tuple[int, ...] = ()  # arguments that are given up
    effort: int = _FULL  # LLVM's, 0 to 3: less is sooner compiled, and slower with the same results


def known(*kinds: type) -> None:
    """Let these NamedTuples leave programs as what they are."""
    for kind in kinds:
        if kind not in _known:
            export.register_namedtuple_serialization(
                kind, serialized_name=f"flowrl.{kind.__name__}"
            )
            _known.add(kind)


class Shelf:
    """Where programs are kept, and the threads that get them ready.

    Args:
      folder: None keeps nothing: programs are traced and compiled, as with `compiling.compiled`.
      facts: plain values; programs of other facts are other programs.
    """

    def __init__(self, folder: Path | None = None, facts: Mapping[str, Any] | None = None) -> None:
        self._folder = folder
        self._facts = dict(facts or {})
        self._threads: ThreadPoolExecutor | None = None

    def begin(self, draft: Draft) -> Callable[..., Any]:
        """The program, got ready in a thread; whoever calls it first waits until it is.

        A process gets each program ready once, for all its runs.
        """
        if self._folder is None:
            return self.ready(draft)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="program")
        path = self._path(self._folder, draft)
        before = _begun.get(path)
        if before is None or before.failed:
            place = _line.join()  # here and not in the thread, so that those begun first come first
            _begun[path] = Pending(self._threads.submit(_got, path, draft, place))
        for oldest in list(_begun)[:-_MOST_LOADED]:
            del _begun[oldest]
        return _begun[path]

    def ready(self, draft: Draft) -> Callable[..., Any]:
        """The program: of the shelf, or made now and put there.

        Raises:
          FlowrlError: as the function does while it is traced.
        """
        if self._folder is None:
            with _line.turn(_line.join()):
                traced = jax.jit(draft.function, donate_argnums=draft.donate).trace(*draft.like())
            return once.compiled(traced, _options(draft))
        return _got(self._path(self._folder, draft), draft, _line.join())

    def _path(self, folder: Path, draft: Draft) -> Path:
        facts = {
            "format": _FORMAT,
            "name": draft.name,
            "facts": {**self._facts, **draft.facts},
            "donate": draft.donate,
            "effort": draft.effort,
            "sources": digest_of_sources(),
            "machine": _machine(),
        }
        text = json.dumps(facts, sort_keys=True)
        return folder / f"{draft.name}-{hashlib.sha256(text.encode()).hexdigest()}{SUFFIX}"


class Pending:
    """A program that a thread is getting ready."""

    def __init__(self, program: Future[Callable[..., Any]]) -> None:
        self._program = program

    def __call__(self, *args: Any) -> Any:
        """Call the program, once it is ready."""
        return self._program.result()(*args)

    @property
    def failed(self) -> bool:
        """Whether it could not be got ready."""
        return self._program.done() and self._program.exception() is not None

    def wait(self) -> None:
        """Until the program is ready; raises what stood in the way."""
        self._program.result()


def _got(path: Path, draft: Draft, place: int) -> Callable[..., Any]:
    """The program of a draft that has this place in line."""
    try:
        found = _read(path)
        if found is None:
            return _found_or_made(path, draft, place)
        with _line.turn(place):
            lowered = _lowered(*found)
        return _compiled(lowered, draft)
    finally:
        _line.leave(place)


def _found_or_made(path: Path, draft: Draft, place: int) -> Callable[..., Any]:
    """The program, made now if it is not there when its lock is free."""
    with once.one_at_a_time(path.parent, path.name, before_waiting=partial(_line.leave, place)):
        found = _read(path)  # by whoever had the lock before
        with _line.turn(place):
            made = _exported(draft) if found is None else found
            lowered = _lowered(*made)
        program = _compiled(lowered, draft)
        if found is None:
            _keep(path, *made)  # after compiling: what is on the shelf is in JAX's cache, too
        return program


def _exported(draft: Draft) -> tuple[bytes, list[int]]:
    """The program as bytes, and which of its leaves are given up."""
    like = draft.like()
    leaves, tree = jax.tree.flatten(like)

    def flat(*leaves: Any) -> Any:
        return _plain(draft.function(*jax.tree.unflatten(tree, leaves)))

    shapes = [jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf)) for leaf in leaves]
    whole = export.export(jax.jit(flat))(*shapes)
    ends = np.cumsum([0, *(len(jax.tree.leaves(part)) for part in like)])
    given_up = [leaf for part in draft.donate for leaf in range(ends[part], ends[part + 1])]
    return bytes(whole.serialize()), [int(leaf) for leaf in given_up]


def _lowered(blob: bytes, given_up: list[int]) -> Lowered:
    """An exported program, as XLA takes it."""
    whole = export.deserialize(bytearray(blob))
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in whole.in_avals]
    return jax.jit(whole.call, donate_argnums=tuple(given_up)).lower(*shapes)


def _compiled(lowered: Lowered, draft: Draft) -> Callable[..., Any]:
    """The executable, of JAX's cache or made now."""
    executable = lowered.compile(_options(draft))
    return lambda *args: executable(*jax.tree.leaves(args))


def _options(draft: Draft) -> dict[str, Any] | None:
    """What XLA is told about compiling it."""
    if draft.effort == _FULL or jax.default_backend() != "cpu":  # elsewhere it means other things
        return None
    return {"xla_backend_optimization_level": draft.effort}


def _plain(node: Any) -> Any:
    """The same tree, with tuples of leaves for the nodes that are not known."""
    if type(node) in _known:
        return type(node)(*map(_plain, node))
    if type(node) is dict:
        return {key: _plain(value) for key, value in node.items()}
    if type(node) in (tuple, list):
        return type(node)(map(_plain, node))
    leaves = jax.tree.leaves(node)
    return node if len(leaves) == 1 and leaves[0] is node else tuple(leaves)


def _keep(path: Path, blob: bytes, given_up: list[int]) -> None:
    """Put a program on the shelf; where that cannot be, the next process makes it again."""
    header = {"format": _FORMAT, "sha256": hashlib.sha256(blob).hexdigest(), "donated": given_up}
    try:
        storage.make_dir(path.parent)
        storage.write_atomic(path, json.dumps(header).encode() + b"\n" + blob)
        _thin_out(path.parent)
    except OSError as error:
        logger.warning("the program %s cannot be kept: %s", path.name, error)


def _read(path: Path) -> tuple[bytes, list[int]] | None:
    """A program of the shelf; None when it is not there, or not what was put there."""
    if not path.exists():
        return None
    try:
        content = storage.read_bytes(path, limit_bytes=_LIMIT_BYTES)
        line, _, blob = content.partition(b"\n")
        return blob, _given_up(path, line[:_HEADER_BYTES], blob)
    except FileRefusedError as error:
        logger.warning("%s; the program is made anew", error)
        return None


def _given_up(path: Path, line: bytes, blob: bytes) -> list[int]:
    try:
        header = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FileRefusedError(f"{path} has no header: {error}") from error
    wanted = {"format": _FORMAT, "sha256": hashlib.sha256(blob).hexdigest()}
    if not isinstance(header, dict) or {key: header.get(key) for key in wanted} != wanted:
        raise FileRefusedError(f"{path} is damaged or of another version")
    given_up = header.get("donated")
    if not isinstance(given_up, list) or any(type(leaf) is not int for leaf in given_up):
        raise FileRefusedError(f"{path} does not say what it takes")
    return given_up


def _thin_out(folder: Path) -> None:
    """Remove the programs that were put there longest ago, if there are very many."""
    times: dict[Path, float] = {}
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(FileNotFoundError):  # another process thins them out, too
            times[path] = path.lstat().st_mtime
    for path in sorted(times, key=times.__getitem__)[:-_MOST_KEPT]:
        storage.remove_file(path)


def _machine() -> dict[str, Any]:
    """What programs are made for: the devices, and how JAX is set."""
    devices = jax.devices()
    settings = {
        name: value
        for name, value in jax.config.values.items()
        if "cache" not in name and isinstance(value, bool | int | float | str | None)
    }
    return {
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": len(devices),
        "settings": settings,
    }
