"""Whether the graph's folder can be written to: without room nothing is started or merged.

The pause is said in the log and, where that can be written, in `flowrl status`. It ends by itself.
"""

from __future__ import annotations

import contextlib
import logging
import os

from flowrl import notices, storage
from flowrl.errors import classify_io_error, format_error
from flowrl.paths import GraphPaths

logger = logging.getLogger(__name__)
LEAST_BYTES = 2**18
PROBE_SECONDS = 5.0  # between probes while nothing else happens
_PROBE = b"\0" * 2**16
_NOTICE = "paused"


class Room:
    """Remembers what is wrong with the folder; `free` while nothing is known to be."""

    def __init__(self, layout: GraphPaths) -> None:
        self._layout = layout
        self._suspect = False  # somebody could not write
        self._unsaved = False  # the state itself cannot be saved
        self.word = ""  # "disk" or "io" while paused

    @property
    def free(self) -> bool:
        """Whether work may go on."""
        return not self.word

    def met(self, error: BaseException) -> None:
        """Somebody has failed with this: see whether it is the folder's fault."""
        if classify_io_error(error):
            self._suspect = True
            self.look()

    def cannot_save(self, error: OSError) -> bool:
        """The state cannot be saved; False when that will not pass by itself."""
        word = classify_io_error(error)
        self._unsaved = bool(word)
        if word:
            self._pause(word, format_error(error))
        return bool(word)

    def could_save(self) -> None:
        """The state is saved."""
        self._unsaved = False

    def look(self) -> None:
        """Look once, and write a probe if somebody could not; goes on when all is well."""
        if self._unsaved:
            return
        found = shortage(self._layout)
        if not found and self._suspect:
            found = self._probed()
        if found:
            self._suspect = True
            self._pause(*found)
        elif self.word:
            self._go_on()

    def _probed(self) -> tuple[str, str] | None:
        probe = self._layout.root / ".probe"
        try:
            storage.write_atomic(probe, _PROBE)
            storage.remove_file(probe)
        except OSError as error:
            with contextlib.suppress(OSError):
                storage.remove_part_files(self._layout.root)
            return (classify_io_error(error) or "io"), format_error(error)
        self._suspect = False
        return None

    def _pause(self, word: str, why: str) -> None:
        if word == self.word:
            return
        self.word = word
        text = (
            f"paused ({word}): {why}; nothing is started or merged until {self._layout.root} can "
            "be written, then it goes on by itself"
        )
        logger.error("%s", text)
        with contextlib.suppress(OSError):
            notices.publish(self._layout, _NOTICE, text)

    def _go_on(self) -> None:
        self.word = ""
        logger.warning("%s can be written again: scheduling goes on", self._layout.root)
        try:
            notices.withdraw(self._layout, _NOTICE)
        except OSError as error:
            logger.warning("a notice stays: %s", format_error(error))


def shortage(layout: GraphPaths) -> tuple[str, str] | None:
    """What the folder's file system says against it: a word and the reason, or nothing."""
    try:
        facts = os.statvfs(layout.root)
    except OSError as error:
        return ("io", format_error(error)) if classify_io_error(error) else None
    if facts.f_flag & os.ST_RDONLY:
        return "io", f"{layout.root} is read-only"
    if facts.f_blocks and facts.f_bavail * facts.f_frsize < LEAST_BYTES:
        return "disk", f"{layout.root} has no room left"
    return None
