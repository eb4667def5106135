"""The fixtures of a scheduler in a folder of its own, for faults of the machine, too."""

from tests.parallel.conftest import *  # noqa: F403
