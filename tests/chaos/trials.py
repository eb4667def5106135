"""Faults of real processes, each injected into a graph that trains in real tmux sessions.

Every trial takes a fresh place, meets its fault, lets the graph come to its end and says what it
found. What must hold in between is asserted.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flowrl import cli
from flowrl.errors import EXIT_BUSY, BusyError
from flowrl.launchers import process
from flowrl.parallel.health import DaemonLock
from flowrl.storage import locks
from tests.chaos.place import TO_TABLE, ChaosPlace, Trial
from tests.launchers.conftest import signal_to, until
from tests.machine import program
from tests.parallel.making import TABLE, WOOD
from tests.parallel.stand_in_story import DEADLINE_SECONDS, ended

EIGHT = "--max_nodes=8"


def millis_since(began: float) -> float:
    return 1000 * (time.monotonic() - began)


def scheduler_killed_at_random(place: ChaosPlace, chance: random.Random, *, kills: int = 3):
    """kill -9 of the scheduler while eight skills train; each restart adopts what lives."""
    skills = {}
    flags = (EIGHT, "--max_parallel_skills=3")
    place.order({skill: {"seconds": chance.uniform(0.0, 0.6)} for skill in (WOOD, TABLE)})
    daemon = place.start(*flags)
    restarts = []
    for _ in range(kills):
        time.sleep(chance.uniform(0.2, 1.0))
        daemon.kill()
        daemon.wait()
        skills = place.statuses()
        daemon = place.start(*flags)
        restarts.append(place.times_to_ready(daemon))
        if skills and set(skills.values()) == {"completed"} and len(skills) == 8:
            break
    assert ended(daemon)[0] == 0
    verdict = place.judged("kill -9 of the scheduler", 0.0, skills=8, calls_for={})
    others = [Trial(fault=verdict.fault, millis=0.0).at(*times) for times in restarts[1:]]
    return [verdict.at(*restarts[0]), *others]


def tmux_server_killed(place: ChaosPlace, chance: random.Random):
    """kill -9 of the tmux server: the same attempt goes on, uncharged."""
    daemon = place.gated()
    before, run_id = place.started(WOOD), place.line(WOOD)["run_id"]
    began = time.monotonic()
    signal_to(before.server_pid)
    place.started(WOOD, attempt=1, not_pid=before.runner_pid)
    millis = millis_since(began)
    assert place.line(WOOD)["run_id"] == run_id
    return [_ended_well(place, daemon, "kill -9 of the tmux server", millis, again=True)]


def wrapper_killed(place: ChaosPlace, chance: random.Random):
    """kill -9 of the process in the pane: the trainer is ended, the next attempt begins."""
    daemon = place.gated()
    before = place.started(WOOD)
    began = time.monotonic()
    os.kill(before.runner_pid, signal.SIGKILL)
    place.started(WOOD, attempt=2)
    millis = millis_since(began)
    assert before.job_pid is not None
    pid, start_time = before.job_pid, before.job_start_time
    until(lambda: not process.alive(pid, start_time))
    return [_ended_well(place, daemon, "kill -9 of the wrapper", millis, again=True)]


def trainer_killed(place: ChaosPlace, chance: random.Random):
    """kill -9 of the trainer: charged, the next attempt begins."""
    daemon = place.gated()
    before = place.started(WOOD)
    began = time.monotonic()
    signal_to(before.job_pid)
    place.started(WOOD, attempt=2)
    millis = millis_since(began)
    return [_ended_well(place, daemon, "kill -9 of the trainer", millis, again=True)]


def session_killed(place: ChaosPlace, chance: random.Random):
    """`tmux kill-session`: held until a retry, which goes on in the same attempt."""
    daemon = place.gated()
    began = time.monotonic()
    place.tmux("kill-session", "-t", "=flowrl_e0_Collect_Wood")
    return [_held_and_retried(place, daemon, "kill-session", began)]


def ctrl_c_typed(place: ChaosPlace, chance: random.Random):
    """Ctrl-C typed into the pane: held until a retry."""
    daemon = place.gated()
    began = time.monotonic()
    place.tmux("send-keys", "-t", "=flowrl_e0_Collect_Wood:", "C-c")
    return [_held_and_retried(place, daemon, "Ctrl-C in the pane", began)]


def trainer_stopped(place: ChaosPlace, chance: random.Random):
    """SIGSTOP of the trainer: after the stall timeout TERM, KILL and the next attempt."""
    daemon = place.gated("--stall_timeout=3")
    before = place.started(WOOD)
    began = time.monotonic()
    signal_to(before.job_pid, signal.SIGSTOP)
    place.started(WOOD, attempt=2)
    millis = millis_since(began)
    return [_ended_well(place, daemon, "SIGSTOP of the trainer", millis, again=True)]


def scheduler_stopped(place: ChaosPlace, chance: random.Random):
    """SIGSTOP of the scheduler while a run ends and another daemon tries the folder, then CONT."""
    daemon = place.gated()
    start = place.started(WOOD)
    daemon.send_signal(signal.SIGSTOP)
    place.open("gate")
    until(lambda: not process.alive(start.runner_pid, start.runner_start_time))
    code, said = ended(place.start(TO_TABLE))
    assert code == EXIT_BUSY, said
    began = time.monotonic()
    daemon.send_signal(signal.SIGCONT)
    place.comes_to(WOOD, "completed")
    return [_ended_well(place, daemon, "SIGSTOP of the scheduler", millis_since(began))]


def slot_given(place: ChaosPlace, chance: random.Random):
    """A run that holds the only slot while a skill waits: it gives it and goes on afterwards."""
    place.order({WOOD: {"gate": "gate", "update_seconds": 0.1}})
    daemon = place.start("--max_nodes=2", "--max_parallel_skills=1", "--slot_minutes=0.03")
    began = time.monotonic()
    place.comes_to("Collect Sapling", "completed")
    millis = millis_since(began)
    place.started(WOOD, attempt=1)
    runs = {line for line in (place.folder / "launches").read_text().splitlines() if WOOD in line}
    assert runs == {f"{WOOD} {place.line(WOOD)['run_id']}"}
    return [_ended_well(place, daemon, "a slot given to a skill that waits", millis, again=True)]


def second_scheduler(place: ChaosPlace, chance: random.Random):
    """A second scheduler on the folder: exit code 75 and the first one's pid and host."""
    daemon = place.gated()
    before = place.graph_paths.scheduler_state.read_bytes()
    code, said = ended(place.start(TO_TABLE))
    assert code == EXIT_BUSY, said
    assert f"process {daemon.pid} on {os.uname().nodename}" in said
    assert place.graph_paths.scheduler_state.read_bytes() == before
    began = time.monotonic()
    with pytest.raises(BusyError, match=f"process {daemon.pid} on "):
        DaemonLock(place.graph_paths.daemon_lock).acquire()
    return [_ended_well(place, daemon, "a second scheduler (its claim alone)", millis_since(began))]


