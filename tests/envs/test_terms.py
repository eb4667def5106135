"""The terms of a reward: what its source sums up."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from flowrl.config import PPOConfig
from flowrl.envs.skill_module import terms_of
from flowrl.parallel.training_setup import prepare_training_run
from flowrl.paths import GraphPaths
from flowrl.runs import CodeApproval
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import skill_from_data
from flowrl.skills.validation.cache import ApprovalStore
from flowrl.skills.validation.dry_run import SkillCode
from tests.envs.making import CLASSIC
from tests.parallel.making import LIBRARY

DONE = "def task_is_done(inventory, n):\n    return inventory.wood >= n"
BODIES = {
    "a sum": (
        "return n + 2.0 * n - (n - 1.0)",
        {"n": 3.0, "2.0 * n": 6.0, "-n": -3.0, "--1.0": 1.0},
    ),
    "a product": ("return (n + 1.0) * 2.0", {"(n + 1.0) * 2.0": 8.0}),
    "a name": (
        "near = n * 0.5\n    total = 1.0 + near\n    return total",
        {"1.0": 1.0, "near": 1.5},
    ),
    "assigned twice": ("r = n + 1.0\n    r = r + 1.0\n    return r", {"r": 5.0}),
    "added to": ("r = n + 1.0\n    r += 1.0\n    return r", {"r": 5.0}),
    "two returns": ("if n > 2:\n        return 1.0\n    return 2.0 + n", {}),
}


@pytest.mark.parametrize(("body", "terms"), BODIES.values(), ids=BODIES)
def test_a_sum_is_split_into_terms_that_add_up_to_it(tmp_path, body, terms):
    reward = f"def task_reward(n):\n    {body}"
    data = {"gain": {"logs": "n"}, "is_done": DONE, "reward": reward}
    graph = SkillGraph([*LIBRARY.values(), skill_from_data("Fell", data)])
    ready = prepare_training_run(
        graph_paths=GraphPaths(tmp_path / "g"),
        graph=graph,
        skill="Fell",
        expert=0,
        attempt=1,
        completed={},
        config=PPOConfig(),
    )
    sources, function = terms_of(ready.run_paths.module)
    values = [float(jnp.asarray(value)) for value in (function(n=3) if terms else function())]
    assert dict(zip(sources, values, strict=True)) == terms


def test_the_terms_of_a_trusted_reward_may_use_what_it_may(tmp_path):
    reward = "def task_reward(n):\n    return 1.0 * len(list(enumerate([n, n]))) + n"
    data = {"gain": {"logs": "n"}, "is_done": DONE, "reward": reward}
    fell = skill_from_data("Fell", data, trusted=True)
    graph_paths = GraphPaths(tmp_path / "g")
    digest = SkillCode.of(fell, CLASSIC).digest
    ApprovalStore(graph_paths.approvals).keep(CodeApproval(digest=digest, trusted=True))
    ready = prepare_training_run(
        graph_paths=graph_paths,
        graph=SkillGraph([*LIBRARY.values(), fell]),
        skill="Fell",
        expert=0,
        attempt=1,
        completed={},
        config=PPOConfig(),
    )
    sources, function = terms_of(ready.run_paths.module)
    assert len(sources) == 2
    assert function(n=3) == (2.0, 3)
