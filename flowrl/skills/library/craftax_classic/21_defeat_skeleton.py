"""Find a skeleton in the caves and defeat it."""

name = "Defeat Skeleton"
requirements = {}
consumption = {}
gain = {"defeated_skeleton": "1"}


def task_is_done(achievements):
    return achievements[Achievement.DEFEAT_SKELETON.value] > 0


def task_reward(achievements_diff, nearest_mobs, nearest_mobs_prev):
    now = jnp.sum(jnp.abs(nearest_mobs[2]))
    before = jnp.sum(jnp.abs(nearest_mobs_prev[2]))
    closer = jnp.minimum(before, 8) - jnp.minimum(now, 8)
    reached = achievements_diff[Achievement.DEFEAT_SKELETON.value]
    # The mob that is gone because of it was not lost sight of.
    return jnp.where(reached > 0, 1.0, 0.1 * closer)
