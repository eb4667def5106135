"""A host of runners that has loaded their trainers (`python -m …trainer_host MODULE`).

Loading JAX and all that a trainer is made of is a good part of a short run. Here it is done once:
a runner is a fork of this process, and its trainer, `python -m MODULE WORDS`, is a fork of the
runner, so that it is its child as ever and nobody else's. MODULE has `load()`, which imports what
its `main()` needs and starts no thread: a fork would not have it. All else is as in `runner_host`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

from flowrl.launchers import runner, runner_host
from flowrl.launchers.job import MODULE_WORDS


def main() -> int:
    """Load the trainer, then start what is asked for; 1 if it cannot be loaded for forks."""
    module = importlib.import_module(sys.argv[1])
    _loaded_in_silence(module)
    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 — a fork would have one of them
        return 1
    gc.freeze()  # a collection would touch all of it, and so copy it in every fork
    return runner_host.serve(partial(runner.main, begin=partial(begin, module)))


def begin(module: ModuleType, spec: Mapping[str, Any]) -> int:
    """Fork a trainer as the runner's spec describes it; answers its pid."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        _become(spec)
        code = module.main()
    except SystemExit as end:
        code = _exit_code(end)
    finally:
        kind, error, trace = sys.exc_info()
        if kind is not None and error is not None:
            sys.excepthook(kind, error, trace)
        _leave(code)


def _loaded_in_silence(module: ModuleType) -> None:
    """Load it while standard output, on which answers are given, leads nowhere."""
    answers, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    try:
        module.load()
    finally:
        sys.stdout.flush()
        os.dup2(answers, 1)
        os.close(answers)
        os.close(nothing)


def _become(spec: Mapping[str, Any]) -> None:
    """Signals, environment, words and command line as in a Python that was started for it."""
    for number in runner.WATCHED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.environ.clear()
    os.environ.update(spec["env"])
    sys.argv = ["-m", *spec["argv"][MODULE_WORDS:]]
    with contextlib.suppress(OSError, ValueError):  # it is for whoever reads `ps`
        runner_host.entitle(spec["argv"])


def _exit_code(end: SystemExit) -> int:
    """What Python makes of it."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    sys.stderr.write(f"{end.code}\n")
    return 1


def _leave(code: int) -> NoReturn:
    """End as Python does, without going back to what the fork came from."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    os._exit(main())
