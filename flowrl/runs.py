"""The seam between daemon and trainer: what run.json and result.json say, as types.

Both sides read and write these files and share nothing else. A value that cannot be trusted is
refused when it is read: `from_json` functions raise `FileRefusedError`, never guess.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from flowrl import storage
from flowrl.errors import FileRefusedError
from flowrl.paths import RunPaths, display_name
from flowrl.storage import records

FORMAT = 1
STANDALONE = "standalone"  # run id of a module trained by hand, without run.json
Shapes = Mapping[str, tuple[int, ...]]  # leaf path, "actor/dense_0/kernel" → shape


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """One line of a run's plan: which skill, how often, by which expert (global index).

    It may take `max_steps` environment steps; None stands for the run's `--max_task_steps`.
    """

    skill: str
    count: int
    expert: int
    max_steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageEntry:
    """The frames of learning that one run added to an expert."""

    run_id: str
    frames: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertVersion:
    """One immutable version of an expert; the frames of its lineage sum up to `frames`.

    The manifest holds the version that counts of each expert; run.json holds the versions that a
    run started from, its ancestors. Digests are as in `ExpertReport`.
    """

    index: int
    skill: str
    version: str
    frames: int
    sha256: str
    content: str
    shapes: Shapes
    lineage: tuple[LineageEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Two skill functions that may be run, by the digest of their code.

    `trusted`: the syntax gate was lifted for them. `most_count`: they choose by their count and
    were tried with every count up to this one; None: any count will do.
    """

    digest: str
    trusted: bool = False
    most_count: int | None = None

    @staticmethod
    def from_json(facts: Mapping[str, Any]) -> Verdict:
        """The verdict in these facts; TypeError, ValueError or KeyError when there is none."""
        most, trusted = facts["most_count"], facts["trusted"]
        if type(trusted) is not bool:
            raise TypeError(f"trusted is {trusted!r}")
        most_count = None if most is None else records.natural(most)
        return Verdict(digest=records.word(facts["digest"]), trusted=trusted, most_count=most_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """What a run is; written once, before launch.

    `experts[local]` is the global index of a local expert; `expert` is the new one among them.
    """

    run_id: str
    skill: str
    expert: int
    attempt: int
    plan: tuple[PlannedStep, ...]
    experts: tuple[int, ...]
    ancestors: tuple[ExpertVersion, ...]
    config: Mapping[str, Any]
    module_sha256: str = ""  # of the generated module; empty until it is generated
    verdicts: tuple[Verdict, ...] = ()  # on the functions of its plan's steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertReport:
    """An expert as a run leaves it; `acted` counts the environment steps in which it acted."""

    expert: int
    acted: int
    sha256: str  # of its files: are they whole?
    content: str  # digest of its arrays: are they others than before?
    shapes: Shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run did; written last, only by a whole run. The sum of `acted` is `frames`."""

    run_id: str
    frames: int
    experts: tuple[ExpertReport, ...]
    success_rate: float  # of the last step, over the newest episodes
    step_success: tuple[float, ...]  # one per step of the plan
    mean_episode_length: float
    updates: int
    wall_seconds: float
    stopped_early: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A running trainer's newest figures; rewritten about once a second."""

    run_id: str
    updates: int
    frames: int
    total_frames: int
    steps_per_second: float
    step_success: tuple[float, ...]
    eta_seconds: float | None
    phase: str  # compiling, training, saving
    updated_at: float  # unix time, for eyes


def write_run(layout: RunPaths, run: TrainingRun, *, durable: bool = True) -> None:
    """Write run.json."""
    records.write(layout.run_json, {"format": FORMAT, **asdict(run)}, durable=durable)


def read_run(layout: RunPaths) -> TrainingRun:
    """Read run.json."""
    facts = records.read(layout.run_json, formats=(FORMAT,), sealed_from=FORMAT)
    try:
        return TrainingRun(
            run_id=records.word(facts["run_id"]),
            skill=display_name(records.text(facts["skill"])),
            expert=records.natural(facts["expert"]),
            attempt=records.natural(facts["attempt"]),
            plan=tuple(_planned_step(item) for item in facts["plan"]),
            experts=tuple(records.natural(item) for item in facts["experts"]),
            ancestors=tuple(expert_version(item) for item in facts["ancestors"]),
            config=dict(facts["config"]),
            module_sha256=records.word(facts["module_sha256"]),
            verdicts=tuple(Verdict.from_json(item) for item in facts["verdicts"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _malformed(layout.run_json, error) from error


def check_module(layout: RunPaths, run: TrainingRun) -> None:
    """Make sure that a run's module is the one that was generated for it.

    Raises:
      FileRefusedError: it is another, or cannot be read.
    """
    found = hashlib.sha256(storage.read_bytes(layout.module)).hexdigest()
    if run.module_sha256 != found:
        raise FileRefusedError(
            f"{layout.module} is not the module that {layout.run_json} names: it is damaged or was "
            "edited; restore it from a copy, or train the skill again"
        )


def write_result(layout: RunPaths, result: RunResult) -> None:
    """Write result.json; call it last."""
    records.write(layout.result_json, {"format": FORMAT, **asdict(result)})


def read_result(layout: RunPaths) -> RunResult:
    """Read result.json; a trainer of your own may leave its seal out."""
    facts = records.read(layout.result_json, formats=(FORMAT,), sealed_from=FORMAT + 1)
    try:
        _refuse_unknown(facts, RunResult)
        return RunResult(
            run_id=records.word(facts["run_id"]),
            frames=records.natural(facts["frames"]),
            experts=tuple(_expert_report(item) for item in facts["experts"]),
            success_rate=records.share(facts["success_rate"]),
            step_success=tuple(records.share(item) for item in facts["step_success"]),
            mean_episode_length=records.figure(facts["mean_episode_length"]),
            updates=records.natural(facts["updates"]),
            wall_seconds=records.figure(facts["wall_seconds"]),
            stopped_early=bool(facts["stopped_early"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _malformed(layout.result_json, error) from error


def write_progress(layout: RunPaths, progress: Progress) -> None:
    """Write progress.json."""
    storage.write_json(layout.progress, {"format": FORMAT, **asdict(progress)})


def read_progress(layout: RunPaths) -> Progress | None:
    """Read progress.json; None until the trainer has written it."""
    if not layout.progress.exists():
        return None
    facts = records.read(layout.progress, formats=(FORMAT,), sealed_from=FORMAT + 1)
    eta = facts.get("eta_seconds")
    try:
        return Progress(
            run_id=records.word(facts["run_id"]),
            updates=records.natural(facts["updates"]),
            frames=records.natural(facts["frames"]),
            total_frames=records.natural(facts["total_frames"]),
            steps_per_second=records.finite(facts["steps_per_second"]),
            step_success=tuple(records.share(item) for item in facts["step_success"]),
            eta_seconds=None if eta is None else records.finite(eta),
            phase=records.phase(facts["phase"]),
            updated_at=records.finite(facts["updated_at"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _malformed(layout.progress, error) from error


def _refuse_unknown(facts: Mapping[str, Any], kind: type) -> None:
    """A misspelt key would else be a value left out."""
    unknown = set(facts) - {"format"} - {item.name for item in fields(kind)}
    if unknown:
        raise ValueError(f"unknown keys {sorted(unknown)}")


def _malformed(path: Path, error: Exception) -> FileRefusedError:
    return FileRefusedError(f"{path} is malformed: {type(error).__name__}: {error}")


def _planned_step(facts: Mapping[str, Any]) -> PlannedStep:
    most = facts.get("max_steps")
    if most is not None and records.natural(most) < 1:
        raise ValueError("a step may take no steps")
    return PlannedStep(
        skill=display_name(records.text(facts["skill"])),
        count=records.natural(facts["count"]),
        expert=records.natural(facts["expert"]),
        max_steps=most,
    )


def expert_version(data: Mapping[str, Any]) -> ExpertVersion:
    """The version in these data; TypeError, ValueError or KeyError when there is none."""
    lineage = tuple(
        LineageEntry(run_id=records.word(item["run_id"]), frames=records.natural(item["frames"]))
        for item in data["lineage"]
    )
    return ExpertVersion(
        index=records.natural(data["index"]),
        skill=display_name(records.text(data["skill"])),
        version=records.word(data["version"]),
        frames=records.natural(data["frames"]),
        sha256=records.word(data["sha256"]),
        content=records.word(data["content"]),
        shapes=_shapes(data["shapes"]),
        lineage=lineage,
    )


def _expert_report(facts: Mapping[str, Any]) -> ExpertReport:
    _refuse_unknown(facts, ExpertReport)
    return ExpertReport(
        expert=records.natural(facts["expert"]),
        acted=records.natural(facts["acted"]),
        sha256=records.word(facts["sha256"]),
        content=records.word(facts["content"]),
        shapes=_shapes(facts["shapes"]),
    )


def _shapes(data: Mapping[str, Any]) -> Shapes:
    return {
        records.text(leaf): tuple(records.natural(size) for size in shape)
        for leaf, shape in data.items()
    }
