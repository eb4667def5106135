"""`flowrl check`: what is wrong with skill files, one line each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.skills.skill import check_files


def show(files: Sequence[Path]) -> int:
    """Print one line per refused file; 1 when there is one, else 0.

    Raises:
      ConfigError: no file is named.
    """
    if not files:
        raise ConfigError("no file is named; name at least one: flowrl check my_skills/*.py")
    refused = [message for _, message in check_files(files) if message is not None]
    for message in refused:
        sys.stdout.write(message + "\n")
    return 1 if refused else 0
