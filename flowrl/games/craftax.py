"""Craftax-Classic and full Craftax: what skill code can name in each, without loading Craftax."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from math import inf
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


# Positions are (dy, dx), the thing's less the player's; 30 in both where it is out of sight.
_OF_WORLD = {  # after the timestep; each also with _prev, one timestep earlier, and _diff
    "inventory": "Craftax's Inventory of ints",
    "closest_blocks": "int[block types, 2, 5]: the nearest in view, nearest first",
    "facing_block": "int: BlockType value of the block in front of the player",
    "player_intrinsics": "float[4]: health, food, drink, energy",
    "achievements": "int[achievements]: 0 or 1, kept for the whole episode",
    "player_level": "int: the floor, always 0 in Classic",
    "monsters_killed": "int[floors]: one zero in Classic",
    "nearest_mobs": "int[3, 2]: the nearest zombie, cow, skeleton in view",
    "nearest_projectiles": "int[1, 2], in full Craftax int[2, 2]: of mobs, and of the player",
    "local_map": "int[rows, columns] in view: BlockType values, the player in the middle",
    "light_level": "float from 0, dark, to 1",
}
_OF_FULL_WORLD = {
    "closest_items": "int[item types, 2, 5]: the nearest in view, nearest first",
    "closest_mobs": "int[3, 8, 2]: the nearest in view by MobType and the mob's own number",
    "light_map": "bool[rows, columns] in view: which cells have light, the player in the middle",
    "player_mana": "int",
    "player_xp": "int: what levelling up costs, one for each new floor",
    "dexterity": "int from 1 to 5",
    "strength": "int from 1 to 5",
    "intelligence": "int from 1 to 5",
    "learned_spells": "int[2]: 1 once learned; fireball, iceball",
    "sword_enchantment": "int: 0 none, 1 fire, 2 ice",
    "bow_enchantment": "int: 0 none, 1 fire, 2 ice",
    "armour_enchantments": "int[4]: of each piece, 0 none, 1 fire, 2 ice",
    "chests_opened": "int[floors]: 1 once a chest of the floor was opened",
    "is_resting": "bool",
    "boss_progress": "int: hits that hurt the boss, of 8",
    "boss_vulnerable": "bool: no foe is left of the boss's wave",
}
_OF_STEP = {
    "is_sleeping": "bool, after the timestep",
    "was_sleeping": "bool, before the timestep",
    "timestep": "int: the number of this timestep in the plan's step, from 1",
    "episode_timestep": "int: its number in the episode, from 1",
    "env_reward": "float: the game's own reward of this timestep",
    "damage_dealt": "float: health that foes (zombies, skeletons, …) lost in this timestep",
    "health_penalty": "float: 0.1 × health lost in this timestep, 0 or negative",
}


def _features(of_world: Mapping[str, str]) -> dict[str, str]:
    """All that a function may ask for, each feature of the world in three forms."""
    listed: dict[str, str] = {}
    for name, meaning in of_world.items():
        listed[name] = meaning
        listed[f"{name}_prev"] = "the same, one timestep earlier"
        listed[f"{name}_diff"] = "the value less that of one timestep earlier, int or float"
    return listed | _OF_STEP


def _bounds(*, blocks: str, floors: int, needs: int) -> dict[str, tuple[float, float]]:
    """The least and the most of features; `needs` is the most of the player's intrinsics."""
    truths = ("achievements", "is_sleeping", "was_sleeping", "light_level")
    return {
        **dict.fromkeys(truths, (0, 1)),
        **dict.fromkeys(("facing_block", "local_map"), (0, len(blocks.split()) - 1)),
        **dict.fromkeys(("timestep", "episode_timestep"), (1, inf)),
        "player_level": (0, floors - 1),
        "player_intrinsics": (0, needs),
        "monsters_killed": (0, 0 if floors == 1 else inf),
        "health_penalty": (-inf, 0),
    }


_FULL_BOUNDS: Mapping[str, tuple[float, float]] = {
    "inventory.armour": (0, 2),  # a piece
    **dict.fromkeys(("inventory.pickaxe", "inventory.sword"), (0, 4)),
    "inventory.bow": (0, 1),
    **dict.fromkeys(("dexterity", "strength", "intelligence"), (1, 5)),
    "player_mana": (0, 6 + 3 * 5),
    "player_xp": (0, inf),
    **dict.fromkeys(("learned_spells", "chests_opened", "light_map"), (0, 1)),
    **dict.fromkeys(("is_resting", "boss_vulnerable"), (0, 1)),
    **dict.fromkeys(("sword_enchantment", "bow_enchantment", "armour_enchantments"), (0, 2)),
    "boss_progress": (0, 8),
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
        constants=f"{package}.constants",
        library_folder=_LIBRARY / folder,
        intrinsics=("health", "food", "drink", "energy"),
        sources=("craftax",),
        make=partial(_engine, name, package),
        renderer=partial(_renderer, package),
        probes=partial(_probes, name, package),
        **fields,
    )


def _enums(**words: str) -> dict[str, frozenset[str]]:
    return {enum: frozenset(names.split()) for enum, names in words.items()}


_MOVES = (1, 2, 3, 4)  # LEFT, RIGHT, UP and DOWN in both games
CLASSIC = _game(
    "Craftax-Classic-Symbolic-v1",
    "craftax_classic",
    capacity=9,
    limits=dict.fromkeys(_CLASSIC_TOOLS.split(), 1),
    observation_size=1345,
    view=(7, 9, 21),
    lasting=17,
    heading=1339,
    moves=_MOVES,
    cells=(16, 16),
    causes=("lava", "asleep", "zombie", "arrow", *_NEEDS),  # as the engine tells them apart
    num_actions=17,
    features=_features(_OF_WORLD),
    bounds=_bounds(blocks=_CLASSIC_BLOCKS, floors=1, needs=9),
    enums=_enums(
        BlockType=_CLASSIC_BLOCKS, Action=_CLASSIC_ACTIONS, Achievement=_CLASSIC_ACHIEVEMENTS
    ),
    items=frozenset(f"{_MATERIALS} {_CLASSIC_TOOLS}".split()),
)
FULL = _game(
    "Craftax-Symbolic-v1",
    "craftax",
    capacity=99,
    limits={"pickaxe": 4, "sword": 4, "bow": 1, "armour": 8},  # tools by level, two a piece
    floors=9,
    observation_size=8268,
    view=(9, 11, 83),
    lasting=42,  # blocks, and items such as ladders
    heading=8248,
    moves=_MOVES,
    cells=(9 * 14, 12),  # of nine floors, two rows apart
    causes=("lava", "asleep", "mob", "arrow", *_NEEDS),
    num_actions=43,
    features=_features(_OF_WORLD | _OF_FULL_WORLD),
    # A player of the most dexterity has 7 + 2 × 5 food, drink and energy at most.
    bounds=_bounds(blocks=_CLASSIC_BLOCKS + _MORE_BLOCKS, floors=9, needs=17) | _FULL_BOUNDS,
    enums=_enums(
        BlockType=_CLASSIC_BLOCKS + _MORE_BLOCKS,
        Action=_CLASSIC_ACTIONS + _MORE_ACTIONS,
        Achievement=_CLASSIC_ACHIEVEMENTS + _MORE_ACHIEVEMENTS,
        ItemType="NONE TORCH LADDER_DOWN LADDER_UP LADDER_DOWN_BLOCKED",
        MobType="PASSIVE MELEE RANGED PROJECTILE",
    ),
    items=frozenset(f"{_MATERIALS} {_MORE_ITEMS}".split()),
)
