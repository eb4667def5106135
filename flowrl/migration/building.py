"""The new graph: built beside its place by the very steps of a run's merge, then renamed into it.

For every old expert a run is prepared, finished with the old arrays and merged, so that what comes
out is an ordinary graph with its ledger, its versions and its archive.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Iterator
from pathlib import Path

from flowrl import checkpoints, durable, locks, sealed
from flowrl import config as configs
from flowrl.config import BottomUpConfig
from flowrl.errors import BusyError, FileRefusedError
from flowrl.experts.remapping import Remapping
from flowrl.layout import GraphLayout, RunLayout
from flowrl.migration.networks import nested, unusable
from flowrl.migration.old_expert import OldExpert
from flowrl.migration.planned import Plan
from flowrl.parallel import vouching
from flowrl.parallel.recovering import recover_state
from flowrl.parallel.skill_book import SkillBook
from flowrl.parallel.training_processor import process_completed_training
from flowrl.parallel.training_setup import prepare_training_run
from flowrl.runs import (
    ExpertReport,
    PlannedStep,
    RunResult,
    TrainingRun,
    write_result,
    write_run,
)

logger = logging.getLogger(__name__)
_NO_MODULE = '"""This expert was imported without a plan that can be played; train its skill."""\n'


def write_graph(plan: Plan, new: Path) -> None:
    """Write the new graph; until the last moment there is none.

    Raises:
      FileRefusedError: something is at `new` already.
      FlowrlError: an expert cannot be read any more.
    """
    final = new.absolute()
    refuse_taken(final)
    _sweep(final)
    building = GraphLayout(final.with_name(f".tmp-{final.name}-{secrets.token_hex(4)}"))
    try:
        with locks.held(building.daemon_lock, timeout_seconds=0):
            _build(plan, building, final)
            durable.fault_point("migrate.built")
            refuse_taken(final)
            durable.remove_tree(final)  # an empty folder
            durable.commit_dir(building.root, final)
    except OSError as error:
        raise FileRefusedError(
            f"{final} cannot be written: {error}; nothing of it is left, migrate again once it can"
        ) from error
    finally:
        durable.remove_tree(building.root)


def refuse_taken(new: Path) -> None:
    """Refuse a place where something is, but for an empty folder.

    Raises:
      FileRefusedError: it is taken.
    """
    if new.is_symlink() or (new.exists() and (not new.is_dir() or any(new.iterdir()))):
        raise FileRefusedError(f"{new} exists already; name a folder that does not")


def order_of(plan: Plan) -> Iterator[tuple[OldExpert, bool]]:
    """The experts, each after those its skill's plan needs; whether all of these are there."""
    graph = plan.skills.graph
    named = {
        plan.decision(expert).name: expert
        for expert in plan.experts
        if plan.decision(expert).origin != "none"
    }
    for name in graph.order():
        if name in named:
            yield named[name], all(step.skill in named for step in graph.plan(name))
    for expert in plan.experts:
        if plan.decision(expert).name not in named:
            yield expert, False


def _sweep(final: Path) -> None:
    """Remove what migrations to this place left behind that were killed."""
    if not final.parent.is_dir():
        return
    start = f".tmp-{final.name}-"
    for left in [path for path in final.parent.iterdir() if path.name.startswith(start)]:
        try:
            with locks.held(GraphLayout(left).daemon_lock, timeout_seconds=0):
                durable.remove_tree(left)
        except BusyError:
            logger.warning("%s is being written by another process", left)


def _build(plan: Plan, layout: GraphLayout, final: Path) -> None:
    vouching.keep(layout, plan.skills.verdicts)
    book = SkillBook(layout)
    done: dict[str, int] = {}
    for expert, playable in order_of(plan):
        name = plan.decision(expert).name
        if plan.decision(expert).origin != "none":
            book.record(plan.skills.graph.skills[name])
        place = _prepared(plan, layout, expert, done) if playable else _bare(plan, layout, expert)
        _finish(place[0], place[1], expert)
        durable.fault_point("migrate.finished")
        process_completed_training(place[0].folder, name, expert.index, layout.root)
        done[name] = expert.index
    config = BottomUpConfig(**configs.values(plan.config), graph_path=final)
    sealed.write(layout.config_json, {"format": 1, **configs.to_json(config)})
    recover_state(layout)


def _prepared(
    plan: Plan, layout: GraphLayout, expert: OldExpert, done: dict[str, int]
) -> tuple[RunLayout, TrainingRun]:
    ready = prepare_training_run(
        layout=layout,
        graph=plan.skills.graph,
        skill=plan.decision(expert).name,
        expert=expert.index,
        attempt=1,
        completed=done,
        config=plan.config,
    )
    return ready.layout, ready.run


def _bare(plan: Plan, layout: GraphLayout, expert: OldExpert) -> tuple[RunLayout, TrainingRun]:
    """A run without a plan: nothing says how the skill is done, or what it needs is missing."""
    name = plan.decision(expert).name
    run = TrainingRun(
        run_id=f"e{expert.index}.a1.{secrets.token_hex(4)}",
        skill=name,
        expert=expert.index,
        attempt=1,
        plan=(PlannedStep(skill=name, count=1, expert=expert.index),),
        experts=(expert.index,),
        ancestors=(),
        config=configs.to_json(plan.config),
        module_sha256=hashlib.sha256(_NO_MODULE.encode()).hexdigest(),
    )
    place = layout.run(expert.index, name)
    durable.make_dir(place.folder)
    durable.write_atomic(place.module, _NO_MODULE)
    write_run(place, run)
    return place, run


def _finish(place: RunLayout, run: TrainingRun, expert: OldExpert) -> None:
    """Leave what a trainer leaves: the old arrays, the other experts as they were, the result."""
    arrays = expert.arrays()
    why = unusable(arrays)
    if why is not None:
        raise FileRefusedError(f"{expert.place} has changed meanwhile: {why}; migrate again")
    local = Remapping(run.experts).global_to_local
    own = place.final(local[run.expert])
    tree = nested(arrays)
    checkpoints.save_expert(own, tree)
    reports = [
        ExpertReport(
            expert=run.expert,
            acted=expert.frames or 0,
            sha256=durable.tree_digest(own),
            content=checkpoints.array_digest(tree),
            shapes=checkpoints.shapes_of(tree),
        )
    ]
    shapes = reports[0].shapes
    for ancestor in run.ancestors:
        number = local[ancestor.expert]
        durable.copy_tree(place.seed(number), place.final(number))
        reports.append(
            ExpertReport(
                expert=ancestor.expert,
                acted=0,
                sha256=ancestor.sha256,
                content=ancestor.content,
                shapes=shapes,
            )
        )
    write_result(place, _result(run, expert, tuple(reports)))


def _result(run: TrainingRun, expert: OldExpert, reports: tuple[ExpertReport, ...]) -> RunResult:
    """What the original did not write down stands as 0: a success rate, and the time it took."""
    rate = expert.success_rate or 0.0
    return RunResult(
        run_id=run.run_id,
        frames=expert.frames or 0,
        experts=tuple(sorted(reports, key=lambda report: report.expert)),
        success_rate=rate,
        step_success=(rate,) * len(run.plan),
        mean_episode_length=0.0,
        updates=0,
        wall_seconds=0.0,
        stopped_early=False,
    )
