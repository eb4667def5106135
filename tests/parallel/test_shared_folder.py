"""One scheduler at a time in a folder of several hosts, each a namespace of this machine."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from flowrl.errors import EXIT_BUSY, EXIT_USAGE, BusyError, ConfigError, FileRefusedError
from flowrl.parallel import health, shared_claim
from flowrl.parallel.health import DaemonLock, daemon_of
from flowrl.parallel.shared_claim import Holder, SharedClaim
from flowrl.storage import records
from tests.games.installing import installed
from tests.machine import HOST
from tests.parallel.test_slurm_training import experts, train
from tests.waiting import until

needs_hosts = pytest.mark.usefixtures("hosts")
HOLD = """
import socket, sys, time
from pathlib import Path
from flowrl.errors import BusyError
from flowrl.parallel import shared_claim
socket.sethostname(sys.argv[2])
shared_claim.BEAT_SECONDS = 0.2
claim = shared_claim.SharedClaim(Path(sys.argv[1]), lost_after=float(sys.argv[3]))
try:
    claim.acquire()
except BusyError as error:
    print(error, flush=True)
    sys.exit(error.exit_code)
print("held", flush=True)
while True:
    claim.check()
    time.sleep(0.05)
"""


def holder_on(name: str, path: Path, *, lost_after: float = 2.0) -> subprocess.Popen[str]:
    """A process of another host that wants the claim, and holds it."""
    words = (*HOST, sys.executable, "-c", HOLD, str(path), name, str(lost_after))
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def kill(process: subprocess.Popen[str]) -> None:
    """Lose a host: its first process takes all others with it."""
    process.kill()
    process.communicate()


@needs_hosts
def test_a_second_host_hears_that_the_first_lives(tmp_path):
    first = holder_on("node1", tmp_path / "daemon.claim")
    assert said(first) == "held\n"
    second = holder_on("node2", tmp_path / "daemon.claim")
    line = said(second)
    assert "in use by process" in line
    assert "on node1 since" in line
    assert second.wait() == EXIT_BUSY
    assert first.poll() is None
    kill(first)


@needs_hosts
def test_the_claim_of_a_lost_host_is_taken_once(tmp_path):
    first = holder_on("node1", tmp_path / "daemon.claim")
    assert said(first) == "held\n"
    kill(first)
    others = [holder_on(f"node{number}", tmp_path / "daemon.claim") for number in (2, 3, 4)]
    lines = [said(one) for one in others]
    assert sum(line == "held\n" for line in lines) == 1, lines
    for one in others:
        kill(one)


@needs_hosts
def test_a_host_that_comes_back_finds_its_claim_taken(tmp_path):
    path = tmp_path / "daemon.claim"
    first = holder_on("node1", path)
    assert said(first) == "held\n"
    inner = until(lambda: _child_of(_child_of(first.pid) or 0) or _child_of(first.pid))
    os.kill(inner, signal.SIGSTOP)
    second = holder_on("node2", path)
    assert said(second) == "held\n"
    os.kill(inner, signal.SIGCONT)
    until(lambda: first.poll() is not None)
    assert first.returncode != 0
    assert second.poll() is None
    kill(second)
    kill(first)


def test_the_claim_of_a_process_here_that_is_gone_is_taken_at_once(tmp_path):
    path = tmp_path / "daemon.claim"
    code = HOLD.replace("socket.sethostname(sys.argv[2])\n", "")
    dead = subprocess.Popen(
        [sys.executable, "-c", code, str(path), "", "100"], stdout=subprocess.PIPE, text=True
    )
    assert said(dead) == "held\n"
    kill(dead)
    assert shared_claim.holder_of(path) is None
    claim, began = SharedClaim(path), time.monotonic()
    claim.acquire()
    assert time.monotonic() - began < 5
    claim.check()
    assert shared_claim.holder_of(path) is not None
    claim.release()
    assert not path.exists()
    assert list(tmp_path.iterdir()) == []


@needs_hosts
def test_two_hosts_whose_processes_have_the_same_pid_do_not_touch_each_others_files(tmp_path):
    path = tmp_path / "daemon.claim"
    hosts = [holder_on(f"node{number}", path) for number in range(4)]
    lines = [said(one) for one in hosts]
    assert sum(line == "held\n" for line in lines) == 1, lines
    assert sum("is in use by process" in line for line in lines) == 3, lines
    assert list(tmp_path.iterdir()) == [path]
    for one in hosts:
        kill(one)


def test_what_a_killed_scheduler_left_beside_a_claim_is_removed(tmp_path):
    (tmp_path / ".daemon.claim.00aa.part").touch()
    claim = SharedClaim(tmp_path / "daemon.claim")
    claim.acquire()
    assert list(tmp_path.iterdir()) == [tmp_path / "daemon.claim"]
    claim.release()


def test_one_that_cannot_renew_its_claim_gives_up_before_others_may_take_it(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_claim, "BEAT_SECONDS", 60.0)
    claim = SharedClaim(tmp_path / "daemon.claim", lost_after=0.4)
    claim.acquire()
    claim.check()
    time.sleep(0.3)
    with pytest.raises(BusyError, match="could not renew it"):
        claim.check()
    claim.release()


def test_a_claim_on_a_disk_that_hung_too_long_is_lost(tmp_path, monkeypatch):
    """Nobody could renew it meanwhile, so others may take it at once."""
    monkeypatch.setattr(shared_claim, "BEAT_SECONDS", 60.0)
    claim, is_own = SharedClaim(tmp_path / "daemon.claim", lost_after=0.4), SharedClaim._is_own
    claim.acquire()
    monkeypatch.setattr(SharedClaim, "_is_own", lambda self: time.sleep(0.3) or is_own(self))
    with pytest.raises(BusyError, match="could not renew it"):
        claim.check()
    claim.release()


def test_a_claim_on_a_disk_that_is_away_is_left_to_itself(tmp_path, monkeypatch):
    claim = SharedClaim(tmp_path / "daemon.claim")
    claim.acquire()

    def away(self: SharedClaim) -> bool:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    monkeypatch.setattr(SharedClaim, "_is_own", away)
    with pytest.raises(OSError, match="not connected"):
        claim.check()
    claim.release()
    assert (tmp_path / "daemon.claim").exists()


def test_a_claim_that_is_removed_ends_its_scheduler(tmp_path):
    lock = DaemonLock(tmp_path / "daemon.lock", shared=True)
    lock.acquire()
    lock.check()
    (tmp_path / "daemon.claim").unlink()
    with pytest.raises(BusyError, match="was taken by another"):
        lock.check()
    lock.release()


def test_a_claimed_folder_keeps_those_out_who_do_not_know_that_it_is_shared(tmp_path, monkeypatch):
    away = records.to_json(Holder.this()) | {"namespace": "pid:[1]", "host": "node7"}
    records.write(tmp_path / "daemon.claim", away)
    assert (daemon_of(tmp_path / "daemon.lock") or {})["host"] == "node7"
    beat = tmp_path / "daemon.claim"

    def moves(seconds: float) -> None:
        os.utime(beat, ns=(0, time.time_ns()))

    monkeypatch.setattr(shared_claim.time, "sleep", moves)
    with pytest.raises(BusyError, match="on node7"):
        DaemonLock(tmp_path / "daemon.lock").acquire()


@pytest.mark.parametrize("hours", [-1, 1], ids=["behind", "ahead"])
@pytest.mark.parametrize("alive", [True, False])
def test_a_claim_of_a_clock_that_is_an_hour_off_counts_while_it_moves(
    tmp_path, monkeypatch, hours, alive
):
    path, sleep = tmp_path / "daemon.claim", time.sleep
    records.write(path, records.to_json(Holder.this()) | {"namespace": "pid:[1]", "host": "node7"})
    times = [time.time() + 3600 * hours + number for number in range(100)]
    os.utime(path, (times[0], times[0]))

    def wait(seconds: float) -> None:
        sleep(0.1)
        os.utime(path, (times[0], times.pop() if alive else times[0]))

    monkeypatch.setattr(shared_claim.time, "sleep", wait)
    claim = SharedClaim(path, lost_after=0.5)
    if alive:
        with pytest.raises(BusyError, match="on node7"):
            claim.acquire()
    else:
        claim.acquire()
        claim.check()
    claim.release()
    assert path.exists() is alive


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 100, b'{"format": 1, "pid": "x"}'])
def test_a_damaged_claim_is_told_and_kept(tmp_path, content):
    (tmp_path / "daemon.claim").write_bytes(content)
    with pytest.raises(FileRefusedError, match=r"daemon\.claim.*remove it once no scheduler"):
        DaemonLock(tmp_path / "daemon.lock", shared=True).acquire()
    assert (tmp_path / "daemon.claim").read_bytes() == content
    (tmp_path / "daemon.claim").unlink()
    DaemonLock(tmp_path / "daemon.lock", shared=True).acquire()


def test_a_network_disk_names_the_flag(tmp_path, monkeypatch):
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mounts"
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts.write_text(f"36 35 {number} / /mnt rw - nfs4 server:/ rw\n")
    monkeypatch.setattr(health, "_MOUNTS", mounts)
    with pytest.raises(ConfigError, match="--shared_folder"):
        DaemonLock(tmp_path / "daemon.lock").acquire()
    lock = DaemonLock(tmp_path / "daemon.lock", shared=True)
    lock.acquire()
    lock.release()
    repair = DaemonLock(tmp_path / "daemon.lock", shared=None)  # has no such flag
    repair.acquire()
    assert (tmp_path / "daemon.claim").exists()
    repair.release()


def test_a_claim_that_is_taken_again_is_renewed(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_claim, "BEAT_SECONDS", 0.05)
    claim = SharedClaim(tmp_path / "daemon.claim")
    claim.acquire()
    claim.release()
    claim.acquire()
    first = (tmp_path / "daemon.claim").stat().st_mtime_ns
    until(lambda: (tmp_path / "daemon.claim").stat().st_mtime_ns > first)
    claim.release()


def test_a_holder_that_was_away_too_long_renews_nothing(tmp_path, monkeypatch):
    """The number of its file may be that of another's claim by then."""
    monkeypatch.setattr(shared_claim, "BEAT_SECONDS", 0.2)
    path = tmp_path / "daemon.claim"
    claim = SharedClaim(path, lost_after=0.1)
    claim.acquire()
    first = path.stat().st_mtime_ns
    time.sleep(0.5)
    assert path.stat().st_mtime_ns == first
    with pytest.raises(BusyError, match="could not renew it"):
        claim.check()
    claim.release()


