"""`flowrl sweep`: tune the hyper-parameters of one skill by trials."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from flowrl import config as configs
from flowrl import notices
from flowrl.config import AboveZero, BottomUpConfig, Natural, Positive, ScheduleConfig
from flowrl.errors import EXIT_RESUMABLE, ConfigError, LaunchError, closest
from flowrl.experts.store import ExpertStore
from flowrl.launchers import sandbox
from flowrl.launchers.confined import confined_run
from flowrl.parallel.health import daemon_of
from flowrl.parallel.recovery import recorded_config
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.parallel.skill_sources import (
    SkillSources,
    check_graph_record,
    open_graph,
    read_tuned,
    skill_configs,
)
from flowrl.parallel.start import (
    check_machine,
    device_slots,
    open_scheduler,
    refuse_shared_folder,
)
from flowrl.parallel.training_backend import merge_rule
from flowrl.paths import GraphPaths, SweepPaths, slug
from flowrl.runs import read_run
from flowrl.skills.graph import SkillGraph
from flowrl.skills.validation.dry_run import approve_skills, keep_approvals
from flowrl.storage import records
from flowrl.storage.records import Word
from flowrl.tuning.outcome import (
    apply_winner,
    decide,
    forget,
    keep_winner,
    read_outcome,
)
from flowrl.tuning.search import SearchConfig, check_installed, suggest
from flowrl.tuning.space import Space, parse_vary, read_space
from flowrl.tuning.sweep import Sweeper, TrialBackend, create_sweep, expert_number
from flowrl.tuning.trials import (
    LIMITS,
    Sweep,
    SweepRecord,
    Tried,
    confirming,
    has_ended,
    next_trial,
    open_sweep,
    prolong,
    rank,
    read_trials,
    searched,
)

PROGRAM = "flowrl sweep"
_SCHEDULE = ScheduleConfig(
    max_retries=1, min_success_rate=0.0, slot_minutes=0.0, scheduler_poll_interval=2.0
)
_SEARCH = SearchConfig()
_EPISODES, _FRESH_SEED = 256, 3_000_017  # of the worlds in which points are confirmed
_COUNTS = tuple[Annotated[int, records.within(0, _EPISODES)], ...]
_OF_TRAIN = (
    "max_parallel_skills", "auto_scaling", "min_workers", "max_workers", "max_nodes",
    "target_skill", "init_from", "strict", "curriculum",
)  # fmt: skip
_OF_FLOWRL = (
    "gpu_ids", "devices_per_run", "cpus_per_run", "launcher", "stall_timeout", "run_timeout",
    "max_retries", "retry_backoff",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SweepConfig(BottomUpConfig):
    """Tune one skill's hyper-parameters by trials: ordinary runs.

    Examples:
      flowrl sweep exp/demo --skill "Collect Drink" --vary lr=log:1e-4:1e-2 --total_timesteps 300k
      flowrl sweep exp/demo --skill "Collect Drink" --space space.toml --budget 30m
      flowrl sweep exp/demo --name Collect_Drink --status
    """

    schedule: ScheduleConfig = _SCHEDULE
    search: SearchConfig = _SEARCH
    skill: str | None = None
    """The skill; may be left out where the sweep is there already."""
    name: Word | None = None
    """Name of the sweep, below sweeps/ in the graph's folder (default: as the skill)."""
    vary: tuple[str, ...] = ()
    """A field and its values: lr=log:1e-4:1e-2, num_envs=pow2:32:256, num_steps=choice:64,128."""
    space: Path | None = None
    """TOML or JSON file with a table for each field, instead of --vary."""
    engine: Literal["flowrl", "ray"] = "flowrl"
    """What runs the trials: flowrl's scheduler, or Ray Tune on this machine."""
    timeout: AboveZero | None = None
    """Hours, from this start, after which no trial is begun."""
    max_concurrent: Positive = 2
    """Most trials side by side."""
    keep_winner: bool = False
    """Merge the best expert of a confirmed point into the graph."""
    apply: bool = False
    """Make the point that was confirmed the skill's settings again, and do nothing else."""
    forget: bool = False
    """Remove the settings that a sweep has found for the skill, and do nothing else."""
    status: bool = False
    """Show how far the sweep is, and do nothing else."""

    def problems(self) -> Iterator[str]:
        """Check whether a flag is given, wherever, that sweeps or their engine know nothing of."""
        for name, origin in sorted(self.origins.items()):
            flag = f"--{name}" if origin == "command line" else f"--{name} ({origin})"
            if name in _OF_TRAIN:
                more = " (--max_concurrent limits trials)" if name == "max_parallel_skills" else ""
                yield f"{flag} is for flowrl train, and no sweep's{more}; leave it out"
            if name in _OF_FLOWRL and self.engine == "ray":
                yield f"{flag} does nothing with --engine ray; leave it out"


