"""A contest between texts of one skill: they are trained side by side and play in the same worlds.

It is a sweep whose trials are candidates. All have the same seed, frames and launcher, and differ
in their text. So it goes on after a kill as a sweep does.
"""

from __future__ import annotations

import functools
import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowrl import config as configs
from flowrl.config import BottomUpConfig
from flowrl.errors import EXIT_RESUMABLE, ConfigError, FlowrlError
from flowrl.experts.merge import wilson
from flowrl.launchers import sandbox
from flowrl.parallel.skill_sources import SkillConfig, skill_configs, trained_skills
from flowrl.parallel.start import check_machine, device_slots, open_scheduler, refuse_shared_folder
from flowrl.paths import GraphPaths, SweepPaths, slug
from flowrl.skills.graph import SkillGraph
from flowrl.skills.validation.dry_run import approve_skills, keep_approvals
from flowrl.storage import records
from flowrl.storage.records import Natural, Positive
from flowrl.tuning.outcome import EPISODES, keep_expert, successes_in_fresh_worlds
from flowrl.tuning.running import publish, run_trials
from flowrl.tuning.search import SearchConfig
from flowrl.tuning.start import OF_TRIALS
from flowrl.tuning.sweep import create_sweep, expert_number
from flowrl.tuning.trials import Candidate, Sweep, SweepRecord, open_sweep, read_trials


