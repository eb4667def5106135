"""Trackers of a run's figures: a file of JSON lines, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import logging
import math
import netrc
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Any, Protocol

from flowrl import storage
from flowrl.errors import ConfigError
from flowrl.paths import RunPaths
from flowrl.runs import STANDALONE
from flowrl.storage import records

logger = logging.getLogger(__name__)
_LEFT_OUT = "%s is left out from here on: %s"


class Tracker(Protocol):
    """Takes a run's figures."""

    def log(self, figures: Mapping[str, float], *, frames: int) -> None:
        """Take the figures that hold after so many frames."""

    def close(self) -> None:
        """Write what is still held back."""


class JsonLines:
    """metrics.jsonl: one object per line; a figure that is no number is null.

    When it is opened it is cut before the first line that is torn or of more than `frames`.
    """

    def __init__(self, run_paths: RunPaths, frames: int) -> None:
        self._path = run_paths.metrics
        with suppress(FileNotFoundError):
            lines = self._path.read_bytes().splitlines(keepends=True)
            kept = takewhile(lambda line: _is_within(line, frames), lines)
            storage.write_atomic(self._path, b"".join(kept))

    def log(self, figures: Mapping[str, float], *, frames: int) -> None:
        """Append one line."""
        numbers = {name: x if math.isfinite(x) else None for name, x in figures.items()}
        storage.append_line(self._path, json.dumps({"frames": frames, **numbers}))

    def close(self) -> None:
        """Every line is written already."""


class TensorBoard:
    """Event files in the run folder; of earlier ones TensorBoard hides points after `frames`."""

    def __init__(self, run_paths: RunPaths, frames: int) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(run_paths.tensorboard), purge_step=frames + 1)

    def log(self, figures: Mapping[str, float], *, frames: int) -> None:
        """One scalar per figure."""
        for name, figure in figures.items():
            self._writer.add_scalar(name, figure, frames)

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()


class WeightsAndBiases:
    """A run at Weights & Biases; kept on disk for `wandb sync` when there is no key.

    A history is never unsaid: W&B itself skips the steps that it has.
    """

    def __init__(self, run_paths: RunPaths, flags: Mapping[str, Any], run_id: str) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            remedy = "pip install '.[wandb]' in flowrl's folder"
            raise ConfigError(f"--use_wandb needs wandb: {remedy}") from error
        failures: Any = wandb.errors  # pyright: ignore[reportAttributeAccessIssue]
        self._failure: type[Exception] = failures.Error
        try:
            self._run: Any = wandb.init(
                project=flags["wandb_project"],
                entity=flags["wandb_entity"],
                id=None if run_id == STANDALONE else run_id.replace(".", "-"),
                name=run_paths.folder.name,
                dir=str(run_paths.folder),
                resume="allow",
                mode=None if "WANDB_MODE" in os.environ or _has_wandb_key() else "offline",
                config=records.to_json(flags),
            )
        except self._failure as error:
            raise ConfigError(f"--use_wandb: {error}; or set WANDB_MODE=offline") from error

    def log(self, figures: Mapping[str, float], *, frames: int) -> None:
        """One step of the run's history."""
        self._told(lambda: self._run.log(dict(figures), step=frames))

    def close(self) -> None:
        """Hand the rest over."""
        self._told(self._run.finish)

    def _told(self, act: Callable[[], object]) -> None:
        try:
            act()
        except self._failure as error:
            raise ConnectionError(str(error)) from error


class Guarded:
    """Several trackers; one whose disk or network fails is left out, and training goes on."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, figures: Mapping[str, float], *, frames: int) -> None:
        """Hand the figures to every tracker that still works."""
        self._each(lambda tracker: tracker.log(figures, frames=frames))

    def close(self) -> None:
        """Close every tracker that still works."""
        self._each(lambda tracker: tracker.close())

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                act(tracker)
            except OSError as error:
                self._trackers.remove(tracker)
                logger.warning(_LEFT_OUT, type(tracker).__name__, error)


def open_trackers(
    run_paths: RunPaths, flags: Mapping[str, Any], *, run_id: str, frames: int
) -> Guarded:
    """The trackers that a run's flags ask for; they forget what is beyond so many frames.

    Raises ConfigError if one needs a package that is not installed.
    """
    wanted: list[partial[Tracker]] = [partial(JsonLines, run_paths, frames)]
    if flags["use_tensorboard"]:
        wanted.append(partial(TensorBoard, run_paths, frames))
    if flags["use_wandb"]:
        wanted.append(partial(WeightsAndBiases, run_paths, flags, run_id))
    trackers = []
    for tracker in wanted:
        try:
            trackers.append(tracker())
        except OSError as error:
            logger.warning(_LEFT_OUT, tracker.func.__name__, error)
    return Guarded(trackers)


def _has_wandb_key() -> bool:
    """Return whether a key is in the environment, or where `wandb login` keeps it."""
    try:
        return "WANDB_API_KEY" in os.environ or "api.wandb.ai" in netrc.netrc().hosts
    except (OSError, netrc.NetrcParseError):
        return False


def _is_within(line: bytes, frames: int) -> bool:
    try:
        return line.endswith(b"\n") and json.loads(line)["frames"] <= frames
    except (ValueError, KeyError, TypeError):
        return False
