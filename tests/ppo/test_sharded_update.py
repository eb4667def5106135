"""Training on several devices, in a child that has four host devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

CASES = {
    **{f"relay{d}": {"num_devices": d} for d in (1, 2, 4)},
    **{f"one{d}": {"num_devices": d, "env": "Matched"} for d in (1, 4)},
    **{f"wide{d}": {"num_devices": d, "env": "Wide", "num_steps": 4} for d in (1, 4)},
    "period": {"num_devices": 4, "grad_sync_period": 2},
    "columns": {"num_devices": 4, "env": "Wide", "num_steps": 4, "without": "columns"},
    "normalised": {"num_devices": 4, "without": "normalised"},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the cases leave: case → name → array."""
    path = tmp_path_factory.mktemp("sharded") / "found.npz"
    flag = "--xla_force_host_platform_device_count=4"
    env = {**os.environ, "XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
    command = (sys.executable, "-m", "tests.ppo.sharded", str(path), json.dumps(CASES))
    subprocess.run(command, env=env, check=True, timeout=500)
    cases: dict[str, dict[str, np.ndarray]] = {}
    with np.load(path) as arrays:
        for key in arrays:
            case, _, name = key.partition("/")
            cases.setdefault(case, {})[name] = arrays[key]
    return cases


def greatest(one, other) -> tuple[float, float]:
    """The greatest difference of two cases' leaves, and relative to the greatest number."""
    leaves = [name for name in one if name.startswith("leaf")]
    apart = max(np.abs(one[name].astype(float) - other[name]).max() for name in leaves)
    return apart, apart / max(np.abs(one[name]).max() for name in leaves)


@pytest.mark.parametrize(("one", "other"), [("relay1", "relay2"), ("relay1", "relay4")])
def test_devices_decide_nothing_but_the_order_of_additions(found, one, other):
    absolute, relative = greatest(found[one], found[other])
    assert absolute <= 1e-5
    assert relative <= 5e-6
    assert np.array_equal(found[one]["acted"], found[other]["acted"])


@pytest.mark.parametrize("kind", ["one", "wide"])
def test_that_holds_for_one_expert_and_for_few_columns(found, kind):
    absolute, relative = greatest(found[f"{kind}1"], found[f"{kind}4"])
    assert absolute <= 1e-5
    assert relative <= 5e-6


@pytest.mark.parametrize("case", ["relay2", "relay4", "one4", "wide4", "period"])
def test_the_copies_are_equal_whenever_they_are_reported(found, case):
    assert not found[case]["spread"].any()


@pytest.mark.parametrize(("case", "whole"), [("columns", "wide1"), ("normalised", "relay1")])
def test_a_collective_that_is_left_out_is_seen(found, case, whole):
    absolute, _ = greatest(found[case], found[whole])
    assert found[case]["spread"].any() or absolute > 1e-4
