"""The start of a scheduler: checks of machine and folder, the GPUs, the launcher."""

from __future__ import annotations

import importlib.util
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from flowrl import config as configs
from flowrl import storage
from flowrl.config import ENGINES, LaunchConfig, PPOConfig, ScheduleConfig
from flowrl.errors import ConfigError, classify_io_error, format_error, is_unanswered
from flowrl.games.base import check_extra, find_game
from flowrl.launchers import sandbox
from flowrl.launchers.claims import claim_of
from flowrl.launchers.gpus import Device, check_devices, slots, visible_devices
from flowrl.launchers.launcher import Launcher
from flowrl.launchers.local import LocalLauncher
from flowrl.launchers.ray import RayLauncher
from flowrl.launchers.slurm import SlurmLauncher
from flowrl.launchers.tmux import TmuxLauncher
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.parallel.training_setup import live_runs
from flowrl.paths import GraphPaths

_FOR_CUDA = "pip install '.[cuda]' in flowrl's folder"

CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def check_machine(graph_path: Path, ppo: PPOConfig, launch: LaunchConfig) -> None:
    """Raise ConfigError, with the remedy, if runs will lack a folder, a package or tmux.

    OSError means that the disk is full, or does not answer.
    """
    open_launcher(launch)
    if ppo.use_wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError("--use_wandb needs wandb: pip install '.[wandb]' in flowrl's folder")
    game = find_game(ppo.env_name)
    check_extra(game.name, *game.sources)
    cache = sandbox.compile_cache(ppo.compile_cache, os.environ)
    for flag, folder in (("compile_cache", cache), ("graph_path", graph_path)):
        try:
            storage.try_writing(folder)
        except OSError as error:
            if classify_io_error(error) == "disk":
                if folder.is_dir():
                    continue  # the scheduler waits for room
                raise
            if is_unanswered(error):
                raise
            raise ConfigError(
                f"--{flag} {folder} cannot be written ({format_error(error)}); choose another"
            ) from error
    storage.make_dir(cache)


def refuse_shared_folder(folder: Path, *, trust: bool) -> None:
    """Raise ConfigError if others may change the graph: it is another's, or all may write."""
    if not folder.exists():
        return
    status = folder.stat()
    others = status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH
    if others and not trust:
        raise ConfigError(
            f"--graph_path {folder} is user {status.st_uid}'s with mode "
            f"{status.st_mode & 0o777:o}: others could change what is trained; chown it or "
            "chmod o-w it, or use --trust_folder"
        )


def device_slots(launch: LaunchConfig, ppo: PPOConfig, *, each: int) -> dict[str, int]:
    """Return the number of runs of each GPU, by its id; {} is the CPU, also without JAX's plugin.

    A run has `each` GPUs; ConfigError: they are not there, or JAX cannot use them, or runs cannot
    share `--nodes_per_run`.
    """
    devices: tuple[Device, ...] = ()
    if launch.launcher in ENGINES:
        _check_nodes(launch, ppo)
        return {}  # its hosts have them, and it deals them out
    if any(map(importlib.util.find_spec, CUDA_PLUGINS)):
        devices = visible_devices(launch.gpu_ids)
    elif launch.gpu_ids:
        raise ConfigError(f"--gpu_ids needs JAX for CUDA: {_FOR_CUDA}")
    elif os.environ.get("JAX_PLATFORMS") == "cuda":
        why = "JAX_PLATFORMS is 'cuda', and this Python has no JAX for CUDA"
        raise ConfigError(f"{why}: unset it to train on the CPU, or {_FOR_CUDA}")
    shared = {"skills_per_gpu": launch.skills_per_gpu, "gpu_memory_mb": launch.gpu_memory_mb}
    if not devices and (given := [name for name, value in shared.items() if value]):
        raise ConfigError(f"--{given[0]} is for GPUs, and there is none; leave it out")
    if ppo.precision == "bf16" and not devices:
        raise ConfigError("--precision bf16 is for GPUs, a CPU is slower with it; leave it out")
    check_devices(devices, each=each, wanted=ppo.num_devices)
    cpus = len(os.sched_getaffinity(0))
    if launch.cpus_per_run > cpus and not devices:
        remedy = f"choose at most {cpus}, or 0 to share them"
        raise ConfigError(
            f"--cpus_per_run {launch.cpus_per_run}: only {cpus} can be used; {remedy}"
        )
    return slots(devices, most=launch.skills_per_gpu, memory_mb=launch.gpu_memory_mb)


def _check_nodes(launch: LaunchConfig, ppo: PPOConfig) -> None:
    """Raise ConfigError unless the nodes of a run can train it together."""
    nodes, flag = launch.nodes_per_run, f"--nodes_per_run {launch.nodes_per_run}"
    if nodes == 1:
        return
    if launch.sandbox != "none":
        raise ConfigError(f"{flag}: confined processes have no network; add --sandbox none")
    if ppo.replicas > 1:
        raise ConfigError(f"{flag} and --replicas {ppo.replicas} exclude each other; leave one out")
    if ppo.num_devices > 1 and ppo.num_devices % nodes:
        devices = f"--num_devices {ppo.num_devices}"
        raise ConfigError(f"{devices} cannot be shared evenly by {flag}; choose a multiple")


def open_scheduler(
    graph_paths: GraphPaths,
    schedule: ScheduleConfig,
    launch: LaunchConfig,
    *,
    devices: Mapping[str, int],
) -> SkillScheduler:
    """The scheduler of a graph or a sweep, with the launcher of `--launcher`.

    ConfigError: a run is another engine's job, of which that launcher could not know the end.
    """
    for run_paths in live_runs(graph_paths):
        claim = claim_of(run_paths.folder)
        if claim and claim.engine and claim.engine != launch.launcher:
            raise ConfigError(
                f"{run_paths.folder} is a job of {claim.engine}: start with --launcher "
                f"{claim.engine} until it has ended, or remove {run_paths.engine_json} once no "
                "process of it lives"
            )
    launcher, shared = open_launcher(launch), launch.shared_folder or launch.launcher in ENGINES
    launcher.shared_folder = shared
    return SkillScheduler(
        graph_paths,
        launcher=launcher,
        devices=devices,
        pass_env=launch.pass_env,
        shared_folder=shared,
        **configs.flags(schedule),
    )


def open_launcher(config: LaunchConfig) -> Launcher:
    """The launcher of `--launcher`; ConfigError if what it needs is missing, or not as asked."""
    if config.launcher == "local":
        return LocalLauncher()
    launcher: SlurmLauncher | RayLauncher | TmuxLauncher
    match config.launcher:
        case "slurm":
            launcher = SlurmLauncher(config.slurm_args, lost_after=config.lost_after)
        case "ray":
            address, resources = config.ray_address, config.ray_resources
            launcher = RayLauncher(address, resources, lost_after=config.lost_after)
        case _:
            launcher = TmuxLauncher(config.tmux_socket)
    launcher.check()
    return launcher
