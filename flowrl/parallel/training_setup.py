"""Make the run folder of a skill, on which a trainer can be started.

Everything is checked before anything is written. The folder is then built under another name and
renamed, so a run folder that can be seen is whole. Its seed experts are copies: no later merge can
change what the run started from.
"""

from __future__ import annotations

import ast
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from flowrl import config as configs
from flowrl import storage
from flowrl.config import PPOConfig
from flowrl.errors import (
    ConfigError,
    ExpertCorruptError,
    ExpertIndexError,
    ExpertMissingError,
    ExpertShapeError,
    FileRefusedError,
    closest,
)
from flowrl.experts import repair
from flowrl.experts.store import ExpertStore, check_digest, refuse_misplaced
from flowrl.games.base import env_sizes, find_game
from flowrl.parallel.run_folder import (
    PreparedRun,
    fail_run,
    refuse_live_process,
)
from flowrl.paths import GraphPaths, RunPaths, printable
from flowrl.runs import (
    CodeApproval,
    ExpertVersion,
    PlannedStep,
    Remapping,
    Shapes,
    TrainingRun,
    expert_shapes,
    write_run,
)
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import Skill
from flowrl.skills.validation.cache import ApprovalStore, code_digest, parsed_function


def build_remapping(
    dependency_experts: Sequence[int] | Sequence[str],
    new_expert_idx: int,
    completed: Mapping[str, Any] | None = None,
) -> Remapping:
    """Number a run's experts from 0 without gaps; unpacks as (global_to_local, local_to_global).

    Dependencies are global indices, or names of skills; `completed` then gives the index of each,
    as `{"Collect Wood": {"expert_idx": 0}}` or `{"Collect Wood": 0}`.

    >>> global_to_local, local_to_global = build_remapping([0, 5, 10], 50)
    >>> global_to_local[50], local_to_global[3]
    (3, 50)

    Raises:
      ExpertMissingError: a named dependency is not completed.
      ExpertIndexError: an index is negative, or occurs twice.
    """
    indices = [_index(dependency, completed or {}) for dependency in dependency_experts]
    return Remapping.of(indices, new_expert_idx)


def prepare_training_run(  # noqa: PLR0913
    *,
    layout: GraphPaths,
    graph: SkillGraph,
    skill: str,
    expert: int,
    attempt: int,
    completed: Mapping[str, Any],
    config: PPOConfig,
    origins: Mapping[str, str] | None = None,
    init_from: str | None = None,
    trial: RunPaths | None = None,
    records: Mapping[str, bytes] = MappingProxyType({}),
) -> PreparedRun:
    """Make the run folder of a skill: its module, the seeds of its experts and run.json.

    A folder that an earlier attempt left behind is moved to `training_runs/failed/` first. If an
    expert is damaged, its newest whole earlier version counts from now on and is used. If anything
    is refused, nothing on disk has changed except a notice of such damage. `completed` has the
    global expert index of every trained skill. A new expert begins as a copy of that of the skill
    `init_from`, if given. The run of a `trial` lies in its folder, which must
    not exist, with its `records` (file name → content) beside run.json.

    Raises:
      ExpertMissingError: a skill of the plan has no expert yet, or its files are gone.
      ExpertCorruptError: an expert's files are not those that were merged.
      ExpertShapeError: an expert has other array shapes than this run's networks.
      SkillError: the plan cannot be made into a module.
      BusyError: a process of an earlier attempt still lives.
    """
    refuse_misplaced(layout)
    steps = graph.plan(skill)
    needs = dict.fromkeys(step.skill for step in steps if step.skill != skill)
    experts = {need: _index(need, completed) for need in needs} | {skill: expert}
    run = TrainingRun(
        run_id=f"e{expert}.a{attempt}.{secrets.token_hex(4)}",
        skill=skill,
        expert=expert,
        attempt=attempt,
        plan=tuple(
            PlannedStep(
                skill=step.skill,
                count=step.count,
                expert=experts[step.skill],
                max_steps=graph.skills[step.skill].max_steps,
                gains=_counted_gains(graph.skills[step.skill], step.count, config.env_name),
            )
            for step in steps
        ),
        experts=build_remapping([experts[need] for need in needs], expert).experts,
        ancestors=(),
        config=configs.to_json(config),
        origins=origins or {},
    )
    store = ExpertStore(layout)
    seeds = _seeds(store, run, experts)
    is_new = expert not in store.manifest().experts
    copied = expert_of(store, init_from) if init_from is not None and is_new else None
    _check_shapes(store, run, [copied] if copied else [])
    module = generate_module_with_remapping(run, graph.skills)
    run = replace(
        run,
        module_sha256=hashlib.sha256(module.encode()).hexdigest(),
        approvals=_approvals(layout, run, graph.skills),
    )
    contents = {f"{expert}.py": module.encode(), **records}
    try:
        return _write_folder(store, replace(run, ancestors=seeds), contents, trial, copied=copied)
    except (ExpertCorruptError, ExpertMissingError):
        seeds = tuple(repair.usable(store, seed) for seed in seeds)
        _check_shapes(store, run, seeds)
        return _write_folder(store, replace(run, ancestors=seeds), contents, trial, copied=copied)


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The array shapes of one expert under a run's configuration, by leaf path."""
    return expert_shapes(*env_sizes(config["env_name"]), config["layer_size"])


