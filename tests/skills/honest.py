"""Skill functions as people and language models write them, by their style."""

# ruff: noqa: E501 - whole programs, one per line

from __future__ import annotations

REWARDS: dict[str, str] = {
    "a difference": "return inventory_diff.wood",
    "a float difference": "return 1.0 * inventory_diff.wood",
    "with a docstring": '"""Wood is good."""\nreturn inventory_diff.wood * 0.5',
    "a constant": "return 0.0",
    "a whole constant": "return 0",
    "a truth value": "return inventory_diff.wood > 0",
    "jnp.where": "return jnp.where(inventory_diff.wood > 0, 1.0, 0.0)",
    "where in where": "return jnp.where(inventory.wood >= n, 1.0, jnp.where(inventory.wood > 0, 0.5, 0.0))",
    "jax.lax.select": "return jax.lax.select(inventory_diff.wood > 0, 1.0, 0.0)",
    "jnp.select": "w = inventory.wood\nreturn jnp.select([w >= 9, w >= 3], [1.0, 0.5], 0.0)",
    "a clipped progress": "return jnp.minimum(inventory.wood, n) * 1.0 / n",
    "a rise without a fall": "return jnp.maximum(inventory_diff.wood, 0).astype(jnp.float32)",
    "a level and its past": (
        "now = jnp.minimum(inventory.wood, n)\n"
        "before = jnp.minimum(inventory.wood - inventory_diff.wood, n)\n"
        "return (now - before).astype(jnp.float32)"
    ),
    "several items": "return inventory_diff.wood + 2 * inventory_diff.stone + 3.0 * inventory_diff.coal",
    "weights in an array": (
        "w = jnp.array([1.0, 2.0, 3.0])\n"
        "x = jnp.stack([inventory_diff.wood, inventory_diff.stone, inventory_diff.coal])\n"
        "return jnp.sum(w * x)"
    ),
    "a dot product": "return jnp.dot(jnp.array([0.1, 0.2, 0.3, 0.4]), player_intrinsics_diff)",
    "logical and": (
        "both = jnp.logical_and(inventory.wood >= n, inventory.stone > 0)\n"
        "return both.astype(jnp.float32)"
    ),
    "and by a sign": "return ((inventory.wood > 0) & (inventory.stone > 0)) * 1.0",
    "or and not by signs": "return jnp.float32((inventory.wood > 0) | ~(inventory.stone > 0))",
    "chosen by the count": "if n > 3:\n    return 0.5 * inventory_diff.wood\nreturn 1.0 * inventory_diff.wood",
    "a ladder of counts": (
        "if n <= 1:\n    scale = 1.0\nelif n <= 4:\n    scale = 0.5\nelse:\n    scale = 0.25\n"
        "return scale * inventory_diff.wood"
    ),
    "a choice in a line": "return inventory_diff.wood * (1.0 if n == 1 else 1.0 / n)",
    "bounds of the count": "return inventory_diff.wood / max(min(n, 9), 1)",
    "a chain about the count": "return 1.0 * inventory_diff.wood if 0 < n <= 9 else 0.0",
    "a count's and": "return 1.0 * inventory_diff.wood if n > 1 and n < 5 else 0.5 * inventory_diff.wood",
    "a small loop": "t = 0.0\nfor i in range(4):\n    t = t + 0.1 * player_intrinsics_diff[i]\nreturn t",
    "a loop over the nearest": (
        "t = 0\nfor i in range(5):\n    t += jnp.abs(closest_blocks[BlockType.TREE.value, :, i]).sum()\n"
        "return -0.01 * t"
    ),
    "two loops": "t = 0.0\nfor i in range(3):\n    for j in range(2):\n        t += nearest_mobs[i, j]\nreturn t / 90",
    "powers in a loop": "t = 0.0\nfor i in range(4):\n    t = t * 0.9 + player_intrinsics_diff[i]\nreturn t",
    "a sum over a slice": "return 0.01 * jnp.sum(player_intrinsics[1:3])",
    "a mean": "return jnp.mean(player_intrinsics) / 9",
    "a method": "return player_intrinsics.min() / 9",
    "a spread": "return -jnp.std(player_intrinsics) / 9",
    "the distance of a tree": (
        "d = jnp.sum(jnp.abs(closest_blocks[BlockType.TREE.value, :, 0]))\nreturn 1.0 / (1.0 + d)"
    ),
    "a distance that shrinks": (
        "def_ = BlockType.WATER.value\n"
        "before = jnp.sum(jnp.abs(closest_blocks_prev[def_, :, 0]))\n"
        "now = jnp.sum(jnp.abs(closest_blocks[def_, :, 0]))\n"
        "return 0.1 * jnp.clip(before - now, -1, 1)"
    ),
    "a straight distance": "return -0.01 * jnp.linalg.norm(closest_blocks[BlockType.STONE.value, :, 0])",
    "a root": "d = closest_blocks[BlockType.STONE.value, :, 0]\nreturn -jnp.sqrt(d[0] ** 2 + d[1] ** 2)",
    "two coordinates": "y, x = closest_blocks[BlockType.COAL.value, :, 0]\nreturn -0.01 * (abs(y) + abs(x))",
    "two values at once": "a, b = inventory.wood, inventory.stone\nreturn 1.0 * jnp.minimum(a, b)",
    "the nearest of two": (
        "tree = jnp.abs(closest_blocks[BlockType.TREE.value, :, 0]).sum()\n"
        "water = jnp.abs(closest_blocks[BlockType.WATER.value, :, 0]).sum()\n"
        "return -0.01 * jnp.minimum(tree, water)"
    ),
    "is one in sight": "return jnp.any(closest_blocks[BlockType.IRON.value, 0] < 30) * 0.1",
    "how many are in sight": "return jnp.count_nonzero(closest_blocks[BlockType.IRON.value, 0] < 30) * 0.1",
    "which is nearest": "return jnp.argmin(jnp.abs(nearest_mobs).sum(axis=1)) * 0.1",
    "a mob that comes near": (
        "d = jnp.abs(nearest_mobs).sum(axis=-1)\ne = jnp.abs(nearest_mobs_prev).sum(axis=-1)\n"
        "return 0.1 * (e[1] - d[1])"
    ),
    "what is in front": "return jnp.where(facing_block == BlockType.TREE.value, 0.1, 0.0)",
    "an achievement": "return achievements_diff[Achievement.EAT_COW.value] * 10.0",
    "several achievements": (
        "return achievements_diff[Achievement.EAT_COW.value] + achievements_diff[Achievement.WAKE_UP.value]"
    ),
    "all achievements": "return jnp.sum(achievements_diff) * 1.0",
    "all but one achievement": (
        "return achievements_diff.at[Achievement.WAKE_UP.value].set(0).sum() * 1.0"
    ),
    "sleep": "return jnp.where(jnp.logical_and(was_sleeping, ~is_sleeping), 1.0, 0.0)",
    "health": "return player_intrinsics_diff[0] / 9 + health_penalty",
    "hunger and thirst": "food, drink = player_intrinsics[1], player_intrinsics[2]\nreturn (food + drink) / 18",
    "the game's own": "return env_reward + health_penalty",
    "a clipped mix": "return jnp.clip(env_reward + inventory_diff.wood, -1.0, 1.0)",
    "a squashed mix": "return jnp.tanh(env_reward) + jax.nn.sigmoid(1.0 * inventory_diff.wood) - 0.5",
    "a soft distance": "return jnp.exp(-0.1 * jnp.abs(closest_blocks[BlockType.TREE.value, :, 0]).sum())",
    "a safe division": "return inventory.wood / (1 + inventory.stone)",
    "a guarded division": "return jnp.where(inventory.stone > 0, 1.0 / jnp.maximum(inventory.stone, 1), 0.0)",
    "a logarithm": "return jnp.log1p(inventory.wood) * 0.1",
    "whole division": "return (inventory.wood // 2) * 1.0 + inventory.stone % 3",
    "a sign": "return jnp.sign(inventory_diff.wood) * 0.5",
    "a monster": "return jnp.sum(monsters_killed_diff) * 1.0",
    "a floor": "return 1.0 * player_level_diff",
    "a zero array": "z = jnp.zeros(4)\nreturn (player_intrinsics - z).sum() / 36",
    "a range": "w = jnp.arange(4)\nreturn jnp.sum(w * player_intrinsics_diff) / 10",
    "a sort": "return jnp.sort(player_intrinsics)[0] / 9",
    "a running sum": "return jnp.cumsum(player_intrinsics)[3] / 36",
    "another shape": "return jnp.reshape(closest_blocks[BlockType.TREE.value], (10,))[0] * 0.01",
    "nothing after all": "return jnp.nan_to_num(inventory_diff.wood * 1.0)",
    "comprehensions": "return sum([0.1 * i for i in range(3)]) + sum(i for i in (1, 2))",
    "names of its own": "bonus = 0.0\nbonus += inventory_diff.wood\nbonus *= 2\nbonus -= 0.01\nreturn bonus",
}

