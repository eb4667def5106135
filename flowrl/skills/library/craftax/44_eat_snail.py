"""Hunt a snail of the dungeon, the sewers or the vault and eat it."""

name = "Eat Snail"
gain = {"ate_snail": "1"}
floors = [1, 3, 4]


def task_is_done(achievements):
    return achievements[Achievement.EAT_SNAIL.value] > 0


def task_reward(achievements_diff, closest_mobs, closest_mobs_prev):
    before = jnp.sum(jnp.abs(closest_mobs_prev[MobType.PASSIVE.value, 2]))
    now = jnp.sum(jnp.abs(closest_mobs[MobType.PASSIVE.value, 2]))
    closer = jnp.minimum(before, 8) - jnp.minimum(now, 8)
    reached = achievements_diff[Achievement.EAT_SNAIL.value]
    # The mob that is gone because of it was not lost sight of.
    return jnp.where(reached > 0, 1.0, 0.1 * closer)
