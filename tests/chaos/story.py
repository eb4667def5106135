"""The parallel story under chaos: `python -m tests.chaos.story FLAGS`.

As `stand_in_story`, but stopped trainers are killed after half a second, and the daemon leaves
`ready.PID` beside the graph as soon as it has taken up all runs and waits for their ends.
"""

from __future__ import annotations

import os
import sys
import time

from flowrl import bottomup_parallel
from flowrl.config import LaunchConfig
from flowrl.launchers.launcher import Launcher
from flowrl.launchers.local import LocalLauncher
from flowrl.launchers.slurm import SlurmLauncher
from flowrl.launchers.tmux import TmuxLauncher
from flowrl.parallel import start
from flowrl.parallel.scheduler import SkillScheduler
from tests.parallel.stand_in_story import replace_trainers

GRACE_SECONDS = 0.5


class TellingScheduler(SkillScheduler):
    """Tells once that it has begun to wait."""

    def wait(self) -> None:
        mark = self.graph_paths.root.parent / f"ready.{os.getpid()}"
        if not mark.exists():
            part = mark.with_suffix(".part")
            part.write_text(f"{time.time()} {time.process_time()}")
            part.replace(mark)
        super().wait()


def open_launcher(config: LaunchConfig) -> Launcher:
    if config.launcher == "local":
        return LocalLauncher(grace_seconds=GRACE_SECONDS)
    if config.launcher == "slurm":
        return SlurmLauncher(config.slurm_args, grace_seconds=GRACE_SECONDS)
    launcher = TmuxLauncher(config.tmux_socket, grace_seconds=GRACE_SECONDS)
    launcher.check()
    return launcher


if __name__ == "__main__":
    replace_trainers(setattr)
    start.SkillScheduler = TellingScheduler
    start.open_launcher = open_launcher
    sys.exit(bottomup_parallel.main())
