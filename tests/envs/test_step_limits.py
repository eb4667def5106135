"""A step of a plan is cut at its skill's own limit, and the limits of the library suffice."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from flowrl.config import PPOConfig, to_json
from flowrl.envs.skill_module import load_module
from flowrl.envs.tasks import SkillEnv, make_env, settle
from flowrl.parallel.training_setup import generate_module_with_remapping
from flowrl.runs import PlannedStep, TrainingRun
from flowrl.skills.skill import load_library
from tests.envs.making import CLASSIC
from tests.skills.worlds import Game, game_of

pytestmark = pytest.mark.craftax
DEFAULT = PPOConfig().max_task_steps
LIMIT = 900  # of Eat Plant
SKIPPED = 590
PLAN = ("Collect Sapling", "Place Plant", "Eat Plant")
EAT = PLAN.index("Eat Plant")


class Walk(NamedTuple):
    """Three steps in a world of grass; nothing attacks, and the player stays fed."""

    game: Game
    env: SkillEnv
    step: Any

    def act(self, state: Any, action: str) -> tuple[Any, Any]:
        number = jnp.int32(self.game.constants.Action[action].value)
        return self.step(jax.random.key(0), state, number)


@pytest.fixture(scope="module")
def walk() -> Walk:
    library, game = load_library(CLASSIC), game_of(CLASSIC)
    steps = tuple(
        PlannedStep(
            skill=skill,
            count=1,
            expert=expert,
            max_steps=library[skill].max_steps,
        )
        for expert, skill in enumerate(PLAN)
    )
    run = TrainingRun(
        run_id="e2.a1.00000000",
        skill="Eat Plant",
        expert=EAT,
        attempt=1,
        plan=steps,
        experts=tuple(range(len(steps))),
        ancestors=(),
        config=to_json(PPOConfig()),
    )
    module = load_module(generate_module_with_remapping(run, library))
    env = make_env(CLASSIC, module, max_task_steps=DEFAULT)
    vars(env)["params"] = game.params.replace(max_timesteps=10_000)  # a cached property

    def step(key: jax.Array, state: Any, action: jax.Array) -> Any:
        fed = dict.fromkeys(("player_food", "player_drink", "player_energy"), jnp.int32(9))
        return env.advance(key, state._replace(world=state.world.replace(**fed)), action)

    return Walk(game, env, jax.jit(step))


def skipped(state: Any) -> Any:
    """The state after that many steps of waiting for the plant."""
    world = state.world
    age = world.growing_plants_age + SKIPPED * world.growing_plants_mask
    world = world.replace(growing_plants_age=age)
    return state._replace(world=world, task_length=state.task_length + SKIPPED)


def test_a_plant_ripens_and_is_eaten_within_the_limit(walk):
    state = walk.env.begin_in(settle(walk.game.with_items(walk.game.empty, sapling=1)))
    state, _ = walk.act(state, "NOOP")  # the sapling is there already
    state, output = walk.act(state, "PLACE_PLANT")
    assert output.task_success[:3].tolist() == [True, True, False]
    state, waited = skipped(state), SKIPPED
    while walk.game.block_ahead(state.world) != "RIPE_PLANT":
        state, output = walk.act(state, "NOOP")
        waited += 1
        assert not output.done, f"cut after {waited} steps"
    _, output = walk.act(state, "DO")
    assert output.task_success[:3].tolist() == [True, True, True]
    assert waited > SKIPPED, "what was skipped did not make it ripe by itself"
    assert DEFAULT < waited < LIMIT - 200, "two hundred steps are left for walking"


@pytest.mark.parametrize(
    ("task", "limit"), [(0, DEFAULT), (1, DEFAULT), (EAT, LIMIT)], ids=["first", "second", "last"]
)
def test_each_step_is_cut_at_its_own_limit(walk, task, limit):
    state = walk.env.begin_in(settle(walk.game.empty))._replace(task=jnp.int32(task))
    for before, cut in ((limit - 2, False), (limit - 1, True)):
        _, output = walk.act(state._replace(task_length=jnp.int32(before)), "NOOP")
        assert bool(output.truncated) == bool(output.done) == cut
