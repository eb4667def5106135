"""From a skill of the graph to a run folder that a trainer can be started on.

Everything is checked before anything is written, then built beside the place where it belongs and
renamed into it: a run folder that can be seen is whole. Its seeds are copies, so that no merge can
change what a run started from.
"""

from __future__ import annotations

import ast
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, Unpack

from flowrl import config as configs
from flowrl import storage
from flowrl.config import PPOConfig
from flowrl.errors import (
    ExpertCorruptError,
    ExpertIndexError,
    ExpertMissingError,
    ExpertShapeError,
    FileRefusedError,
    SkillError,
)
from flowrl.experts import repair, rooms
from flowrl.experts.remapping import Remapping
from flowrl.experts.store import ExpertStore
from flowrl.experts.wholeness import refuse_other
from flowrl.networks.shapes import env_sizes, expert_shapes
from flowrl.parallel.run_folder import (
    PreparedRun,
    fail_run,
    refuse_living,
    remove_strays,
    resume_training_run,
)
from flowrl.parallel.vouching import kept_verdicts
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import ExpertVersion, PlannedStep, Shapes, TrainingRun, write_run
from flowrl.skills.games import GameTable, table_of
from flowrl.skills.gate import check_function, check_names
from flowrl.skills.skill import Skill
from flowrl.skills.verdicts import parsed_function

if TYPE_CHECKING:
    from flowrl.skills.graph import SkillGraph

__all__ = [
    "PreparedRun",
    "RunOrder",
    "build_remapping",
    "expected_shapes",
    "fail_run",
    "generate_module_with_remapping",
    "prepare_training_run",
    "resume_training_run",
]


class RunOrder(TypedDict):
    """What `prepare_training_run` is told, by keyword."""

    layout: GraphPaths
    """The graph's folder."""
    graph: SkillGraph
    """The skills; the run's plan is `graph.plan(skill)`."""
    skill: str
    """The skill to train."""
    expert: int
    """The global index of its expert."""
    attempt: int
    """Which attempt this is, counted from 1."""
    completed: Mapping[str, int]
    """The global expert index of every trained skill."""
    config: PPOConfig
    """What the run is trained with."""
    store: NotRequired[ExpertStore]
    """The experts (default: those of `layout`)."""


def build_remapping(
    dependency_experts: Sequence[int] | Sequence[str],
    new_expert_idx: int,
    completed: Mapping[str, Any] | None = None,
) -> Remapping:
    """Number a run's experts from 0 without gaps; unpacks as (global_to_local, local_to_global).

    Dependencies are global indices, or names of skills with `completed` saying the index of each,
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


def prepare_training_run(**order: Unpack[RunOrder]) -> PreparedRun:
    """Make the run folder of a skill: its module, the seeds of its experts and run.json.

    A folder that an attempt which died left behind is moved to `training_runs/failed/` first. If
    an expert is damaged, its newest earlier whole version counts from now on, and is used. If
    anything is refused, nothing on disk has changed but for a notice of such damage.

    Raises:
      ExpertMissingError: a skill of the plan has no expert yet, or its files are gone.
      ExpertCorruptError: an expert's files are not those that were merged.
      ExpertShapeError: an expert has other array shapes than this run's networks.
      SkillError: the plan cannot be made into a module.
      BusyError: a process of an earlier attempt still lives.
    """
    layout = order["layout"]
    rooms.refuse_moved(layout)
    store = order.get("store") or ExpertStore(layout)
    try:
        return _prepared(order, store, verified=False)
    except (ExpertCorruptError, ExpertMissingError):
        return _prepared(order, store, verified=True)


def new_run_id(expert: int, attempt: int) -> str:
    """A name for one more run, which no other has."""
    return f"e{expert}.a{attempt}.{secrets.token_hex(4)}"


def _prepared(order: RunOrder, store: ExpertStore, *, verified: bool) -> PreparedRun:
    """The run, from experts that are `verified` and mended first, or that copying finds whole."""
    layout = order["layout"]
    run, seeds = _plan(order, store, verified=verified)
    module = generate_module_with_remapping(run, order["graph"].skills)
    run = replace(
        run,
        module_sha256=hashlib.sha256(module.encode()).hexdigest(),
        verdicts=kept_verdicts(layout, run, order["graph"].skills),
    )
    place = layout.run(run.expert, run.skill)
    refuse_living(place)
    building = RunPaths(place.folder.with_name(f".tmp-{place.folder.name}"), run.expert)
    try:
        storage.remove_tree(building.folder)
        _build(building, run, module, {store.path_of(seed): seed for seed in seeds})
        fail_run(layout, run.expert, run.skill)
        remove_strays(layout, run.expert, run.skill)
        storage.fault_point("prepare.built")
        storage.flush_tree(building.folder)
        storage.move_dirs({place.folder: building.folder}, durable=False)
        storage.flush([place.folder.parent, layout.root])
    finally:
        storage.remove_tree(building.folder)
    return PreparedRun(layout=place, run=run)


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The array shapes of one expert under a run's configuration."""
    return expert_shapes(*env_sizes(config["env_name"]), config["layer_size"])


