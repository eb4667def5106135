"""The process that forks runners: what it starts is what Python started anew would be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.errors import LaunchError
from flowrl.launchers import files, hosting, processes
from flowrl.launchers.job import Exited, Finished, Why
from flowrl.launchers.local import LocalLauncher
from tests.launchers.conftest import READY, SLEEP, SUCCEED, end_of, start_of, trainer_of, until

DESCRIBED = """
import json, os, signal, time
of_process = lambda pid, name: open(f"/proc/{pid}/{name}").read()
runner = os.getppid()
facts = {
    "open": sorted(os.path.basename(os.readlink(f"/proc/self/fd/{n}")).partition(":")[0]
                   for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")),
    "env": dict(os.environ), "leads": os.getsid(0) == runner,
    "words": of_process(runner, "cmdline").rstrip("\\0").split("\\0"),
    "ignored": [line for line in of_process("self", "status").splitlines() if "SigIgn" in line],
    "cwd": os.getcwd(), "umask": of_process("self", "status").split("Umask:")[1].split()[0],
}
json.dump(facts, open("facts.json.part", "w"))
os.rename("facts.json.part", "facts.json")
"""


def facts_of(launcher, job):
    end_of(launcher, launcher.launch(job), job)
    return json.loads((job.folder / "facts.json").read_text())


def host_of(launcher: LocalLauncher) -> subprocess.Popen:
    host = launcher._host._process
    assert host is not None
    return host


def test_a_forked_runner_is_like_one_that_python_was_started_for(local, make_job, request):
    forked, started = (make_job(DESCRIBED, name="flowrl_e0_x", run_id=r) for r in ("1", "2"))
    of_fork = facts_of(local, forked)
    assert local._host._process is not None
    request.getfixturevalue("anew")
    of_start = facts_of(local, started)
    spec_of_fork, spec_of_start = of_fork["words"].pop(), of_start["words"].pop()
    assert Path(spec_of_fork) == forked.folder / "spec.json"
    assert Path(spec_of_start) == started.folder / "spec.json"
    assert Path(of_fork.pop("cwd")) == forked.folder
    assert Path(of_start.pop("cwd")) == started.folder
    assert of_fork == of_start
    assert of_fork["words"] == [sys.executable, "-I", "-S", str(files.RUNNER)]
    assert "run.lock" in of_fork["open"]


def test_what_a_forked_run_says_is_in_its_log(local, make_job):
    job = make_job("import sys; print('out'); print('err', file=sys.stderr)")
    end_of(local, local.launch(job), job)
    log = job.folder / "training.log"
    until(lambda: sorted(log.read_text().split()) == ["err", "out"])
    until(lambda: not processes.with_last_words(str(log)))  # its writer has ended


def test_a_program_is_looked_for_where_the_job_says(local, make_job, tmp_path):
    tool = tmp_path / "tools" / "own-tool"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nexit 7\n")
    tool.chmod(0o700)
    job = replace(make_job(""), argv=("own-tool",), env={"PATH": str(tool.parent)})
    outcome = end_of(local, local.launch(job), job)
    assert isinstance(outcome, Exited)
    assert outcome.code == 7


def test_no_secret_is_in_the_environment_that_others_may_look_at(local, make_job):
    job = make_job(SLEEP, env={"PATH": os.defpath, "SOME_API_KEY": "sesame"})
    handle = local.launch(job)
    start_of(job)
    for pid in (handle.pid, host_of(local).pid):
        assert b"sesame" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_a_run_outlives_the_host_and_the_next_one_gets_another(local, make_job):
    first, second = make_job(SLEEP), make_job(SUCCEED % "e0.a1.x", name="flowrl_e1_x")
    handle = local.launch(first)
    trainer = trainer_of(first)
    host = host_of(local)
    host.kill()
    host.wait()
    assert isinstance(end_of(local, local.launch(second), second), Finished)
    assert local.poll(handle, first.folder) is None
    os.kill(trainer, signal.SIGKILL)
    outcome = end_of(local, handle, first)
    assert isinstance(outcome, Exited)
    assert outcome.why is Why.SIGNAL


@pytest.mark.parametrize(
    ("env", "said"), [({}, "nothing within 0.3 s"), ({"LONG": "x" * 100_000}, "has not listened")]
)
def test_a_host_that_does_not_answer_is_replaced(local, make_job, monkeypatch, env, said):
    end_of(local, local.launch(make_job("pass")), make_job("pass", name="other"))
    monkeypatch.setattr(hosting, "ANSWER_SECONDS", 0.3)
    stopped = host_of(local)
    os.kill(stopped.pid, signal.SIGSTOP)
    env = {"PATH": os.defpath, "LANG": "C.UTF-8", **env}
    job = make_job(SUCCEED % "e0.a1.x", name="flowrl_e1_x", env=env)
    with pytest.raises(LaunchError, match=f"does not answer: .*{said}"):
        local.launch(job)
    assert stopped.poll() is not None
    monkeypatch.undo()
    assert isinstance(end_of(local, local.launch(job), job), Finished)


def test_where_forks_cannot_be_told_apart_python_is_started_anew(
    local, make_job, monkeypatch, tmp_path
):
    unable = tmp_path / "unable.py"
    unable.write_text("print('{\"able\": false}', flush=True)\n")
    monkeypatch.setattr(hosting, "HOST", unable)
    job = make_job(SUCCEED % "e0.a1.x")
    assert isinstance(end_of(local, local.launch(job), job), Finished)
    assert not local._host.able


def test_the_host_ends_with_a_daemon_that_is_killed_and_the_run_goes_on(make_job):
    job = make_job(READY + "import time; time.sleep(600)")
    daemon = """
        import json, sys, time
        from pathlib import Path
        from flowrl.launchers.job import Job
        from flowrl.launchers.local import LocalLauncher
        facts = json.loads(sys.argv[1])
        launcher = LocalLauncher()
        for key in ("cwd", "folder"): facts[key] = Path(facts[key])
        handle = launcher.launch(Job(**facts))
        print(handle.pid, launcher._host._process.pid, flush=True)
        time.sleep(600)
    """
    names = ("name", "run_id", "argv", "env", "cwd", "folder")
    facts = json.dumps({name: getattr(job, name) for name in names}, default=str)
    words = [sys.executable, "-c", textwrap.dedent(daemon), facts]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        runner, host = map(int, process.stdout.readline().split())
        trainer_of(job)
        process.kill()
    until(lambda: not processes.birth_of(host))
    assert processes.birth_of(runner)
    files.stop(job.folder)  # which finds the runner by its command line
    until(lambda: not processes.birth_of(runner))
