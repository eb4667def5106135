"""Starts the runner: `python -I -S start_runner.py SPEC.json`.

Python compiles the file that it is told to run each time, and keeps what that one imports.
"""
# pathlib alone would double the time to start:
# ruff: noqa: PTH100, PTH120

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # run by path in isolation, Python finds the standard library only
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from flowrl.launchers import runner

if __name__ == "__main__":
    os._exit(runner.main(sys.argv[1:]))
