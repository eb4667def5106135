"""Cast the spell that was learned; it takes two mana, which come back with time."""

name = "Cast Spell"
requirements = {"spell": "1"}
gain = {"cast_spell": "1"}


def task_is_done(achievements):
    cast = jnp.array([Achievement.CAST_FIREBALL.value, Achievement.CAST_ICEBALL.value])
    return jnp.any(achievements[cast] > 0)


def task_reward(achievements_diff):
    cast = jnp.array([Achievement.CAST_FIREBALL.value, Achievement.CAST_ICEBALL.value])
    return 1.0 * jnp.sum(achievements_diff[cast])
