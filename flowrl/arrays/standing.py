"""A child that answers one order after the other, started once: its libraries take 0.3 s to load.

It is told over its standard input and answers over its standard output, a line each. It ends when
its input ends, so it outlives nobody, however he ended. It inherits no other descriptor and is in a
session of its own: neither a lock nor a key typed in a terminal reaches it.
"""

from __future__ import annotations

import atexit
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ANSWER_BYTES = 2**24
_LAST_WORDS_BYTES = 2**12
_CHUNK_BYTES = 2**16
_END_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Ended:
    """The child ended instead of answering: its exit code, negative for a signal, and why."""

    code: int
    why: str


class StandingReader:
    """One child for all orders of this process; one at a time, so whoever has threads locks."""

    def __init__(self, script: Callable[[], Path]) -> None:
        self._script = script
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that started it: a fork of that one starts its own
        self._answered = False

    def start(self) -> None:
        """Have a child; it loads its libraries while whoever starts it goes on.

        Raises:
          OSError: it cannot be started now.
        """
        if self._owner != os.getpid():
            self._child = None
        if self._child is not None and self._child.poll() is None:
            return
        self.end()
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-B", str(self._script())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        self._owner = os.getpid()
        self._answered = False
        atexit.unregister(self.end)
        atexit.register(self.end)

    def ask(
        self, order: str, *, seconds: float, meanwhile: Callable[[], object] = lambda: None
    ) -> bytes | Ended:
        """The answer to an order, or how a child ended that had nothing to do but this order.

        `meanwhile` is called once the child has the order; what it raises ends the child.

        Raises:
          TimeoutError: there is no answer within so many seconds; the child is ended.
          OSError: no child can be started now.
        """
        self.start()
        tried_before = self._answered
        said = self._told(order, seconds, meanwhile)
        if isinstance(said, Ended) and tried_before:  # what it did before may have broken it
            self.start()
            said = self._told(order, seconds, lambda: None)
        return said

    def end(self) -> None:
        """Let no child of this process be left."""
        child, self._child = self._child, None
        if child is None or self._owner != os.getpid():
            return
        child.kill()
        child.wait()
        for stream in _streams(child):
            stream.close()

    def _told(self, order: str, seconds: float, meanwhile: Callable[[], object]) -> bytes | Ended:
        assert self._child is not None
        exchange = _Exchange(self._child, order.encode() + b"\n")
        try:
            exchange.begin()
            meanwhile()
            answer = exchange.answer(time.monotonic() + seconds)
        except BaseException:  # what would still come is no answer to the next order
            self.end()
            raise
        if answer is None:
            ended = exchange.ended()
            self.end()
            return ended
        self._answered = True
        return answer


class _Exchange:
    """One order and its answer; neither side can block the other for ever."""

    def __init__(self, child: subprocess.Popen[bytes], order: bytes) -> None:
        self._child = child
        self._order = order
        self._said = bytearray()
        self._last_words = b""
        self._why = ""
        self._stdin, self._stdout, self._stderr = (s.fileno() for s in _streams(child))
        os.set_blocking(self._stdin, False)
        self._poll = select.poll()
        self._poll.register(self._stdin, select.POLLOUT)
        for descriptor in (self._stdout, self._stderr):
            self._poll.register(descriptor, select.POLLIN)

    def begin(self) -> None:
        """Give the order, as far as the child takes it without being waited for."""
        self._give()

    def answer(self, deadline: float) -> bytes | None:
        """The line that came back; None when the child has ended, or said what is no line."""
        while not self._said.endswith(b"\n"):
            left = deadline - time.monotonic()
            ready = self._poll.poll(1000 * left) if left > 0 else []
            if not ready:
                raise TimeoutError
            for descriptor, _ in ready:
                if descriptor == self._stdin:
                    self._give()
                elif not self._take(descriptor):
                    return None
        if self._order or self._said.count(b"\n") > 1:
            self._why = "it said more than it was asked"
            return None
        return bytes(self._said)

    def ended(self) -> Ended:
        """How the child ended; one that has lost its tongue is ended now."""
        try:
            code = 0 if self._why else self._child.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            code = 0
        words = self._last_words.decode(errors="replace").strip().splitlines()
        return Ended(code, self._why or (words or ["it said nothing"])[-1][:200])

    def _give(self) -> None:
        stream, *_ = _streams(self._child)
        try:
            self._order = self._order[stream.write(self._order) or 0 :]
        except BrokenPipeError:  # its end is told by its output
            self._poll.unregister(self._stdin)
            return
        if not self._order:
            self._poll.unregister(self._stdin)

    def _take(self, descriptor: int) -> bool:
        """Read what is there; whether an answer may still come."""
        chunk = os.read(descriptor, _CHUNK_BYTES)
        if descriptor == self._stderr:
            self._last_words = (self._last_words + chunk)[-_LAST_WORDS_BYTES:]
            if not chunk:
                self._poll.unregister(descriptor)
            return True
        self._said += chunk
        if len(self._said) > ANSWER_BYTES:
            self._why = f"its answer has over {ANSWER_BYTES} bytes"
        if not chunk:
            self._drain()
        return bool(chunk) and not self._why

    def _drain(self) -> None:
        """Its last words, which may have come after its last answer."""
        os.set_blocking(self._stderr, False)
        try:
            self._last_words += os.read(self._stderr, _CHUNK_BYTES)
        except BlockingIOError:
            return


def _streams(child: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    return child.stdin, child.stdout, child.stderr
