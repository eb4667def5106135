"""The backend of real runs: a folder, a generated module, a trainer's command line."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowrl import config as configs
from flowrl import storage
from flowrl.config import BottomUpConfig, PPOConfig
from flowrl.errors import FileRefusedError
from flowrl.experts.array_check import start_reader
from flowrl.experts.merge import MERGE_RULES
from flowrl.experts.store import ExpertStore
from flowrl.launchers import sandbox
from flowrl.launchers.environment import child_env
from flowrl.launchers.files import lock_held
from flowrl.launchers.job import Job
from flowrl.parallel import comparisons
from flowrl.parallel.events import RunRequest
from flowrl.parallel.run_folder import PreparedRun, fail_run, live_runs, resume_training_run
from flowrl.parallel.training_processor import archive_run, merge_run
from flowrl.parallel.training_setup import prepare_training_run
from flowrl.paths import GraphPaths, RunPaths, session_name
from flowrl.runs import read_run
from flowrl.skills.graph import SkillGraph


class TrainingBackend:
    """Makes, reopens, merges and discards the runs of one graph; a `Backend`.

    `graph` is asked anew for every run, since skills may be added while others train. `runs_on`
    says how many runs share a device (default: `skills_per_gpu`).
    """

    def __init__(
        self,
        layout: GraphPaths,
        config: BottomUpConfig,
        graph: Callable[[], SkillGraph],
        *,
        runs_on: Callable[[str], int] | None = None,
    ) -> None:
        self._layout = layout
        self._config = config
        self._graph = graph
        self._runs_on = runs_on or (lambda _: config.skills_per_gpu or 1)
        # Refuses at once what no run could be started with.
        child_env("0", passed=config.pass_env)
        self.confinement = sandbox.confinement(
            config.sandbox, layout.root, network_wanted=config.use_wandb
        )
        self._store = ExpertStore(layout)
        self._pinned: dict[Path, tuple[int, ...]] = {}  # run folder → CPUs

    def prepare(self, task: RunRequest) -> Job:
        """Make a new run folder from the experts that are merged by now."""
        prepared = prepare_training_run(
            layout=self._layout,
            graph=self._graph(),
            skill=task.skill,
            expert=task.expert,
            attempt=task.attempt,
            completed=self._trained(),
            config=self._within_budget(task.frames_left),
        )
        return self._job(prepared, task)

    def resume(self, task: RunRequest) -> Job:
        """Make the run ready to go on from its last checkpoint, with the flags it began with."""
        return self._job(self._own(resume_training_run, task), task)

    def reopen(self, task: RunRequest) -> Job | None:
        """The run's job again, its folder untouched; None when it is not there."""
        try:
            return self._job(self._own(_as_it_is, task), task)
        except FileRefusedError:
            return None

    def merge(self, task: RunRequest) -> Mapping[str, Any]:
        """Merge the run's experts into the global checkpoint, once."""
        return merge_run(
            self._layout,
            self._layout.run(task.expert, task.skill),
            task.skill,
            accounting=self._config.frame_accounting,
            rule=MERGE_RULES[self._config.merge_policy],
        )

    def archive(self, task: RunRequest) -> None:
        """Archive a merged run's records and remove its folder, if it is still there."""
        with suppress(FileRefusedError):  # another attempt's folder is there by now
            archive_run(self._layout, self._own(_as_it_is, task).layout, task.skill)

    def discard(self, task: RunRequest) -> Path | None:
        """Move a failed attempt's folder aside, for reading."""
        if task.run_id:
            comparisons.clear(self._layout, task.run_id)
        return fail_run(self._layout, task.expert, task.skill)

    def _own(
        self, find: Callable[[GraphPaths, int, str], PreparedRun], task: RunRequest
    ) -> PreparedRun:
        """The run's folder, provided that it is this run's and not another attempt's."""
        run = read_run(self._layout.run(task.expert, task.skill))
        if run.run_id != task.run_id:
            raise FileRefusedError(f"{task.skill}: run {task.run_id} has no folder any more")
        return find(self._layout, task.expert, task.skill)

    def _job(self, prepared: PreparedRun, task: RunRequest) -> Job:
        start_reader()  # for the run's end
        env = self._env(task)
        config = self._sharing_cpus(configs.from_json(PPOConfig, prepared.run.config), env)
        module = ("--module_path", str(prepared.module_path.resolve()))
        return Job(
            name=session_name(task.expert, task.skill),
            run_id=prepared.run.run_id,
            argv=(sys.executable, "-m", "flowrl.ppo_flow", *module, *configs.to_argv(config)),
            env=env,
            cwd=Path.cwd(),
            folder=prepared.run_folder.resolve(),
            cpus=self._cpus(prepared.run_folder) if task.device is None else (),
            sandbox=self.confinement.around(
                RunPaths(prepared.run_folder.resolve(), task.expert),
                cwd=Path.cwd(),
                env=env,
                cache=sandbox.cache_of(config.compile_cache, env),
            ),
            passed=self._config.pass_env,
        )

    def _env(self, task: RunRequest) -> dict[str, str]:
        passed = self._config.pass_env
        env = child_env(task.device, skills_per_gpu=self._neighbours(task), passed=passed)
        return sandbox.confined_env(env, passed) if self.confinement.program else env

    def _neighbours(self, task: RunRequest) -> int:
        return 1 if task.alone or task.device is None else self._runs_on(task.device)

    def _trained(self) -> dict[str, int]:
        experts = self._store.manifest().experts
        return {version.skill: index for index, version in experts.items()}

    def _within_budget(self, frames_left: int | None) -> BottomUpConfig:
        if frames_left is None or frames_left >= self._config.total_timesteps:
            return self._config
        return dataclasses.replace(self._config, total_timesteps=frames_left)

    def _sharing_cpus(self, config: PPOConfig, env: Mapping[str, str]) -> PPOConfig:
        """The configuration with no more threads than the run's share of the CPUs has room for."""
        if config.acting_threads is not None or env.get("JAX_PLATFORMS") != "cpu":
            return config
        own = self._config
        side_by_side = min(own.max_parallel_skills, own.max_nodes or own.max_parallel_skills)
        cpus = own.cpus_per_run or len(os.sched_getaffinity(0)) // side_by_side
        threads = configs.threads_for(config.num_envs, cpus)
        return dataclasses.replace(config, acting_threads=threads)

    def _cpus(self, folder: Path) -> tuple[int, ...]:
        """The run's own CPUs, shared with no other run; () shares them all."""
        width = self._config.cpus_per_run
        if not width:
            return ()
        live = {place.folder: place for place in live_runs(self._layout)}
        for path in self._pinned.keys() - live.keys():
            del self._pinned[path]
        for path in live.keys() - self._pinned.keys() - {folder}:
            self._pinned[path] = _cpus_in_use(live[path])
        if folder not in self._pinned:
            taken = {cpu for cpus in self._pinned.values() for cpu in cpus}
            free = [cpu for cpu in sorted(os.sched_getaffinity(0)) if cpu not in taken]
            self._pinned[folder] = tuple(free[:width])
        return self._pinned[folder]


def _cpus_in_use(place: RunPaths) -> tuple[int, ...]:
    """The CPUs of a run that an earlier scheduler has launched."""
    if not lock_held(place.folder):
        return ()
    try:
        cpus = storage.read_json(place.spec_json).get("cpus")
    except FileRefusedError:  # its trainer may have spoilt it
        return ()
    return tuple(cpu for cpu in cpus if isinstance(cpu, int)) if isinstance(cpus, list) else ()


def _as_it_is(layout: GraphPaths, expert: int, skill: str) -> PreparedRun:
    place = layout.run(expert, skill)
    return PreparedRun(layout=place, run=read_run(place))
