"""The last action before each skill of Craftax succeeds, and the world in which it is done."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp

from flowrl.games.base import find_game
from flowrl.skills.floors import Floors
from flowrl.skills.graph import SkillGraph
from flowrl.skills.levels import entry_needs
from flowrl.skills.skill import Skill, load_library
from tests.skills.worlds import BEHIND, Game, game_of

CLASSIC = "Craftax-Classic-Symbolic-v1"
FULL = "Craftax-Symbolic-v1"
GRAPHS = {
    name: SkillGraph(load_library(name).values(), capacity=find_game(name).capacity)
    for name in (CLASSIC, FULL)
}
FLOORS = Floors(GRAPHS[FULL].skills.values())
NIGHTS = {"Spend Night", "Spend Second Night"}
LIVING = {"Settle", "Graze", "Dig In", *NIGHTS}  # no achievements, but they lead to one
PLACES = ("Dungeon", "Gnomish Mines", "Sewers", "Vault", "Troll Mines", "Fire Realm", "Ice Realm")
CLEARED = {f"Clear {place}": floor for floor, place in enumerate(PLACES, start=1)}
ENTERED = [f"Enter {place}" for place in (*PLACES, "Graveyard")]
LOOT = {"Find Book", "Find Vault Book", "Find Bow", "Find Potion", "Open Chest"}
CHANCY = {"Collect Sapling", "Find Potion"}
COUNTS = {"Make Arrow": 2, "Make Torch": 4}  # one action makes so many
DUG = {"Dig In": {"stone": 1}}  # what a skill yields itself before the action below spends it
SEEDS = 60  # a sapling is found in one try of ten
_CRAFTED = ["Arrow", "Torch", "Iron Armour", "Diamond Armour"] + [
    f"{metal} {tool}"
    for metal in ("Wood", "Stone", "Iron", "Diamond")
    for tool in ("Pickaxe", "Sword")
]
# The action that reaches the skill's goal, and what stands in front of the player.
DEEDS = {
    **{f"Make {thing}": (f"MAKE_{thing}".upper().replace(" ", "_"), "GRASS") for thing in _CRAFTED},
    **{
        f"Collect {thing}": ("DO", thing.upper())
        for thing in ("Stone", "Coal", "Iron", "Diamond", "Sapphire", "Ruby")
    },
    "Collect Wood": ("DO", "TREE"),
    "Mine Stalagmite": ("DO", "STALAGMITE"),
    "Collect Drink": ("DO", "WATER"),
    "Collect Sapling": ("DO", "GRASS"),
    "Place Table": ("PLACE_TABLE", "GRASS"),
    "Place Stone": ("PLACE_STONE", "GRASS"),
    "Place Furnace": ("PLACE_FURNACE", "GRASS"),
    "Place Plant": ("PLACE_PLANT", "GRASS"),
    "Place Torch": ("PLACE_TORCH", "GRASS"),
    "Settle": ("PLACE_PLANT", "GRASS"),
    "Graze": ("DO", "GRASS"),
    "Dig In": ("PLACE_STONE", "GRASS"),
    **dict.fromkeys((*NIGHTS, "Wake Up", "Rest"), ("NOOP", "GRASS")),
    "Eat Plant": ("DO", "SAND"),
    **dict.fromkeys(LOOT, ("DO", "CHEST")),
    "Fire Bow": ("SHOOT_ARROW", "GRASS"),
    "Drink Potion": ("DRINK_POTION_RED", "GRASS"),
    **dict.fromkeys(("Learn Spell", "Learn Second Spell"), ("READ_BOOK", "GRASS")),
    "Cast Fireball": ("CAST_FIREBALL", "GRASS"),
    "Cast Iceball": ("CAST_ICEBALL", "GRASS"),
    "Enchant Sword": ("ENCHANT_SWORD", "ENCHANTMENT_TABLE_ICE"),
    "Enchant Sword With Fire": ("ENCHANT_SWORD", "ENCHANTMENT_TABLE_FIRE"),
    "Enchant Bow": ("ENCHANT_BOW", "ENCHANTMENT_TABLE_FIRE"),
    "Enchant Armour": ("ENCHANT_ARMOUR", "ENCHANTMENT_TABLE_FIRE"),
    **dict.fromkeys(ENTERED, ("DESCEND", "GRASS")),
    "Climb Up": ("ASCEND", "GRASS"),
    **dict.fromkeys(("Damage Necromancer", "Defeat Necromancer"), ("DO", "NECROMANCER")),
    **{
        f"Level Up {talent}": (f"LEVEL_UP_{talent.upper()}", "GRASS")
        for talent in ("Dexterity", "Strength", "Intelligence")
    },
}
_CLASSIC_MOBS = {
    "Eat Cow": "cows",
    "Graze": "cows",
    "Defeat Zombie": "zombies",
    "Defeat Skeleton": "skeletons",
}


class Mob(NamedTuple):
    """A mob in front of the player: its kind, and its own number in full Craftax."""

    kind: str
    number: int | None = None


@functools.cache
def _full_mobs() -> dict[str, Mob]:
    """The mob of each skill of full Craftax that hunts, as the game's achievements name them."""
    constants = game_of(FULL).constants
    kinds = ("passive_mobs", "melee_mobs", "ranged_mobs")
    hunted = {
        title(constants.Achievement(int(value)).name): Mob(kind, number)
        for kind, row in zip(kinds, constants.MOB_ACHIEVEMENT_MAP, strict=True)
        for number, value in enumerate(row)
        if value
    }
    melee = constants.FLOOR_MOB_MAPPING[:, 1]
    return hunted | {name: Mob("melee_mobs", int(melee[at])) for name, at in CLEARED.items()}


