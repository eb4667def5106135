"""Agents of one event loop: messages, barriers, and rounds that give all the same bits."""

from __future__ import annotations

import asyncio
import functools

import numpy as np
import pytest

from flowrl.averaging.coordinator import LocalSyncCoordinator
from flowrl.averaging.rules import OuterStep, Rule
from flowrl.averaging.state import SyncMessage
from flowrl.errors import ConfigError, TrainingError

AGENTS = ["a", "b", "c"]


def in_a_loop(test):
    """Run an async test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


def joined(agents=AGENTS, **settings) -> LocalSyncCoordinator:
    coordinator = LocalSyncCoordinator(**settings)
    for agent in agents:
        coordinator.join(agent)
    return coordinator


def message(source="a", targets=(), number=0):
    return SyncMessage(
        source_id=source, target_ids=targets, message_type="loss", payload={}, round=number
    )


async def begun(*calls):
    """Tasks of calls that wait for something."""
    tasks = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in tasks)
    return tasks


async def rounds(coordinator, trees, number=0, weights=None):
    """What each agent gets of one round, by its name."""
    weights = weights or dict.fromkeys(trees, 1.0)
    offers = [coordinator.mean(a, number, tree, weights[a]) for a, tree in trees.items()]
    return dict(zip(trees, await asyncio.gather(*offers), strict=True))


async def refused(coordinator, trees, **more):
    """What each agent's offer raises."""
    offers = [coordinator.mean(a, 0, tree, **more) for a, tree in trees.items()]
    return await asyncio.wait_for(asyncio.gather(*offers, return_exceptions=True), 5)


@in_a_loop
async def test_a_broadcast_reaches_all_but_its_source_and_a_message_its_targets_alone():
    coordinator = joined()
    assert await coordinator.broadcast(message("a")) == {"b": True, "c": True}
    assert await coordinator.send(message("b", ("c",)))
    assert not await coordinator.send(message("b", ("c", "nobody")))
    found = [await coordinator.gather(agent, 0.01) for agent in AGENTS]
    assert [[each.source_id for each in some] for some in found] == [[], ["a"], ["a", "b", "b"]]


@in_a_loop
async def test_messages_come_by_round_and_source_each_once():
    coordinator = joined()
    for source, number in [("c", 1), ("b", 2), ("b", 1), ("c", 0)]:
        await coordinator.send(message(source, ("a",), number))
    found = await coordinator.gather("a", 1)
    order = [(each.round, each.source_id) for each in found]
    assert order == [(0, "c"), (1, "b"), (1, "c"), (2, "b")]
    assert await coordinator.gather("a", 0.01) == []


@in_a_loop
async def test_gather_waits_for_the_first_message():
    coordinator = joined()
    (waiting,) = await begun(coordinator.gather("a", 10))
    await coordinator.send(message("b", ("a",)))
    assert [each.source_id for each in await waiting] == ["b"]


@in_a_loop
async def test_a_full_queue_takes_no_further_message():
    coordinator = joined(queue_bound=2)
    took = [await coordinator.send(message("a", ("b",))) for _ in range(3)]
    assert took == [True, True, False]
    assert len(await coordinator.gather("b")) == 2


@in_a_loop
async def test_a_barrier_opens_when_all_are_there_again_and_again():
    coordinator = joined()
    for _ in range(3):
        early = await begun(*(coordinator.barrier(agent, 10) for agent in AGENTS[:2]))
        assert await coordinator.barrier("c", 10)
        assert await asyncio.gather(*early) == [True, True]


@in_a_loop
async def test_a_barrier_that_ran_out_of_time_counts_nobody_twice():
    coordinator = joined()
    assert not await coordinator.barrier("a", 0.01)
    late = asyncio.create_task(coordinator.barrier("b", 10))
    assert not await coordinator.barrier("c", 0.01)  # "a" is gone
    both = await asyncio.gather(coordinator.barrier("a", 10), coordinator.barrier("c", 10))
    assert [*both, await late] == [True, True, True]


@in_a_loop
async def test_who_leaves_is_not_waited_for():
    coordinator = joined()
    tasks = await begun(
        *(coordinator.mean(agent, 0, np.ones(2)) for agent in AGENTS[:2]),
        *(coordinator.barrier(agent, 10) for agent in AGENTS[:2]),
    )
    coordinator.leave("c")
    first, second, *barriers = await asyncio.gather(*tasks)
    assert first.members == second.members == ("a", "b")
    assert barriers == [True, True]


