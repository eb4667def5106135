"""Train a graph of skills side by side: `python -m flowrl.bottomup_parallel --help`.

`Flow` chooses the next skill. `SkillScheduler` waits until the skills that it needs are completed.
`TrainingBackend` makes its run folder, the launcher starts its trainer in a session, and when the
run has ended the backend merges its experts into the global checkpoint. `Feeder` then asks the
flow for the skills that this has made possible.
"""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flowrl import config as configs
from flowrl import console, notices, storage
from flowrl.commands.status import training_screen
from flowrl.config import BottomUpConfig, GraphConfig, LaunchConfig, ScheduleConfig
from flowrl.errors import (
    EXIT_RESUMABLE,
    ConfigError,
    FileRefusedError,
    GraphError,
    SkillError,
    classify_io_error,
    format_error,
)
from flowrl.experts.store import ExpertStore
from flowrl.launchers import sandbox
from flowrl.launchers.gpus import Device, check_devices, slots, visible_devices
from flowrl.launchers.launcher import Launcher
from flowrl.launchers.local import LocalLauncher
from flowrl.launchers.tmux import TmuxLauncher
from flowrl.llm.flow import Flow, skills_towards
from flowrl.measures.convergence import learning_progress
from flowrl.measures.objectives import Curve, read_curve
from flowrl.parallel.events import Verb
from flowrl.parallel.recovery import known_skills
from flowrl.parallel.requests import send_request
from flowrl.parallel.scaling import NOTICE, Scaling
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.parallel.skill_sources import (
    SkillConfig,
    SkillSources,
    check_graph_record,
    open_graph,
    record_graph,
    skill_configs,
)
from flowrl.parallel.status import (
    CANCELLED,
    NOT_ASKED_FOR,
    Blocked,
    Completed,
    Entry,
    Failed,
    Held,
    Waiting,
    percent,
)
from flowrl.parallel.training_backend import TrainingBackend, merge_rule
from flowrl.parallel.training_processor import recover_graph
from flowrl.parallel.training_setup import expert_of
from flowrl.paths import GraphPaths, RunPaths
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import Skill
from flowrl.skills.validation.cache import ApprovalStore
from flowrl.skills.validation.dry_run import SkillCode, approve_skills, keep_approvals

PROGRAM = "python -m flowrl.bottomup_parallel"
_TRIED = 100  # of a skill's priority, which one that was tried loses unless it learns
CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


@dataclass(frozen=True, kw_only=True)
class SequentialConfig(BottomUpConfig):
    """Train a graph of skills one after another, without tmux.

    Examples:
      flowrl sequential exp/demo --max_nodes 3
    """

    graph: GraphConfig = GraphConfig(graph_path=Path("exp/bottom_up"))
    schedule: ScheduleConfig = ScheduleConfig(max_parallel_skills=1)
    launch: LaunchConfig = LaunchConfig(launcher="local")

    def problems(self) -> Iterator[str]:
        """Check whether more than one run is wanted at a time."""
        here = "here one skill is trained after another"
        if (runs := self.schedule.max_parallel_skills) > 1:
            yield f"--max_parallel_skills {runs} is for flowrl train; {here}"
        if self.schedule.auto_scaling:
            yield f"--auto_scaling is for flowrl train; {here}"


