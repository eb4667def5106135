"""Read a book; it teaches one of the two spells, nobody knows which."""

name = "Learn Spell"
consumption = {"books": "1"}
gain = {"spell": "1"}


def task_is_done(learned_spells):
    return jnp.any(learned_spells > 0)


def task_reward(learned_spells_diff):
    return 1.0 * jnp.sum(learned_spells_diff)
