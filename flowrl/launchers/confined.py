"""A protocol for work that runs skill code: in a process of its own, confined like a trainer.

`python -m flowrl.launchers.confined PARENT MODULE CLASS FIELDS`, with a dataclass's fields in JSON.
`flowrl evaluate`, `play`, `judge` and `sweep` let experts play by it.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from flowrl import config as configs
from flowrl import console
from flowrl.config import PPOConfig, Sandbox
from flowrl.errors import FlowrlError
from flowrl.launchers import sandbox
from flowrl.launchers.child import die_with_parent
from flowrl.paths import GraphPaths
from flowrl.runs import TrainingRun
from flowrl.storage import records

EPISODES = "flowrl.episodes"  # the logger of the work that plays them
ENDED = "%d episodes have ended"  # its message, at level DEBUG
_ENDED = re.compile(rb"\d\d:\d\d:\d\d (\d{1,9}) episodes have ended\n")


class ConfinedError(FlowrlError):
    """A confined process has failed; the message and the exit code are its own."""

    def __init__(self, reason: str, code: int) -> None:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        super().__init__(reason or f"the process that plays the episodes {how}; see above")
        self.exit_code = code if code > 0 else 128 - code


class ConfinedWork(Protocol):
    """A dataclass at the top of a module; its fields are JSON."""

    def work(self) -> int:
        """Do it in this process; returns the exit code."""
        ...


def confined_run(
    order: ConfinedWork,
    graph_paths: GraphPaths,
    run: TrainingRun | None,
    *,
    how: Sandbox,
    episodes: int | None = None,
) -> bytes:
    """Return what a confined process prints that plays a plan; it sees the folder, read-only.

    `run` is the plan's; without one, compiled programs are kept in the user's cache folder.
    What it logs goes to standard error, and on a terminal how many of the `episodes` have ended.
    It ends with this process. Raises ConfinedError for another exit code than 0.
    """
    confined = sandbox.confinement(how, graph_paths.root)
    env = sandbox.confined_env(sandbox.child_env())
    kept = configs.from_json(PPOConfig, run.config).compile_cache if run else None
    cache = sandbox.compile_cache(kept, env).absolute()
    around = confined.around(None, cwd=Path.cwd(), env=env, cache=cache, reads_graph=True)
    kind, fields = type(order), json.dumps(records.to_json(order))
    parent = 0 if around else os.getpid()  # bubblewrap's own is another, and ends with this process
    words = (*around, sys.executable, "-m", __name__, str(parent))
    words += (kind.__module__, kind.__name__, fields)
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    alone = os.sched_getscheduler(0) != os.SCHED_IDLE  # see child.run_when_idle
    with (
        console.progress_bar("its programs are loaded or compiled", episodes) as show,
        subprocess.Popen(words, env=env, start_new_session=alone, **streams) as child,
        ThreadPoolExecutor(1) as threads,
    ):
        assert child.stdout is not None
        assert child.stderr is not None
        try:
            log = threads.submit(_followed, child.stderr, show)
            printed, logged = child.stdout.read(), log.result()
            child.wait()
        finally:
            child.kill()  # after Ctrl-C
    before, mark, reason = f"\n{logged}".rpartition(f"\n{console.ERROR_PREFIX}")
    reason, _, after = reason.partition("\n")
    sys.stderr.write((f"{before}\n{after}" if mark else logged).lstrip("\n"))
    if child.returncode:
        raise ConfinedError(reason if mark else "", child.returncode)
    return printed


def _followed(lines: Iterable[bytes], show: Callable[[int, str], None]) -> str:
    """Return the log of a confined process without the lines about episodes, which are shown."""
    ended, others = 0, list[bytes]()
    for line in lines:
        if match := _ENDED.fullmatch(line):
            ended += int(match[1])
            show(ended, "episodes are played")
        else:
            others.append(line)
    return b"".join(others).decode(errors="replace")


def main(argv: Sequence[str]) -> int:
    """Do the work that `confined_run` orders; returns the exit code."""
    parent, module, name, fields = argv
    die_with_parent(int(parent) or os.getppid())
    order = records.from_json(getattr(importlib.import_module(module), name), json.loads(fields))
    console.start_logging()
    logging.getLogger(EPISODES).setLevel(logging.DEBUG)
    return console.guarded(order.work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
