"""The scheduler's settings, under their documented names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypedDict

from flowrl.errors import ConfigError
from flowrl.parallel.events import Rules
from flowrl.redaction import secrets_of


class SettingsDict(TypedDict, total=False):
    """The fields of `Settings`, as keywords."""

    max_parallel_skills: int
    poll_interval: float
    max_retries: int
    retry_backoff: float
    retry_jitter: float
    min_success_rate: float
    skill_timesteps_budget: int | None
    devices: tuple[str, ...]
    skills_per_gpu: int
    slots: tuple[int, ...]
    pass_env: tuple[str, ...]
    hung_seconds: float
    run_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How many skills train side by side, and how often and when each tries again."""

    max_parallel_skills: int = 3
    poll_interval: float = 30.0  # seconds between fallback looks; ends are heard at once
    max_retries: int = 2  # after the first attempt
    retry_backoff: float = 5.0  # seconds before the first retry, then doubled
    retry_jitter: float = 0.25  # most that a wait is lengthened by, as a share
    min_success_rate: float = 0.0
    skill_timesteps_budget: int | None = None  # over all attempts of a skill
    devices: tuple[str, ...] = ()
    skills_per_gpu: int = 1
    slots: tuple[int, ...] = ()  # runs on each device; skills_per_gpu on each where it is empty
    pass_env: tuple[str, ...] = ()  # names of variables whose values must not be written down
    hung_seconds: float = 1800.0  # a run without progress for so long is ended
    run_seconds: float | None = None  # an attempt's process that lives for so long is ended

    def __post_init__(self) -> None:
        for name in ("max_parallel_skills", "skills_per_gpu"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)} must be at least 1")
        if self.slots and (len(self.slots) != len(self.devices) or min(self.slots) < 1):
            raise ConfigError(f"slots {self.slots} must give each of {self.devices} at least 1")
        if self.max_retries < 0:
            raise ConfigError(f"max_retries {self.max_retries} must be at least 0")
        for name in ("poll_interval", "hung_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} {getattr(self, name)} must be above 0")
        if self.run_seconds is not None and not self.run_seconds > 0:
            raise ConfigError(f"run_seconds {self.run_seconds} must be above 0")

    def secrets(self) -> tuple[str, ...]:
        """What must not be written down, of this process's environment."""
        return secrets_of(os.environ, self.pass_env)

    def rules(self) -> Rules:
        """The settings that decide, for the core."""
        return Rules(
            max_parallel=self.max_parallel_skills,
            max_retries=self.max_retries,
            backoff_seconds=self.retry_backoff,
            min_success_rate=self.min_success_rate,
            budget_frames=self.skill_timesteps_budget,
            devices=self.devices,
            runs_per_device=self.skills_per_gpu,
            slots=self.slots,
        )
