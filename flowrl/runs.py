"""The seam between daemon and trainer: what run.json, result.json and the trainer's flags say.

Both sides read and write these files and share nothing else. A value that cannot be trusted is
refused when it is read: the readers raise `FileRefusedError`, never guess.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from flowrl import arguments, storage
from flowrl.arguments import Count, CountOrZero, Needs
from flowrl.command_line import to_argv
from flowrl.config import Configuration, PPOConfig, checked, flags, from_json
from flowrl.errors import ConfigError, ExpertIndexError, FileRefusedError
from flowrl.games.base import ObservationSize, check_coverage
from flowrl.paths import RunPaths, display_name
from flowrl.storage import records
from flowrl.storage.records import Natural, Phase, Positive, Share, Word

logger = logging.getLogger(__name__)
REPORT = " · update "  # in a line of a trainer's log that says how far it is, not why it ended
_LEAST_SHARD = 32  # environments of a thread: a shard costs as much again as some twenty
STANDALONE = "standalone"  # run id of a module trained by hand, without run.json
SkillName = Annotated[str, display_name]
EarlyEnd = Literal["", "pruned", "converged"]
Shapes = Mapping[str, tuple[Natural, ...]]  # leaf path, "actor/dense_0/kernel" → shape
_OF_LAUNCH = ("num_devices", "acting_threads", "compile_cache")  # each start has its own
FILTERS, KERNEL = 16, (3, 3)  # of the convolution with which experts begin that see a grid
LAYERS = ("dense_0", "dense_1", "dense_2", "dense_3")  # three hidden ones, and the output


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """One line of a run's plan: which skill, how often, by which expert (global index).

    It may take `max_steps` timesteps (None: `--max_task_steps`), and leaves `gains`. Later steps
    need what it `keeps`, and the `facts` that other steps have brought about.
    """

    skill: SkillName
    count: Natural
    expert: Natural
    max_steps: Positive | None = None
    gains: Mapping[str, Natural] = field(default_factory=dict)  # item → least amount
    keeps: Mapping[str, Natural] = field(default_factory=dict)  # item → least amount
    facts: Mapping[str, Natural] = field(default_factory=dict)  # near_table → step that is done


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageEntry:
    """The frames that a run added to an expert, and the success of a run of its own skill."""

    run_id: Word
    frames: Natural
    success_rate: Share | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertVersion:
    """One immutable version of an expert; the frames of its lineage sum up to `frames`.

    The manifest holds the version that counts of each expert; run.json holds the versions that a
    run started from, its ancestors. Digests are as in `ExpertReport`.
    """

    index: Natural
    skill: SkillName
    version: Word
    frames: Natural
    sha256: Word
    content: Word
    shapes: Shapes
    lineage: tuple[LineageEntry, ...]

    @property
    def own_run(self) -> LineageEntry | None:
        """The newest run of its own skill."""
        own = (entry for entry in reversed(self.lineage) if entry.success_rate is not None)
        return next(own, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeApproval:
    """An approval of two skill functions, by the digest of their code; `trusted`: unchecked."""

    digest: Word
    trusted: bool = False
    begins_anew: bool = True  # nor is a new world a success


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """The record of a run, written once, before launch; `expert` is the new one of `experts`."""

    run_id: Word
    skill: SkillName
    expert: Natural
    attempt: Natural
    plan: tuple[PlannedStep, ...]
    experts: tuple[Natural, ...]  # global indices, by local index
    ancestors: tuple[ExpertVersion, ...]
    config: Mapping[str, Any]
    module_sha256: Word | None = None  # of the generated module; None until it is generated
    origins: Mapping[str, str] = field(default_factory=dict)  # of values of config, by flag
    approvals: tuple[CodeApproval, ...] = ()  # on the functions of its plan's steps
    anew: bool = False  # its own expert, although trained before, begins as a new one
    copied: ExpertVersion | None = None  # of which its own expert begins as a copy
    goal: Share = 0.0  # of its skill, if its config has a lower one, at which it ends early

    @property
    def trained(self) -> tuple[int, ...]:
        """The frames that each of its experts had before."""
        frames = {version.index: version.frames for version in self.ancestors}
        return tuple(frames.get(index, 0) for index in self.experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertReport:
    """An expert as a run leaves it; `acted` counts the environment steps in which it acted."""

    expert: Natural
    acted: Natural
    sha256: Word  # of its files: are they whole?
    content: Word  # digest of its arrays: are they others than before?
    shapes: Shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnds:
    """A count of attempts at a step of the plan; begun = done + died + cut + running.

    It is cut by the time limit, of the step or of the episode.
    """

    begun: Natural
    done: Natural
    died: Natural
    cut: Natural
    running: Natural
    timesteps: Natural
    causes: Mapping[str, Natural] = field(default_factory=dict)  # of deaths; none of other games
    kept: Mapping[str, Natural] = field(default_factory=dict)  # of done + cut, with what it keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a run; written last, only by a whole run.

    Experts, what they have `acted` and rates are those of the last update, or of one before it that
    succeeded clearly more. Then `kept_update` is its number, and `last_success_rate` that of the
    last.
    """

    run_id: Word
    frames: Natural
    experts: tuple[ExpertReport, ...]
    success_rate: Share  # of the last step, over the newest episodes
    step_success: tuple[Share, ...]  # one per step of the plan
    mean_episode_length: float
    updates: Natural
    wall_seconds: float
    stopped_early: bool
    stopped: EarlyEnd = ""  # why it ended before its goal and its budget
    kept_update: Natural | None = None
    last_success_rate: Share | None = None
    step_ends: tuple[StepEnds, ...] = ()  # one per step of the plan, of the last updates


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A running trainer's newest figures; rewritten about once a second."""

    run_id: Word
    updates: Natural
    frames: Natural
    total_frames: Natural
    steps_per_second: float
    step_success: tuple[Share, ...]
    eta_seconds: float | None
    phase: Phase  # queued, compiling, training, saving
    updated_at: float  # unix time, for eyes
    waits_for: str = ""  # replicas
    step_ends: tuple[StepEnds, ...] = ()  # as in the result, of the newest updates

    @classmethod
    def since(
        cls, began: tuple[float, int], *, frames: int, total_frames: int, **facts: Any
    ) -> Progress:
        """With the speed since `began`, a time of `time.monotonic` and the frames until then."""
        speed = speed_since(began, frames)
        return cls(
            frames=frames,
            total_frames=total_frames,
            steps_per_second=speed,
            eta_seconds=max(0, total_frames - frames) / speed if speed else None,
            updated_at=time.time(),
            **facts,
        )

    def line(self, report: str = REPORT) -> str:
        """Return the trainer's progress in one line, for the terminal."""
        done = f"{self.updates:,} · {self.frames:,} of {self.total_frames:,} frames"
        if self.eta_seconds is None:
            return f"{self.phase}{report}{done}"
        left = timedelta(seconds=round(self.eta_seconds))
        speed = f"{self.steps_per_second:,.0f} steps/s"
        return f"{self.phase}{report}{done} · {speed} · at most {left} left"