def _index(dependency: int | str, completed: Mapping[str, Any]) -> int:
    if isinstance(dependency, int):
        return dependency
    if dependency not in completed:
        raise ExpertMissingError(f"the skill {dependency!r} is not completed; train it first")
    entry = completed[dependency]
    return entry["expert_idx"] if isinstance(entry, Mapping) else entry


def _counted_gains(skill: Skill, count: int, env_name: str) -> dict[str, int]:
    """What the inventory must hold when the skill is done at this count."""
    items = find_game(env_name).items
    gains = {item: amount.at(count) for item, amount in skill.gain.items() if item in items}
    return {item: amount for item, amount in gains.items() if amount > 0}


def _seeds(
    store: ExpertStore, run: TrainingRun, experts: Mapping[str, int]
) -> tuple[ExpertVersion, ...]:
    """The versions that the run starts from: of its own expert, too, if that was trained before."""
    merged = store.manifest().experts
    for name, index in experts.items():
        if index in merged and merged[index].skill != name:
            raise ExpertIndexError(
                f"expert {index} is that of {merged[index].skill!r}, not of {name!r}; "
                "train the skill as another expert"
            )
        if index not in merged and index != run.expert:
            raise ExpertMissingError(
                f"expert {index} ({name}) is not in {store.layout.manifest}; train it first"
            )
    seeds = tuple(merged[index] for index in run.experts if index in merged)
    _check_shapes(store, run, seeds)
    return seeds


def _check_shapes(store: ExpertStore, run: TrainingRun, seeds: Sequence[ExpertVersion]) -> None:
    expected: Shapes = expected_shapes(run.config)
    for seed in seeds:
        for leaf in sorted({*seed.shapes, *expected}):
            found, needed = seed.shapes.get(leaf), expected.get(leaf)
            if found != needed:
                width = seed.shapes.get("actor/dense_0/bias", ("N",))[0]
                raise ExpertShapeError(
                    f"expert {seed.index} ({seed.skill}, {store.path_of(seed)}) has {leaf} of "
                    f"shape {found}, this run needs {needed}; start with "
                    f"--layer_size {width}, or in another graph folder"
                )


def expert_of(store: ExpertStore, skill: str) -> ExpertVersion:
    """The expert that new ones begin as copies of.

    Raises:
      ConfigError: the skill has none.
    """
    versions = {version.skill: version for version in store.manifest().experts.values()}
    if skill not in versions:
        near = closest(skill, tuple(versions))
        raise ConfigError(
            f"--init_from {printable(skill)} has no expert in {store.layout.manifest}{near}; "
            "train the skill first"
        )
    return versions[skill]


def _write_folder(
    store: ExpertStore,
    run: TrainingRun,
    contents: Mapping[str, bytes],
    trial: RunPaths | None,
    *,
    copied: ExpertVersion | None,
) -> PreparedRun:
    """Build the run's folder under a temporary name, then rename it durably."""
    layout = store.layout
    paths = trial or layout.run(run.expert, run.skill)
    refuse_live_process(paths)
    building = RunPaths(paths.folder.with_name(f".tmp-{paths.folder.name}"), run.expert)
    try:
        storage.remove_tree(building.folder)
        storage.make_dir(building.policies)
        for name, content in contents.items():
            storage.write_atomic(building.folder / name, content, durable=False)
        _copy_seeds(store, building, run, copied)
        write_run(building, run, durable=False)
        if trial is None:
            fail_run(layout, run.expert, run.skill)
        storage.fault_point("prepare.built")
        storage.commit_dir(building.folder, paths.folder)
    finally:
        storage.remove_tree(building.folder)
    return PreparedRun(layout=paths, run=run)


