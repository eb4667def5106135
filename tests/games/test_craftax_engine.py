"""Features are what a plain search over the real world's arrays finds, and only if asked for."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import ndimage

from flowrl.errors import SkillError
from flowrl.games.base import WorldStep, find_game
from flowrl.games.craftax_engine import NEAREST, OUT_OF_SIGHT
from flowrl.skills.skill import load_library
from tests.envs.making import CLASSIC, FULL

pytestmark = pytest.mark.craftax
NUMBERED = ("passive_mobs", "melee_mobs", "ranged_mobs")  # as MobType counts them
KINDS = {
    CLASSIC: ("zombies", "cows", "skeletons"),
    FULL: ("melee_mobs", "passive_mobs", "ranged_mobs"),
}
FEATURES = {name: list(find_game(name).features) for name in (CLASSIC, FULL)}
SHOTS = {CLASSIC: ("arrows",), FULL: ("mob_projectiles", "player_projectiles")}
NUMBERS = {
    "player_mana": "player_mana",
    "player_xp": "player_xp",
    "dexterity": "player_dexterity",
    "strength": "player_strength",
    "intelligence": "player_intelligence",
    **{
        name: name
        for name in (
            *("learned_spells", "sword_enchantment", "bow_enchantment", "armour_enchantments"),
            *("chests_opened", "boss_progress", "is_resting"),
        )
    },
}


def scrambled(world: Any, rng: np.random.Generator) -> Any:
    """The world with its player, mobs and numbers in arbitrary places, corners included."""

    def numbers(leaf: Any) -> Any:
        high = 2 if leaf.dtype == bool else 9
        return np.asarray(rng.integers(0, high, leaf.shape), leaf.dtype)

    size = world.map.shape[-1]
    corner = rng.random() < 0.4
    place = rng.choice([0, 1, size - 2, size - 1], 2) if corner else rng.integers(0, size, 2)
    mobs = {}
    for kind in (*KINDS[CLASSIC], *KINDS[FULL], *SHOTS[CLASSIC], *SHOTS[FULL]):
        if hasattr(world, kind):
            old = getattr(world, kind)
            near = place + rng.integers(-6, 7, old.position.shape)
            mobs[kind] = old.replace(
                position=np.asarray(near, jnp.int32),
                mask=np.asarray(rng.random(old.mask.shape) < 0.6),
            )
            if hasattr(old, "type_id"):
                types = rng.integers(0, 8, old.type_id.shape)
                mobs[kind] = mobs[kind].replace(type_id=np.asarray(types, jnp.int32))
    changed = {
        name: numbers(getattr(world, name))
        for name in ("player_health", "player_food", "player_drink", "player_energy")
    }
    changed |= {name: numbers(getattr(world, name)) for name in ("is_sleeping", "achievements")}
    changed["light_level"] = np.float32(rng.random())
    if hasattr(world, "player_level"):
        changed["player_level"] = numbers(world.player_level)
        changed["monsters_killed"] = numbers(world.monsters_killed)
        changed |= {field: numbers(np.asarray(getattr(world, field))) for field in NUMBERS.values()}
        changed["boss_timesteps_to_spawn_this_round"] = np.int32(rng.integers(0, 2))
        items = rng.choice(4, world.item_map.shape, p=[0.7, 0.1, 0.1, 0.1])
        changed["item_map"] = np.asarray(items, world.item_map.dtype)
        light = np.where(rng.random(world.light_map.shape) < 0.3, rng.choice([0, 0.05]), 1.0)
        changed["light_map"] = np.asarray(light, world.light_map.dtype)
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


def is_lit(world: Any, y: int, x: int) -> bool:
    """Whether the game's observation shows a cell."""
    if not hasattr(world, "light_map"):
        return True
    light = np.asarray(world.light_map)[int(world.player_level)]
    return 0 <= y < light.shape[0] and 0 <= x < light.shape[1] and light[y, x] > 0.05


def searched_blocks(world: Any, constants: Any) -> np.ndarray:
    """The nearest blocks of each type, by looking at every cell of the whole map."""
    kinds = [block.value for block in constants.BlockType]
    outside = constants.BlockType.OUT_OF_BOUNDS.value
    return searched(world, constants, level_map(world), kinds, outside=outside, unlit=0)


