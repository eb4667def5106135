"""Arrays of files that may be hostile; alone, since storage needs no NumPy otherwise."""

from __future__ import annotations

import io
import tokenize
import zipfile
import zlib
from collections.abc import Sequence

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from flowrl.errors import FileRefusedError

# RuntimeError: an encrypted member, or a kind of zip that is unknown. A type that NumPy lacks is a
# KeyError or an AttributeError.
_UNREADABLE = (
    *(ValueError, KeyError, IndexError, TypeError, AttributeError, EOFError, OSError),
    *(MemoryError, OverflowError, RuntimeError, zipfile.BadZipFile, zlib.error),
    *(tokenize.TokenError, SyntaxError),  # a damaged header, which NumPy parses as Python
    SafetensorError,
)


def read(content: bytes, names: Sequence[str], *, place: str, remedy: str) -> dict[str, np.ndarray]:
    """The named arrays of an npz file, none of them packed or pickled.

    FileRefusedError says why they cannot be read.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as packed:
            if any(member.compress_type != zipfile.ZIP_STORED for member in packed.infolist()):
                raise FileRefusedError(f"{place} is packed, and could be of any size; {remedy}")
        loaded = np.load(io.BytesIO(content), allow_pickle=False)
        return {name: np.asarray(loaded[name]) for name in names}
    except _UNREADABLE as error:
        raise FileRefusedError(f"{place} cannot be read: {error}; {remedy}") from error


def read_tensors(content: bytes, *, place: str, remedy: str) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file by name; FileRefusedError says why they cannot be read."""
    try:
        return load(content)
    except _UNREADABLE as error:
        what = f"{type(error).__name__}: {error}"
        raise FileRefusedError(f"{place} cannot be read ({what}); {remedy}") from error
