"""Arrays of a damaged file are read or refused, whichever bit is another."""

from __future__ import annotations

import io
from contextlib import suppress

import numpy as np

from flowrl.errors import FileRefusedError
from flowrl.storage import arrays

HEADER_BYTES = 128


def test_any_bit_of_an_arrays_header_may_be_another():
    """Of a large array the header is parsed before the file's checksum is known."""
    file = io.BytesIO()
    np.savez(file, steps=np.arange(4800).reshape(2400, 2))
    content = file.getvalue()
    begins = content.index(b"\x93NUMPY")
    refused = 0
    for bit in range(8 * HEADER_BYTES):
        damaged = bytearray(content)
        damaged[begins + bit // 8] ^= 1 << bit % 8
        with suppress(FileRefusedError):
            arrays.read(bytes(damaged), ("steps",), place="steps.npz", remedy="record again")
            continue
        refused += 1
    assert refused > HEADER_BYTES
