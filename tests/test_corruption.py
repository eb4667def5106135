"""A flipped bit in any committed file is found before use, or changes nothing at all.

The graph is real: runs that were prepared, Orbax experts, merges, archives, the scheduler's state.
Each flip is undone after everything was read as flowrl reads it: what comes back must be what was
written, or the previous version of an expert, or a refusal.
"""

from __future__ import annotations

import collections
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowrl import evaluation as evaluate
from flowrl import storage
from flowrl.config import PPOConfig
from flowrl.errors import ExpertCorruptError, FileRefusedError, FlowrlError
from flowrl.experts import checkpoint
from flowrl.experts import manifest as manifests
from flowrl.experts.repair import usable
from flowrl.experts.store import ExpertStore
from flowrl.parallel.recovery import inspect, recover_state
from flowrl.parallel.skill_sources import SkillSources, record_graph
from flowrl.parallel.state import StateFile
from flowrl.paths import GraphPaths, RunPaths
from flowrl.reports import status
from flowrl.runs import check_module, read_result, read_run
from flowrl.storage import records
from tests.experts.making import digest_of_arrays, random_expert
from tests.parallel.making import LIBRARY, PICKAXE, TABLE, WOOD, finish, merge, prepare, report_anew

UNREAD = ("global_latest.pkl", "training.log", "metrics.jsonl", "events.jsonl")
COMPLETED = {WOOD: 0, TABLE: 1, PICKAXE: 2}
STONE = "Collect Stone"  # needs all three


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder in memory where there is one: a thousand repairs flush a lot."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def graph_paths(place) -> GraphPaths:
    """Experts 0 and 1 have an earlier version, expert 2 has none."""
    graph_paths = GraphPaths(place / "graph")
    train(graph_paths, WOOD, {0: 50})
    train(graph_paths, TABLE, {0: 10, 1: 20})
    train(graph_paths, PICKAXE, {1: 5, 2: 30})
    book = SkillSources(graph_paths)
    for skill in COMPLETED:
        book.record(LIBRARY[skill])
    facts = {"format": 1, "env_name": "Craftax-Classic-Symbolic-v1"}
    records.write(graph_paths.config_json, facts)
    record_graph(graph_paths, PPOConfig())
    recover_state(graph_paths)
    storage.append_line(graph_paths.events, '{"skill": "Collect Wood"}')
    assert inspect(graph_paths) == ()
    return graph_paths


def train(graph_paths: GraphPaths, skill: str, acted: Mapping[int, int]) -> None:
    """Prepare, finish and merge a run whose experts are Orbax checkpoints."""
    ready = prepare(graph_paths, skill, COMPLETED[skill], COMPLETED)
    finish(ready.run_paths, acted)
    for local, expert in enumerate(ready.run.experts):
        folder = ready.run_paths.final(local)
        if expert in acted:
            storage.remove_tree(folder)
            checkpoint.save_expert(folder, random_expert(sum(acted.values()) + expert))
    report_anew(ready.run_paths, *range(len(ready.run.experts)), digest=digest_of_arrays)
    merge(graph_paths, ready)


def committed(graph_paths: GraphPaths) -> list[str]:
    """Every file that is kept, below the graph's folder."""
    files = (path for path in sorted(graph_paths.root.rglob("*")) if path.is_file())
    return [str(path.relative_to(graph_paths.root)) for path in files if path.suffix != ".lock"]


@contextmanager
def flipped(graph_paths: GraphPaths, name: str, chance: random.Random) -> Iterator[str]:
    """One bit of a file is another for the length of the block, whatever becomes of the graph."""
    path = graph_paths.root / name
    whole, checkpoints_before = path.read_bytes(), of_checkpoints(graph_paths)
    at, bit = chance.randrange(len(whole)), chance.randrange(8)
    content = bytearray(whole)
    content[at] ^= 1 << bit
    path.write_bytes(content)
    try:
        yield f"bit {bit} of byte {at} of {name}"
    finally:
        for reason in graph_paths.quarantine.rglob("*.why.txt"):
            aside = reason.with_name(reason.name.removesuffix(".why.txt"))
            aside.rename(graph_paths.root / aside.relative_to(graph_paths.quarantine))
        for folder in (graph_paths.quarantine, graph_paths.notices):
            shutil.rmtree(folder, ignore_errors=True)
        for new in of_checkpoints(graph_paths).keys() - checkpoints_before.keys():
            new.unlink()
        for file, before in {**checkpoints_before, path: whole}.items():
            file.write_bytes(before)


def of_checkpoints(graph_paths: GraphPaths) -> dict[Path, bytes]:
    return {
        path: path.read_bytes() for path in graph_paths.checkpoints.rglob("*.*") if path.is_file()
    }


