"""The frame of every program: version, command line, logging, one-line errors, exit codes."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flowrl import __version__
from flowrl.command_line import parse
from flowrl.config import Config
from flowrl.errors import (
    EXIT_DISK_FULL,
    EXIT_INTERRUPTED,
    EXIT_IO,
    EXIT_RESUMABLE,
    EXIT_USAGE,
    FlowrlError,
    classify_io_error,
    format_error,
)
from flowrl.paths import printable
from flowrl.redaction import redacted, secrets_of

RUNS_GO_ON = "stopped scheduling; launched runs go on in their sessions."
_REMEDIES = {
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ELOOP), "choose another name"),
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR, errno.EEXIST), "move it away"),
    errno.ENOENT: "choose another place",
}
ERROR_PREFIX = "flowrl: "
_WIDTH = 120  # columns of a file or a pipe
ERRORS = Console(stderr=True, width=None if sys.stderr and sys.stderr.isatty() else _WIDTH)


def run_words(work: Callable[[list[str]], int], argv: Sequence[str] | None = None) -> int:
    """Call `work` with the words of a command line, unless they ask for the version.

    Returns the exit code; what is logged and how errors are told is the same for all programs.
    """
    _open_streams()
    words = sys.argv[1:] if argv is None else list(argv)
    if words in (["--version"], ["-V"]):
        sys.stdout.write(f"flowrl {__version__}\n")
        return 0
    start_logging()
    return guarded(lambda: work(words) if _is_somewhere() else EXIT_USAGE)


def _open_streams() -> None:
    """Give a program that was begun without an output one; show `?` for what one cannot show."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, io.StringIO())
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _is_somewhere() -> bool:
    """Return whether the folder that the shell is in exists, and say so if it does not."""
    try:
        return bool(Path.cwd())
    except FileNotFoundError:
        _print_error("the folder that you are in was removed; cd to one that is there")
        return False


def run_program(
    program: str,
    kind: type[Config],
    work: Callable[[Config], int],
    argv: Sequence[str] | None = None,
) -> int:
    """Parse a command line and call `work` with it; returns the exit code."""

    def run(words: Sequence[str]) -> int:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        config = parse(kind, words, prog=program)
        try:
            return work(config)
        except KeyboardInterrupt:
            again = shlex.join([*_as_called(program), *words])
            sys.stderr.write(f"\nflowrl: {RUNS_GO_ON}\nTo go on: {again}\n")
            return EXIT_INTERRUPTED

    return run_words(run, argv)


def _as_called(program: str) -> list[str]:
    """The words of a program: the first by its path if the shell finds none, or another by it."""
    name, *words = program.split()
    beside = shutil.which(name, path=Path(sys.executable).parent)
    return [name if beside in (None, shutil.which(name)) else beside, *words]


def guarded(program: Callable[[], int]) -> int:
    """Call a program; an error of flowrl or of the disk becomes one line and its exit code."""
    try:
        return program()
    except FlowrlError as error:
        _print_error(str(error))
        return EXIT_DISK_FULL if classify_io_error(error) == "disk" else error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except MemoryError:
        _print_error("there is no memory left; end other programs, or raise the limit (ulimit -v)")
        return EXIT_IO
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the output has ended
        return 0
    except OSError as error:
        return _told(error)


def _told(error: OSError) -> int:
    """Tell an error of the system in a line, and return its exit code; raise it if it is ours."""
    if error.filename and error.errno in _REMEDIES:
        files = (str(path) for path in Path(error.filename).parents if path.is_file())
        error.filename = next(files, error.filename)  # what stands in a folder's place
        _print_error(f"{format_error(error)}; {_REMEDIES[error.errno]}")
        return EXIT_USAGE
    if not (problem := classify_io_error(error)):
        raise error
    remedy = "repair that and start again to go on"
    if isinstance(error, PermissionError):
        remedy = "let its owner give you the right, or choose another place"
    _print_error(f"{format_error(error)}; {remedy}")
    return EXIT_DISK_FULL if problem == "disk" else EXIT_IO


class StopSignal:
    """Remembers SIGTERM or SIGINT until the training loop asks between two updates.

    A second Ctrl-C ends the program at once, whatever its threads compile or compute, unless the
    main thread itself is within a compiler's call. `unit` is what the loop calls an update.
    """

    def __init__(self, unit: str = "update") -> None:
        self._unit = unit
        self._exit_code: int | None = None

    def __call__(self) -> int | None:
        """The exit code of a trainer that was asked to stop and has saved its state, else None."""
        return self._exit_code

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals for the length of the block, in a program's main thread."""
        handled = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self._handle) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._exit_code == EXIT_INTERRUPTED:
            _say("ended; the same command goes on from the last checkpoint, if there is one")
            os._exit(EXIT_INTERRUPTED)  # a usual exit waits for the threads
        self._exit_code = EXIT_RESUMABLE
        if number == signal.SIGINT:
            self._exit_code = EXIT_INTERRUPTED
            again = "Ctrl-C once more ends at once, without saving"
            _say(f"stopping after this {self._unit}; {again}")


def _say(text: str) -> None:
    """Write a line to the terminal in a signal handler, where logging could call itself."""
    with suppress(OSError):
        os.write(sys.stderr.fileno(), f"{text}\n".encode())


def print_report(facts: Any, lines: Iterable[str], *, as_json: bool) -> None:
    """Print the facts as JSON, or the lines without characters that could steer a terminal."""
    if as_json:
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
        return
    for line in filter(None, lines):
        sys.stdout.write(printable(" ".join(line.split("\n"))) + "\n")


@contextmanager
def progress_bar(text: str, total: int | None = None) -> Iterator[Callable[[int, str], None]]:
    """Show on a terminal how much of a total is done, what is under way, and for how long.

    Yields a function that takes the number that is done and the next text. Elsewhere than on a
    terminal nothing is shown.
    """
    if not ERRORS.is_terminal:
        yield lambda done, text: None
        return
    said = TextColumn("{task.description}", markup=False)
    columns = (said, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=ERRORS, transient=True) as bar:
        task = bar.add_task(printable(text), total=total)
        yield lambda done, text: bar.update(task, completed=done, description=printable(text))


def _print_error(text: str) -> None:
    """Print an error without what would steer the terminal, or is secret: it may quote anything."""
    text = " ".join(redacted(text, secrets_of(os.environ)).split("\n"))
    sys.stderr.write(printable(f"{ERROR_PREFIX}{text}") + "\n")


def _without_secrets(record: logging.LogRecord) -> bool:
    lines = redacted(record.getMessage(), secrets_of(os.environ)).split("\n")
    record.msg = "\n".join(map(printable, lines))
    record.args = ()
    return True


def start_logging() -> None:
    """Log one line per event: coloured above the live table on a terminal, plain elsewhere."""
    # XLA reports a slow compilation as an error; its real errors are exceptions in Python, too.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    handler: logging.Handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    if ERRORS.is_terminal:
        handler = RichHandler(console=ERRORS, show_path=False, log_time_format="%H:%M:%S")
    handler.addFilter(_without_secrets)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    logging.getLogger("flowrl").setLevel(logging.INFO)
