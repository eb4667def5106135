"""Training on several devices, in a child that has four host devices."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import LIGHT
from tests.waiting import limit

BOUNDS = (1e-5, 5e-6)  # the greatest difference, and relative to the greatest number
PAIRS = [("three1", "three2"), ("three1", "three4"), ("one1", "one2"), ("many1", "many2")]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the cases leave: case → name → array."""
    return left_by(tmp_path_factory.mktemp("sharded") / "found.npz")


@pytest.fixture(scope="module")
def mutated(tmp_path_factory):
    """What the cases leave that lack a collective, as `found`."""
    return left_by(tmp_path_factory.mktemp("mutated") / "found.npz", "mutated")


def left_by(path: Path, *words: str) -> dict[str, dict[str, np.ndarray]]:
    flags = f"{LIGHT} --xla_force_host_platform_device_count=4"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = (sys.executable, "-m", "tests.ppo.sharded", str(path), *words)
    subprocess.run(command, env=env, check=True, timeout=limit(280))
    cases: dict[str, dict[str, np.ndarray]] = {}
    with np.load(path) as arrays:
        for key in arrays:
            case, _, name = key.partition("/")
            cases.setdefault(case, {})[name] = arrays[key]
    return cases


def leaves(case, *kinds: str):
    return [array for name, array in case.items() if name.startswith(kinds)]


def greatest(one, other) -> np.ndarray:
    """The greatest difference of two cases' leaves, and relative to the greatest number."""
    kinds = ("param", "moment")
    pairs = list(zip(leaves(one, *kinds), leaves(other, *kinds), strict=True))
    apart = max(np.abs(left.astype(float) - right).max() for left, right in pairs)
    most = max(np.abs(left).max() for left, _ in pairs if left.dtype == np.float32)
    return np.array([apart, apart / most])


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_the_first_rollout_is_that_of_one_device_bit_for_bit(found, one, other):
    names = [name for name in found[one] if name.startswith("rollout")]
    names += ["done", "episode_return", "episode_length", "task_success", "counts"]
    assert all(np.array_equal(found[one][name], found[other][name]) for name in names)


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_devices_decide_nothing_but_the_order_of_additions(found, one, other):
    assert (greatest(found[one], found[other]) <= BOUNDS).all()
    assert np.array_equal(found[one]["acted"], found[other]["acted"])
    for figure in ("loss", "reward", "value", "clipped_rewards"):
        np.testing.assert_allclose(found[one][figure], found[other][figure], rtol=1e-4, atol=1e-6)


def test_updates_from_few_columns_and_from_all_are_among_them(found):
    few = found["three1"]["columns"] <= 128
    assert few.tolist() == [True, False] * 3


def test_all_devices_choose_the_same_columns(found):
    assert (found["columns"]["used"] == 160).all(), "those of one device are 40"
    assert (found["columns"]["order"] == found["columns"]["order"][0]).all()


@pytest.mark.parametrize("case", ["three2", "three4", "one2", "many2"])
def test_the_copies_are_equal_after_every_update(found, case):
    assert found[case]["spread"].tolist() == [0.0] * 6


@pytest.mark.parametrize(("before", "after"), list(itertools.product((1, 2, 4), repeat=2)))
def test_a_stopped_run_goes_on_with_other_devices(found, before, after):
    same, other = (found[f"from{before}to{devices}"] for devices in (before, after))
    assert (greatest(same, other) <= BOUNDS).all()


@pytest.mark.parametrize("case", ["three2", "three4", "pair"])
def test_one_device_that_is_asked_to_stop_stops_all(found, case):
    assert found[case]["stop"] == 85


def test_with_a_period_the_copies_are_equal_after_every_fourth_update(found):
    assert found["period8"]["spread"].tolist() == [0.0, 0.0]
    assert (found["gradients at times"]["spread"] > 1e-3).all(), (
        "the mean of gradients is not enough"
    )


@pytest.mark.parametrize(
    ("case", "reports"),
    [
        ("budget", [[4, 256, 256, 0, 0, 0], [6, 384, 384, 0, 1, 0]]),
        ("success", [[4, 256, 256, 1, 1, 0]]),
        ("stop", [[4, 256, 256, 0, 0, 85]]),
    ],
)
def test_a_run_that_ends_within_a_period_reports_equal_copies(found, case, reports):
    assert found[case]["reports"].tolist() == reports
    assert found[case]["spread"].tolist() == [0.0] * len(reports)


def test_an_expert_that_acts_on_one_device_moves_as_far_as_there(found):
    def moved(case: str) -> float:
        pairs = zip(leaves(found[case], "param"), leaves(found["fresh"], "param"), strict=True)
        return np.sqrt(sum(np.square(after[1] - before[1]).sum() for after, before in pairs))

    assert 0.99 <= moved("period4") / moved("alone") <= 1.01
    assert moved("alone") > 1e-3


def test_without_a_collective_the_copies_part(found):
    assert (found["without rows"]["spread"] > 1e-3).all()


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["columns", "gradients+stop"])
def test_without_another_collective_the_copies_part(mutated, collective):
    assert (mutated[f"without {collective}"]["spread"] > 1e-3).all()


@pytest.mark.slow
def test_without_that_of_the_advantages_others_are_learnt_from(mutated):
    assert greatest(mutated["without normalised"], mutated["pair"])[0] > 1e-4


@pytest.mark.slow
def test_without_that_of_the_wish_to_stop_nobody_stops(mutated):
    assert mutated["without gradients+stop"]["stop"] == 0
