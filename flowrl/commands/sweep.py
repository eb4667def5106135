"""`flowrl sweep`: tune the hyper-parameters of one skill by trials."""

from __future__ import annotations

import dataclasses
import math
import re
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl import bottomup_parallel as training
from flowrl import config as configs
from flowrl.arguments import count
from flowrl.config import AboveZero, BottomUpConfig, Natural, Positive, ScheduleConfig
from flowrl.errors import ConfigError, GraphError, closest
from flowrl.launchers import sandbox
from flowrl.parallel.recovery import recorded_config
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.parallel.skill_sources import (
    SkillSources,
    check_graph_record,
    open_graph,
    skill_configs,
)
from flowrl.parallel.training_backend import JobBuilder
from flowrl.paths import GraphPaths, SweepPaths, slug
from flowrl.skills.graph import SkillGraph
from flowrl.skills.validation.dry_run import approve_skills, keep_approvals
from flowrl.storage import records
from flowrl.storage.records import Word
from flowrl.tuning.pruning import Pruner
from flowrl.tuning.search import Method, grid_points
from flowrl.tuning.space import Space, parse_vary, read_space
from flowrl.tuning.sweep import Sweeper, TrialBackend, create_sweep, expert_number
from flowrl.tuning.trials import Sweep, SweepRecord, Tried, Unit, numbers, open_sweep, read_trials

PROGRAM = "flowrl sweep"
_TRIALS, _MOST_TRIALS = 20, 10_000
_DURATION = re.compile(r"([0-9.]+)([smh])")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_SCHEDULE = ScheduleConfig(
    max_retries=1, min_success_rate=0.0, slot_minutes=0.0, scheduler_poll_interval=2.0
)
_OF_SWEEP = ("skill", "method", "trials", "pruner", "confirm", "max_failures")


@dataclass(frozen=True, kw_only=True)
class SweepConfig(BottomUpConfig):
    """Tune the hyper-parameters of one skill by trials, which are ordinary runs.

    Examples:
      flowrl sweep exp/demo --skill "Collect Drink" --vary lr=log:1e-4:1e-2 --total_timesteps 300k
      flowrl sweep exp/demo --skill "Collect Drink" --space space.toml --budget 30m
      flowrl sweep exp/demo --name Collect_Drink --status
    """

    schedule: ScheduleConfig = _SCHEDULE
    skill: str | None = None
    """The skill; may be left out where the sweep is there already."""
    name: Word | None = None
    """Name of the sweep, below sweeps/ in the graph's folder (default: as the skill)."""
    method: Method = "random"
    """How points are chosen."""
    vary: tuple[str, ...] = ()
    """A field and its values: lr=log:1e-4:1e-2, num_envs=pow2:32:256, num_steps=choice:64,128."""
    space: Path | None = None
    """TOML or JSON file with a table for each field, instead of --vary."""
    trials: Positive | None = None
    """Most trials of the search (default: 20, or as many as --budget lets)."""
    budget: str | None = None
    """What the search may cost: seconds of training as 90s, 30m or 2h, or frames as 20M."""
    timeout: AboveZero | None = None
    """Hours, from this start, after which no trial is begun."""
    max_concurrent: Positive = 2
    """Most trials side by side."""
    max_failures: Positive = 5
    """The search ends when so many trials have failed."""
    pruner: Pruner = "none"
    """How trials are ended that are unlikely to become the best."""
    confirm: Natural = 5
    """Seeds with which the best points and the default are trained again; 0 for none."""
    status: bool = False
    """Show how far the sweep is, and do nothing else."""
    json: bool = False
    """With --status: print JSON instead of lines."""


def run_sweep(config: SweepConfig) -> int:
    """Run a sweep to its end; returns the exit code."""
    layout = GraphPaths(config.graph.graph_path)
    paths = _paths(config, layout)
    if config.status:
        raise NotImplementedError
    known = open_sweep(paths) if paths.sweep_json.exists() else None
    if known:
        refuse_other_flags(config, known)
    skill = known.record.skill if known else config.skill or ""
    config = as_recorded(config, layout)
    if known:
        config = dataclasses.replace(config, ppo=known.base)
    check_graph_record(layout, config.ppo)
    devices = training.device_slots(config)
    graph = open_graph(config, SkillSources(layout))
    if skill not in graph.skills:
        raise GraphError(f"there is no skill {skill!r}{closest(skill, graph.skills)}")
    plan = [graph.skills[name] for name in (*graph.all_needs(skill), skill)]
    record = known.record if known else new_record(config, layout, graph)
    confinement = sandbox.confinement(config.launch.sandbox, layout.root)
    approvals = approve_skills(
        layout,
        plan,
        config.ppo.env_name,
        trust=config.graph.trust_skills,
        confine=confinement.in_folder,
    )
    training.check_machine(config)
    training.refuse_shared_folder(layout.root, trust=config.graph.trust_folder)
    config = dataclasses.replace(
        config,
        schedule=dataclasses.replace(config.schedule, max_parallel_skills=config.max_concurrent),
    )
    scheduler = SkillScheduler(
        paths,
        launcher=training.open_launcher(config.launch),
        devices=devices,
        pass_env=config.launch.pass_env,
        **configs.flags(config.schedule),
    )
    with scheduler:
        keep_approvals(paths, approvals)
        sweep = known or create_sweep(paths, record, layout, graph)
        jobs = JobBuilder(
            config,
            devices=devices,
            confinement=confinement,
            live=lambda: [sweep.run(number) for number in numbers(paths)],
        )
        sweeper = Sweeper(
            sweep,
            graph,
            scheduler,
            deadline=time.monotonic() + (config.timeout or math.inf) * 3600.0,
        )
        scheduler.set_callbacks(
            backend=TrialBackend(sweep, jobs),
            on_skill_complete=sweeper.feed,
            on_skill_failed=sweeper.feed,
        )
        scheduler.when_there_is_room(sweeper.begin)
        scheduler.run()
    if sweeper.problem:
        raise sweeper.problem
    return report(sweep)


