"""Run folders: make that of a skill, on which a trainer can be started; find, clear or fail it.

Everything is checked before anything is written. The folder is then built under another name and
renamed, so a run folder that can be seen is whole. Its seed experts are copies: no later merge can
change what the run started from.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flowrl import config as configs
from flowrl import storage
from flowrl.config import PPOConfig
from flowrl.errors import (
    BusyError,
    ConfigError,
    ExpertCorruptError,
    ExpertIndexError,
    ExpertMissingError,
    ExpertShapeError,
    FileRefusedError,
    FormatVersionError,
    closest,
)
from flowrl.experts import repair
from flowrl.experts.store import ExpertStore, refuse_links, refuse_misplaced
from flowrl.games.base import env_sizes
from flowrl.launchers.claims import is_claimed
from flowrl.launchers.run_status import becomes_free, lock_held
from flowrl.parallel.run_module import generate_module_with_remapping, planned_steps
from flowrl.paths import GraphPaths, RunPaths, printable
from flowrl.runs import (
    CodeApproval,
    ExpertVersion,
    Remapping,
    Shapes,
    TrainingRun,
    expert_shapes,
    read_run,
    write_run,
)
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import Skill
from flowrl.skills.validation.cache import ApprovalStore, code_digest, parsed_function

logger = logging.getLogger(__name__)
KEPT_FAILURES = 5
_RUN_FOLDER = re.compile(r"skill_(0|[1-9][0-9]*)_[A-Za-z0-9_]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A run that can be launched; unpacks as `(run_folder, module_path, policies_folder)`."""

    run_paths: RunPaths
    run: TrainingRun

    @property
    def run_folder(self) -> Path:
        """The folder of the run."""
        return self.run_paths.folder

    def __iter__(self) -> Iterator[Path]:
        """The documented triple."""
        return iter((self.run_paths.folder, self.run_paths.module, self.run_paths.policies))


def build_remapping(
    dependency_experts: Sequence[int] | Sequence[str],
    new_expert_idx: int,
    completed: Mapping[str, Any] | None = None,
) -> Remapping:
    """Number a run's experts from 0 without gaps; unpacks as (global_to_local, local_to_global).

    Dependencies are global indices, or names of skills; `completed` then gives the index of each,
    as `{"Collect Wood": {"expert_idx": 0}}` or `{"Collect Wood": 0}`, else ExpertMissingError is
    raised. ExpertIndexError means that an index is negative, or occurs twice.

    >>> global_to_local, local_to_global = build_remapping([0, 5, 10], 50)
    >>> global_to_local[50], local_to_global[3]
    (3, 50)
    """
    indices = [_index(dependency, completed or {}) for dependency in dependency_experts]
    return Remapping.of(indices, new_expert_idx)


def prepare_training_run(  # noqa: PLR0913
    *,
    graph_paths: GraphPaths,
    graph: SkillGraph,
    skill: str,
    expert: int,
    attempt: int,
    completed: Mapping[str, Any],
    config: PPOConfig,
    origins: Mapping[str, str] | None = None,
    init_from: str | None = None,
    anew: bool = False,
    goal: float = 0.0,
    run_paths: RunPaths | None = None,
    records: Mapping[str, bytes] = MappingProxyType({}),
) -> PreparedRun:
    """Make the run folder of a skill: its module, the seeds of its experts and run.json.

    An earlier attempt's folder moves to `training_runs/failed/`. A new expert, or with `anew` its
    own, begins as a copy of `init_from`'s, else of the merged skill's that it is `like`.
    `run_paths` and `records` are those of a trial. A refusal leaves a notice at most.

    Raises:
      ExpertMissingError, ExpertCorruptError: an expert's files are not those that were merged.
      ExpertShapeError: an expert has other array shapes than this run's networks.
      SkillError: the plan cannot be made into a module.
      BusyError: a process of an earlier attempt still lives.
    """
    refuse_misplaced(graph_paths)
    steps = graph.plan(skill)
    experts = {step.skill: _index(step.skill, {**completed, skill: expert}) for step in steps}
    run = TrainingRun(
        run_id=f"e{expert}.a{attempt}.{secrets.token_hex(4)}",
        skill=skill,
        expert=expert,
        attempt=attempt,
        plan=planned_steps(steps, graph, experts, config.env_name),
        experts=build_remapping([*experts.values()][:-1], expert).experts,
        ancestors=(),
        config=configs.to_json(config),
        origins=origins or {},
        approvals=_approvals(graph_paths, map(graph.skills.__getitem__, experts), config.env_name),
        anew=anew,
        goal=goal,
    )
    store, like = ExpertStore(graph_paths), graph.skills[skill].like
    seeds, copied = _seeds(store, run, experts), _copied(store, run, init_from, like)
    run = replace(run, ancestors=seeds, copied=copied)
    module = generate_module_with_remapping(run, graph.skills).encode()
    return _write_usable(store, run, {f"{expert}.py": module, **records}, run_paths)


