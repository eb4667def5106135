"""A plan that is data is walked exactly like one that is compiled in."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.config import PPOConfig
from flowrl.envs.base import REWARD_LIMIT, is_clipped
from flowrl.envs.skill_module import TaskModule, load_module
from flowrl.envs.tasks import library_functions, make_env, shared_functions
from flowrl.envs.vector import BatchedEnv, BatchedState, Store
from flowrl.networks.grouped import pack
from flowrl.networks.moe import ActorCritic, init_expert, stack_experts
from flowrl.parallel.training_setup import generate_module_with_remapping
from flowrl.ppo.rollout import RolloutState, rollout
from flowrl.runs import PlannedStep, TrainingRun
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import load_library
from tests.envs.making import CLASSIC, WOOD, module_text
from tests.networks.making import words_of

pytestmark = pytest.mark.craftax
LIBRARY = load_library(CLASSIC)


def module_of(skill: str) -> TaskModule:
    """The generated module of a library skill's run."""
    steps = SkillGraph(LIBRARY.values()).plan(skill)
    experts = {name: number for number, name in enumerate(dict.fromkeys(s.skill for s in steps))}
    run = TrainingRun(
        run_id="walk",
        skill=skill,
        expert=experts[skill],
        attempt=1,
        plan=tuple(
            PlannedStep(
                skill=s.skill,
                count=s.count,
                expert=experts[s.skill],
                max_steps=LIBRARY[s.skill].max_steps,
            )
            for s in steps
        ),
        experts=tuple(experts.values()),
        ancestors=(),
        config={"env_name": CLASSIC},
    )
    return load_module(generate_module_with_remapping(run, LIBRARY))


def test_every_library_skill_is_found_by_its_code():
    library = library_functions(CLASSIC)
    for name in LIBRARY:
        functions, plan = shared_functions(module_of(name), max_task_steps=300)
        assert functions == library, name
        found = [list(functions.values())[number].skill for number in plan.functions]
        for one, task in zip(found, module_of(name).tasks, strict=False):
            assert LIBRARY[one].is_done == LIBRARY[task.skill].is_done
            assert LIBRARY[one].reward == LIBRARY[task.skill].reward


def test_a_plan_as_data_says_counts_limits_and_experts():
    module = module_of("Eat Plant")
    _, plan = shared_functions(module, max_task_steps=300)
    tasks = module.tasks
    assert plan.last == len(tasks) - 1
    assert plan.count[: len(tasks)].tolist() == [task.count for task in tasks]
    assert plan.expert[: len(tasks)].tolist() == [task.expert_local for task in tasks]
    assert plan.limit[: len(tasks)].tolist() == [task.max_steps or 300 for task in tasks]
    assert max(plan.limit) > 300


def test_a_skill_of_a_users_own_has_its_own_functions():
    own = WOOD._replace(is_done="(inventory, n=2):\n    return inventory.wood > n + 7")
    module = load_module(module_text([own]))
    functions, plan = shared_functions(module, max_task_steps=5)
    found = list(functions.values())[plan.functions[0]]
    assert found is module.tasks[0].functions
    assert not found.takes_count
    assert len(functions) == len(library_functions(CLASSIC)) + 1


@pytest.mark.parametrize(
    ("reward", "kept"),
    [(9_999.5, 10_000.0), (9_998.0, 9_999.0), (-9_000.0, -8_999.0), (3e38, 1e4), (-1e30, -1e4)],
)
def test_the_reward_of_a_timestep_is_clipped_with_its_bonus(reward, kept):
    env = make_env(CLASSIC, module_of("Collect Wood"), max_task_steps=9)
    _, output = env._walk(
        env.begin_in(None),
        None,
        completed=jnp.asarray(True),
        earned=jnp.array([reward, 0.0], jnp.float32),
        over=jnp.asarray(False),
    )
    assert output.reward == output.episode_return == kept
    assert is_clipped(output.reward) == (abs(kept) == REWARD_LIMIT)


def compiled_functions(module):
    return shared_functions(module, max_task_steps=5)[0].keys() - library_functions(CLASSIC)


