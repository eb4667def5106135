"""The backend of real training: makes run folders and trainers' command lines, merges results."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from flowrl import config as configs
from flowrl import storage
from flowrl.arguments import other_flags
from flowrl.config import ENGINES, BottomUpConfig, GraphConfig, LaunchConfig, PPOConfig
from flowrl.errors import ConfigError, FileRefusedError, is_transient
from flowrl.experts.array_check import start_reader
from flowrl.experts.merge import MERGE_RULES, MergeRule, eval_gate
from flowrl.experts.store import ExpertStore
from flowrl.launchers import sandbox
from flowrl.launchers.base import Job
from flowrl.launchers.claims import remove_claim
from flowrl.launchers.run_status import lock_held, request_stop
from flowrl.measures.objectives import EPISODE_MEASURES, parse_objective
from flowrl.parallel import comparisons
from flowrl.parallel.events import RunRequest
from flowrl.parallel.skill_sources import SkillConfig, for_skill
from flowrl.parallel.training_processor import EARLY, archive_run, merge_run
from flowrl.parallel.training_setup import (
    PreparedRun,
    clear_for_launch,
    fail_run,
    live_runs,
    prepare_training_run,
    read_own_run,
)
from flowrl.paths import GraphPaths, RunPaths, session_name
from flowrl.runs import RunResult, TrainingRun, read_result, read_run, threads_for
from flowrl.skills.graph import SkillGraph
from flowrl.storage import records

logger = logging.getLogger(__name__)
_MORE = "flowrl train-more"  # the origin of the steps that it asked for
_OF_BUDGET = ("total_timesteps", "average_every", "grad_sync_period")  # what is left changes them
# A run that takes longer hangs, although it reports progress; --run_timeout overrules this.
_LEAST_LIMIT_SECONDS, _SLOWEST_STEPS_PER_SECOND = 86_400.0, 100.0


def merge_rule(graph: GraphConfig) -> MergeRule:
    """Return the merge rule of the flags; ConfigError if no episode can be scored by it."""
    if objective := graph.merge_objective:
        parse_objective(objective, measured=EPISODE_MEASURES)
        return partial(eval_gate, objective=objective)
    return MERGE_RULES[graph.merge_policy]


class TrainingBackend:
    """Prepares, reopens, merges and discards the runs of one graph; a `Backend`.

    `devices` gives the number of runs that share each device (default: `skills_per_gpu`),
    `confinement` how skill code is confined (default: as `--sandbox` says), `skills` how each skill
    is trained (default: all as the flags say).
    """

    def __init__(
        self,
        graph_paths: GraphPaths,
        config: BottomUpConfig,
        graph: SkillGraph,
        *,
        devices: Mapping[str, int] | None = None,
        confinement: sandbox.Confinement | None = None,
        skills: Mapping[str, SkillConfig] | None = None,
    ) -> None:
        self._graph_paths = graph_paths
        self._config = config
        self.graph = graph  # may grow while the scheduler runs
        self.skills = skills or {}
        self.confinement = confinement or sandbox.confinement(
            config.launch.sandbox, graph_paths.root
        )
        self._devices = devices or {}
        most = config.schedule.max_parallel_skills
        self._side_by_side = min(most, config.graph.max_nodes or most)  # runs that share the CPUs
        self._pinned: dict[Path, tuple[int, ...]] = {}  # run folder → CPUs
        # Raises now what would make every launch fail.
        sandbox.child_env(("0",), passed=config.launch.pass_env)
        self._store = ExpertStore(graph_paths)
        self._compared: set[str] = set()  # runs whose settings were compared with this start's
        self._rule = merge_rule(config.graph)

    def merge_while(self, still_ours: Callable[[], object]) -> None:
        """Ask `still_ours` before each merge counts: it raises an error once others may merge."""
        self._store = ExpertStore(self._graph_paths, still_ours)

    def share_cpus(self, side_by_side: int) -> None:
        """Launch runs from now on as if so many share the CPUs."""
        self._side_by_side = side_by_side

    def prepare(self, request: RunRequest) -> Job:
        """Make a run folder from the experts that count now, and write config.json, its flags."""
        config, trained, goal, asked = self._within_budget(request), self._trained(), 0.0, {}
        if request.more_frames or request.spent:
            asked["total_timesteps"] = _MORE if request.more_frames else EARLY
        early = self._config.analyse_at
        if request.skill not in trained and 0 < early < config.success_state_rate:
            goal = config.success_state_rate
            config = dataclasses.replace(config, success_state_rate=early)
            asked["success_state_rate"] = EARLY
        prepared = prepare_training_run(
            graph_paths=self._graph_paths,
            graph=self.graph,
            skill=request.skill,
            expert=request.expert,
            attempt=request.attempt,
            completed=trained,
            config=config,
            origins={**self._of(request.skill).origins, **asked},
            init_from=self._config.graph.init_from,
            anew=request.anew,
            goal=goal,
        )
        records.write(self._graph_paths.config_json, configs.to_json(self._config))
        return self.job_of(prepared, request)

    def resume(self, request: RunRequest) -> Job:
        """Make the run ready to continue from its last checkpoint, with its own configuration."""
        prepared = self._open(request)
        clear_for_launch(prepared.run_paths)
        return self.job_of(prepared, request)

    def reopen(self, request: RunRequest) -> Job | None:
        """The job of a run whose folder stays as it is; None without the folder.

        It keeps its own settings; a warning says which ones this start would give it. A process
        is asked to end if its run has no whole record, or settings that this version refuses: its
        result could not be merged.
        """
        run_paths = self._graph_paths.run(request.expert, request.skill)
        try:
            prepared = self._found(request)
            if prepared.run.run_id == request.run_id:
                _check_settings(prepared)
        except FileRefusedError as error:
            if not is_transient(error) and lock_held(run_paths.folder):
                request_stop(run_paths.folder.resolve())
                remove_claim(run_paths.folder)  # nobody asks an engine how such a run ended
            if run_paths.run_json.exists():
                raise
            return None
        if prepared.run.run_id != request.run_id:
            return None
        self._say_other_settings(prepared.run)
        return self.job_of(prepared, request)

    def merge(self, request: RunRequest) -> Mapping[str, Any]:
        """Merge the run's experts into the global checkpoint, exactly once."""
        return merge_run(
            self._store,
            self._graph_paths.run(request.expert, request.skill),
            request.skill,
            accounting=self._config.ppo.frame_accounting,
            rule=self._rule,
            confinement=self.confinement,
        )

    def archived_result(self, request: RunRequest) -> RunResult | None:
        """The result of a run that was merged by hand, or after the state was last saved."""
        run_paths = self._graph_paths.archive(request.expert, request.skill)
        try:
            run, result = read_run(run_paths), read_result(run_paths)
        except FileRefusedError:
            return None
        merged = request.run_id in self._store.manifest().merged
        return result if merged and run.run_id == request.run_id else None

    def archive(self, request: RunRequest) -> None:
        """Archive a merged run's records and remove its folder, if it still exists."""
        start_reader()  # for the next merge; the dependants of this one run already
        with suppress(FileRefusedError):  # the folder is gone, or another attempt's
            archive_run(self._graph_paths, self._open(request).run_paths)
        storage.remove_leftovers(self._graph_paths.training_runs)  # of a removal that met an error

    def discard(self, request: RunRequest) -> Path | None:
        """Move a failed attempt's folder to `training_runs/failed/`."""
        if request.run_id:
            comparisons.clear(self._graph_paths.comparisons / request.run_id)
        return fail_run(self._graph_paths, request.expert, request.skill)

    def _found(self, request: RunRequest) -> PreparedRun:
        """The folder in which the skill is trained now, whichever run it is of."""
        run_paths = self._graph_paths.run(request.expert, request.skill)
        return PreparedRun(run_paths=run_paths, run=read_own_run(run_paths, request.skill))

    def _open(self, request: RunRequest) -> PreparedRun:
        """The run's folder; FileRefusedError if it is gone or of another attempt."""
        prepared = self._found(request)
        if prepared.run.run_id != request.run_id:
            raise FileRefusedError(f"{request.skill}: run {request.run_id} has no folder any more")
        return prepared

    def job_of(self, prepared: PreparedRun, request: RunRequest) -> Job:
        """The job that trains a prepared run."""
        env = self._env(request)
        config = configs.from_json(PPOConfig, prepared.run.config)
        module = ("--module_path", str(prepared.run_paths.module.resolve()))
        launch = self._of_launch(config, request, env)
        return Job(
            name=session_name(request.expert, request.skill),
            run_id=prepared.run.run_id,
            argv=(sys.executable, "-m", "flowrl.ppo_flow", *module, *launch),
            env=env,
            cwd=Path.cwd(),
            folder=prepared.run_folder.resolve(),
            results=(prepared.run_paths.result_json.name,),
            cpus=() if request.devices else self._cpus(prepared.run_folder),
            num_cpus=self._of(request.skill).launch.cpus_per_run,
            num_nodes=self._config.launch.nodes_per_run,
            engine_words=self._of(request.skill).launch.slurm_args,
            sandbox=self.confinement.around(
                RunPaths(prepared.run_folder.resolve(), prepared.run.expert),
                cwd=Path.cwd(),
                env=env,
                cache=sandbox.compile_cache(config.compile_cache, env).absolute(),
            ),
            limit_seconds=_LEAST_LIMIT_SECONDS + config.total_timesteps / _SLOWEST_STEPS_PER_SECOND,
            limits=_limits(self._config.launch),
            passed=self._config.launch.pass_env,
        )

    def _env(self, request: RunRequest) -> dict[str, str]:
        passed = self._config.launch.pass_env
        neighbours = self._neighbours(request)
        env = sandbox.child_env(request.devices, skills_per_gpu=neighbours, passed=passed)
        if _asks_for_gpus(self._of(request.skill).launch) and "JAX_PLATFORMS" not in os.environ:
            del env["JAX_PLATFORMS"]  # of a machine without them
        return sandbox.confined_env(env, passed) if self.confinement.program else env

    def _neighbours(self, request: RunRequest) -> int:
        if request.alone:
            return 1
        most = self._config.launch.skills_per_gpu or 1
        return max((self._devices.get(name, most) for name in request.devices), default=1)

    def _of_launch(
        self, config: PPOConfig, request: RunRequest, env: Mapping[str, str]
    ) -> tuple[str, ...]:
        """The devices and threads that this launch gives to a run; run.json says all else."""
        number = len(request.devices) or self._config.ppo.num_devices
        words = (f"--num_devices={number}",)
        if (nodes := self._config.launch.nodes_per_run) > 1:
            words = (f"--num_devices={max(number, nodes)}", f"--num_processes={nodes}")
        if config.acting_threads is not None or env.get("JAX_PLATFORMS") != "cpu":
            return words
        free = len(os.sched_getaffinity(0)) // self._side_by_side
        launch = self._of(request.skill).launch
        if launch.launcher in ENGINES:
            free = 1  # what an engine gives without being asked
        cpus = (launch.cpus_per_run or free) // config.replicas
        devices = number or sandbox.host_devices(env)
        trainer = dataclasses.replace(config, num_devices=devices).of_replica()
        return (*words, f"--acting_threads={threads_for(trainer, cpus)}")

    def _cpus(self, folder: Path) -> tuple[int, ...]:
        """The CPUs that only this run uses; () if all runs share all CPUs."""
        width = self._config.launch.cpus_per_run
        if not width or self._config.launch.launcher in ENGINES:
            return ()
        live = {run_paths.folder: run_paths for run_paths in live_runs(self._graph_paths)}
        others = {path: _cpus_in_use(live[path]) for path in live.keys() - {folder}}
        self._pinned = {path: cpus for path, cpus in self._pinned.items() if path in live}
        self._pinned = others | self._pinned
        if folder not in self._pinned:
            taken = {cpu for cpus in self._pinned.values() for cpu in cpus}
            free = [cpu for cpu in sorted(os.sched_getaffinity(0)) if cpu not in taken]
            self._pinned[folder] = tuple(free[:width])
        return self._pinned[folder]

    def _say_other_settings(self, run: TrainingRun) -> None:
        """Warn once of a run that goes on with other settings than those of this start."""
        if run.run_id in self._compared:
            return
        self._compared.add(run.run_id)
        now = configs.to_json(self._of(run.skill).ppo)
        own = configs.to_json(configs.from_json(PPOConfig, run.config))
        limited = self._config.schedule.skill_timesteps_budget is not None
        free = _OF_BUDGET if limited or run.origins.get("total_timesteps") == _MORE else ()
        free = (*free, *(n for n, origin in run.origins.items() if origin == EARLY))
        if said := " and ".join(other_flags(own, {n: now[n] for n in now if n not in free})):
            why = "its run goes on as it was begun"
            logger.warning("%s: %s, with %s; its next run has the new flags", run.skill, why, said)

    def _trained(self) -> dict[str, int]:
        experts = self._store.manifest().experts
        return {version.skill: index for index, version in experts.items()}

    def _of(self, skill: str) -> SkillConfig:
        return self.skills.get(skill) or for_skill(self._config, of_file={}, of_toml={})

    def _within_budget(self, request: RunRequest) -> PPOConfig:
        config, left = self._of(request.skill).ppo, request.frames_left
        frames = request.more_frames or config.total_timesteps
        most = frames if left is None else min(frames, left)
        most -= request.spent if request.spent < most else 0
        config = dataclasses.replace(config, total_timesteps=most)
        updates = -(-most // (config.num_envs * config.num_steps))
        if config.replicas > 1 and updates < config.average_every:  # less than a round is left
            return dataclasses.replace(config, average_every=updates, grad_sync_period=1)
        return config


def _check_settings(prepared: PreparedRun) -> None:
    """Raise FileRefusedError if this version of flowrl refuses the settings of a run."""
    try:
        configs.from_json(PPOConfig, prepared.run.config)
    except ConfigError as error:
        raise FileRefusedError(
            f"{prepared.run_paths.run_json} has settings that this flowrl refuses: {error}"
        ) from error


def _asks_for_gpus(launch: LaunchConfig) -> bool:
    """Return whether an engine is asked for GPUs."""
    words = (*launch.slurm_args, *launch.ray_resources)
    return any(word.startswith(("gres=gpu", "gpus", "GPU=")) for word in words)


def _limits(launch: LaunchConfig) -> dict[str, int]:
    """The limits of a run that were given, by flag."""
    limits = {
        "run_memory": launch.run_memory,
        "run_disk": launch.run_disk,
        "run_processes": launch.run_processes,
    }
    return {name: limit for name, limit in limits.items() if limit}


def _cpus_in_use(run_paths: RunPaths) -> tuple[int, ...]:
    """The CPUs of a run that an earlier scheduler has launched."""
    if not lock_held(run_paths.folder):
        return ()
    try:
        cpus = storage.read_json(run_paths.spec_json).get("cpus")
    except FileRefusedError:  # its trainer may have changed it
        return ()
    return tuple(cpu for cpu in cpus if isinstance(cpu, int)) if isinstance(cpus, list) else ()
