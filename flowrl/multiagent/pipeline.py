"""Collecting beside learning: two callables, and the values that they hand to each other.

The lag alone says which parameters act. With L_n the learner after epochs 0 to n - 1, epoch n is
collected with L_n at lag 0; at lag 1 with L_{n-1}, and so while epoch n - 1 is learnt from. Threads
decide when a call is made, never with which values. An epoch of C seconds of collecting and L of
learning takes max(C, L) at best instead of C + L.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple

from flowrl.errors import EpochError, FlowrlError, format_error

logger = logging.getLogger(__name__)
_LIBRARIES = ("site-packages/jax/", "site-packages/numpy/")


class Boundary(NamedTuple):
    """All that a run goes on from between two epochs."""

    epoch: int  # epochs learnt from
    learner: Any
    collector: Any
    experience: Any = None  # of epoch number `epoch`, if that is collected already, at lag 1


class Call(NamedTuple):
    """A call that one of the two sides makes."""

    side: str  # collect or learn
    epoch: int
    function: Callable[[], Any]


class Span(NamedTuple):
    """The time in which a side collected, learnt, or waited; seconds of `time.perf_counter`."""

    side: str
    name: str
    epoch: int
    began: float
    ended: float


class Epoch(NamedTuple):
    """An epoch that was learnt from."""

    number: int  # from 0
    experience: Any
    figures: Any
    after: Boundary
    spans: tuple[Span, ...]


class Threads:
    """Makes calls: with `overlap` those of each side in a thread of its own, else all in one.

    A call that takes longer than `stall_timeout` seconds is given up; its thread cannot be ended.
    Both threads use all CPUs: to divide these between them gains nothing (docs/benchmarks.md).
    """

    def __init__(self, *, overlap: bool, stall_timeout: float) -> None:
        self._learner = self._collector = ThreadPoolExecutor(1, "learn")
        if overlap:
            self._collector = ThreadPoolExecutor(1, "collect")
        self._timeout = stall_timeout
        self._begun: list[Future[tuple[Any, Span]]] = []

    def __enter__(self) -> Threads:
        """Take calls until the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the threads, and wait for their end unless a call was given up."""
        for thread in (self._learner, self._collector):
            thread.shutdown(wait=all(future.done() for future in self._begun), cancel_futures=True)

    def results(self, *calls: Call) -> list[tuple[Any, Span]]:
        """Make all calls; returns what each returned, and when it was made.

        Raises EpochError if one fails or takes too long; the other has ended, or is given up, too.
        A FlowrlError or OSError is raised as it is.
        """
        sides = {"collect": self._collector, "learn": self._learner}
        begun = self._begun = [sides[call.side].submit(_timed, call) for call in calls]
        ended, others = wait(begun, timeout=self._timeout, return_when=FIRST_EXCEPTION)
        if others and any(future.exception() for future in ended):
            wait(others, timeout=self._timeout)
        for call, future in zip(calls, begun, strict=True):
            if future.done() and (error := future.exception()):
                raise _named(call, error) from error
        for call, future in zip(calls, begun, strict=True):
            if not future.done():
                raise EpochError(
                    f"epoch {call.epoch}: {call.side} takes longer than --stall_timeout "
                    f"{self._timeout:g} seconds; repair the world, or give it more time"
                )
        return [future.result() for future in begun]


def run(
    collect: Callable[[Any, Any, int], tuple[Any, Any]],
    learn: Callable[[Any, Any, int], tuple[Any, Any]],
    *,
    start: Boundary,
    epochs: int,
    lag: int,
    threads: Threads,
) -> Iterator[Epoch]:
    """Collect every epoch and learn from it once, the last one too.

    `collect` takes learner, collector and epoch, and returns collector and experience; `learn`
    takes learner, experience and epoch, and returns learner and figures. Both return finished
    values, and leave those that they take as they are. Neither is being called while an epoch is
    yielded. Raises as `Threads.results`.
    """
    boundary = start
    while boundary.epoch < epochs:
        n, learner, collector, experience = boundary
        spans: tuple[Span, ...] = ()
        if experience is None:
            call = Call("collect", n, partial(collect, learner, collector, n))
            (((collector, experience), span),) = threads.results(call)
            spans = (span,)
        calls = [Call("learn", n, partial(learn, learner, experience, n))]
        if lag and n + 1 < epochs:
            call = Call("collect", n + 1, partial(collect, learner, collector, n + 1))
            calls.append(call)
        ((learner, figures), span), *ahead = threads.results(*calls)
        following = None
        if ahead:
            (((collector, following), other),) = ahead
            spans += (other, _waiting(span, other))
        boundary = Boundary(n + 1, learner, collector, following)
        yield Epoch(n, experience, figures, boundary, (*spans, span))


def _waiting(one: Span, other: Span) -> Span:
    """The wait of the side that ended first."""
    first, last = sorted((one, other), key=lambda span: span.ended)
    return Span(first.side, "wait", first.epoch, first.ended, last.ended)


def _named(call: Call, error: BaseException) -> BaseException:
    """Return the error for a caller; that of a world is any exception.

    Its place is the innermost line that is not of JAX or NumPy.
    """
    if isinstance(error, FlowrlError | OSError):
        return error
    reason = format_error(error).partition("\n")[0]
    logger.debug("%s failed", call.side, exc_info=error)
    frames = [(each.filename, each.lineno) for each in traceback.extract_tb(error.__traceback__)]
    file, line = [it for it in frames if not any(name in it[0] for name in _LIBRARIES)][-1]
    problem = f"epoch {call.epoch}: {call.side} fails in {file}:{line}: {reason}"
    return EpochError(f"{problem}; --debug says more")


def _timed(call: Call) -> tuple[Any, Span]:
    place = f"{call.side}, epoch {call.epoch}, {threading.current_thread().name}"
    logger.debug("begins: %s", place)
    began = time.perf_counter()
    values = call.function()
    span = Span(call.side, call.side, call.epoch, began, time.perf_counter())
    logger.debug("ended: %s", place)
    return values, span
