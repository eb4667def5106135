"""What skill code may name: tables only, read by the gate."""

from __future__ import annotations

from flowrl.skills.games import ENUMS, ITEMS

__all__ = [
    "ATTRIBUTES",
    "CALLS",
    "ENUMS",
    "FUNCTIONS",
    "INJECTED",
    "INTRINSICS",
    "MAKERS",
    "METHODS",
    "MODULES",
    "TRUSTED_CALLS",
    "VALUES",
]

INTRINSICS = ("health", "food", "drink", "energy")  # the order of `player_intrinsics`

# A feature's place in this tuple means nothing; a function asks for features by name.
# `*_diff` is the value after this environment step less the value before it, as int32 or float32.
INJECTED = (
    "n",  # int: the count of the plan's step
    "inventory",  # craftax Inventory of ints, after the step
    "inventory_diff",  # the same struct
    "closest_blocks",  # [block types, 2, 5] (dy, dx) to the nearest in view, nearest first, else 30
    "closest_blocks_prev",  # the same, one step earlier
    "facing_block",  # int: BlockType value of the block in front of the player
    "player_intrinsics",  # [4] health, food, drink, energy
    "player_intrinsics_diff",  # [4]
    "achievements",  # [achievements] 0 or 1, kept for the whole episode
    "achievements_diff",  # [achievements] 1 in the step that unlocked it
    "player_level",  # int: the floor, always 0 in Classic
    "player_level_diff",  # int
    "monsters_killed",  # [floors] int, one zero in Classic
    "monsters_killed_diff",  # [floors]
    "is_sleeping",  # bool, after the step
    "was_sleeping",  # bool, before the step
    "nearest_mobs",  # [3, 2] (dy, dx) to the nearest zombie, cow, skeleton in view, else 30
    "nearest_mobs_prev",  # the same, one step earlier
    "env_reward",  # float: the game's own reward of this step
    "health_penalty",  # float: 0.1 × health lost in this step, 0 or negative
)

MODULES = frozenset({"jnp", "jax"})
CALLS = frozenset({"abs", "min", "max", "len", "float", "int", "bool"})
# Builtins that a trusted skill's functions have besides: all but those that reach further.
_TRUSTED_CALLS = """
all any dict divmod enumerate filter isinstance list map pow reversed round set slice sorted
str sum tuple zip ArithmeticError AssertionError IndexError KeyError TypeError ValueError
"""
TRUSTED_CALLS = frozenset(_TRUSTED_CALLS.split())

_ELEMENTWISE = """
abs absolute add ceil clip cos divide equal exp expm1 floor floor_divide greater greater_equal
hypot isclose isfinite isinf isnan less less_equal log log1p log2 logical_and logical_not
logical_or logical_xor maximum minimum mod multiply nan_to_num negative not_equal reciprocal
remainder round select sign sin sqrt square subtract tan tanh true_divide where
ones_like zeros_like full_like
"""
_REDUCE = "all any argmax argmin count_nonzero dot max mean median min prod std sum var"
_SHAPE = """
arange array asarray concatenate cumsum diff expand_dims full ones ravel reshape
sort squeeze stack take transpose zeros
"""
# These make an array of a size that is written in the code, so that size must be small.
MAKERS = frozenset(f"jnp.{word}" for word in ("arange", "full", "ones", "zeros"))
_LAX = "abs clamp exp log max min select sign sqrt square stop_gradient tanh"
_NN = "relu sigmoid silu softplus tanh"

FUNCTIONS = frozenset(
    {f"jnp.{word}" for words in (_ELEMENTWISE, _REDUCE, _SHAPE) for word in words.split()}
    | {f"jnp.{word}" for word in ("float32", "int32", "bool_", "linalg.norm")}
    | {f"jax.lax.{word}" for word in _LAX.split()}
    | {f"jax.nn.{word}" for word in _NN.split()}
)
VALUES = frozenset(
    f"jnp.{word}" for word in ("inf", "nan", "pi", "e", "float32", "int32", "bool_", "newaxis")
)

_METHODS = """
sum max min mean any all prod astype clip argmax argmin set add
"""
METHODS = frozenset(_METHODS.split())
ATTRIBUTES = ITEMS | {"at", "ndim", "size", "T"}
