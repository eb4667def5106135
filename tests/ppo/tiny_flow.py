"""`python -m flowrl.ppo_flow` with tiny environments: `python -m tests.ppo.tiny_flow FLAGS`.

A process whose number is in LATE_PROCESS compiles LATE_SECONDS longer than the others.
"""

from __future__ import annotations

import os
import sys
import time
from unittest import mock

from flowrl import ppo_flow
from flowrl.config import PPOConfig
from flowrl.envs.skill_module import TaskModule
from flowrl.launchers.sandbox import compile_cache
from flowrl.ppo import processes, trainer
from flowrl.ppo.programs import begin_programs
from flowrl.program_cache import ProgramCache
from tests.ppo.tiny_envs import Relay


def open_env(config: PPOConfig, module: TaskModule):
    """What the trainer's `open_env` returns."""
    if f"--process_id={os.environ.get('LATE_PROCESS', 'none')}" in sys.argv:
        time.sleep(float(os.environ["LATE_SECONDS"]))
    env = Relay()
    folder = compile_cache(config.compile_cache, os.environ) / "programs"
    return env, begin_programs(env, config, ProgramCache(folder, {"env": "Relay"}))


if __name__ == "__main__":
    with (
        mock.patch.object(trainer, "open_env", open_env),
        mock.patch.object(processes, "PROGRAM", ("-m", "tests.ppo.tiny_flow")),
    ):
        sys.exit(ppo_flow.main())