def speed_since(began: tuple[float, int], frames: int) -> float:
    """Frames per second since `began`, a time of `time.monotonic` and the frames until then."""
    seconds = time.monotonic() - began[0]
    return (frames - began[1]) / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Remapping:
    """Global expert indices ↔ local ones: `experts[local]` is a global index.

    A graph numbers its experts once and for all (0, 5, 10, 50); a run holds only those that its
    plan needs, side by side (0, 1, 2, 3): four networks, not fifty-one. Unpacks into both.

    >>> global_to_local, local_to_global = Remapping.of([10, 0, 5], 50)
    >>> global_to_local
    {0: 0, 5: 1, 10: 2, 50: 3}
    >>> local_to_global
    {0: 0, 1: 5, 2: 10, 3: 50}
    """

    experts: tuple[int, ...]

    def __post_init__(self) -> None:
        plain = all(type(index) is int and index >= 0 for index in self.experts)
        if not (self.experts and plain and all(map(int.__lt__, self.experts, self.experts[1:]))):
            raise ExpertIndexError(
                f"{self.experts} are not the experts of a run; name each index 0, 1, 2, … at most "
                "once, in rising order"
            )

    @classmethod
    def of(cls, dependencies: Collection[int], new: int) -> Remapping:
        """Return the remapping of a run; ExpertIndexError if an index is twice in it."""
        return cls(tuple(sorted([*dependencies, new])))

    @property
    def global_to_local(self) -> dict[int, int]:
        """Local index by global index."""
        return {expert: local for local, expert in enumerate(self.experts)}

    @property
    def local_to_global(self) -> dict[int, int]:
        """Global index by local index."""
        return dict(enumerate(self.experts))

    def __iter__(self) -> Iterator[dict[int, int]]:
        """The documented pair: `(global_to_local, local_to_global)`."""
        yield self.global_to_local
        yield self.local_to_global


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Configuration):
    """Train one generated module: `python -m flowrl.ppo_flow --module_path RUN/2.py`.

    The run.json beside it is the configuration. A flag given here wins and is written down there.
    """

    ppo: PPOConfig = PPOConfig()
    module_path: Path
    """The generated module; its folder holds run.json and takes the checkpoints."""
    resume: bool = True
    """Continue from the checkpoint of a stopped or killed trainer when there is one."""
    num_processes: Count = 1
    """Processes that share the devices, one for each unless --num_devices says more; without a
    coordinator all are started on this machine."""
    coordinator: str | None = None
    """HOST:PORT at which process 0 listens, if each process is started by hand or by an engine. It
    has no password, so use it in trusted networks only."""
    process_id: CountOrZero = 0
    """Number of this process, below num_processes."""
    peer_timeout: Annotated[Count, Needs(num_processes=2)] = 10
    """Seconds without a sign of life after which another process counts as lost."""
    replica: CountOrZero | None = None
    """Number of this replica, by which the run's first process starts it."""

    @property
    def run_paths(self) -> RunPaths:
        """The run's folder; of no file that names the expert."""
        return RunPaths(self.module_path.absolute().parent, 0)

    @classmethod
    def read(cls, words: Sequence[str], *, prog: str) -> TrainConfig:
        """Read a trainer's command line over the configuration that the run's record holds.

        ConfigError: a flag cannot be used. FileRefusedError: run.json cannot be read.
        """
        given, recorded = arguments.split(cls, words, prog=prog), ()
        if "module_path" in given:
            recorded = to_argv(cls(module_path=Path(given["module_path"][0]))._recorded.ppo)
        recorded_words = arguments.split(cls, recorded, prog=prog)
        layers: dict[arguments.Origin, arguments.Given] = {"run.json": recorded_words}
        config, origins = arguments.read(cls, words, prog=prog, layers=layers)
        arguments.check_needs(cls, flags(config), origins)
        checked(config)
        check_coverage(config.ppo, given)
        return config

    @property
    def command_line(self) -> tuple[str, ...]:
        """The words that `read` makes this configuration of, besides the run's record."""
        recorded = to_argv(self._recorded)
        words = (word for word in to_argv(self) if word not in recorded)
        return (f"--module_path={self.module_path}", *words)

    @property
    def _recorded(self) -> TrainConfig:
        """The defaults, over which run.json comes if there is one."""
        base = TrainConfig(module_path=self.module_path)
        if not self.run_paths.run_json.exists():
            return base
        try:
            return replace(base, ppo=from_json(PPOConfig, read_run(self.run_paths).config))
        except ConfigError as error:
            raise FileRefusedError(
                f"{self.run_paths.run_json}: {error}; retry the skill"
            ) from error

    def record(self) -> None:
        """Write down in run.json with which settings the run is trained, if with others."""
        if not self.run_paths.run_json.exists():
            return
        own, recorded = flags(self.ppo), flags(self._recorded)
        names = [name for name in own if own[name] != recorded[name] and name not in _OF_LAUNCH]
        if names:
            others = {name: own[name] for name in names}
            said = " ".join(f"--{name} {value}" for name, value in others.items())
            logger.warning("%s now says %s, as the command line", self.run_paths.run_json, said)
            run = read_run(self.run_paths)
            origins = {**run.origins, **dict.fromkeys(others, "command line")}
            config = {**run.config, **records.to_json(others)}
            write_run(self.run_paths, replace(run, config=config, origins=origins))

    def problems(self) -> Iterator[str]:
        """Check whether the processes can share the devices."""
        number, devices, replicas = self.num_processes, self.ppo.num_devices, self.ppo.replicas
        processes, remedy = f"--num_processes {number}", f"choose a multiple of {number}"
        if self.process_id >= number:
            yield f"--process_id {self.process_id} must be below {processes}"
        if self.process_id and self.coordinator is None:
            yield f"--process_id {self.process_id} needs --coordinator HOST:PORT"
        host, _, port = (self.coordinator or "localhost:1").rpartition(":")
        if not host or " " in host or not (port.isdecimal() and 0 < int(port) < 2**16):
            yield f"--coordinator {self.coordinator} is no HOST:PORT; write it as 10.0.0.5:29500"
        if number > 1 and devices == 0:
            yield f"--num_devices 0 does not say how many devices {processes} share; {remedy}"
        if devices > 1 and devices % number:
            yield f"--num_devices {devices} cannot be shared evenly by {processes}; {remedy}"
        least = max(2, (self.replica or 0) + 1)
        if self.replica is not None and replicas < least:
            yield f"--replica {self.replica} needs --replicas {least} or more"
        if replicas > 1 and number > 1:
            said = "exclude each other; a replica may have several devices, in one process"
            yield f"--replicas {replicas} and {processes} {said}"
        yield from self.ppo_of_all().problems()

    def ppo_of_all(self) -> PPOConfig:
        """The configuration of the run, with a device for each process or more."""
        least = self.num_processes if self.num_processes > 1 else 0
        return replace(self.ppo, num_devices=max(self.ppo.num_devices, least))


