"""Compiled programs kept between processes: a kept program is neither traced nor lowered again.

JAX's persistent cache saves a process the compiling of a program, but not the tracing: to ask that
cache, the program must be there, and with it everything it is traced from, for instance Craftax.
So programs are also exported (`jax.export`: StableHLO in a flatbuffer, nothing pickled) and kept in
a folder, each under a digest of everything that goes into it.

Programs take and return trees of arrays. In a result only the registered NamedTuples
(`register_results`) keep their type; any other node, such as Craftax's state, is returned as the
tuple of its leaves. Of an argument only the leaves count.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export
from jax.stages import Lowered

from flowrl import storage
from flowrl.errors import BusyError, FileRefusedError
from flowrl.storage import locks

logger = logging.getLogger(__name__)
SUFFIX = ".program"
_LIMIT_BYTES = 64 * 2**20
_MOST_KEPT = 256
_MOST_LOADED = 32
_MOST_THREADS = 16
_WAIT_SECONDS = 300.0
_OURS = ("envs", "evaluate.py", "games", "networks", "ppo", "program_cache.py", "skills")
_LIBRARIES = ("jax", "jaxlib", "numpy", "optax", "flax")
# Tracing is Python, and two threads at it only hinder each other; one thread takes them in order.
_tracer = ThreadPoolExecutor(1, thread_name_prefix="tracing")
_threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="program")
_programs: dict[Path, Program] = {}  # of this process, the newest last
_result_types: set[type] = set()


class ProgramSpec(NamedTuple):
    """A program that can be made.

    `key` holds plain values that are compiled in, besides those of the cache. `arguments` returns
    the arguments or their shapes; it is called only to trace. The arguments `donate` are given up.
    """

    name: str
    function: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    key: Mapping[str, Any] = {}
    donate: tuple[int, ...] = ()


class Exported(NamedTuple):
    """A program as it is kept: StableHLO, and the numbers of the argument leaves it gives up."""

    content: bytes
    donated: tuple[int, ...]


def register_results(*types: type) -> None:
    """Let these NamedTuples keep their type in the results of programs."""
    for kind in types:
        if kind not in _result_types:
            name = f"flowrl.{kind.__name__}"
            export.register_namedtuple_serialization(kind, serialized_name=name)
            _result_types.add(kind)


class Program:
    """A compiled program, or one that a thread is still loading or compiling."""

    def __init__(self, executable: Future[Callable[..., Any]]) -> None:
        self._executable = executable

    def __call__(self, *args: Any) -> Any:
        """Call the program as soon as it is ready."""
        return self._executable.result()(*args)

    @property
    def failed(self) -> bool:
        """Whether it could be neither loaded nor compiled."""
        return self._executable.done() and self._executable.exception() is not None

    def wait(self) -> None:
        """Wait until the program is ready; raises what prevented that."""
        self._executable.result()


class ProgramCache:
    """Loads kept programs, and makes and keeps those that are missing.

    Args:
      folder: None keeps nothing: programs are jitted functions, compiled at their first call.
      key: plain values that are compiled into every program of this cache.
    """

    def __init__(self, folder: Path | None = None, key: Mapping[str, Any] | None = None) -> None:
        self._folder = folder
        self._key = dict(key or {})

    def begin(self, spec: ProgramSpec) -> Callable[..., Any]:
        """The program, loaded or compiled in a thread; its first call waits until it is ready.

        A process loads or compiles each program once, for all its runs.
        """
        if self._folder is None:
            return jax.jit(spec.function, donate_argnums=spec.donate)
        path = self.path(self._folder, spec)
        if path not in _programs or _programs[path].failed:
            _programs[path] = Program(_threads.submit(_load_or_make, path, spec))
            for oldest in list(_programs)[:-_MOST_LOADED]:
                del _programs[oldest]
        return _programs[path]

    def path(self, folder: Path, spec: ProgramSpec) -> Path:
        """Where a program is kept: its name and a digest of everything that goes into it."""
        key = {
            "key": {**self._key, **spec.key},
            "donate": spec.donate,
            "sources": digest_of_sources(),
            "machine": _machine(),
        }
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return folder / f"{spec.name}-{digest}{SUFFIX}"


@functools.cache
def digest_of_sources() -> str:
    """sha256 over our own modules, the versions of the libraries and XLA_FLAGS.

    A game's code is no part of it: a cache has that in its key.
    """
    package = Path(__file__).parent
    total = hashlib.sha256(f"{sys.version}\n{os.environ.get('XLA_FLAGS', '')}\n".encode())
    for library in _LIBRARIES:
        total.update(f"{library} {version(library)}\n".encode())
    for place in (package / name for name in _OURS):
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{path.relative_to(place.parent)} {content}\n".encode())
    return total.hexdigest()


def _machine() -> dict[str, Any]:
    """What programs are compiled for: the devices, and JAX's settings."""
    devices = jax.devices()
    settings = {
        name: value
        for name, value in jax.config.values.items()
        if "cache" not in name and isinstance(value, bool | int | float | str | None)
    }
    return {"device": devices[0].device_kind, "devices": len(devices), "settings": settings}


