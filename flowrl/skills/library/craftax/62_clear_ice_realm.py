"""Kill eight foes of the ice realm, which little but fire hurts."""

name = "Clear Ice Realm"
requirements = {"sword": "4", "armour": "4", "fire_sword": "1"}
gain = {"floor_cleared_7": "1"}
floors = [7]


def task_is_done(monsters_killed):
    return monsters_killed[7] >= 8


def task_reward(monsters_killed_diff, nearest_mobs, nearest_mobs_prev, damage_dealt):
    foes_before = jnp.sum(jnp.abs(nearest_mobs_prev[jnp.array([0, 2])]), axis=1).min()
    foes_now = jnp.sum(jnp.abs(nearest_mobs[jnp.array([0, 2])]), axis=1).min()
    closer = jnp.minimum(foes_before, 8) - jnp.minimum(foes_now, 8)
    return 1.0 * monsters_killed_diff[7] + 0.1 * damage_dealt + 0.02 * closer
