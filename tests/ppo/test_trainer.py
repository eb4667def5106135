from __future__ import annotations

import json
import time
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import jax
import numpy as np
import pytest

from flowrl import ppo_flow, runs, storage
from flowrl.config import PPOConfig, to_json, with_flags
from flowrl.console import EXIT_INTERRUPTED, StopSignal
from flowrl.envs.skill_module import open_module
from flowrl.errors import (
    EXIT_RESUMABLE,
    ConfigError,
    ExpertCorruptError,
    ExpertMissingError,
    ExpertShapeError,
    FalseGainError,
    FileRefusedError,
    TrainingError,
)
from flowrl.experts import checkpoint
from flowrl.measures.objectives import read_curve
from flowrl.networks.moe import ActorCritic, init_expert
from flowrl.ppo import run_io, trainer
from flowrl.ppo.programs import Programs, begin_programs
from flowrl.ppo.run_io import read_assignment
from flowrl.program_cache import ProgramCache
from flowrl.runs import ExpertVersion, LineageEntry, TrainConfig, expert_shapes
from tests.networks.making import words_of
from tests.ppo.modules import WALK, relay_run, run_folder
from tests.ppo.tiny_envs import Broken, Liar, Relay

FRAMES = 4 * 8  # of one update
SHAPES = expert_shapes(2, 2, 4)


class Countdown:
    """Requests a stop after some updates."""

    def __init__(self, updates: int, exit_code: int = EXIT_RESUMABLE) -> None:
        self.left = updates
        self.exit_code = exit_code

    def __call__(self) -> int | None:
        self.left -= 1
        return self.exit_code if self.left <= 0 else None


RELAY_PROGRAMS: dict[Programs, Programs] = {}


class Listing(ProgramCache):
    """Says under which names programs would be looked for."""

    def begin(self, spec):
        return self.path(Path("programs"), spec).name


@pytest.fixture
def open_relay():
    """Opens environments with the programs of earlier tests, if they had the same compiled in."""

    def opening(config, _=None):
        names = begin_programs(Relay(), config, Listing())
        if names not in RELAY_PROGRAMS:
            RELAY_PROGRAMS[names] = begin_programs(Relay(), config)
        return Relay(), RELAY_PROGRAMS[names]

    return opening


def opened(kind, cache, config, module=None):
    """What `open_env` returns, with an environment of this kind."""
    env = kind()
    return env, begin_programs(env, config, cache)


@pytest.fixture
def run_paths(tmp_path, monkeypatch, open_relay):
    monkeypatch.setattr(trainer, "open_env", open_relay)
    return run_folder(tmp_path / "run")


def config_of(run_paths, **changes) -> TrainConfig:
    facts = {
        "total_timesteps": 5 * FRAMES,
        "num_envs": 4,
        "num_steps": 8,
        "num_minibatches": 2,
        "update_epochs": 1,
        "layer_size": 4,
        "log_seconds": 0.0,
    }
    return with_flags(TrainConfig(module_path=run_paths.module), **{**facts, **changes})


def finals(run_paths) -> list:
    return [
        checkpoint.load_expert(run_paths.final(n), checkpoint.like_of(SHAPES)) for n in range(3)
    ]


def fresh(seed: int):
    return init_expert(ActorCritic(2, 4), words_of(jax.random.key(seed)), observation_size=2)


def same(one, other) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all((np.asarray(left) == np.asarray(right)).all() for left, right in pairs)


def test_a_whole_run_leaves_experts_and_a_result_that_vouches_for_them(run_paths):
    relay_run(run_paths)
    assert trainer.run(config_of(run_paths), StopSignal()) == 0
    result = runs.read_result(run_paths)
    assert result.run_id == "e9.a1.0badcafe"
    assert (result.frames, result.updates, result.stopped_early) == (5 * FRAMES, 5, False)
    assert [report.expert for report in result.experts] == [3, 5, 9]
    assert [report.acted for report in result.experts] == [80, 0, 80]
    for local, report in enumerate(result.experts):
        assert report.sha256 == storage.tree_digest(run_paths.final(local))
        assert report.shapes == SHAPES
    assert not run_paths.resume.exists()
    assert [entry.name for entry in run_paths.policies.iterdir()] == ["final"]


