"""What a hostile trainer plants in its run folder is not followed, waited for, or believed.

Every file that anybody reads below training_runs/ is replaced here by a link to a secret, a pipe,
a folder and the like.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowrl import cli, storage
from flowrl.commands import sessions
from flowrl.errors import FileRefusedError, FlowrlError, LaunchError
from flowrl.launchers import process, run_status, runner
from flowrl.launchers.base import ExitCause, Exited, Handle, Job, Lost
from flowrl.parallel import events
from flowrl.paths import GraphPaths, RunPaths
from flowrl.redaction import cleaned
from flowrl.runs import read_progress, read_result
from tests.commands.making import running, save, tell_progress
from tests.launchers.conftest import SLEEP, STUBBORN, end_of, signal_to, start_of, until
from tests.parallel.making import WOOD, finish, merge_finished, prepare

SECRET = "not yours"


def link(path: Path) -> None:
    path.symlink_to(path.parents[1] / "secret")


def dangling(path: Path) -> None:
    path.symlink_to(path.parents[1] / "planted")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**31)


PLANTS = [link, dangling, pipe, folder, huge]


def plant(how, path: Path) -> None:
    """Put something in the place of a file that was there, or would be."""
    (path.parents[1] / "secret").write_text(json.dumps({"format": 1, "text": SECRET}))
    if path.is_dir():
        storage.remove_tree(path)
    path.unlink(missing_ok=True)
    how(path)


@pytest.mark.parametrize("how", PLANTS)
def test_records_of_the_runner_are_not_followed(make_job, how):
    job = make_job("pass")
    run_paths = RunPaths(job.folder, 0)
    for path in (run_paths.start_json, run_paths.exit_json, run_paths.result_json):
        plant(how, path)
    assert run_status.read_start(job.folder, job.run_id) is None
    assert run_status.read_exit(job.folder, job.run_id) is None
    handle = Handle(run_id=job.run_id, session="s", pid=2**22 + 1, start_time="no:1")
    assert run_status.outcome(handle, job.folder) is not None
    plant(how, run_paths.result_json)
    with pytest.raises(FileRefusedError):
        read_result(run_paths)


@pytest.mark.parametrize(
    "name", ["training.log", "spec.json", "secrets.json", "environment.json", "start.json"]
)
@pytest.mark.parametrize("how", PLANTS)
def test_a_launch_writes_nowhere_else(local, make_job, how, name):
    """Of a stopped run that goes on in its folder."""
    job = make_job("print('here')", env={"MY_TOKEN": "12345678"})
    plant(how, job.folder / name)
    before = sorted(path.name for path in job.folder.parent.iterdir())
    try:
        end_of(local, local.launch(job), job)
    except LaunchError:
        assert how is folder
    assert sorted(path.name for path in job.folder.parent.iterdir()) == before
    assert SECRET in (job.folder.parent / "secret").read_text()
    assert "here" not in (job.folder.parent / "secret").read_text()


@pytest.mark.parametrize("how", PLANTS)
def test_status_shows_nothing_that_progress_points_to(tmp_path, flowrl, how):
    graph_paths = save(tmp_path, ("A", running()))
    tell_progress(graph_paths.run(0, "A"))
    plant(how, graph_paths.run(0, "A").progress)
    row = json.loads(flowrl("status", tmp_path, "--json", code=69).out)["skills"][0]
    assert (row["frames"], row["phase"]) == (None, "")


@pytest.mark.parametrize("how", PLANTS)
def test_no_log_is_followed_or_read_without_end(tmp_path, capsys, monkeypatch, how):
    monkeypatch.setattr(sessions, "LIMIT_BYTES", 1000)
    graph_paths = save(tmp_path, ("A", running()))
    storage.make_dir(graph_paths.run(0, "A").folder)
    plant(how, graph_paths.run(0, "A").training_log)
    assert cli.main(["logs", "A", "--graph-path", str(tmp_path)]) == (0 if how is huge else 1)
    assert SECRET not in capsys.readouterr().out


def test_a_log_that_becomes_a_link_between_two_looks_is_refused(tmp_path, monkeypatch):
    graph_paths = save(tmp_path, ("A", running()))
    path = graph_paths.run(0, "A").training_log
    storage.make_dir(path.parent)
    plant(link, path)
    monkeypatch.setattr(sessions, "_newest_log", lambda *_: path)
    with pytest.raises(FileRefusedError):
        sessions.LogsCommand(skill="A", graph_path=tmp_path)()


@pytest.mark.parametrize("what", ["module", "metrics", "training_log", "older_training_log"])
@pytest.mark.parametrize("how", [link, dangling, pipe, folder])
def test_records_that_are_none_are_not_archived(tmp_path, what, how):
    graph_paths = GraphPaths(tmp_path)
    ready = prepare(graph_paths, WOOD, 0, {})
    finish(ready.run_paths, {0: 100})
    plant(how, getattr(ready.run_paths, what))
    _, refused = merge_finished(graph_paths)
    assert list(refused) == [ready.run_folder]
    assert "a plain file" in refused[ready.run_folder]
    assert not graph_paths.manifest.exists() or "e0" not in graph_paths.manifest.read_text()


@pytest.mark.parametrize("what", ["policies", "finals", "expert", "file", "run_json"])
def test_experts_that_are_links_are_not_merged(tmp_path, what):
    graph_paths = GraphPaths(tmp_path)
    ready = prepare(graph_paths, WOOD, 0, {})
    run_paths = ready.run_paths
    finish(run_paths, {0: 100})
    first = sorted(path for path in run_paths.final(0).rglob("*") if path.is_file())[0]
    at = {"policies": run_paths.policies, "finals": run_paths.finals, "expert": run_paths.final(0)}
    path = {**at, "file": first, "run_json": run_paths.run_json}[what]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    _, refused = merge_finished(graph_paths)
    assert list(refused) == [run_paths.folder]
    assert not (graph_paths.skill_folder(0, WOOD)).exists()


def test_an_expert_of_impossible_size_is_refused_before_it_is_read(tmp_path):
    graph_paths = GraphPaths(tmp_path)
    run_paths = prepare(graph_paths, WOOD, 0, {}).run_paths
    finish(run_paths, {0: 100})
    with (run_paths.final(0) / "more").open("wb") as file:
        file.truncate(2**33)
    _, refused = merge_finished(graph_paths)
    assert "bytes, over" in refused[run_paths.folder]


@pytest.mark.parametrize("how", [link, dangling, pipe])
@pytest.mark.parametrize("what", ["tensorboard", "wandb"])
def test_what_other_programs_left_is_archived_without_links(tmp_path, what, how):
    graph_paths = GraphPaths(tmp_path)
    run_paths = prepare(graph_paths, WOOD, 0, {}).run_paths
    finish(run_paths, {0: 100})
    folder = getattr(run_paths, what)
    folder.mkdir()
    (folder / "events").write_text("mine")
    plant(how, folder / "planted")
    merged, _ = merge_finished(graph_paths)
    assert len(merged) == 1
    assert [path.name for path in (graph_paths.skill_folder(0, WOOD) / what).iterdir()] == [
        "events"
    ]


def forged_start(job: Job, victim: subprocess.Popen) -> str:
    """start.json as a trainer would like it to be."""
    facts = {"format": 1, "run_id": job.run_id, "pane": None, "server_pid": None, "started_at": 1.0}
    for who in ("runner", "job"):
        facts |= {f"{who}_pid": victim.pid}
        facts |= {f"{who}_start_time": process.start_time_of(victim.pid)}
    return json.dumps(facts)


@pytest.fixture
def victim():
    """A process that is none of the trainer's."""
    sleeper = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
    until(lambda: process.start_time_of(sleeper.pid))
    yield sleeper
    sleeper.kill()
    sleeper.wait()