def mob_of(game: Game, name: str) -> Mob | None:
    """The mob that a skill is about."""
    if game is game_of(FULL):
        return _full_mobs().get(name)
    return Mob(_CLASSIC_MOBS[name]) if name in _CLASSIC_MOBS else None


def title(achievement: str) -> str:
    """An achievement's name as a skill's."""
    return achievement.title().replace("_", " ")


def deed(name: str) -> tuple[str, str]:
    """The action of a skill, and the block in front of the player; a mob is struck."""
    return DEEDS.get(name, ("DO", "PATH" if name == "Defeat Skeleton" else "GRASS"))


def count(name: str) -> int:
    return COUNTS.get(name, 1)


def on_its_floor(game: Game, skill: Skill) -> Any:
    """The empty world with the player on a floor where the skill can be done, on its ladder."""
    if not hasattr(game.empty, "player_level"):
        return game.empty
    world = game.empty.replace(player_level=jnp.int32(min(FLOORS.starts(skill, 1))))
    ladders = {"DESCEND": "LADDER_DOWN", "ASCEND": "LADDER_UP"}
    action, _ = deed(skill.name)
    return game.with_ladder(world, ladders[action]) if action in ladders else world


def at_home(game: Game, skill: Skill, world: Any) -> Any:
    """The world with what the skills of life beside a plant are about."""
    if skill.name == "Settle":
        for place in ((25, 22), (25, 23), (25, 24), (26, 23), (26, 24)):
            world = game.with_block(world, "STONE", place)
        return game.with_block(world, "WATER", (25, 25))
    if skill.name == "Eat Plant":
        return game.with_block(world, "RIPE_PLANT")
    if skill.name == "Dig In":
        for place in ((24, 23), (24, 25), (25, 24)):
            world = game.with_block(world, "STONE", place)
        return world
    if skill.name == "Graze":
        world = game.with_block(world, "PLANT", (25, 25))
        return world.replace(player_food=jnp.int32(4), timestep=jnp.int32(150))
    if skill.name in NIGHTS:
        return world.replace(timestep=jnp.int32(269))
    return world


def one_short(skill: Skill, world: Any) -> Any:
    """The world in which one kill, one hit or one timestep is missing."""
    if skill.name in CLEARED:
        killed = world.monsters_killed.at[CLEARED[skill.name]].set(7)
        return world.replace(monsters_killed=killed)
    if skill.name == "Wake Up":
        return world.replace(is_sleeping=jnp.bool_(True), player_energy=jnp.int32(9))
    if skill.name == "Rest":
        return world.replace(is_resting=jnp.bool_(True), player_health=jnp.float32(9))
    if skill.name.startswith("Level Up"):
        return world.replace(player_xp=jnp.int32(1))
    if skill.name.endswith("Necromancer"):
        hits = 7 * skill.name.startswith("Defeat")
        waited = jnp.int32(0)
        return world.replace(
            boss_progress=jnp.int32(hits), boss_timesteps_to_spawn_this_round=waited
        )
    return world


def with_facts(world: Any, needs: dict[str, int]) -> Any:
    """The world of full Craftax in which the needs hold that no inventory counts."""
    for floor in CLEARED.values():
        if (cleared := needs.get(f"floor_cleared_{floor}")) is not None:
            killed = world.monsters_killed.at[floor].set(7 + cleared)
            world = world.replace(monsters_killed=killed)
    for number, facts in enumerate((("spell", "fireball"), ("iceball",))):
        if any(needs.get(fact) for fact in facts):
            world = world.replace(learned_spells=world.learned_spells.at[number].set(True))
    for number, fact in enumerate(("fire_sword", "ice_sword"), start=1):
        if needs.get(fact):
            world = world.replace(sword_enchantment=jnp.int32(number))
    return world


def world_for(game: Game, skill: Skill, *, without: str | None = None) -> Any:
    """A world in which the skill's requirements hold at its count, but for one."""
    needs = entry_needs(skill, count(skill.name))
    needs = {item: need - (item == without) for item, need in needs.items()}
    world = one_short(skill, with_facts(on_its_floor(game, skill), needs))
    world = game.with_block(world, deed(skill.name)[1])
    for fact, block in {"near_table": "CRAFTING_TABLE", "near_furnace": "FURNACE"}.items():
        if needs.get(fact):
            world = game.with_block(world, block, BEHIND[block])
    world = at_home(game, skill, world)
    if mob := mob_of(game, skill.name):
        world = game.with_mob(world, mob.kind, mob.number)
    needs |= DUG.get(skill.name, {})
    carried = {item: need for item, need in needs.items() if hasattr(world.inventory, item)}
    return game.with_items(world, **carried)


def outcome(game: Game, skill: Skill, world: Any) -> Any:
    """The world after the deed: of several throws of the dice, the first that is done."""
    after = world
    for seed in range(SEEDS if skill.name in CHANCY else 1):
        after, _ = game.act(world, deed(skill.name)[0], seed)
        if game.ask(skill, "task_is_done", world, after, n=count(skill.name)):
            break
    return after


@functools.cache
def done(env_name: str, name: str) -> tuple[Any, Any]:
    """The worlds before and after a skill's deed, with all that it requires."""
    game, skill = game_of(env_name), GRAPHS[env_name].skills[name]
    before = world_for(game, skill)
    return before, outcome(game, skill, before)


def unlocked(env_name: str, name: str) -> set[str]:
    """The achievements that the deed unlocks, but not idling in the same world."""
    game, (before, after) = game_of(env_name), done(env_name, name)
    idle = before if deed(name)[0] == "NOOP" else game.act(before, "NOOP")[0]
    new = after.achievements.astype(int) - idle.achievements.astype(int)
    return {each.name for each in game.constants.Achievement if new[each.value] > 0}
