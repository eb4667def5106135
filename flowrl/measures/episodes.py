"""Recorded episodes of an evaluation, and their file episodes.npz: each can be played once more.

An episode is the key of its world and, for each timestep, the action and the key of what is drawn
in it, and the step of the plan. A digest of the world and the reward of each timestep say whether
a replay is the same.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowrl import storage
from flowrl.errors import FileRefusedError
from flowrl.paths import GraphPaths
from flowrl.runs import SkillName, TrainingRun
from flowrl.storage import arrays, records
from flowrl.storage.records import Natural, Word

_AGAIN = "record again with flowrl evaluate --record"
_MOST_BYTES = 2**30  # of the file: 50 million timesteps
# Axes beside the first, types and whether the first axis counts timesteps, not episodes.
_FORMS = {
    "world_keys": (1, "uint32", False),
    "lengths": (0, "int32", False),
    "success": (0, "bool", False),
    "actions": (0, "int16", True),
    "steps": (0, "int16", True),
    "step_keys": (1, "uint32", True),
    "rewards": (0, "float32", True),
    "digests": (0, "uint32", True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodesOrigin:
    """The origin of recorded episodes; `module` is the sha256 of the run's module."""

    skill: SkillName
    env_name: Word
    module: Word
    generation: Natural
    seed: int

    @classmethod
    def of(cls, run: TrainingRun, *, generation: int, seed: int) -> EpisodesOrigin:
        """The record of episodes of a run's plan."""
        return cls(
            skill=run.skill,
            env_name=run.config["env_name"],
            module=run.module_sha256 or "",
            generation=generation,
            seed=seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEpisode:
    """One episode of T timesteps."""

    number: int  # its number in the file, from 1
    world_key: np.ndarray  # uint32: of the world
    success: bool
    actions: np.ndarray  # int16[T]
    steps: np.ndarray  # int16[T]: the step of the plan in which each action was taken, from 0
    step_keys: np.ndarray  # uint32[T, …]: of what the game draws in each timestep
    rewards: np.ndarray  # f32[T]
    digests: np.ndarray  # uint32[T]: of the world before each action


@dataclass(frozen=True, kw_only=True)
class RecordedEpisodes:
    """N episodes; `columns` has the arrays that `_FORMS` names, timesteps one after another."""

    origin: EpisodesOrigin
    columns: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        """The number of episodes."""
        return len(self.columns["lengths"])

    def __iter__(self) -> Iterator[RecordedEpisode]:
        """Each episode."""
        ends = np.cumsum(self.columns["lengths"])
        for number, (end, length) in enumerate(zip(ends, self.columns["lengths"], strict=True)):
            here = slice(end - length, end)
            timesteps = {name: self.columns[name][here] for name, form in _FORMS.items() if form[2]}
            yield RecordedEpisode(
                number=number + 1,
                world_key=self.columns["world_keys"][number],
                success=bool(self.columns["success"][number]),
                **timesteps,
            )

    def encode(self) -> bytes:
        """The content of episodes.npz."""
        content = io.BytesIO()
        said: Any = {"record": np.array(json.dumps(records.to_json(self.origin))), **self.columns}
        np.savez(content, **said)
        return content.getvalue()


def decode_episodes(content: bytes, place: str) -> RecordedEpisodes:
    """The episodes in the content of episodes.npz.

    FileRefusedError says why there are none; `place` names where the content is from.
    """
    columns = arrays.read(content, ("record", *_FORMS), place=place, remedy=_AGAIN)
    said = columns.pop("record")
    if said.shape or said.dtype.kind != "U":
        raise FileRefusedError(f"{place}: its record is no text; {_AGAIN}")
    try:
        origin = records.from_json(EpisodesOrigin, json.loads(str(said)))
    except (ValueError, RecursionError) as error:
        raise FileRefusedError(f"{place}: its record is malformed: {error}; {_AGAIN}") from error
    lengths = columns["lengths"]
    formed = lengths.ndim == 1 and lengths.dtype == np.int32
    if not formed or (lengths < 1).any():
        raise FileRefusedError(f"{place}: its lengths are none of episodes; {_AGAIN}")
    for name, (axes, kind, of_timesteps) in _FORMS.items():
        found, rows = columns[name], lengths.sum() if of_timesteps else len(lengths)
        if found.ndim != axes + 1 or found.dtype != kind or len(found) != rows:
            raise FileRefusedError(f"{place}: {name} do not fit the episodes' lengths; {_AGAIN}")
    return RecordedEpisodes(origin=origin, columns=columns)


def read_episodes(graph_paths: GraphPaths, run: TrainingRun) -> RecordedEpisodes:
    """The episodes that were recorded of a merged skill.

    FileRefusedError if there are none, or if they are of another run of the skill.
    """
    path = episodes_file(graph_paths, run)
    if not path.exists():
        raise FileRefusedError(
            f"no episode of {run.skill} is recorded; flowrl evaluate --record N does"
        )
    content = storage.read_bytes(path, limit_bytes=_MOST_BYTES, remedy=_AGAIN)
    episodes = decode_episodes(content, str(path))
    if episodes.origin.skill != run.skill or episodes.origin.module != run.module_sha256:
        raise FileRefusedError(f"{path} is of another run than the one that is merged; {_AGAIN}")
    return episodes


def episodes_file(graph_paths: GraphPaths, run: TrainingRun) -> Path:
    """The file of a merged skill's recorded episodes."""
    return graph_paths.archive(run.expert, run.skill).folder / "episodes.npz"