PREDICATES: dict[str, str] = {
    "a level": "return inventory.wood >= n",
    "a level and more": "return jnp.logical_and(inventory.wood >= n, inventory.stone >= 1)",
    "all of a list": "return jnp.all(jnp.array([inventory.wood >= n, inventory.stone >= n]))",
    "one of two": "return (inventory.wood >= n) | (inventory.stone >= n)",
    "not": "return jnp.logical_not(inventory.wood < n)",
    "in between": "return (inventory.wood >= n) & (inventory.wood <= 2 * n)",
    "by a where": "return jnp.where(inventory.wood > 0, inventory.stone >= n, inventory.coal >= n)",
    "an achievement": "return achievements[Achievement.COLLECT_DRINK.value] > 0",
    "an achievement as a bool": "return achievements[Achievement.WAKE_UP.value].astype(jnp.bool_)",
    "near a table": "return jnp.max(jnp.abs(closest_blocks[BlockType.CRAFTING_TABLE.value, :, 0])) <= 1",
    "beside a furnace": (
        "d = closest_blocks[BlockType.FURNACE.value, :, 0]\nreturn jnp.abs(d[0]) + jnp.abs(d[1]) <= 1"
    ),
    "facing water": "return facing_block == BlockType.WATER.value",
    "awake": "return jnp.logical_and(was_sleeping, jnp.logical_not(is_sleeping))",
    "well fed": "return jnp.all(player_intrinsics[1:] >= 5)",
    "few": "return (inventory.wood <= n) & (inventory.stone >= n)",
    "at a low count": "if n > 5:\n    return inventory.wood >= 5\nreturn inventory.wood >= n",
}
