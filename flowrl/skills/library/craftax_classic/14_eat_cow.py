"""Hunt a cow and eat it."""

name = "Eat Cow"
requirements = {}
consumption = {}
gain = {"ate_cow": "1"}


def task_is_done(achievements):
    return achievements[Achievement.EAT_COW.value] > 0


def task_reward(achievements_diff, nearest_mobs, nearest_mobs_prev):
    now = jnp.sum(jnp.abs(nearest_mobs[1]))
    before = jnp.sum(jnp.abs(nearest_mobs_prev[1]))
    closer = jnp.minimum(before, 8) - jnp.minimum(now, 8)
    reached = achievements_diff[Achievement.EAT_COW.value]
    # The mob that is gone because of it was not lost sight of.
    return jnp.where(reached > 0, 1.0, 0.1 * closer)