def train_graph(config: BottomUpConfig) -> int:
    """Train until every skill has ended, or `flowrl stop`; returns the exit code."""
    layout = GraphPaths(config.graph.graph_path)
    check_graph_record(layout, config.ppo)
    merge_rule(config.graph)  # refused now, or never
    devices = device_slots(config)
    sources = SkillSources(layout)
    graph = open_graph(config, sources)
    skills = skill_configs(config, graph.skills)
    if config.graph.init_from is not None:
        expert_of(ExpertStore(layout), config.graph.init_from)  # refused now, too
    confinement = sandbox.confinement(
        config.launch.sandbox, layout.root, network_wanted=config.ppo.use_wandb
    )
    target, most = config.graph.target_skill, config.graph.max_nodes
    for name in skills_towards(graph, target=target, max_nodes=most):
        graph.plan(name)  # now, not when it is its turn
    approvals = approve_skills(
        layout,
        graph.skills.values(),
        config.ppo.env_name,
        trust=config.graph.trust_skills,
        confine=confinement.in_folder,
    )
    check_machine(config)
    refuse_shared_folder(layout.root, trust=config.graph.trust_folder)
    scheduler = open_scheduler(layout, config, open_launcher(config.launch), devices)
    screen = training_screen(layout, console.ERRORS)
    with scheduler, screen:  # nothing in the folder has changed before this line

        def set_up() -> None:
            keep_approvals(layout, approvals)
            recover_graph(layout)
            scheduler.add_skills(known_skills(layout, graph, scheduler.state))
            record_graph(layout, config.ppo)
            notices.withdraw(layout, NOTICE)  # an earlier start's
            if config.command:
                notices.publish(layout, "command", config.command)
            notices.publish(layout, sandbox.NOTICE, confinement.said)

        scheduler.when_there_is_room(set_up)
        backend = TrainingBackend(
            layout, config, graph, devices=devices, confinement=confinement, skills=skills
        )
        flow = Flow(
            graph,
            known=scheduler.state.entries,
            target=target,
            max_nodes=most,
            added=sources.added - _cancelled_skills(scheduler),
        )
        feeder = Feeder(flow, sources, scheduler, config, skills=skills)
        scheduler.set_callbacks(
            backend=backend,
            on_skill_complete=feeder.on_skill_complete,
            on_skill_failed=feeder.on_skill_failed,
            on_add=partial(add_skill, backend, feeder),
        )
        if config.schedule.auto_scaling:
            scheduler.set_callbacks(on_tick=Scaling(scheduler, backend.share_cpus).look)
        scheduler.when_there_is_room(feeder.begin)
        scheduler.run()
        scheduler.when_there_is_room(feeder.add_blocked_skills)
        code = feeder.exit_code()
        scheduler.close()  # so that the last screen says how to go on
        return code


def _cancelled_skills(scheduler: SkillScheduler) -> set[str]:
    """The skills that a user has given up."""
    ended = {name: entry.status for name, entry in scheduler.state.entries.items()}
    return {n for n, one in ended.items() if isinstance(one, Failed) and one.why == CANCELLED}


def add_skill(backend: TrainingBackend, feeder: Feeder, name: str) -> None:
    """Add a skill that `flowrl add` has kept to a graph in training; twice is once.

    Raises:
      GraphError: no such skill is kept, or it does not go into the graph.
      SkillError: its code has no approval.
      ConfigError: its training cannot be as it says.
    """
    if name not in backend.graph.skills:
        graph = backend.graph.plus(feeder.kept_skills(name, backend.graph.skills))
        backend.skills = feeder.skills = skill_configs(feeder.config, graph.skills)
        backend.graph = graph
    feeder.add(backend.graph, name)


def check_machine(config: BottomUpConfig) -> None:
    """Make sure that no run will lack a folder or a package.

    Raises:
      ConfigError: names the flag and the remedy.
      OSError: the disk is full.
    """
    if config.ppo.use_wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError("--use_wandb needs wandb: pip install '.[wandb]' in flowrl's folder")
    cache = sandbox.compile_cache(config.ppo.compile_cache, os.environ)
    for flag, folder in (("compile_cache", cache), ("graph_path", config.graph.graph_path)):
        try:
            storage.make_dir(folder)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            if classify_io_error(error) == "disk":
                if folder.is_dir():
                    continue  # the scheduler waits for room
                raise
            raise ConfigError(
                f"--{flag} {folder} cannot be written ({format_error(error)}); choose another"
            ) from error


def refuse_shared_folder(folder: Path, *, trust: bool) -> None:
    """Make sure that nobody else may change the graph.

    Raises:
      ConfigError: the folder is another user's, or everybody may write to it.
    """
    found = folder.stat()
    others = found.st_uid != os.geteuid() or found.st_mode & stat.S_IWOTH
    if others and not trust:
        raise ConfigError(
            f"--graph_path {folder} is user {found.st_uid}'s with mode {found.st_mode & 0o777:o}: "
            "others could change what is trained; chown it or chmod o-w it, or use --trust_folder"
        )


