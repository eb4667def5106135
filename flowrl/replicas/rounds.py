"""Rounds of averaging in a folder: replicas of one run offer their arrays, one record names them.

    rounds/<r>/offers/<k>/arrays.safetensors   what replica k learned in round r, leaves [E, …]
    rounds/<r>/offers/<k>/state.safetensors    its environments, for itself alone
    rounds/<r>/offers/<k>/offer.json           digests and frames
    rounds/<r>/mean.safetensors                what all of them go on from
    rounds/<r>/round.json                      the members of the round: it is the round

An offer is a folder that never changes. A round is there when its record is; whoever is killed
before that has changed nothing, and whoever asks later finds one answer. Round 0 has no members:
its mean is what all replicas begin with.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from safetensors.numpy import save

from flowrl import storage
from flowrl.averaging.rules import OuterStep, Rule, average
from flowrl.averaging.state import from_row, to_row
from flowrl.errors import FileRefusedError
from flowrl.rates import Rates, is_clearly_more
from flowrl.storage import records
from flowrl.storage.arrays import read_tensors
from flowrl.storage.records import Natural, Share, at_least

Arrays = Mapping[str, np.ndarray]
_HEADER_BYTES = 2**20
_VELOCITY = "velocity/"  # prefix of the names of an outer step's state, f64
_REPLACE = OuterStep()
_LEAST_SECONDS, _SPREADS = 1.0, 4.0
_KEPT = 2
_MEAN, _RECORD = "mean.safetensors", "round.json"
_ARRAYS, _STATE, _OFFER = "arrays.safetensors", "state.safetensors", "offer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The learning of one replica from one round to the next."""

    replica: Natural
    base: str  # digest of the mean that it began with
    acted: tuple[Natural, ...]  # steps in which each expert acted since then
    rates: Rates
    digest: str = ""  # of its arrays' file


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The record that counts: the offers that were averaged, and the result."""

    number: Natural
    digest: str = ""  # of the mean's file
    members: tuple[Offer, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)  # replica → why
    updates: Natural = 0  # of each replica, in all rounds so far
    frames: Natural = 0  # of all rounds so far
    acted: tuple[Natural, ...] = ()  # of each expert, in all rounds so far
    arrivals: tuple[Annotated[float, at_least(0.0)], ...] = ()  # seconds after the round before
    seconds: float = 0.0  # of training so far
    ended: bool = False  # whether the run is over
    reached: bool = False  # because success is frequent enough
    best: Natural | None = None  # the round with the most success over a full window of episodes
    best_success: Share = 0.0

    @property
    def rates(self) -> Rates:
        """The rates of the members, weighted by their episodes."""
        return pooled([member.rates for member in self.members])


def pooled(rates: Sequence[Rates]) -> Rates:
    """The rates of several replicas, weighted by their episodes."""
    episodes = sum(each.episodes for each in rates)
    shares = np.array([each.episodes for each in rates]) / max(1, episodes)
    return Rates(
        step_success=tuple(np.clip(shares @ [x.step_success for x in rates], 0, 1).tolist()),
        mean_episode_length=float(shares @ [x.mean_episode_length for x in rates]),
        mean_episode_return=float(shares @ [x.mean_episode_return for x in rates]),
        episodes=episodes,
        full=all(each.full for each in rates),
    )


class Rounds:
    """The rounds of one run, in its folder `rounds`; a damaged file raises FileRefusedError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def newest(self) -> Round | None:
        """The newest round; None before round 0."""
        for number in reversed(self._numbers()):
            if (path := self.folder / str(number) / _RECORD).exists():
                return records.read(path, Round)
        return None

    def best(self, newest: Round) -> Round:
        """The newest round, or an earlier one that succeeded clearly more."""
        if newest.best in (None, newest.number):
            return newest
        rates, before = newest.rates, newest.best_success
        if rates.full and not is_clearly_more(before, rates.success, episodes=rates.episodes):
            return newest
        return records.read(self.folder / str(newest.best) / _RECORD, Round)

    def mean(self, record: Round) -> dict[str, np.ndarray]:
        """The arrays of a round, those that its record names."""
        return _read(self.folder / str(record.number) / _MEAN, record.digest)

    def commit(self, record: Round, mean: Arrays) -> Round:
        """Make a round: its arrays, then its record; older rounds that none needs are removed."""
        folder = storage.make_dir(self.folder / str(record.number))
        storage.remove_part_files(folder)  # of an averager that was killed
        content = save(dict(mean))
        record = replace(record, digest=hashlib.sha256(content).hexdigest())
        storage.write_atomic(folder / _MEAN, content)
        records.write(folder / _RECORD, record)
        self.collect(record)
        return record

    def collect(self, newest: Round) -> None:
        """Remove the rounds that no later one needs, and what a kill left half removed."""
        storage.remove_leftovers(self.folder)
        for number in self._numbers():
            if number <= newest.number - _KEPT and number != newest.best:
                storage.remove_tree(self.folder / str(number))

    def offer(self, number: int, offer: Offer, arrays: Arrays, state: Arrays) -> None:
        """Offer arrays for a round; an offer that is there already stays as it is."""
        final = self.offer_folder(number, offer.replica)
        if final.exists():
            return
        content = save(dict(arrays))
        offer = replace(offer, digest=hashlib.sha256(content).hexdigest())
        with storage.building(final) as folder:
            storage.make_dir(folder)
            storage.write_atomic(folder / _ARRAYS, content, durable=False)
            storage.write_atomic(folder / _STATE, save(dict(state)), durable=False)
            records.write(folder / _OFFER, offer, durable=False)

    def offer_folder(self, number: int, replica: int) -> Path:
        """Return the folder of a replica's offer for a round."""
        return self.folder / str(number) / "offers" / str(replica)

    def read_offer(self, base: Round, replica: int, like: Arrays) -> tuple[Offer, Arrays]:
        """A replica's offer for the round after `base`, and its arrays.

        Raises FileRefusedError if it is of another round or shape, or a number is not finite.
        """
        folder = self.offer_folder(base.number + 1, replica)
        offer = records.read(folder / _OFFER, Offer, remedy="the replica is left out")
        most = sum(leaf.nbytes for leaf in like.values()) + _HEADER_BYTES
        arrays = _read(folder / _ARRAYS, offer.digest, limit_bytes=most)
        if (offer.replica, offer.base, len(offer.acted)) != (replica, base.digest, len(base.acted)):
            raise FileRefusedError(f"{folder} did not begin with round {base.number}")
        if _forms(arrays) != _forms(_learned(like)):
            raise FileRefusedError(f"{folder} has arrays of other shapes or types than the round")
        for name, leaf in arrays.items():
            if not np.isfinite(leaf).all():
                raise FileRefusedError(f"{folder} has a NaN or an infinite number in {name}")
        return offer, arrays

    def state(self, number: int, replica: int) -> dict[str, np.ndarray] | None:
        """The environments that a replica left with its offer for a round, if it made one."""
        path = self.offer_folder(number, replica) / _STATE
        return _read(path) if path.exists() else None

    def _numbers(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        return sorted(int(p.name) for p in self.folder.iterdir() if p.name.isdecimal())


def closes_after(
    arrivals: Sequence[float],
    *,
    last: Sequence[float],
    replicas: int,
    quorum: int,
    deadline: float | None = None,
) -> float:
    """Seconds after the round before at which a round closes; infinite while it is too early.

    It closes with the last of `replicas`, or with the quorum and the deadline. Without one given,
    the deadline is the median of the arrivals of the round before plus four median deviations, or
    plus a second if that is longer.

    >>> closes_after([10.0, 11.0, 12.0], last=[10.0, 11.0, 12.0], replicas=4, quorum=3)
    15.0
    >>> closes_after([10.0], last=[], replicas=4, quorum=3)
    inf
    """
    if len(arrivals) >= replicas:
        return max(arrivals)
    if len(arrivals) < quorum:
        return math.inf
    if deadline is None:
        known = last or arrivals
        middle = statistics.median(known)
        spread = statistics.median(abs(seconds - middle) for seconds in known)
        deadline = middle + max(_SPREADS * spread, _LEAST_SECONDS)
    return max(deadline, sorted(arrivals)[quorum - 1])


def fold(
    before: Arrays,
    offers: Mapping[int, tuple[Offer, Arrays]],
    rule: Rule,
    outer: OuterStep = _REPLACE,
) -> dict[str, np.ndarray]:
    """Return the mean of a round's members, leaves `[E, …]` as those of the round before.

    Each expert is averaged by itself, weighted by the steps in which it acted; one that acted
    nowhere stays as it was. Of whole numbers, which count Adam's steps, the greatest is taken.
    Of parameters, `outer` then takes its step from `before`; its velocity lies beside them.
    `krum` and its like take no weights: they choose among the members in which the expert acted; of
    too few for them the geometric median is taken.
    """
    folded = {name: leaf.copy() for name, leaf in before.items()}
    learned = _learned(before)
    floats = sorted(name for name, leaf in learned.items() if leaf.dtype.kind == "f")
    stepped = [name for name in floats if outer.name == "sgd" and name.startswith("params/")]
    for name in learned.keys() - floats:
        folded[name] = np.max([arrays[name] for _, arrays in offers.values()], axis=0)
    num_experts = len(next(iter(before.values())))
    for expert in range(num_experts):
        acted = {k: offer.acted[expert] for k, (offer, _) in offers.items() if offer.acted[expert]}
        if not acted:
            continue
        trees = [{name: offers[k][1][name][expert, ...] for name in floats} for k in acted]
        rows = np.stack([to_row(tree, trees[0]) for tree in trees])
        few = "krum" in rule.name and len(rows) < 2 * rule.faulty + 3
        used = Rule(name="geometric_median") if few else rule
        weights = None if "krum" in used.name else np.array([*acted.values()], float)
        learned_mean: Any = from_row(average(used, rows, weights), trees[0])
        for name in floats:
            folded[name][expert] = learned_mean[name]
        for name in stepped:
            fast = folded.setdefault(_VELOCITY + name, np.zeros(before[name].shape))
            old, mean = before[name][expert].astype(float), folded[name][expert].astype(float)
            folded[name][expert], fast[expert] = outer.apply(old, mean, fast[expert])
    return folded


def _learned(arrays: Arrays) -> Arrays:
    """The arrays without an outer step's state."""
    return {name: leaf for name, leaf in arrays.items() if not name.startswith(_VELOCITY)}


def _forms(arrays: Arrays) -> dict[str, Any]:
    return {name: (leaf.shape, leaf.dtype) for name, leaf in arrays.items()}


def _read(path: Path, sha256: str | None = None, limit_bytes: int = 2**33) -> dict[str, np.ndarray]:
    content = storage.read_bytes(path, limit_bytes=limit_bytes)
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise FileRefusedError(f"{path} is not what its record says; retry the run")
    return read_tensors(content, place=str(path), remedy="retry the run")
