"""The power goes while a graph is written: the old state or the new one, and nothing between."""

from __future__ import annotations

import json

import pytest

from tests.chaos import power, shim
from tests.chaos.loop import WRONGS


def test_a_power_cut_loses_nothing_that_was_committed(tmp_path):
    if shim.compiler() is None:
        pytest.skip("no C compiler for the shim")
    if why := power.obstacle(tmp_path):
        pytest.skip(why)
    report = tmp_path / "report.json"
    words = (str(tmp_path), str(report), "--cuts", "10")
    shim.with_shim(shim.compiled(tmp_path), "tests.chaos.power", *words, within=power.ALONE)
    found = json.loads(report.read_text())
    examples = [example for tally in found["scenarios"] for example in tally["examples"]]
    assert not any(found[kind] for kind in WRONGS), "\n".join(examples)
    assert found["injected"] == 10