@pytest.mark.skipif("FLOWRL_NFS" not in os.environ, reason="FLOWRL_NFS names no folder on an NFS")
def test_tiny_skills_are_trained_on_a_real_nfs(tmp_path):
    env = {**os.environ, "PYTHONPATH": installed(tmp_path)}
    folder = Path(tempfile.mkdtemp(dir=env.pop("FLOWRL_NFS")))
    assert health._network_of(folder).startswith("nfs"), f"{folder} is on no NFS"
    graph = str(folder / "graph")
    unsaid = train(tmp_path, graph, "--launcher=local", env=env)
    assert "--shared_folder" in unsaid.communicate()[1]
    assert unsaid.returncode == EXIT_USAGE
    first = train(tmp_path, graph, "--launcher=local", "--shared_folder", env=env)
    until((folder / "graph/daemon.claim").exists)
    first.kill()
    first.communicate()
    second = train(tmp_path, graph, "--launcher=local", "--shared_folder", env=env)
    _, said = second.communicate()
    assert second.returncode == 0, said
    assert len(experts(folder / "graph")) == 2
    assert not (folder / "graph/daemon.claim").exists()
    shutil.rmtree(folder)


def _child_of(pid: int) -> int | None:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    words = path.read_text().split() if path.exists() else []
    return int(words[0]) if words else None
