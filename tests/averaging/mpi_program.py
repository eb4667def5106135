"""What each rank runs in tests/averaging/test_mpi.py; each writes JSON into a folder."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from flowrl.averaging import (
    LocalSyncCoordinator,
    MPIDistributedTrainer,
    MPISyncCoordinator,
    OuterStep,
    simple_loss_function,
)
from flowrl.errors import FlowrlError

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()
AGENTS = [f"a{number}" for number in range(2 * SIZE + 1)]  # not alike on all ranks


def tree_of(agent, scale=1.0):
    random = np.random.default_rng([AGENTS.index(agent), 7])
    arrays = {"w": random.normal(size=(33, 31)), "b": random.normal(size=17)}
    return {"layer": {name: (scale * each).astype(np.float32) for name, each in arrays.items()}}


def weight_of(agent):
    return 1.0 + AGENTS.index(agent)


def row_of(tree):
    return np.concatenate([tree["layer"]["b"].ravel(), tree["layer"]["w"].ravel()])


def digest_of(tree):
    return hashlib.sha256(row_of(tree).tobytes()).hexdigest()


async def one_round(coordinator, agents, number=0, make=tree_of):
    for agent in agents:
        if number == 0:
            coordinator.join(agent)
    offers = [coordinator.mean(agent, number, make(agent), weight_of(agent)) for agent in agents]
    rounds = await asyncio.gather(*offers)
    assert len({digest_of(each.tree) for each in rounds}) == 1
    return rounds[0]


def averages():
    """The mean against that in f64 on one rank; the ranks' digests are compared outside."""
    exact = row_of(asyncio.run(one_round(LocalSyncCoordinator(), AGENTS)).tree)
    coordinator = MPISyncCoordinator(AGENTS)
    averaged = asyncio.run(one_round(coordinator, coordinator.own))
    assert averaged.members == tuple(AGENTS)
    assert not averaged.left_out
    assert not averaged.tree["layer"]["w"].flags.writeable
    assert np.abs(row_of(averaged.tree) - exact).max() <= 1e-6 * np.abs(exact).max()
    return digest_of(averaged.tree)


def left_out():
    """A NaN, an overflow of squares that is none, an agent that leaves."""

    def make(agent):
        tree = tree_of(agent, 1e30 if agent == AGENTS[0] else 1.0)
        if agent == AGENTS[-1]:
            tree["layer"]["w"][3, 4] = np.nan
        return tree

    coordinator = MPISyncCoordinator(AGENTS)
    present = [agent for agent in coordinator.own if agent != AGENTS[1]]
    averaged = asyncio.run(one_round(coordinator, present, make=make))
    assert np.isfinite(row_of(averaged.tree)).all()
    found = {"left_out": averaged.left_out, "members": averaged.members}
    return {**found, "bits": digest_of(averaged.tree)}


