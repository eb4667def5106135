"""The state, its file, and the commands that wait until the file holds what they follow from."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from flowrl.parallel.acts import DISK_FULL
from flowrl.parallel.codec import StateFile
from flowrl.parallel.signals import Command, Event, Rules
from flowrl.parallel.state import SchedulerState, step

logger = logging.getLogger(__name__)


class Book:
    """Owns the state of one graph; `pending` may be carried out only while `saved` says so."""

    def __init__(self, file: StateFile, rules: Rules, *, most_jitter: float) -> None:
        """Load the state; without a file it starts empty.

        Raises:
          FileRefusedError: the file is damaged or of another version; it is left as it is.
        """
        self.state = file.load() or SchedulerState()
        self.pending: deque[Command] = deque()
        self._file = file
        self._rules = rules
        self._most_jitter = most_jitter
        self._unsaved = False

    def tell(self, events: Iterable[Event], now: datetime, *, launching: bool) -> None:
        """Step once; what is ordered waits in `pending`."""
        state, commands = step(
            self.state,
            events,
            now,
            replace(self._rules, launching=launching),
            jitter=random.uniform(0.0, self._most_jitter),
        )
        self._unsaved = self._unsaved or state is not self.state
        self.state = state
        self.pending.extend(commands)

    def saved(self) -> bool:
        """Bring the file up to date; False, and loudly, when the disk is full.

        Raises:
          OSError: the file cannot be written for another reason; start again once it can.
        """
        if not self._unsaved:
            return True
        try:
            self._file.save(self.state)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            logger.error("paused (disk): the state cannot be saved, nothing is started or merged")
            return False
        self._unsaved = False
        return True