def run_sweep(config: SweepConfig) -> int:
    """Run a sweep to its end, or do what a flag asks instead; returns the exit code."""
    layout = GraphPaths(config.graph.graph_path)
    paths = _paths(config, layout)
    known = open_sweep(paths) if paths.sweep_json.exists() else None
    if config.status or config.apply or config.forget:
        if known is None:
            raise ConfigError(f"{paths.root} is no sweep")
        return _look_only(config, layout, known)
    if known:
        _refuse_other_flags(config, known)
    config = as_recorded(config, layout)
    config = dataclasses.replace(config, ppo=known.base) if known else config
    check_graph_record(layout, config.ppo)
    each, wanted = config.schedule.devices_per_run, config.ppo.num_devices
    devices = device_slots(config.launch, each=each, wanted=wanted)
    graph = open_graph(config, SkillSources(layout))
    record = known.record if known else _new_record(config, layout, graph)
    method = (known or config).search.method
    check_installed(method)
    _check_engine(config, Sweep(paths, record))
    if config.keep_winner and not (known or config).search.confirm:
        raise ConfigError("--keep_winner keeps a confirmed point's expert; --confirm 0 has none")
    most = 1 if method == "cleanrl" else config.max_concurrent
    config = configs.with_flags(config, max_parallel_skills=most, max_nodes=None)
    confinement = sandbox.confinement(config.launch.sandbox, layout.root)
    approvals = approve_skills(
        layout,
        [graph.skills[name] for name in (*graph.all_needs(record.skill), record.skill)],
        config.ppo.env_name,
        trust=config.graph.trust_skills,
        confine=confinement.in_folder,
    )
    check_machine(layout.root, config.ppo)
    refuse_shared_folder(layout.root, trust=config.graph.trust_folder)
    scheduler = open_scheduler(paths, config.schedule, config.launch, devices=devices)
    with scheduler:
        keep_approvals(paths, approvals)
        sweep = (
            prolong(known, config.search, config.origins)
            if known
            else create_sweep(paths, record, layout, graph)
        )
        _run_trials(sweep, graph, scheduler, config, confinement=confinement)
        if scheduler.stopped_on_request:
            return EXIT_RESUMABLE
        return _conclude(sweep, layout, config)


def _run_trials(
    sweep: Sweep,
    graph: SkillGraph,
    scheduler: SkillScheduler,
    config: SweepConfig,
    *,
    confinement: sandbox.Confinement,
) -> None:
    """Run trials until none is left to begin."""
    if said := sweep.beside_budget:
        sys.stdout.write(f"{said}\n")
    deadline = time.monotonic() + (config.timeout or math.inf) * 3600.0
    report = partial(_publish, sweep)
    trials: dict[str, Any] = {"graph": graph, "config": config, "confinement": confinement}
    if config.engine == "ray":
        from flowrl.tuning import ray_tune  # optional

        backend = partial(TrialBackend, **trials)
        return ray_tune.run_trials(
            sweep, graph, config, backend=backend, deadline=deadline, report=report
        )
    sweeper = Sweeper(sweep, graph, scheduler, deadline=deadline, report=report)
    scheduler.set_callbacks(
        backend=TrialBackend(sweep, devices=scheduler.devices, **trials),
        on_skill_complete=sweeper.look,
        on_skill_failed=sweeper.look,
        on_tick=sweeper.look,
    )
    scheduler.when_there_is_room(sweeper.begin)
    scheduler.run()
    return None


