"""Merged runs are put away after their dependants have started, and never lost for it."""

from __future__ import annotations

import shutil

import pytest

from flowrl.errors import BusyError
from flowrl.experts import manifest as manifests
from flowrl.experts.merge import frame_count
from flowrl.experts.store import ExpertStore
from flowrl.parallel import training_processor
from flowrl.parallel.training_processor import archive_run, merge_run, recover_graph
from flowrl.paths import GraphPaths
from tests.parallel.making import WOOD, finish, prepare, train
from tests.parallel.scheduling import FakeBackend, words


class Recording(FakeBackend):
    """Remembers in which order it was asked, and refuses to put away while `errors` lasts."""

    def __init__(self, world):
        super().__init__(world)
        self.calls, self.errors = [], []

    def prepare(self, task):
        self.calls.append(("prepare", task.skill))
        return super().prepare(task)

    def archive(self, task):
        self.calls.append(("put away", task.skill))
        if self.errors:
            raise self.errors.pop()
        super().archive(task)


@pytest.fixture
def daemon(start, world):
    daemon = start(max_parallel_skills=1)
    daemon.backend = Recording(world)
    daemon.set_callbacks(backend=daemon.backend)
    daemon.add_skill("A")
    daemon.add_skill("B", {}, ["A"])
    daemon.tick()
    return daemon


def test_a_dependant_is_started_before_the_merged_run_is_archived(daemon, world):
    world.end("A")
    daemon.tick()
    assert words(daemon) == {"A": "completed", "B": "running"}
    assert daemon.backend.calls == [("prepare", "A"), ("prepare", "B"), ("put away", "A")]
    assert "A" not in world.folders


@pytest.mark.parametrize(
    "error", [BusyError("held"), OSError(28, "no space")], ids=["lock", "disk"]
)
def test_a_run_that_cannot_be_archived_now_is_archived_later(daemon, world, error):
    world.end("A")
    daemon.backend.errors = [error]
    daemon.tick()
    assert (words(daemon)["A"], "A" in world.folders) == ("completed", True)
    daemon.tick()
    assert "A" not in world.folders
    assert daemon.backend.calls.count(("put away", "A")) == 2


def test_a_copy_of_a_merged_runs_folder_stays_what_it_is(tmp_path):
    graph_paths = GraphPaths(tmp_path)
    run_paths = prepare(graph_paths, WOOD, 0, {}).run_paths
    finish(run_paths, {0: 50})
    merge_run(ExpertStore(graph_paths), run_paths, WOOD, accounting="acted", rule=frame_count)
    copy = run_paths.folder.with_name(f"{run_paths.folder.name}_backup")
    shutil.copytree(run_paths.folder, copy)
    (copy / "result.json").unlink()
    recover_graph(graph_paths)
    assert copy.is_dir()
    assert not run_paths.folder.exists()
    assert (graph_paths.skill_folder(0, WOOD) / "result.json").exists()


def test_old_versions_are_collected_once_in_twenty_merges(tmp_path, monkeypatch):
    monkeypatch.setattr(training_processor, "KEPT_GENERATIONS", 3)
    monkeypatch.setattr(manifests, "KEPT_GENERATIONS", 3)
    graph_paths, seen = GraphPaths(tmp_path), []
    for _ in range(10):
        train(graph_paths, WOOD, 0, {}, acted={0: 50})
        versions = list(graph_paths.expert_folder(0, WOOD).iterdir())
        assert len(versions) == len([each for each in manifests.generations(graph_paths) if each])
        seen.append(len(versions))
    assert seen == [1, 2, 3, 4, 5, 3, 4, 5, 3, 4]
    recover_graph(graph_paths)
    assert len(list(graph_paths.expert_folder(0, WOOD).iterdir())) == 3


def test_a_run_that_is_not_merged_is_not_put_away(tmp_path):
    graph_paths = GraphPaths(tmp_path)
    run_paths = prepare(graph_paths, WOOD, 0, {}).run_paths
    finish(run_paths, {0: 50})
    archive_run(graph_paths, run_paths)
    assert run_paths.result_json.exists()


def test_everything_small_that_a_run_left_is_archived(tmp_path):
    graph_paths = GraphPaths(tmp_path)
    run_paths = prepare(graph_paths, WOOD, 0, {}).run_paths
    finish(run_paths, {0: 50})
    (run_paths.folder / "video.mp4").write_bytes(b"film")
    (run_paths.folder / "spec.json").write_text("{}")
    (run_paths.folder / "-rf *").write_text("a name for nobody")
    (run_paths.folder / "link").symlink_to("/etc/passwd")
    for name in ("expert_0_policy", "expert_999_policy"):
        (run_paths.folder / name).write_text("the name of a folder")
    merge_run(ExpertStore(graph_paths), run_paths, WOOD, accounting="acted", rule=frame_count)
    archive_run(graph_paths, run_paths)
    archive = graph_paths.skill_folder(0, WOOD)
    assert (archive / "video.mp4").read_bytes() == b"film"
    assert (archive / "expert_0_policy").is_dir()
    names = {path.name for path in archive.iterdir()}
    assert not names & {"spec.json", "-rf *", "link", "run.lock", "expert_999_policy"}
    assert not run_paths.folder.exists()


def test_a_film_of_an_earlier_run_of_the_skill_goes_with_its_archive(tmp_path):
    graph_paths = GraphPaths(tmp_path)
    train(graph_paths, WOOD, 0, {}, acted={0: 50})
    for film in graph_paths.archive(0, WOOD).films:
        film.write_bytes(b"of the first run")
    train(graph_paths, WOOD, 0, {}, acted={0: 20})
    assert not any(film.exists() for film in graph_paths.archive(0, WOOD).films)
