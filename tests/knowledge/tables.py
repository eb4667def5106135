"""The recipes of Craftax's two games, written by hand from reading their game_logic.py.

`action ahead | needs | changes | becomes | achievements`: `*` is anything ahead, `?` is chance.
"""

_MINING = """
DO TREE | | wood+1 | GRASS | COLLECT_WOOD
DO WATER | | drink+1 | | COLLECT_DRINK
DO GRASS | | sapling+1? | | COLLECT_SAPLING?
DO RIPE_PLANT | | food+4 | PLANT | EAT_PLANT
PLACE_PLANT GRASS | sapling>=1 | sapling-1 | PLANT | PLACE_PLANT
"""
_PLACING = """
PLACE_TABLE {free} | wood>=2 | wood-2 near_table+1 | CRAFTING_TABLE | PLACE_TABLE
PLACE_FURNACE {free} | stone>=1 | stone-1 near_furnace+1 | FURNACE | PLACE_FURNACE
PLACE_STONE {wet} | stone>=1 | stone-1 | STONE | PLACE_STONE
"""
_TIME = """
NOOP * | hunger>=25 food>=1{below} | food-1 | |
NOOP * | thirst>=20 drink>=1{below} | drink-1 | |
NOOP * | fatigue>=30 energy>=1{below} | energy-1 | |
NOOP * | recover>=25 food>=1 drink>=1 energy>=1 | health+1 | |
NOOP * | recover<=-15 | health-1 | |
NOOP * | rested>=10 asleep>=1 | energy+1 | |
NOOP * | asleep>=1 energy>=9{clumsy} | asleep-1 | | WAKE_UP
NOOP PLANT | plant_age>=599{above} | | RIPE_PLANT |
SLEEP * | energy<=8 | asleep+1 | |
LEFT * | | moved+1 | |
RIGHT * | | moved+1 | |
DOWN * | | moved+1 | |
UP {dry} | | moved+1 | |
"""
_CLASSIC = """
DO STONE | wood_pickaxe>=1 | stone+1 | PATH | COLLECT_STONE
DO COAL | wood_pickaxe>=1 | coal+1 | PATH | COLLECT_COAL
DO IRON | stone_pickaxe>=1 | iron+1 | PATH | COLLECT_IRON
DO DIAMOND | iron_pickaxe>=1 | diamond+1 | PATH | COLLECT_DIAMOND
DO COW | | food+6 mob_health-1 | | EAT_COW
DO ZOMBIE | | mob_health-1 | | DEFEAT_ZOMBIE
DO SKELETON | | mob_health-1 | | DEFEAT_SKELETON
UP LAVA | | health-3 moved+1 | |
MAKE_WOOD_PICKAXE * | near_table>=1 wood>=1 | wood-1 wood_pickaxe+1 | | MAKE_WOOD_PICKAXE
MAKE_WOOD_SWORD * | near_table>=1 wood>=1 | wood-1 wood_sword+1 | | MAKE_WOOD_SWORD
MAKE_STONE_PICKAXE * | near_table>=1 wood>=1 stone>=1 | wood-1 stone-1 stone_pickaxe+1 | \
| MAKE_STONE_PICKAXE
MAKE_STONE_SWORD * | near_table>=1 wood>=1 stone>=1 | wood-1 stone-1 stone_sword+1 | \
| MAKE_STONE_SWORD
MAKE_IRON_PICKAXE * | near_table>=1 near_furnace>=1 wood>=1 stone>=1 coal>=1 iron>=1 | \
wood-1 stone-1 coal-1 iron-1 iron_pickaxe+1 | | MAKE_IRON_PICKAXE
MAKE_IRON_SWORD * | near_table>=1 near_furnace>=1 wood>=1 stone>=1 coal>=1 iron>=1 | \
wood-1 stone-1 coal-1 iron-1 iron_sword+1 | | MAKE_IRON_SWORD
"""
_FULL = """
NOOP * | recover_mana>=30 | mana+1 | |
DO FOUNTAIN | | drink+1 | | COLLECT_DRINK
DO STONE | pickaxe>=1 | stone+1 | PATH | COLLECT_STONE
DO STALAGMITE | pickaxe>=1 | stone+1 | PATH | COLLECT_STONE
DO COAL | pickaxe>=1 | coal+1 | PATH | COLLECT_COAL
DO IRON | pickaxe>=2 | iron+1 | PATH | COLLECT_IRON
DO DIAMOND | pickaxe>=3 | diamond+1 | PATH | COLLECT_DIAMOND
DO SAPPHIRE | pickaxe>=4 | sapphire+1 | PATH | COLLECT_SAPPHIRE
DO RUBY | pickaxe>=4 | ruby+1 | PATH | COLLECT_RUBY
DO FIRE_TREE | | wood+1 | FIRE_GRASS | COLLECT_WOOD
DO ICE_SHRUB | | wood+1 | ICE_GRASS | COLLECT_WOOD
DO CRAFTING_TABLE | | near_table-1 | PATH |
DO FURNACE | | near_furnace-1 | PATH |
DO CHEST | | LOOT | PATH | OPEN_CHEST LOOT
DO CHEST | floor=1 chests_opened<=0 | bow+1 LOOT | PATH | OPEN_CHEST FIND_BOW LOOT
DO CHEST | floor=3..4 chests_opened<=0 | books+1 LOOT | PATH | OPEN_CHEST LOOT
DO NECROMANCER | floor>=8 foes<=0 boss_wave<=0 | boss_progress+1 | | DAMAGE_NECROMANCER
DO NECROMANCER | floor>=8 foes<=0 boss_wave<=0 boss_progress>=7 | boss_progress+1 | \
| DAMAGE_NECROMANCER DEFEAT_NECROMANCER
REST * | health<=8 food>=1 drink>=1 | resting+1 | |
PLACE_TORCH {torch} | torches>=1 | torches-1 torch_ahead+1 | | PLACE_TORCH
MAKE_WOOD_PICKAXE * | near_table>=1 wood>=1 pickaxe<=0 | wood-1 pickaxe+1 | | {p1}
MAKE_STONE_PICKAXE * | near_table>=1 wood>=1 stone>=1 pickaxe<=1 | wood-1 stone-1 pickaxe+2 | \
| {p2}
MAKE_IRON_PICKAXE * | near_table>=1 near_furnace>=1 wood>=1 stone>=1 coal>=1 iron>=1 pickaxe<=2 | \
wood-1 stone-1 coal-1 iron-1 pickaxe+3 | | {p3}
MAKE_DIAMOND_PICKAXE * | near_table>=1 wood>=1 diamond>=3 pickaxe<=3 | \
wood-1 diamond-3 pickaxe+4 | | {p4}
MAKE_WOOD_SWORD * | near_table>=1 wood>=1 sword<=0 | wood-1 sword+1 | | {s1}
MAKE_STONE_SWORD * | near_table>=1 wood>=1 stone>=1 sword<=1 | wood-1 stone-1 sword+2 | | {s2}
MAKE_IRON_SWORD * | near_table>=1 near_furnace>=1 wood>=1 stone>=1 coal>=1 iron>=1 sword<=2 | \
wood-1 stone-1 coal-1 iron-1 sword+3 | | {s3}
MAKE_DIAMOND_SWORD * | near_table>=1 wood>=1 diamond>=2 sword<=3 | wood-1 diamond-2 sword+4 | \
| {s4}
MAKE_IRON_ARMOUR * | near_table>=1 near_furnace>=1 iron>=3 coal>=3 armour<=3 | \
iron-3 coal-3 armour+1 | | MAKE_IRON_ARMOUR
MAKE_DIAMOND_ARMOUR * | near_table>=1 diamond>=3 armour<=7 | diamond-3 armour+2 | \
| MAKE_DIAMOND_ARMOUR
MAKE_ARROW * | near_table>=1 wood>=1 stone>=1 arrows<=98 | wood-1 stone-1 arrows+2 | | MAKE_ARROW
MAKE_TORCH * | near_table>=1 wood>=1 coal>=1 torches<=98 | wood-1 coal-1 torches+4 | | MAKE_TORCH
READ_BOOK * | books>=1 | books-1 fireball+1? iceball+1? | | LEARN_FIREBALL? LEARN_ICEBALL?
LEVEL_UP_DEXTERITY * | xp>=1 dexterity<=4 | xp-1 dexterity+1 | |
LEVEL_UP_STRENGTH * | xp>=1 strength<=4 | xp-1 strength+1 | |
LEVEL_UP_INTELLIGENCE * | xp>=1 intelligence<=4 | xp-1 intelligence+1 | |
ENCHANT_SWORD ENCHANTMENT_TABLE_FIRE | sword>=1 ruby>=1 mana>=9 | ruby-1 mana-9 \
sword_enchantment+1 | | ENCHANT_SWORD
ENCHANT_SWORD ENCHANTMENT_TABLE_ICE | sword>=1 sapphire>=1 mana>=9 | sapphire-1 mana-9 \
sword_enchantment+2 | | ENCHANT_SWORD
ENCHANT_BOW ENCHANTMENT_TABLE_FIRE | bow>=1 ruby>=1 mana>=9 | ruby-1 mana-9 bow_enchantment+1 | |
ENCHANT_BOW ENCHANTMENT_TABLE_ICE | bow>=1 sapphire>=1 mana>=9 | sapphire-1 mana-9 \
bow_enchantment+2 | |
ENCHANT_ARMOUR ENCHANTMENT_TABLE_FIRE | armour>=1 ruby>=1 mana>=9 | ruby-1 mana-9 \
armour_enchantments+1 | | ENCHANT_ARMOUR
ENCHANT_ARMOUR ENCHANTMENT_TABLE_ICE | armour>=1 sapphire>=1 mana>=9 | sapphire-1 mana-9 \
armour_enchantments+1 | | ENCHANT_ARMOUR
DESCEND * | monsters_killed>=8 underfoot=2 floor<=0 | floor+1 xp+1 | | ENTER_DUNGEON
DESCEND * | monsters_killed>=8 underfoot=2 floor=1 | floor+1 xp+1 | | ENTER_GNOMISH_MINES
DESCEND * | monsters_killed>=8 underfoot=2 floor=2 | floor+1 xp+1 | | ENTER_SEWERS
DESCEND * | monsters_killed>=8 underfoot=2 floor=3 | floor+1 xp+1 | | ENTER_VAULT
DESCEND * | monsters_killed>=8 underfoot=2 floor=4 | floor+1 xp+1 | | ENTER_TROLL_MINES
DESCEND * | monsters_killed>=8 underfoot=2 floor=5 | floor+1 xp+1 | | ENTER_FIRE_REALM
DESCEND * | monsters_killed>=8 underfoot=2 floor=6 | floor+1 xp+1 | | ENTER_ICE_REALM
DESCEND * | monsters_killed>=8 underfoot=2 floor=7 | floor+1 xp+1 | | ENTER_GRAVEYARD
ASCEND * | underfoot=3 floor>=1 | floor-1 | |
DO PIGMAN | sword>=1 sword_enchantment>=2 | mob_health-1 | | DEFEAT_PIGMAN
DO FIRE_ELEMENTAL | sword>=1 sword_enchantment>=2 | mob_health-1 | | DEFEAT_FIRE_ELEMENTAL
DO FROST_TROLL | sword>=1 sword_enchantment=1 | mob_health-1 | | DEFEAT_FROST_TROLL
DO ICE_ELEMENTAL | sword>=1 sword_enchantment=1 | mob_health-1 | | DEFEAT_ICE_ELEMENTAL
"""
_SOFT = "ZOMBIE GNOME_WARRIOR ORC_SOLIDER LIZARD SKELETON GNOME_ARCHER ORC_MAGE KOBOLD DEEP_THING"
_HARD = "KNIGHT TROLL ARCHER"  # armoured: a bare hand, which does 1, does not kill
_EATEN = "COW BAT SNAIL"
_TIERS = ("WOOD", "STONE", "IRON", "DIAMOND")
_BLOCKS = {
    "free": "INVALID,OUT_OF_BOUNDS,GRASS,WOOD,PATH,SAND,LAVA",
    "wet": "INVALID,OUT_OF_BOUNDS,GRASS,WATER,WOOD,PATH,SAND,LAVA",
    "dry": "INVALID,OUT_OF_BOUNDS,GRASS,WOOD,PATH,SAND",
}
_MORE = ",DARKNESS,FIRE_GRASS,ICE_GRASS,GRAVEL,ICE_SHRUB,NECROMANCER_VULNERABLE"
_COLOURS = ("RED", "GREEN", "BLUE", "PINK", "CYAN", "YELLOW")


