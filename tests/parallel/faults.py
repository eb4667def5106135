"""Work in child processes, which may be killed at a named point."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

DONE, FAILED, BROKEN = 0, 3, 4


def killed_at(point: str, module: str, *words: object) -> bool:
    """Run `python -m module` with a kill at a named fault point; whether it was killed there."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, words)],
        env={**os.environ, "FLOWRL_FAULT": f"{point}:kill"},
        cwd=Path(__file__).parents[2],
        check=False,
    )
    return done.returncode == -signal.SIGKILL


def in_clean_process(work: Callable[..., None], *args: Any) -> None:
    """Do `work` in a new interpreter, which has no threads and may therefore fork."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=args)
    process.start()
    process.join()
    assert process.exitcode == 0, "see the traceback above"


def in_child(work: Callable[[], Any]) -> int:
    """The exit code of a forked child that does `work`; negative for a signal."""
    child = os.fork()
    if child == 0:
        code = BROKEN
        try:
            work()
            code = DONE
        except OSError as error:
            code = FAILED if "injected" in str(error) else BROKEN
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
