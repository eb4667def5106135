"""The start of a sweep: its flags, how its trials are trained, and what a new one is."""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowrl import config as configs
from flowrl.arguments import Count
from flowrl.config import (
    AboveZero,
    AttemptConfig,
    BottomUpConfig,
    PPOConfig,
    StartConfig,
)
from flowrl.errors import ConfigError, closest
from flowrl.experts.store import ExpertStore
from flowrl.parallel.recovery import recorded_config
from flowrl.parallel.skill_sources import GIVEN, read_tuned, skill_configs
from flowrl.parallel.training_backend import merge_rule
from flowrl.paths import GraphPaths
from flowrl.runs import read_run
from flowrl.skills.graph import SkillGraph
from flowrl.storage.records import Word
from flowrl.tuning.search import SearchConfig, suggest
from flowrl.tuning.space import SearchInput, Space, parse_vary, read_space
from flowrl.tuning.sweep import expert_number
from flowrl.tuning.trials import LIMITS, Sweep, SweepRecord

_ATTEMPTS = AttemptConfig(max_retries=1, scheduler_poll_interval=2.0)
_SEARCH = SearchConfig()
_ALWAYS = {"min_success_rate": 0.0, "slot_minutes": 0.0}  # of trials: all are scored, none waits
_OF_FLOWRL = (
    "gpu_ids", "devices_per_run", "cpus_per_run", "launcher", "stall_timeout", "run_timeout",
    "max_retries", "retry_backoff",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SweepConfig(StartConfig):
    """Tune one skill's hyper-parameters by trials: ordinary runs.

    Examples:
      flowrl sweep exp/demo --skill "Collect Drink" --vary lr=log:1e-4:1e-2 --total_timesteps 300k
      flowrl sweep exp/demo --skill "Collect Drink" --space space.toml --budget 30m
      flowrl sweep status exp/demo --name Collect_Drink
    """

    schedule: AttemptConfig = _ATTEMPTS
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
    max_concurrent: Count = 2
    """Most trials side by side."""
    keep_winner: bool = False
    """Merge the best expert of a confirmed point into the graph."""

    def problems(self) -> Iterator[str]:
        """Check whether a flag is given, wherever, that the engine knows nothing of."""
        for name, origin in sorted(self.origins.items()):
            if name in _OF_FLOWRL and self.engine == "ray":
                flag = f"--{name}" if origin == "command line" else f"--{name} ({origin})"
                yield f"{flag} does nothing with --engine ray; leave it out"


def training_config(
    config: SweepConfig, graph_paths: GraphPaths, known: Sweep | None = None
) -> BottomUpConfig:
    """Return how trials are trained: as the graph was trained, unless flags are given.

    A sweep that is there already has its settings.
    """
    own, kept = configs.flags(config), {}
    if graph_paths.config_json.exists() or graph_paths.graph_json.exists():
        recorded = recorded_config(graph_paths)
        kept = {
            name: value
            for part in (_as_trained(graph_paths, config.skill) or recorded.ppo, recorded.graph)
            for name, value in configs.flags(part).items()
            if name in own.keys() - config.origins.keys() - {"graph_path"}
            and value != configs.flags(type(part)())[name]
        }
    shared = {name: own[name] for name in own.keys() & configs.flags(BottomUpConfig()).keys()}
    most = 1 if (known or config).search.method == "cleanrl" else config.max_concurrent
    values = {**shared, **kept, **_ALWAYS, "max_parallel_skills": most}
    training = configs.with_flags(BottomUpConfig(), **values)
    origins = {**dict.fromkeys(kept, "config file"), **config.origins}
    ppo = known.base if known else training.ppo
    return dataclasses.replace(training, ppo=ppo, origins=origins)


def _as_trained(graph_paths: GraphPaths, skill: str | None) -> PPOConfig | None:
    """The flags that the skill's merged run was given, None if it has no record."""
    versions = ExpertStore(graph_paths).manifest().experts.values()
    places = [
        graph_paths.archive(each.index, each.skill) for each in versions if each.skill == skill
    ]
    if not places or not places[0].run_json.exists():
        return None
    run = read_run(places[0])
    flags = {name: run.config[name] for name, o in run.origins.items() if o in GIVEN}
    return configs.from_json(PPOConfig, flags)


def new_record(
    config: SweepConfig, training: BottomUpConfig, graph_paths: GraphPaths, graph: SkillGraph
) -> SweepRecord:
    """Return what a new sweep is; raises ConfigError for a flag that cannot be used."""
    skill, search = config.skill or "", config.search
    if skill not in graph.skills:
        raise ConfigError(f"there is no skill {skill!r}{closest(skill, graph.skills)}")
    merge_rule(training.graph)  # refused now, or never
    trained = skill_configs(training, graph.skills)[skill]
    if trained.ppo.replicas > 1 and (search.pruner != "none" or search.method == "cleanrl"):
        raise ConfigError("--pruner cannot end runs with --replicas; leave one of them out")
    merged = {version.skill for version in ExpertStore(graph_paths).manifest().experts.values()}
    if missing := [need for need in graph.all_needs(skill) if need not in merged]:
        train = f"flowrl train {graph_paths.root} --target_skill {missing[-1]!r}"
        raise ConfigError(f"{skill} needs {missing[-1]}, which has no expert yet; {train}")
    space = dataclasses.replace(_read_dimensions(config), base=trained.ppo)
    suggest(search.method, SearchInput(space=space))
    return SweepRecord(
        sweep=secrets.token_hex(8),
        skill=skill,
        expert=expert_number(graph_paths, skill),
        flags={**configs.to_json(config), **configs.to_json(training.ppo)},
        space=space.to_data(),
        config=configs.to_json(trained.ppo),
        origins=trained.origins,
        starts=() if search.method == "grid" else _first_points(space, graph_paths, graph, skill),
    )


def _first_points(
    space: Space, graph_paths: GraphPaths, graph: SkillGraph, skill: str
) -> tuple[dict[str, Any], ...]:
    """The points that are tried first: the default, and what sweeps of other skills found.

    The skills that this one needs come first, those before it last.
    """
    assert space.base
    default = {name: configs.flags(space.base)[name] for name in space.to_data()}
    near = [*reversed(graph.all_needs(skill)), *graph.order()]
    tuned = [read_tuned(graph_paths, name) for name in dict.fromkeys(near) if name != skill]
    points: list[dict[str, Any]] = []
    for settings in [{}, *tuned]:
        point = {**default, **{name: settings[name] for name in default if name in settings}}
        if point not in points and space.admitted(point) == point:
            points.append(point)
    return tuple(points)


def _read_dimensions(config: SweepConfig) -> Space:
    """The space of --vary or --space."""
    if bool(config.vary) == bool(config.space):
        raise ConfigError("say what is varied, by --vary lr=log:1e-4:1e-2 or by --space FILE")
    if config.space:
        return read_space(config.space)
    return parse_vary(re.split(r",(?=\w+=)", ",".join(config.vary)))  # split at each comma before


def refuse_other_flags(config: SweepConfig, sweep: Sweep) -> None:
    """Raise ConfigError if a flag that is given, but no limit, is not that of the sweep."""
    now, was = configs.to_json(config), sweep.record.flags
    fixed = {"skill", *configs.flags(config.ppo), *configs.flags(config.search)} - set(LIMITS)
    other = [name for name in config.origins if name in fixed and now[name] != was.get(name)]
    if {"vary", "space"} & config.origins.keys():
        same = _read_dimensions(config).to_data() == sweep.record.space
        other += [] if same else ["vary"]
    for name in other:
        raise ConfigError(
            f"--{name} is not what {sweep.sweep_paths.root} was begun with; leave it out, or "
            "choose another --name"
        )
