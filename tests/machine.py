"""Pieces of a machine: programs that are scripts, small disks, runs that live."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flowrl.paths import RunPaths

# What starts a process of another host, as far as flowrl can see.
HOST = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "--uts", "--ipc")


def program(path: Path, script: str) -> Path:
    """A shell script as a program; its folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return path


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own, in memory, that is mounted at a new folder."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def living(run_paths: RunPaths) -> Iterator[None]:
    """A process of the run lives: its lock is held."""
    with run_paths.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