def _check_engine(config: SweepConfig, sweep: Sweep) -> None:
    """Make sure that the engine is there, and can do what the sweep asks.

    Raises:
      ConfigError: it is not, or cannot.
    """
    if config.engine == "ray" and find_spec("ray") is None:
        raise ConfigError("--engine ray needs Ray Tune: pip install '.[ray]' in flowrl's folder")
    if config.engine == "ray" and sweep.pruner != "none":
        raise ConfigError(f"--engine ray ends no trial early; leave out --pruner {sweep.pruner}")


def _conclude(sweep: Sweep, graph: GraphPaths, config: SweepConfig) -> int:
    """Compare the best points with the default, and print what came of the sweep.

    Exit code 0 if a trial has a score, 85 if trials are left, 1 if all have failed.
    """
    tried, _ = read_trials(sweep)
    if any(each.outcome is None for each in tried) or next_trial(sweep, tried, number=0):
        sys.stdout.write(f"{_progress_line(sweep, tried)}; the same command goes on\n")
        return EXIT_RESUMABLE
    found, said = read_outcome(sweep), []
    if found is None and sweep.search.confirm:
        found = decide(sweep, tried, _success_in_fresh_worlds(sweep, tried, config))
        said.append(apply_winner(graph, sweep, found))
        records.write(sweep.paths.outcome_json, found)
    _publish(sweep)
    if found and config.keep_winner:
        said.append(keep_winner(graph, sweep, found, config=config))
    sys.stdout.write("\n".join([show(sweep), *said, ""]))
    return 0 if any(each.score is not None for each in tried) else 1


