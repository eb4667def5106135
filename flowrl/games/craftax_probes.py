"""Craftax's two games as `Probes`: worlds built by hand, and the tables of their modules.

A built world is one screen of sand on each floor, where no mob appears. It has the player in the
middle, one thing ahead, and a table and a furnace diagonally behind. All else is a dial.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from craftax.craftax_env import make_craftax_env_from_name

from flowrl.games import craftax_tables
from flowrl.games.craftax_tables import PARTS, SETTINGS
from flowrl.games.fast_craftax import with_names
from flowrl.games.probes import Dial, Place, Table
from flowrl.games.random_play import settle

_SIDE = 11  # rows and columns of a built floor
_HERE, _AHEAD, _FAR = (5, 5), (4, 5), (1, 1)
_BEHIND = {"near_table": ("CRAFTING_TABLE", (6, 6)), "near_furnace": ("FURNACE", (6, 4))}
_WALLS = ((3, 5), (4, 4), (4, 6))  # so that a mob ahead stays there
_CALM = 1_000  # timesteps in which a mob does not attack
_NEVER = np.iinfo(np.int32).max
_GROWN = 700  # timesteps, more than a plant needs
_LONG = 40  # timesteps, more than any clock of the body needs
_BODY = ("health", "food", "drink", "energy")
_CLOCKS = ("hunger", "thirst", "fatigue", "recover")
_COLOURS = ("red", "green", "blue", "pink", "cyan", "yellow")
_ATTRIBUTES = ("dexterity", "strength", "intelligence")
_BARE = ("pickaxe", "sword", "bow", "armour", "fireball", "iceball")
_MOBS = {
    True: ("passive_mobs", "melee_mobs", "ranged_mobs"),
    False: ("cows", "zombies", "skeletons"),
}


class CraftaxProbes:
    """`Probes` of a Craftax package: `craftax.craftax_classic` or `craftax.craftax`."""

    idle, free = "NOOP", "SAND"

    def __init__(self, name: str, package: str) -> None:
        self.full = not package.endswith("_classic")
        self.constants = importlib.import_module(f"{package}.constants")
        self._logic = importlib.import_module(f"{package}.game_logic")
        self.env = make_craftax_env_from_name(name, auto_reset=False)
        params: Any = self.env.default_params
        self._shown: Any = self.env.static_env_params
        self._params = params.replace(max_timesteps=_NEVER)
        self._static = self._shown.replace(map_size=(_SIDE, _SIDE))
        self.mobs = _mobs(self.constants, full=self.full)
        self.actions = tuple(action.name for action in self.constants.Action)
        self.ahead = (
            *(block.name for block in self.constants.BlockType),
            *(m[0] for m in self.mobs),
        )
        items = self.constants.ItemType if self.full else ()
        self.names: Mapping[str, tuple[str, ...]] = {}
        if self.full:
            entered = np.asarray(self.constants.LEVEL_ACHIEVEMENT_MAP)[1:]
            floors = [self.constants.Achievement(int(each)).name[6:] for each in entered]
            self.names = {
                "underfoot": tuple(item.name for item in items),
                "floor": ("OVERWORLD", *floors),
            }
        self.dials: Mapping[str, Dial] = (
            self._full_dials() if self.full else self._common_dials(Dial(0, 5, 9))
        )
        self.places = self._full_places() if self.full else self._common_places()
        self.unprobed: Mapping[str, str] = _UNPROBED | (_UNPROBED_FULL if self.full else {})

    def _common_dials(self, item: Dial) -> dict[str, Dial]:
        held = vars(self._begun.inventory)
        dials = {name: item for name in held if name not in ("armour", "potions")}
        dials |= {name: Dial(int(name == "health"), 3, 9) for name in _BODY}
        dials |= dict.fromkeys((*_BEHIND, "light"), Dial(0, 1, 1))
        dials |= dict.fromkeys((*_CLOCKS, "rested", "plant_age", "asleep"), Dial(0, 0, 0))
        return dials | {"mob_health": Dial(1, 1, 1)}

    def _full_dials(self) -> dict[str, Dial]:
        many, once, never = Dial(0, 50, 99), Dial(0, 1, 1), Dial(0, 0, 1)
        floors = self._static.num_levels
        return {
            **self._common_dials(many),
            **dict.fromkeys(("pickaxe", "sword"), Dial(0, 4, 4)),
            **dict.fromkeys(("bow", "fireball", "iceball"), once),
            **dict.fromkeys((f"potion_{colour}" for colour in _COLOURS), many),
            **dict.fromkeys(_ATTRIBUTES, Dial(1, 1, self._params.max_attribute)),
            **dict.fromkeys(("sword_enchantment", "bow_enchantment"), Dial(0, 0, 2)),
            **dict.fromkeys(("chests_opened", "foes"), never),
            "armour": Dial(0, 8, 8),
            "mana": Dial(0, 9, 9),
            "recover_mana": Dial(0, 0, 0),
            "xp": many,
            "floor": Dial(0, 0, floors - 1),
            "monsters_killed": many,
            "underfoot": Dial(0, self.constants.ItemType.LADDER_DOWN.value, 4),
            "boss_progress": Dial(0, 0, floors - 2),
            "boss_wave": Dial(0, 0, self.constants.BOSS_FIGHT_SPAWN_TURNS),
        }

    def _common_places(self) -> tuple[Place, ...]:
        waiting: list[dict[str, int]] = [{clock: _LONG} for clock in _CLOCKS]
        waiting += [{"asleep": 1, "rested": _LONG}, {"asleep": 1, "energy": 9}]
        waiting += [{"recover": -_LONG, "food": 0}]
        waiting += [{"recover_mana": _LONG, "mana": 3}] if self.full else []
        idle = (self.idle,)
        grown = Place({"plant_age": _GROWN}, ("PLANT",), idle)
        return Place({}, self.ahead), *(Place(each, (self.free,), idle) for each in waiting), grown

    def _full_places(self) -> tuple[Place, ...]:
        bare: dict[str, int] = {name: 0 for name in _BARE}
        last = self.dials["floor"].most
        up = self.constants.ItemType.LADDER_UP.value
        count = len(self.constants.BlockType)
        blocks, mobs = self.ahead[:count], self.ahead[count:]
        free, (first, *waiting) = (self.free,), self._common_places()
        return (
            first,
            Place(bare, blocks),
            *(Place({"sword_enchantment": kind}, mobs, ("DO",)) for kind in (1, 2)),
            *(Place({**bare, "floor": k}, (*free, "CHEST")) for k in range(1, last + 1)),
            Place({"floor": 1, "underfoot": up}, free, ("ASCEND",)),
            Place({"floor": last}, ("NECROMANCER",), ("DO",)),
            Place({"floor": last, "boss_progress": last - 1}, ("NECROMANCER",), ("DO",)),
            Place({"mana": 3}, free),
            *waiting,
        )

    @cached_property
    def _begun(self) -> Any:
        """A new world by the game's own code, but for its floors: those say what makes them."""
        if self.full:
            world_gen = importlib.import_module("craftax.craftax.world_gen.world_gen")
            stubs = {"generate_smoothworld": _stand_in, "generate_dungeon": _stand_in}
        else:
            world_gen = importlib.import_module("craftax.craftax_classic.world_gen")
            stubs = {"generate_fractal_noise_2d": lambda key, shape, *_, **__: jnp.zeros(shape)}
        static = self._static if self.full else self.env.static_env_params
        make = with_names(world_gen.generate_world, **stubs)
        with jax.ensure_compile_time_eval():
            return settle(make(jax.random.key(0), self._params, static))

    def world(self, dials: Mapping[str, Any], ahead: Any, key: Any) -> Any:
        """The world of these dials, int32[] each, with the thing of this number ahead."""
        blocks = self.constants.BlockType
        is_mob = ahead >= len(blocks)
        floor = jnp.full((_SIDE, _SIDE), blocks.SAND.value, jnp.int32)
        floor = floor.at[_AHEAD].set(jnp.where(is_mob, blocks.SAND.value, ahead))
        for place in _WALLS:
            floor = floor.at[place].set(blocks.STONE.value)
        for dial, (block, place) in _BEHIND.items():
            value = jnp.where(dials[dial] > 0, blocks[block].value, blocks.SAND.value)
            floor = floor.at[place].set(value)
        mob_map = jnp.zeros((_SIDE, _SIDE), bool).at[_AHEAD].set(is_mob)
        begun = self._begun
        fields = {name: dials[name] for name in vars(begun.inventory) if name in dials}
        world = begun.replace(
            map=floor,
            mob_map=mob_map,
            player_position=jnp.array(_HERE, jnp.int32),
            player_direction=jnp.int32(self.constants.Action.UP.value),
            player_fatigue=jnp.float32(dials["fatigue"] - dials["rested"] * dials["asleep"]),
            is_sleeping=dials["asleep"] > 0,
            inventory=begun.inventory.replace(**fields),
            growing_plants_positions=begun.growing_plants_positions.at[0].set(jnp.array(_AHEAD)),
            growing_plants_age=begun.growing_plants_age.at[0].set(dials["plant_age"]),
            growing_plants_mask=begun.growing_plants_mask.at[0].set(dials["plant_age"] > 0),
            light_level=jnp.float32(dials["light"]),
            **{
                f"player_{name}": jnp.float32(dials[name])
                for name in ("hunger", "thirst", "recover")
            },
            **{
                f"player_{name}": _like(getattr(begun, f"player_{name}"), dials[name])
                for name in _BODY
            },
        )
        world = self._with_mob(world, dials, ahead - len(blocks))
        return self._with_rest(world, dials, key) if self.full else world

    def _with_mob(self, world: Any, dials: Mapping[str, Any], mob: Any) -> Any:
        """The world with one mob ahead, if its number is that of one."""
        mobs: dict[str, Any] = {}
        at = (slice(None), 0) if self.full else (0,)
        for number, kind in enumerate(_MOBS[self.full]):
            held = getattr(world, kind)
            chosen = jnp.array([mob == at for at, m in enumerate(self.mobs) if m[1] == number])
            values = {
                "position": held.position.at[at].set(jnp.array(_AHEAD)),
                "health": held.health.at[at].set(
                    _like(held.health, dials["mob_health"] * chosen.any())
                ),
                "mask": jnp.zeros_like(held.mask).at[at].set(chosen.any()),
                "attack_cooldown": jnp.full_like(held.attack_cooldown, _CALM),
            }
            if self.full:
                values["type_id"] = held.type_id.at[at].set(jnp.argmax(chosen).astype(jnp.int32))
            mobs[kind] = held.replace(**values)
        return world.replace(**mobs)

    def _with_rest(self, world: Any, dials: Mapping[str, Any], key: Any) -> Any:
        """The world with all that only full Craftax has: floors, magic, attributes, the boss."""
        rules, known = self._logic, self.constants
        floors, level = self._static.num_levels, dials["floor"]
        every = (floors, _SIDE, _SIDE)
        pieces = jnp.arange(4)
        melee = world.melee_mobs
        ladder = jnp.broadcast_to(jnp.array(_HERE, jnp.int32), (floors, 2))
        spells = jnp.stack([dials["fireball"], dials["iceball"]]) > 0
        entered = jnp.arange(1, floors) <= level
        got = world.achievements.at[known.LEVEL_ACHIEVEMENT_MAP[1:]].set(entered)
        learned = [known.Achievement.LEARN_FIREBALL.value, known.Achievement.LEARN_ICEBALL.value]
        potions = jnp.stack([dials[f"potion_{colour}"] for colour in _COLOURS])
        world = world.replace(
            map=jnp.broadcast_to(world.map, every),
            mob_map=jnp.broadcast_to(world.mob_map, every),
            item_map=jnp.zeros(every, jnp.int32).at[:, *_HERE].set(dials["underfoot"]),
            light_map=jnp.full(every, dials["light"], world.light_map.dtype),
            up_ladders=ladder,
            down_ladders=ladder,
            player_level=level,
            chests_opened=jnp.full(floors, dials["chests_opened"] > 0),
            monsters_killed=jnp.full(floors, dials["monsters_killed"]),
            melee_mobs=melee.replace(
                position=melee.position.at[:, 1].set(jnp.array(_FAR)),
                mask=melee.mask.at[:, 1].set(dials["foes"] > 0),
            ),
            inventory=world.inventory.replace(
                armour=(dials["armour"] + 3 - pieces) // 4, potions=potions
            ),
            player_xp=dials["xp"],
            player_mana=dials["mana"],
            player_recover_mana=jnp.float32(dials["recover_mana"]),
            sword_enchantment=dials["sword_enchantment"],
            bow_enchantment=dials["bow_enchantment"],
            learned_spells=spells,
            achievements=got.at[jnp.array(learned)].set(spells),
            potion_mapping=jax.random.permutation(key, jnp.arange(len(_COLOURS))),
            boss_progress=dials["boss_progress"],
            boss_timesteps_to_spawn_this_round=dials["boss_wave"],
            **{f"player_{name}": dials[name] for name in _ATTRIBUTES},
        )
        world = rules.clip_inventory_and_intrinsics(world, self._params)
        return rules.calculate_inventory_achievements(world)

    def step(self, key: Any, world: Any, action: Any) -> Any:
        """The world after an action, int32[]: the game's own code on a small map."""
        return self._logic.craftax_step(key, world, action, self._params, self._static)[0]

    def measure(self, world: Any) -> tuple[Mapping[str, Any], Any, Mapping[str, Any]]:
        """Amounts by name, the number of the block ahead, and achievements by name."""
        values = {
            name: value for name, value in vars(world.inventory).items() if name in self.dials
        }
        values |= {name: getattr(world, f"player_{name}") for name in _BODY}
        values["asleep"] = world.is_sleeping
        stayed = world.replace(player_position=jnp.array(_HERE, jnp.int32))
        for near, (block, _) in _BEHIND.items():
            kind = self.constants.BlockType[block].value
            values[near] = self._logic.is_near_block(stayed, kind)
        ahead, got = world.map, world.achievements
        if self.full:
            ahead, level = world.map[world.player_level], world.player_level
            names = ("mana", "xp", *_ATTRIBUTES)
            values |= {name: getattr(world, f"player_{name}") for name in names}
            names = ("sword_enchantment", "bow_enchantment", "boss_progress")
            values |= {name: getattr(world, name) for name in names}
            potions = world.inventory.potions
            values |= {f"potion_{colour}": potions[k] for k, colour in enumerate(_COLOURS)}
            torch = self.constants.ItemType.TORCH.value
            values |= {
                "armour": world.inventory.armour.sum(),
                "armour_enchantments": (world.armour_enchantments > 0).sum(),
                "floor": level,
                "resting": world.is_resting,
                "fireball": world.learned_spells[0],
                "iceball": world.learned_spells[1],
                "torch_ahead": world.item_map[(level, *_AHEAD)] == torch,
            }
        mobs = [getattr(world, kind) for kind in _MOBS[self.full]]
        if self.full:
            mobs = [jax.tree.map(lambda leaf: leaf[world.player_level], each) for each in mobs]
        values["mob_health"] = sum(jnp.maximum(each.health[0], 0) * each.mask[0] for each in mobs)
        values["moved"] = jnp.abs(world.player_position - jnp.array(_HERE)).sum()
        achievements = {each.name: got[each.value] for each in self.constants.Achievement}
        return values, ahead[_AHEAD], achievements

    @property
    def floors(self) -> Mapping[str, tuple[int, ...]]:
        """Of mobs and blocks, the floors where they are; Classic has one."""
        if not self.full:
            return {}
        return craftax_tables.floors_of(self.constants, self.mobs, self._begun.map)

    def _bag(self) -> int:
        """The number of an item that the game's own code leaves of very many."""
        many = jax.tree.map(lambda leaf: jnp.full_like(leaf, _CALM), self._begun.inventory)
        world = self._begun.replace(inventory=many)
        if self.full:
            world = self._logic.clip_inventory_and_intrinsics(world, self._params)
        else:
            world = self._logic.cap_inventory(world)
        return int(world.inventory.wood)

    def tables(self) -> tuple[Table, ...]:
        """Facts that are read from the game's modules."""
        names = ("Action", "BlockType", "Achievement")
        params = vars(self._params) | vars(self._shown) | {"bag_of_each_item": self._bag()}
        common = craftax_tables.limits(self.constants, params)
        if not self.full:
            return common, craftax_tables.enums(self.constants, names)
        names = (*names, "ItemType", "MobType", "ProjectileType")
        return (
            craftax_tables.floors(self.constants, self.names["floor"], self._begun.map),
            craftax_tables.mobs(self.constants, self.mobs),
            common,
            craftax_tables.enums(self.constants, names),
        )


