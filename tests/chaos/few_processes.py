"""A daemon that may start no process: `python -m tests.chaos.few_processes ROOT`, a few beats.

The limit does not bind root, so it becomes nobody once all is imported; ROOT is then nobody's.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

from flowrl.launchers.local import LocalLauncher
from flowrl.parallel.scheduler import SkillScheduler
from tests.parallel.daemon_of_scripts import ScriptBackend

NOBODY = 65534


def main(root: Path) -> int:
    """Three beats; says the first skill's status, and why it waits, after each."""
    if os.geteuid() == 0:
        os.chown(root, NOBODY, NOBODY)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    resource.setrlimit(resource.RLIMIT_NPROC, (0, hard))
    with SkillScheduler(root / "graph", launcher=LocalLauncher(), retry_backoff=0.01) as scheduler:
        scheduler.set_callbacks(backend=ScriptBackend(root))
        scheduler.add_skill("a")
        scheduler.add_skill("b", {}, ["a"])
        for _ in range(3):
            scheduler.tick()
            status = scheduler.state.entries["a"].status
            print(json.dumps([status.kind, getattr(status, "why", "")]))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
