"""The sequential story with a stand-in trainer: `python -m tests.sequential_story FLAGS`.

The trainer heeds signals as the real one does; it ends by itself once the file `go` is there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from flowrl import bottomup, ppo_flow
from flowrl.ppo_flow import StopSignal
from tests.parallel import stand_in

DEADLINE_SECONDS = 600.0  # nobody waits for it any more


def train(argv: Sequence[str]) -> int:
    """Train one run, or stop when that is wished."""
    here = Path(argv[argv.index("--module_path") + 1]).parents[3]
    stop = StopSignal()
    deadline = time.monotonic() + DEADLINE_SECONDS
    with stop.listening():
        with (here / "begun").open("a") as file:
            file.write("once more\n")
        while not stop.requested and not (here / "go").exists():
            assert time.monotonic() < deadline, "neither a signal nor `go` came"
            time.sleep(0.01)
    return stop.exit_code if stop.requested else stand_in.main(list(argv))


if __name__ == "__main__":
    ppo_flow.main = train
    sys.exit(bottomup.main())
