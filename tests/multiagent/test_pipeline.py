"""Which values meet in which epoch, whatever the threads do; with plain numbers for arrays."""

from __future__ import annotations

import itertools
import logging
import random
import re
import threading
import time
import zlib

import pytest

from flowrl.errors import ConfigError, EpochError
from flowrl.multiagent.pipeline import Boundary, Threads, run

EPOCHS = 20
START = Boundary(0, "learner 0", "collector 0")


def mix(*values) -> str:
    return f"{zlib.crc32(repr(values).encode()):08x}"


def collect(learner, collector, epoch):
    return mix("collector", collector, learner), mix("rows", learner, collector, epoch)


def learn(learner, rows, epoch):
    return mix("learner", learner, rows), mix("figures", rows, epoch)


def sleepy(call, seed):
    drawn = random.Random(seed)

    def slept(*values):
        time.sleep(drawn.uniform(0, 0.004))
        return call(*values)

    return slept


def epochs(*, start=START, lag=1, overlap=True, number=EPOCHS, calls=(collect, learn)):
    with Threads(overlap=overlap, stall_timeout=30) as threads:
        found = run(*calls, start=start, epochs=number, lag=lag, threads=threads)
        return [epoch._replace(spans=()) for epoch in found]


@pytest.mark.parametrize("lag", [0, 1])
def test_overlap_changes_no_value_however_long_each_call_takes(lag):
    expected = epochs(lag=lag, overlap=False)
    for seed in range(3):
        calls = sleepy(collect, seed), sleepy(learn, seed + 100)
        assert epochs(lag=lag, overlap=True, calls=calls) == expected


@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_goes_on_from_any_boundary(lag):
    whole = epochs(lag=lag)
    for n, epoch in enumerate(whole[:-1]):
        assert epochs(lag=lag, start=epoch.after) == whole[n + 1 :]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("lag", [0, 1])
def test_every_epoch_is_collected_and_learnt_from_once_and_the_lag_says_which_parameters_act(
    lag, overlap
):
    acted, learnt = [], []

    def noting_collect(learner, collector, epoch):
        acted.append((epoch, learner))
        return collector, epoch

    def noting_learn(learner, rows, epoch):
        learnt.append((epoch, rows, learner))
        return learner + 1, None

    calls, start = (noting_collect, noting_learn), Boundary(0, 0, None)
    found = epochs(start=start, lag=lag, overlap=overlap, calls=calls)
    assert acted == [(n, max(0, n - lag)) for n in range(EPOCHS)]
    assert learnt == [(n, n, n) for n in range(EPOCHS)]
    assert [epoch.number for epoch in found] == list(range(EPOCHS))
    assert found[-1].after.experience is None


def test_both_sides_are_called_at_the_same_time():
    meeting = threading.Barrier(2, timeout=60)

    def meet(call, first):
        def met(*values):
            if values[-1] >= first:
                meeting.wait()
            return call(*values)

        return met

    def learn_but_the_last(*values):
        return (learn if values[-1] == EPOCHS - 1 else meet(learn, 0))(*values)

    assert epochs(calls=(meet(collect, 1), learn_but_the_last)) == epochs(overlap=False)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("failing", ["collect", "learn"])
def test_an_error_of_one_side_is_raised_when_the_other_has_ended(failing, overlap):
    inside = []

    def call(side):
        def called(*values):
            inside.append(side)
            time.sleep(0.01 if side == failing else 0.05)
            inside.remove(side)
            if side == failing and values[-1] == 3:
                raise RuntimeError(f"{side} broke")
            return {"collect": collect, "learn": learn}[side](*values)

        return called

    reason = f"RuntimeError: {failing} broke; --debug says more"
    problem = rf"^epoch 3: {failing} fails in {re.escape(__file__)}:\d+: {reason}$"
    with pytest.raises(EpochError, match=problem):
        epochs(overlap=overlap, number=6, calls=(call("collect"), call("learn")))
    assert inside == []


def test_the_place_of_an_error_is_the_innermost_line_that_is_not_of_jax_or_numpy():
    code = "import jax.numpy as jnp\n\ndef add(*_):\n    return jnp.ones(3) + jnp.ones(4)\n"
    world: dict = {}
    exec(compile(code, "/mine/world.py", "exec"), world)
    with pytest.raises(EpochError, match=r"epoch 0: collect fails in /mine/world\.py:4: TypeError"):
        epochs(calls=(world["add"], learn))


@pytest.mark.parametrize("error", [ConfigError("no"), OSError(28, "No space left on device")])
def test_an_error_of_flowrl_or_of_the_disk_stays_what_it_is(error):
    def failing(*_):
        raise error

    with pytest.raises(type(error)) as caught:
        epochs(calls=(collect, failing))
    assert caught.value is error


def test_every_call_is_logged_with_its_thread_and_its_epoch(caplog):
    with caplog.at_level(logging.DEBUG, logger="flowrl.multiagent.pipeline"):
        epochs(number=2, overlap=False)
    ends = [each.getMessage() for each in caplog.records if "ended" in each.getMessage()]
    each = [(side, n) for n in range(2) for side in ("collect", "learn")]
    assert sorted(ends) == sorted(f"ended: {side}, epoch {n}, learn_0" for side, n in each)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_hung_world_is_named_and_not_waited_for(overlap):
    release = threading.Event()

    def hanging(*values):
        if values[-1] == 2:
            release.wait(60)
        return collect(*values)

    before = time.monotonic()
    with (
        pytest.raises(EpochError, match=r"epoch 2: collect takes longer than --stall_timeout"),
        Threads(overlap=overlap, stall_timeout=1.0) as threads,
    ):
        list(run(hanging, learn, start=START, epochs=9, lag=1, threads=threads))
    assert time.monotonic() - before < 30
    release.set()


def test_no_thread_is_left_when_a_run_ends_or_is_given_up():
    before = set(threading.enumerate())
    epochs()
    assert set(threading.enumerate()) <= before
    with Threads(overlap=True, stall_timeout=30) as threads:
        next(run(collect, learn, start=START, epochs=EPOCHS, lag=1, threads=threads))
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("lag", [0, 1])
def test_the_spans_of_a_side_do_not_overlap(lag):
    with Threads(overlap=True, stall_timeout=30) as threads:
        found = run(collect, learn, start=START, epochs=EPOCHS, lag=lag, threads=threads)
        spans = [span for epoch in found for span in epoch.spans]
    for side in ("collect", "learn"):
        own = sorted((span.began, span.ended) for span in spans if span.side == side)
        assert all(a <= b for a, b in own)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(own))
    calls = [(span.name, span.epoch) for span in spans if span.name != "wait"]
    assert sorted(calls) == [(name, n) for name in ("collect", "learn") for n in range(EPOCHS)]
