"""The state, its file, and the commands that wait until the file holds what they follow from.

Two kinds of commands need not wait. A merge is known by the ledger in the manifest, and a new
folder that was never launched is made anew: whoever finds the older state orders both again and
ends in the same place. All else follows a save: a launch, a request to end, a folder put aside or
reopened (which takes away how its run ended), a move that is told. So from a run's end to its
dependants' start there is one save and not three.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime

from flowrl.errors import FileRefusedError, format_error
from flowrl.parallel.room import Room
from flowrl.parallel.signals import (
    Announce,
    Command,
    Event,
    Merge,
    Prepare,
    Rules,
)
from flowrl.parallel.state import SchedulerState
from flowrl.parallel.state_file import StateFile
from flowrl.parallel.transitions import step
from flowrl.redaction import cleaned


class Book:
    """Owns the state of one graph, and the commands in `pending` that follow from it.

    A command may be carried out once `next_command` gives it: the state that it follows from is
    saved then, where it has to be.
    """

    def __init__(
        self,
        file: StateFile,
        rules: Rules,
        room: Room,
        *,
        most_jitter: float,
        secrets: Sequence[str] = (),
    ) -> None:
        """Load the state; without a file it starts empty. No `secrets` come into it.

        Raises:
          FileRefusedError: the file is damaged or of another version; it is left as it is.
        """
        self.state = file.load() or SchedulerState()
        self.pending: deque[Command] = deque()
        self._file = file
        self._rules = rules
        self._room = room
        self._most_jitter = most_jitter
        self._secrets = secrets
        self._unsaved = False
        self._vouched = 0  # so many commands follow from what the file holds

    def tell(self, events: Iterable[Event], now: datetime, *, launching: bool) -> None:
        """Step once; what is ordered waits in `pending`."""
        state, commands = step(
            self.state,
            [cleaned(event, self._secrets) for event in events],
            now,
            replace(self._rules, launching=launching),
            jitter=random.uniform(0.0, self._most_jitter),
        )
        self._unsaved = self._unsaved or state is not self.state
        self.state = state
        self.pending.extend(commands)

    def next_command(self) -> Command | None:
        """Take the next command; None when there is none, or while the state cannot be saved.

        Commands that were ordered together are given out after one save, whatever comes of the
        first of them meanwhile: each may be carried out twice, so none loses what came of another.
        Merges and new folders do not wait for that save; only moves to be told are overtaken.
        """
        if not self._vouched and (ahead := self._ahead()) is not None:
            return ahead
        if not self.pending or (not self._vouched and not self.saved()):
            return None
        return self._taken()

    def _ahead(self) -> Command | None:
        """Take the first command that is no move, if it may come before the save."""
        for place, command in enumerate(self.pending):
            if _needs_no_save(command):
                del self.pending[place]
                return command
            if not isinstance(command, Announce):
                return None
        return None

    def moves_in_a_row(self) -> Iterator[Announce]:
        """Take the moves that come next and are saved."""
        while self._vouched and isinstance(command := self.pending[0], Announce):
            self._taken()
            yield command

    def _taken(self) -> Command:
        self._vouched -= 1
        return self.pending.popleft()

    def saved(self) -> bool:
        """Bring the file up to date; False, and loudly, while the disk is full or broken.

        Raises:
          FileRefusedError: the file cannot be written, and that will not pass by itself.
        """
        if not self._unsaved:
            self._vouched = len(self.pending)
            return True
        try:
            self._file.save(self.state)
        except OSError as error:
            if self._room.cannot_save(error):
                return False
            raise FileRefusedError(
                f"{self._file.path} cannot be written ({format_error(error)}), so nothing more is "
                "started or merged; runs go on: mend it and start again to adopt them"
            ) from error
        self._room.could_save()
        self._unsaved = False
        self._vouched = len(self.pending)
        return True


def _needs_no_save(command: Command) -> bool:
    """Whether the folders remember what is done, or forget nothing by it."""
    match command:
        case Merge():
            return True
        case _:
            return isinstance(command, Prepare) and command.task.run_id is None
