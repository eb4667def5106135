"""Craftax is slow to compile: one world generator per game, shared by all tests."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from flowrl.envs.skill_module import load_module
from flowrl.envs.tasks import SkillEnv, make_env
from tests.envs.making import CLASSIC, FULL, module_text

PACKAGES = {CLASSIC: "craftax_classic", FULL: "craftax"}


@pytest.fixture(scope="session")
def worlds_of():
    """Eight generated worlds, leaves [8, …], and the environment they come from, by game."""
    made: dict[str, tuple[SkillEnv, Any]] = {}

    def worlds(name: str) -> tuple[SkillEnv, Any]:
        if name not in made:
            module = load_module(module_text(package=PACKAGES[name]))
            env = make_env(name, module, max_task_steps=5)
            keys = jax.random.split(jax.random.key(3), 8)
            made[name] = env, jax.jit(jax.vmap(env.new_world))(keys)
        return made[name]

    return worlds
