"""Settings of one skill's training: which flags they may set, and what counts if several do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from flowrl import arguments
from flowrl.config import BottomUpConfig, PPOConfig, flags, with_flags
from flowrl.errors import ConfigError, closest

_SETTINGS = """
total_timesteps success_state_rate lr anneal_lr num_envs num_steps update_epochs num_minibatches
gamma gae_lambda clip_eps ent_coef vf_coef max_grad_norm max_task_steps world_pool
"""
SKILL_SETTINGS = tuple(_SETTINGS.split())  # flags that may differ from skill to skill
_OF_GRAPH = ("env_name", "layer_size", "activation")
_MOST_FRAMES, _MOST_OF_SETTING = 10**12, 100_000
_MOST_ROWS, _MOST_WORLDS = 2**22, 2**14  # of an update; of a pool, which memory holds


def skill_settings(written: object) -> dict[str, Any]:
    """Return the settings of one skill's training, as values of flags.

    >>> skill_settings({"total_timesteps": "3e6", "lr": 1e-4})
    {'total_timesteps': 3000000, 'lr': 0.0001}

    Raises:
      ConfigError: a setting is unknown or the whole graph's, or its value cannot be used.
    """
    if not isinstance(written, Mapping):
        raise ConfigError('training is no dict; write {"lr": 3e-4}')
    settings: dict[str, Any] = {}
    for name, value in written.items():
        if name in _OF_GRAPH:
            raise ConfigError(
                f"{name} is the same for all skills of a graph, whose experts work together; "
                f"leave it out and use --{name}"
            )
        if name not in SKILL_SETTINGS:
            near = closest(str(name), SKILL_SETTINGS)
            raise ConfigError(
                f"{name!r} is no setting of a skill{near}; there are {', '.join(SKILL_SETTINGS)}"
            )
        found = arguments.value_of(PPOConfig, name, [str(value)])
        most = _MOST_FRAMES if name == "total_timesteps" else _MOST_OF_SETTING
        if abs(found) > most:
            raise ConfigError(f"{name} is over {most}; choose less")
        settings[name] = found
    steps = [settings.get(name, getattr(PPOConfig, name)) for name in ("num_envs", "num_steps")]
    if math.prod(steps) > _MOST_ROWS:
        raise ConfigError(f"num_envs × num_steps is over {_MOST_ROWS}; choose less")
    if settings.get("world_pool", 0) > _MOST_WORLDS:
        raise ConfigError(f"world_pool is over {_MOST_WORLDS}; choose less")
    return settings


@dataclass(frozen=True, kw_only=True)
class SkillConfig:
    """How a skill is trained, and where each value that is no default comes from."""

    ppo: PPOConfig
    origins: Mapping[str, str]  # flag → "command line", "skill file" and so on


def for_skill(
    config: BottomUpConfig,
    *,
    of_file: Mapping[str, Any],
    of_toml: Mapping[str, Any],
    of_sweep: Mapping[str, Any] = MappingProxyType({}),
) -> SkillConfig:
    """Return how a skill is trained, given the settings of its file and of `--skill_config`.

    The command line and the environment come before `--skill_config`, `--config` before what a
    sweep has found, and that before the file.

    Raises:
      ConfigError: the values together make no sense.
    """
    known = flags(config.ppo)
    given = {name: origin for name, origin in config.origins.items() if name in known}
    said = [name for name, origin in given.items() if origin != "config file"]
    written = {**of_file, **of_sweep}
    values = {name: value for name, value in written.items() if name not in given}
    origins = {**given, **dict.fromkeys(values, "skill file")}
    origins |= dict.fromkeys(of_sweep.keys() & values.keys(), "sweep")
    stronger = {name: value for name, value in of_toml.items() if name not in said}
    origins |= dict.fromkeys(stronger, "--skill_config")
    ppo = with_flags(config.ppo, **{**values, **stronger})
    if config.schedule.devices_per_run > 1:  # a run trains on all GPUs that it gets
        ppo = dataclasses.replace(ppo, num_devices=config.schedule.devices_per_run)
    ppo.check()
    return SkillConfig(ppo=ppo, origins=origins)
