"""Confined trainers: what they cannot do, and that they end like all others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl import cli
from flowrl.errors import ConfigError
from flowrl.launchers import process, run_status, runner, sandbox
from flowrl.launchers.base import ExitCause, Exited, Finished, Lost
from flowrl.launchers.sandbox import child_env
from flowrl.paths import RunPaths
from tests.launchers.confining import ATTEMPTS, HOSTILE, TYPING, confined, prey
from tests.launchers.conftest import (
    ENDS,
    SAVING,
    SLEEP,
    STUBBORN,
    SUCCEED,
    end_of,
    signal_to,
    start_of,
    until,
)
from tests.launchers.test_runner import small_cgroup
from tests.machine import program
from tests.waiting import limit

needs_bubblewrap = pytest.mark.usefixtures("bubblewrap")
# What an unconfined trainer of another user than root may not do either, by the kernel's rules.
UNPRIVILEGED = {"open_a_setting_of_the_kernel", "make_a_user_namespace", "change_python"}
NOBODY = 65534
# Opens and closes; nothing is ever written.
OPEN_SETTINGS = """
import json, os
opened, tried = [], 0
for folder, _, files in os.walk('/proc/sys'):
    for path in (os.path.join(folder, name) for name in files):
        for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND):
            tried += 1
            try:
                os.close(os.open(path, flags | os.O_NONBLOCK))
                opened.append(path)
            except OSError:
                pass
json.dump([opened, tried], open('opened.json', 'w'))
"""
FORGE = """
    open('forged', 'w').write('{}')
    for change in (lambda: os.replace('forged', name), lambda: open(name, 'a')):
        try:
            change()
        except OSError:
            continue
        raise SystemExit(f'{name} is changed')
"""
CONFIG = Path(__file__).parents[2] / "pyproject.toml"
MINE = '{"skill": "mine"}\n'
CRASH = "import ctypes; ctypes.string_at(0)"


@pytest.fixture(params=["local", pytest.param("tmux", marks=pytest.mark.tmux)])
def confining(request):
    """A launcher whose folder is not shared: `test_contract` tells ends in one that is."""
    return request.getfixturevalue(request.param)


def hostile(make_job, target):
    """A run as it is prepared, with the hostile trainer."""
    job = make_job(HOSTILE, env={"PATH": os.defpath, "HOME": str(target.home)})
    (job.folder / "run.json").write_text(MINE)
    return job


def bubblewrap_of(job) -> int:
    pid = start_of(job).job_pid
    assert pid is not None
    return pid


def inside(job) -> list[int]:
    """Bubblewrap's own process inside, and the trainer."""
    first = runner.children_of(bubblewrap_of(job))
    return first + [child for pid in first for child in runner.children_of(pid)]


def run_hostile(launcher, job, target, attempts):
    """What of the attempts the trainer thinks to have achieved."""
    job = replace(job, argv=(*job.argv, target.goals(attempts)))
    outcome = end_of(launcher, launcher.launch(job), job)
    said = (job.folder / "training.log").read_text()
    assert (job.folder / "attempts.json").exists(), f"{outcome} {said}"
    return json.loads((job.folder / "attempts.json").read_text())


def attempts_of(launcher) -> tuple[str, ...]:
    """All of them; a terminal can be typed into only where there is one."""
    has_terminal = hasattr(launcher, "reap")
    return tuple(name for name in ATTEMPTS if name != TYPING or has_terminal)


@needs_bubblewrap
def test_no_escape_succeeds(launcher, make_job, tmp_path):
    with prey(tmp_path / "prey") as target:
        before = target.contents()
        job = confined(hostile(make_job, target))
        achieved = run_hostile(launcher, job, target, attempts_of(launcher))
        # A child may be forked; it is gone with its trainer.
        assert [name for name, done in achieved.items() if done] == ["leave_somebody_behind"]
        until(lambda: not target.left_behind())
        assert target.victim.poll() is None
        assert target.contents() == before
    assert (job.folder / "run.json").read_text() == MINE
    assert run_status.becomes_free(job.folder)


@needs_bubblewrap
def test_no_escape_by_saying_how_it_ended(launcher, make_job):
    """Not even by what it leaves to a runner that is killed."""
    job = confined(
        make_job("import os\nfor name in ('exit.json', 'start.json'):\n" + FORGE + SLEEP)
    )
    handle = launcher.launch(job)
    start = start_of(job)
    os.kill(start.runner_pid, signal.SIGKILL)
    assert isinstance(end_of(launcher, handle, job), Lost)
    assert run_status.read_start(job.folder, job.run_id) == start
    assert run_status.read_exit(job.folder, job.run_id) is None