def by_hand(run_paths, *words: str) -> tuple[runs.RunResult, runs.TrainingRun]:
    """Start the trainer in a prepared folder; returns its result and the run's record."""
    relay_run(run_paths, config=to_json(config_of(run_paths, lr=0.05).ppo), origins={"lr": "sweep"})
    assert ppo_flow.main([f"--module_path={run_paths.module}", *words]) == 0
    return runs.read_result(run_paths), runs.read_run(run_paths)


def contents(run_paths) -> list[str]:
    return [report.content for report in runs.read_result(run_paths).experts]


def test_a_run_started_by_hand_trains_as_run_json_says(run_paths):
    usual, found = [], []
    for rate in (PPOConfig().lr, 0.05):
        trainer.run(config_of(run_paths, lr=rate), StopSignal())
        usual.append(contents(run_paths))
    result, run = by_hand(run_paths)
    found = contents(run_paths)
    assert found == usual[1] != usual[0]
    assert result.frames == 5 * FRAMES
    assert run.origins == {"lr": "sweep"}


def test_a_flag_given_by_hand_wins_and_is_written_down(run_paths, caplog):
    result, run = by_hand(run_paths, f"--total_timesteps={3 * FRAMES}", "--acting_threads=1")
    assert result.frames == 3 * FRAMES
    assert run.config == to_json(config_of(run_paths, lr=0.05, total_timesteps=3 * FRAMES).ppo)
    assert run.origins == {"lr": "sweep", "total_timesteps": "command line"}
    assert f"now says --total_timesteps {3 * FRAMES}, as the command line" in caplog.text
    assert ppo_flow.main([f"--module_path={run_paths.module}"]) == 0
    assert runs.read_result(run_paths).frames == 3 * FRAMES


@pytest.mark.parametrize(
    ("words", "config", "why"),
    [
        (["--layer_size=8"], {}, "layer_size"),
        (["--lr=-1"], {}, "--lr"),
        (["--num_minibatches=3"], {}, "--num_minibatches"),
        ([], {"lr": "fast"}, "run.json: --lr"),
    ],
)
def test_a_flag_that_is_refused_is_not_written_down(run_paths, capsys, words, config, why):
    checkpoint.save_expert(run_paths.seed(0), fresh(0))
    relay_run(run_paths, config={**to_json(config_of(run_paths).ppo), **config})
    before = run_paths.run_json.read_bytes()
    assert ppo_flow.main([f"--module_path={run_paths.module}", *words]) != 0
    assert why in capsys.readouterr().err
    assert run_paths.run_json.read_bytes() == before


def test_progress_and_metrics_tell_of_every_update(run_paths):
    trainer.run(config_of(run_paths), StopSignal())
    lines = [json.loads(line) for line in run_paths.metrics.read_text().splitlines()]
    assert [line["frames"] for line in lines] == [FRAMES * n for n in range(1, 6)]
    assert {"loss", "success_rate", "success/0_Go_First", "acted/expert_9", "lr"} <= set(lines[0])
    progress = runs.read_progress(run_paths)
    assert progress is not None
    assert (progress.run_id, progress.phase) == ("standalone", "saving")
    assert progress.frames == progress.total_frames == 5 * FRAMES
    assert progress.step_ends == runs.read_result(run_paths).step_ends
    assert progress.step_ends[0].begun > 0


def test_seeds_are_trained_on_and_an_idle_one_comes_back_bit_for_bit(run_paths):
    for local in range(3):
        checkpoint.save_expert(run_paths.seed(local), fresh(50 + local))
    trainer.run(config_of(run_paths), StopSignal())
    assert same(finals(run_paths)[1], fresh(51))
    contents = [report.content for report in runs.read_result(run_paths).experts]
    unchanged = [checkpoint.array_digest(fresh(50 + local)) for local in range(3)]
    assert [one == other for one, other in zip(contents, unchanged, strict=True)] == [
        False,
        True,
        False,
    ]
    assert not same(finals(run_paths)[0], fresh(50))
    np.testing.assert_allclose(
        finals(run_paths)[0]["actor"]["dense_1"]["kernel"],
        fresh(50)["actor"]["dense_1"]["kernel"],
        atol=0.05,
    )