def _load_or_make(path: Path, spec: ProgramSpec) -> Callable[..., Any]:
    """The executable of a kept program, or of one that is made and kept now."""
    kept = _read(path)
    if kept is not None:
        return _executable(_tracer.submit(_lower, kept).result())
    with _one_process(path):
        kept = _read(path)  # kept by the process that had the lock before
        exported, lowered = _tracer.submit(_trace, spec, kept).result()
        executable = _executable(lowered)
        if kept is None:
            _keep(path, exported)  # after compiling: what is kept is in JAX's cache, too
        return executable


@contextmanager
def _one_process(path: Path) -> Iterator[None]:
    """Let one process at a time make a program; one that has waited too long makes it, too."""
    with ExitStack() as stack:
        with suppress(BusyError):
            lock = locks.held(path.parent / "locks" / path.name, timeout_seconds=_WAIT_SECONDS)
            stack.enter_context(lock)
        yield


def _trace(spec: ProgramSpec, kept: Exported | None) -> tuple[Exported, Lowered]:
    exported = _export(spec) if kept is None else kept
    return exported, _lower(exported)


def _export(spec: ProgramSpec) -> Exported:
    arguments = spec.arguments()
    leaves, tree = jax.tree.flatten(arguments)

    def of_leaves(*leaves: Any) -> Any:
        return _plain(spec.function(*jax.tree.unflatten(tree, leaves)))

    shapes = [jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf)) for leaf in leaves]
    whole = export.export(jax.jit(of_leaves))(*shapes)
    ends = np.cumsum([0, *(len(jax.tree.leaves(argument)) for argument in arguments)]).tolist()
    donated = [leaf for number in spec.donate for leaf in range(ends[number], ends[number + 1])]
    return Exported(bytes(whole.serialize()), tuple(donated))


def _plain(node: Any) -> Any:
    """The same tree, with tuples of leaves for the nodes of types that are not registered."""
    if type(node) in _result_types:
        return type(node)(*map(_plain, node))
    if type(node) is dict:
        return {key: _plain(value) for key, value in node.items()}
    if type(node) in (tuple, list):
        return type(node)(map(_plain, node))
    leaves = jax.tree.leaves(node)
    return node if len(leaves) == 1 and leaves[0] is node else tuple(leaves)


def _lower(exported: Exported) -> Lowered:
    whole = export.deserialize(bytearray(exported.content))
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in whole.in_avals]
    return jax.jit(whole.call, donate_argnums=exported.donated).lower(*shapes)


def _executable(lowered: Lowered) -> Callable[..., Any]:
    """The executable, from JAX's cache or compiled now."""
    executable = lowered.compile()
    return lambda *args: executable(*jax.tree.leaves(args))


def _keep(path: Path, exported: Exported) -> None:
    """Write a program; if that fails, the next process makes it again."""
    body = json.dumps(exported.donated).encode() + b"\n" + exported.content
    try:
        storage.make_dir(path.parent)
        storage.write_atomic(path, hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        _remove_oldest(path.parent)
    except OSError as error:
        logger.warning("the program %s cannot be kept: %s", path.name, error)


def _read(path: Path) -> Exported | None:
    """A kept program; None if it is missing or damaged."""
    if not path.exists():
        return None
    try:
        digest, _, body = storage.read_bytes(path, limit_bytes=_LIMIT_BYTES).partition(b"\n")
        if digest != hashlib.sha256(body).hexdigest().encode():
            raise FileRefusedError(f"{path} is damaged")
    except FileRefusedError as error:
        logger.warning("%s; the program is made again", error)
        return None
    donated, _, content = body.partition(b"\n")
    return Exported(content, tuple(json.loads(donated)))


def _remove_oldest(folder: Path) -> None:
    with suppress(FileNotFoundError):  # another process removes them, too
        paths = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.lstat().st_mtime)
        for path in paths[:-_MOST_KEPT]:
            storage.remove_file(path)