def searched_items(world: Any, constants: Any) -> np.ndarray:
    """The nearest items; a ladder down is blocked until eight foes are killed."""
    level, item = int(world.player_level), constants.ItemType
    items = np.array(world.item_map)[level]
    if world.monsters_killed[level] < 8:
        items[items == item.LADDER_DOWN.value] = item.LADDER_DOWN_BLOCKED.value
    return searched(world, constants, items, [each.value for each in item], outside=-1, unlit=-1)


def searched(
    world: Any, constants: Any, blocks: np.ndarray, kinds: list[int], *, outside: int, unlit: int
) -> np.ndarray:
    height, width = constants.OBS_DIM
    found: dict[int, list[Any]] = {kind: [] for kind in (-1, *kinds)}
    py, px = (int(v) for v in world.player_position)
    for y in range(py - height // 2, py + height // 2 + 1):
        for x in range(px - width // 2, px + width // 2 + 1):
            inside = 0 <= y < blocks.shape[0] and 0 <= x < blocks.shape[1]
            block = int(blocks[y, x]) if inside else outside
            block = block if is_lit(world, y, x) else unlit
            found[block].append((abs(y - py) + abs(x - px), y - py, x - px))
    out = np.full((len(kinds), 2, NEAREST), OUT_OF_SIGHT)
    for block in kinds:
        for k, (_, dy, dx) in enumerate(sorted(found[block])[:NEAREST]):
            out[block, :, k] = dy, dx
    return out


def searched_mobs(
    world: Any, kinds: Sequence[str], constants: Any, of_type: int | None = None
) -> np.ndarray:
    height, width = constants.OBS_DIM
    out = np.full((len(kinds), 2), OUT_OF_SIGHT)
    for row, kind in enumerate(kinds):
        mobs = getattr(world, kind)
        at = (int(world.player_level),) if hasattr(world, "player_level") else ()
        offsets = np.asarray(mobs.position[at]) - np.asarray(world.player_position)
        visible = [
            (abs(dy) + abs(dx), i)
            for i, (dy, dx) in enumerate(offsets)
            if mobs.mask[at][i] and abs(dy) <= height // 2 and abs(dx) <= width // 2
            if is_lit(world, *np.asarray(mobs.position[at])[i])
            if of_type is None or mobs.type_id[at][i] == of_type
        ]
        if visible:
            out[row] = offsets[min(visible)[1]]
    return out


def searched_facing(world: Any, constants: Any) -> int:
    step = {1: (0, -1), 2: (0, 1), 3: (-1, 0), 4: (1, 0)}[int(world.player_direction)]
    y, x = np.asarray(world.player_position) + step
    blocks = level_map(world)
    if not is_lit(world, y, x):
        return constants.BlockType.INVALID.value
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
    names = FEATURES[request.param]
    features = jax.jit(lambda moment: env.engine.features(names, moment))
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
        for feature, kinds in (("nearest_mobs", KINDS[name]), ("nearest_projectiles", SHOTS[name])):
            after, before = found[feature], found[f"{feature}_prev"]
            assert (after == searched_mobs(moment.after, kinds, constants)).all()
            assert (before == searched_mobs(moment.before, kinds, constants)).all()
            assert (found[f"{feature}_diff"] == after - before).all()


def test_mobs_and_items_of_full_craftax_are_told_by_the_games_own_numbers(case):
    name, constants, moments = case
    if name != FULL:
        return
    numbered = {mob.value: kind for mob, kind in zip(constants.MobType, NUMBERED, strict=False)}
    for moment, found in moments:
        assert (found["closest_items"] == searched_items(moment.after, constants)).all()
        for mob, kind in numbered.items():
            for number in range(8):
                seen = searched_mobs(moment.after, [kind], constants, number)
                assert (found["closest_mobs"][mob, number] == seen[0]).all()


def test_the_numbers_of_full_craftax_are_those_of_the_world(case):
    name, _, moments = case
    if name != FULL:
        return
    for moment, found in moments:
        for feature, field in NUMBERS.items():
            after, before = (
                np.asarray(getattr(world, field), int) for world in (moment.after, moment.before)
            )
            assert (np.asarray(found[feature], int) == after).all()
            assert (found[f"{feature}_diff"] == after - before).all()
        level = int(moment.after.player_level)
        foes = (
            moment.after.melee_mobs.mask[level].sum() + moment.after.ranged_mobs.mask[level].sum()
        )
        waiting = moment.after.boss_timesteps_to_spawn_this_round > 0
        assert found["boss_vulnerable"] == (foes == 0 and not waiting)


def test_no_feature_tells_what_the_observation_of_full_craftax_hides(worlds_of, case):
    """The map, the light and the facing block, decoded from what the game itself shows."""
    name, constants, moments = case
    if name != FULL:
        return
    env, _ = worlds_of(FULL)
    observe = jax.jit(env.engine.observe)
    rows, columns, channels = env.game.view
    blocks = len(constants.BlockType)
    for moment, found in moments[:12]:
        shown = np.asarray(observe(moment.after))[: rows * columns * channels]
        shown = shown.reshape(rows, columns, channels)
        seen = np.where(shown[..., :blocks].any(-1), shown[..., :blocks].argmax(-1), 0)
        assert (found["local_map"] == seen).all()
        assert (found["light_map"] == (shown[..., -1] > 0)).all()
        step = {1: (0, -1), 2: (0, 1), 3: (-1, 0), 4: (1, 0)}[int(moment.after.player_direction)]
        assert found["facing_block"] == seen[rows // 2 + step[0], columns // 2 + step[1]]


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
        lit = found.get("light_map", True)
        assert (found["local_map"] == np.where(lit, margin[rows, columns], 0)).all()
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
    assert sorted(found) == sorted(FEATURES[case[0]])
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
def test_features_of_the_world_have_two_more_forms_and_none_is_hidden_knowledge(env_name):
    names = FEATURES[env_name]
    of_step = {"is_sleeping", "was_sleeping", "timestep", "episode_timestep"}
    of_step |= {"env_reward", "damage_dealt", "health_penalty"}
    of_world = [name for name in names if not name.endswith(("_prev", "_diff"))]
    of_world = [name for name in of_world if name not in of_step]
    forms = [f"{name}{form}" for name in of_world for form in ("", "_prev", "_diff")]
    assert sorted([*forms, *of_step]) == sorted(names)
    assert not any("potion" in name or "ladders" in name for name in names)


@pytest.mark.parametrize("env_name", [CLASSIC, FULL])
def test_the_kept_moments_have_the_features_of_the_game(env_name, worlds_of):
    """When this fails: `python scripts/write_moments.py`."""
    env, worlds = worlds_of(env_name)
    world = jax.tree.map(lambda leaf: leaf[0], worlds)
    change = WorldStep(world, world, jnp.float32(0))
    names = FEATURES[env_name]
    real = jax.eval_shape(lambda step: env.engine.features(names, step), change)
    form = {name: (leaf.shape, leaf.dtype) for name, leaf in _leaves(real).items()}
    kept = _leaves(env.engine.moments())
    assert {name: (leaf.shape[1:], leaf.dtype) for name, leaf in kept.items()} == form
    fresh = _leaves(env.engine.fresh())
    assert {name: (leaf.shape[1:], leaf.dtype) for name, leaf in fresh.items()} == form
    assert {len(leaf) for leaf in fresh.values()} == {280}


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


GROUND = {"GRASS", "SAND", "PATH", "FIRE_GRASS", "ICE_GRASS", "ICE_SHRUB", "GRAVEL"}
MINED = {"STONE", "COAL", "STALAGMITE"}  # with a wooden pickaxe
BRIDGED = {"WATER", "LAVA"}  # by a stone that is placed, mined again and walked over


def test_every_ladder_down_can_be_reached_with_what_its_skill_asks_for(worlds_of):
    _, worlds = worlds_of(FULL)
    worlds = jax.device_get(worlds)
    blocks = importlib.import_module(find_game(FULL).constants).BlockType
    names = np.array([block.name for block in blocks])
    floors = set()
    for skill in load_library(FULL).values():
        needs = {item: str(amount) for item, amount in skill.requirements.items()}
        if not needs.get("on_floor", "n").isdigit():
            continue
        floor = int(needs["on_floor"])
        floors.add(floor)
        passable = GROUND | (MINED if "pickaxe" in needs else set())
        passable |= BRIDGED if {"pickaxe", "stone"} <= needs.keys() else set()
        for world in range(8):
            first = worlds.player_position[world]
            arrival = tuple(worlds.up_ladders[world, floor] if floor else first)
            area, _ = ndimage.label(np.isin(names[worlds.map[world, floor]], [*passable]))
            reached = 0 < area[arrival] == area[tuple(worlds.down_ladders[world, floor])]
            assert reached, f"{skill.name}: in world {world} the ladder is out of reach"
    assert floors == set(range(8))