def test_a_stopped_run_goes_on_where_it_was(run_paths):
    """Twice, and once for each reason to stop."""
    stopped = Countdown(2, EXIT_INTERRUPTED)
    assert trainer.run(config_of(run_paths), stopped) == EXIT_INTERRUPTED
    assert not run_paths.result_json.exists()
    assert not run_paths.finals.exists()
    assert trainer.run(config_of(run_paths), Countdown(2)) == EXIT_RESUMABLE
    assert trainer.run(config_of(run_paths), StopSignal()) == 0
    result = runs.read_result(run_paths)
    assert (result.updates, result.frames) == (5, 5 * FRAMES)
    assert sum(report.acted for report in result.experts) == result.frames
    assert not run_paths.resume.exists()


def with_success(monkeypatch, *success: float, full: bool = True) -> None:
    """Have updates of this number succeed so often, over a full window of episodes or not."""

    def told(*given, **settings):
        for update in real(*given, **settings):
            share = success[update.counters.updates - 1]
            rates = replace(update.rates, step_success=(1.0, share), full=full)
            yield replace(update, rates=rates)

    real = trainer.train
    monkeypatch.setattr(trainer, "train", told)


@pytest.mark.parametrize("stops", [[], [3]], ids=["at once", "with a stop"])
def test_an_expert_that_is_kept_is_credited_with_the_frames_until_then(
    run_paths, monkeypatch, stops
):
    with_success(monkeypatch, 0.2, 0.8, 0.1, 0.3, 0.2)
    for updates in stops:
        trainer.run(config_of(run_paths), Countdown(updates))
    assert trainer.run(config_of(run_paths), StopSignal()) == 0
    result = runs.read_result(run_paths)
    assert (result.kept_update, result.success_rate, result.last_success_rate) == (2, 0.8, 0.2)
    assert (result.updates, result.frames) == (5, 5 * FRAMES)
    assert sum(report.acted for report in result.experts) == 2 * FRAMES


def test_the_last_update_counts_unless_an_earlier_one_was_clearly_better(run_paths, monkeypatch):
    with_success(monkeypatch, 0.2, 0.6, 0.5, 0.4, 0.5)
    assert trainer.run(config_of(run_paths), StopSignal()) == 0
    result = runs.read_result(run_paths)
    assert (result.kept_update, result.success_rate, result.last_success_rate) == (None, 0.5, None)
    assert sum(report.acted for report in result.experts) == 5 * FRAMES


def test_after_a_resume_success_is_unknown_until_the_window_is_full(run_paths, monkeypatch):
    with monkeypatch.context() as patched:
        with_success(patched, *[0.5] * 5, full=False)
        trainer.run(config_of(run_paths), Countdown(2))
        trainer.run(config_of(run_paths), Countdown(2))
    with_success(monkeypatch, *[0.5] * 5, full=True)
    trainer.run(config_of(run_paths), StopSignal())
    lines = [json.loads(line) for line in run_paths.metrics.read_text().splitlines()]
    assert [line["success_rate"] for line in lines] == [0.5, 0.5, None, None, 0.5]
    assert [point.frames for point in read_curve(run_paths.metrics)] == [
        *(FRAMES, 2 * FRAMES, 5 * FRAMES)
    ]


def test_a_run_that_is_pruned_ends_with_what_it_has(run_paths):
    run_paths.prune_json.write_text("{}")
    assert trainer.run(config_of(run_paths), Countdown(2)) == 0
    result = runs.read_result(run_paths)
    assert (result.updates, result.stopped, result.stopped_early) == (2, "pruned", False)
    assert finals(run_paths)
    assert not run_paths.resume.exists()


def test_a_prune_that_comes_with_the_last_update_changes_nothing(run_paths):
    run_paths.prune_json.write_text("{}")
    assert trainer.run(config_of(run_paths), Countdown(5)) == 0
    assert runs.read_result(run_paths).stopped == ""


def test_a_run_goes_on_with_another_number_of_threads(run_paths):
    assert trainer.run(config_of(run_paths, acting_threads=2), Countdown(2)) == EXIT_RESUMABLE
    assert trainer.run(config_of(run_paths), StopSignal()) == 0
    assert runs.read_result(run_paths).frames == 5 * FRAMES


