"""`python -m tests.chaos.merge_once GRAPH RUN_FOLDER EXPERT SKILL [POLICY]`: one to kill."""

from __future__ import annotations

import sys
import time

from flowrl.errors import BusyError
from flowrl.experts.merge import MERGE_RULES
from flowrl.parallel.training_processor import process_completed_training


def merge_with_others(barrier, policy: str, *words: str) -> None:
    """Merge when all others do, as often as it takes; for a process of its own."""
    barrier.wait(timeout=200)
    while True:
        try:
            main([*words, policy])
            return
        except BusyError:
            time.sleep(0.2)


def main(words: list[str]) -> None:
    """Merge one run."""
    graph, folder, expert, skill, *name = words
    policies = {str(known): policy for known, policy in MERGE_RULES.items()}
    policy = policies[name[0]] if name else None
    process_completed_training(folder, skill, int(expert), graph, merge_policy=policy)


if __name__ == "__main__":
    main(sys.argv[1:])
