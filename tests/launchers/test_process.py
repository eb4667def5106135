"""Processes by pid and start time; waiting without polling, and without spinning."""

from __future__ import annotations

import gc
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from flowrl.launchers import process
from flowrl.launchers.base import Handle


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen]:
    child = subprocess.Popen(["sleep", "600"])
    yield child
    child.kill()
    child.wait()


def handle_of(child: subprocess.Popen) -> Handle:
    start_time = process.start_time_of(child.pid)
    return Handle(run_id="r", session="s", pid=child.pid, start_time=start_time)


def seconds_waited(handles: list[Handle], timeout_seconds: float) -> float:
    began = time.monotonic()
    process.wait_for_end(handles, timeout_seconds=timeout_seconds)
    return time.monotonic() - began


def test_waiting_ends_at_the_timeout(sleeper):
    assert seconds_waited([handle_of(sleeper)], 0.1) >= 0.09
    assert seconds_waited([], 0.1) >= 0.09


def test_an_end_before_the_wait_is_told_soon_and_without_spinning(sleeper):
    handle = handle_of(sleeper)
    sleeper.kill()
    sleeper.wait()
    assert 0.04 <= seconds_waited([handle], 60.0) < 30.0


def test_an_end_during_the_wait_is_heard(sleeper):
    handle = handle_of(sleeper)
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.1; kill -9 {sleeper.pid}"])
    assert seconds_waited([handle], 60.0) < 30.0
    killer.wait()


def test_a_system_without_pidfds_is_looked_at_often(sleeper, monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    assert 0.04 <= seconds_waited([handle_of(sleeper)], 60.0) < 30.0


def test_no_descriptor_left_is_no_loss(sleeper, monkeypatch):
    def refuse(pid: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert 0.04 <= seconds_waited([handle_of(sleeper)], 60.0) < 30.0


def descriptors() -> int:
    """Return how many descriptors of processes and selectors this process has open."""
    gc.collect()  # or it may close what other tests have left, in between
    kinds = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            kinds.append(str(entry.readlink()))
    return sum("anon_inode" in kind for kind in kinds)


def test_waiting_leaves_no_descriptor_open(sleeper):
    before, handle = descriptors(), handle_of(sleeper)
    process.wait_for_end([handle] * 3, timeout_seconds=0)
    assert descriptors() == before
    sleeper.kill()
    process.wait_for_end([handle], timeout_seconds=60.0)
    assert descriptors() == before


def test_a_pid_without_its_start_time_is_nobody():
    assert process.alive(os.getpid(), process.start_time_of(os.getpid()))
    assert not process.alive(os.getpid(), "")
    assert not process.alive(os.getpid(), f"{process.boot_id()}:1")


def test_a_zombie_does_not_live():
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert not process.start_time_of(pid)
    os.waitpid(pid, 0)


def test_whoever_cannot_look_does_not_say_that_a_process_is_gone(monkeypatch):
    def refuse(*_args, **_facts):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        process.start_time_of(os.getpid())
