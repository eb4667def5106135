"""Faults 1, 2, 3, 11, 12, 15 and 16 of the original: whose weights, which step, what counts."""

from __future__ import annotations

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl import storage
from flowrl.config import with_flags
from flowrl.console import StopSignal
from flowrl.errors import EXIT_RESUMABLE, FileRefusedError, ResultRefusedError
from flowrl.experts import checkpoint
from flowrl.experts.store import ExpertStore
from flowrl.launchers.base import ExitCause, Exited, Finished
from flowrl.parallel.training_processor import process_completed_training
from flowrl.paths import GraphPaths, RunPaths
from flowrl.ppo import trainer
from flowrl.ppo.programs import begin_programs
from flowrl.runs import PlannedStep, TrainConfig, read_result
from flowrl.skills.graph import SkillGraph
from tests.experts.making import content_of, contents
from tests.launchers.conftest import SUCCEED, end_of
from tests.parallel.making import WOOD, finish, make_skill, merge, prepare
from tests.parallel.scheduling import FakeBackend, lines, words
from tests.ppo.modules import run_folder
from tests.ppo.tiny_envs import TinyEnv

ITEMS = [f"item_{number}" for number in range(12)]


@pytest.fixture
def layout(tmp_path):
    return GraphPaths(tmp_path / "graph")


def test_fault_01_expert_1_never_gets_expert_10s_weights(layout):
    """Twelve experts of different weights, seeded into a thirteenth's run, trained and merged."""
    skills = [make_skill(f"Skill {n}", gain=item) for n, item in enumerate(ITEMS)]
    graph = SkillGraph([*skills, make_skill("Last", needs=tuple(ITEMS), gain="last")])
    for expert, skill in enumerate(skills):
        ready = prepare(layout, skill.name, expert, {}, graph=graph)
        finish(ready.layout, {expert: 10 + expert})
        merge(layout, ready)
    before = contents(layout)
    assert [text.rpartition(" ")[2] for _, text in before.values()] == [str(n) for n in range(12)]
    completed = {skill.name: expert for expert, skill in enumerate(skills)}
    ready = prepare(layout, "Last", 12, completed, graph=graph)
    for local, expert in enumerate(ready.run.experts[:-1]):
        assert content_of(ready.layout.seed(local)) == before[expert][1]
    finish(ready.layout, {10: 7, 12: 5})  # expert 1 has not acted
    merge(layout, ready)
    after = contents(layout)
    assert after[1] == before[1]
    assert after[10] == (27, f"{ready.run.run_id} expert 10")


def test_fault_02_a_state_of_fewer_steps_is_saved_too(tmp_path):
    like = {"frames": np.int64(0)}
    for frames in (900, 2):  # a second phase counts from its own beginning
        checkpoint.save_resume(tmp_path / "resume", {"frames": np.int64(frames)})
        assert checkpoint.load_resume(tmp_path / "resume", like)["frames"] == frames


def test_fault_03_an_exit_code_is_no_success_whatever_was_written(local, make_job):
    job = make_job(SUCCEED % "e0.a1.x" + "raise SystemExit(1)")
    outcome = end_of(local, local.launch(job), job)
    assert isinstance(outcome, Exited)
    assert outcome.cause is ExitCause.EXIT


def test_fault_03_an_old_result_is_no_success(local, make_job):
    job = make_job("pass")
    old = make_job(SUCCEED % "e0.a0.x")
    end_of(local, local.launch(old), old)
    (job.folder / "result.json").write_bytes((old.folder / "result.json").read_bytes())
    end_of(local, local.launch(job), job)
    with contextlib.suppress(FileRefusedError):
        assert read_result(RunPaths(job.folder, 0)).run_id != job.run_id


def test_fault_03_a_good_result_is_a_success(local, make_job):
    job = make_job(SUCCEED % "e0.a1.x")
    assert isinstance(end_of(local, local.launch(job), job), Finished)


