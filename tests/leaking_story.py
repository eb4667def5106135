"""A parallel story whose trainers say all they know: `python -m tests.leaking_story FLAGS`.

With `--train` among its words this file is such a trainer: it prints its environment in every way
that comes to mind, and then trains like the stand-in, or fails with a secret on its lips.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from pathlib import Path

from rich.console import Console

from flowrl import bottomup_parallel, storage
from flowrl.launchers.base import Job
from flowrl.parallel import training
from flowrl.parallel.events import RunRequest
from flowrl.parallel.training_setup import PreparedRun
from tests.parallel import stand_in
from tests.parallel.stand_in_story import StandInBackend

TALKATIVE = "--train"
FAILING = "Place Table"


class LeakingBackend(StandInBackend):
    """Everything is real but the trainer's program."""

    def job_of(self, prepared: PreparedRun, task: RunRequest) -> Job:
        job = super().job_of(prepared, task)
        skill = prepared.run.skill
        argv = (sys.executable, "-m", "tests.leaking_story", TALKATIVE, skill, *job.argv[3:])
        return dataclasses.replace(job, argv=argv)


def tell_everything(words: list[str]) -> int:
    """Print every variable plainly, quoted, torn and coloured; then train or fail."""
    for value in os.environ.values():
        sys.stdout.write(f"plain {value}\r\n{value!r} {json.dumps(value)}\n")
        for letter in value:
            sys.stdout.write(letter)
            sys.stdout.flush()
        logging.getLogger("trainer").error("logged %s", value)
    Console(force_terminal=True, highlight=False).print(os.environ.get("MY_TOKEN", ""))
    events = Path(words[words.index("--module_path") + 1]).parent / "tensorboard" / "events"
    events.parent.mkdir(exist_ok=True)
    events.touch()  # as carelessly as other programs do
    if words[0] == FAILING:
        raise PermissionError(f"401 for {os.environ['MY_TOKEN']} and {os.environ['WANDB_API_KEY']}")
    return stand_in.main(words[1:])


if __name__ == "__main__":
    if TALKATIVE in sys.argv:
        sys.exit(tell_everything(sys.argv[2:]))
    training.TrainingBackend = LeakingBackend
    # Nobody imports wandb here.
    training.check_machine = lambda graph_path, *_: storage.make_dir(graph_path)
    sys.exit(bottomup_parallel.main())
