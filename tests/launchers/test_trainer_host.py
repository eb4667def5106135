"""The host that has loaded the trainers: what it starts is what `python -m` would be."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.launchers import trainer_process
from flowrl.launchers.job import Exited, Why
from flowrl.launchers.local import LocalLauncher
from tests.launchers.conftest import end_of, until

MODULE = """
import os, sys
loaded_by = None

def load():
    global loaded_by
    print("noise of a library")
    loaded_by = os.getpid()
    LOAD

def main():
    if loaded_by is None:
        load()
    ACT
    return 0

if __name__ == "__main__":
    sys.exit(main())
"""
DESCRIBE = """
    import json, signal
    status = open("/proc/self/status").read()
    signals = {line[:6]: int(line[8:], 16) % 2**31 for line in status.splitlines()
               if line[:6] in ("SigIgn", "SigBlk", "SigCgt")}  # without those of libc itself
    files = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
             if os.path.exists(f"/proc/self/fd/{n}")]
    facts = {
        "forked": loaded_by != os.getpid(),
        "open": sorted(os.path.basename(name).partition(":")[0] for name in files),
        "env": dict(os.environ), "signals": signals, "umask": os.umask(0),
        "path": sys.path, "words": sys.argv[1:],
        "leader": os.getsid(0) == os.getppid(), "group": os.getpgrp() == os.getppid(),
        "title": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
        "runner": open(f"/proc/{os.getppid()}/cmdline").read().rstrip("\\0").split("\\0")[:-1],
        "handlers": [str(signal.getsignal(n)) for n in (1, 2, 3, 13, 15, 17, 25)],
        "files": __import__("resource").getrlimit(1), "streams": str(sys.stdout.encoding),
    }
    with open("facts.json", "w") as file: json.dump(facts, file)
"""


@pytest.fixture
def place(tmp_path) -> Path:
    """Where the trainers' module lies, and where all of them are started."""
    folder = tmp_path / "place"
    folder.mkdir()
    return folder


@pytest.fixture
def launcher():
    launcher = LocalLauncher(grace_seconds=10.0, trainer="own_trainer")
    yield launcher
    launcher.close()


@pytest.fixture
def job_of(make_job, place):
    """Makes jobs that run the module, all in one folder and one environment."""

    def make(act: str = "pass", *, load: str = "pass", **facts):
        indented = act if act.startswith("\n") else f"{act}\n"
        source = MODULE.replace("    ACT", indented if act == DESCRIBE else f"    {act}")
        (place / "own_trainer.py").write_text(source.replace("LOAD", load))
        env = {"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
        job = make_job("", cwd=place, env={**env, **facts.pop("env", {})}, **facts)
        return replace(job, argv=(sys.executable, "-m", "own_trainer", "a", "b c"))

    return make


def ended(launcher, job):
    return end_of(launcher, launcher.launch(job), job)


def warmed(launcher, job_of, act="pass", **facts):
    """Let the launcher's host of trainers be there."""
    ended(launcher, job_of(act, **facts))
    assert launcher._trainer_host._ready


def facts_of(launcher, job, place):
    outcome = ended(launcher, job)
    assert isinstance(outcome, Exited)
    assert outcome.why is Why.NO_RESULT, outcome
    return json.loads((place / "facts.json").read_text())


def test_a_forked_trainer_is_like_one_that_python_was_started_for(launcher, job_of, place):
    launcher._trainer_host.able = False
    started = facts_of(launcher, job_of(DESCRIBE, env={"SOME_TOKEN": "one"}), place)
    launcher._trainer_host.able = True
    forked = facts_of(launcher, job_of(DESCRIBE, env={"SOME_TOKEN": "one"}), place)
    assert forked.pop("forked")
    assert not started.pop("forked")
    assert forked == started
    assert forked["title"] == [sys.executable, "-m", "own_trainer", "a", "b c"]
    assert forked["env"]["SOME_TOKEN"] == "one"
    assert forked["path"][0] == str(place)


def test_no_secret_is_in_the_environment_of_the_host(launcher, job_of):
    warmed(launcher, job_of, env={"SOME_TOKEN": "sesame"})
    host = launcher._trainer_host._process
    assert host is not None
    environ = Path(f"/proc/{host.pid}/environ").read_bytes()
    assert b"LANG=C.UTF-8" in environ
    assert b"sesame" not in environ


@pytest.mark.parametrize(
    ("act", "code", "said"),
    [
        ("return 7", 7, ""),
        ("sys.exit(85)", 85, ""),
        ("sys.exit('no such thing')", 1, "no such thing"),
        ("raise ValueError('broken')", 1, "ValueError: broken"),
        ("import atexit; atexit.register(print, 'last word'); sys.exit(3)", 3, "last word"),
        (
            "import threading; threading.Timer(0.05, print, ['thread ended']).start(); return 4",
            4,
            "thread ended",
        ),
    ],
)
def test_a_forked_trainer_ends_as_python_does(launcher, job_of, place, act, code, said):
    warmed(launcher, job_of, act)
    job = job_of(act)
    outcome = ended(launcher, job)
    assert isinstance(outcome, Exited)
    assert outcome.code == code
    until(lambda: said in (job.folder / "training.log").read_text())


def test_a_forked_trainer_that_is_killed_ended_by_a_signal(launcher, job_of):
    warmed(launcher, job_of, "__import__('time').sleep(600 * len(sys.argv[3:]))")
    job = job_of()
    job = replace(job, argv=(*job.argv, "sleep"))
    handle = launcher.launch(job)
    (trainer,) = until(lambda: trainer_process.children_of([handle.pid]))
    os.kill(trainer, signal.SIGKILL)
    outcome = end_of(launcher, handle, job)
    assert isinstance(outcome, Exited)
    assert (outcome.why, outcome.signal) == (Why.SIGNAL, signal.SIGKILL)


@pytest.mark.parametrize(
    "load",
    [
        "if __name__ != '__main__': import no_such_module",
        "import threading, time; threading.Timer(0.5, int).start()",
    ],
)
def test_what_cannot_be_loaded_for_forks_is_started_anew(launcher, job_of, place, load):
    assert not facts_of(launcher, job_of(DESCRIBE, load=load), place)["forked"]
    assert not launcher._trainer_host.able


def test_who_loads_for_too_long_is_not_waited_for_again(launcher, job_of, place):
    host, load = launcher._trainer_host, "import time; time.sleep(600 * (__name__ != '__main__'))"
    host._patience_seconds = 0.2
    assert not facts_of(launcher, job_of(DESCRIBE, load=load), place)["forked"]
    assert host._process is not None
    assert host._process.poll() is None
    assert not host._ready
    assert host._patience_seconds == 0.0
    assert not facts_of(launcher, job_of(DESCRIBE, load=load), place)["forked"]
    assert host.able


@pytest.mark.parametrize(
    "changed", [{"env": {"JAX_PLATFORMS": "cuda"}}, {"sandbox": ("env",)}], ids=["env", "sandbox"]
)
def test_a_run_of_another_kind_is_not_forked(launcher, job_of, place, changed):
    warmed(launcher, job_of, DESCRIBE)
    assert not facts_of(launcher, job_of(DESCRIBE, **changed), place)["forked"]
    assert facts_of(launcher, job_of(DESCRIBE), place)["forked"]