def _copy_seeds(
    store: ExpertStore, building: RunPaths, run: TrainingRun, copied: ExpertVersion | None
) -> None:
    local = Remapping(run.experts).global_to_local
    seeds = [(version.index, version) for version in run.ancestors]
    for expert, version in [*seeds, *([(run.expert, copied)] if copied else [])]:
        seed = building.seed(local[expert])
        try:
            digest = storage.copy_tree(store.path_of(version), seed)
        except FileRefusedError as error:
            raise ExpertCorruptError(f"an expert cannot be copied: {error}") from error
        check_digest(digest, seed, version)


# The generated module: people read it, flowrl never imports it. Skill functions are inserted as
# syntax trees and names as literals, so no name can become code. The functions were checked when
# the skill was read, and the trainer checks those of the module again (`envs.skill_module`).


def generate_module_with_remapping(run: TrainingRun, skills: Mapping[str, Skill]) -> str:
    """The module of a run, with GLOBAL_TO_LOCAL, LOCAL_TO_GLOBAL and its plan injected.

    Raises:
      SkillError: a skill's function is not one function.
    """
    steps = [_step(number, step, skills[step.skill]) for number, step in enumerate(run.plan)]
    return "\n\n\n".join([_head(run), *steps]) + "\n"


def _approvals(
    layout: GraphPaths, run: TrainingRun, skills: Mapping[str, Skill]
) -> tuple[CodeApproval, ...]:
    """The approvals that the skills of the plan have; the trainer refuses code without one."""
    store = ApprovalStore(layout.approvals)
    digests = {}
    for skill in (skills[step.skill] for step in run.plan):
        functions = parsed_function(skill.is_done), parsed_function(skill.reward)
        digests[code_digest(*functions, run.config["env_name"])] = None
    return tuple(found for digest in digests if (found := store.find(digest)))


def _head(run: TrainingRun) -> str:
    game = find_game(run.config.get("env_name"))
    global_to_local, local_to_global = Remapping(run.experts)
    plan = "".join(f"    {_entry(step)},\n" for step in run.plan)
    title = f"Run of skill {run.skill!r} as expert {run.expert}, attempt {run.attempt}."
    return (
        f'"""{_in_docstring(title)}\n'
        "\n"
        f"Generated by flowrl for run {_in_docstring(run.run_id)}; experts are numbered globally,\n"
        'and GLOBAL_TO_LOCAL says which network of this run each of them is.\n"""\n'
        "\n"
        "import jax\n"
        "import jax.numpy as jnp\n"
        f"{game.import_line}\n"
        "\n"
        f"GAME = {game.name!r}\n"
        f"GLOBAL_TO_LOCAL = {global_to_local}\n"
        f"LOCAL_TO_GLOBAL = {local_to_global}\n"
        f"PLAN = [\n{plan}]"
    )


def _entry(step: PlannedStep) -> str:
    entry = {"skill": step.skill, "count": step.count, "expert": step.expert}
    more = {"max_steps": step.max_steps, "gains": dict(step.gains)}
    return repr({**entry, **{key: value for key, value in more.items() if value}})


def _step(number: int, step: PlannedStep, skill: Skill) -> str:
    title = f"# Step {number}: {printable(step.skill)} × {step.count}, expert {step.expert}"
    done = _renamed(skill.is_done, f"task_{number}_is_done", count=step.count)
    reward = _renamed(skill.reward, f"task_{number}_reward", count=step.count)
    network = f"def task_{number}_network_number():\n    return GLOBAL_TO_LOCAL[{step.expert}]"
    return f"{title}\n{done}\n\n\n{reward}\n\n\n{network}"


def _renamed(source: str, name: str, *, count: int) -> str:
    """The author's function, renamed; a parameter `n` comes last, with the count as default."""
    function = parsed_function(source)
    function.name = name
    others = [argument for argument in function.args.args if argument.arg != "n"]
    if len(others) < len(function.args.args):
        function.args.args = [*others, ast.arg(arg="n")]
        function.args.defaults = [ast.Constant(value=count)]
    return ast.unparse(ast.fix_missing_locations(function))


def _in_docstring(text: str) -> str:
    return printable(text).replace("\\", "\\\\").replace('"', '\\"')
