"""Trials under way: running them to their end, and the lines that say how far they are."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from flowrl import notices
from flowrl.config import BottomUpConfig
from flowrl.console import progress_bar
from flowrl.launchers import sandbox
from flowrl.parallel.health import daemon_of
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.parallel.start import check_machine, device_slots, open_scheduler, refuse_shared_folder
from flowrl.paths import GraphPaths, SweepPaths
from flowrl.skills.graph import SkillGraph
from flowrl.skills.validation.dry_run import approve_skills, keep_approvals
from flowrl.tuning.outcome import read_outcome
from flowrl.tuning.sweep import Sweeper, TrialBackend
from flowrl.tuning.trials import (
    BegunTrial,
    Sweep,
    confirming,
    has_ended,
    rank,
    read_trials,
    searched,
)


@contextmanager
def trial_scheduler(
    sweep_paths: SweepPaths,
    skill: str,
    graphs: Iterable[SkillGraph],
    *,
    graph_paths: GraphPaths,
    training: BottomUpConfig,
) -> Iterator[tuple[SkillScheduler, sandbox.Confinement]]:
    """Yield the open scheduler of a skill's trials, and how their trainers are confined.

    The code of the skill and its needs in each graph, the machine and the folder are checked first;
    raises as these checks do, and BusyError if the sweep has a scheduler.
    """
    root, ppo, launch = graph_paths.root, training.ppo, training.launch
    confinement = sandbox.confinement(launch.sandbox, root)
    approvals = [
        approve_skills(
            graph_paths,
            [graph.skills[name] for name in (*graph.all_needs(skill), skill)],
            ppo.env_name,
            trust=training.graph.trust_skills,
            confine=confinement.in_folder,
        )
        for graph in graphs
    ]
    check_machine(root, ppo, launch)
    refuse_shared_folder(root, trust=training.graph.trust_folder)
    devices = device_slots(launch, ppo, each=training.schedule.devices_per_run)
    with open_scheduler(sweep_paths, training.schedule, launch, devices=devices) as scheduler:
        for granted in approvals:
            keep_approvals(sweep_paths, granted)
        yield scheduler, confinement


def run_trials(
    sweep: Sweep,
    graphs: Mapping[str, SkillGraph],
    scheduler: SkillScheduler,
    *,
    training: BottomUpConfig,
    confinement: sandbox.Confinement,
    timeout: float | None = None,
) -> None:
    """Run trials until none is left to begin; none begins after `timeout` hours.

    `graphs` has the graph of each candidate by its label, or that of all trials as "".
    """
    if said := sweep.beside_budget:
        sys.stdout.write(f"{said}\n")
    deadline = time.monotonic() + (timeout or math.inf) * 3600.0
    graph = next(iter(graphs.values()))
    trials: dict[str, Any] = {"graph": graph, "config": training, "confinement": confinement}
    unbounded = sweep.search.budget and not sweep.search.trials
    most = None if unbounded else sweep.most_trials
    with progress_bar(f"trials of {sweep.record.skill}", most) as show:
        report = partial(publish, sweep, show)
        sweeper = Sweeper(sweep, graphs, scheduler, deadline=deadline, report=report)
        scheduler.set_callbacks(
            backend=TrialBackend(sweep, devices=scheduler.devices, **trials),
            on_skill_complete=sweeper.tick,
            on_skill_failed=sweeper.tick,
            on_tick=sweeper.tick,
        )
        scheduler.when_there_is_room(sweeper.begin)
        scheduler.run()


def show(sweep: Sweep) -> str:
    """Return how far a sweep is, with a line for each trial, the best first."""
    tried, left_out = read_trials(sweep)
    lines = [progress_line(sweep, tried)]
    if not has_ended(sweep, tried) and daemon_of(sweep.sweep_paths.daemon_lock) is None:
        root = sweep.sweep_paths.root
        again = GraphPaths(root.parents[1]).command("sweep", "--name", root.name)
        lines.append(f"  no sweeper lives; {again} goes on")
    scored = sorted((each for each in tried if each.score is not None), key=rank)
    others = [each for each in tried if each.score is None]
    for each in sorted((*scored, *others), key=lambda each: each.trial.confirms):
        kind, said = "confirms" if each.trial.confirms else "searches", "running"
        if each.outcome:
            cut = f", cut at {each.outcome.cut_at:,}" if each.outcome.cut_at else ""
            said = each.outcome.why or f"{each.score:.3f} in {each.outcome.frames:,} frames{cut}"
        lines.append(f"  t{each.trial.number} {kind} ({each.trial.described}): {said}")
    return "\n".join([*lines, *(f"  left out: {why}" for why in left_out)])


def publish(sweep: Sweep, show: Callable[[int, str], None] = lambda done, text: None) -> None:
    """Let `flowrl status` of the graph say how far the sweep is, and `show` the same."""
    tried = read_trials(sweep)[0]
    show(_ended(searched(tried)), said := progress_line(sweep, tried))
    notices.publish(sweep.sweep_paths, notices.SWEEP, said)


def progress_line(sweep: Sweep, tried: Sequence[BegunTrial]) -> str:
    """Return how far a sweep is, in a line."""
    begun, again, outcome = searched(tried), confirming(tried), read_outcome(sweep)
    best = min((each for each in begun if each.score is not None), key=rank, default=None)
    stage = "ended" if has_ended(sweep, tried) else "confirming" if again else "searching"
    most = sweep.most_trials if stage == "searching" else len(begun)
    unbounded = stage == "searching" and sweep.search.budget and not sweep.search.trials
    parts = [
        f"{stage}, {_ended(begun)}{'' if unbounded else f' of {most}'} trials have ended",
        f"{_ended(again)} of {len(again)} confirming ones" if again else "",
        f"{sweep.budget_left(begun):.0%} of the budget is left" if stage == "searching" else "",
        f"best {best.score:.3f} by trial {best.trial.number} ({best.trial.described})"
        if best
        else "",
        outcome.described if outcome and sweep.search.confirm else "",
    ]
    return f"{sweep.record.skill}: {', '.join(filter(None, parts))}"


def _ended(tried: Sequence[BegunTrial]) -> int:
    return sum(each.outcome is not None for each in tried)
