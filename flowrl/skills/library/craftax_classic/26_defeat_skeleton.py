"""Find a skeleton in the caves and defeat it."""

name = "Defeat Skeleton"
requirements = {"stone_sword": "1", "wood_pickaxe": "1"}
consumption = {}
gain = {"defeated_skeleton": "1"}
training = {"total_timesteps": 3_000_000}


def task_is_done(achievements):
    return achievements[Achievement.DEFEAT_SKELETON.value] > 0


def task_reward(
    achievements_diff,
    nearest_mobs,
    nearest_mobs_prev,
    closest_blocks,
    closest_blocks_prev,
    damage_dealt,
):
    now = jnp.sum(jnp.abs(nearest_mobs[2]))
    before = jnp.sum(jnp.abs(nearest_mobs_prev[2]))
    closer = jnp.minimum(before, 8) - jnp.minimum(now, 8)
    # Skeletons live where paths are: in caves.
    paths_now = jnp.sum(jnp.abs(closest_blocks[BlockType.PATH.value]), axis=0)
    paths_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.PATH.value]), axis=0)
    to_caves = jnp.sum(jnp.minimum(paths_before, 8) - jnp.minimum(paths_now, 8))
    reached = achievements_diff[Achievement.DEFEAT_SKELETON.value]
    # The mob that is gone because of it was not lost sight of.
    on_the_way = 0.1 * closer + 0.01 * to_caves + 0.1 * damage_dealt
    return jnp.where(reached > 0, 1.0, on_the_way)