_SHOTS = {
    "SHOOT_ARROW": ("bow>=1 arrows>=1", "arrows-1", "FIRE_BOW", ()),
    "CAST_FIREBALL": (
        "fireball>=1 mana>=2",
        "mana-2",
        "CAST_FIREBALL",
        ("PIGMAN", "FIRE_ELEMENTAL"),
    ),
    "CAST_ICEBALL": (
        "iceball>=1 mana>=2",
        "mana-2",
        "CAST_ICEBALL",
        ("FROST_TROLL", "ICE_ELEMENTAL"),
    ),
}
_ELEMENTAL = ("PIGMAN", "FROST_TROLL", "FIRE_ELEMENTAL", "ICE_ELEMENTAL")


def _shots(blocks: tuple[str, ...]) -> str:
    lines = []
    for action, (needs, uses, got, useless) in _SHOTS.items():
        for ahead in (*blocks, *useless):
            lines.append(f"{action} {ahead} | {needs} | {uses} | | {got}")
        for mob in _EATEN.split():
            lines.append(f"{action} {mob} | {needs} | {uses} mob_health-1 | | {got}")
        burnt = () if action == "SHOOT_ARROW" else _ELEMENTAL
        for mob in (*_SOFT.split(), *_HARD.split(), *burnt):
            if mob not in useless:
                lines.append(
                    f"{action} {mob} | {needs} | {uses} mob_health-1 | | {got} DEFEAT_{mob}"
                )
    for mob in _ELEMENTAL:  # nine tenths are lost of what is not fire or ice
        hit = "mob_health-0.5 arrows-1"
        lines.append(f"SHOOT_ARROW {mob} | bow>=1 arrows>=1 | {hit} | | FIRE_BOW")
        lines.append(f"DO {mob} | | HIT | |")
    return "\n".join(lines)


