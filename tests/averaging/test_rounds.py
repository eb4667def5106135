"""Rounds in a folder, and what is made of offers, without processes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from flowrl.averaging.rules import OuterStep, Rule
from flowrl.errors import FileRefusedError
from flowrl.replicas.rounds import Round, Rounds, closes_after, fold, pooled
from tests.averaging.stand_in import first_mean, learned, offer_of, rates

STATE = {"0000": np.arange(4)}


def offers_of(replicas: int, mean) -> dict:
    return {k: (offer_of(Round(number=0), k), learned(mean, 0, k)) for k in range(replicas)}


@pytest.fixture
def rounds(tmp_path):
    found = Rounds(tmp_path / "rounds")
    found.commit(Round(number=0, acted=(0, 0, 0)), first_mean())
    return found


@pytest.mark.parametrize(
    ("arrivals", "last", "deadline", "seconds"),
    [
        ([], [], None, math.inf),
        ([10.0, 11.0], [10.0, 11.0, 12.0], None, math.inf),  # below the quorum
        ([10.0, 11.0, 12.0], [10.0, 11.0, 12.0], None, 15.0),  # 11 + 4 × 1
        ([10.0, 10.1, 10.2], [10.1, 10.1, 10.1], None, 11.1),  # at least a second
        ([10.0, 11.0, 30.0], [10.0, 11.0, 12.0], None, 30.0),  # the quorum came after the deadline
        ([10.0, 11.0, 12.0], [], 60.0, 60.0),
        ([10.0, 11.0, 12.0, 13.0], [], 60.0, 13.0),  # all are there
    ],
)
def test_when_a_round_closes(arrivals, last, deadline, seconds):
    found = closes_after(arrivals, last=last, replicas=4, quorum=3, deadline=deadline)
    assert found == pytest.approx(seconds)


def test_an_expert_is_averaged_by_the_steps_in_which_it_acted():
    before = first_mean()
    offers = offers_of(2, before)
    offers[0][1]["params/kernel"][2] = 7.0  # the third expert acted in replica 0 only
    mean = fold(before, offers, Rule())
    kernels = [arrays["params/kernel"][0].astype(float) for _, arrays in offers.values()]
    wanted = (100 * kernels[0] + 110 * kernels[1]) / 210
    assert np.allclose(mean["params/kernel"][0], wanted, atol=1e-7)
    assert (mean["params/kernel"][2] == 7.0).all()
    assert (mean["opt_state/count"] == 4).all()
    assert mean["params/kernel"].dtype == np.float32


def test_an_expert_that_acted_nowhere_stays_as_it_was():
    before = first_mean()
    offers = {
        k: (replace(offer, acted=(5, 5, 0)), arrays)
        for k, (offer, arrays) in offers_of(2, before).items()
    }
    assert np.array_equal(
        fold(before, offers, Rule())["params/kernel"][2], before["params/kernel"][2]
    )


def test_the_outer_step_moves_parameters_only_and_its_state_comes_back(rounds):
    outer, before = OuterStep(name="sgd", lr=0.5, momentum=0.5), first_mean()
    for number in range(2):
        offers = {k: (offer_of(rounds.newest(), k), learned(before, number, k)) for k in range(2)}
        mean, moved = fold(before, offers, Rule()), fold(before, offers, Rule(), outer)
        velocity = before.get("velocity/params/kernel", np.zeros((3, 40, 8)))
        wanted = outer.apply(
            before["params/kernel"].astype(float), mean["params/kernel"].astype(float), velocity
        )
        assert np.array_equal(moved["params/kernel"], wanted[0].astype(np.float32))
        assert np.array_equal(moved["velocity/params/kernel"], wanted[1])
        assert np.array_equal(moved["opt_state/mu"], mean["opt_state/mu"])
        record = rounds.commit(Round(number=number + 1, acted=(0, 0, 0)), moved)
        before = rounds.mean(record)
        assert all(np.array_equal(before[name], moved[name]) for name in moved)
        rounds.offer(number + 2, offer_of(record, 0), learned(first_mean(), 0, 0), STATE)
        assert rounds.read_offer(record, 0, before)[0].base == record.digest


def test_krum_of_few_members_is_the_geometric_median():
    before = first_mean()
    few, of_median = offers_of(4, before), Rule(name="geometric_median")
    same = {k: (replace(offer, acted=(1, 1, 1)), arrays) for k, (offer, arrays) in few.items()}
    krum, median = fold(before, same, Rule(name="krum")), fold(before, same, of_median)
    assert all(np.array_equal(krum[name], median[name]) for name in before)


@pytest.mark.parametrize("name", ["mean", "median", "geometric_median", "krum"])
def test_no_order_of_offers_changes_a_bit(name):
    before = first_mean()
    offers = offers_of(5, before)
    orders = itertools.islice(itertools.permutations(offers), 0, 120, 17)
    means = [fold(before, {k: offers[k] for k in order}, Rule(name=name)) for order in orders]
    assert all(mean[key].tobytes() == means[0][key].tobytes() for mean in means for key in mean)


def test_rates_are_weighted_by_episodes():
    one = replace(rates(0.2), step_success=(0.5, 0.2), mean_episode_length=10.0)
    other = replace(rates(0.0, 100), step_success=(0.1, 0.0), mean_episode_length=30.0)
    found = pooled([one, other])
    assert found.step_success == (pytest.approx(0.4), pytest.approx(0.15))
    assert (found.mean_episode_length, found.episodes, found.full) == (15.0, 400, False)
    assert pooled([rates(1.0)] * 3).step_success == (1.0,)
    assert pooled([rates(0.0, 0)] * 2).success == 0.0


def test_an_offer_comes_back_and_never_changes(rounds):
    base = rounds.newest()
    arrays = learned(first_mean(), 0, 1)
    rounds.offer(1, offer_of(base, 1), arrays, STATE)
    rounds.offer(1, offer_of(base, 1), first_mean(), STATE)  # as of a replica that lives twice
    found, read = rounds.read_offer(base, 1, first_mean())
    assert found.acted == (110, 50, 0)
    assert all(np.array_equal(read[name], arrays[name]) for name in arrays)
    assert np.array_equal(rounds.state(1, 1)["0000"], STATE["0000"])
    assert rounds.state(1, 0) is None


def bad_offers() -> list:
    nan, shape = learned(first_mean(), 0, 1), learned(first_mean(), 0, 1)
    nan["params/kernel"][0, 0, 0] = np.inf
    shape["opt_state/mu"] = shape["opt_state/mu"].astype(np.float64)
    good = learned(first_mean(), 0, 1)
    missing = {name: good[name] for name in list(good)[:-1]}
    return [
        ("a NaN or an infinite", nan, {}),
        ("other shapes or types", shape, {}),
        ("other shapes or types", missing, {}),
        ("did not begin with round 0", good, {"base": "0" * 64}),
        ("did not begin with round 0", good, {"acted": (1, 2)}),
        ("did not begin with round 0", good, {"replica": 1}),
    ]


@pytest.mark.parametrize(("why", "arrays", "changes"), bad_offers())
def test_a_bad_offer_is_refused(rounds, why, arrays, changes):
    base = rounds.newest()
    offer = replace(offer_of(base, 2), **changes)
    rounds.offer(1, offer, arrays, STATE)
    if "replica" in changes:  # it lies where another one's should
        rounds.offer_folder(1, 1).rename(rounds.offer_folder(1, 2))
    with pytest.raises(FileRefusedError, match=why):
        rounds.read_offer(base, 2, first_mean())


@pytest.mark.parametrize("name", ["arrays.safetensors", "offer.json"])
@pytest.mark.parametrize("change", ["flipped", "cut", "long", "missing", "link"])
def test_a_damaged_offer_is_refused(rounds, name, change):
    base = rounds.newest()
    rounds.offer(1, offer_of(base, 1), learned(first_mean(), 0, 1), STATE)
    path = rounds.offer_folder(1, 1) / name
    content = path.read_bytes()
    path.unlink()
    if change == "link":
        path.symlink_to("/etc/passwd")
    elif change != "missing":
        changed = {
            "flipped": content[:-9] + b"\1" + content[-8:],
            "cut": content[: len(content) // 2],
        }
        path.write_bytes(changed.get(change, content + b"x" * 2**21))
    with pytest.raises(FileRefusedError):
        rounds.read_offer(base, 1, first_mean())


def test_a_damaged_round_is_refused(rounds):
    record = rounds.newest()
    mean = rounds.folder / "0" / "mean.safetensors"
    mean.write_bytes(mean.read_bytes()[:-1] + b"\1")
    with pytest.raises(FileRefusedError, match="not what its record says"):
        rounds.mean(record)


@pytest.mark.parametrize(
    ("best", "success", "kept", "result"),
    [
        (None, 0.0, "56", 6),
        (2, 0.9, "256", 2),
        (2, 0.15, "256", 6),  # rounds have 10 %: not clearly less
        (5, 0.9, "56", 5),
    ],
)
def test_two_rounds_and_the_best_stay(rounds, best, success, kept, result):
    for number in range(1, 7):
        offer = offer_of(rounds.newest(), 0)
        rounds.offer(number, offer, first_mean(), STATE)
        known = {"best": best, "best_success": success} if number >= (best or 7) else {}
        record = Round(number=number, acted=(0, 0, 0), members=(offer,), **known)
        rounds.commit(record, first_mean())
    assert "".join(sorted(path.name for path in rounds.folder.iterdir())) == kept
    newest = rounds.newest()
    assert (newest.number, rounds.best(newest).number) == (6, result)
