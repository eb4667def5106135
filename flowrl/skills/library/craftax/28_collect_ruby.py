"""Mine a ruby with a diamond pickaxe."""

name = "Collect Ruby"
requirements = {"pickaxe": "4"}
gain = {"ruby": "n"}
floors = [2, 5, 6]


def task_is_done(inventory, n):
    return inventory.ruby >= n


def task_reward(inventory, inventory_diff, closest_blocks, closest_blocks_prev, damage_dealt, n):
    before = inventory.ruby - inventory_diff.ruby
    gathered = jnp.minimum(inventory.ruby, n) - jnp.minimum(before, n)
    distance_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.RUBY.value, :, 0]))
    distance_now = jnp.sum(jnp.abs(closest_blocks[BlockType.RUBY.value, :, 0]))
    closer = jnp.minimum(distance_before, 8) - jnp.minimum(distance_now, 8)
    return gathered + 0.05 * closer + 0.1 * damage_dealt