def refusals():
    """Messages of all that ranks refuse together."""
    return {
        "agents": refused(lambda: MPISyncCoordinator([*AGENTS, f"rank{RANK}"])),
        "config": refused(lambda: MPISyncCoordinator(AGENTS, config={"seed": RANK // (SIZE - 1)})),
        "twice": refused(lambda: MPISyncCoordinator([*AGENTS, "a0"])),
        "few": refused(lambda: MPISyncCoordinator(AGENTS[: SIZE - 1])),
        "shape": refused(lambda: own_round(lambda agent: {"w": np.ones(3 + RANK)})),
        "dtype": refused(
            lambda: own_round(lambda agent: {"w": np.ones(3, f"f{4 * min(RANK + 1, 2)}")})
        ),
        "keys": refused(lambda: own_round(lambda agent: {f"w{RANK}": np.ones(3)})),
        "round": refused(lambda: own_round(lambda agent: {"w": np.ones(3)}, number=RANK + 1)),
        "nan": refused(lambda: own_round(lambda agent: {"w": np.full(3, np.nan)})),
        "ints": refused(lambda: own_round(lambda agent: {"w": np.ones(3, int)})),
        "empty": refused(lambda: own_round(lambda agent: {})),
        "no numbers": refused(lambda: own_round(lambda agent: {"w": np.ones((0, 3))})),
        "train": refused(lambda: own_train(sync_interval=1 + RANK)),
    }


def refused(act):
    try:
        act()
    except FlowrlError as error:
        return str(error)
    return "nothing was refused"


def own_round(make, number=0):
    async def run():
        coordinator = MPISyncCoordinator(AGENTS)
        for agent in coordinator.own:
            coordinator.join(agent)
        await asyncio.gather(*(coordinator.mean(a, number, make(a)) for a in coordinator.own))

    asyncio.run(run())


def own_train(**numbers):
    trainer = MPIDistributedTrainer(AGENTS)
    trainer.initialize_weights(np.ones(3))
    asyncio.run(trainer.train(simple_loss_function, 4, 0.1, **numbers))


def trained():
    """Training with noise, of which one agent of rank 0 raises after a while; then a barrier."""
    coordinator = MPISyncCoordinator(AGENTS, outer=OuterStep(name="sgd", lr=0.9, momentum=0.1))
    trainer = MPIDistributedTrainer(AGENTS, coordinator)
    trainer.initialize_weights(np.ones(5, np.float32), noise=0.1)
    first = trainer.get_agent(coordinator.own[0])
    noise = hashlib.sha256(first.get_state().weights.tobytes()).hexdigest()
    calls = 0

    def loss_fn(weights):
        nonlocal calls
        calls += 1
        if RANK == 0 and calls == 40:
            raise ValueError("it fell over")
        return simple_loss_function(weights)

    summary = asyncio.run(trainer.train(loss_fn, 40, 0.05, 10))
    left = [trainer.get_agent(agent) for agent in summary["final_losses"]]
    bits = {hashlib.sha256(agent.get_state().weights.tobytes()).hexdigest() for agent in left}
    loss, left_out = summary["mean_loss"], summary["left_out"]
    return {"bits": sorted(bits), "noise": noise, "loss": loss, "left_out": left_out}


def outlived():
    """Training in which rank 1 loses its agents, of 3 for each rank, before a round and in one."""
    return {"first": outlive(0, 1), "later": outlive(20, 1), "few": outlive(20, 7)}


def outlive(after, min_agents):
    calls, agents = 0, [f"a{number}" for number in range(3 * SIZE)]

    def loss_fn(weights):
        nonlocal calls
        calls += 1
        if RANK == 1 and calls > after:
            raise ValueError("it fell over")
        return simple_loss_function(weights)

    trainer = MPIDistributedTrainer(agents, min_agents=min_agents)
    trainer.initialize_weights(np.ones(5, np.float32), noise=0.1)
    error = refused(lambda: asyncio.run(trainer.train(loss_fn, 40, 0.05, 10)))
    left = [a for a in trainer.get_all_agents() if a.agent_id not in trainer.left_out]
    bits = {a.get_state().weights.tobytes().hex() for a in left}
    return [error, dict(trainer.left_out), sorted(bits), trainer.get_summary()]


def went_on():
    """Training that goes on from one file for each rank, against itself without a break."""
    whole, trainer = MPIDistributedTrainer(AGENTS), MPIDistributedTrainer(AGENTS, min_agents=4)
    for each in (whole, trainer):
        each.initialize_weights(np.ones(5), noise=0.1)
        asyncio.run(each.train(simple_loss_function, 10, 0.05, 5))
    path = Path(sys.argv[1]) / f"agents.{RANK}"
    trainer.save(path)
    loaded = MPIDistributedTrainer.load(path)
    path.unlink()
    for each in (whole, loaded):
        asyncio.run(each.train(simple_loss_function, 10, 0.05, 5))
    agents = [[a.get_state() for a in each.get_all_agents()] for each in (whole, loaded)]
    for one, other in zip(*agents, strict=True):
        assert (one.weights == other.weights).all()
        assert (one.agent_id, one.iteration) == (other.agent_id, 20)
    return loaded.min_agents


def barriers():
    """Ranks that come late to a barrier are waited for."""

    async def run():
        coordinator = MPISyncCoordinator(AGENTS)
        for agent in coordinator.own:
            coordinator.join(agent)
        for number in range(2 * SIZE):
            time.sleep(0.02 * (number % SIZE == RANK))
            came = time.monotonic()
            done = await asyncio.gather(*(coordinator.barrier(a, 60.0) for a in coordinator.own))
            times = np.empty((SIZE, 2))
            WORLD.Allgather(np.array([came, time.monotonic()]), times)
            assert all(done)
            assert times[:, 0].max() <= times[:, 1].min()
        return await coordinator.barrier(coordinator.own[0], 0.01)

    return asyncio.run(run())


def killed():
    """Rank 1 is killed while the others wait for it in a round."""
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    own_round(lambda agent: {"w": np.ones(3)})


def raises():
    """The only agent of rank 1 raises, and all are needed."""
    trainer = MPIDistributedTrainer(AGENTS[:SIZE], min_agents=SIZE)
    trainer.initialize_weights(np.ones(3))

    def loss_fn(weights):
        if RANK == 1:
            raise ValueError("it fell over")
        return simple_loss_function(weights)

    asyncio.run(trainer.train(loss_fn, 100, 0.1, 1))


def broken():
    """A round of training fails on rank 1 alone."""
    trainer = MPIDistributedTrainer(AGENTS)
    trainer.initialize_weights(np.ones(3))
    if RANK == 1:
        trainer.coordinator._combine = lambda *_: 1 / 0
    asyncio.run(trainer.train(simple_loss_function, 4, 0.1, 2))


def made():
    """A coordinator is made; with other files on rank 1 it is refused."""
    MPISyncCoordinator(AGENTS)


if __name__ == "__main__":
    said = {name: globals()[name]() for name in sys.argv[2:]}
    (Path(sys.argv[1]) / f"{RANK}.json").write_text(json.dumps(said))
