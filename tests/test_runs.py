"""The seam's files come back as they were written, or are refused."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl import runs
from flowrl.errors import FileRefusedError
from flowrl.paths import RunPaths
from tests.sealing import rewrite

RUN = runs.TrainingRun(
    run_id="e4.a1.0123abcd",
    skill="Make Pickaxe",
    expert=4,
    attempt=1,
    plan=(
        runs.PlannedStep(skill="Collect Wood", count=3, expert=0),
        runs.PlannedStep(skill="Make Pickaxe", count=1, expert=4, max_steps=900),
    ),
    experts=(0, 4),
    ancestors=(
        runs.ExpertVersion(
            index=0,
            skill="Collect Wood",
            version="v1",
            frames=9,
            sha256="a",
            content="aa",
            shapes={"actor/dense_0/bias": (4,)},
            lineage=(runs.LineageEntry(run_id="e0.a1.aa", frames=9),),
        ),
    ),
    config={"egocentric": True, "lr": 0.001},
    module_sha256=hashlib.sha256(b"PLAN = []\n").hexdigest(),
)
RESULT = runs.RunResult(
    run_id="e4.a1.0123abcd",
    frames=100,
    experts=(
        runs.ExpertReport(
            expert=0, acted=60, sha256="b", content="bb", shapes={"actor/dense_0/kernel": (4, 2)}
        ),
        runs.ExpertReport(expert=4, acted=40, sha256="c", content="cc", shapes={}),
    ),
    success_rate=0.75,
    step_success=(1.0, 0.75),
    mean_episode_length=12.5,
    updates=3,
    wall_seconds=1.5,
    stopped_early=True,
)


def test_a_run_comes_back_as_written(tmp_path):
    run_paths = RunPaths(tmp_path, 4)
    runs.write_run(run_paths, RUN)
    assert runs.read_run(run_paths) == RUN


def test_a_run_of_an_earlier_version_was_not_egocentric(tmp_path):
    run_paths = RunPaths(tmp_path, 4)
    runs.write_run(run_paths, RUN)
    rewrite(run_paths.run_json, lambda facts: facts["config"].pop("egocentric"))
    assert runs.read_run(run_paths).config == {"egocentric": False, "lr": 0.001}


def test_a_run_that_says_no_limits_has_none(tmp_path):
    run_paths = RunPaths(tmp_path, 4)
    runs.write_run(run_paths, RUN)
    rewrite(run_paths.run_json, lambda facts: [step.pop("max_steps") for step in facts["plan"]])
    assert [step.max_steps for step in runs.read_run(run_paths).plan] == [None, None]


def test_a_result_comes_back_as_written(tmp_path):
    run_paths = RunPaths(tmp_path, 4)
    runs.write_result(run_paths, RESULT)
    assert runs.read_result(run_paths) == RESULT


def test_progress_is_none_before_the_first_and_comes_back_as_written(tmp_path):
    run_paths = RunPaths(tmp_path, 4)
    assert runs.read_progress(run_paths) is None
    progress = runs.Progress(
        run_id="x",
        updates=1,
        frames=2,
        total_frames=3,
        steps_per_second=4.5,
        step_success=(0.5,),
        eta_seconds=None,
        phase="training",
        updated_at=6.0,
    )
    runs.write_progress(run_paths, progress)
    assert runs.read_progress(run_paths) == progress


@pytest.mark.parametrize("key", ["run_id", "frames", "experts", "success_rate", "step_success"])
@pytest.mark.parametrize("value", [None, -1, "x\ny", [2], {"a": 1}, 2.5], ids=repr)
def test_a_wrong_value_in_a_result_is_refused_by_the_files_name(tmp_path, key, value):
    run_paths = RunPaths(tmp_path, 4)
    runs.write_result(run_paths, RESULT)
    rewrite(run_paths.result_json, lambda facts: facts.update({key: value}))
    with pytest.raises(FileRefusedError, match=r"result\.json is malformed"):
        runs.read_result(run_paths)


def test_a_result_without_a_seal_is_read_and_one_with_a_wrong_seal_is_not(tmp_path):
    run_paths = RunPaths(tmp_path, 4)
    runs.write_result(run_paths, RESULT)
    facts = json.loads(run_paths.result_json.read_text())
    seal = facts.pop("sha256")
    run_paths.result_json.write_text(json.dumps(facts))
    assert runs.read_result(run_paths) == RESULT
    run_paths.result_json.write_text(json.dumps({**facts, "frames": 101, "sha256": seal}))
    with pytest.raises(FileRefusedError, match=r"result\.json is damaged or was edited"):
        runs.read_result(run_paths)


def test_a_module_that_was_not_made_for_the_run_is_refused(tmp_path):
    run_paths = RunPaths(tmp_path, 4)
    run_paths.module.write_text("PLAN = []\n")
    runs.check_module(run_paths, RUN)
    run_paths.module.write_text("PLAN = {}\n")
    with pytest.raises(FileRefusedError, match=r"4\.py is not the module"):
        runs.check_module(run_paths, RUN)


@given(st.binary(max_size=200))
def test_noise_is_refused_not_half_read(tmp_path_factory, noise):
    run_paths = RunPaths(tmp_path_factory.mktemp("run"), 4)
    run_paths.result_json.write_bytes(noise)
    with pytest.raises(FileRefusedError):
        runs.read_result(run_paths)
