"""What the arrays of an expert's checkpoint are, without loading them here: a child reads them.

The child (`reader.py`) is the only program that imports tensorstore, which Orbax writes with. It
is a process of its own because the files come from a trainer: what makes the reader crash, hang or
take all memory harms nobody else, and whoever merges stays free of threads and of arrays. It is
started once and stays (`standing.py`); after what it could not read another one takes its place.
"""

from __future__ import annotations

import json
import math
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.arrays.standing import Ended, StandingReader
from flowrl.errors import BusyError, ExpertCorruptError
from flowrl.runs import Shapes

FLOAT = "<f4"  # the dtype of every leaf of an expert, as NumPy writes it
READER = Path(__file__).with_name("reader.py")
_SECONDS = 120.0
_MEMORY_BYTES = 8 * 2**30  # of address space: the libraries alone take more than a gigabyte
_ENDED_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT)
_REMEMBERED = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """What was read of one expert; `content` and `not_finite` are of leaves in the wanted form."""

    shapes: Shapes
    dtypes: Mapping[str, str]
    content: str  # as `checkpoints.array_digest` says it; "" when the form is another
    not_finite: tuple[str, ...]  # leaves that hold NaN or an infinity
    unreadable: str = ""  # why nothing could be read


_reader = StandingReader(lambda: READER)
_one_at_a_time = threading.Lock()
_known: dict[tuple[str, str], Arrays] = {}  # by digest of the files and by what was wanted


def measured(
    experts: Sequence[tuple[str, Path]],
    wanted: Shapes,
    *,
    meanwhile: Callable[[], object] = lambda: None,
) -> tuple[Arrays, ...]:
    """The arrays in each folder, told by the digest of its files, which names them for ever.

    Only leaves of the wanted shapes are loaded, one at a time. What was read before by this
    process is not read again. `meanwhile` is called while the child reads; what it raises comes
    first, and nothing is remembered then.

    Raises:
      ExpertCorruptError: the files crash whoever reads them.
      BusyError: the reader was ended from outside, or took too long.
    """
    form = json.dumps({leaf: list(shape) for leaf, shape in sorted(wanted.items())})
    unknown = {sha256: folder for sha256, folder in experts if (sha256, form) not in _known}
    if unknown:
        found = _read(list(unknown.values()), wanted, meanwhile)
    else:
        found = []
        meanwhile()
    if len(_known) > _REMEMBERED:
        _known.clear()
    fresh = {(sha256, form): arrays for sha256, arrays in zip(unknown, found, strict=True)}
    _known.update({key: arrays for key, arrays in fresh.items() if not arrays.unreadable})
    everything = {**_known, **fresh}
    return tuple(everything[sha256, form] for sha256, _ in experts)


def make_ready() -> None:
    """Start the child ahead of its first order; where none can be started now, the order will."""
    with suppress(OSError), _one_at_a_time:
        _reader.start()


def _read(folders: Sequence[Path], wanted: Shapes, meanwhile: Callable[[], object]) -> list[Arrays]:
    largest = max((4 * math.prod(shape) for shape in wanted.values()), default=0)
    order = {
        "folders": [str(folder.absolute()) for folder in folders],
        "wanted": wanted,
        "memory_bytes": _MEMORY_BYTES + 4 * largest,
        "seconds": math.ceil(_SECONDS),
    }
    return _asked(json.dumps(order), folders, meanwhile)


def _asked(order: str, folders: Sequence[Path], meanwhile: Callable[[], object]) -> list[Arrays]:
    """What the child says of these folders.

    One that was of use before may have been broken by what it read then, so another one is asked
    before the files are blamed.
    """
    places = ", ".join(str(folder) for folder in folders)
    with _one_at_a_time:
        try:
            said = _reader.ask(order, seconds=_SECONDS, meanwhile=meanwhile)
        except TimeoutError as error:
            raise BusyError(
                f"the arrays in {places} could not be read within {_SECONDS:g} s; try again later"
            ) from error
        found = _understood(said, len(folders))
        if not isinstance(found, list) or any(arrays.unreadable for arrays in found):
            _reader.end()  # what may have broken it harms nobody else
    if isinstance(found, list):
        return found
    if found.code in _ENDED_FROM_OUTSIDE:
        raise BusyError(
            f"the reader of {places} was ended by signal {-found.code}; try again later"
        )
    raise ExpertCorruptError(
        f"the arrays in {places} cannot be read (the reader ended with {found.code}: "
        f"{found.why}); train again"
    )


def _understood(said: bytes | Ended, count: int) -> list[Arrays] | Ended:
    if isinstance(said, Ended):
        return said
    try:
        found = [_arrays(facts) for facts in json.loads(said)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Ended(0, f"its answer is malformed: {type(error).__name__}: {error}"[:200])
    return found if len(found) == count else Ended(0, f"it told of {len(found)}, not of {count}")


def _arrays(facts: Mapping[str, Any]) -> Arrays:
    return Arrays(
        shapes={leaf: tuple(shape) for leaf, shape in facts["shapes"].items()},
        dtypes=facts["dtypes"],
        content=facts["content"],
        not_finite=tuple(facts["not_finite"]),
        unreadable=facts["unreadable"],
    )
