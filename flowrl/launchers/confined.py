"""A protocol for work that runs skill code: in a process of its own, confined like a trainer.

`python -m flowrl.launchers.confined MODULE CLASS FIELDS`, with the fields of a dataclass in JSON.
`flowrl evaluate`, `play`, `judge` and `sweep` let experts play by it.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from flowrl import config as configs
from flowrl import console
from flowrl.config import PPOConfig, Sandbox
from flowrl.errors import FlowrlError
from flowrl.launchers import sandbox
from flowrl.paths import GraphPaths
from flowrl.runs import TrainingRun
from flowrl.storage import records


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
    order: ConfinedWork, graph_paths: GraphPaths, run: TrainingRun | None, *, how: Sandbox
) -> bytes:
    """Return what a confined process prints that plays a plan; it sees the folder, read-only.

    `run` is the plan's; without one, compiled programs are kept in the user's cache folder.
    What it logs goes to standard error. Raises ConfinedError for another exit code than 0.
    """
    confined = sandbox.confinement(how, graph_paths.root)
    env = sandbox.confined_env(sandbox.child_env())
    kept = configs.from_json(PPOConfig, run.config).compile_cache if run else None
    cache = sandbox.compile_cache(kept, env).absolute()
    around = confined.around(None, cwd=Path.cwd(), env=env, cache=cache, reads_graph=True)
    kind, fields = type(order), json.dumps(records.to_json(order))
    words = (*around, sys.executable, "-m", __name__, kind.__module__, kind.__name__, fields)
    ended = subprocess.run(words, env=env, check=False, start_new_session=True, capture_output=True)
    logged = ended.stderr.decode(errors="replace")
    before, mark, reason = f"\n{logged}".rpartition(f"\n{console.ERROR_PREFIX}")
    reason, _, after = reason.partition("\n")
    sys.stderr.write((f"{before}\n{after}" if mark else logged).lstrip("\n"))
    if ended.returncode:
        raise ConfinedError(reason if mark else "", ended.returncode)
    return ended.stdout


def main(argv: Sequence[str]) -> int:
    """Do the work that `confined_run` orders; returns the exit code."""
    module, name, fields = argv
    order = records.from_json(getattr(importlib.import_module(module), name), json.loads(fields))
    console.start_logging()
    return console.guarded(order.work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
