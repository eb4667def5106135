"""The frame of every program: version, command line, logging, one-line errors, exit codes."""

from __future__ import annotations

import errno
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Console
from rich.logging import RichHandler

from flowrl import __version__
from flowrl.config import Config, parse
from flowrl.errors import (
    EXIT_DISK_FULL,
    EXIT_INTERRUPTED,
    EXIT_IO,
    EXIT_USAGE,
    FlowrlError,
    classify_io_error,
    format_error,
)
from flowrl.paths import printable
from flowrl.redaction import redacted, secrets_of

RUNS_GO_ON = "stopped scheduling; launched runs go on in their sessions."
_BAD_NAME = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP)
_WIDTH = 120  # columns of a file or a pipe
ERRORS = Console(stderr=True, width=None if sys.stderr.isatty() else _WIDTH)


def print_version(words: Sequence[str]) -> bool:
    """Print the version if the command line asks for it; returns whether it does."""
    if list(words) not in (["--version"], ["-V"]):
        return False
    sys.stdout.write(f"flowrl {__version__}\n")
    return True


def run_program(
    program: str,
    kind: type[Config],
    work: Callable[[Config], int],
    argv: Sequence[str] | None = None,
) -> int:
    """Parse a command line and call `work` with it; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)

    def run() -> int:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if print_version(words):
            return 0
        start_logging()
        config = parse(kind, words, prog=program)
        try:
            return work(config)
        except KeyboardInterrupt:
            again = f"{program} {shlex.join(words)}".rstrip()
            sys.stderr.write(f"\nflowrl: {RUNS_GO_ON}\nTo go on: {again}\n")
            return EXIT_INTERRUPTED

    return guarded(run)


def guarded(program: Callable[[], int], stream: TextIO | None = None) -> int:
    """Call a program; an error of flowrl or of the disk becomes one line and its exit code.

    The line goes to `stream` (default: standard error).
    """
    out = stream or sys.stderr
    try:
        return program()
    except FlowrlError as error:
        _print_error(out, str(error))
        return EXIT_DISK_FULL if classify_io_error(error) == "disk" else error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        out.close()  # the reader of the output has ended
        return 0
    except OSError as error:
        if error.errno in _BAD_NAME:
            _print_error(out, f"{format_error(error)}; choose another name")
            return EXIT_USAGE
        if not (problem := classify_io_error(error)):
            raise
        _print_error(out, f"{format_error(error)}; repair that and start again to go on")
        return EXIT_DISK_FULL if problem == "disk" else EXIT_IO


def _print_error(stream: TextIO, text: str) -> None:
    """Print an error without what would steer the terminal, or is secret: it may quote anything."""
    text = redacted(text, secrets_of(os.environ))
    stream.write("\n".join(map(printable, f"flowrl: {text}".split("\n"))) + "\n")


def _without_secrets(record: logging.LogRecord) -> bool:
    record.msg = redacted(record.getMessage(), secrets_of(os.environ))
    record.args = ()
    return True


def log_handler(stream: TextIO) -> logging.Handler:
    """Writes one plain line per event, without secrets."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    handler.addFilter(_without_secrets)
    return handler


def start_logging() -> None:
    """Log one line per event: coloured above the live table on a terminal, plain elsewhere."""
    # XLA reports a slow compilation as an error; its real errors are exceptions in Python, too.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    handler = log_handler(sys.stderr)
    if ERRORS.is_terminal:
        handler = RichHandler(console=ERRORS, show_path=False, log_time_format="%H:%M:%S")
        handler.addFilter(_without_secrets)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    logging.getLogger("flowrl").setLevel(logging.INFO)
