"""What the runner writes down: JSON files that are replaced at one stroke.

It is part of the runner, so it takes nothing but the standard library.
"""
# pathlib alone would double the time to start:
# ruff: noqa: PTH105, PTH118, PTH119, PTH120

from __future__ import annotations

import os
from stat import S_ISREG  # os has it already

from flowrl.launchers.lean_json import dumps


def overwrite(path: str, record: dict) -> None:
    """Write a shorter record over what is there, at one stroke and without waiting for the disk.

    Somebody waits for our end, and to make a file takes some ten times as long. What is not a file
    of ours alone is replaced: a trainer may have planted it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        facts = os.fstat(descriptor)
        text = dumps(record).encode()
        if S_ISREG(facts.st_mode) and facts.st_nlink == 1 and len(text) < facts.st_size:
            os.pwrite(descriptor, text.ljust(facts.st_size - 1) + b"\n", 0)
            return
    finally:
        os.close(descriptor)
    write_record(path, record)


def part_of(path: str) -> str:
    """Where a record is written before it is one."""
    return os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.part")


def open_part(path: str) -> int:
    """The file that is to become a record; one that is there already is had much sooner."""
    return os.open(part_of(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)


def write_record(path: str, record: dict) -> None:
    """Replace a JSON file at one stroke.

    It is not flushed, so that nobody waits for the disk: after a crash of the machine, when it may
    be missing or empty, the run has its result, or goes on from its last checkpoint.
    """
    with open(open_part(path), "w", encoding="utf-8") as file:
        file.write(dumps(record) + "\n")
    os.replace(part_of(path), path)