class ContestStoppedError(FlowrlError):
    """A contest is stopped before its end; the same command goes on with it."""

    exit_code = EXIT_RESUMABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The result of a candidate; one that failed twice has no `trial`, and `why`.

    `frames` are those of its run, which ends early at the goal.
    """

    label: str
    trial: Natural | None = None
    successes: Natural = 0
    episodes: Positive = EPISODES
    frames: Natural = 0
    why: str = ""

    @property
    def rate(self) -> float:
        """The share of its episodes in fresh worlds that succeeded."""
        return self.successes / self.episodes

    @property
    def low(self) -> float:
        """The lower bound of that share, by Wilson's interval."""
        return wilson(self.successes, self.episodes)[0]

    @property
    def facts(self) -> dict[str, Any]:
        """The row of a table, as JSON values."""
        low, high = wilson(self.successes, self.episodes) if self.trial is not None else (0.0, 0.0)
        told = {"success_rate": self.rate, "low": low, "high": high, "frames": self.frames}
        return {"candidate": self.label, **told, "why": self.why}

    @property
    def line(self) -> str:
        """The row of a table, for people."""
        if self.trial is None:
            return f"  {self.label}: {self.why}"
        low, high = wilson(self.successes, self.episodes)
        said = f"{self.rate:.1%} [{low:.1%}, {high:.1%}] success after {self.frames:,} frames"
        return f"  {self.label}: {said}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContestOutcome:
    """contest.json: the candidates, the best first, by lower bound, then by fewer frames."""

    standings: tuple[Standing, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """The rows of a table, for people."""
        return tuple(each.line for each in self.standings)

    def of(self, label: str) -> Standing:
        """The result of one candidate."""
        return next(each for each in self.standings if each.label == label)


@dataclass(frozen=True, kw_only=True)
class Contest:
    """Candidates of one skill: by its label, the graph that has each of them.

    `config` is how the graph was trained last, `frames` bounds each run, `most` the runs side by
    side.
    """

    graph_paths: GraphPaths
    config: BottomUpConfig
    skill: str
    graphs: Mapping[str, SkillGraph]
    frames: int
    most: int

    @functools.cached_property
    def paths(self) -> SweepPaths:
        """The folder, whose name is of all that the result depends on."""
        texts = [[label, graph.skills[self.skill].to_json()] for label, graph in self._all]
        told = [texts, [configs.to_json(each.ppo) for each in self._settings.values()]]
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]
        return SweepPaths(self.graph_paths.sweeps / f"texts_{slug(self.skill)}_{digest}")

    @functools.cached_property
    def training(self) -> BottomUpConfig:
        """The settings of all trials."""
        limits = {"max_parallel_skills": self.most, "auto_scaling": False}
        limits |= {"max_retries": 1, "scheduler_poll_interval": 2.0}
        return configs.with_flags(self.config, **OF_TRIALS, **limits)

    def missing(self) -> str:
        """Return the first skill without an expert that a candidate needs, "" if all have one."""
        merged = trained_skills(self.graph_paths)
        needs = (need for _, graph in self._all for need in graph.all_needs(self.skill))
        return next((need for need in needs if need not in merged), "")

    def keep_expert(self, best: Standing) -> bool:
        """Merge the winner's expert into the graph; raises and returns as `outcome.keep_expert`."""
        assert best.trial is not None
        graph, sweep = self.graphs[best.label], open_sweep(self.paths)
        kept: dict[str, Any] = {"config": self.training, "skills": graph}
        return keep_expert(self.graph_paths, sweep, best.trial, **kept)

    def goal(self, standing: Standing) -> float:
        """The success rate at which the run of a candidate ends."""
        return self._settings[standing.label].ppo.success_state_rate

    def run(self) -> ContestOutcome:
        """Train and measure the candidates; what is done already is not done again.

        Raises ContestStoppedError if a user stops it, else what a sweep raises: BusyError,
        ConfigError, SkillError, LaunchError.
        """
        if (place := self.paths.contest_json).exists():
            return records.read(place, ContestOutcome)
        if need := self.missing():
            train = self.graph_paths.command("train", "--target_skill", need)
            raise ConfigError(f"{self.skill} needs {need}, which has no expert yet; {train}")
        training, root = self.training, self.graph_paths.root
        confinement = sandbox.confinement(training.launch.sandbox, root)
        approvals = [
            approve_skills(
                self.graph_paths,
                [graph.skills[name] for name in (*graph.all_needs(self.skill), self.skill)],
                training.ppo.env_name,
                trust=training.graph.trust_skills,
                confine=confinement.in_folder,
            )
            for _, graph in self._all
        ]
        check_machine(root, training.ppo, training.launch)
        refuse_shared_folder(root, trust=training.graph.trust_folder)
        each, wanted = training.schedule.devices_per_run, training.ppo.num_devices
        devices = device_slots(training.launch, each=each, wanted=wanted)
        scheduler = open_scheduler(self.paths, training.schedule, training.launch, devices=devices)
        with scheduler:
            for granted in approvals:
                keep_approvals(self.paths, granted)
            known = self.paths.sweep_json.exists()
            sweep = open_sweep(self.paths) if known else Sweep(self.paths, self._record())
            if not known:
                create_sweep(sweep, self.graph_paths, *self.graphs.values())
            how: dict[str, Any] = {"training": training, "confinement": confinement}
            run_trials(sweep, self.graphs, scheduler, **how)
            return self._measured(sweep)

    @property
    def _all(self) -> list[tuple[str, SkillGraph]]:
        return list(self.graphs.items())

    @functools.cached_property
    def _settings(self) -> Mapping[str, SkillConfig]:
        """How each candidate is trained; ConfigError if its text says what makes no sense."""
        settings = {n: skill_configs(self.training, g.skills)[self.skill] for n, g in self._all}
        frames = {"total_timesteps": self.frames}
        return {
            name: SkillConfig(
                ppo=configs.with_flags(each.ppo, **frames), origins=each.origins, launch=each.launch
            )
            for name, each in settings.items()
        }

    def _record(self) -> SweepRecord:
        first, *_ = self._settings.values()
        candidates = tuple(
            Candidate(label=name, config=configs.to_json(each.ppo))
            for name, each in self._settings.items()
        )
        search = SearchConfig(method="grid", trials=len(candidates), confirm=0)
        return SweepRecord(
            sweep=secrets.token_hex(8),
            skill=self.skill,
            expert=expert_number(self.graph_paths, self.skill),
            flags=configs.to_json(search),
            space={},
            config=configs.to_json(first.ppo),
            origins=first.origins,
            starts=(),
            candidates=candidates,
        )

    def _measured(self, sweep: Sweep) -> ContestOutcome:
        """Let all experts play in the same worlds, and write down how they rank."""
        tried, _ = read_trials(sweep)
        last = {each.trial.candidate: each for each in tried}
        if last.keys() != self.graphs.keys() or any(each.outcome is None for each in tried):
            raise ContestStoppedError("stopped; the same command goes on")
        good = {name: one.trial.number for name, one in last.items() if one.score is not None}
        how = self.training.launch.sandbox
        counts = successes_in_fresh_worlds(sweep, [*good.values()], how=how)
        standings = []
        for name in self.graphs:
            ended = last[name].outcome
            assert ended
            won, trial = counts.get(good.get(name, -1), 0), good.get(name)
            facts: dict[str, Any] = {"trial": trial, "frames": ended.frames, "why": ended.why}
            standings.append(Standing(label=name, successes=won, **facts))
        standings.sort(key=lambda each: (each.trial is None, -each.low, each.frames))
        outcome = ContestOutcome(standings=tuple(standings))
        records.write(self.paths.contest_json, outcome)
        publish(sweep)
        return outcome
