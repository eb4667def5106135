"""Plant a sapling where water and the rock of a shelter are near."""

name = "Settle"
requirements = {"sapling": "1", "wood_pickaxe": "1", "wood_sword": "1"}
consumption = {"sapling": "1"}
gain = {"home": "1"}


def task_is_done(closest_blocks):
    plant = jnp.sum(jnp.abs(closest_blocks[BlockType.PLANT.value, :, 0]))
    water = jnp.sum(jnp.abs(closest_blocks[BlockType.WATER.value, :, 0]))
    rock = jnp.sum(jnp.abs(closest_blocks[BlockType.STONE.value, :, 4]))  # five stones of it
    return jnp.logical_and(plant <= 4, jnp.logical_and(water <= 6, rock <= 6))


def task_reward(inventory_diff, closest_blocks, closest_blocks_prev, damage_dealt):
    water = jnp.sum(jnp.abs(closest_blocks[BlockType.WATER.value, :, 0]))
    water_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.WATER.value, :, 0]))
    to_water = jnp.minimum(water_before, 8) - jnp.minimum(water, 8)
    rock = jnp.sum(jnp.abs(closest_blocks[BlockType.STONE.value, :, 4]))
    rock_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.STONE.value, :, 4]))
    to_rock = jnp.minimum(rock_before, 8) - jnp.minimum(rock, 8)
    planted = 1.0 * (inventory_diff.sapling < 0)
    near = jnp.logical_and(water <= 6, rock <= 6)
    worth = jnp.where(near, 1.0, -0.5)  # a sapling elsewhere is lost
    return planted * worth + 0.05 * to_water + 0.05 * to_rock + 0.1 * damage_dealt
