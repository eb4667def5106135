"""A run keeps the settings with which it was begun, and a start with others says so."""

from __future__ import annotations

import os

import pytest

from flowrl import command_line
from flowrl.config import BottomUpConfig
from flowrl.errors import BusyError, ConfigError, FileRefusedError
from flowrl.launchers import claims, sandbox
from flowrl.parallel import start
from flowrl.parallel.events import RunRequest
from flowrl.parallel.training_backend import TrainingBackend
from flowrl.paths import GraphPaths
from tests.commands.test_obstacles import make_odd
from tests.parallel.making import GRAPH, WOOD


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lr=3e-4", []),
        ("--lr=1e-3 --no_anneal_lr", ["--lr 0.0003, not --lr 0.001 and --anneal_lr, not --no_"]),
        (
            "--lr=3e-4 --total_timesteps=1M",
            ["with --total_timesteps 10000000, not --total_timesteps 1000000;"],
        ),
        ("--lr=3e-4 --total_timesteps=1M --skill_timesteps_budget=1M", []),
        ("--lr=3e-4 --max_parallel_skills=1", []),
    ],
)
def test_a_start_with_other_flags_says_with_which_a_run_goes_on(
    tmp_path, caplog, monkeypatch, words, said
):
    monkeypatch.setattr(sandbox, "problem_of", lambda _: None)

    def backend(words):
        return TrainingBackend(
            GraphPaths(tmp_path), command_line.parse(BottomUpConfig, words.split()), GRAPH
        )

    job = backend("--lr=3e-4").prepare(RunRequest(skill=WOOD, expert=0, attempt=1))
    again = backend(words)
    for _ in range(2):
        again.reopen(RunRequest(skill=WOOD, expert=0, attempt=1, run_id=job.run_id))
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == bool(said)
    assert all(text in warnings[0] for text in said)


def test_a_damaged_run_of_an_engine_does_not_keep_its_skill_from_being_trained(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sandbox, "problem_of", lambda _: None)
    graph_paths = GraphPaths(tmp_path)
    backend = TrainingBackend(graph_paths, command_line.parse(BottomUpConfig, []), GRAPH)
    job = backend.prepare(RunRequest(skill=WOOD, expert=0, attempt=1))
    claims.write_claim(job.folder, claims.Claim(run_id=job.run_id, launch="x", engine="slurm"))
    with pytest.raises(BusyError, match=r"engine\.json: a host may have .* remove that file"):
        backend.prepare(RunRequest(skill=WOOD, expert=0, attempt=2))
    (job.folder / "run.json").write_text("{")
    with pytest.raises(FileRefusedError):
        backend.reopen(RunRequest(skill=WOOD, expert=0, attempt=1, run_id=job.run_id))
    assert not claims.is_claimed(job.folder)  # its runner ends it
    assert backend.prepare(RunRequest(skill=WOOD, expert=0, attempt=2)).run_id != job.run_id


def test_a_job_of_an_engine_is_left_to_that_engine(tmp_path):
    graph_paths = GraphPaths(tmp_path)
    folder = graph_paths.run(0, WOOD).folder
    folder.mkdir(parents=True)
    claims.write_claim(folder, claims.Claim(run_id="x", launch="x", engine="slurm"))
    parsed = command_line.parse(BottomUpConfig, ["--launcher=local"])
    with pytest.raises(ConfigError, match=r"is a job of slurm: start with --launcher slurm"):
        start.open_scheduler(graph_paths, parsed.schedule, parsed.launch, devices={})
    claims.remove_claim(folder)
    start.open_scheduler(graph_paths, parsed.schedule, parsed.launch, devices={})


@pytest.mark.parametrize("kind", ["a file", "a link"])
def test_what_is_in_a_run_folders_place_is_named_and_stays(tmp_path, kind):
    graph_paths = GraphPaths(tmp_path)
    backend = TrainingBackend(graph_paths, command_line.parse(BottomUpConfig, []), GRAPH)
    folder = graph_paths.run(0, WOOD).folder
    folder.parent.mkdir()
    make_odd(kind, folder)
    with pytest.raises(FileRefusedError, match="skill_0_Collect_Wood is a link or a file"):
        backend.prepare(RunRequest(skill=WOOD, expert=0, attempt=1))
    assert os.path.lexists(folder)