def write_run(run_paths: RunPaths, run: TrainingRun, *, durable: bool = True) -> None:
    """Write run.json."""
    records.write(run_paths.run_json, run, durable=durable)


def read_run(run_paths: RunPaths) -> TrainingRun:
    """Read run.json; a run of an earlier version was not egocentric."""
    run = records.read(run_paths.run_json, TrainingRun)
    return replace(run, config={"egocentric": False, **run.config})


def check_module(run_paths: RunPaths, run: TrainingRun) -> None:
    """Raise FileRefusedError unless a run's module is the one that was generated for it."""
    remedy = "restore it from a copy, or train the skill again"
    digest = hashlib.sha256(storage.read_bytes(run_paths.module, remedy=remedy)).hexdigest()
    if run.module_sha256 != digest:
        raise FileRefusedError(
            f"{run_paths.module} is not the module that {run_paths.run_json} names: it is damaged "
            f"or was edited; {remedy}"
        )


def write_result(run_paths: RunPaths, result: RunResult) -> None:
    """Write result.json; call it last."""
    records.write(run_paths.result_json, result)


def read_result(run_paths: RunPaths) -> RunResult:
    """Read result.json; a trainer of your own may leave its seal out."""
    return records.read(run_paths.result_json, RunResult, sealed=False)


