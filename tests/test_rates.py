"""Rates that differ by chance alone are not told apart, and those that differ truly are."""

from __future__ import annotations

import numpy as np
import pytest

from flowrl.rates import is_clearly_more


@pytest.mark.parametrize("share", [0.1, 0.35, 0.9])
def test_the_best_of_a_hundred_windows_is_seldom_clearly_more_than_the_last(share):
    windows = np.random.default_rng(0).binomial(256, share, (1000, 100)) / 256
    mistaken = sum(is_clearly_more(max(run), run[-1], episodes=256) for run in windows.tolist())
    assert mistaken < 50


@pytest.mark.parametrize(("before", "now"), [(0.9, 0.2), (0.9, 0.79), (0.3, 0.15), (0.05, 0.0)])
def test_a_loss_is_seen(before, now):
    assert is_clearly_more(before, now, episodes=256)
    assert not is_clearly_more(now, before, episodes=256)
    assert not is_clearly_more(before, before, episodes=256)


def test_few_episodes_tell_nothing():
    assert not is_clearly_more(1.0, 0.5, episodes=1)
    assert not is_clearly_more(0.5, 0.0, episodes=0)
    assert not is_clearly_more(0.0, 0.0, episodes=256)
