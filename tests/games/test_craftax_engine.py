"""Features are what a plain search over the real world's arrays finds, and only if asked for."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.errors import SkillError
from flowrl.games.base import WorldStep, find_game
from flowrl.games.craftax_engine import NEAREST, OUT_OF_SIGHT
from tests.envs.making import CLASSIC, FULL

pytestmark = pytest.mark.craftax
KINDS = {
    CLASSIC: ("zombies", "cows", "skeletons"),
    FULL: ("melee_mobs", "passive_mobs", "ranged_mobs"),
}
FEATURES = list(find_game(CLASSIC).features)


def scrambled(world: Any, rng: np.random.Generator) -> Any:
    """The world with its player, mobs and numbers in arbitrary places, corners included."""

    def numbers(leaf: Any) -> Any:
        high = 2 if leaf.dtype == bool else 9
        return np.asarray(rng.integers(0, high, leaf.shape), leaf.dtype)

    size = world.map.shape[-1]
    corner = rng.random() < 0.4
    place = rng.choice([0, 1, size - 2, size - 1], 2) if corner else rng.integers(0, size, 2)
    mobs = {}
    for kind in KINDS[CLASSIC] + KINDS[FULL]:
        if hasattr(world, kind):
            old = getattr(world, kind)
            near = place + rng.integers(-6, 7, old.position.shape)
            mobs[kind] = old.replace(
                position=np.asarray(near, jnp.int32),
                mask=np.asarray(rng.random(old.mask.shape) < 0.6),
            )
    changed = {
        name: numbers(getattr(world, name))
        for name in ("player_health", "player_food", "player_drink", "player_energy")
    }
    changed |= {name: numbers(getattr(world, name)) for name in ("is_sleeping", "achievements")}
    changed["light_level"] = np.float32(rng.random())
    if hasattr(world, "player_level"):
        changed["player_level"] = numbers(world.player_level)
        changed["monsters_killed"] = numbers(world.monsters_killed)
    return world.replace(
        player_position=np.asarray(place, jnp.int32),
        player_direction=np.asarray(rng.integers(1, 5), world.player_direction.dtype),
        inventory=jax.tree.map(numbers, world.inventory),
        **mobs,
        **changed,
    )


def level_map(world: Any) -> np.ndarray:
    blocks = np.asarray(world.map)
    return blocks if blocks.ndim == 2 else blocks[int(world.player_level)]


def searched_blocks(world: Any, constants: Any) -> np.ndarray:
    """The nearest blocks of each type, by looking at every cell of the whole map."""
    height, width = constants.OBS_DIM
    found: dict[int, list[Any]] = {block.value: [] for block in constants.BlockType}
    py, px = (int(v) for v in world.player_position)
    blocks = level_map(world)
    for y in range(py - height // 2, py + height // 2 + 1):
        for x in range(px - width // 2, px + width // 2 + 1):
            inside = 0 <= y < blocks.shape[0] and 0 <= x < blocks.shape[1]
            block = int(blocks[y, x]) if inside else constants.BlockType.OUT_OF_BOUNDS.value
            found[block].append((abs(y - py) + abs(x - px), y - py, x - px))
    out = np.full((len(found), 2, NEAREST), OUT_OF_SIGHT)
    for block, cells in found.items():
        for k, (_, dy, dx) in enumerate(sorted(cells)[:NEAREST]):
            out[block, :, k] = dy, dx
    return out


def searched_mobs(world: Any, name: str, constants: Any) -> np.ndarray:
    height, width = constants.OBS_DIM
    out = np.full((3, 2), OUT_OF_SIGHT)
    for row, kind in enumerate(KINDS[name]):
        mobs = getattr(world, kind)
        at = (int(world.player_level),) if name == FULL else ()
        offsets = np.asarray(mobs.position[at]) - np.asarray(world.player_position)
        visible = [
            (abs(dy) + abs(dx), i)
            for i, (dy, dx) in enumerate(offsets)
            if mobs.mask[at][i] and abs(dy) <= height // 2 and abs(dx) <= width // 2
        ]
        if visible:
            out[row] = offsets[min(visible)[1]]
    return out


def searched_facing(world: Any, constants: Any) -> int:
    step = {1: (0, -1), 2: (0, 1), 3: (-1, 0), 4: (1, 0)}[int(world.player_direction)]
    y, x = np.asarray(world.player_position) + step
    blocks = level_map(world)
    if 0 <= y < blocks.shape[0] and 0 <= x < blocks.shape[1]:
        return int(blocks[y, x])
    return constants.BlockType.OUT_OF_BOUNDS.value


@pytest.fixture(scope="module", params=[CLASSIC, FULL])
def case(request, worlds_of):
    """A game's name, its constants, its features compiled, and moments of scrambled worlds."""
    env, worlds = worlds_of(request.param)
    rng = np.random.default_rng(7)
    worlds = jax.device_get(worlds)
    picked = [jax.tree.map(lambda leaf, i=i: leaf[i], worlds) for i in range(8)]
    moments = [
        WorldStep(
            scrambled(picked[rng.integers(8)], rng),
            scrambled(picked[rng.integers(8)], rng),
            np.float32(rng.normal()),
            timestep=int(rng.integers(1, 300)),
            episode_timestep=int(rng.integers(300, 10_000)),
        )
        for _ in range(40)
    ]
    features = jax.jit(lambda moment: env.engine.features(FEATURES, moment))
    constants = importlib.import_module(env.game.constants)
    return (
        request.param,
        constants,
        [(moment, jax.device_get(features(moment))) for moment in moments],
    )