def test_fault_11_a_skill_is_completed_only_after_its_merge(start, world):
    seen = []

    class Watching(FakeBackend):
        def merge(self, task):
            seen.append((words(scheduler)["A"], lines(scheduler)["A"]["status"]))
            if len(seen) == 1:
                raise ResultRefusedError("expert 0 is missing in the result")
            return super().merge(task)

    scheduler = start(retry_backoff=0.0)
    scheduler.set_callbacks(backend=Watching(world))
    scheduler.add_skill("A")
    for expected in ("running", "completed"):
        scheduler.tick()
        world.end("A")
        scheduler.tick()
        assert words(scheduler) == {"A": expected}
    assert seen == [("merging", "merging")] * 2
    assert len(world.ledger) == 1


@pytest.mark.parametrize(
    "point", ["commit.copied", "commit.published", "commit.history", "write.global_latest.json"]
)
def test_fault_12_no_expert_is_replaced_before_the_manifest_says_so(layout, monkeypatch, point):
    for attempt in (1, 2):
        ready = prepare(layout, WOOD, 0, {}, attempt=attempt)
        finish(ready.layout, {0: 10 * attempt})
        if attempt == 1:
            merge(layout, ready)
    before = contents(layout)
    monkeypatch.setenv("FLOWRL_FAULT", f"{point}:raise")
    with pytest.raises(OSError, match="injected"):
        process_completed_training(ready.run_folder, WOOD, 0, layout.root)
    assert contents(layout) == before
    monkeypatch.delenv("FLOWRL_FAULT")
    merge(layout, ready)
    assert contents(layout) == {0: (30, f"{ready.run.run_id} expert 0")}  # it began from the first
    assert ExpertStore(layout).manifest().merged.count(ready.run.run_id) == 1


class Sure(TinyEnv):
    """One step, which always succeeds."""

    def earned(self, state, action):
        return jnp.ones(action.shape)

    def succeeded(self, state, action):
        return jnp.ones(action.shape, bool)


def stop_after(updates):
    """Ask the trainer to stop after some updates."""
    looks = itertools.count(1)
    return lambda: EXIT_RESUMABLE if next(looks) >= updates else None


def training(tmp_path, monkeypatch, **changes):
    def open_env(config, module):
        env = Sure()
        return env, begin_programs(env, config)

    monkeypatch.setattr(trainer, "open_env", open_env)
    plan = (PlannedStep(skill="Rest", count=1, expert=0),)
    place = run_folder(tmp_path / "run", plan, (0,))
    facts = {"num_envs": 32, "num_steps": 16, "num_minibatches": 2, "update_epochs": 1}
    return with_flags(
        TrainConfig(module_path=place.module), layer_size=4, **{**facts, **changes}
    ), place


def test_fault_15_the_optimizers_state_is_continued(tmp_path, monkeypatch):
    config, _ = training(tmp_path, monkeypatch, total_timesteps=9 * 512, success_state_rate=1.0)
    monkeypatch.setattr(Sure, "succeeded", TinyEnv.succeeded)
    trainer.run(config, stop_after(3))
    seen = []
    monkeypatch.setattr(trainer, "train", lambda *_, learner, **__: seen.append(learner) or ())
    trainer.run(config, StopSignal())
    learner = seen[0]
    moments = [leaf for leaf in jax.tree.leaves(learner.train.opt_state) if leaf.ndim > 1]
    counts = [leaf for leaf in jax.tree.leaves(learner.train.opt_state) if leaf.shape == (1,)]
    assert [list(count) for count in counts] == [[6]]
    assert any((np.asarray(leaf) != 0).any() for leaf in moments)


def test_fault_16_frames_are_exact_when_the_first_update_succeeds(tmp_path, monkeypatch):
    config, place = training(tmp_path, monkeypatch, total_timesteps=9 * 512)
    assert trainer.run(config, StopSignal()) == 0
    result = read_result(place)
    assert (result.updates, result.stopped_early) == (1, True)
    assert result.frames == result.experts[0].acted == 512
    assert result.experts[0].sha256 == storage.tree_digest(place.final(0))
