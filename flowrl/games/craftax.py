"""Craftax-Classic and full Craftax: what skill code can name in each, without loading Craftax."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.games.base import Engine, Game
from flowrl.games.probes import Probes

_CLASSIC_BLOCKS = """
INVALID OUT_OF_BOUNDS GRASS WATER STONE TREE WOOD PATH COAL IRON DIAMOND CRAFTING_TABLE FURNACE
SAND LAVA PLANT RIPE_PLANT
"""
_MORE_BLOCKS = """
WALL DARKNESS WALL_MOSS STALAGMITE SAPPHIRE RUBY CHEST FOUNTAIN FIRE_GRASS ICE_GRASS GRAVEL
FIRE_TREE ICE_SHRUB ENCHANTMENT_TABLE_FIRE ENCHANTMENT_TABLE_ICE NECROMANCER GRAVE GRAVE2 GRAVE3
NECROMANCER_VULNERABLE
"""
_CLASSIC_ACTIONS = """
NOOP LEFT RIGHT UP DOWN DO SLEEP PLACE_STONE PLACE_TABLE PLACE_FURNACE PLACE_PLANT
MAKE_WOOD_PICKAXE MAKE_STONE_PICKAXE MAKE_IRON_PICKAXE MAKE_WOOD_SWORD MAKE_STONE_SWORD
MAKE_IRON_SWORD
"""
_MORE_ACTIONS = """
REST DESCEND ASCEND MAKE_DIAMOND_PICKAXE MAKE_DIAMOND_SWORD MAKE_IRON_ARMOUR MAKE_DIAMOND_ARMOUR
SHOOT_ARROW MAKE_ARROW CAST_FIREBALL CAST_ICEBALL PLACE_TORCH DRINK_POTION_RED DRINK_POTION_GREEN
DRINK_POTION_BLUE DRINK_POTION_PINK DRINK_POTION_CYAN DRINK_POTION_YELLOW READ_BOOK ENCHANT_SWORD
ENCHANT_ARMOUR MAKE_TORCH LEVEL_UP_DEXTERITY LEVEL_UP_STRENGTH LEVEL_UP_INTELLIGENCE ENCHANT_BOW
"""
_CLASSIC_ACHIEVEMENTS = """
COLLECT_WOOD PLACE_TABLE EAT_COW COLLECT_SAPLING COLLECT_DRINK MAKE_WOOD_PICKAXE MAKE_WOOD_SWORD
PLACE_PLANT DEFEAT_ZOMBIE COLLECT_STONE PLACE_STONE EAT_PLANT DEFEAT_SKELETON MAKE_STONE_PICKAXE
MAKE_STONE_SWORD WAKE_UP PLACE_FURNACE COLLECT_COAL COLLECT_IRON COLLECT_DIAMOND
MAKE_IRON_PICKAXE MAKE_IRON_SWORD
"""
# ORC_SOLIDER is spelt so in the game.
_MORE_ACHIEVEMENTS = """
MAKE_ARROW MAKE_TORCH PLACE_TORCH COLLECT_SAPPHIRE COLLECT_RUBY MAKE_DIAMOND_PICKAXE
MAKE_DIAMOND_SWORD MAKE_IRON_ARMOUR MAKE_DIAMOND_ARMOUR ENTER_GNOMISH_MINES ENTER_DUNGEON
ENTER_SEWERS ENTER_VAULT ENTER_TROLL_MINES ENTER_FIRE_REALM ENTER_ICE_REALM ENTER_GRAVEYARD
DEFEAT_GNOME_WARRIOR DEFEAT_GNOME_ARCHER DEFEAT_ORC_SOLIDER DEFEAT_ORC_MAGE DEFEAT_LIZARD
DEFEAT_KOBOLD DEFEAT_KNIGHT DEFEAT_ARCHER DEFEAT_TROLL DEFEAT_DEEP_THING DEFEAT_PIGMAN
DEFEAT_FIRE_ELEMENTAL DEFEAT_FROST_TROLL DEFEAT_ICE_ELEMENTAL DAMAGE_NECROMANCER
DEFEAT_NECROMANCER EAT_BAT EAT_SNAIL FIND_BOW FIRE_BOW LEARN_FIREBALL CAST_FIREBALL
LEARN_ICEBALL CAST_ICEBALL OPEN_CHEST DRINK_POTION ENCHANT_SWORD ENCHANT_ARMOUR
"""
_MATERIALS = "wood stone coal iron diamond sapling"
_CLASSIC_TOOLS = "wood_pickaxe stone_pickaxe iron_pickaxe wood_sword stone_sword iron_sword"
_MORE_ITEMS = "pickaxe sword bow arrows armour torches ruby sapphire potions books"


# `*_diff` is the value after the timestep less the value before it, as int32 or float32.
# Positions are (dy, dx), the thing's less the player's; 30 in both where it is out of sight.
_FEATURES = {
    "inventory": "Craftax's Inventory of ints, after the timestep",
    "inventory_diff": "the same struct",
    "closest_blocks": "int[block types, 2, 5]: the nearest in view, nearest first",
    "closest_blocks_prev": "the same, one timestep earlier",
    "facing_block": "int: BlockType value of the block in front of the player",
    "player_intrinsics": "float[4]: health, food, drink, energy",
    "player_intrinsics_diff": "float[4]",
    "achievements": "int[achievements]: 0 or 1, kept for the whole episode",
    "achievements_diff": "int[achievements]: 1 in the timestep that unlocked it",
    "player_level": "int: the floor, always 0 in Classic",
    "player_level_diff": "int",
    "monsters_killed": "int[floors]: one zero in Classic",
    "monsters_killed_diff": "int[floors]",
    "is_sleeping": "bool, after the timestep",
    "was_sleeping": "bool, before the timestep",
    "nearest_mobs": "int[3, 2]: the nearest zombie, cow, skeleton in view",
    "nearest_mobs_prev": "the same, one timestep earlier",
    "local_map": "int[rows, columns] in view: BlockType values, the player in the middle",
    "light_level": "float from 0, dark, to 1, after the timestep",
    "timestep": "int: the number of this timestep in the plan's step, from 1",
    "episode_timestep": "int: its number in the episode, from 1",
    "env_reward": "float: the game's own reward of this timestep",
    "damage_dealt": "float: health that foes (zombies, skeletons, …) lost in this timestep",
    "health_penalty": "float: 0.1 × health lost in this timestep, 0 or negative",
}
_NEEDS = ("hunger", "thirst", "fatigue", "other")
_PINNED = "1.6."  # the versions of craftax whose facts are known, as pyproject.toml has them
_LIBRARY = Path(__file__).parents[1] / "skills" / "library"


def _engine(name: str, package: str) -> Engine:
    from flowrl.games.craftax_engine import CraftaxEngine

    return CraftaxEngine(name, package)


def _renderer(package: str) -> Any:
    from flowrl.games.craftax_engine import pixel_renderer

    return pixel_renderer(package)


def _probes(name: str, package: str) -> Probes:
    if not (found := version("craftax")).startswith(_PINNED):
        what = f"craftax {found} is installed, but its rules are probed as of {_PINNED}x"
        raise ConfigError(f"{what}; pip install 'craftax=={_PINNED}*'")
    from flowrl.games.craftax_probes import CraftaxProbes

    return CraftaxProbes(name, package)


def _game(name: str, folder: str, **fields: Any) -> Game:
    package = f"craftax.{folder}"
    return Game(
        name=name,
        features=_FEATURES,
        constants=f"{package}.constants",
        library_folder=_LIBRARY / folder,
        intrinsics=("health", "food", "drink", "energy"),
        sources=("craftax",),
        make=partial(_engine, name, package),
        renderer=partial(_renderer, package),
        probes=partial(_probes, name, package),
        **fields,
    )


def _enums(*, blocks: str, actions: str, achievements: str) -> dict[str, frozenset[str]]:
    words = {"BlockType": blocks, "Action": actions, "Achievement": achievements}
    return {enum: frozenset(names.split()) for enum, names in words.items()}


CLASSIC = _game(
    "Craftax-Classic-Symbolic-v1",
    "craftax_classic",
    capacity=9,
    observation_size=1345,
    view=(7, 9, 21),
    lasting=17,
    heading=1339,
    cells=(16, 16),
    causes=("lava", "asleep", "zombie", "arrow", *_NEEDS),  # as the engine tells them apart
    num_actions=17,
    enums=_enums(
        blocks=_CLASSIC_BLOCKS, actions=_CLASSIC_ACTIONS, achievements=_CLASSIC_ACHIEVEMENTS
    ),
    items=frozenset(f"{_MATERIALS} {_CLASSIC_TOOLS}".split()),
)
FULL = _game(
    "Craftax-Symbolic-v1",
    "craftax",
    capacity=99,
    observation_size=8268,
    view=(9, 11, 83),
    lasting=42,  # blocks, and items such as ladders
    heading=8248,
    cells=(9 * 14, 12),  # of nine floors, two rows apart
    causes=("lava", "asleep", "mob", "arrow", *_NEEDS),
    num_actions=43,
    enums=_enums(
        blocks=_CLASSIC_BLOCKS + _MORE_BLOCKS,
        actions=_CLASSIC_ACTIONS + _MORE_ACTIONS,
        achievements=_CLASSIC_ACHIEVEMENTS + _MORE_ACHIEVEMENTS,
    ),
    items=frozenset(f"{_MATERIALS} {_MORE_ITEMS}".split()),
)
