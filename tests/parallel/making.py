"""Graphs, runs and finished trainings, made without a trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowrl import storage
from flowrl.config import PPOConfig
from flowrl.errors import BusyError, FileRefusedError, ResultRefusedError
from flowrl.experts.merge import MergeRule
from flowrl.experts.store import ExpertStore
from flowrl.launchers.run_status import lock_held
from flowrl.parallel.analysing import Analyser
from flowrl.parallel.feeder import Feeder
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.parallel.skill_sources import SkillSources
from flowrl.parallel.training_processor import process_completed_training, recover_graph
from flowrl.parallel.training_setup import PreparedRun, live_runs, prepare_training_run
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import (
    CodeApproval,
    ExpertReport,
    PlannedStep,
    RunResult,
    TrainingRun,
    read_result,
    read_run,
    write_result,
)
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import load_library, parse_skill, skill_from_data
from flowrl.skills.validation.cache import ApprovalStore
from flowrl.skills.validation.dry_run import SkillCode
from tests.experts.making import SHAPES, content_digest, make_expert, tell_arrays

LIBRARY = load_library("Craftax-Classic-Symbolic-v1")
GRAPH = SkillGraph(LIBRARY.values())
CONFIG = PPOConfig()
WOOD, TABLE, PICKAXE, SWORD = "Collect Wood", "Place Table", "Make Wood Pickaxe", "Make Wood Sword"


def make_skill(name: str, *, needs: tuple[str, ...] = (), gain: str = "thing", **data):
    """A small skill that passes the gate."""
    return skill_from_data(
        name,
        {
            "description": "Made for a test.",
            "requirements": dict.fromkeys(needs, 1),
            "gain": {gain: "n"},
            "is_done": "def task_is_done(inventory, n):\n    return inventory.wood >= n\n",
            "reward": "def task_reward(env_reward):\n    return env_reward\n",
            **data,
        },
    )


def feeder_of(flow: Any, scheduler: SkillScheduler) -> Feeder:
    """A feeder that analyses nothing, of skills without settings of their own."""
    graph_paths = scheduler.graph_paths
    analyser = Analyser(graph_paths, asked_for=False)
    return Feeder(flow, SkillSources(graph_paths), scheduler, skills={}, analyser=analyser)


def approve(graph_paths: GraphPaths, text: str) -> None:
    """Keep what a dry run would say of a skill's text, since it takes seconds."""
    code = SkillCode.of(parse_skill(text, place="skill.py"), CONFIG.env_name)
    ApprovalStore(graph_paths.approvals).keep(CodeApproval(digest=code.digest))


def a_run(*plan: tuple[str, int, int], expert: int | None = None, **changes) -> TrainingRun:
    steps = tuple(PlannedStep(skill=name, count=count, expert=i) for name, count, i in plan)
    return TrainingRun(
        run_id="e1.a1.aa",
        skill=steps[-1].skill,
        expert=steps[-1].expert if expert is None else expert,
        attempt=1,
        plan=steps,
        experts=tuple(sorted({step.expert for step in steps})),
        ancestors=(),
        config={"env_name": "Craftax-Classic-Symbolic-v1"} | changes,
    )


def prepare(
    graph_paths: GraphPaths,
    skill: str,
    expert: int,
    completed: Mapping[str, int],
    *,
    graph: SkillGraph = GRAPH,
    attempt: int = 1,
    config: PPOConfig = CONFIG,
    init_from: str | None = None,
    origins: Mapping[str, str] | None = None,
) -> PreparedRun:
    return prepare_training_run(
        graph_paths=graph_paths,
        graph=graph,
        skill=skill,
        expert=expert,
        attempt=attempt,
        completed=completed,
        config=config,
        origins=origins,
        init_from=init_from,
    )


def finish(run_paths: RunPaths, acted: Mapping[int, int]) -> RunResult:
    """Leave behind what a trainer leaves: final experts, logs, and result.json last.

    An expert that did not act comes back as it was.
    """
    run = read_run(run_paths)
    reports = []
    for local, expert in enumerate(run.experts):
        steps = acted.get(expert, 0)
        if steps == 0 and run_paths.seed(local).exists():
            storage.copy_tree(run_paths.seed(local), run_paths.final(local))
        else:
            make_expert(run_paths.final(local), f"{run.run_id} expert {expert}")
        tell_arrays(run_paths.final(local))
        reports.append(
            ExpertReport(
                expert=expert,
                acted=steps,
                sha256=storage.tree_digest(run_paths.final(local)),
                content=content_digest(run_paths.final(local)),
                shapes=SHAPES,
            )
        )
    run_paths.training_log.write_text(f"log of {run.run_id}\n")
    run_paths.metrics.write_text('{"updates": 1}\n')
    result = RunResult(
        run_id=run.run_id,
        frames=sum(acted.values()),
        experts=tuple(reports),
        success_rate=0.9,
        step_success=(0.9,) * len(run.plan),
        mean_episode_length=40.0,
        updates=3,
        wall_seconds=1.5,
        stopped_early=True,
    )
    write_result(run_paths, result)
    return result


def report_anew(
    run_paths: RunPaths, *local: int, digest: Callable[[Path], str] = content_digest
) -> None:
    """Let result.json say of these experts what their folders hold now."""
    result = read_result(run_paths)
    reports = list(result.experts)
    for number in local:
        folder = run_paths.final(number)
        facts = {"sha256": storage.tree_digest(folder), "content": digest(folder)}
        reports[number] = replace(reports[number], **facts)
    write_result(run_paths, replace(result, experts=tuple(reports)))


def merge(graph_paths: GraphPaths, ready: PreparedRun, **options) -> dict:
    return process_completed_training(
        ready.run_folder, ready.run.skill, ready.run.expert, graph_paths.root, **options
    )


def merge_finished(
    graph_paths: GraphPaths, rule: MergeRule | None = None
) -> tuple[list[dict], dict[Path, str]]:
    """Recover the graph, then merge its finished runs; the summaries, and by folder the refusals.

    A run that lives, or whose experts are being compared, is in neither.
    """
    recover_graph(graph_paths)
    merged, refused = [], {}
    for run_paths in live_runs(graph_paths):
        if lock_held(run_paths.folder) or not run_paths.result_json.exists():
            continue
        try:
            run = read_run(run_paths)
            merged.append(
                process_completed_training(
                    run_paths.folder,
                    run.skill,
                    run_paths.expert,
                    graph_paths.root,
                    merge_policy=rule,
                )
            )
        except BusyError:
            continue
        except (ResultRefusedError, FileRefusedError) as error:
            refused[run_paths.folder] = str(error)
    return merged, refused


def train(
    graph_paths: GraphPaths,
    skill: str,
    expert: int,
    completed: Mapping[str, int],
    *,
    acted: Mapping[int, int],
) -> dict:
    """Prepare, finish and merge a run of the embedded library."""
    ready = prepare(graph_paths, skill, expert, completed)
    finish(ready.run_paths, acted)
    return merge(graph_paths, ready)


def frames(graph_paths: GraphPaths) -> dict[int, int]:
    experts = ExpertStore(graph_paths).manifest().experts
    return {index: version.frames for index, version in experts.items()}


def tree(root: Path) -> list[str]:
    """The names of everything below `root`."""
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*"))