def user_meddles(place: ChaosPlace, chance: random.Random):
    """A user renames the session, types into it, splits it and attaches: the run goes on."""
    daemon = place.gated()
    start = place.started(WOOD)
    began = time.monotonic()
    place.tmux("rename-session", "-t", "=flowrl_e0_Collect_Wood", "mine")
    place.tmux("send-keys", "-t", "=mine:", "exit", "Enter", "C-z", "q")
    place.tmux("split-window", "-d", "-t", "=mine:", "--", "sleep", "600")
    client = subprocess.Popen(
        ["tmux", "-L", "chaos", "-C", "attach", "-t", "=mine"],
        env=place.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    attached = ("display-message", "-p", "-t", "=mine:", "#{session_attached}")
    until(lambda: place.tmux(*attached) == ["1"], every=0.1)
    assert process.alive(start.runner_pid, start.runner_start_time)
    trial = _ended_well(place, daemon, "a user renames, types, attaches", millis_since(began))
    client.kill()
    client.communicate()
    return [trial]


def term_in_mid_merge(place: ChaosPlace, chance: random.Random):
    """SIGTERM while a merge waits for its lock: the merge is finished by whoever comes next."""
    daemon = place.gated()
    with locks.held(place.graph_paths.global_lock, timeout_seconds=10):
        place.open("gate")
        place.comes_to(WOOD, "merging")
        daemon.send_signal(signal.SIGTERM)
    ended(daemon)
    began = time.monotonic()
    daemon = place.start(TO_TABLE)
    place.comes_to(WOOD, "completed")
    return [_ended_well(place, daemon, "SIGTERM in mid merge", millis_since(began))]


def tmux_fails_once(place: ChaosPlace, chance: random.Random):
    """A tmux that fails at its first new session: asked again, nothing charged."""
    program(
        _own_tmux(place),
        f'case "$*" in *new-session*) if rm "{place.folder}/fail" 2>/dev/null; then\n'
        f'echo "server exited for no reason" >&2; exit 1; fi;; esac\nexec {_tmux()} "$@"',
    )
    (place.folder / "fail").touch()
    began = time.monotonic()
    daemon = place.gated()
    assert not (place.folder / "fail").exists()
    return [_ended_well(place, daemon, "a tmux that fails once", millis_since(began))]


def tmux_missing(place: ChaosPlace, chance: random.Random):
    """A PATH without tmux for a while: the run under way is merged, the next one waits."""
    wrapper = _own_tmux(place)
    wrapper.symlink_to(_tmux())
    place.env["PATH"] = str(wrapper.parent)
    daemon = place.gated()
    wrapper.unlink()
    began = time.monotonic()
    place.open("gate")
    place.comes_to(WOOD, "completed")
    until(lambda: place.line(TABLE).get("refusals"), seconds=DEADLINE_SECONDS)
    assert place.line(TABLE)["attempt"] == 1
    wrapper.symlink_to(_tmux())
    return [_ended_well(place, daemon, "no tmux for a while", millis_since(began))]


def _own_tmux(place: ChaosPlace) -> Path:
    """Where this place's daemons find tmux before the real one."""
    folder = place.folder / "bin"
    folder.mkdir()
    place.env["PATH"] = f"{folder}:{os.environ['PATH']}"
    return folder / "tmux"


def _tmux() -> str:
    found = shutil.which("tmux")
    assert found is not None
    return found


def _held_and_retried(
    place: ChaosPlace, daemon: subprocess.Popen[str], fault: str, began: float
) -> Trial:
    held = place.comes_to(WOOD, "held")
    millis = millis_since(began)
    assert ended(daemon)[0] == 1, "nothing is left that could move"
    with contextlib.redirect_stdout(io.StringIO()):
        assert cli.main(["retry", WOOD, "--graph-path", str(place.graph_paths.root)]) == 0
    daemon = place.start(TO_TABLE)
    trial = _ended_well(place, daemon, fault, millis, again=True)
    assert place.line(WOOD)["run_id"] == held["run_id"]
    return trial


def _ended_well(
    place: ChaosPlace,
    daemon: subprocess.Popen[str],
    fault: str,
    millis: float,
    *,
    again: bool = False,
) -> Trial:
    """Let the graph end; `again`: the fault ended the first start of the first skill."""
    place.open("gate")
    code, said = ended(daemon)
    assert code == 0, said
    return place.judged(fault, millis, calls_for={WOOD: 2} if again else {})


ALL: tuple[Callable[..., list[Trial]], ...] = (
    scheduler_killed_at_random,
    tmux_server_killed,
    wrapper_killed,
    trainer_killed,
    session_killed,
    ctrl_c_typed,
    trainer_stopped,
    scheduler_stopped,
    slot_given,
    second_scheduler,
    user_meddles,
    term_in_mid_merge,
    tmux_fails_once,
    tmux_missing,
)
