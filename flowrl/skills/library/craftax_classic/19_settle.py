"""Plant a sapling near water: a place to live at until it is ripe."""

name = "Settle"
requirements = {"sapling": "1", "stone": "5", "wood_sword": "1"}
consumption = {"sapling": "1"}
gain = {"home": "1"}


def task_is_done(closest_blocks):
    plant = jnp.sum(jnp.abs(closest_blocks[BlockType.PLANT.value, :, 0]))
    water = jnp.sum(jnp.abs(closest_blocks[BlockType.WATER.value, :, 0]))
    return jnp.logical_and(plant <= 4, water <= 5)


def task_reward(inventory_diff, closest_blocks, closest_blocks_prev, damage_dealt):
    water_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.WATER.value, :, 0]))
    water_now = jnp.sum(jnp.abs(closest_blocks[BlockType.WATER.value, :, 0]))
    closer = jnp.minimum(water_before, 8) - jnp.minimum(water_now, 8)
    planted = 1.0 * (inventory_diff.sapling < 0)
    worth = jnp.where(water_now <= 5, 1.0, -0.5)  # a sapling in a dry place is lost
    return planted * worth + 0.05 * closer + 0.1 * damage_dealt