def report(sweep: Sweep) -> int:
    """Print the best points; returns the exit code."""
    tried, _ = read_trials(sweep)
    best = sorted((each for each in tried if each.score is not None), key=_rank)[:3]
    for each in best:
        assert each.outcome
        point = ", ".join(f"{name} {value}" for name, value in each.trial.point.items())
        sys.stdout.write(f"trial {each.trial.number}: {each.score:.3f} ({point})\n")
    return 0 if best else 1


def _rank(each: Tried) -> tuple[float, int]:
    return -(each.score or 0.0), each.trial.number


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
        if name not in config.origins and value != configs.flags(type(part)())[name]
    }
    kept.pop("graph_path", None)
    origins = {**dict.fromkeys(kept, "config file"), **config.origins}
    return dataclasses.replace(configs.with_flags(config, **kept), origins=origins)


def new_record(config: SweepConfig, layout: GraphPaths, graph: SkillGraph) -> SweepRecord:
    """Return what a new sweep is; writes nothing.

    Raises:
      ConfigError: a flag cannot be used; says which.
    """
    assert config.skill
    trained = skill_configs(config, graph.skills)[config.skill]
    space = dataclasses.replace(read_dimensions(config), base=trained.ppo)
    budget, unit = read_budget(config.budget)
    limited = budget is not None or config.timeout is not None
    trials = config.trials or (_MOST_TRIALS if limited else _TRIALS)
    default = {name: configs.flags(trained.ppo)[name] for name in space.to_data()}
    begins = config.method != "grid" and space.admitted(default) == default
    if config.method == "grid":
        trials = min(trials, len(grid_points(space)))
    return SweepRecord(
        sweep=secrets.token_hex(8),
        skill=config.skill,
        expert=expert_number(layout, config.skill),
        method=config.method,
        space=space.to_data(),
        seed=config.ppo.seed,
        trials=trials,
        budget=budget,
        unit=unit,
        pruner=config.pruner,
        confirm=config.confirm,
        max_failures=config.max_failures,
        config=configs.to_json(trained.ppo),
        origins=trained.origins,
        starts=(default,) if begins else (),
    )


def read_dimensions(config: SweepConfig) -> Space:
    """The space of --vary or --space."""
    if bool(config.vary) == bool(config.space):
        raise ConfigError("say what is varied, by --vary lr=log:1e-4:1e-2 or by --space FILE")
    if config.space:
        return read_space(config.space)
    items: list[str] = []
    for word in config.vary:  # choices were split at their commas
        if "=" in word or not items:
            items.append(word)
        else:
            items[-1] += f",{word}"
    return parse_vary(items)


def read_budget(text: str | None) -> tuple[float | None, Unit]:
    """Return a budget and its unit.

    >>> read_budget("30m"), read_budget("20M"), read_budget(None)
    ((1800.0, 'seconds'), (20000000.0, 'frames'), (None, 'frames'))

    Raises:
      ConfigError: it is neither a time nor a number of frames.
    """
    if text is None:
        return None, "frames"
    found = _DURATION.fullmatch(text)
    try:
        value = float(found[1]) * _SECONDS[found[2]] if found else float(count(text))
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ConfigError(f"--budget {text} is neither a time, as 30m, nor frames, as 20M")
    return value, "seconds" if found else "frames"


def refuse_other_flags(config: SweepConfig, sweep: Sweep) -> None:
    """Make sure that the flags that are given are those with which the sweep was begun.

    Raises:
      ConfigError: one is another.
    """
    record = sweep.record
    given: dict[str, tuple[Any, Any]] = {
        name: (getattr(config, name), getattr(record, name)) for name in _OF_SWEEP
    }
    if "vary" in config.origins or "space" in config.origins:
        now = read_dimensions(config).to_data()
        given |= {name: (now, record.space) for name in ("vary", "space")}
    given["budget"] = read_budget(config.budget), (record.budget, record.unit)
    base: Mapping[str, Any] = record.config
    flags = configs.to_json(config.ppo)
    given |= {name: (flags[name], base.get(name)) for name in flags if name != "seed"}
    given["seed"] = config.ppo.seed, record.seed
    for name in config.origins:
        now, was = given.get(name, (None, None))
        if records.to_json(now) != records.to_json(was):
            raise ConfigError(
                f"--{name} is not what {sweep.paths.root} was begun with; leave it out, or choose "
                "another --name"
            )
