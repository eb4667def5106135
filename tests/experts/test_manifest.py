"""Manifests of every format that was ever written are read for ever."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.errors import FileRefusedError, FormatVersionError
from flowrl.experts import manifest as manifests
from flowrl.experts.store import ExpertStore
from flowrl.paths import GraphPaths
from flowrl.storage import records

DATA = Path(__file__).parents[1] / "data"


def test_a_manifest_of_format_1_is_read_and_goes_on_sealed(tmp_path):
    layout = GraphPaths(tmp_path)
    layout.history.mkdir(parents=True)
    shutil.copy(DATA / "manifest_v1.json", layout.manifest)
    store = ExpertStore(layout)
    present = store.manifest()
    assert (present.generation, present.merged) == (2, ("e0.a1.66c3db7d", "e1.a1.3dbb5d24"))
    assert [(v.index, v.skill, v.frames) for v in present.experts.values()] == [
        (0, "Collect Wood", 60),
        (1, "Place Table", 20),
    ]
    store.recover(None)
    store.commit("r9", [], policy=lambda *_: None)  # pyright: ignore[reportArgumentType]
    facts = json.loads(layout.manifest.read_text())
    assert (facts["format"], facts["generation"], "sha256" in facts) == (2, 3, True)
    assert store.manifest().experts == present.experts


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_manifest_has_a_line_per_expert_and_its_seal(tmp_path, count):
    layout, present = GraphPaths(tmp_path), manifests.read_file(DATA / "manifest_v1.json")
    kept = dict(list(present.experts.items())[:count])
    manifests.swap(layout, manifest := replace(present, experts=kept))
    text = layout.manifest.read_text()
    assert json.loads(text) == records.sealed(manifests.to_json(manifest))
    assert manifests.read_file(layout.manifest) == manifest
    lines = [line for line in text.splitlines() if line.startswith('{"index"')]
    assert len(lines) == count


def test_a_manifest_of_format_2_must_have_its_seal(tmp_path):
    path = tmp_path / "manifest.json"
    facts = json.loads((DATA / "manifest_v1.json").read_text())
    path.write_text(json.dumps({**facts, "format": 2}))
    with pytest.raises(FileRefusedError, match="has no seal"):
        manifests.read_file(path)
    path.write_text(json.dumps({**facts, "format": 3}))
    with pytest.raises(FormatVersionError, match="format 3, this flowrl reads 1 or 2"):
        manifests.read_file(path)
