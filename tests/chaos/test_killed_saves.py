"""Orbax is killed or out of space in the middle of a save: the state before it is gone on with."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.chaos import shim


@pytest.mark.skipif(shim.compiler() is None, reason="no C compiler for the shim")
@pytest.mark.parametrize("stride", [47, pytest.param(5, marks=pytest.mark.slow)])
def test_a_trainer_killed_in_the_middle_of_a_save_goes_on_from_the_one_before(tmp_path, stride):
    room = tmp_path / "room"
    room.mkdir()
    environment = {
        **os.environ,
        "LD_PRELOAD": str(shim.compiled(tmp_path)),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(shim.ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.orbax_loop", str(room), str(stride)],
        env=environment,
        cwd=shim.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["wrong"], "\n".join([*found["wrong"], done.stderr[-3000:]])
    assert all(found["injected"].values()), found
