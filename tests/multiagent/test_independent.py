"""The program: real processes that are stopped, killed, hung, and gone on with."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flowrl import independent
from flowrl.command_line import parse, to_argv
from flowrl.experts.checkpoint import has_resume
from flowrl.launchers import run_status
from flowrl.launchers.base import ExitCause, Exited, Finished, Job
from flowrl.launchers.sandbox import compile_cache
from flowrl.multiagent.config import IndependentConfig
from flowrl.paths import IndependentPaths
from tests.launchers.conftest import end_of
from tests.launchers.tmux_sessions import somebody_attached
from tests.multiagent.test_run import TINY, contents, lines
from tests.waiting import AT_ONCE, limit, until

MANY = 12  # epochs
SAVING = (*TINY, f"--epochs={MANY}", "--checkpoint_seconds=1e-6")  # after every epoch


def command(folder: Path, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "flowrl.independent", *SAVING, f"--run_folder={folder}", *words)


def ended(folder: Path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(folder, *words), capture_output=True, text=True, timeout=limit(60), check=False
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    assert independent.main([*SAVING, "--checkpoint_seconds=0", f"--run_folder={folder}"]) == 0
    return IndependentPaths(folder)


def assert_same(folder: Path, whole: IndependentPaths) -> None:
    """The same bits, and each epoch once."""
    run_paths = IndependentPaths(folder)
    assert contents(run_paths) == contents(whole)
    assert [line["epoch"] for line in lines(run_paths)] == list(range(MANY))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "--world is missing"),
        (("--world=nowhere",), "--world nowhere is unknown"),
        (("--world=match_the_sign", "--lag=2"), "--lag is 2: must lie in [0, 1]"),
        (("--world=match_the_sign", "--lag=-1"), "--lag is -1: must lie in [0, 1]"),
        (("--world=match_the_sign", "--agents=0"), "--agents is 0: must be at least 1"),
        (
            ("--world=match_the_sign", "--lr", "1", "2"),
            "--lr has 2 numbers for --agents 3; give 1 or 3",
        ),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(tmp_path, capsys, words, problem):
    folder = tmp_path / "run"
    assert independent.main([*words, f"--run_folder={folder}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line
    assert not folder.exists()


def test_every_flag_goes_through_a_command_line():
    config = parse(IndependentConfig, [*TINY, "--lr", "0.1", "0.2", "0.3", "--no_overlap"])
    assert parse(IndependentConfig, to_argv(config)) == config


@pytest.mark.tmux
def test_a_run_in_tmux_is_attached_to_killed_and_gone_on_with(tmux, tmp_path, whole):
    folder, place = tmp_path / "run", tmp_path / "job"
    place.mkdir()
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    env |= {"JAX_COMPILATION_CACHE_DIR": str(compile_cache(None, os.environ))}
    env |= {name: os.environ[name] for name in os.environ if name in {"XLA_FLAGS", "PYTHONPATH"}}
    job = Job(
        name="flowrl_independent",
        run_id="independent.a1",
        argv=command(folder),
        env=env,
        cwd=Path.cwd(),
        folder=place,
    )
    run_paths = IndependentPaths(folder)
    handle = tmux.launch(job)
    with somebody_attached(tmux, job.name):
        until(
            lambda: run_paths.metrics.exists() and len(lines(run_paths)) > 2,
            seconds=60,
            every=AT_ONCE,
        )
        kept = lines(run_paths)[:-1]  # a kill may come before the last of them is saved
        os.kill(run_status.read_start(place, job.run_id).job_pid, signal.SIGKILL)
        outcome = end_of(tmux, handle, job)
    assert isinstance(outcome, Exited)
    assert (outcome.cause, outcome.signal) == (ExitCause.SIGNAL, signal.SIGKILL)
    assert not run_paths.result_json.exists()
    again = tmux.launch(job)
    assert again.session == handle.session
    assert end_of(tmux, again, job, seconds=60) == Finished(place)
    assert lines(run_paths)[: len(kept)] == kept  # with their seconds: no epoch is trained twice
    assert_same(folder, whole)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 85), (signal.SIGINT, 130)], ids=["TERM", "INT"]
)
@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_saves_and_goes_on(tmp_path, whole, number, code):
    run_paths = IndependentPaths(tmp_path)
    child = subprocess.Popen([*command(tmp_path), "--checkpoint_seconds=0"])
    until(
        lambda: run_paths.metrics.exists() and len(lines(run_paths)) > 2, seconds=60, every=AT_ONCE
    )
    child.send_signal(number)
    assert child.wait(limit(30)) == code
    assert run_paths.resume.exists()
    assert ended(tmp_path).returncode == 0
    assert_same(tmp_path, whole)


HANGING = """
import sys, time, jax
from flowrl import independent
from flowrl.multiagent import run
from flowrl.multiagent.own_worlds import MatchTheSign
def hang():
    print("hangs", file=sys.stderr, flush=True)
    time.sleep(600)
class Hanging(MatchTheSign):
    def VERB(self, *values):
        jax.debug.callback(hang)
        return super().VERB(*values)
run.open_world = Hanging
sys.argv[0] = "independent"
exec(open(independent.__file__).read())
"""


@pytest.mark.parametrize("verb", ["reset", pytest.param("step", marks=pytest.mark.slow)])
def test_a_hung_world_ends_the_program_with_one_line(tmp_path, verb):
    seconds = f"{limit(12 if verb == 'step' else 4):g}"  # compiling a step takes up to 5
    words = (*TINY, f"--run_folder={tmp_path}", f"--stall_timeout={seconds}")
    done = subprocess.run(
        [sys.executable, "-c", HANGING.replace("VERB", verb), *words],
        capture_output=True,
        text=True,
        timeout=limit(60),
        check=False,
    )
    assert done.returncode == 1
    assert "hangs" in done.stderr
    said = f"epoch 0: collect takes longer than --stall_timeout {seconds} seconds"
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def killed(run_paths: IndependentPaths, words: tuple[str, ...], drawn: random.Random) -> bool:
    """Kill a run at a random instant after some epoch; whether a checkpoint had been saved."""

    def logged() -> list[str]:
        return run_paths.metrics.read_text().splitlines() if run_paths.metrics.exists() else []

    before = logged()
    last = drawn.randint(len(before), MANY) if len(before) < MANY else MANY + 1
    child = subprocess.Popen([*command(run_paths.folder), *words], stderr=subprocess.DEVNULL)
    while child.poll() is None and len(logged()) < last:
        time.sleep(0.002)
    time.sleep(drawn.uniform(0, 0.2))
    child.kill()
    ended = child.wait()
    kept = before[:-1]  # the last of them may not have been saved
    assert logged()[: len(kept)] == kept  # with their seconds: no epoch is trained twice
    return ended == -signal.SIGKILL and has_resume(run_paths.resume)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "words",
    [(), ("--lag=0",), ("--algorithm=dqn", "--batch_size=8")],
    ids=["lag 1", "lag 0", "dqn"],
)
def test_a_run_killed_at_random_instants_goes_on_to_the_same_bits(tmp_path, words):
    whole, drawn, kills = IndependentPaths(tmp_path / "whole"), random.Random(str(words)), 0
    assert ended(whole.folder, *words).returncode == 0
    for number in itertools.count():
        run_paths = IndependentPaths(tmp_path / f"run{number}")
        while not run_paths.result_json.exists():
            kills += killed(run_paths, words, drawn)
        assert_same(run_paths.folder, whole)
        if kills >= 12:
            return