@needs_bubblewrap
def test_no_escape_opens_a_setting_of_the_kernel_for_writing(local, make_job):
    job = confined(make_job(OPEN_SETTINGS))
    assert isinstance(end_of(local, local.launch(job), job), Finished)
    opened, tried = json.loads((job.folder / "opened.json").read_text())
    assert opened == []
    assert tried > 300


@needs_bubblewrap
@pytest.mark.skipif(os.getuid() != 0, reason="it has run as another user than root already")
def test_no_escape_succeeds_as_nobody():
    """The tests above, by another user, who sees Python and flowrl wherever they are installed."""
    home, shown = Path.home(), ["--tmpfs", str(Path.home())]
    for path in (Path(sys.base_prefix).resolve(), Path(sys.prefix), CONFIG.parent):
        for folder in reversed([each for each in path.parents if home in each.parents]):
            shown += ["--perms", "0755", "--dir", str(folder)]
        shown += ["--ro-bind", str(path), str(path)]
    with tempfile.TemporaryDirectory(prefix="flowrl-nobody-") as folder:
        os.chown(folder, NOBODY, NOBODY)
        user = (f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
        done = subprocess.run(
            [
                *("bwrap", "--dev-bind", "/", "/", *shown),
                *("--cap-add", "ALL", "setpriv", *user),
                *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__),
                *("-k", "no_escape and not shared", "-c", str(CONFIG)),
                *("--basetemp", f"{folder}/tests"),
            ],
            env={**os.environ, "HOME": folder, "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=CONFIG.parent,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed, 1 skipped" in done.stdout


def test_every_escape_succeeds_where_nobody_is_confined(launcher, make_job, tmp_path):
    """Or else the test above would show nothing."""
    with prey(tmp_path / "prey") as target:
        before = target.contents()
        job = hostile(make_job, target)
        achieved = run_hostile(launcher, job, target, attempts_of(launcher))
        missed = {name for name, done in achieved.items() if not done}
        assert missed <= (set() if os.getuid() == 0 else UNPRIVILEGED)
        until(target.left_behind)
        assert target.victim.wait(timeout=limit(30)) == -signal.SIGKILL
        changed = {path for path, text in target.contents().items() if text != before.get(path)}
        assert len(changed) == 4
    assert (job.folder / "run.json").read_text() != MINE


@needs_bubblewrap
@pytest.mark.parametrize(
    ("source", "why", "code", "number"),
    [*ENDS, pytest.param(CRASH, ExitCause.SIGNAL, None, 11, id="segfault")],
)
def test_ends_are_told_apart_as_ever(confining, make_job, source, why, code, number):
    job = confined(make_job(source))
    outcome = end_of(confining, confining.launch(job), job)
    assert isinstance(outcome, Exited)
    assert (outcome.cause, outcome.code, outcome.signal) == (why, code, number)


@needs_bubblewrap
def test_a_confined_trainer_succeeds_in_its_own_folder(launcher, make_job):
    job = confined(make_job(SUCCEED % "e0.a1.x"))
    assert isinstance(end_of(launcher, launcher.launch(job), job), Finished)


@needs_bubblewrap
def test_a_program_that_is_not_there_says_so(local, make_job):
    job = replace(confined(make_job("")), argv=("/no",))
    outcome = end_of(local, local.launch(job), job)
    assert isinstance(outcome, Exited)
    assert outcome.cause is ExitCause.EXIT
    until(lambda: "bwrap: execvp /no" in (job.folder / "training.log").read_text())


@needs_bubblewrap
def test_cancel_lets_a_confined_trainer_save(confining, make_job):
    job = confined(make_job(SAVING + SLEEP))
    handle = confining.launch(job)
    start_of(job)
    confining.stop(handle, job.folder)
    outcome = end_of(confining, handle, job)
    assert isinstance(outcome, Exited)
    assert (outcome.cause, outcome.code) == (ExitCause.STOPPED, 85)


@needs_bubblewrap
@pytest.mark.parametrize("frozen", [False, True], ids=["deaf", "stopped"])
def test_a_stubborn_confined_trainer_is_killed_with_all_its_own(confining, make_job, frozen):
    confining.grace_seconds = 0.3
    children = "import os\nfor _ in range(3): os.fork()\n"
    deaf = STUBBORN.removesuffix(SLEEP)  # all of them, before any says that it is ready
    job = confined(make_job(deaf + children + SLEEP))
    handle = confining.launch(job)
    start_of(job)
    everybody = {pid: process.start_time_of(pid) for pid in inside(job)}
    if frozen:
        os.kill(inside(job)[-1], signal.SIGSTOP)
    confining.stop(handle, job.folder)
    outcome = end_of(confining, handle, job)
    assert isinstance(outcome, Exited)
    assert (outcome.cause, outcome.signal) == (ExitCause.STOPPED, 9)
    until(lambda: not any(process.alive(pid, start_time) for pid, start_time in everybody.items()))
    until(lambda: not run_status.lock_held(job.folder))


@needs_bubblewrap
@pytest.mark.parametrize("who", ["runner", "bubblewrap", "trainer"])
def test_nothing_outlives_a_process_that_is_killed(confining, make_job, who):
    job = confined(make_job(STUBBORN))
    handle = confining.launch(job)
    start = start_of(job)
    within = inside(job)
    everybody = {pid: process.start_time_of(pid) for pid in (bubblewrap_of(job), *within)}
    pids = {"runner": start.runner_pid, "bubblewrap": start.job_pid, "trainer": within[-1]}
    signal_to(pids[who])
    outcome = end_of(confining, handle, job)
    if who == "runner":
        assert isinstance(outcome, Lost)
    else:
        assert isinstance(outcome, Exited)
        assert (outcome.cause, outcome.signal) == (ExitCause.SIGNAL, 9)
    until(lambda: not any(process.alive(pid, start_time) for pid, start_time in everybody.items()))
    until(lambda: not run_status.lock_held(job.folder))


@needs_bubblewrap
def test_a_confined_trainer_holds_the_lock_of_its_run(local, make_job):
    job = confined(make_job(SLEEP))
    local.launch(job)
    start_of(job)
    assert inside(job)[-1] in process.with_open_file(job.folder / "run.lock")


@needs_bubblewrap
@pytest.mark.tmux
@pytest.mark.parametrize("key", ["C-c", "C-\\"], ids=["Ctrl-C", "Ctrl-backslash"])
def test_typing_in_the_pane_interrupts_a_confined_trainer(tmux, make_job, key):
    saving = (
        "import signal, sys\n"
        "def save(*_): open('saved', 'w').close(); sys.exit(130)\n"
        "for number in (signal.SIGINT, signal.SIGQUIT): signal.signal(number, save)\n"
    )
    job = confined(make_job(saving + SLEEP))
    handle = tmux.launch(job)
    start_of(job)
    tmux.server.run("send-keys", "-t", f"={job.name}:", key)
    outcome = end_of(tmux, handle, job)
    assert isinstance(outcome, Exited)
    assert outcome.cause is ExitCause.INTERRUPTED
    assert (job.folder / "saved").exists()


@needs_bubblewrap
@pytest.mark.tmux
def test_a_killed_session_lets_a_confined_trainer_save(tmux, make_job):
    job = confined(make_job(SAVING + SLEEP))
    handle = tmux.launch(job)
    start_of(job)
    tmux.server.run("kill-session", "-t", f"={job.name}")
    outcome = end_of(tmux, handle, job)
    assert isinstance(outcome, Exited)
    assert (outcome.cause, outcome.code) == (ExitCause.SESSION_KILLED, 85)


@needs_bubblewrap
def test_a_confined_trainer_that_runs_out_of_memory_is_told_apart(local, make_job):
    greedy = (
        "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
        "b'x' * 400_000_000\ntime.sleep(600)\n"
    )
    job = confined(make_job("open('ready', 'w').close()\n" + greedy))
    with small_cgroup(50) as group:
        handle = local.launch(job)
        start = start_of(job)
        for pid in (start.runner_pid, start.job_pid, *inside(job)):
            (group / "cgroup.procs").write_text(str(pid))
        (job.folder / "go").touch()
        outcome = end_of(local, handle, job)
    assert isinstance(outcome, Exited)
    assert outcome.cause is ExitCause.OOM


@needs_bubblewrap
def test_the_environment_arrives_and_is_on_no_command_line(local, make_job):
    source = "import json, os; json.dump(dict(os.environ), open('got', 'w'))\n"
    job = confined(make_job(source + SLEEP, env={"MY_TOKEN": "canary-canary", "PATH": "/bin"}))
    local.launch(job)
    start_of(job)
    for pid in (bubblewrap_of(job), *inside(job)):
        assert b"canary" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert json.loads((job.folder / "got").read_text())["MY_TOKEN"] == "canary-canary"


@needs_bubblewrap
def test_the_cache_of_confined_trainers_is_their_own(local, make_job, tmp_path):
    cache = tmp_path / "cache" / "jax"
    cache.mkdir(parents=True)
    (cache / "program").write_text("trusted")
    source = f"from pathlib import Path\nPath('{cache}/program').write_text('poison')"
    job = make_job(source)
    how = sandbox.confinement("bwrap", tmp_path / "graph")
    words = how.around(RunPaths(job.folder, 0), cwd=job.cwd, env=job.env, cache=cache)
    outcome = end_of(local, local.launch(replace(job, sandbox=words)), job)
    assert isinstance(outcome, Finished)
    assert (cache / "program").read_text() == "trusted"
    assert (tmp_path / "cache" / "jax-confined" / "program").read_text() == "poison"


def fake_bubblewrap(folder: Path, monkeypatch, script: str) -> None:
    program(folder / "bwrap", script)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("script", "said", "seconds"),
    [
        (
            "echo 'bwrap: No permissions to create new namespace' >&2; exit 1",
            "No permissions to",
            30,
        ),
        ("exit 7", "exit code 7", 30),
        ("sleep 60", "timed out", 0.5),
    ],
    ids=["forbidden", "silent", "hangs"],
)
def test_a_bubblewrap_that_does_not_work_is_not_used(tmp_path, monkeypatch, script, said, seconds):
    fake_bubblewrap(tmp_path, monkeypatch, script)
    monkeypatch.setattr(sandbox, "PROBE_SECONDS", seconds)
    found = sandbox.confinement("auto", tmp_path)
    assert found.program is None
    assert "not confined: bubblewrap does not work here" in found.described
    assert said in found.described
    with pytest.raises(ConfigError, match=f"--sandbox bwrap: .*{said}.*use --sandbox none"):
        sandbox.confinement("bwrap", tmp_path)


def test_without_bubblewrap_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "apt install bubblewrap" in sandbox.confinement("auto", tmp_path).described
    with pytest.raises(ConfigError, match=r"not installed .*; use --sandbox none"):
        sandbox.confinement("bwrap", tmp_path)


def test_nobody_is_confined_unless_it_is_wanted(tmp_path):
    found = sandbox.confinement("none", tmp_path)
    assert found.around(RunPaths(tmp_path, 0), cwd=tmp_path, env={}) == ()
    assert found.described == "trainers are not confined (--sandbox none)"


def test_homes_are_not_shown_whatever_the_environment_names(tmp_path, monkeypatch):
    home = tmp_path / "home"
    (home / "mine").mkdir(parents=True)
    env = {"HOME": str(home), "PYTHONPATH": f"{tmp_path}:{home}:/:{home}/mine:relative"}
    words = sandbox.Confinement(program="bwrap").around(RunPaths(home, 0), cwd=home, env=env)
    shown = {words[at + 1] for at, word in enumerate(words) if word == "--ro-bind"}
    assert shown & {str(tmp_path), str(home), "/", "relative"} == set()
    assert str(home / "mine") in shown


def test_a_gpu_is_shown_to_those_who_train_on_it_alone(monkeypatch, tmp_path):
    made = tmp_path / "dev"
    made.mkdir()
    (made / "nvidia0").touch()
    monkeypatch.setattr(sandbox, "_DEVICE_FOLDER", made)
    how, run_paths = sandbox.Confinement(program="bwrap"), RunPaths(tmp_path, 0)
    assert str(made / "nvidia0") in how.around(
        run_paths, cwd=tmp_path, env=child_env(("0",), environ={})
    )
    assert str(made / "nvidia0") not in how.around(
        run_paths, cwd=tmp_path, env=child_env(environ={})
    )


def test_confined_trainers_are_given_no_key_that_only_the_network_needs():
    env = {"WANDB_API_KEY": "x", "WANDB_MODE": "online", "A": "b"}
    confined_env = sandbox.confined_env(env)
    assert "WANDB_API_KEY" not in confined_env
    assert (confined_env["WANDB_MODE"], confined_env["A"]) == ("offline", "b")
    assert sandbox.confined_env(env, ["WANDB_API_KEY"])["WANDB_API_KEY"] == "x"
    assert sandbox.confined_env({"WANDB_MODE": "disabled"})["WANDB_MODE"] == "disabled"


def test_confined_trainers_are_given_no_secret_by_value():
    env = {
        "FLOWRL_LLM_URL": "https://u:password123@h",
        "WANDB_BASE_URL": "https://u:short@h",
        "WANDB_NAME": "a1b2c3d4e5f6a7b8c9d0e1f2",
        "WANDB_PROJECT": "craftax",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "CUDA_VISIBLE_DEVICES": "GPU-8f3c1d2e-1111-2222-3333-444455556666",
        "PATH": "/usr/bin:/opt/a1b2c3d4e5f6a7b8c9d0e1f2/bin",
    }
    kept = sandbox.confined_env(env)
    assert kept.keys() & env.keys() == {
        "WANDB_PROJECT",
        "XLA_FLAGS",
        "CUDA_VISIBLE_DEVICES",
        "PATH",
    }
    assert sandbox.confined_env(env, ["FLOWRL_LLM_URL"])["FLOWRL_LLM_URL"].endswith("@h")


def test_a_graph_that_is_a_link_to_itself_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert cli.main(["train", str(tmp_path / "loop"), "--launcher=local"]) == 2
    assert "loop is a link that leads to no folder" in capsys.readouterr().err.splitlines()[-1]