def test_a_stop_keeps_parameters_moments_counters_and_key(run_paths, open_relay):
    config = config_of(run_paths)
    trainer.run(config, Countdown(3))
    env, programs = open_relay(config.ppo)
    module = trainer.open_module(config.module_path)
    run = trainer.Opened(config, module, read_assignment(config, module), env, programs)
    resumed = [trainer.prepare(run) for _ in range(2)]
    (learner, counters, best), (other, _, _) = resumed
    assert same(learner.train, other.train)
    assert (counters.updates, counters.frames) == (3, 3 * FRAMES)
    assert counters.acted == (48, 0, 48)
    counts = [leaf for leaf in jax.tree.leaves(learner.train.opt_state) if leaf.shape == (3,)]
    assert [list(count) for count in counts] == [[6, 0, 6]]
    run_io.save_checkpoint(
        run_paths, config.ppo, SimpleNamespace(learner=learner, counters=counters), best
    )
    again, same_counters, _ = trainer.prepare(run)
    assert same(again.train, learner.train)
    assert same_counters == counters


class Killed(BaseException):
    """The trainer gets no time for anything."""


class Kill:
    """Dies after some updates instead of requesting a stop."""

    def __init__(self, updates: int) -> None:
        self.left = updates

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed


def die_at_checkpoint(number: int, monkeypatch) -> None:
    """Die when this checkpoint is written and not yet in its place."""
    commit_dir = storage.commit_dir
    saved = []

    def dying(prepared, final):
        saved.append(final)
        if len(saved) == number:
            raise Killed
        commit_dir(prepared, final)

    monkeypatch.setattr(storage, "commit_dir", dying)


def logged_frames(run_paths) -> list[int]:
    return [json.loads(line)["frames"] for line in run_paths.metrics.read_text().splitlines()]


def test_a_killed_run_goes_on_from_its_last_checkpoint(run_paths, monkeypatch):
    config = config_of(run_paths, checkpoint_seconds=1e-9)
    with monkeypatch.context() as patched:
        die_at_checkpoint(4, patched)  # three checkpoints, and four lines of metrics
        with pytest.raises(Killed):
            trainer.run(config, StopSignal())
    assert logged_frames(run_paths) == [FRAMES * n for n in (1, 2, 3, 4)]
    first_lines = run_paths.metrics.read_text().splitlines()[:3]
    assert trainer.run(config, StopSignal()) == 0
    result = runs.read_result(run_paths)
    assert (result.updates, result.frames) == (5, 5 * FRAMES)
    assert sum(report.acted for report in result.experts) == result.frames
    assert logged_frames(run_paths) == [FRAMES * n for n in range(1, 6)]
    assert run_paths.metrics.read_text().splitlines()[:3] == first_lines
    assert not run_paths.resume.exists()


def test_without_checkpoints_a_killed_run_starts_over(run_paths):
    config = config_of(run_paths, checkpoint_seconds=0.0)
    with pytest.raises(Killed):
        trainer.run(config, Kill(4))
    assert not run_paths.resume.exists()
    assert trainer.run(config, StopSignal()) == 0
    assert runs.read_result(run_paths).updates == 5
    assert logged_frames(run_paths) == [FRAMES * n for n in range(1, 6)]


def test_a_checkpoint_is_kept_until_the_next_one_is_whole(run_paths, monkeypatch):
    config = config_of(run_paths, checkpoint_seconds=1e-9)
    with monkeypatch.context() as patched:
        die_at_checkpoint(3, patched)
        with pytest.raises(Killed):
            trainer.run(config, StopSignal())
    seen = []
    monkeypatch.setattr(trainer, "train", lambda *_, counters, **__: seen.append(counters) or ())
    trainer.run(config, StopSignal())
    assert seen[0].updates == 2


@pytest.mark.parametrize("error", [OSError(28, "No space left"), ValueError("RESOURCE_EXHAUSTED")])
def test_a_checkpoint_that_cannot_be_saved_does_not_stop_training(
    run_paths, monkeypatch, caplog, error
):
    def fail(*_):
        raise error

    monkeypatch.setattr(checkpoint, "save_resume", fail)
    assert trainer.run(config_of(run_paths, checkpoint_seconds=1e-9), StopSignal()) == 0
    assert "no new checkpoint" in caplog.text