class Feeder:
    """Adds the flow's skills to the scheduler, and reports to the flow how they ended."""

    def __init__(
        self,
        flow: Flow,
        sources: SkillSources,
        scheduler: SkillScheduler,
        config: BottomUpConfig,
        *,
        skills: Mapping[str, SkillConfig],
    ) -> None:
        self.skills = skills
        self._flow = flow
        self._sources = sources
        self._scheduler = scheduler
        self.config = config

    def begin(self) -> None:
        """Take up the state and add the first skills; may be called again after a full disk."""
        count = len(self._flow.requested)
        goal = percent(self.config.ppo.success_state_rate)
        how = ", added one by one" if count > 1 else ""
        text = f"skills asked for: {count}{how}; goal: {goal} success in training"
        if not self.config.schedule.auto_scaling:  # which has a notice of its own
            text += f"; slots: {self.config.schedule.max_parallel_skills}"
        notices.publish(self._scheduler.layout, "requested", text)
        self.take_up_state()
        self.add_next_skills()

    def add_next_skills(self) -> None:
        """Add skills until the frontier is blocked: the next one needs a skill in training."""
        while not self._flow.check_frontier_blocked() and (skill := self._flow.next_skill()):
            self._add(*skill)

    def on_skill_complete(self, skill: str) -> None:
        """Add the skills that were waiting for this one; its expert is merged."""
        self._flow.on_skill_complete(skill)
        self.add_next_skills()
        self._prefer_learners()

    def on_skill_failed(self, skill: str) -> None:
        """Add the skills that do not need this one, which is given up."""
        self._flow.on_skill_failed(skill)
        self.add_next_skills()
        self._prefer_learners()

    def kept_skills(self, name: str, graph: Collection[str]) -> list[Skill]:
        """The approved skills that are kept and not in the graph: `name`, and what it may need.

        Raises:
          GraphError, SkillError: as `add_skill`.
        """
        kept = self._sources.recorded()
        if name not in kept:
            raise GraphError(f"no skill {name!r} is kept with the graph; use flowrl add GRAPH FILE")
        store, game = ApprovalStore(self._scheduler.layout.approvals), self.config.ppo.env_name
        new = [skill for skill in kept.values() if skill.name not in graph]
        approved = [skill for skill in new if store.find(SkillCode.of(skill, game).digest)]
        if kept[name] not in approved:
            raise SkillError(f"the code of {name!r} has no approval; use flowrl add GRAPH FILE")
        return approved

    def add(self, graph: SkillGraph, name: str) -> None:
        """Train one more skill of a graph that has grown, and what it needs."""
        for each in self._flow.add(graph, name):
            self._add(each, graph.skills[each])
        for each in (*graph.all_needs(name), name):
            match self._scheduler.state.entries[each].status:
                case Held(why=why) if why == NOT_ASKED_FOR:
                    self._scheduler.retry(each)
                case _:
                    pass

    def take_up_state(self) -> None:
        """Report what ended before this start, and hold skills that were not requested now."""
        for entry in list(self._scheduler.state.entries.values()):
            requested = entry.skill in self._flow.requested
            match entry.status:
                case Completed() as done:
                    self._flow.on_skill_complete(entry.skill)
                    if requested:
                        self._train_more(entry, done)
                case Held(why=why) if requested and why == NOT_ASKED_FOR:
                    self._scheduler.retry(entry.skill)
                case Waiting() | Blocked() if not requested and entry.trained is None:
                    self._scheduler.hold(entry.skill, NOT_ASKED_FOR)
                    self._flow.on_skill_failed(entry.skill)
                case Failed() | Held() | Blocked():
                    self._flow.on_skill_failed(entry.skill)
                case _:
                    pass

    def add_blocked_skills(self) -> None:
        """Add the skills that can no longer start, so that `flowrl status` names them."""
        if not self._scheduler.stopped_on_request:
            while skill := self._flow.next_skill():
                self._add(*skill)

    def exit_code(self) -> int:
        """0 if all requested skills are completed, else 1; 85 if `flowrl stop` left any to train.

        What is held or blocked is not left: the same command would not train it. With `--strict`,
        a skill below its goal does not count as completed.
        """
        known = self._scheduler.state.entries
        entries = known.values()
        completed = {
            entry.skill
            for entry in entries
            if isinstance(entry.status, Completed)
            and not (self.config.graph.strict and entry.status.below_goal)
        }
        left = {entry.skill for entry in entries if isinstance(entry.status, Waiting)}
        left.update(name for name in self._flow.requested if name not in known)
        if self._scheduler.stopped_on_request and left:
            return EXIT_RESUMABLE
        return 0 if completed.issuperset(self._flow.requested) else 1

    def _prefer_learners(self) -> None:
        """With `--curriculum`, request priorities of tried skills by their learning progress."""
        layout = self._scheduler.layout
        for entry in list(self._scheduler.state.entries.values()):
            waits = isinstance(entry.status, Waiting) and entry.trained is None
            if not (self.config.schedule.curriculum and waits) or entry.expert is None:
                continue
            weight = self._flow.weight(entry.skill) - _TRIED
            found = round(
                _TRIED * learning_progress(_newest_curve(layout, entry.expert, entry.skill))
            )
            if entry.priority != weight + found:
                send_request(layout, Verb.PRIORITY, entry.skill, number=weight + found)

    def _train_more(self, entry: Entry, done: Completed) -> None:
        """Train a skill on that is below the goal, if that or the budget is larger than ever.

        A state that was made anew does not know them (0): nothing is larger than that.
        """
        ppo, most = self.skills[entry.skill].ppo, self.config.schedule.skill_timesteps_budget
        goal = ppo.success_state_rate
        budget = ppo.total_timesteps if most is None else min(ppo.total_timesteps, most)
        left = budget if most is None else min(budget, most - entry.frames_used)
        larger = 0 < done.goal < goal or 0 < done.budget < left
        if larger and done.success_rate < goal:
            self._scheduler.train_more(entry.skill, goal=goal, budget=budget)

    def _add(self, name: str, skill: Skill) -> None:
        """Add a skill; of those that are ready, the one that most others need starts first."""
        self._sources.record(skill)
        needs, weight = self._flow.dependencies(name), self._flow.weight(name)
        self._scheduler.add_skill(name, skill, needs, priority=weight)
        self._flow.on_skill_added(name)


