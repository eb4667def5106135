"""A daemon over real processes: `python -m tests.parallel.daemon_of_scripts ROOT` trains a → b.

Its trainers are scripts of a tenth of a second, its ledger is a file of merged run ids.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl import storage
from flowrl.launchers.base import Job
from flowrl.launchers.local import LocalLauncher
from flowrl.parallel.events import RunRequest
from flowrl.parallel.scheduler import SkillScheduler
from tests.parallel.scheduling import QuietBackend

TRAINER = """
import sys, time
from pathlib import Path
from flowrl.paths import RunPaths
from flowrl.runs import RunResult, write_result
folder, run_id = Path(sys.argv[1]), sys.argv[2]
with (folder / "launches").open("a") as file:
    file.write(run_id + "\\n")
time.sleep(0.1)
write_result(RunPaths(folder, 0), RunResult(run_id=run_id, frames=5, experts=(), success_rate=1.0,
    step_success=(), mean_episode_length=1.0, updates=1, wall_seconds=0.1, stopped_early=False))
"""


class ScriptBackend(QuietBackend):
    """Folders named by run id, and a ledger."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def prepare(self, task: RunRequest) -> Job:
        run_id = f"e{task.expert}.a{task.attempt}.{secrets.token_hex(4)}"
        storage.make_dir(self.root / "runs" / run_id)
        return self._job(task, run_id)

    def resume(self, task: RunRequest) -> Job:
        assert task.run_id is not None
        return self._job(task, task.run_id)

    def reopen(self, task: RunRequest) -> Job | None:
        assert task.run_id is not None
        folder = self.root / "runs" / task.run_id
        return self._job(task, task.run_id) if folder.is_dir() else None

    def merge(self, task: RunRequest) -> Mapping[str, Any]:
        ledger = self.root / "ledger"
        merged = ledger.read_text().split() if ledger.exists() else []
        if task.run_id not in merged:
            storage.append_line(ledger, str(task.run_id))
        return {"run_id": task.run_id}

    def _job(self, task: RunRequest, run_id: str) -> Job:
        folder = self.root / "runs" / run_id
        return Job(
            name=f"flowrl_e{task.expert}_{task.skill}",
            run_id=run_id,
            argv=(sys.executable, "-c", TRAINER, str(folder), run_id),
            env={**os.environ, "FLOWRL_FAULT": ""},
            cwd=Path.cwd(),
            folder=folder,
        )


def main(root: Path) -> int:
    """Train both skills."""
    with SkillScheduler(
        root / "graph", launcher=LocalLauncher(), scheduler_poll_interval=0.2, retry_backoff=0.01
    ) as scheduler:
        scheduler.set_callbacks(backend=ScriptBackend(root))
        scheduler.add_skill("a")
        scheduler.add_skill("b", {}, ["a"])
        return 0 if scheduler.run().complete else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