def test_checkpoints_come_as_often_as_was_said(monkeypatch):
    saved = []
    now = 0.0
    monkeypatch.setattr(run_io.time, "monotonic", lambda: now)
    checkpointer = run_io.Checkpointer(300.0)
    for now in (1.0, 299.0, 300.0, 400.0, 599.0, 600.0):
        checkpointer.due(partial(saved.append, now))
    assert saved == [300.0, 600.0]


def test_the_time_of_a_run_covers_all_its_starts_from_their_beginning_on(
    run_paths, monkeypatch, open_relay
):
    def slowly(*opening):
        time.sleep(0.2)
        return open_relay(*opening)

    monkeypatch.setattr(trainer, "open_env", slowly)
    began = time.monotonic()
    trainer.run(config_of(run_paths), Countdown(2))
    trainer.run(config_of(run_paths), StopSignal())
    seconds = time.monotonic() - began
    assert 2 * 0.2 <= runs.read_result(run_paths).wall_seconds <= seconds


def test_no_resume_starts_over(run_paths):
    trainer.run(config_of(run_paths), Countdown(3))
    trainer.run(config_of(run_paths, resume=False), StopSignal())
    assert runs.read_result(run_paths).updates == 5
    assert not run_paths.resume.exists()


def test_a_run_whose_stop_comes_with_its_last_update_is_whole(run_paths):
    assert trainer.run(config_of(run_paths), Countdown(5)) == 0
    assert runs.read_result(run_paths).updates == 5


def test_a_later_attempt_begins_elsewhere(run_paths):
    relay_run(run_paths)
    trainer.run(config_of(run_paths, total_timesteps=FRAMES), StopSignal())
    first = finals(run_paths)
    relay_run(run_paths, attempt=2)
    trainer.run(config_of(run_paths, total_timesteps=FRAMES), StopSignal())
    assert not same(first, finals(run_paths))
    relay_run(run_paths, attempt=1)
    trainer.run(config_of(run_paths, total_timesteps=FRAMES), StopSignal())
    assert same(first, finals(run_paths))


def test_a_broken_reward_leaves_nothing_half_written(run_paths, monkeypatch):
    broken = type("Broken", (Broken, Relay), {"earned": Broken.earned})
    monkeypatch.setattr(trainer, "open_env", partial(opened, broken, None))
    with pytest.raises(TrainingError, match="update 1 of 5"):
        trainer.run(config_of(run_paths), StopSignal())
    assert not run_paths.result_json.exists()
    assert not run_paths.policies.exists()


@pytest.mark.parametrize("updates", [5, 20])
def test_a_skill_that_lies_fails_in_one_line_and_leaves_no_result(run_paths, monkeypatch, updates):
    """A short run is judged at its end, a long one as soon as there are a hundred claims."""
    monkeypatch.setattr(trainer, "open_env", partial(opened, Liar, None))
    config = config_of(run_paths, total_timesteps=updates * FRAMES, success_state_rate=1.0)
    with pytest.raises(FalseGainError, match=r"Go First × 1 was done .* times, .* of them without"):
        trainer.run(config, StopSignal())
    assert len(run_paths.metrics.read_text().splitlines()) == min(updates, 13)
    assert not run_paths.result_json.exists()


def test_a_disk_that_refuses_metrics_does_not_stop_training(run_paths, caplog):
    run_paths.metrics.mkdir()
    run_paths.progress.mkdir()
    assert trainer.run(config_of(run_paths), StopSignal()) == 0
    assert "metrics.jsonl" in caplog.text
    assert "progress.json" in caplog.text


def test_a_kill_before_the_result_leaves_none(run_paths, monkeypatch, open_relay):
    def die(run_paths, result):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runs, "write_result", die)
    with pytest.raises(OSError, match="No space"):
        trainer.run(config_of(run_paths, checkpoint_seconds=1e-9), StopSignal())
    assert run_paths.finals.is_dir()
    assert not run_paths.result_json.exists()
    assert checkpoint.has_resume(run_paths.resume)
    monkeypatch.undo()
    monkeypatch.setattr(trainer, "open_env", open_relay)
    assert trainer.run(config_of(run_paths), StopSignal()) == 0
    assert not checkpoint.has_resume(run_paths.resume)


