"""Try skill functions in a process of their own: `python -m flowrl.trial`, for `skills.judging`.

Reads one JSON object from standard input, answers with one JSON line per event on standard output.
Once all that it needs is loaded it gives up what it does not: it can write no file, and has so much
memory and no more.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

from flowrl.envs.trial import Code, RefusedError, try_code, warm_up

EXIT_MEMORY = 3
_OPEN_FILES = 256
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Try everything that is asked; returns the exit code."""
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    order = json.load(sys.stdin)
    codes = [Code(**facts) for facts in order["codes"]]
    for number in range(3):  # whatever is printed goes nowhere
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    warm_up()
    _limit(megabytes=order["megabytes"], cpu_seconds=order["cpu_seconds"])
    _say(answers, event="ready")
    for number, code in enumerate(codes):
        try:
            _judge(answers, number, code)
        except MemoryError:
            os._exit(EXIT_MEMORY)
    return 0


def _judge(answers: Any, number: int, code: Code) -> None:
    def entering(name: str, line: int) -> None:
        _say(answers, event="begins", code=number, name=name, line=line)

    try:
        most = try_code(code, entering)
    except RefusedError as no:
        why = {"line": no.line, "what": no.what, "remedy": no.remedy}
        _say(answers, event="refused", code=number, **why)
    else:
        _say(answers, event="passed", code=number, most_count=most)


def _say(answers: Any, **facts: Any) -> None:
    answers.write(json.dumps(facts) + "\n")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit(*, megabytes: int, cpu_seconds: int) -> None:
    """From here on: so much more memory than now, no file, no core dump."""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - not a Path of ours
        now = int(file.read().split()[0]) * resource.getpagesize()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    wanted = {
        resource.RLIMIT_AS: now + megabytes * 2**20,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
    }
    for limit, value in wanted.items():
        _, most = resource.getrlimit(limit)
        bound = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (bound, bound))


if __name__ == "__main__":
    sys.exit(main())
