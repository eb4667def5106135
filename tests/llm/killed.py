"""A program: `flowrl write` is killed at each of its writes and started again; a line for each."""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import cache
from pathlib import Path

import openai.resources  # noqa: F401 — loaded once, and not again in each process

from flowrl import cli, storage
from flowrl.llm import client, command  # noqa: F401 — the client, too
from tests.llm.making import GAME, WISH, approve


def run(words: list[str], die_at: int | None) -> tuple[int, bool]:
    """Run in a process that kills itself at its n-th write; returns its end, and whether an answer
    was torn."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        count = 0
        plain, whole = storage.fault_point, storage._write_all

        def dies() -> bool:
            nonlocal count
            count += 1
            return count == die_at

        def fault_point(name: str) -> None:
            if dies():
                os.kill(os.getpid(), signal.SIGKILL)
            plain(name)

        def write_all(descriptor: int, payload: bytes, point: str) -> None:
            if dies():
                os.write(writer, b"1" if b'"kind": "answered"' in payload else b"0")
                os.write(descriptor, payload[: len(payload) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            whole(descriptor, payload, point)

        storage.fault_point, storage._write_all = fault_point, write_all
        os._exit(cli.main(words))
    os.close(writer)
    _, status = os.waitpid(child, 0)
    torn = os.read(reader, 1) == b"1"
    os.close(reader)
    return status, torn


def main(url: str, root: Path) -> None:
    command.load_library = cache(command.load_library)
    command.load_library(GAME, None)
    killed, at = True, 0
    while killed:
        at += 1
        model = f"m{at}"
        folder = root / model / "mine"
        approve(folder)
        words = ["write", WISH, "-o", str(folder), "--base_url", url, "--model", model]
        status, torn = run(words, at)
        killed = os.WIFSIGNALED(status)
        if killed:
            again, _ = run(words, None)
            assert again == 0, (at, again)
            print(json.dumps({"model": model, "torn_answer": torn}))
        else:
            assert status == 0
            folder.parent.rename(root / "whole")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
