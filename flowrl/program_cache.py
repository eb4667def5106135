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
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax import export
from jax.sharding import Sharding, SingleDeviceSharding

from flowrl import storage
from flowrl.errors import BusyError, FileRefusedError
from flowrl.storage import locks

if TYPE_CHECKING:
    from jaxlib._jax import Device  # jax.Device is no type to a checker
else:
    Device = jax.Device

logger = logging.getLogger(__name__)
SUFFIX = ".program"
_LIBRARIES = ("jax", "jaxlib", "numpy", "optax", "flax")  # that change what a program computes
_LIMIT_BYTES = 64 * 2**20
_WAIT_SECONDS = 300.0
_threads = ThreadPoolExecutor(16, thread_name_prefix="program")
_tracing = threading.Lock()  # tracing is Python, and two threads at it only hinder each other
_result_types: set[type] = set()


@functools.cache
def digest_of_sources() -> str:
    """sha256 over our own modules, the versions of the libraries and XLA_FLAGS.

    A cache has a game's code, and a program's number of host devices, in its key.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if "force_host_platform_device_count" not in flag]
    total = hashlib.sha256(f"{sys.version}\n{' '.join(flags)}\n".encode())
    for library in _LIBRARIES:
        total.update(f"{library} {version(library)}\n".encode())
    package = Path(__file__).parent
    for path in sorted(package.rglob("*.py")):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(package)} {content}\n".encode())
    return total.hexdigest()


class ProgramSpec(NamedTuple):
    """A program that can be made.

    `key` holds plain values that are compiled in, besides those of the cache. `arguments` returns
    the arguments or their shapes; it is called only to trace. The arguments `donate` are given up.
    `shardings` says for each argument how it lies on several devices; () is one device.
    """

    name: str
    function: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    key: Mapping[str, Any] = {}
    donate: tuple[int, ...] = ()
    shardings: tuple[Sharding, ...] = ()


def register_results(*types: type) -> None:
    """Let these NamedTuples keep their type in the results of programs."""
    for kind in types:
        export.register_namedtuple_serialization(kind, serialized_name=f"flowrl.{kind.__name__}")
        _result_types.add(kind)


class Program:
    """A compiled program, or one that a thread is still loading or compiling."""

    def __init__(self, executable: Future[Callable[..., Any]]) -> None:
        self._executable = executable

    def __call__(self, *args: Any) -> Any:
        """Call the program as soon as it is ready."""
        return self._executable.result()(*map(_leaves, args))

    def wait(self) -> None:
        """Wait until the program is ready; raises what prevented that."""
        self._executable.result()


class ProgramOnEach:
    """One program, compiled for several devices; a call runs where its last argument lies."""

    def __init__(self, programs: Mapping[Device, Callable[..., Any]]) -> None:
        self._programs = programs

    def __call__(self, *args: Any) -> Any:
        """Call the program of the device on which the last argument lies."""
        (device,) = jax.tree.leaves(args[-1])[0].devices()
        return self._programs[device](*args)

    def wait(self) -> None:
        """Wait until the programs are ready; raises what prevented that."""
        for program in self._programs.values():
            if isinstance(program, Program):
                program.wait()


class ProgramCache:
    """Loads kept programs, and makes and keeps those that are missing.

    Args:
      folder: None keeps nothing: programs are jitted functions, compiled at their first call.
      key: plain values that are compiled into every program of this cache.
      device: of programs that lie on one device; None is JAX's default.
    """

    def __init__(
        self,
        folder: Path | None = None,
        key: Mapping[str, Any] | None = None,
        device: Device | None = None,
    ) -> None:
        self._folder = folder
        self._key = dict(key or {})
        self._device = device

    def on(self, device: Device) -> ProgramCache:
        """The same programs on another device."""
        return ProgramCache(self._folder, self._key, device)

    def begin(self, spec: ProgramSpec) -> Callable[..., Any]:
        """The program, loaded or compiled in a thread; its first call waits until it is ready."""
        if self._folder is None:
            return jax.jit(spec.function, donate_argnums=spec.donate)
        path = self.path(self._folder, spec)
        return Program(_threads.submit(_load_or_make, path, spec, self._device))

    def path(self, folder: Path, spec: ProgramSpec) -> Path:
        """Return the file of a program: its name and a digest of everything that goes into it."""
        settings = {
            name: value
            for name, value in jax.config.values.items()
            if "cache" not in name and isinstance(value, bool | int | float | str | None)
        }
        key = {
            "key": {**self._key, **spec.key},
            "donate": spec.donate,
            "sources": digest_of_sources(),
            "devices": _kinds_of_devices(spec),
            "settings": settings,
        }
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return folder / f"{spec.name}-{digest}{SUFFIX}"


def _kinds_of_devices(spec: ProgramSpec) -> list[str]:
    devices = set().union(*(sharding.device_set for sharding in spec.shardings))
    return [device.device_kind for device in devices or jax.devices()[:1]]


def _load_or_make(path: Path, spec: ProgramSpec, device: Device | None) -> Callable[..., Any]:
    """The executable of a kept program, or of one that is made and kept now."""
    if path.exists():
        return _load_or_make_now(path, spec, device)
    # One process at a time makes a program; one that has waited too long makes it, too.
    with (
        suppress(BusyError),
        locks.held(path.parent / "locks" / path.name, timeout_seconds=_WAIT_SECONDS),
    ):
        return _load_or_make_now(path, spec, device)
    return _load_or_make_now(path, spec, device)


def _load_or_make_now(path: Path, spec: ProgramSpec, device: Device | None) -> Callable[..., Any]:
    kept = _read(path)
    with _tracing:
        content = _export(spec) if kept is None else kept
        whole = export.deserialize(bytearray(content))
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in whole.in_avals]
        args, _ = jax.tree.unflatten(whole.in_tree, shapes)
        placed: dict[str, Any] = {"in_shardings": spec.shardings or None}
        if device is not None and not spec.shardings:
            placed = dict.fromkeys(("in_shardings", "out_shardings"), SingleDeviceSharding(device))
        jitted = jax.jit(whole.call, donate_argnums=spec.donate, **placed)
        lowered = jitted.lower(*args)
    executable = lowered.compile()
    if kept is None:
        _keep(path, content)  # after compiling: what is kept is in JAX's cache, too
    return executable


def _export(spec: ProgramSpec) -> bytes:
    """The program of the arguments' leaves, as StableHLO."""
    arguments = spec.arguments()
    tree = jax.tree.structure(arguments)

    def of_leaves(*arguments: tuple[Any, ...]) -> Any:
        return _plain(spec.function(*jax.tree.unflatten(tree, jax.tree.leaves(arguments))))

    def like(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf))

    shapes = jax.tree.map(like, tuple(map(_leaves, arguments)))
    jitted = jax.jit(of_leaves, in_shardings=spec.shardings or None)
    return bytes(export.export(jitted)(*shapes).serialize())


