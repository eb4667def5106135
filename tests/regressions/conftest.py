"""The fixtures of other rooms that the regression tests are made with."""

from __future__ import annotations

from tests.launchers.conftest import (  # noqa: F401
    local,
    make_job,
    nothing_survives,
    server_folder,
    tmux,
)
from tests.parallel.conftest import clock, start, world  # noqa: F401