def _copied(
    store: ExpertStore, run: TrainingRun, init_from: str | None, like: str | None
) -> ExpertVersion | None:
    """The expert that the run's new one begins as a copy of; None if it is not new, or of none."""
    merged = store.manifest().experts
    if run.expert in merged and not run.anew:
        return None
    if init_from is not None:
        copied = expert_of(store, init_from)
    else:
        copied = next((version for version in merged.values() if version.skill == like), None)
        try:
            _ = copied and store.verify(copied)
        except (ExpertCorruptError, ExpertMissingError):
            return None  # it would only have helped
    _check_shapes(store, run, [copied] if copied else [])
    return copied


def _write_usable(
    store: ExpertStore,
    run: TrainingRun,
    contents: Mapping[str, bytes],
    run_paths: RunPaths | None,
) -> PreparedRun:
    """Write the run's folder; the newest whole version of an expert counts if one is damaged."""
    digest = hashlib.sha256(contents[f"{run.expert}.py"]).hexdigest()
    run = replace(run, module_sha256=digest)
    try:
        return _write_folder(store, run, contents, run_paths)
    except (ExpertCorruptError, ExpertMissingError):
        run = replace(run, ancestors=tuple(repair.usable(store, seed) for seed in run.ancestors))
        _check_shapes(store, run, run.ancestors)
        return _write_folder(store, run, contents, run_paths)


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The array shapes of one expert under a run's configuration, by leaf path."""
    looks = {name: config[name] for name in ("sight", "egocentric")}
    return expert_shapes(*env_sizes(config["env_name"], **looks), config["layer_size"])


def _index(dependency: int | str, completed: Mapping[str, Any]) -> int:
    if isinstance(dependency, int):
        return dependency
    if dependency not in completed:
        raise ExpertMissingError(f"the skill {dependency!r} is not completed; train it first")
    entry = completed[dependency]
    return entry["expert_idx"] if isinstance(entry, Mapping) else entry


def _seeds(
    store: ExpertStore, run: TrainingRun, experts: Mapping[str, int]
) -> tuple[ExpertVersion, ...]:
    """The versions that the run starts from: of its own expert, too, if it trains that on."""
    merged = store.manifest().experts
    for name, index in experts.items():
        if index in merged and merged[index].skill != name:
            raise ExpertIndexError(
                f"expert {index} is that of {merged[index].skill!r}, not of {name!r}; "
                "train the skill as another expert"
            )
        if index not in merged and index != run.expert:
            raise ExpertMissingError(
                f"expert {index} ({name}) is not in {store.graph_paths.manifest}; train it first"
            )
    known = merged.keys() - ({run.expert} if run.anew else set())
    seeds = tuple(merged[index] for index in run.experts if index in known)
    _check_shapes(store, run, seeds)
    return seeds


def _check_shapes(store: ExpertStore, run: TrainingRun, seeds: Sequence[ExpertVersion]) -> None:
    expected: Shapes = expected_shapes(run.config)
    for seed in seeds:
        for leaf in sorted({*seed.shapes, *expected}):
            actual, needed = seed.shapes.get(leaf), expected.get(leaf)
            if actual != needed:
                width, *_ = seed.shapes.get("actor/dense_0/bias") or ("N",)
                remedy = f"start with --layer_size {width}"
                if width == run.config["layer_size"]:  # then the observations differ
                    remedy = "go on with the version of flowrl that trained it"
                raise ExpertShapeError(
                    f"expert {seed.index} ({seed.skill}, {store.path_of(seed)}) has {leaf} of "
                    f"shape {actual}, this run needs {needed}; {remedy}, or in another graph folder"
                )


def expert_of(store: ExpertStore, skill: str) -> ExpertVersion:
    """The expert that new ones begin as copies of; ConfigError if the skill has none."""
    versions = {version.skill: version for version in store.manifest().experts.values()}
    if skill not in versions:
        near = closest(skill, tuple(versions))
        raise ConfigError(
            f"--init_from {printable(skill)} has no expert in {store.graph_paths.manifest}{near}; "
            "train the skill first"
        )
    return versions[skill]


def _write_folder(
    store: ExpertStore,
    run: TrainingRun,
    contents: Mapping[str, bytes],
    trial: RunPaths | None,
) -> PreparedRun:
    """Build the run's folder under a temporary name, then rename it durably."""
    graph_paths = store.graph_paths
    run_paths = trial or graph_paths.run(run.expert, run.skill)
    refuse_links([run_paths.folder])
    _refuse_live_process(run_paths)
    with storage.building(run_paths.folder) as folder:
        building = RunPaths(folder, run.expert)
        storage.make_dir(building.policies)
        for name, content in contents.items():
            storage.write_atomic(folder / name, content, durable=False)
        _copy_seeds(store, building, run)
        write_run(building, run, durable=False)
        if trial is None:
            fail_run(graph_paths, run.expert, run.skill)
        storage.fault_point("prepare.built")
    return PreparedRun(run_paths=run_paths, run=run)