def write_progress(run_paths: RunPaths, progress: Progress) -> None:
    """Write progress.json."""
    records.write(run_paths.progress, progress)


def read_progress(run_paths: RunPaths) -> Progress | None:
    """Read progress.json; None until the trainer has written it."""
    if not run_paths.progress.exists():
        return None
    return records.read(run_paths.progress, Progress, sealed=False)


def progress_of(run_paths: RunPaths, run_id: str) -> Progress | None:
    """The newest figures of this run; None if they are missing, another run's, or unreadable."""
    with suppress(FileRefusedError):
        progress = read_progress(run_paths)
        return progress if progress is not None and progress.run_id == run_id else None
    return None


def expert_shapes(
    observation_size: ObservationSize, num_actions: int, layer_size: int
) -> dict[str, tuple[int, ...]]:
    """The shape of every leaf of one expert, by its path; one that sees a grid has a trunk.

    >>> expert_shapes(1345, 17, 64)["actor/dense_0/kernel"]
    (1345, 64)
    >>> expert_shapes(1345, 17, 64)["critic/dense_3/bias"]
    (1,)
    >>> expert_shapes((10, 10, 4), 3, 64)["trunk/conv/kernel"]
    (3, 3, 4, 16)
    """
    shapes: dict[str, tuple[int, ...]] = {}
    if isinstance(observation_size, tuple):
        rows, columns, channels = observation_size
        shapes["trunk/conv/kernel"] = (*KERNEL, channels, FILTERS)
        shapes["trunk/conv/bias"] = (FILTERS,)
        observation_size = rows * columns * FILTERS
    for net, outputs in (("actor", num_actions), ("critic", 1)):
        widths = [observation_size, *[layer_size] * (len(LAYERS) - 1), outputs]
        for layer, size, width in zip(LAYERS, widths, widths[1:], strict=False):
            shapes[f"{net}/{layer}/kernel"] = (size, width)
            shapes[f"{net}/{layer}/bias"] = (width,)
    return shapes


def threads_for(config: PPOConfig, cpus: int) -> int:
    """Return the most threads that `cpus` have room for and that share the environments evenly.

    They are as many for each device; 1 also stands for one thread for each.

    >>> [threads_for(PPOConfig(num_envs=envs), cpus) for envs, cpus in ((64, 4), (96, 4), (64, 0))]
    [2, 3, 1]
    """

    def fits(threads: int) -> bool:
        divided = replace(config, env_shards=threads)
        return config.num_envs // threads >= _LEAST_SHARD and not any(divided.problems())

    return max(filter(fits, range(2, cpus + 1)), default=1)