@in_a_loop
async def test_who_joins_is_waited_for():
    coordinator = joined(["a"])
    assert (await coordinator.mean("a", 0, np.ones(1))).members == ("a",)
    coordinator.join("b")
    (waiting,) = await begun(coordinator.mean("a", 1, np.ones(1)))
    await coordinator.mean("b", 1, np.ones(1))
    assert (await waiting).members == ("a", "b")


@in_a_loop
async def test_all_members_of_a_round_get_the_same_bits_which_are_read_only():
    random = np.random.default_rng(0)
    names = [f"agent{number}" for number in range(200)]
    trees = {name: {"w": random.normal(size=33).astype(np.float32)} for name in names}
    found = await rounds(joined(names), trees)
    assert len({(one.members, one.tree["w"].tobytes()) for one in found.values()}) == 1
    assert found["agent0"].members == tuple(sorted(names))
    mean = np.mean([tree["w"].astype(np.float64) for tree in trees.values()], axis=0)
    np.testing.assert_allclose(found["agent0"].tree["w"], mean, rtol=0, atol=1e-7)
    assert found["agent0"].tree["w"].dtype == np.float32
    with pytest.raises(ValueError, match="read-only"):
        found["agent0"].tree["w"][0] = 2.0


@in_a_loop
async def test_a_tree_is_averaged_leaf_by_leaf():
    trees = {
        "a": {"x": np.zeros((2, 3), np.float32), "y": {"z": np.array([1.0])}},
        "b": {"y": {"z": np.array([3.0])}, "x": np.ones((2, 3), np.float32)},
    }
    found = (await rounds(joined(["a", "b"]), trees, weights={"a": 1, "b": 3}))["b"].tree
    assert np.array_equal(found["x"], np.full((2, 3), 0.75, np.float32))
    assert np.array_equal(found["y"]["z"], [2.5])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@in_a_loop
async def test_an_agent_that_is_not_finite_is_left_out_and_named(bad, caplog):
    trees = {"a": np.array([1.0, 2.0]), "b": np.array([5.0, bad]), "c": np.array([3.0, 4.0])}
    found = await rounds(joined(), trees)
    assert {one.members for one in found.values()} == {("a", "c")}
    assert [*found["b"].left_out] == ["b"]
    assert "not finite" in found["b"].left_out["b"]
    assert np.array_equal(found["b"].tree, [2.0, 3.0])
    assert caplog.records[0].left_out == found["a"].left_out


@in_a_loop
async def test_a_round_without_a_finite_tree_or_any_weight_fails_for_all():
    errors = await refused(joined(), dict.fromkeys(AGENTS, np.array([np.nan])))
    assert [type(error) for error in errors] == [TrainingError] * 3
    assert "a, b, c" in str(errors[0])
    errors = await refused(joined(), dict.fromkeys(AGENTS, np.ones(2)), weight=0.0)
    assert [type(error) for error in errors] == [ConfigError] * 3


@in_a_loop
async def test_a_rule_of_the_round_bears_faulty_agents():
    trees = {name: np.full(4, float(number)) for number, name in enumerate("abcd")}
    trees["e"] = np.full(4, 1e30)
    found = await rounds(joined(trees, rule=Rule(name="median")), trees)
    assert np.array_equal(found["a"].tree, np.full(4, 2.0))


@in_a_loop
async def test_krum_takes_equal_weights_and_refuses_others_for_all():
    trees = {name: np.full(4, float(number)) for number, name in enumerate("abcde")}
    coordinator = joined(trees, rule=Rule(name="krum", faulty=1))
    assert (await rounds(coordinator, trees))["a"].members == tuple("abcde")
    with pytest.raises(ConfigError, match="krum takes no weights"):
        await rounds(coordinator, trees, 1, dict(zip(trees, range(1, 6), strict=True)))
    few = joined(AGENTS, rule=Rule(name="krum"))
    errors = await refused(few, dict.fromkeys(AGENTS, np.ones(1)))
    assert ["needs 5 members" in str(error) for error in errors] == [True] * 3


