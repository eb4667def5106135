"""Killed, torn, out of space or failing at an operation on files: the right end, exactly once.

A sample of what `scripts/chaos_faults.py` does at every operation.
"""

from __future__ import annotations

import json

import pytest

from tests.chaos import shim
from tests.chaos.loop import POLICIES, WRONGS
from tests.chaos.shim import FIVE

pytestmark = pytest.mark.skipif(shim.compiler() is None, reason="no C compiler for the shim")


def test_no_fault_at_any_operation_loses_doubles_or_leaves_anything(tmp_path, memory):
    report = tmp_path / "report.json"
    words = (str(memory), str(report), "--stride", "67", "--skip", "recovery")
    shim.with_shim(shim.compiled(tmp_path), "tests.chaos.loop", *words)
    found = json.loads(report.read_text())
    examples = [example for tally in found["scenarios"] for example in tally["examples"]]
    assert not any(found[kind] for kind in WRONGS), "\n".join(examples)
    assert found["injected"] > 120
    met = {mode for tally in found["scenarios"] for mode in tally["faults"]}
    assert met == {mode.name for mode in FIVE}
    assert sum("merge" in tally["scenario"] for tally in found["scenarios"]) == len(POLICIES)


def test_a_write_that_takes_half_is_gone_on_with(tmp_path, memory):
    report = tmp_path / "report.json"
    words = (str(memory), str(report), "--only", "prepare", "--modes", "SHORT")
    shim.with_shim(shim.compiled(tmp_path), "tests.chaos.loop", *words)
    (tally,) = json.loads(report.read_text())["scenarios"]
    assert not any(tally[kind] for kind in WRONGS), tally["examples"]
    assert tally["faults"]["SHORT"] > 5