def _leaves(tree: Any) -> tuple[Any, ...]:
    return tuple(jax.tree.leaves(tree))


def _plain(node: Any) -> Any:
    """The same tree, with tuples of leaves for the nodes of types that are not registered."""
    if type(node) in _result_types:
        return type(node)(*map(_plain, node))
    if type(node) is dict:
        return {key: _plain(value) for key, value in node.items()}
    if type(node) in (tuple, list):
        return type(node)(map(_plain, node))
    leaves = _leaves(node)
    return node if len(leaves) == 1 and leaves[0] is node else leaves


def _keep(path: Path, content: bytes) -> None:
    """Write a program below its digest; if that fails, the next process makes it again."""
    try:
        storage.make_dir(path.parent)
        storage.write_atomic(path, hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
    except OSError as error:
        logger.warning("the program %s cannot be kept: %s", path.name, error)


def _read(path: Path) -> bytes | None:
    """A kept program; None if it is missing or damaged."""
    if not path.exists():
        return None
    with suppress(FileRefusedError):
        digest, _, content = storage.read_bytes(path, limit_bytes=_LIMIT_BYTES).partition(b"\n")
        if digest == hashlib.sha256(content).hexdigest().encode():
            return content
    logger.warning("%s is damaged; the program is made again", path)
    return None