def ancestor(local_expert: int, sha256: str) -> ExpertVersion:
    return ExpertVersion(
        index=local_expert,
        skill="Go First",
        version="g1",
        frames=10,
        sha256=sha256,
        content="0" * 64,
        shapes={},
        lineage=(LineageEntry(run_id="g1", frames=10),),
    )


def test_a_missing_seed_is_refused(run_paths):
    relay_run(run_paths, ancestors=(ancestor(3, "0" * 64),))
    with pytest.raises(ExpertMissingError, match="expert 3"):
        trainer.run(config_of(run_paths), StopSignal())


def test_a_seed_that_is_not_the_named_version_is_refused(run_paths):
    checkpoint.save_expert(run_paths.seed(0), fresh(0))
    relay_run(run_paths, ancestors=(ancestor(3, "0" * 64),))
    with pytest.raises(ExpertCorruptError, match="not the version"):
        trainer.run(config_of(run_paths), StopSignal())
    relay_run(run_paths, ancestors=(ancestor(3, storage.tree_digest(run_paths.seed(0))),))
    assert trainer.run(config_of(run_paths), StopSignal()) == 0


def test_a_seed_of_another_width_is_refused(run_paths):
    checkpoint.save_expert(run_paths.seed(0), fresh(0))
    with pytest.raises(ExpertShapeError, match="--layer_size"):
        trainer.run(config_of(run_paths, layer_size=8), StopSignal())


def test_a_run_json_of_another_plan_is_refused(run_paths):
    relay_run(run_paths, experts=(3, 6, 9))
    with pytest.raises(FileRefusedError, match="different experts or plans"):
        trainer.run(config_of(run_paths), StopSignal())


def test_a_module_path_that_names_no_expert_is_refused(run_paths):
    path = run_paths.module.with_name("two.py")
    config = replace(config_of(run_paths), module_path=path)
    module = trainer.open_module(run_paths.module)
    with pytest.raises(ConfigError, match="--module_path"):
        read_assignment(config, module)


class Watched(Relay):
    """Remembers whether anybody traced it."""

    def __init__(self) -> None:
        self.traced = False

    def step(self, key, state, actions):
        self.traced = True
        return super().step(key, state, actions)


@pytest.fixture
def cache(tmp_path):
    before = jax.config.values["jax_compilation_cache_dir"]
    yield tmp_path / "cache"
    jax.config.update("jax_compilation_cache_dir", before)


def test_a_run_by_kept_programs_is_that_of_a_run_that_traces(run_paths, monkeypatch, cache):
    """Also when it is stopped and goes on."""
    found, kept, whole = [], cache / "programs", StopSignal()
    starts = ((None, whole), (kept, whole), (kept, whole), (kept, Countdown(2)), (kept, whole))
    for folder, stop in starts:
        env = Watched()
        monkeypatch.setattr(
            trainer, "open_env", partial(opened, lambda e=env: e, ProgramCache(folder))
        )
        code = trainer.run(config_of(run_paths, compile_cache=cache), stop)
        assert code == (0 if stop is whole else EXIT_RESUMABLE)
        found.append((finals(run_paths) if stop is whole else [], env.traced))
    assert [traced for _, traced in found] == [True, True, False, False, False]
    assert same(found[0][0], found[1][0])
    assert same(found[0][0], found[2][0])
    assert runs.read_result(run_paths).updates == 5


class Recording(Listing):
    """Adds the names of programs to a list."""

    found: ClassVar[list[str]] = []

    def begin(self, spec):
        self.found.append(super().begin(spec))