def test_what_is_compiled_in_besides_the_library_tells_plans_apart():
    assert compiled_functions(module_of("Eat Plant")) == set()
    own = WOOD._replace(is_done="(inventory, n=2):\n    return inventory.wood > n + 7")
    other = WOOD._replace(is_done="(inventory, n=2):\n    return inventory.wood > n + 6")
    counted = own._replace(is_done=own.is_done.replace("n=2", "n=3"), count=3)
    found = [
        compiled_functions(load_module(module_text([skill]))) for skill in (own, other, counted)
    ]
    assert [len(functions) for functions in found] == [1, 1, 1]
    assert len(set().union(*found)) == 3


def test_making_an_environment_does_not_load_craftax(tmp_path):
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from flowrl.envs.tasks import make_env\n"
        "from flowrl.envs.skill_module import load_module\n"
        "module = load_module(Path(sys.argv[1]))\n"
        "env = make_env(sys.argv[2], module, max_task_steps=9)\n"
        "assert env.game.observation_size == 1345\n"
        "sys.exit('craftax.craftax_classic' in sys.modules)\n"
    )
    path = tmp_path / "0.py"
    path.write_text(module_text([WOOD]))
    done = subprocess.run([sys.executable, "-c", code, str(path), CLASSIC], check=False)
    assert done.returncode == 0


def test_a_plan_as_data_is_walked_like_one_that_is_compiled_in(worlds_of):
    """Random play with wood, stone and tables thrown in, so that plans move on."""
    worlds = worlds_of(CLASSIC)[1]
    module = module_of("Make Stone Pickaxe")
    data = make_env(CLASSIC, module, max_task_steps=9)
    functions = {str(k): task.functions for k, task in enumerate(module.tasks)}
    numbers = np.arange(len(data.plan.functions), dtype=np.int32)
    places = data.plan.functions[: len(functions)]  # of the plan's functions in the library's
    plan = data.plan._replace(functions=numbers, facts=data.plan.facts[:, places])
    own = replace(data, functions=functions, plan=plan)
    envs = own, data
    advances = [jax.jit(jax.vmap(env.advance)) for env in envs]
    states = [jax.jit(jax.vmap(env.begin_in))(worlds) for env in envs]
    moved = 0
    for number in range(40):
        keys = jax.random.split(jax.random.key(number), 8)
        actions = jax.random.randint(jax.random.key(1000 + number), (8,), 0, 17)
        if number % 5 == 4:
            states = [_gifted(state) for state in states]
        outputs = []
        for place, advance in enumerate(advances):
            states[place], output = advance(keys, states[place], actions)
            columns = [*range(len(data.game.items)), *(len(data.game.items) + places)]
            kept = output.kept if place == 0 else output.kept[:, columns]
            outputs.append(output._replace(kept=kept))
        for name, left, right in zip(outputs[0]._fields, *outputs, strict=True):
            assert (np.asarray(left) == np.asarray(right)).all(), name
        assert not np.asarray(outputs[0].task_success)[:, len(functions) :].any()
        moved = max(moved, int(np.asarray(outputs[0].task).max()))
    assert moved >= 3


def _gifted(state):
    inventory = state.world.inventory
    inventory = inventory.replace(wood=inventory.wood + 3, stone=inventory.stone + 1)
    return state._replace(world=state.world.replace(inventory=inventory))


def test_all_plans_of_library_skills_act_by_the_same_program():
    texts = []
    for skill in ("Collect Wood", "Place Table"):
        env = BatchedEnv(make_env(CLASSIC, module_of(skill), max_task_steps=300), stock=16)
        network, key = ActorCritic(env.num_actions, 8), jax.random.key(0)
        expert = init_expert(network, words_of(key), observation_size=env.observation_size)
        params = pack(stack_experts([expert] * 8))
        config = PPOConfig(num_envs=8, num_steps=2)
        world = jax.eval_shape(env.env.new_world, key)
        walk = jax.eval_shape(env.env.begin_in, world)
        batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((8, *leaf.shape), leaf.dtype), walk)
        stock = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((16, *leaf.shape), leaf.dtype), world
        )
        one = jax.ShapeDtypeStruct((1,), jnp.int32)
        state = BatchedState(batch, Store(stock, one, one))
        obs = jax.ShapeDtypeStruct((8, env.observation_size), jnp.float32)
        act = jax.jit(partial(rollout, env, config))
        texts.append(act.lower(params, RolloutState(state, obs, key)).as_text())
    assert texts[0] == texts[1]
