"""The two games as tables: what skill code can name in each, without loading Craftax or JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flowrl.errors import ConfigError

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


@dataclass(frozen=True, slots=True, kw_only=True)
class GameTable:
    """One game, as far as it can be known without running it."""

    env_name: str
    package: str  # of Craftax; its `constants` module holds the enums
    folder: str  # of its embedded skills and its kept moments
    capacity: int  # of each item in the inventory
    observation_size: int
    num_actions: int
    members: Mapping[str, frozenset[str]]  # enum → its members
    items: frozenset[str]  # fields of the inventory


def _members(*, blocks: str, actions: str, achievements: str) -> dict[str, frozenset[str]]:
    words = {"BlockType": blocks, "Action": actions, "Achievement": achievements}
    return {enum: frozenset(names.split()) for enum, names in words.items()}


GAMES: Mapping[str, GameTable] = {
    game.env_name: game
    for game in (
        GameTable(
            env_name="Craftax-Classic-Symbolic-v1",
            package="craftax.craftax_classic",
            folder="craftax_classic",
            capacity=9,
            observation_size=1345,
            num_actions=17,
            members=_members(
                blocks=_CLASSIC_BLOCKS,
                actions=_CLASSIC_ACTIONS,
                achievements=_CLASSIC_ACHIEVEMENTS,
            ),
            items=frozenset(f"{_MATERIALS} {_CLASSIC_TOOLS}".split()),
        ),
        GameTable(
            env_name="Craftax-Symbolic-v1",
            package="craftax.craftax",
            folder="craftax",
            capacity=99,
            observation_size=8268,
            num_actions=43,
            members=_members(
                blocks=_CLASSIC_BLOCKS + _MORE_BLOCKS,
                actions=_CLASSIC_ACTIONS + _MORE_ACTIONS,
                achievements=_CLASSIC_ACHIEVEMENTS + _MORE_ACHIEVEMENTS,
            ),
            items=frozenset(f"{_MATERIALS} {_MORE_ITEMS}".split()),
        ),
    )
}
ENUMS = frozenset({"BlockType", "Action", "Achievement"})
ITEMS = frozenset().union(*(game.items for game in GAMES.values()))


def table_of(env_name: object) -> GameTable:
    """The table of an environment.

    Raises:
      ConfigError: the environment is unknown.
    """
    for name, game in GAMES.items():
        if name == env_name:
            return game
    raise ConfigError(f"--env_name {env_name} is unknown; choose one of {', '.join(GAMES)}")
