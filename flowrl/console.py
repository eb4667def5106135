"""What all programs do alike: versions, command lines, one-line errors, Ctrl-C, exit codes."""

from __future__ import annotations

import logging
import shlex
import signal
import sys
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.logging import RichHandler

from flowrl import __version__
from flowrl.config import Config, parse
from flowrl.errors import EXIT_IO, FlowrlError, classify_io_error, format_error

EXIT_INTERRUPTED = 130
RUNS_GO_ON = "stopped scheduling; runs that are launched go on in their sessions."
_WIDTH = 120  # where no terminal says how wide it is
ERRORS = Console(stderr=True, width=None if sys.stderr.isatty() else _WIDTH)


def say_version(words: Sequence[str]) -> bool:
    """Whether the version was asked for, and is now said."""
    if list(words) not in (["--version"], ["-V"]):
        return False
    sys.stdout.write(f"flowrl {__version__}\n")
    return True


def run_program(
    program: str,
    kind: type[Config],
    story: Callable[[Config], int],
    argv: Sequence[str] | None = None,
    *,
    farewell: str = RUNS_GO_ON,
) -> int:
    """Parse a command line and run a story on it; returns the exit code.

    `farewell` is what Ctrl-C means for the runs of this program, in a sentence.
    """
    words = sys.argv[1:] if argv is None else list(argv)

    def whole() -> int:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if say_version(words):
            return 0
        start_logging()
        again = f"{program} {shlex.join(words)}".rstrip()
        last_words = f"\nflowrl: {farewell}\nTo go on: {again}\n"
        return _told(story, parse(kind, words, prog=program), last_words)

    return guarded(whole)


def guarded(program: Callable[[], int]) -> int:
    """Run a program: an error of ours, or of the disk, becomes one line and its exit code."""
    try:
        return program()
    except FlowrlError as error:
        sys.stderr.write(f"flowrl: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has left
        return 0
    except OSError as error:
        if not classify_io_error(error):
            raise
        sys.stderr.write(f"flowrl: {format_error(error)}; mend that and start again to go on\n")
        return EXIT_IO


def start_logging() -> None:
    """One line per event: coloured above the live table on a terminal, plain elsewhere."""
    handler = (
        RichHandler(console=ERRORS, show_path=False, log_time_format="%H:%M:%S")
        if ERRORS.is_terminal
        else _plain_handler()
    )
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    logging.getLogger("flowrl").setLevel(logging.INFO)


def _plain_handler() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    return handler


def _told(story: Callable[[Config], int], config: Config, last_words: str) -> int:
    try:
        return story(config)
    except KeyboardInterrupt:
        sys.stderr.write(last_words)
        return EXIT_INTERRUPTED
