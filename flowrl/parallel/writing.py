"""Lets a language model write skills once none is left to train; nothing waits for it.

The child is `flowrl write GRAPH --next`. It reaches the scheduler by the request that it leaves in
the inbox, and is looked at between two ticks. Transcripts tell how many skills it has written.
"""

from __future__ import annotations

import logging
import shlex
import subprocess
import tempfile
from importlib.util import find_spec

from flowrl import arguments
from flowrl.errors import ConfigError, FlowrlError, format_error
from flowrl.launchers import child
from flowrl.launchers.child import Child
from flowrl.llm.flags import WriteFlags
from flowrl.llm.transcript import granted_next
from flowrl.parallel.notifying import tell_failure
from flowrl.paths import GraphPaths, printable

WRITING = "writing"  # the notice
# Contests would take the cores of the graph's own runs, and none of their experts is kept.
_NO_CONTEST = "--candidate_timesteps=0"
_OWN = ("graph_path", "wish", "next", "output", "env_name")
logger = logging.getLogger(__name__)


class Writing:
    """Has so many skills of a graph written, one after another; earlier starts count."""

    def __init__(self, wanted: int, flags: str | None, graph_paths: GraphPaths) -> None:
        """Take the flags of `flowrl write`; ConfigError if one is wrong, or the endpoint."""
        words = _checked(flags or "") if wanted else []
        self._words = ("write", f"--graph_path={graph_paths.root}", "--next", *words)
        self._wanted, self._graph_paths = wanted, graph_paths
        self._asks, self._written = wanted > 0, 0
        self._child: Child | None = None

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, *_: object) -> None:
        """End the child; the same command goes on with what it has asked."""
        if self._child:
            child.end([self._child])

    def may_come(self, *, begin: bool) -> bool:
        """Return whether a skill may be added; has one written if `begin`, and some are wanted."""
        code = self._child.poll() if self._child else None
        try:
            if code is not None:
                self._take_end(code)
            if begin and self._asks and not self._child:
                self._begin()
        except (FlowrlError, OSError) as error:
            self._stop(format_error(error))
        return self._child is not None or code is not None  # then its request is there

    def _begin(self) -> None:
        """Start the child, unless all skills are written."""
        self._written = self._count()
        self._asks = self._written < self._wanted
        if self._asks:
            logger.info("a model is asked for skill %d of %d", self._written + 1, self._wanted)
            self._said = tempfile.TemporaryFile()  # noqa: SIM115 — the child writes into it
            words = child.flowrl_words(*self._words)
            out, null, both = self._said, subprocess.DEVNULL, subprocess.STDOUT
            self._child = subprocess.Popen(
                words, stdin=null, stdout=out, stderr=both, start_new_session=True
            )

    def _take_end(self, code: int) -> None:
        """Tell why nothing was written; stop if the same would come of asking again."""
        self._child = None
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip().rpartition("\n")[2]
        self._said.close()
        what = f"flowrl write ended with exit code {code}: {printable(said)}"
        if self._count() == self._written:
            self._stop(what)
        elif code:
            tell_failure(self._graph_paths, WRITING, what)

    def _stop(self, why: str) -> None:
        """Ask no more in this start."""
        self._asks = False
        tell_failure(self._graph_paths, WRITING, f"no further skill is written: {why}")

    def _count(self) -> int:
        """Return how many wishes for a next skill were granted or given up, also by users."""
        known = self._graph_paths.skill_file
        return granted_next(self._graph_paths.transcripts, lambda skill: known(skill).exists())


def _checked(flags: str) -> list[str]:
    """Return the words of the flags; ConfigError if one is wrong, or the endpoint."""
    try:
        words = [_NO_CONTEST, *shlex.split(flags)]
        given, origins = arguments.read(WriteFlags, words, prog="flowrl write", layers={})
        arguments.check_needs(WriteFlags, {**vars(given), "next": True}, origins)
        if own := [name for name in _OWN if name in origins]:
            shown = arguments.arguments(WriteFlags)[own[0]].shown
            raise ConfigError(f"the graph says {shown}; leave it out")
        if given.llm_replay is None and given.endpoint and not find_spec("openai"):
            raise ConfigError("the package openai is missing; pip install '.[llm]'")
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"--write_flags: {error}") from error
    return words