SIZES = {"act", "learn", "zeros", "put", "first"}
MADE_ANEW = {
    "num_envs": {"act", "learn", "first"},  # as many worlds lie ready
    "env_shards": SIZES | {"shards"},
    "acting_threads": SIZES | {"shards"},
    "num_steps": {"act", "learn"},
    "world_pool": {"act", "zeros", "put", "first"},
    "update_epochs": {"learn"},
    "num_minibatches": {"learn"},
    "grad_sync_period": {"learn"},
    "layer_size": {"act", "learn", "ready", "pad", "unpack"},
    "activation": {"act", "learn"},
    "precision": {"act", "learn"},
    "sight": SIZES
    | {"worlds", "keys", "shards", "ready", "pad", "unpack"},  # another game, as it were
    "egocentric": SIZES | {"worlds", "keys", "shards", "ready", "pad", "unpack"},
}
CHANGES = {
    "env_name": "Craftax-Classic-Symbolic-v1",  # another game has other modules
    "env_shards": 2,
    "acting_threads": 2,
    "num_devices": 1,  # the tests have no other
    "activation": "relu",
    "precision": "bf16",
    "frame_accounting": "total",
    "average_rule": "median",
    "compile_cache": Path("elsewhere"),
    "wandb_entity": "somebody",
    "average_quorum": 3,
    "average_deadline": 3.0,
}


@pytest.mark.craftax
def test_a_field_makes_only_those_programs_anew_that_read_it(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "ProgramCache", Recording)
    module = open_module(run_folder(tmp_path / "walk", WALK, (0, 4)).module)

    def names(**changes):
        Recording.found.clear()
        trainer.open_env(replace(PPOConfig(acting_threads=1), **changes), module)
        return {name.partition("-")[0]: name for name in Recording.found}

    before, made = names(), {}
    for field in fields(PPOConfig):
        value = getattr(PPOConfig(), field.name)
        other = CHANGES[field.name] if field.name in CHANGES else other_than(value)
        after = names(**{field.name: other})
        if changed := {name for name in before if before[name] != after[name]}:
            made[field.name] = changed
    assert made == MADE_ANEW


def other_than(value):
    if isinstance(value, bool):
        return not value
    return f"{value}s" if isinstance(value, str) else 2 * value + 1 * (value == 0)


def test_acting_serves_any_number_of_experts_up_to_eight_and_learning_only_its_own(run_paths):
    names = []
    for num_experts in (2, 3, 9):
        env = Relay()
        env.num_experts = num_experts
        names.append(begin_programs(env, config_of(run_paths).ppo, Listing()))
    assert names[0].act == names[1].act != names[2].act
    assert len({name.learn for name in names}) == 3


@pytest.mark.parametrize(
    ("flag", "numbers"), [("env_shards", (1, 2)), ("grad_sync_period", (1, 2))]
)
def test_a_checkpoint_of_other_shards_goes_on_with_a_warning(run_paths, caplog, flag, numbers):
    before, now = numbers
    stopped = config_of(run_paths, **{"env_shards": 1, flag: before})
    assert trainer.run(stopped, Countdown(2)) == EXIT_RESUMABLE
    assert "other worlds follow" not in caplog.text
    assert trainer.run(config_of(run_paths, **{"env_shards": 1, flag: now}), StopSignal()) == 0
    assert runs.read_result(run_paths).updates == 5
    assert f"--{flag} {before}, not --{flag} {now}: other worlds follow" in caplog.text


@pytest.mark.parametrize("ask", [True, False], ids=["asked", "not asked"])
def test_a_run_whose_success_does_not_rise_ends_with_what_it_has_if_asked(run_paths, ask):
    flat = {"lr": 1e-9, "total_timesteps": 96 * FRAMES, "success_state_rate": 1.0}
    assert trainer.run(config_of(run_paths, **flat, stop_when_stuck=ask), StopSignal()) == 0
    result = runs.read_result(run_paths)
    assert (result.stopped, result.stopped_early) == ("converged" if ask else "", False)
    assert (result.updates < 96 / 2) == ask
    assert run_paths.finals.is_dir()
    assert not run_paths.resume.exists()


def test_a_run_that_was_stopped_is_judged_once_its_success_is_known_again(run_paths):
    flat = {"lr": 1e-9, "total_timesteps": 240 * FRAMES, "success_state_rate": 1.0}
    config = config_of(run_paths, **flat, stop_when_stuck=True)
    assert trainer.run(config, Countdown(25)) == EXIT_RESUMABLE
    assert trainer.run(config, StopSignal()) == 0
    result, known = runs.read_result(run_paths), read_curve(run_paths.metrics)
    unknown = {*range(26, result.updates)} - {point.frames // FRAMES for point in known}
    assert unknown
    assert unknown == {*range(26, max(unknown) + 1)}
    assert (result.stopped, result.updates < 240) == ("converged", True)
