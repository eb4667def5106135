"""`flowrl sweep` and its status, apply and forget: tune the settings of one skill by trials."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from flowrl.arguments import GraphCommand
from flowrl.config import BottomUpConfig
from flowrl.errors import EXIT_RESUMABLE, ConfigError
from flowrl.parallel.skill_sources import SkillSources, check_graph_record, open_graph
from flowrl.paths import GraphPaths, SweepPaths, existing_graph, refuse_other_folder, slug
from flowrl.skills.graph import SkillGraph
from flowrl.storage import records
from flowrl.storage.records import Word
from flowrl.tuning.outcome import (
    apply_winner,
    decide,
    forget,
    keep_winner,
    read_outcome,
    success_in_fresh_worlds,
)
from flowrl.tuning.running import progress_line, publish, run_trials, show, trial_scheduler
from flowrl.tuning.start import SweepConfig, begun, new_record, refuse_other_flags, training_config
from flowrl.tuning.sweep import create_sweep
from flowrl.tuning.trials import Sweep, next_trial, open_sweep, prolong, read_trials


def run_sweep(config: SweepConfig) -> int:
    """Run a sweep to its end; returns the exit code."""
    refuse_other_folder(config.graph.graph_path)
    graph_paths = GraphPaths(config.graph.graph_path)
    sweep_paths = _paths(graph_paths, config.name, config.skill)
    known = open_sweep(sweep_paths) if sweep_paths.sweep_json.exists() else None
    if not known:
        existing_graph(graph_paths.root)
    if known and known.record.candidates:
        what = f"{sweep_paths.root} compares texts of {known.record.skill}"
        raise ConfigError(f"{what}; the command that began it goes on with it")
    if known:
        refuse_other_flags(config.given, config.varied, known)
    elif config.skill is None:
        raise ConfigError(f"{sweep_paths.root} is no sweep yet; name its --skill")
    training = training_config(config, graph_paths, known)
    check_graph_record(graph_paths, training.ppo)
    sources = SkillSources(graph_paths)
    graph = open_graph(training, sources)
    sweep = known or Sweep(sweep_paths, new_record(config, training, graph_paths, graph))
    if config.keep_winner and not sweep.search.confirm:
        raise ConfigError("--keep_winner keeps a confirmed point's expert; --confirm 0 has none")
    how: dict[str, Any] = {"graph_paths": graph_paths, "training": training}
    opened = trial_scheduler(sweep_paths, sweep.record.skill, [graph], **how)
    with opened as (scheduler, confinement):
        if known:
            sweep = prolong(known, config.search, config.origins)
        else:
            create_sweep(sweep, graph_paths, graph)
        how = {"training": training, "confinement": confinement}
        run_trials(sweep, {"": graph}, scheduler, timeout=config.timeout, **how)
        if scheduler.stopped_on_request:
            return EXIT_RESUMABLE
        kept = graph if config.keep_winner else None
        return _conclude(sweep, graph_paths, training, keep_in=kept)


def _conclude(
    sweep: Sweep, graph_paths: GraphPaths, training: BottomUpConfig, *, keep_in: SkillGraph | None
) -> int:
    """Compare the best points with the default, and print what came of the sweep.

    With `keep_in`, the skills of the graph, the expert of a winner is kept there.

    Exit code 0 if a trial has a score, 85 if trials are left, 1 if all have failed.
    """
    tried, _ = read_trials(sweep)
    if any(each.outcome is None for each in tried) or next_trial(sweep, tried, number=0):
        sys.stdout.write(f"{progress_line(sweep, tried)}; the same command goes on\n")
        return EXIT_RESUMABLE
    outcome, said = read_outcome(sweep), []
    if outcome is None and sweep.search.confirm:
        success = success_in_fresh_worlds(sweep, tried, how=training.launch.sandbox)
        outcome = decide(sweep, tried, success)
        said.append(apply_winner(graph_paths, sweep, outcome))
        records.write(sweep.sweep_paths.outcome_json, outcome)
    publish(sweep)
    if outcome and keep_in:
        said.append(keep_winner(graph_paths, sweep, outcome, config=training, skills=keep_in))
    sys.stdout.write("\n".join([show(sweep), *said, ""]))
    return 0 if any(each.score is not None for each in tried) else 1


@dataclass(frozen=True, kw_only=True)
class OneSweepCommand(GraphCommand):
    """The flags of a command about a sweep that is there."""

    skill: str | None = None
    """The skill that is tuned; its sweep has its name, unless --name says another."""
    name: Word | None = None
    """Name of the sweep, below sweeps/ in the graph's folder."""

    def _open(self) -> Sweep:
        graph_paths = GraphPaths(self.graph_path)
        if self.name is None and self.skill is None:
            raise ConfigError(f"name the sweep by --name or its --skill{begun(graph_paths)}")
        sweep_paths = _paths(graph_paths, self.name, self.skill)
        if not sweep_paths.sweep_json.exists():
            near = begun(graph_paths, sweep_paths.root.name)
            raise ConfigError(f"{sweep_paths.root} is no sweep{near}")
        return open_sweep(sweep_paths)


@dataclass(frozen=True, kw_only=True)
class SweepStatusCommand(OneSweepCommand):
    """Show how far a sweep is, with a line for each trial.

    Examples:
      flowrl sweep status exp/demo --name Collect_Drink
    """

    def __call__(self) -> int:
        """Print the trials, the best first."""
        sys.stdout.write(f"{show(self._open())}\n")
        return 0


@dataclass(frozen=True, kw_only=True)
class SweepApplyCommand(OneSweepCommand):
    """Make the point that a sweep confirmed the skill's settings again.

    Examples:
      flowrl sweep apply exp/demo --name Collect_Drink
    """

    def __call__(self) -> int:
        """Write the settings; raises ConfigError if no point is confirmed yet, or none will be."""
        sweep = self._open()
        outcome = read_outcome(sweep)
        if not sweep.search.confirm:
            raise ConfigError(f"{sweep.sweep_paths.root} has --confirm 0 and confirms no point")
        if outcome is None:
            raise ConfigError(
                f"{sweep.sweep_paths.root} has not confirmed a point yet; let it go on"
            )
        sys.stdout.write(f"{apply_winner(GraphPaths(self.graph_path), sweep, outcome)}\n")
        return 0


@dataclass(frozen=True, kw_only=True)
class SweepForgetCommand(OneSweepCommand):
    """Remove the settings that a sweep has found for its skill.

    Examples:
      flowrl sweep forget exp/demo --name Collect_Drink
    """

    def __call__(self) -> int:
        """Remove the file of settings, if it is there."""
        said = forget(GraphPaths(self.graph_path), self._open().record.skill)
        sys.stdout.write(f"{said}\n")
        return 0


def _paths(graph_paths: GraphPaths, name: str | None, skill: str | None) -> SweepPaths:
    """The folder of a sweep by its name, or by that of its skill."""
    return SweepPaths(graph_paths.sweeps / (name or slug(skill or "")))
