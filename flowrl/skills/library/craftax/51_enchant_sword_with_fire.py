"""Enchant the ice sword anew at the fire table of the vault, with a ruby and nine mana."""

name = "Enchant Sword With Fire"
requirements = {"sword": "1", "floor_cleared_6": "1"}
consumption = {"ruby": "1", "ice_sword": "1"}
gain = {"fire_sword": "1"}
floors = [4]
max_steps = 600  # nine mana come back in 280 timesteps


def task_is_done(sword_enchantment):
    return sword_enchantment == 1


def task_reward(sword_enchantment_diff, closest_blocks, closest_blocks_prev, damage_dealt):
    table_before = jnp.abs(closest_blocks_prev[BlockType.ENCHANTMENT_TABLE_FIRE.value, :, 0]).sum()
    table_now = jnp.abs(closest_blocks[BlockType.ENCHANTMENT_TABLE_FIRE.value, :, 0]).sum()
    closer = jnp.minimum(table_before, 8) - jnp.minimum(table_now, 8)
    return 1.0 * (sword_enchantment_diff != 0) + 0.05 * closer + 0.1 * damage_dealt
