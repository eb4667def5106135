"""A manifest comes back as it was written, or is refused."""

from __future__ import annotations

import json
from threading import Timer

import pytest

from flowrl import storage
from flowrl.errors import FileRefusedError, FormatVersionError
from flowrl.experts import manifest as manifests
from flowrl.paths import GraphPaths
from flowrl.runs import ExpertVersion, LineageEntry
from flowrl.storage import records
from tests.sealing import rewrite


def version(index: int) -> ExpertVersion:
    return ExpertVersion(
        index=index,
        skill=f"Skill {index}",
        version=manifests.version_name(index + 1, "r1"),
        frames=9,
        sha256="a",
        content="b",
        shapes={"actor/kernel": (4, 2)},
        lineage=(LineageEntry(run_id="r1", frames=9),),
    )


@pytest.fixture(params=[0, 1, 3])
def graph_paths(tmp_path, request) -> GraphPaths:
    graph_paths = GraphPaths(tmp_path)
    experts = {index: version(index) for index in range(request.param)}
    manifests.swap(
        graph_paths, manifests.Manifest(generation=2, experts=experts, merged=("r1", "r2"))
    )
    return graph_paths


def test_a_manifest_comes_back_with_a_line_per_expert(graph_paths):
    found = manifests.read(graph_paths)
    assert (found.generation, found.merged) == (2, ("r1", "r2"))
    assert found.experts == {index: version(index) for index in found.experts}
    lines = [line for line in graph_paths.manifest.read_text().splitlines() if '{"index"' in line]
    assert len(lines) == len(found.experts)


def test_a_manifest_that_another_host_replaces_meanwhile_is_read_again(graph_paths, monkeypatch):
    monkeypatch.setattr(storage, "CACHED_SECONDS", 1.0)
    found, content = manifests.read(graph_paths), graph_paths.manifest.read_bytes()
    graph_paths.manifest.write_bytes(content[:-20])
    replacing = Timer(0.3, graph_paths.manifest.write_bytes, [content])
    replacing.start()
    assert manifests.read(graph_paths) == found
    replacing.join()


def test_a_manifest_without_its_seal_or_of_another_format_is_refused(graph_paths):
    document = json.loads(graph_paths.manifest.read_text())
    seal = document.pop(records.SEAL)
    graph_paths.manifest.write_text(json.dumps(document))
    with pytest.raises(FileRefusedError, match="has no seal"):
        manifests.read_file(graph_paths.manifest)
    graph_paths.manifest.write_text(json.dumps({**document, "format": 2, "sha256": seal}))
    with pytest.raises(FormatVersionError, match="format 2, this flowrl reads 1"):
        manifests.read_file(graph_paths.manifest)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d["experts"].append(d["experts"][0]), "listed twice"),
        (lambda d: d["experts"][0].update(version="v1"), "'v1' is not the name of a version"),
        (lambda d: d.update(merged=["a/b"]), r"merged\[0\] is 'a/b': must be a plain word"),
        (lambda d: d["experts"][0].update(skill="a\nb"), r"experts\[0\].skill"),
        (lambda d: d["experts"][0].update(frames=-1), r"experts\[0\].frames is -1"),
        (lambda d: d.pop("merged"), "merged is missing"),
    ],
)
def test_a_malformed_manifest_is_refused_by_its_key(tmp_path, change, problem):
    graph_paths = GraphPaths(tmp_path)
    manifests.swap(graph_paths, manifests.Manifest(experts={0: version(0)}))
    rewrite(graph_paths.manifest, change)
    with pytest.raises(FileRefusedError, match=problem):
        manifests.read_file(graph_paths.manifest)
