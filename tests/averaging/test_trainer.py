"""Agents learn, average their weights, and go on without those that fail."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import numpy as np
import pytest

import flowrl.averaging
from flowrl.averaging.coordinator import LocalSyncCoordinator
from flowrl.averaging.rules import OuterStep, Rule
from flowrl.averaging.trainer import (
    DistributedAgent,
    DistributedTrainer,
    ackley,
    simple_loss_function,
)
from flowrl.errors import ConfigError, FileRefusedError, TrainingError
from flowrl.storage import records
from tests.waiting import limit

WEIGHTS = np.array([1.0, -2.0, 0.5])


def agent_of(weights=WEIGHTS, coordinator=None, **settings) -> DistributedAgent:
    coordinator = coordinator or LocalSyncCoordinator()
    agent = DistributedAgent("a", coordinator, **settings)
    coordinator.join("a")
    agent.set_weights(weights)
    return agent


def trainer_of(num_agents=4, *, noise=0.5, weights=WEIGHTS, **settings) -> DistributedTrainer:
    trainer = DistributedTrainer(num_agents=num_agents, **settings)
    trainer.initialize_weights(weights, noise=noise)
    return trainer


def train(trainer, loss_fn=simple_loss_function, iterations=20, rate=0.05, interval=5):
    return asyncio.run(asyncio.wait_for(trainer.train(loss_fn, iterations, rate, interval), 20))


def all_weights(trainer) -> list[bytes]:
    return [agent.get_state().weights.tobytes() for agent in trainer.get_all_agents()]


# One agent


def test_a_step_goes_down_the_gradient():
    agent = agent_of()
    loss = asyncio.run(agent.train_step(simple_loss_function, 0.1))
    state = agent.get_state()
    assert loss == state.loss == 5.25
    assert np.array_equal(state.gradients, 2 * WEIGHTS)
    assert np.allclose(state.weights, 0.8 * WEIGHTS)
    assert (state.agent_id, state.iteration) == ("a", 1)


def test_history_has_the_newest_losses():
    async def learn(agent):
        return [await agent.train_step(simple_loss_function) for _ in range(5)]

    agent = agent_of(history_bound=3)
    assert [*agent.history] == []
    losses = asyncio.run(learn(agent))
    assert [*agent.history] == losses[2:]
    assert losses == sorted(losses, reverse=True)


def test_an_agent_keeps_a_copy_of_its_weights():
    mine = WEIGHTS.copy()
    agent = agent_of(mine)
    mine[0] = 99
    assert np.array_equal(agent.get_state().weights, WEIGHTS)


def test_an_agent_synchronizes_alone_and_by_a_function_of_its_own():
    agent = agent_of()
    averaged = asyncio.run(agent.synchronize())
    assert (averaged.members, averaged.round, agent.round) == (("a",), 0, 1)
    assert np.array_equal(agent.get_state().weights, WEIGHTS)
    asyncio.run(agent.synchronize(lambda own, round: (own + 3 * round.tree) / 2))
    assert np.array_equal(agent.get_state().weights, 2 * WEIGHTS)


def test_an_agent_waits_at_the_barrier():
    coordinator = LocalSyncCoordinator()
    agent = agent_of(coordinator=coordinator)
    assert asyncio.run(agent.barrier_sync())
    coordinator.join("b")
    assert not asyncio.run(agent.barrier_sync(timeout=0.01))


def test_an_agent_without_weights_says_so():
    agent = DistributedAgent("a", LocalSyncCoordinator())
    with pytest.raises(ConfigError, match="agent a has no weights"):
        agent.get_state()


@pytest.mark.parametrize("gradient", [np.ones(1), np.ones((3, 3)), {"w": np.ones(3)}, 0.1])
def test_gradients_of_another_form_are_refused(gradient):
    agent = agent_of()
    with pytest.raises(ConfigError, match="weights"):
        asyncio.run(agent.train_step(lambda _: (0.0, gradient)))
    assert np.array_equal(agent.get_state().weights, WEIGHTS)


def test_a_tree_of_f32_stays_one():
    weights = {"layer": {"w": np.ones((2, 2), np.float32)}, "b": np.ones(3, np.float32)}

    def loss_fn(tree):
        gradients = {"layer": {"w": np.full((2, 2), 0.5)}, "b": 2.0 * tree["b"]}
        return float(np.sum(tree["b"] ** 2)), gradients

    trainer = trainer_of(3, weights=weights, noise=0.1)
    train(trainer, loss_fn)
    for agent in trainer.get_all_agents():
        tree = agent.get_state().weights
        assert tree["b"].dtype == tree["layer"]["w"].dtype == np.float32
        assert tree["layer"]["w"].mean() < 0.6


# Several agents


def test_agents_are_named_or_counted():
    assert [a.agent_id for a in DistributedTrainer(["x", "y"]).get_all_agents()] == ["x", "y"]
    trainer = DistributedTrainer(num_agents=2)
    assert trainer.get_agent("agent1").agent_id == "agent1"
    with pytest.raises(ConfigError, match="no agent agent2; closest are"):
        trainer.get_agent("agent2")


def test_all_begin_with_the_same_weights_or_with_noise_of_their_own():
    trainer = trainer_of(noise=0.0)
    assert {*all_weights(trainer)} == {WEIGHTS.tobytes()}
    trainer.initialize_weights(WEIGHTS, noise=0.1)
    noisy = all_weights(trainer)
    assert len({*noisy}) == 4
    trainer.initialize_weights(WEIGHTS, noise=0.1)
    assert all_weights(trainer) == noisy


def test_a_summary_says_what_was_done():
    summary = train(trainer_of(3))
    assert (summary["total_agents"], summary["active_agents"]) == (3, 3)
    assert [*summary["final_losses"]] == ["agent0", "agent1", "agent2"]
    assert summary["mean_loss"] == pytest.approx(np.mean([*summary["final_losses"].values()]))
    assert summary["left_out"] == summary["rounds_missed"] == {}
    assert 0 < summary["total_time"] < 10


def test_training_goes_on_where_it_ended():
    twice, once = trainer_of(), trainer_of()
    train(twice, iterations=10)
    train(twice, iterations=10)
    train(once, iterations=20)
    assert all_weights(twice) == all_weights(once)
    assert once.get_agent("agent0").get_state().iteration == 20
    assert once.get_agent("agent0").round == 4


def test_a_saved_trainer_goes_on_with_the_same_bits(tmp_path):
    trainer = trainer_of(min_agents=2)
    train(trainer, iterations=7)
    trainer.save(str(tmp_path / "trainer.json"))
    loaded = DistributedTrainer.load(tmp_path / "trainer.json")
    assert all_weights(loaded) == all_weights(trainer)
    assert loaded.min_agents == 2
    train(trainer), train(loaded)
    assert all_weights(loaded) == all_weights(trainer)
    assert loaded.get_agent("agent1").get_state().iteration == 27


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "trainer.json"
    trainer_of().save(path)
    path.write_text(path.read_text().replace("agent3", "agent2"))
    with pytest.raises(FileRefusedError, match=r"trainer\.json is damaged"):
        DistributedTrainer.load(path)
    document = {"min_agents": 9, "left_out": {}, "ids": [], "agents": []}
    records.write(path, document)
    with pytest.raises(FileRefusedError, match=r"trainer\.json is malformed: min_agents is 9"):
        DistributedTrainer.load(path)


# Averages


def test_after_a_round_all_have_the_mean_bit_for_bit_and_between_rounds_none():
    trainer = trainer_of(5)
    begun = np.stack([a.get_state().weights for a in trainer.get_all_agents()])
    train(trainer, iterations=1, interval=1)
    assert len({*all_weights(trainer)}) == 1, "after a round"
    expected = begun.mean(axis=0) * (1 - 2 * 0.05)
    np.testing.assert_allclose(trainer.get_agent("agent0").get_state().weights, expected)
    between = trainer_of(5)
    train(between, iterations=9, interval=10)
    assert len({*all_weights(between)}) == 5, "between rounds"


def test_weights_and_momentum_come_from_rules():
    coordinator = LocalSyncCoordinator(rule=Rule(name="median"), outer=OuterStep(name="sgd", lr=1))
    trainer = trainer_of(5, coordinator=coordinator)
    losses = [train(trainer, iterations=30)["mean_loss"] for _ in range(4)]
    assert losses[-1] < 1e-3 < losses[0]

    async def weighted():
        agents = DistributedTrainer(["a", "b"], shared := LocalSyncCoordinator()).get_all_agents()
        for agent, weights in zip(agents, (np.zeros(2), np.ones(2)), strict=True):
            shared.join(agent.agent_id)
            agent.set_weights(weights)
        await asyncio.gather(agents[0].synchronize(weight=1), agents[1].synchronize(weight=3))
        return agents[0].get_state().weights

    assert np.array_equal(asyncio.run(weighted()), [0.75, 0.75])


# Losses


@pytest.mark.parametrize("loss_fn", [simple_loss_function, ackley])
def test_losses_are_0_at_0_and_their_gradients_are_right(loss_fn):
    assert loss_fn(np.zeros(4))[0] == pytest.approx(0, abs=1e-12)
    assert np.array_equal(loss_fn(np.zeros(4))[1], np.zeros(4))
    weights, step = np.random.default_rng(0).normal(size=4), 1e-6
    loss, gradient = loss_fn(weights)
    moved = [loss_fn(weights + step * axis)[0] for axis in np.eye(4)]
    np.testing.assert_allclose((np.array(moved) - loss) / step, gradient, rtol=1e-4, atol=1e-4)


def test_agents_find_the_least_loss():
    summary = train(trainer_of(4), iterations=60)
    assert summary["mean_loss"] < 1e-3
    near = trainer_of(4, weights=np.full(2, 0.3), noise=0.05)
    first = ackley(np.full(2, 0.3))[0]
    assert train(near, ackley, iterations=200, rate=0.01)["mean_loss"] < first / 10


# Time


@pytest.mark.parametrize("interval", [1, 10])
def test_twenty_agents_and_a_hundred_steps_take_no_time(interval):
    summary = train(trainer_of(20), iterations=100, interval=interval)
    assert summary["total_time"] < limit(5)
    assert {agent for agent in summary["final_losses"]} == {f"agent{n}" for n in range(20)}


# All together


def test_barriers_and_rounds_of_many_agents_together():
    async def learn():
        trainer = trainer_of(8)
        for agent in trainer.get_all_agents():
            trainer.coordinator.join(agent.agent_id)

        async def one(agent):
            for _ in range(10):
                await agent.train_step(simple_loss_function, 0.1)
                assert await agent.barrier_sync(10)
                await agent.synchronize()

        await asyncio.gather(*map(one, trainer.get_all_agents()))
        return trainer

    trainer = asyncio.run(learn())
    assert len({*all_weights(trainer)}) == 1
    assert trainer.get_agent("agent7").get_state().loss < 0.2


# Faults


def failing(after, agents=("agent1",), error=ValueError):
    """A loss that fails in some agents after so many steps; it knows agents by their weights."""
    steps = {}

    def loss_fn(weights):
        name = f"agent{int(weights[0])}"
        steps[name] = steps.get(name, 0) + 1
        if name in agents and steps[name] > after:
            raise error("no data")
        return 1.0, np.zeros_like(weights)

    return loss_fn


def apart(num_agents, **settings) -> DistributedTrainer:
    """Agents whose weights are their numbers."""
    trainer = DistributedTrainer(num_agents=num_agents, **settings)
    for number, agent in enumerate(trainer.get_all_agents()):
        agent.set_weights(np.full(2, float(number)))
    return trainer


@pytest.mark.parametrize("error", [ValueError, KeyError, asyncio.CancelledError, StopIteration])
@pytest.mark.parametrize("after", [0, 3])
def test_an_agent_that_raises_is_left_out_and_named(after, error):
    trainer = apart(4)
    summary = train(trainer, failing(after, error=error), iterations=10, interval=10)
    assert [*summary["left_out"]] == ["agent1"]
    assert "agent1" not in summary["final_losses"]
    expected = np.full(2, (0 + 2 + 3) / 3)
    for name in summary["final_losses"]:
        np.testing.assert_allclose(trainer.get_agent(name).get_state().weights, expected)
    again = train(trainer, simple_loss_function)  # it stays out
    assert again["active_agents"] == 3
    assert trainer.get_agent("agent1").get_state().iteration == after


def test_too_few_agents_are_an_error_at_once():
    trainer = apart(4, min_agents=3)
    loss_fn = failing(3, agents=("agent1", "agent2"))
    with pytest.raises(TrainingError, match=r"fewer than 3 agents are left, .*agent1.*no data"):
        train(trainer, loss_fn, iterations=10**6, interval=10**6)
    assert trainer.get_agent("agent0").get_state().iteration < 10
    with pytest.raises(TrainingError):
        train(trainer)


def test_an_agent_that_went_nan_goes_on_from_the_mean():
    def loss_fn(weights):
        bad = 3.9 < weights[0] < 4.1
        return 0.0, np.full_like(weights, np.nan if bad else 0.0)

    trainer = apart(5)
    summary = train(trainer, loss_fn, iterations=2, interval=1)
    assert summary["rounds_missed"] == {"agent4": 1}
    assert summary["left_out"] == {}
    assert len({*all_weights(trainer)}) == 1
    np.testing.assert_allclose(trainer.get_agent("agent4").get_state().weights, [1.5, 1.5])


def test_training_that_was_cancelled_goes_on():
    async def cancel(trainer):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await trainer.train(simple_loss_function, 10**6, 0.01, 3)

    trainer = trainer_of()
    for _ in range(3):
        asyncio.run(cancel(trainer))
    summary = train(trainer)
    assert summary["active_agents"] == 4
    assert summary["left_out"] == {}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "min_agents is 1 of 0 agents"),
        ({"agent_ids": []}, "min_agents is 1 of 0 agents"),
        ({"agent_ids": ["a", "b", "a"]}, "one id"),
        ({"agent_ids": ["a"], "num_agents": 1}, "one id"),
        ({"num_agents": 2, "min_agents": 3}, "min_agents is 3 of 2"),
        ({"num_agents": 2, "min_agents": 0}, "min_agents is 0 of 2"),
        ({"num_agents": -1}, "of 0 agents"),
    ],
)
def test_impossible_trainers_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        DistributedTrainer(**settings)


@pytest.mark.parametrize("case", [(0, 0.1, 1), (1, 0.0, 1), (1, float("nan"), 1), (1, 0.1, 0)])
def test_impossible_training_is_refused(case):
    with pytest.raises(ConfigError, match="must be above 0"):
        asyncio.run(trainer_of().train(simple_loss_function, *case))


def test_training_without_weights_is_refused():
    trainer = DistributedTrainer(num_agents=2)
    with pytest.raises(ConfigError, match="agent agent0 has no weights"):
        asyncio.run(trainer.train(simple_loss_function))
    trainer.initialize_weights(WEIGHTS)
    train(trainer)


# The package


def test_all_names_are_exported_and_no_engine_is_loaded():
    for name in flowrl.averaging.__all__:
        assert getattr(flowrl.averaging, name) is not None
    with pytest.raises(AttributeError):
        _ = flowrl.averaging.nothing
    code = (
        "import sys, flowrl.averaging as a; a.DistributedTrainer; import json;"
        "print(json.dumps([m for m in ('jax', 'mpi4py', 'pyspark') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert json.loads(done.stdout) == []