def _index(dependency: int | str, completed: Mapping[str, Any]) -> int:
    if isinstance(dependency, int):
        return dependency
    if dependency not in completed:
        raise ExpertMissingError(f"the skill {dependency!r} is not completed; train it first")
    entry = completed[dependency]
    return entry["expert_idx"] if isinstance(entry, Mapping) else entry


def _plan(
    order: RunOrder, store: ExpertStore, *, verified: bool
) -> tuple[TrainingRun, tuple[ExpertVersion, ...]]:
    """What the run is, and the versions it starts from; nothing of the run is written."""
    skill, expert = order["skill"], order["expert"]
    steps = order["graph"].plan(skill)
    needed = list(dict.fromkeys(step.skill for step in steps if step.skill != skill))
    experts = {name: _index(name, order["completed"]) for name in needed} | {skill: expert}
    remapping = build_remapping([experts[name] for name in needed], expert)
    config = configs.to_json(order["config"], PPOConfig)
    seeds = _seeds(store, experts, expert, expected_shapes(config))
    if verified:
        seeds = _whole(store, seeds, expected_shapes(config))
    run = TrainingRun(
        run_id=new_run_id(expert, order["attempt"]),
        skill=skill,
        expert=expert,
        attempt=order["attempt"],
        plan=tuple(
            PlannedStep(
                skill=step.skill,
                count=step.count,
                expert=experts[step.skill],
                max_steps=order["graph"].skills[step.skill].max_steps,
            )
            for step in steps
        ),
        experts=remapping.experts,
        ancestors=seeds,
        config=config,
    )
    return run, seeds


def _seeds(
    store: ExpertStore, experts: Mapping[str, int], new: int, shapes: Shapes
) -> tuple[ExpertVersion, ...]:
    known = store.manifest().experts
    for name, index in experts.items():
        if index in known and known[index].skill != name:
            raise ExpertIndexError(
                f"expert {index} is that of {known[index].skill!r}, not of {name!r}; "
                "train the skill as another expert"
            )
        if index not in known and index != new:
            raise ExpertMissingError(
                f"expert {index} ({name}) is not in {store.layout.manifest}; train it first"
            )
    wanted = tuple(known[index] for index in sorted(experts.values()) if index != new)
    for seed in wanted:
        _check_shapes(store.path_of(seed), seed, shapes)
    return wanted


def _whole(
    store: ExpertStore, wanted: Sequence[ExpertVersion], shapes: Shapes
) -> tuple[ExpertVersion, ...]:
    seeds = tuple(repair.usable(store, seed) for seed in wanted)
    for seed in seeds:
        _check_shapes(store.path_of(seed), seed, shapes)
    return seeds


def _check_shapes(folder: Path, seed: ExpertVersion, wanted: Shapes) -> None:
    for leaf in sorted({*seed.shapes, *wanted}):
        found, needed = seed.shapes.get(leaf), wanted.get(leaf)
        if found != needed:
            width = seed.shapes.get("actor/dense_0/bias", ("N",))[0]
            raise ExpertShapeError(
                f"expert {seed.index} ({seed.skill}, {folder}) has {leaf} of shape {found}, "
                f"this run needs {needed}; retrain it or set --layer_size {width}"
            )


