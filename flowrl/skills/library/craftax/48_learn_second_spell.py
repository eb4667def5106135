"""Read the second book; it teaches the other of the two spells."""

name = "Learn Second Spell"
requirements = {"spell": "1"}
consumption = {"books": "1"}
gain = {"fireball": "1", "iceball": "1"}
provided_by = {"books": "Find Vault Book"}


def task_is_done(learned_spells):
    return jnp.all(learned_spells > 0)


def task_reward(learned_spells_diff):
    return 1.0 * jnp.sum(learned_spells_diff)
