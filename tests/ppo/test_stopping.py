from __future__ import annotations

import signal

import pytest

from flowrl.errors import EXIT_RESUMABLE
from flowrl.ppo.stopping import EXIT_INTERRUPTED, StopWish


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, EXIT_RESUMABLE), (signal.SIGINT, EXIT_INTERRUPTED)],
    ids=["SIGTERM", "Ctrl-C"],
)
def test_a_signal_is_remembered_with_its_exit_code(number, code):
    before = signal.getsignal(number)
    stop = StopWish()
    with stop.listening():
        assert not stop.heard
        signal.raise_signal(number)
        assert stop.heard
    assert stop.exit_code == code
    assert signal.getsignal(number) == before


def test_a_second_ctrl_c_does_not_wait():
    stop = StopWish()
    with stop.listening():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