@in_a_loop
async def test_an_outer_step_goes_from_round_to_round_with_momentum():
    outer = OuterStep(name="sgd", lr=0.5, momentum=0.5)
    coordinator = joined(["a", "b"], outer=outer)
    means = [np.array([1.0]), np.array([3.0]), np.array([2.0])]
    known, velocity = means[0], np.zeros(1)
    for number, mean in enumerate(means):
        found = (await rounds(coordinator, {"a": mean - 1, "b": mean + 1}, number))["a"].tree
        known, velocity = outer.apply(known, mean, velocity)
        assert np.array_equal(found, known)


@in_a_loop
async def test_an_offer_for_a_round_that_is_over_gets_the_newest():
    coordinator = joined(["a"])
    for number in range(3):
        newest = await coordinator.mean("a", number, np.full(2, float(number)))
    coordinator.join("b")
    assert await coordinator.mean("b", 1, np.ones(2)) is newest
    assert newest.round == 2


@in_a_loop
async def test_an_offer_for_another_round_than_the_open_one_is_refused():
    coordinator = joined(["a", "b"])
    (task,) = await begun(coordinator.mean("a", 1, np.ones(2)))
    with pytest.raises(ConfigError, match="b offers for round 2, others for 1"):
        await coordinator.mean("b", 2, np.ones(2))
    await coordinator.mean("b", 1, np.ones(2))
    await task


def test_an_agent_that_is_cancelled_takes_its_offer_back():
    async def cancel(coordinator):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(coordinator.mean("a", 0, np.zeros(1)), 0.01)

    coordinator = joined(["a", "b"])
    asyncio.run(cancel(coordinator))
    trees = {"b": np.array([2.0]), "a": np.array([4.0])}
    found = asyncio.run(rounds(coordinator, trees))  # in another event loop
    assert np.array_equal(found["a"].tree, [3.0])


@pytest.mark.parametrize(
    "tree",
    [
        np.ones(3),
        np.ones((2, 1)),
        np.ones(2, np.float32),
        np.ones(2, int),
        {"w": np.ones(2)},
        [1.0, 1.0],
        {},
    ],
    ids=["longer", "other axes", "f32", "ints", "a dict", "a list", "empty"],
)
@in_a_loop
async def test_a_tree_of_another_form_is_refused_in_one_line(tree):
    coordinator = joined(["a", "b"])
    (task,) = await begun(coordinator.mean("a", 0, np.ones(2)))
    with pytest.raises(ConfigError) as error:
        await coordinator.mean("b", 0, tree)
    assert "\n" not in str(error.value)
    coordinator.leave("b")
    assert (await task).members == ("a",)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
@in_a_loop
async def test_a_bad_weight_is_refused(weight):
    with pytest.raises(ConfigError, match="agent a has weight"):
        await joined(["a"]).mean("a", 0, np.ones(2), weight)


@pytest.mark.parametrize("verb", ["mean", "gather", "barrier"])
@in_a_loop
async def test_two_agents_of_one_id_and_strangers_are_refused(verb):
    with pytest.raises(ConfigError, match="agent a has joined already"):
        joined(["a", "a"])
    given = (0, np.ones(1)) if verb == "mean" else ()
    with pytest.raises(ConfigError, match="agent x has not joined"):
        await getattr(joined(), verb)("x", *given)


def test_nothing_is_slow_unless_asked(monkeypatch):
    async def exchange(latency):
        slept = []

        async def sleep(seconds):
            slept.append(seconds)

        monkeypatch.setattr(asyncio, "sleep", sleep)
        coordinator = joined(["a", "b"], latency_seconds=latency)
        for number in range(20):
            await coordinator.broadcast(message("a"))
            await rounds(coordinator, {"a": np.ones(2), "b": np.ones(2)}, number)
        return slept

    slept = asyncio.run(exchange(0.002))
    assert len(slept) == 20 * 3  # a broadcast and two means each
    assert set(slept) == {0.002}
    assert set(asyncio.run(exchange(0.0))) <= {0.0}


@in_a_loop
async def test_a_round_that_fails_by_another_error_lets_no_agent_wait(monkeypatch):
    def fail(*_):
        raise MemoryError

    coordinator = joined()
    monkeypatch.setattr(coordinator, "_combine", fail)
    found = await refused(coordinator, dict.fromkeys(AGENTS, np.ones(3)))
    assert [type(each) for each in found[:2]] == [TrainingError] * 2
    assert isinstance(found[2], MemoryError)