def _fights() -> str:
    lines = [f"DO {mob} | | food+6 mob_health-1 | | EAT_{mob}" for mob in _EATEN.split()]
    lines += [f"DO {mob} | | mob_health-1 | | DEFEAT_{mob}" for mob in _SOFT.split()]
    lines += [f"DO {mob} | sword>=1 | mob_health-1 | | DEFEAT_{mob}" for mob in _HARD.split()]
    return "\n".join(lines)


def _potions() -> str:
    outcomes = "health-3..8? energy-3..8? mana-3..8?"
    return "\n".join(
        f"DRINK_POTION_{colour} * | potion_{colour.lower()}>=1 | "
        f"potion_{colour.lower()}-1 {outcomes} | | DRINK_POTION"
        for colour in _COLOURS
    )


def _achievements(tool: str) -> dict[str, str]:
    """A tool of one level is an achievement of all lower ones, too."""
    names = [f"MAKE_{tier}_{tool}" for tier in _TIERS]
    return {f"{tool[0].lower()}{k}": " ".join(names[:k]) for k in range(1, 5)}


CLASSIC = _MINING + _CLASSIC + (_PLACING + _TIME).format(**_BLOCKS, below="", above="", clumsy="")


def full(blocks: tuple[str, ...]) -> str:
    """The table of full Craftax, with the names of all its blocks."""
    return _FULL_TABLE + "\n" + _shots(blocks)


_FULL_TABLE = (
    _MINING
    + _fights()
    + (_FULL + _PLACING + _TIME).format(
        free=_BLOCKS["wet"] + _MORE,
        wet=_BLOCKS["wet"] + _MORE,
        dry=_BLOCKS["dry"] + _MORE,
        torch="GRASS,SAND,PATH,FIRE_GRASS,ICE_GRASS",
        below=" floor<=7",
        above=" floor<=0",
        clumsy=" dexterity<=1",
        **_achievements("PICKAXE"),
        **_achievements("SWORD"),
    )
    + _potions()
)
