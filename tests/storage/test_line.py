"""A line: turns are taken in the order in which it was joined, whoever asks first."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from flowrl.compiling.line import Line

WAIT_SECONDS = 60


def served(line: Line, numbers: Sequence[int]) -> list[int]:
    """The order of the turns of threads that are started in the order of `numbers`."""
    order: list[int] = []

    def take(number: int) -> None:
        with line.turn(number):
            order.append(number)

    threads = [threading.Thread(target=take, args=(number,), daemon=True) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    return order


def test_turns_are_taken_in_the_order_in_which_the_line_was_joined():
    line = Line()
    first, second, third = (line.join() for _ in range(3))
    assert served(line, [third, second, first]) == [first, second, third]


def test_nobody_waits_for_one_who_has_left():
    line = Line()
    first, second = line.join(), line.join()
    line.leave(first)
    assert served(line, [second]) == [second]
    line.leave(first)  # for the second time


def test_who_has_left_and_comes_back_gets_in_at_the_end():
    line = Line()
    first, second = line.join(), line.join()
    line.leave(first)
    with line.turn(second):
        third = line.join()
        came: list[int] = []
        back = threading.Thread(target=lambda: came.extend(served(line, [first])), daemon=True)
        back.start()
    assert served(line, [third]) == [third]
    back.join(WAIT_SECONDS)
    assert came == [first]


def test_an_error_ends_a_turn():
    line = Line()
    first, second = line.join(), line.join()
    with pytest.raises(ValueError, match="no"), line.turn(first):
        raise ValueError("no")
    assert served(line, [second]) == [second]
