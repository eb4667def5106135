"""A success test that asks for a value which a feature never has is refused with its range."""

from __future__ import annotations

import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.games.base import find_game
from flowrl.runs import CodeApproval
from flowrl.skills.skill import parse_skill
from flowrl.skills.validation.dry_run import SkillCode, try_codes
from flowrl.skills.validation.ranges import Range, decided
from tests.envs.making import CLASSIC, FULL
from tests.skills.making import skill_text

COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
NEVER = {  # in full Craftax
    "player_level == 9": "compares player_level with 9, and it is 0 to 8",
    "inventory.diamond >= 100": "compares inventory.diamond with 100, and it is 0 to 99",
    "inventory.pickaxe >= 5": "compares inventory.pickaxe with 5, and it is 0 to 4",
    "jnp.sum(inventory.armour) > 8": "compares a value with 8, and it is 0 to 8",
    "facing_block == 40": "compares facing_block with 40, and it is 0 to 36",
    "achievements[Achievement.EAT_BAT.value] > 1": "compares achievements with 1, and it is 0 to 1",
    "player_level_diff == 9": "compares player_level_diff with 9, and it is -8 to 8",
    "player_intrinsics[1] > 20": "compares player_intrinsics with 20, and it is 0 to 17",
    "18 <= jnp.max(player_intrinsics)": "compares player_intrinsics with 18, and it is 0 to 17",
    "(inventory.wood >= n) & (player_level < 0)": "compares player_level with 0, and it is 0 to 8",
    "inventory.coal >= 100 * n": "compares inventory.coal with 100 to 10000, and it is 0 to 99",
    "2 * inventory.iron + 1 > 200": "compares a value with 200, and it is 1 to 199",
    "jnp.where(player_level > 0, dexterity, 2) < 1": "compares a value with 1, and it is 1 to 5",
    "jnp.all(inventory.potions == 100)": "compares inventory.potions with 100, and it is 0 to 99",
    "sword_enchantment != 3": "compares sword_enchantment with 3, and it is 0 to 2",
    "achievements.sum() >= 68": "compares a value with 68, and it is 0 to 67",
}
HONEST = (
    "(player_level == 8) & (inventory.diamond >= 99)",
    "(inventory.wood >= 0) & (player_level > 7)",
    "local_map[4 + dexterity - 1, 5] == BlockType.PLANT.value",
    "(monsters_killed[1] >= 1000) & (inventory_diff.wood < 0)",
    "jnp.floor_divide(inventory.wood, 4) >= 20",
    "(achievements.sum() >= 67) & (timestep > 9000)",
    "(closest_blocks[facing_block, 0, 0] == 30) & (inventory.stone > 70)",
    "(learned_spells.sum() == 2) & (boss_progress >= 8)",
    "(light_level + 0.5).astype(int) == 0",
)


def code(success: str) -> SkillCode:
    words = dict.fromkeys(re.findall(r"(?<![.\w])\w+", success))
    asked = [word for word in words if word in {*find_game(FULL).features, "n"}]
    text = skill_text(f"def task_is_done({', '.join(asked)}):\n    return {success}")
    return SkillCode.of(parse_skill(text, place="skill.py", env_name=FULL), FULL)


def test_a_value_that_a_feature_never_has_is_refused_with_the_range():
    outcomes = try_codes([code(success) for success in (*NEVER, *HONEST)])
    for why, outcome in zip(NEVER.values(), outcomes, strict=False):
        assert f"task_is_done {why} in {FULL}; correct the number" in str(outcome), outcome
    for success, outcome in zip(HONEST, outcomes[len(NEVER) :], strict=True):
        assert isinstance(outcome, CodeApproval), (success, outcome)


@settings(deadline=None, max_examples=150)
@given(
    compare=st.sampled_from(COMPARISONS),
    least=st.integers(-4, 4),
    width=st.integers(0, 4),
    times=st.integers(-2, 2),
    more=st.integers(-3, 3),
    constant=st.integers(-14, 14),
)
def test_a_generated_comparison_is_refused_exactly_where_it_decides_nothing(
    compare, least, width, times, more, constant
):
    """By force: it is true of none of the values, or the constant is beyond all of them."""
    values = range(least, least + width + 1)
    reached = [times * value + more for value in values]
    traced = jax.make_jaxpr(lambda x: compare(times * x + more, constant))(jnp.int32(0))
    found = [*decided(traced.jaxpr, traced.consts, [Range(least, least + width)])]
    beyond = not min(reached) <= constant <= max(reached)
    strict = compare in (operator.lt, operator.gt)
    never = not any(compare(value, constant) for value in reached)
    assert bool(found) == (beyond or (strict and never))


@pytest.mark.parametrize("name", [CLASSIC, FULL])
def test_the_features_of_a_random_player_are_within_their_bounds(name):
    game = find_game(name)
    for path, leaf in jax.tree_util.tree_leaves_with_path(dict(game.make().fresh())):
        feature = path[0].key + jax.tree_util.keystr(tuple(path[1:]))
        least, most = game.bounds_of(feature) or (-np.inf, np.inf)
        assert least <= np.min(leaf) <= np.max(leaf) <= most, feature
    known = {name.partition(".")[0] for name in game.bounds}
    assert known <= game.features.keys()
    assert game.bounds_of("closest_blocks") is None
