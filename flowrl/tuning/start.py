"""The start of a sweep: its flags, how its trials are trained, and what a new one is."""

from __future__ import annotations

import dataclasses
import functools
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl import arguments
from flowrl import config as configs
from flowrl.arguments import Count, other_flags
from flowrl.config import AboveZero, AttemptConfig, BottomUpConfig, PPOConfig, StartConfig
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
_FIXED = {"skill", *configs.flags(PPOConfig()), *configs.flags(_SEARCH)} - set(LIMITS)
_BEFORE_FIELD = re.compile(r",(?=\w+=)")
OF_TRIALS = {"min_success_rate": 0.0, "slot_minutes": 0.0}  # of trials: all are scored, none waits


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
    timeout: AboveZero | None = None
    """Hours, from this start, after which no trial is begun."""
    max_concurrent: Count = 2
    """Most trials side by side."""
    keep_winner: bool = False
    """Merge the best expert of a confirmed point into the graph."""

    @classmethod
    def settled(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the flags that are not the graph's where they are not given."""
        of_graph = configs.flags(BottomUpConfig())
        return {name: value for name, value in values.items() if name not in of_graph}

    @functools.cached_property
    def varied(self) -> Space | None:
        """The space of --vary or --space, if one is given; ConfigError if it cannot be used."""
        if self.space:
            return read_space(self.space)
        return parse_vary(_BEFORE_FIELD.split(",".join(self.vary))) if self.vary else None

    @property
    def given(self) -> dict[str, Any]:
        """The flags that were given, wherever, as JSON values."""
        written = configs.to_json(self)
        return {name: written[name] for name in self.origins}

    def problems(self) -> Iterator[str]:
        """Check whether a sweep and its space are named."""
        if self.vary and self.space:
            yield "--vary and --space both say what is varied; leave one of them out"
        if self.name is None and self.skill is None:
            graph_paths = GraphPaths(self.graph.graph_path)
            yield f"name the --skill that is tuned, or the sweep by --name{begun(graph_paths)}"


def begun(graph_paths: GraphPaths, name: str = "") -> str:
    """Return the end of a message about a sweep: the closest one, or all that the graph has."""
    there = sorted(path.parent.name for path in graph_paths.sweeps.glob("*/sweep.json"))
    all_of_them = f"there are {', '.join(there)}" if there else "flowrl sweep begins one"
    return closest(name, there) or f"; {all_of_them}"


def training_config(
    config: SweepConfig, graph_paths: GraphPaths, known: Sweep | None = None
) -> BottomUpConfig:
    """Return how trials are trained: as the graph was trained, unless flags are given.

    A sweep that is there already has its settings.
    """
    recorded, own = _recorded(graph_paths, config.skill), configs.flags(config)
    kept = {
        name: value
        for part in recorded
        for name, value in configs.flags(part).items()
        if name in own.keys() - config.origins.keys() - {"graph_path"}
        and value != configs.flags(type(part)())[name]
    }
    shared = {name: own[name] for name in own.keys() & configs.flags(BottomUpConfig()).keys()}
    values = {**shared, **kept, **OF_TRIALS, "max_parallel_skills": config.max_concurrent}
    training = configs.with_flags(BottomUpConfig(), **values)
    origins = {**dict.fromkeys(kept, "config file"), **config.origins}
    ppo = known.base if known else training.ppo
    varied = {each.name for each in config.varied.dimensions} if config.varied else ()
    fixed = {name: each for name, each in configs.flags(training).items() if name not in varied}
    arguments.check_needs(BottomUpConfig, fixed, config.origins)
    return dataclasses.replace(training, ppo=ppo, origins=origins)


def _recorded(graph_paths: GraphPaths, skill: str | None) -> tuple[configs.Configuration, ...]:
    """The graph's settings, if there are any; of the skill's own merged run the given flags."""
    if not (graph_paths.config_json.exists() or graph_paths.graph_json.exists()):
        return ()
    recorded = recorded_config(graph_paths)
    for each in ExpertStore(graph_paths).manifest().experts.values():
        run_paths = graph_paths.archive(each.index, each.skill)
        if each.skill == skill and run_paths.run_json.exists():
            run = read_run(run_paths)
            given = {name: run.config[name] for name, o in run.origins.items() if o in GIVEN}
            given["egocentric"] = run.config["egocentric"]  # a missing one means an earlier version
            return configs.from_json(PPOConfig, given), recorded.graph
    return recorded.ppo, recorded.graph


def new_record(
    config: SweepConfig, training: BottomUpConfig, graph_paths: GraphPaths, graph: SkillGraph
) -> SweepRecord:
    """Return what a new sweep is; raises ConfigError for a flag that cannot be used."""
    skill, search, space = config.skill or "", config.search, config.varied
    if skill not in graph.skills:
        near = closest(skill, graph.skills) or f"; there are {', '.join(graph.skills)}"
        raise ConfigError(f"there is no skill {skill!r}{near}")
    merge_rule(training.graph)  # refused now, or never
    trained = skill_configs(training, graph.skills)[skill]
    if trained.ppo.replicas > 1 and search.pruner != "none":
        raise ConfigError("--pruner cannot end runs with --replicas; leave one of them out")
    merged = {version.skill for version in ExpertStore(graph_paths).manifest().experts.values()}
    needs = graph.all_needs(skill)
    if missing := [need for need in needs if need not in merged]:
        train = graph_paths.command("train", "--target_skill", missing[-1])
        raise ConfigError(f"{skill} needs {missing[-1]}, which has no expert yet; {train}")
    if space is None:
        raise ConfigError("say what is varied, by --vary lr=log:1e-4:1e-2 or by --space FILE")
    space = dataclasses.replace(space, base=trained.ppo)
    suggest(search.method, SearchInput(space=space))
    near = dict.fromkeys([*reversed(needs), *graph.order()])  # what it needs first, the next last
    tuned = [read_tuned(graph_paths, name) for name in near if name != skill]
    return SweepRecord(
        sweep=secrets.token_hex(8),
        skill=skill,
        expert=expert_number(graph_paths, skill),
        flags={**configs.to_json(config), **configs.to_json(training.ppo)},
        space=space.to_data(),
        config=configs.to_json(trained.ppo),
        origins=trained.origins,
        starts=() if search.method == "grid" else space.first_points(tuned),
    )


def refuse_other_flags(given: Mapping[str, Any], space: Space | None, sweep: Sweep) -> None:
    """Raise ConfigError if the space or a flag that is given, no limit, is not the sweep's."""
    now = {name: value for name, value in given.items() if name in _FIXED}
    if space:
        now["space"] = space.to_data()
    for said in other_flags({**sweep.record.flags, "space": sweep.record.space}, now):
        raise ConfigError(
            f"{sweep.sweep_paths.root} was begun with {said}; leave it out, or choose another "
            "--name"
        )
