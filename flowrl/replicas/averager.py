"""The averager of a run with replicas: starts them, and makes a round of what they offer.

It is the run's first process: it holds the run's lock, and is what the run's runner waits for. A
replica that dies is started again at the newest round. An averager that is killed takes its
replicas with it and leaves the rounds that it made; its next start goes on with the newest.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from flowrl import storage
from flowrl.averaging.rules import OuterStep, Rule
from flowrl.config import PPOConfig, quorum_of
from flowrl.errors import (
    EXIT_DISK_FULL,
    EXIT_DIVERGED,
    EXIT_IO,
    EXIT_USAGE,
    ConfigError,
    FileRefusedError,
    FlowrlError,
    TrainingError,
)
from flowrl.launchers import child
from flowrl.launchers.child import Child
from flowrl.launchers.sandbox import MEMORY_FRACTION, memory_share
from flowrl.paths import RunPaths
from flowrl.replicas.rounds import Offer, Round, Rounds, closes_after, fold, pooled
from flowrl.runs import TrainConfig, read_progress, write_progress

logger = logging.getLogger(__name__)
_LOOK_SECONDS, _REPORT_SECONDS, _TRIES = 0.05, 1.0, 3
_ERRORS = {EXIT_USAGE: ConfigError, EXIT_DIVERGED: TrainingError}  # by a replica's exit code


def run(config: TrainConfig, stop: Callable[[], int | None]) -> int:
    """Train a run with replicas; returns the exit code.

    Raises FlowrlError if fewer replicas than a round needs are left; it says how the last ended.
    """
    run_paths = config.run_paths
    if not config.resume:
        storage.remove_tree(run_paths.rounds)
    averager = Averager(config.ppo, run_paths, partial(_start, config))
    try:
        while (code := stop()) is None:
            if (code := averager.tick()) is not None:
                break
            averager.report()
            time.sleep(_LOOK_SECONDS)
    finally:
        averager.close()
    if code == 0:
        storage.remove_tree(run_paths.rounds)
        storage.remove_tree(run_paths.replicas)
    return code


def _start(config: TrainConfig, replica: int) -> Child:
    """Start the process of one replica."""
    words = replace(config, replica=replica).command_line
    env = {**os.environ, **share_of_devices(replica, config.ppo.replicas, os.environ)}
    return child.start((sys.executable, "-m", "flowrl.ppo_flow", *words), env)


class Averager:
    """The replicas' processes and the rounds of a run; `start` starts the replica of a number."""

    def __init__(
        self, config: PPOConfig, run_paths: RunPaths, start: Callable[[int], Child]
    ) -> None:
        self._config, self._run_paths, self._start = config, run_paths, start
        self._quorum = quorum_of(config.average_quorum, config.replicas)
        self._steps = config.num_envs * config.num_steps  # of one update, by all replicas
        self._counted = time.monotonic()  # until when time counts in the newest round's seconds
        self._rounds = Rounds(run_paths.rounds)
        self._processes = {replica: start(replica) for replica in range(config.replicas)}
        self._deaths = dict.fromkeys(self._processes, 0)  # since its last offer
        self._reported_at, self._reported = 0.0, None
        self._begin(self._rounds.newest())

    def tick(self) -> int | None:
        """Start dead replicas again, and make the next round if it is due.

        Returns the run's exit code when it is over, else None; raises as `run`.
        """
        if self._base is None:
            self._begin(self._rounds.newest())  # replica 0 makes the first
        elif self._base.ended and self._processes[0].poll() == 0:
            return 0
        elif not self._base.ended:
            self._look_for_offers(self._base)
            if self._is_due(self._base):
                self._begin(self._make_round(self._base))
        return self._start_again()

    def report(self) -> None:
        """Write progress.json, replica 0's own, at most once a second, if it moved."""
        if time.monotonic() - self._reported_at < _REPORT_SECONDS:
            return
        self._reported_at = time.monotonic()
        progress = None
        with suppress(FileRefusedError):  # a power cut damaged it; replica 0 will write it again
            progress = read_progress(self._run_paths.replica(0))
        missing = ", ".join(str(k) for k in self._processes if k not in self._arrived)
        waits = f"replica {missing}" if self._arrived and missing else ""
        if (
            progress is not None
            and (progress := replace(progress, waits_for=waits)) != self._reported
        ):
            self._reported = progress
            write_progress(self._run_paths, progress)

    def close(self) -> None:
        """End the replicas."""
        child.end(self._processes.values())

    def _begin(self, base: Round | None) -> None:
        self._base, self._began = base, time.monotonic()
        self._arrived: dict[int, float] = {}  # seconds after the round before

    def _start_again(self) -> int | None:
        for replica, process in self._processes.items():
            code = process.poll()
            if not code or self._deaths[replica] == _TRIES:
                continue
            if code in (EXIT_DISK_FULL, EXIT_IO):
                return code
            self._deaths[replica] = _TRIES if code == EXIT_USAGE else self._deaths[replica] + 1
            why = self._why(replica, code)
            logger.warning("replica %d: %s", replica, why)
            if self._deaths[replica] < _TRIES:
                self._processes[replica] = self._start(replica)
                continue
            left = sum(deaths < _TRIES for deaths in self._deaths.values())
            if left < self._quorum or replica == 0:
                raise _ERRORS.get(code, FlowrlError)(
                    f"{why} (replica {replica}; {left} of {len(self._processes)} are left, and a "
                    f"round needs {self._quorum} of them and replica 0)"
                )
        return None

    def _why(self, replica: int, code: int) -> str:
        """Return the end of a replica, in its own words if it left any."""
        said = self._run_paths.replica(replica).last_words
        if code > 0 and said.exists():
            return storage.read_bytes(said).decode(errors="replace")
        return f"signal {-code} ended it" if code < 0 else f"it ended with {code}; see the log"

    def _look_for_offers(self, base: Round) -> None:
        for replica in self._processes.keys() - self._arrived:
            if self._rounds.offer_folder(base.number + 1, replica).exists():
                self._arrived[replica] = time.monotonic() - self._began
                self._deaths[replica] = 0

    def _is_due(self, base: Round) -> bool:
        closing = closes_after(
            [*self._arrived.values()],
            last=base.arrivals,
            replicas=self._config.replicas,
            quorum=self._quorum,
            deadline=self._config.average_deadline,
        )
        return time.monotonic() - self._began >= closing

    def _make_round(self, base: Round) -> Round:
        before, number = self._rounds.mean(base), base.number + 1
        offers: dict[int, tuple[Offer, Mapping]] = {}
        left_out: dict[str, str] = {}
        for replica in self._processes:
            try:
                if replica not in self._arrived:
                    raise FileRefusedError(f"it made no offer for round {number} in time")
                offer, arrays = self._rounds.read_offer(base, replica, before)
                self._check(offer, [other for other, _ in offers.values()])
                offers[replica] = offer, arrays
            except FileRefusedError as error:
                logger.warning("round %d without replica %d: %s", number, replica, error)
                left_out[str(replica)] = str(error)
        if not offers:
            raise TrainingError(f"round {number} has no member; see the lines above")
        config = self._config
        lr, momentum = config.average_lr, config.average_momentum
        outer = OuterStep(name=config.average_outer, lr=lr, momentum=momentum)
        mean = fold(before, offers, Rule(name=config.average_rule), outer)
        members = [offer for offer, _ in offers.values()]
        return self._rounds.commit(self._record(base, members, left_out), mean)

    def _check(self, offer: Offer, others: Sequence[Offer]) -> None:
        """Refuse an offer whose figures cannot be those of a round of this run."""
        steps, most = sum(offer.acted), self._steps * self._config.average_every
        if steps * self._config.replicas > most:
            raise FileRefusedError(f"it says that it acted in {steps} steps, more than a round has")
        lengths = {len(each.rates.step_success) for each in (offer, *others)}
        if len(lengths) > 1 or 0 in lengths:
            raise FileRefusedError("its success rates are of a plan with other steps")

    def _record(self, base: Round, members: Sequence[Offer], left_out: Mapping[str, str]) -> Round:
        rates, number = pooled([member.rates for member in members]), base.number + 1
        gained = [sum(column) for column in zip(*(m.acted for m in members), strict=True)]
        reached, frames = rates.reach(self._config.success_state_rate), base.frames + sum(gained)
        total = -(-self._config.total_timesteps // self._steps)
        updates = min(total, base.updates + self._config.average_every)
        is_best = rates.reach(base.best_success)
        successes = ", ".join(f"{m.replica}: {m.rates.success:.0%}" for m in members)
        logger.info(
            "round %d: %d frames, %.0f %% (%s)", number, frames, 100 * rates.success, successes
        )
        since, self._counted = self._counted, time.monotonic()
        return Round(
            number=number,
            updates=updates,
            members=tuple(members),
            left_out=left_out,
            frames=frames,
            acted=tuple(before + more for before, more in zip(base.acted, gained, strict=True)),
            arrivals=tuple(sorted(self._arrived.values())),
            seconds=base.seconds + self._counted - since,
            ended=reached or updates == total,
            reached=reached,
            best=number if is_best else base.best,
            best_success=rates.success if is_best else base.best_success,
        )


def share_of_devices(replica: int, replicas: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that give a replica its GPUs of those that the run may see; several share one.

    >>> share_of_devices(1, 2, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    {'CUDA_VISIBLE_DEVICES': '2,3'}
    >>> share_of_devices(3, 4, {"CUDA_VISIBLE_DEVICES": "0,1"})
    {'CUDA_VISIBLE_DEVICES': '1', 'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.4500'}
    >>> share_of_devices(1, 2, {})
    {}
    """
    devices = [word for word in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    if not devices:
        return {}
    each = max(1, len(devices) // replicas)
    first = replica * each % len(devices)
    share = {"CUDA_VISIBLE_DEVICES": ",".join(devices[first : first + each])}
    if replicas > len(devices):
        sharing = -(-replicas // len(devices))
        share[MEMORY_FRACTION] = f"{memory_share(environ) / sharing:.4f}"
    return share
