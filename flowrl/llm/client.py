"""Bounds of calls to an endpoint that may lie; alone, since whoever asks one needs them.

A client's own time limit is for each read, so an endpoint that drips a byte now and then holds it
for ever. Here a call ends at its deadline, and an answer is plain bytes of bounded size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import copy_context
from multiprocessing import TimeoutError as PoolTimeoutError
from multiprocessing.pool import ThreadPool
from typing import TypeVar

import httpx

from flowrl.paths import printable

MOST_BYTES = 2**20
PLAIN = {"accept-encoding": "identity"}  # a header: a small answer could unpack to gigabytes
_QUOTED = 60  # characters
Result = TypeVar("Result")


class DeadlineError(Exception):
    """A call took longer than it may."""


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """Return the result of a call, or raise what it raises, within so many seconds.

    Raises DeadlineError if it takes longer; it goes on in a thread that nobody waits for.
    """
    pool = ThreadPool(1)
    try:
        return pool.apply_async(copy_context().run, (call,)).get(max(seconds, 0.0))
    except PoolTimeoutError as error:
        raise DeadlineError from error
    finally:
        pool.close()


def bound(response: httpx.Response, faults: list[str]) -> None:
    """Limit the answer's size; a hook of a client's responses. Refuses packed answers.

    What is wrong with an answer is added to `faults`: a client may ask again until its deadline.
    """
    packed = response.headers.get("content-encoding", "identity").casefold()
    if packed not in ("", "identity"):
        faults.append(f"answers in a packed form ({printable(packed)[:_QUOTED]})")
        raise httpx.DecodingError(faults[-1], request=response.request)
    if response.is_error:
        faults.append(f"answers {response.status_code}")
    assert isinstance(response.stream, httpx.SyncByteStream)  # of a client that is not async
    response.stream = _BoundedStream(response.stream, faults)


class _BoundedStream(httpx.SyncByteStream):
    """A stream that ends with an error after MOST_BYTES."""

    def __init__(self, stream: httpx.SyncByteStream, faults: list[str]) -> None:
        self._stream, self._faults = stream, faults

    def __iter__(self) -> Iterator[bytes]:
        left = MOST_BYTES
        for chunk in self._stream:
            left -= len(chunk)
            if left < 0:
                self._faults.append(f"answers with more than {MOST_BYTES:,} bytes")
                raise httpx.ReadError(self._faults[-1])
            yield chunk

    def close(self) -> None:
        """Close the connection's stream."""
        self._stream.close()
