"""`python -m tests.parallel.merge_once GRAPH RUN_FOLDER EXPERT SKILL`: a process to kill."""

from __future__ import annotations

import sys

from flowrl.parallel.training_processor import process_completed_training

if __name__ == "__main__":
    graph, folder, expert, skill = sys.argv[1:]
    process_completed_training(folder, skill, int(expert), graph)