def _newest_curve(layout: GraphPaths, expert: int, skill: str) -> Curve:
    """The curve of a skill's live run, else of its newest failed one; () if none can be read."""
    live = layout.run(expert, skill).folder
    failed = layout.failed_runs.glob(f"{live.name}.attempt*")
    for folder in (live, *sorted(failed, key=lambda path: path.stat().st_mtime, reverse=True)):
        with suppress(FileRefusedError):
            if curve := read_curve(RunPaths(folder, expert).metrics):
                return curve
    return ()


def device_slots(config: BottomUpConfig) -> dict[str, int]:
    """Return the number of runs of each GPU, by its id; {} is the CPU, also without JAX's plugin.

    Raises:
      ConfigError: there are no such GPUs, or too few, or JAX cannot use them.
    """
    launch = config.launch
    devices: tuple[Device, ...] = ()
    if any(map(importlib.util.find_spec, CUDA_PLUGINS)):
        devices = visible_devices(launch.gpu_ids)
    elif launch.gpu_ids:
        raise ConfigError("--gpu_ids needs JAX for CUDA: pip install '.[cuda]' in flowrl's folder")
    check_devices(devices, each=config.schedule.devices_per_run, wanted=config.ppo.num_devices)
    return slots(devices, most=launch.skills_per_gpu, memory_mb=launch.gpu_memory_mb)


def open_scheduler(
    layout: GraphPaths, config: BottomUpConfig, launcher: Launcher, devices: Mapping[str, int]
) -> SkillScheduler:
    """The scheduler of this graph."""
    return SkillScheduler(
        layout.root,
        launcher=launcher,
        devices=devices,
        pass_env=config.launch.pass_env,
        **configs.flags(config.schedule),
    )


def open_launcher(config: LaunchConfig) -> Launcher:
    """The launcher of `--launcher`: sessions in tmux, or plain processes.

    Raises:
      ConfigError: tmux is missing.
    """
    if config.launcher == "local":
        return LocalLauncher()
    launcher = TmuxLauncher(config.tmux_socket)
    launcher.check()
    return launcher


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    return console.run_program(PROGRAM, BottomUpConfig, train_graph, argv)


if __name__ == "__main__":
    sys.exit(main())
