"""Which values make sense together; each refusal names the flag, its value and what is allowed."""

from __future__ import annotations

from typing import TypeVar

from flowrl.config.flags import BottomUpConfig, PPOConfig, SequentialConfig
from flowrl.errors import ConfigError

Config = TypeVar("Config", bound=PPOConfig)


def checked(config: Config) -> Config:
    """The same configuration, once its values make sense together.

    Raises:
      ConfigError: names the flag, its value and what is allowed.
    """
    _check_training(config)
    if isinstance(config, BottomUpConfig):
        _check_graph(config)
    if isinstance(config, SequentialConfig):
        _check_sequential(config)
    return config


def _at_least(config: PPOConfig, name: str, least: int) -> None:
    if getattr(config, name) < least:
        raise ConfigError(f"--{name} {getattr(config, name)} must be at least {least}")


def _within(config: PPOConfig, name: str, low: float, high: float) -> None:
    if not low <= getattr(config, name) <= high:
        raise ConfigError(f"--{name} {getattr(config, name)} must lie in [{low:g}, {high:g}]")


def _check_training(config: PPOConfig) -> None:
    sizes = ("num_envs", "num_steps", "update_epochs", "num_minibatches", "layer_size")
    for name in (*sizes, "total_timesteps", "max_task_steps"):
        _at_least(config, name, 1)
    for name in ("world_pool", "checkpoint_seconds"):
        _at_least(config, name, 0)
    for name in ("gamma", "gae_lambda", "success_state_rate"):
        _within(config, name, 0.0, 1.0)
    for name in ("lr", "max_grad_norm", "clip_eps"):
        if not getattr(config, name) > 0:
            raise ConfigError(f"--{name} {getattr(config, name)} must be above 0")
    _check_sharing(config)
    rows = config.num_envs * config.num_steps
    if rows % config.num_minibatches:
        raise ConfigError(
            f"--num_envs {config.num_envs} × --num_steps {config.num_steps} = {rows} rows do not "
            f"divide into --num_minibatches {config.num_minibatches}; choose a divisor of {rows}"
        )


def _check_sharing(config: PPOConfig) -> None:
    if config.acting_threads is None:
        return
    _at_least(config, "acting_threads", 1)
    if config.num_envs % config.acting_threads:
        raise ConfigError(
            f"--acting_threads {config.acting_threads} cannot share --num_envs {config.num_envs} "
            f"evenly; choose a divisor of {config.num_envs}"
        )


def _check_graph(config: BottomUpConfig) -> None:
    _at_least(config, "max_parallel_skills", 1)
    _at_least(config, "max_retries", 0)
    _within(config, "min_success_rate", 0.0, 1.0)
    interval = config.scheduler_poll_interval
    if interval <= 0:
        raise ConfigError(f"--scheduler_poll_interval {interval} must be above 0")
    for name in ("max_nodes", "skill_timesteps_budget", "skills_per_gpu", "gpu_memory_mb"):
        if getattr(config, name) is not None:
            _at_least(config, name, 1)


def _check_sequential(config: SequentialConfig) -> None:
    alone = SequentialConfig(gpu_ids=config.gpu_ids[:1])
    side_by_side = "max_parallel_skills gpu_ids skills_per_gpu gpu_memory_mb launcher tmux_socket"
    in_processes = "stall_timeout run_timeout sandbox pass_env"
    for name in f"{side_by_side} {in_processes}".split():
        if getattr(config, name) != getattr(alone, name):
            raise ConfigError(
                f"--{name} {getattr(config, name)} is for runs side by side, here one skill trains "
                "after another, in one process; use python -m flowrl.bottomup_parallel"
            )