def test_the_nearest_blocks_are_those_a_search_finds(case):
    _, constants, moments = case
    for moment, found in moments:
        assert (found["closest_blocks"] == searched_blocks(moment.after, constants)).all()
        assert (found["closest_blocks_prev"] == searched_blocks(moment.before, constants)).all()


def test_the_nearest_mobs_are_those_a_search_finds(case):
    name, constants, moments = case
    for moment, found in moments:
        assert (found["nearest_mobs"] == searched_mobs(moment.after, name, constants)).all()
        assert (found["nearest_mobs_prev"] == searched_mobs(moment.before, name, constants)).all()


def test_the_facing_block_is_the_one_ahead(case):
    _, constants, moments = case
    for moment, found in moments:
        assert found["facing_block"] == searched_facing(moment.after, constants)


def test_the_local_map_is_the_part_of_the_map_around_the_player(case):
    _, constants, moments = case
    height, width = constants.OBS_DIM
    for moment, found in moments:
        outside = constants.BlockType.OUT_OF_BOUNDS.value
        margin = np.pad(level_map(moment.after), max(height, width), constant_values=outside)
        y, x = np.asarray(moment.after.player_position) + max(height, width)
        rows, columns = (
            slice(y - height // 2, y + height // 2 + 1),
            slice(x - width // 2, x + width // 2 + 1),
        )
        assert (found["local_map"] == margin[rows, columns]).all()
        assert found["local_map"].shape == (height, width)


def test_light_and_time_are_those_of_the_step(case):
    for moment, found in case[2]:
        assert found["light_level"] == moment.after.light_level
        assert found["timestep"] == moment.timestep
        assert found["episode_timestep"] == moment.episode_timestep


def test_differences_are_after_less_before(case):
    for moment, found in case[2]:
        before, after = moment.before, moment.after
        for item in ("wood", "stone", "iron", "sapling"):
            change = int(getattr(after.inventory, item)) - int(getattr(before.inventory, item))
            assert getattr(found["inventory"], item) == getattr(after.inventory, item)
            assert getattr(found["inventory_diff"], item) == change
        vitals = [
            [world.player_health, world.player_food, world.player_drink, world.player_energy]
            for world in (after, before)
        ]
        assert found["player_intrinsics"].tolist() == vitals[0]
        assert found["player_intrinsics_diff"].tolist() == [
            a - b for a, b in zip(*vitals, strict=True)
        ]
        unlocked = np.asarray(after.achievements, int) - np.asarray(before.achievements, int)
        assert (found["achievements"] == np.asarray(after.achievements, int)).all()
        assert (found["achievements_diff"] == unlocked).all()


def test_what_only_full_craftax_has_is_zero_in_classic(case):
    name, _, moments = case
    for moment, found in moments:
        full = name == FULL
        assert found["player_level"] == (moment.after.player_level if full else 0)
        killed = np.asarray(moment.after.monsters_killed) if full else np.zeros(1)
        assert found["monsters_killed"].tolist() == killed.tolist()
        assert found["player_level_diff"] == (
            moment.after.player_level - moment.before.player_level if full else 0
        )


def test_sleep_reward_and_penalty_are_those_of_the_step(case):
    for moment, found in case[2]:
        assert found["is_sleeping"] == moment.after.is_sleeping
        assert found["was_sleeping"] == moment.before.is_sleeping
        assert found["env_reward"] == moment.env_reward
        lost = min(0, int(moment.after.player_health) - int(moment.before.player_health))
        assert found["health_penalty"] == pytest.approx(0.1 * lost)


@pytest.mark.parametrize(("name", "sword"), [(CLASSIC, "stone_sword"), (FULL, "sword")])
def test_damage_dealt_is_what_the_foe_in_front_loses(worlds_of, name, sword):
    env, worlds = worlds_of(name)
    world = jax.tree.map(lambda leaf: leaf[0], worlds)
    kind = KINDS[name][0]
    ahead = world.player_position + jnp.array([0, 1])
    mobs = getattr(world, kind)
    first = jnp.zeros_like(mobs.mask).at[(0,) * mobs.mask.ndim].set(True)
    mobs = mobs.replace(
        mask=first, position=jnp.where(first[..., None], ahead, 0), health=mobs.health * 0 + 4
    )
    world = world.replace(player_direction=2, **{kind: mobs})
    armed = world.replace(inventory=world.inventory.replace(**{sword: 2}))
    found = []
    for before in (world, armed, world.replace(player_direction=1)):
        after, reward = env.engine.step(jax.random.key(3), before, jnp.int32(5))
        step = WorldStep(before, after, reward)
        found.append(float(env.engine.features(["damage_dealt"], step)["damage_dealt"]))
    lone, with_sword, elsewhere = found
    assert 0 < lone < with_sword <= 4
    assert elsewhere == 0


def test_every_feature_of_the_game_has_a_plain_type(case):
    found = case[2][0][1]
    assert sorted(found) == sorted(FEATURES)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(found)} == {"int32", "float32", "bool"}


def test_a_feature_that_nobody_asks_for_is_not_computed(worlds_of):
    env, worlds = worlds_of(CLASSIC)
    world = jax.tree.map(lambda leaf: leaf[0], worlds)

    def equations(*names: str) -> int:
        moment = WorldStep(world, world, jnp.float32(0))
        return len(jax.make_jaxpr(lambda m: env.engine.features(names, m))(moment).eqns)

    assert equations() == 0
    assert equations("inventory") == 0
    assert equations("facing_block") < equations("facing_block", "closest_blocks")


def test_an_unknown_feature_is_refused_by_name():
    moment = WorldStep(None, None, jnp.float32(0))
    with pytest.raises(SkillError, match="no feature 'inventory_prev_diff'"):
        find_game(CLASSIC).make().features(["inventory_prev_diff"], moment)


@pytest.mark.parametrize("env_name", [CLASSIC, FULL])
def test_the_kept_moments_have_the_features_of_the_game(env_name, worlds_of):
    """When this fails: `python scripts/write_moments.py`."""
    env, worlds = worlds_of(env_name)
    world = jax.tree.map(lambda leaf: leaf[0], worlds)
    change = WorldStep(world, world, jnp.float32(0))
    real = jax.eval_shape(lambda step: env.engine.features(FEATURES, step), change)
    form = {name: (leaf.shape, leaf.dtype) for name, leaf in _leaves(real).items()}
    kept = _leaves(env.engine.moments())
    assert {name: (leaf.shape[1:], leaf.dtype) for name, leaf in kept.items()} == form


@pytest.mark.parametrize("env_name", [CLASSIC, FULL])
def test_films_are_told_what_the_player_has(env_name, worlds_of):
    env, worlds = worlds_of(env_name)
    world = scrambled(jax.tree.map(lambda leaf: leaf[0], worlds), np.random.default_rng(1))
    intrinsics, items = env.player(world)
    told = dict(zip(env.game.intrinsics, intrinsics.tolist(), strict=True))
    assert told == {name: float(getattr(world, f"player_{name}")) for name in told}
    assert len(told) == 4
    held = {item: int(np.sum(getattr(world.inventory, item))) for item in sorted(env.game.items)}
    assert dict(zip(held, items.tolist(), strict=True)) == held


@pytest.mark.parametrize("env_name", [CLASSIC, FULL])
def test_the_kept_moments_are_varied(env_name):
    leaves = _leaves(find_game(env_name).make().moments())
    assert {len(leaf) for leaf in leaves.values()} == {48}
    never_zero_in_classic = ("['player_level", "['monsters_killed")
    for name, leaf in leaves.items():
        assert np.isfinite(leaf.astype(float)).all()
        if env_name == FULL or not name.startswith(never_zero_in_classic):
            assert len(np.unique(leaf)) > 1, name


def _leaves(features):
    paths = jax.tree_util.tree_flatten_with_path(dict(features))[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in paths}


@pytest.mark.slow
def test_a_world_is_drawn_by_craftaxs_own_pictures(worlds_of):
    env, worlds = worlds_of(CLASSIC)
    picture = env.game.renderer()(jax.tree.map(lambda leaf: leaf[0], worlds))
    assert (picture.shape, picture.dtype) == ((144, 144, 3), np.uint8)
    assert len(np.unique(picture)) > 10
