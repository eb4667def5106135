"""What came of each step of a plan is counted exactly, and deaths have causes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.envs.base import COUNTS, StepOutput, count_steps
from flowrl.envs.tasks import step_ends
from flowrl.games.base import WorldStep
from flowrl.ppo.metrics import EpisodeLog
from tests.envs.making import BERRY, CLASSIC, FULL, PIE, module_text, with_items
from tests.envs.test_walking import Walk, tiny_walk

TASKS, ENVS, STEPS, KEPT, CAUSES = 4, 16, 25, 3, 2


def played(rng: np.random.Generator, task: np.ndarray) -> tuple[StepOutput, np.ndarray, dict]:
    """STEPS random timesteps from these tasks on, the tasks after them, and a tally by hand."""
    tally = {name: np.zeros(TASKS, int) for name in COUNTS}
    tally |= {"killed": np.zeros((TASKS, CAUSES), int), "kept": np.zeros((TASKS, KEPT), int)}
    rows: dict[str, list] = {name: [] for name in StepOutput._fields}
    for _ in range(STEPS):
        draws = rng.random((4, ENVS))
        completed, over, late = draws[0] < 0.3, draws[1] < 0.08, draws[2] < 0.08
        ended = over | (completed & (task == TASKS - 1))
        cut = ~ended & ~completed & late
        done, lied = ended | cut, completed & (draws[3] < 0.2)
        kept = rng.random((ENVS, KEPT)) < 0.5
        cause = np.eye(CAUSES, dtype=bool)[(draws[3] < 0.5).astype(int)]
        success = (np.arange(TASKS + 2) < task[:, None]) | (
            completed[:, None] & (np.arange(TASKS + 2) == task[:, None])
        )
        given = {
            "boundary": done | completed,
            "done": done,
            "truncated": cut,
            "task": task,
            "task_success": success,
        }
        given |= {"lied": lied, "kept": kept, "cause": cause}
        for name, values in rows.items():
            values.append(given.get(name, np.zeros(ENVS, np.int32)))
        for env, now in enumerate(task):
            tally["timesteps"][now] += 1
            tally["done"][now] += completed[env]
            tally["lied"][now] += lied[env]
            tally["cut"][now] += cut[env]
            if over[env] and not completed[env]:
                tally["died"][now] += 1
                tally["killed"][now] += cause[env]
            if completed[env] or cut[env]:
                tally["kept"][now] += kept[env]
            following = 0 if done[env] else now + completed[env]
            tally["begun"][following] += done[env] or completed[env]
        task = np.where(done, 0, task + completed)
    leaves = {name: jnp.asarray(np.stack(values)) for name, values in rows.items()}
    return StepOutput(**leaves), task, tally


def test_begun_is_done_and_died_and_cut_and_running_over_a_thousand_episodes():
    rng, task = np.random.default_rng(5), np.zeros(ENVS, int)
    log, episodes = EpisodeLog(ENVS, TASKS), 0
    total = np.zeros((TASKS, len(COUNTS) + CAUSES + KEPT), int)
    while episodes < 1000:
        output, task, tally = played(rng, task)
        counts = np.asarray(count_steps(output))[:TASKS]
        columns = [tally[name][:, None] for name in COUNTS]
        assert (counts == np.hstack([*columns, tally["killed"], tally["kept"]])).all()
        ended = int(np.asarray(output.done).sum())
        log.count(counts.astype(np.int64), ended=ended)
        episodes, total = episodes + ended, total + counts
        begun, done, _, died, cut = total[:, :5].T
        first = ENVS * (np.arange(TASKS) == 0)
        running = np.bincount(task, minlength=TASKS)
        assert (first + begun == done + died + cut + running).all()
        assert (log.counts()[1] == running).all()
    newest, each = log.counts()[0][:, 5].sum(), ENVS * STEPS
    assert newest % each == 0, "whole updates"
    assert each <= newest < total[:, 5].sum() / 2


def test_only_the_chosen_rows_are_counted():
    output, _, tally = played(np.random.default_rng(6), np.zeros(ENVS, int))
    none = count_steps(output, jnp.zeros((STEPS, ENVS), bool))
    assert not none.any()
    halves = [jnp.arange(ENVS) % 2 == number for number in (0, 1)]
    parts = [count_steps(output, jnp.broadcast_to(half, (STEPS, ENVS))) for half in halves]
    assert (np.asarray(sum(parts))[:TASKS, 1] == tally["done"]).all()


@pytest.fixture(scope="module", params=[False, True], ids=["counted", "bound"])
def keeping(request, tiny_game) -> Walk:
    """Berries, a step, more of them; after the second, a pie and the first's berries are needed."""
    facts = "'expert': 5, 'keeps': {'pie': 1}, 'facts': {'berries_there': 0}}"
    first = BERRY._replace(is_done="(inventory):\n    return inventory.berry >= 2")
    second = PIE._replace(is_done="(timestep):\n    return timestep > 0")
    third = BERRY._replace(expert=2, is_done="(inventory):\n    return inventory.berry >= 9")
    text = module_text([first, second, third], package="tiny").replace("'expert': 5}", facts)
    return tiny_walk(text, keep_needs=request.param)