def _copy_seeds(store: ExpertStore, run_paths: RunPaths, run: TrainingRun) -> None:
    local = Remapping(run.experts).global_to_local
    seeds = [(version.index, version) for version in run.ancestors]
    for expert, version in [*seeds, *([(run.expert, run.copied)] if run.copied else [])]:
        try:
            store.copy(version, run_paths.seed(local[expert]))
        except FileRefusedError as error:
            raise ExpertCorruptError(f"an expert cannot be copied: {error}") from error


def _approvals(
    graph_paths: GraphPaths, skills: Iterable[Skill], env_name: str
) -> tuple[CodeApproval, ...]:
    """The approvals that the skills of a plan have; the trainer refuses code without one."""
    store = ApprovalStore(graph_paths.approvals)
    digests = {}
    for skill in skills:
        functions = parsed_function(skill.is_done), parsed_function(skill.reward)
        digests[code_digest(*functions, env_name)] = None
    return tuple(approval for digest in digests if (approval := store.find(digest)))


# The run folders that are there


def live_runs(graph_paths: GraphPaths) -> Iterator[RunPaths]:
    """The run folders of the graph that are neither merged nor failed, sorted by name."""
    if not graph_paths.training_runs.is_dir():
        return
    for path in sorted(graph_paths.training_runs.iterdir()):
        match = _RUN_FOLDER.fullmatch(path.name)
        if match is not None and path.is_dir() and not path.is_symlink():
            yield RunPaths(path, int(match[1]))


def readable_runs(graph_paths: GraphPaths) -> Iterator[tuple[RunPaths, TrainingRun]]:
    """The live runs with their records, but for damaged ones; or FormatVersionError."""
    for run_paths in live_runs(graph_paths):
        try:
            yield run_paths, read_run(run_paths)
        except FormatVersionError:
            raise
        except FileRefusedError as error:
            logger.error("%s; its skill begins a new run", error)


def pinned_versions(graph_paths: GraphPaths) -> frozenset[tuple[int, str]] | None:
    """The (index, version) that live runs started from; None, for all, if a record is damaged."""
    pinned: set[tuple[int, str]] = set()
    for run_paths in live_runs(graph_paths):
        try:
            ancestors = read_run(run_paths).ancestors
        except FileRefusedError as error:
            logger.warning("no version is collected: %s", error)
            return None
        pinned.update((version.index, version.version) for version in ancestors)
    return frozenset(pinned)


def remove_part_files(graph_paths: GraphPaths) -> None:
    """Remove the half-written files that dead writers left anywhere in the graph."""
    folders = sorted(path for path in graph_paths.root.iterdir() if not path.is_symlink())
    dead = (
        run_paths.folder for run_paths in live_runs(graph_paths) if not lock_held(run_paths.folder)
    )
    for folder in (graph_paths.root, *folders, *dead):
        storage.remove_part_files(folder)


def read_own_run(run_paths: RunPaths, skill: str) -> TrainingRun:
    """Read run.json; FileRefusedError if it is damaged, or of another expert or skill."""
    run = read_run(run_paths)
    if (run.expert, run.skill) != (run_paths.expert, skill):
        raise FileRefusedError(
            f"{run_paths.run_json} is of expert {run.expert} ({run.skill}), not of expert "
            f"{run_paths.expert} ({skill}); retry the skill"
        )
    return run


def clear_for_launch(run_paths: RunPaths) -> None:
    """Remove the records of a run's last launch, no checkpoints; BusyError if the run lives."""
    _refuse_live_process(run_paths)
    records = (run_paths.start_json, run_paths.exit_json, run_paths.result_json, run_paths.progress)
    for record in (*records, run_paths.prune_json):
        storage.remove_file(record)


def _refuse_live_process(run_paths: RunPaths) -> None:
    """Raise BusyError if a process of the run in this folder still lives."""
    if is_claimed(run_paths.folder):
        raise BusyError(
            f"{run_paths.engine_json}: a host may have a process of this run; if none has, "
            "remove that file"
        )
    if lock_held(run_paths.folder):
        raise BusyError(f"{run_paths.lock} is held: a process of this run lives; wait or cancel it")


def fail_run(graph_paths: GraphPaths, expert: int, skill: str) -> Path | None:
    """Move a run folder to `training_runs/failed/`; returns its new path, None without a folder.

    The newest failures of each skill are kept for reading. If a process of this run still lives,
    the folder stays where it is: BusyError.
    """
    run_paths = graph_paths.run(expert, skill)
    if not run_paths.folder.is_dir():
        return None
    if not becomes_free(run_paths.folder):  # a runner that has recorded the end is still ending
        _refuse_live_process(run_paths)
    try:
        target = graph_paths.failed_run(expert, skill, read_run(run_paths).attempt)
    except FileRefusedError:
        target = graph_paths.failed_run(expert, skill, 0)
    storage.remove_tree(target)  # attempts are counted from 1 again when the state is made anew
    storage.move_dir(run_paths.folder, target)
    failures = graph_paths.failed_runs.glob(f"{target.name.rpartition('.')[0]}.attempt*")
    for path in sorted(failures, key=lambda path: path.stat().st_mtime)[:-KEPT_FAILURES]:
        storage.remove_tree(path)
    return target
