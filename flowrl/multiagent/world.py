"""The sizes of a world; alone, because learners and worlds share them."""

from __future__ import annotations

from typing import NamedTuple


class Sizes(NamedTuple):
    """Numbers of an agent's observation and of its actions, one for each agent."""

    observations: tuple[int, ...]
    actions: tuple[int, ...]