@pytest.mark.parametrize(("berry", "pie"), [(2, 1), (2, 0), (1, 1), (0, 0)])
def test_a_step_counts_only_with_what_later_steps_need(keeping, berry, pie):
    walk, bound = keeping, bool(keeping.env.plan.bound)
    state, _ = walk.step(with_items(walk.state, berry=2, pie=1))
    state, output = walk.step(with_items(state, berry=berry, pie=pie))
    kept = berry == 2 and pie == 1
    assert (np.asarray(output.task) == 1).all()
    assert (np.asarray(output.task_success[:, 1]) == (kept or not bound)).all()
    counts = np.asarray(count_steps(jax.tree.map(lambda leaf: leaf[None], output)))
    _, second, _ = step_ends(walk.env.module, counts[:3])
    alive = 8 * (kept or not bound)
    assert second.done == alive
    assert second.kept == {"pie": alive * pie, "berries_there": alive * (berry == 2)}


def test_what_is_spare_is_seen(keeping):
    walk = keeping
    items = sorted(walk.env.game.items)
    state, _ = walk.step(with_items(walk.state, berry=2, pie=1))
    seen = []
    for pie in (0, 1, 2, 5):
        walk_seeing = jax.vmap(walk.env._spare)(with_items(state, berry=2, pie=pie))
        seen.append(float(walk_seeing[0, items.index("pie")]))
        others = np.delete(np.asarray(walk_seeing), items.index("pie"), axis=1)
        assert not others.any(), "of the rest nothing is needed"
    assert seen == pytest.approx([-0.1, 1.0, 0.5, 0.2])


@pytest.mark.craftax
@pytest.mark.parametrize("game", [CLASSIC, FULL])
def test_a_death_has_its_cause(worlds_of, game):
    env, worlds = worlds_of(game)
    calm = worlds.replace(player_health=worlds.player_health * 0 + 1)
    dead = calm.replace(player_health=calm.player_health * 0)
    block = env.engine._constants.lava
    cases = {
        "hunger": (calm, dead.replace(player_food=dead.player_food * 0)),
        "thirst": (calm, dead.replace(player_drink=dead.player_drink * 0)),
        "fatigue": (calm, dead.replace(player_energy=dead.player_energy * 0)),
        "lava": (calm, dead.replace(map=jnp.full_like(dead.map, block))),
        env.game.causes[2]: (beside(calm, waits=0), beside(dead, waits=5)),
        "asleep": (
            beside(calm, waits=0).replace(is_sleeping=jnp.ones(8, bool)),
            beside(dead, waits=5),
        ),
        "arrow": (shot_at(calm), dead),
        "other": (calm, dead),
    }
    assert cases.keys() == set(env.game.causes)
    for cause, (before, after) in cases.items():
        step = WorldStep(before, after, jnp.zeros(8))
        numbers = jax.vmap(lambda was, now: env.engine.cause(WorldStep(was, now, 0.0)))(*step[:2])
        assert {env.game.causes[number] for number in np.asarray(numbers)} == {cause}


def beside(worlds, *, waits: int):
    """The worlds with a mob at the player's side that waits so long until it hits again."""
    name = "zombies" if hasattr(worlds, "zombies") else "melee_mobs"
    mobs = getattr(worlds, name)
    mobs = mobs.replace(
        mask=jnp.ones_like(mobs.mask), attack_cooldown=jnp.full_like(mobs.attack_cooldown, waits)
    )
    return worlds.replace(**{name: mobs})


def shot_at(worlds):
    """The worlds with an arrow that reaches the player in the next timestep."""
    shots, ways = ("arrows", "arrow_directions")
    if not hasattr(worlds, shots):
        shots, ways = "mob_projectiles", "mob_projectile_directions"
    mobs, directions = getattr(worlds, shots), jnp.ones_like(getattr(worlds, ways))
    player = worlds.player_position.reshape(8, *[1] * (mobs.position.ndim - 2), 2)
    mobs = mobs.replace(mask=jnp.ones_like(mobs.mask), position=player - directions)
    return worlds.replace(**{shots: mobs, ways: directions})