def _build(
    building: RunPaths, run: TrainingRun, module: str, seeds: Mapping[Path, ExpertVersion]
) -> None:
    """Fill the folder, whose content becomes durable when it is committed."""
    local = Remapping(run.experts).global_to_local
    storage.make_dir(building.folder.parent)
    storage.make_dir(building.policies, durable=False)
    storage.write_atomic(building.module, module, durable=False)
    places = {building.seed(local[seed.index]): folder for folder, seed in seeds.items()}
    try:
        found = storage.copy_trees(places, durable=False)
    except FileRefusedError as error:
        raise ExpertCorruptError(f"an expert cannot be copied: {error}") from error
    for place, folder in places.items():
        refuse_other(found[place], place, seeds[folder])
    write_run(building, run, durable=False)


def generate_module_with_remapping(run: TrainingRun, skills: Mapping[str, Skill]) -> str:
    """The module of a run, with GLOBAL_TO_LOCAL, LOCAL_TO_GLOBAL and its plan injected.

    Raises:
      SkillError: the plan names an unknown skill, or a skill's function is not one function.
      GateError: a function asks for something the gate does not admit.
    """
    game = table_of(run.config.get("env_name"))
    for name in dict.fromkeys(step.skill for step in run.plan):
        _check_game(_known(skills, name), game)
    steps = [_step(number, step, skills[step.skill]) for number, step in enumerate(run.plan)]
    return "\n\n\n".join([_head(run, game), *steps]) + "\n"


def _known(skills: Mapping[str, Skill], name: str) -> Skill:
    if name not in skills:
        raise SkillError(f"the plan names the skill {name!r}, which is not in the graph; add it")
    return skills[name]


def _check_game(skill: Skill, game: GameTable) -> None:
    """Refuse a skill that was written for the other game."""
    place = f"skill {skill.name!r}"
    functions = [parsed_function(source, place) for source in (skill.is_done, skill.reward)]
    check_names(functions, place, env_name=game.env_name)


def _head(run: TrainingRun, game: GameTable) -> str:
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
        f"from {game.package}.constants import Achievement, Action, BlockType\n"
        "\n"
        f"GLOBAL_TO_LOCAL = {global_to_local}\n"
        f"LOCAL_TO_GLOBAL = {local_to_global}\n"
        f"PLAN = [\n{plan}]"
    )


def _entry(step: PlannedStep) -> str:
    entry = {"skill": step.skill, "count": step.count, "expert": step.expert}
    return repr(entry if step.max_steps is None else {**entry, "max_steps": step.max_steps})


def _step(number: int, step: PlannedStep, skill: Skill) -> str:
    title = f"# Step {number}: {_one_line(step.skill)} × {step.count}, expert {step.expert}"
    place = f"skill {step.skill!r}"
    is_done, reward = (parsed_function(code, place) for code in (skill.is_done, skill.reward))
    for function in (is_done, reward):
        check_function(function, place, trusted=skill.trusted)
    done = _function(is_done, f"task_{number}_is_done", count=step.count)
    reward = _function(reward, f"task_{number}_reward", count=step.count)
    network = f"def task_{number}_network_number():\n    return GLOBAL_TO_LOCAL[{step.expert}]"
    return f"{title}\n{done}\n\n\n{reward}\n\n\n{network}"


def _function(function: ast.FunctionDef, name: str, *, count: int) -> str:
    """The author's function under its new name; n, if asked for, comes last and has the count."""
    function.name = name
    asked = [argument for argument in function.args.args if argument.arg != "n"]
    if len(asked) < len(function.args.args):
        function.args.args = [*asked, ast.arg(arg="n")]
        function.args.defaults = [ast.Constant(value=count)]
    return ast.unparse(ast.fix_missing_locations(function))


def _in_docstring(text: str) -> str:
    return _one_line(text).replace("\\", "\\\\").replace('"', '\\"')


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else "�" for char in text)