def _stand_in(*given: Any) -> tuple[Any, ...]:
    """Stands for the generators of full Craftax: a floor with the numbers of its settings."""
    config = next(
        each for each in given if hasattr(each, "default_block") or hasattr(each, "special_block")
    )
    rows = jnp.zeros((_SIDE, _SIDE), jnp.int32)
    for row, names in enumerate(SETTINGS):
        for column, name in enumerate(names):
            values = jnp.atleast_1d(getattr(config, name, 0))
            values = values * PARTS if name == "ore_chances" else values
            rows = rows.at[row, column : column + len(values)].set(values.astype(jnp.int32))
    here = jnp.array(_HERE, jnp.int32)
    return rows, jnp.zeros_like(rows), jnp.ones((_SIDE, _SIDE)), here, here


def _like(leaf: Any, value: Any) -> jax.Array:
    return jnp.asarray(value, jnp.result_type(leaf))


def _mobs(constants: Any, *, full: bool) -> tuple[tuple[str, int, int], ...]:
    """Name, class and type of each mob, the passive ones first."""
    achievements = constants.Achievement
    if full:
        by_kind = np.asarray(constants.MOB_ACHIEVEMENT_MAP)
    else:
        names = (achievements.EAT_COW, achievements.DEFEAT_ZOMBIE, achievements.DEFEAT_SKELETON)
        by_kind = np.array([[each.value] for each in names])
    return tuple(
        (achievements(int(value)).name.partition("_")[2], kind, number)
        for (kind, number), value in np.ndenumerate(by_kind)
        if value
    )


_UNPROBED = {
    "where mobs appear": "it is chance over many timesteps, and depends on light and distance",
    "damage to the player": "a mob moves and strikes by chance; it takes many timesteps",
    "where blocks lie": "worlds are generated by noise, not by an action",
}
_UNPROBED_FULL = {
    "hits that a mob takes": "they follow from its health and defence; the last one is probed",
    "the effect of a potion": "each world has its own: one of six, told here as chances",
    "rooms of floors 1, 3 and 4": "walls, chests and torches are put there by code, not settings",
    "foes of the boss": "they come in waves over many timesteps",
}
