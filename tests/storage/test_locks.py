"""A lock has one holder, and none once its holder is dead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.errors import BusyError
from flowrl.storage import locks

HOLD = """
import sys, time
from pathlib import Path
from flowrl.storage import locks
with locks.held(Path(sys.argv[1]), timeout_seconds=5) as check:
    print("held", flush=True)
    sys.stdin.read()
    check()
"""


def holder(path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_lock_held_elsewhere_is_busy_and_says_where(tmp_path):
    process = holder(tmp_path / "global.lock")
    path = tmp_path / "global.lock"
    with pytest.raises(BusyError) as busy, locks.held(path, timeout_seconds=0.1):
        pass
    device, inode = path.stat().st_dev, path.stat().st_ino
    place = (
        f" {os.major(device):02x}:{os.minor(device):02x}:{inode} "  # not so on every file system
    )
    told = place in Path("/proc/locks").read_text()
    by = f"process {process.pid} ('{sys.executable} -c" if told else "another process for 0.1 s;"
    assert str(busy.value).startswith(f"{path} was held by {by}")
    process.communicate("")


def test_a_killed_holder_frees_the_lock(tmp_path):
    process = holder(tmp_path / "global.lock")
    process.kill()
    process.communicate()
    with locks.held(tmp_path / "global.lock", timeout_seconds=5):
        pass
    assert (tmp_path / "global.lock").exists()


def test_errors_inside_the_block_are_not_translated(tmp_path):
    with pytest.raises(OSError, match="disk"), locks.held(tmp_path / "x.lock", timeout_seconds=1):
        raise OSError("disk")
    with locks.held(tmp_path / "x.lock", timeout_seconds=0.1):
        pass


def test_a_holder_whose_lock_file_was_deleted_finds_out_before_it_commits(tmp_path):
    path = tmp_path / "global.lock"
    first = holder(path)
    path.unlink()
    second = holder(path)  # two holders: what the check is for
    _, said = first.communicate("")
    assert "BusyError" in said
    assert "was removed while it was held" in said
    second.communicate("")
    assert second.returncode == 0


def test_a_lock_file_is_its_owner_s_alone(tmp_path):
    with locks.held(tmp_path / "global.lock", timeout_seconds=5):
        assert (tmp_path / "global.lock").stat().st_mode & 0o777 == 0o600