def test_a_forged_start_has_nobody_else_asked_to_end(local, make_job, victim):
    job = make_job(SLEEP)
    handle = local.launch(job)
    own = start_of(job)
    (job.folder / "start.json").write_text(forged_start(job, victim))
    (job.folder / "run.lock").unlink()
    local.stop(handle, job.folder)
    until(lambda: not process.alive(own.runner_pid, own.runner_start_time))
    assert isinstance(end_of(local, handle, job), Exited)
    assert victim.poll() is None


def test_a_forged_start_has_nobody_else_killed(local, make_job, victim):
    job = make_job(STUBBORN)
    handle = local.launch(job)
    own = start_of(job)
    (job.folder / "start.json").write_text(forged_start(job, victim))
    os.kill(own.runner_pid, signal.SIGKILL)
    until(lambda: not process.start_time_of(own.runner_pid))
    signal_to(own.job_pid)
    assert isinstance(end_of(local, handle, job), Lost)
    assert victim.poll() is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from([10**400, -1, 1e300, "e0.a1.x", 2**64, "\x1b[2J"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)  # fmt: skip
WORDS = """
run_id code signal oom received detail runner_pid job_pid pane server_pid frames updates experts
success_rate step_success mean_episode_length wall_seconds stopped_early total_frames phase
steps_per_second eta_seconds updated_at
"""
KEYS = WORDS.split()


def refusal(read, run_paths: RunPaths) -> str:
    """Why a record is refused; "" when it is not. No other error comes through."""
    try:
        read(run_paths)
    except FlowrlError as error:
        return str(error)
    return ""


@given(facts=st.dictionaries(st.sampled_from(KEYS), JSON), own=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_whatever_stands_in_a_record_nobody_stumbles(tmp_path, facts, own):
    run_paths = RunPaths(tmp_path, 0)
    text = json.dumps({**facts, "format": 1} | ({"run_id": "e0.a1.x"} if own else {}))
    for path in (
        run_paths.start_json,
        run_paths.exit_json,
        run_paths.result_json,
        run_paths.progress,
    ):
        path.write_text(text)
    handle = Handle(run_id="e0.a1.x", session="s", pid=2**22 + 1, start_time="no:1")
    assert run_status.outcome(handle, tmp_path) is not None
    for read in (read_progress, read_result):
        assert len(refusal(read, run_paths)) < 2000


def test_a_signal_that_there_is_none_of_is_no_end(tmp_path):
    facts = {"format": 1, "run_id": "r", "code": None, "signal": 999, "oom": False}
    (tmp_path / "exit.json").write_text(
        json.dumps({**facts, "received": [], "detail": "", "ended_at": 1.0})
    )
    assert run_status.read_exit(tmp_path, "r") is None


def test_what_a_trainer_says_tells_no_terminal_what_to_do():
    said = "\x1b[2Jgone \x1b]52;c;aGk=\x07 \u202eback \x9b31m line\nnext\tcell"
    ended = Exited(cause=ExitCause.EXIT, code=1, detail=said)
    event = cleaned(events.RunEnded("a", "r", ended), ())
    assert isinstance(event.outcome, Exited)
    assert event.outcome.detail == "gone ]52;c;aGk= back 31m line\nnext\tcell"


def test_no_file_of_a_trainer_grows_without_end(local, make_job, monkeypatch):
    source = "open('big', 'w').truncate(2**40)"
    job = make_job(source)
    outcome = end_of(local, local.launch(job), job)
    assert isinstance(outcome, Exited)
    assert (job.folder / "big").stat().st_size <= runner.MAX_FILE_BYTES


def test_a_pipe_in_the_place_of_a_log_stops_no_writer(tmp_path):
    os.mkfifo(tmp_path / "training.log")
    words = [sys.executable, "-I", "-S", str(run_status.LOG_WRITER), str(tmp_path / "training.log")]
    subprocess.run(words, input=b"x" * 10**6, check=True, timeout=30)
