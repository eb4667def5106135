"""Environments in groups, each of which a thread steps.

A step of the game is a few thousand small operations, which XLA runs one after another however many
CPUs there are. So the environments are split into groups that have keys, worlds and a state of
their own, all stepped by one program, and the threads run it side by side. A group costs as much
again as some twenty environments, whatever its size, so it should not be small.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TypeVar

import jax

from flowrl.config import PPOConfig, threads_for

Config = TypeVar("Config", bound=PPOConfig)


def settled(config: Config) -> Config:
    """The configuration with a number of threads, by the machine if none was asked for."""
    if config.acting_threads is not None:
        return config
    on_cpu = jax.default_backend() == "cpu"  # a GPU steps all at once
    cpus = len(os.sched_getaffinity(0)) if on_cpu else 1
    return replace(config, acting_threads=threads_for(config.num_envs, cpus))


def threads_of(config: PPOConfig) -> int:
    """Groups of environments, and threads that step them."""
    return config.acting_threads or 1


def group_size(config: PPOConfig) -> int:
    """Environments of one group."""
    return config.num_envs // threads_of(config)


def of_group(config: PPOConfig) -> PPOConfig:
    """The configuration of a run that has one group's environments alone."""
    return replace(config, num_envs=group_size(config), acting_threads=None)