def read(graph_paths: GraphPaths, changed: str = "") -> dict[str, Any]:
    """Everything that flowrl reads again of a graph, or the error with which it refuses to.

    Skill files and experts take long to read; they are left out when another file has changed.
    """
    store = ExpertStore(graph_paths)
    found: dict[str, Any] = {}

    def take(name: str, reading: Callable[[], Any]) -> Any:
        try:
            found[name] = reading()
        except FlowrlError as error:
            found[name] = error
        return found[name]

    take("state", StateFile(graph_paths.scheduler_state).load)
    if not changed or changed.startswith("skill_files"):
        take("skills", SkillSources(graph_paths).recorded)
    take("config", lambda: records.read_document(graph_paths.config_json))
    for generation in manifests.generations(graph_paths):
        path = manifests.history_file(graph_paths, generation)
        take(path.name, lambda path=path: manifests.read_file(path))
    present = take("manifest", store.manifest)
    experts = not changed or "_policy/" in changed or changed.startswith("checkpoints")
    for skill, expert in COMPLETED.items():
        archive = RunPaths(graph_paths.skill_folder(expert, skill), expert)
        take(f"run {expert}", lambda archive=archive: read_run(archive))
        take(f"result {expert}", lambda archive=archive: read_result(archive))
        take(f"module {expert}", lambda archive=archive: module_of(archive))
        if experts and isinstance(present, manifests.Manifest):
            take(f"expert {expert}", lambda expert=expert: used(store, present.experts[expert]))
    return found


def module_of(archive: RunPaths) -> bytes:
    check_module(archive, read_run(archive))
    return archive.module.read_bytes()


def used(store: ExpertStore, version: Any) -> str:
    """The digest of what a run would start from."""
    return storage.tree_digest(store.path_of(usable(store, version)))


def allowed(graph_paths: GraphPaths) -> dict[str, set[str]]:
    """The digests of the whole versions of each expert, the one that counts first of all."""
    found: dict[str, set[str]] = collections.defaultdict(set)
    for generation in manifests.generations(graph_paths):
        known = manifests.read_file(manifests.history_file(graph_paths, generation))
        for index, version in known.experts.items():
            found[f"expert {index}"].add(version.sha256)
    return found


@pytest.mark.parametrize("flips", [200, pytest.param(1_000, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_found_or_harmless(graph_paths, flips):
    chance = random.Random(20301)
    pristine, whole, files = read(graph_paths), allowed(graph_paths), committed(graph_paths)
    tally: collections.Counter[str] = collections.Counter()
    for _ in range(flips):
        name = chance.choice(files)
        with flipped(graph_paths, name, chance) as what:
            tally[judged(graph_paths, name, what, pristine, whole)] += 1
    assert sum(tally.values()) == flips
    assert tally["previous version"] > flips // 10, tally
    assert tally["refused"] > flips // 10, tally
    assert tally["found in a version that does not count"] > flips // 10, tally
    assert tally["read as it was written"] < flips // 20, tally  # spaces between values


def judged(
    graph_paths: GraphPaths,
    name: str,
    what: str,
    pristine: Mapping[str, Any],
    whole: Mapping[str, set[str]],
) -> str:
    """What has become of a flip; fails when anything wrong was used."""
    found = read(graph_paths, name)
    others = {key: value for key, value in found.items() if value != pristine[key]}
    errors = {key for key, value in others.items() if isinstance(value, FlowrlError)}
    for key in others.keys() - errors:
        assert key.startswith("expert "), f"{what}: {key} is read as {others[key]}"
        assert others[key] in whole[key], f"{what}: {key} is no version that was merged"
    if others.keys() - errors:
        (key,) = others
        number = key.removeprefix("expert ")
        assert f"damage_expert_{number}" in status.status_document(graph_paths)["notices"], what
        return "previous version"
    if errors:
        assert_said(graph_paths, name, what)
        return "refused"
    if "_policy/" in name:
        assert inspect(graph_paths), what
        return "found in a version that does not count"
    return "never read" if name.endswith(UNREAD) else "read as it was written"


def assert_said(graph_paths: GraphPaths, name: str, what: str) -> None:
    """fsck names the file or its folder; status says so, or refuses what it reads itself."""
    path = graph_paths.root / name
    places = {finding.place for finding in inspect(graph_paths)}
    assert places & {path, *path.parents}, f"{what}: fsck says {places}"
    if path == graph_paths.scheduler_state:
        with pytest.raises(FlowrlError, match=r"scheduler_state\.json .*flowrl recover"):
            status.status_document(graph_paths)
        return
    said = status.status_document(graph_paths)["notices"]
    assert "damage_expert_2" in said or "expert_2_policy" not in name, what
    assert "manifest" in said or path != graph_paths.manifest, what


def test_an_evaluation_refuses_damage_with_the_remedy_and_changes_nothing(graph_paths):
    chance = random.Random(5)
    store = ExpertStore(graph_paths)
    run = read_run(RunPaths(graph_paths.skill_folder(1, TABLE), 1))
    file = store.path_of(store.manifest().experts[0]) / "_METADATA"
    with flipped(graph_paths, str(file.relative_to(graph_paths.root)), chance):
        before = of_checkpoints(graph_paths)
        with pytest.raises(ExpertCorruptError, match=r"flowrl fsck .* --repair"):
            evaluate.load_experts(store, run)
        assert of_checkpoints(graph_paths) == before
    with (
        flipped(graph_paths, "skills/1_Place_Table/1.py", chance),
        pytest.raises(FileRefusedError, match=r"1\.py is not the module"),
    ):
        evaluate.evaluate(graph_paths, TABLE, episodes=1, seed=0)
    assert not graph_paths.notices.exists()