def _success_in_fresh_worlds(
    sweep: Sweep, tried: Sequence[Tried], config: SweepConfig
) -> dict[int, float]:
    """Let the experts of trials that confirm play, all in the same worlds.

    Returns:
      the share of episodes that succeed, by number of trial; without those that failed, if only
      once, since a later attempt has another seed.

    Raises:
      LaunchError: the process that does it ended before its time.
    """
    ended = [each.trial.number for each in confirming(tried) if each.score is not None]
    runs = {number: read_run(sweep.run(number)) for number in ended}
    played = [number for number, run in runs.items() if run.attempt == 1]
    if not played:
        return {}
    root = sweep.paths.root.absolute()
    order = EvaluateTrials(sweep=root, numbers=tuple(played), seed=_FRESH_SEED)
    how = config.launch.sandbox
    child = confined_run(order, GraphPaths(root), runs[played[0]], how=how, stdout=subprocess.PIPE)
    if child.returncode:
        raise LaunchError(f"the evaluation of trials ended with {child.returncode}; start again")
    try:
        counts = records.from_json(_COUNTS, json.loads(child.stdout.rpartition(b"\n")[2]))
        return {n: count / _EPISODES for n, count in zip(played, counts, strict=True)}
    except ValueError as error:
        raise LaunchError(f"the evaluation of trials is malformed: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateTrials:
    """The order to let trials' experts play; the last line has their successes, a JSON list."""

    sweep: Path
    numbers: tuple[Natural, ...]
    seed: int

    def work(self) -> int:
        """Play in this process."""
        from flowrl.evaluate import evaluate_runs

        sweep = open_sweep(SweepPaths(self.sweep))
        places = [sweep.run(number) for number in self.numbers]
        found = evaluate_runs(places, episodes=_EPISODES, seed=self.seed)
        sys.stdout.write("\n" + json.dumps([report.steps[-1].successes for report in found]))
        return 0


def _look_only(config: SweepConfig, layout: GraphPaths, sweep: Sweep) -> int:
    """Show a sweep, or apply or forget what it found."""
    found = read_outcome(sweep)
    if config.status:
        said = show(sweep)
    elif config.forget:
        said = forget(layout, sweep.record.skill)
    elif not sweep.search.confirm:
        raise ConfigError(f"{sweep.paths.root} has --confirm 0 and confirms no point")
    elif found is None:
        raise ConfigError(f"{sweep.paths.root} has not confirmed a point yet; let it go on")
    else:
        said = apply_winner(layout, sweep, found)
    sys.stdout.write(f"{said}\n")
    return 0


def show(sweep: Sweep) -> str:
    """Return how far a sweep is, with a line for each trial, the best first."""
    tried, left_out = read_trials(sweep)
    lines = [_progress_line(sweep, tried)]
    if not has_ended(sweep, tried) and daemon_of(sweep.paths.daemon_lock) is None:
        root = sweep.paths.root
        again = shlex.join(["flowrl", "sweep", str(root.parents[1]), "--name", root.name])
        lines.append(f"  no sweeper lives; {again} goes on")
    scored = sorted((each for each in tried if each.score is not None), key=rank)
    others = [each for each in tried if each.score is None]
    for each in sorted((*scored, *others), key=lambda each: each.trial.confirms):
        kind, said = "confirms" if each.trial.confirms else "searches", "running"
        if each.outcome:
            cut = f", cut at {each.outcome.cut_at:,}" if each.outcome.cut_at else ""
            said = each.outcome.why or f"{each.score:.3f} in {each.outcome.frames:,} frames{cut}"
        lines.append(f"  t{each.trial.number} {kind} ({each.trial.said}): {said}")
    return "\n".join([*lines, *(f"  left out: {why}" for why in left_out)])


def _publish(sweep: Sweep) -> None:
    """Let `flowrl status` of the graph say how far the sweep is."""
    notices.publish(sweep.paths, notices.SWEEP, _progress_line(sweep, read_trials(sweep)[0]))


def _progress_line(sweep: Sweep, tried: Sequence[Tried]) -> str:
    """Return how far a sweep is, in a line."""
    begun, again, found = searched(tried), confirming(tried), read_outcome(sweep)
    best = min((each for each in begun if each.score is not None), key=rank, default=None)
    stage = "ended" if has_ended(sweep, tried) else "confirming" if again else "searching"
    most = sweep.most_trials if stage == "searching" else len(begun)
    unbounded = stage == "searching" and sweep.search.budget and not sweep.search.trials
    parts = [
        f"{stage}, {_ended(begun)}{'' if unbounded else f' of {most}'} trials have ended",
        f"{_ended(again)} of {len(again)} confirming ones" if again else "",
        f"{sweep.budget_left(begun):.0%} of the budget is left" if stage == "searching" else "",
        f"best {best.score:.3f} by trial {best.trial.number} ({best.trial.said})" if best else "",
        found.said if found and sweep.search.confirm else "",
    ]
    return f"{sweep.record.skill}: {', '.join(filter(None, parts))}"


def _ended(tried: Sequence[Tried]) -> int:
    return sum(each.outcome is not None for each in tried)


def _paths(config: SweepConfig, layout: GraphPaths) -> SweepPaths:
    if config.name is None and config.skill is None:
        there = sorted(path.name for path in layout.sweeps.glob("*") if path.is_dir())
        more = f"; there are {', '.join(there)}" if there else ""
        raise ConfigError(f"name the --skill that is tuned, or the sweep by --name{more}")
    paths = SweepPaths(layout.sweeps / (config.name or slug(config.skill or "")))
    if config.skill is None and not paths.sweep_json.exists():
        raise ConfigError(f"{paths.root} is no sweep yet; name its --skill")
    return paths


def as_recorded(config: SweepConfig, layout: GraphPaths) -> SweepConfig:
    """Return the configuration with the flags that the graph was trained with, unless given."""
    if not (layout.config_json.exists() or layout.graph_json.exists()):
        return config
    recorded = recorded_config(layout)
    kept = {
        name: value
        for part in (recorded.ppo, recorded.graph)
        for name, value in configs.flags(part).items()
        if name not in (*config.origins, *_OF_TRAIN, "graph_path")
        and value != configs.flags(type(part)())[name]
    }
    origins = {**dict.fromkeys(kept, "config file"), **config.origins}
    return dataclasses.replace(configs.with_flags(config, **kept), origins=origins)


def _new_record(config: SweepConfig, layout: GraphPaths, graph: SkillGraph) -> SweepRecord:
    """Return what a new sweep is; writes nothing.

    Raises:
      ConfigError: a flag cannot be used; says which.
    """
    skill, search = config.skill or "", config.search
    if skill not in graph.skills:
        raise ConfigError(f"there is no skill {skill!r}{closest(skill, graph.skills)}")
    merge_rule(config.graph)  # refused now, or never
    trained = skill_configs(config, graph.skills)[skill]
    if trained.ppo.replicas > 1 and (search.pruner != "none" or search.method == "cleanrl"):
        raise ConfigError("--pruner cannot end runs with --replicas; leave one of them out")
    merged = {version.skill for version in ExpertStore(layout).manifest().experts.values()}
    if missing := [need for need in graph.all_needs(skill) if need not in merged]:
        train = f"flowrl train {layout.root} --target_skill {missing[-1]!r}"
        raise ConfigError(f"{skill} needs {missing[-1]}, which has no expert yet; {train}")
    space = dataclasses.replace(_read_dimensions(config), base=trained.ppo)
    check_installed(search.method)
    suggest(space, [], [], number=0, seed=0, method=search.method, budget_left=1.0)
    return SweepRecord(
        sweep=secrets.token_hex(8),
        skill=skill,
        expert=expert_number(layout, skill),
        flags=configs.to_json(config),
        space=space.to_data(),
        config=configs.to_json(trained.ppo),
        origins=trained.origins,
        starts=() if search.method == "grid" else _first_points(space, layout, graph, skill),
    )


def _first_points(
    space: Space, layout: GraphPaths, graph: SkillGraph, skill: str
) -> tuple[dict[str, Any], ...]:
    """The points that are tried first: the default, and what sweeps of other skills found.

    The skills that this one needs come first, those before it last.
    """
    assert space.base
    default = {name: configs.flags(space.base)[name] for name in space.to_data()}
    near = [*reversed(graph.all_needs(skill)), *graph.order()]
    tuned = [read_tuned(layout, name) for name in dict.fromkeys(near) if name != skill]
    found: list[dict[str, Any]] = []
    for settings in [{}, *tuned]:
        point = {**default, **{name: settings[name] for name in default if name in settings}}
        if point not in found and space.admitted(point) == point:
            found.append(point)
    return tuple(found)


def _read_dimensions(config: SweepConfig) -> Space:
    """The space of --vary or --space."""
    if bool(config.vary) == bool(config.space):
        raise ConfigError("say what is varied, by --vary lr=log:1e-4:1e-2 or by --space FILE")
    if config.space:
        return read_space(config.space)
    return parse_vary(re.split(r",(?=\w+=)", ",".join(config.vary)))  # split at each comma before


def _refuse_other_flags(config: SweepConfig, sweep: Sweep) -> None:
    """Make sure that the flags that are given, but its limits, are those of the sweep.

    Raises:
      ConfigError: one is another.
    """
    now, was = configs.to_json(config), sweep.record.flags
    fixed = {"skill", *configs.flags(config.ppo), *configs.flags(config.search)} - set(LIMITS)
    other = [name for name in config.origins if name in fixed and now[name] != was.get(name)]
    if {"vary", "space"} & config.origins.keys():
        same = _read_dimensions(config).to_data() == sweep.record.space
        other += [] if same else ["vary"]
    for name in other:
        raise ConfigError(
            f"--{name} is not what {sweep.paths.root} was begun with; leave it out, or choose "
            "another --name"
        )
