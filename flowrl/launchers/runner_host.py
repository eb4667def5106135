"""A small process that becomes runners by forking: `python -I -S runner_host.py PADDING`.

Starting Python takes longer than all else that a short run costs, and a run takes two: its runner
and its log's writer. Here both are forks of one that is up. Each line on standard input asks for a
run, `{"spec": PATH, "log": PATH, "env": {…}}`; the answer is one line, `{"pid": N}` of the runner
or `{"error": TEXT}`. It ends at end of file, and what it has started goes on.

Runners are found by their command lines, so a fork writes its own over that of the host, for which
PADDING makes room. The first line on standard output says whether that can be done here.
"""
# As in the runner, pathlib, json and signal would cost more than they are worth:
# ruff: noqa: PTH120, PTH100, PTH123

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports]
import os
import sys

if __name__ == "__main__":  # run by path in isolation, Python finds the standard library only
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from flowrl.launchers import capped_log, runner, start_runner
from flowrl.launchers.lean_json import dumps, loads

TYPE_CHECKING = False  # typing takes long
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_ARG_START, _ARG_END = 45, 46  # in /proc/self/stat, counted behind the program's name
_PYTHON = [sys.executable, "-I", "-S"]
_MOST_FILES = 2**20


def serve(run: Callable[[list[str]], int]) -> int:
    """Start what is asked for until nobody can ask any more; `run` is the runner's main."""
    _signal.signal(_signal.SIGCHLD, _signal.SIG_IGN)  # nobody waits for them: no zombies
    try:
        able = entitle([*_PYTHON, __file__])
    except (OSError, ValueError, IndexError):
        able = False
    tell({"able": able})
    while line := sys.stdin.readline():
        asked = loads(line)
        try:
            tell({"pid": start(run, asked["spec"], asked["log"], asked["env"])})
        except OSError as error:
            tell({"error": str(error)})
    return 0


def tell(answer: dict) -> None:
    """One line to whoever asked."""
    os.write(1, dumps(answer).encode() + b"\n")


def start(run: Callable[[list[str]], int], spec: str, log: str, env: dict[str, str]) -> int:
    """Fork a log's writer and a runner that writes to it; answers the runner's pid."""
    reading, writing = os.pipe()
    try:
        fork(capped_log.main, capped_log.__file__, [log], env={}, stdin=reading)
        return fork(run, start_runner.__file__, [spec], env=env, output=writing)
    finally:
        os.close(reading)
        os.close(writing)


def fork(
    act: Callable[[list[str]], int],
    script: str | None,
    words: list[str],
    *,
    env: dict[str, str],
    stdin: int | None = None,
    output: int | None = None,
) -> int:
    """The pid of a fork that is as if the script, whose main `act` is, had been started with `env`.

    A stream that is not named is /dev/null; no other file is open in it.
    """
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number, stream in enumerate((stdin, output, output)):
            os.dup2(nothing if stream is None else stream, number)
        os.closerange(3, _MOST_FILES)
        os.environ.clear()
        os.environ.update(env)
        entitle([*_PYTHON, str(script), *words])
        code = act(words)
    finally:
        kind, error, trace = sys.exc_info()
        if kind is not None and error is not None:
            sys.excepthook(kind, error, trace)
        os._exit(code)


def entitle(words: Sequence[str]) -> bool:
    """Make these words our command line; whether that has come about.

    Raises:
      OSError, ValueError: the kernel does not let us, or there is not room enough.
    """
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        facts = file.read().rpartition(")")[2].split()
    begin, end = int(facts[_ARG_START]), int(facts[_ARG_END])
    title = b"".join(os.fsencode(word) + b"\0" for word in words)
    if len(title) > end - begin:
        raise ValueError(f"{len(title)} bytes are more than {end - begin}")
    memory = os.open("/proc/self/mem", os.O_WRONLY)
    try:
        os.pwrite(memory, title.ljust(end - begin, b"\0"), begin)
    finally:
        os.close(memory)
    with open("/proc/self/cmdline", "rb") as file:
        return file.read().rstrip(b"\0") == title.rstrip(b"\0")


if __name__ == "__main__":
    os._exit(serve(runner.main))
