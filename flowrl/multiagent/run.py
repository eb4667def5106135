"""A run of independent learners: from a world to checkpoints of all agents and result.json.

A checkpoint to resume from holds all that a run goes on from: networks, optimizers, memories, the
worlds' states and keys, and at lag 1 the epoch that is collected and not learnt from yet.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from flowrl import config as flags
from flowrl import runs, storage
from flowrl.errors import ConfigError, TrainingError, format_error
from flowrl.experts import checkpoint
from flowrl.multiagent import agents, pipeline
from flowrl.multiagent import collect as collecting
from flowrl.multiagent.agents import Agents
from flowrl.multiagent.collect import Collector
from flowrl.multiagent.config import IndependentConfig
from flowrl.multiagent.pipeline import Boundary, Call, Collect, Epoch, Learn, Span, Threads
from flowrl.multiagent.world import Sizes, World, open_world
from flowrl.networks.grouped import unpack
from flowrl.paths import IndependentPaths
from flowrl.ppo.trackers import Guarded, JsonLines
from flowrl.ppo.trainer import use_compile_cache
from flowrl.runs import ExpertReport, Progress, expert_shapes
from flowrl.storage import locks, records
from flowrl.storage.records import Natural

logger = logging.getLogger(__name__)
_SHOW_SECONDS = 2.0
_LARGEST = 1e12  # number that a record may have
_ROOT = 2**31  # of the worlds' and the learning keys; agents' networks take 0, 1 and so on
_ANEW = "give --no-resume to begin anew, or another --run_folder"
# Flags that may change when a run goes on: they say how long it takes and where its files are.
_FREE = {
    *("run_folder", "epochs", "overlap", "resume", "checkpoint_seconds", "stall_timeout"),
    *("learner_threads", "timeline", "debug"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class IndependentResult:
    """What a run did; written last, and only by a whole run."""

    epochs: Natural
    frames: Natural  # turns of all copies of the world
    agents: tuple[ExpertReport, ...]  # `expert` is an agent's number
    frozen: tuple[Natural, ...]  # the agents whose loss was not finite
    mean_returns: tuple[float | None, ...]  # of the episodes that ended in the last epoch


class _Run(NamedTuple):
    config: IndependentConfig
    world: World
    paths: IndependentPaths

    def frames(self, epochs: int) -> int:
        """Turns that all copies of the world take in so many epochs."""
        return epochs * self.config.learner.num_envs * self.config.learner.num_steps


def train(config: IndependentConfig, stop: Callable[[], int | None]) -> int:
    """Train until the last epoch or a stop; whatever ends the run, what is whole is saved.

    `stop` returns an exit code to stop with, or None; it is called after every epoch.

    Returns:
      The exit code: 0 if the run is finished, now or before; else that of the stop.

    Raises:
      BusyError: another process trains in the run's folder.
      FlowrlError: the run cannot begin or go on.
    """
    use_compile_cache(None)
    paths = IndependentPaths(config.run_folder.absolute())
    run = _Run(config, open_world(config.world, config.agents), paths)
    with Threads(
        overlap=config.overlap and not config.debug,
        stall_timeout=config.stall_timeout,
        learner_threads=config.learner_threads,
    ) as threads:
        (((collect, learn, fresh), _),) = threads.results(
            Call("collect", 0, lambda: _programs(run))
        )
        epochs = partial(pipeline.run, collect, learn, lag=config.lag, threads=threads)
        with locks.held(paths.program_lock, timeout_seconds=1):
            here = _begin(run, fresh, lambda: next(epochs(start=fresh, epochs=2)).after)
            if here is None:
                return 0
            here, returns, code = _train(run, here, epochs(start=here, epochs=config.epochs), stop)
            if here.epoch < config.epochs:
                logger.info("saved at epoch %d; the same command goes on", here.epoch)
                return code
            _finish(run, here, returns)
    logger.info("finished, see %s", paths.result_json)
    return 0


def _train(
    run: _Run, here: Boundary, epochs: Iterable[Epoch], stop: Callable[[], int | None]
) -> tuple[Boundary, np.ndarray, int]:
    """Train from `here` on; returns how far it came, the last mean returns, and the exit code."""
    config, paths = run.config, run.paths
    trackers = Guarded([JsonLines(paths, run.frames(here.epoch)), Reports(run, here.epoch)])
    saved, saved_at, code, spans = here.epoch, time.monotonic(), None, []
    returns = np.full(config.agents, np.nan)
    try:
        for epoch in epochs:
            _check_agents(here, epoch)
            here, returns = epoch.after, mean_returns(epoch)
            trackers.log(figures_of(run, epoch), frames=run.frames(here.epoch))
            spans += epoch.spans if config.timeline else ()
            if (code := stop()) is not None:
                break
            due = 0 < config.checkpoint_seconds <= time.monotonic() - saved_at
            if due and here.epoch < config.epochs:
                save(paths, here)
                saved, saved_at = here.epoch, time.monotonic()
            del epoch  # it holds a buffer, and two others are needed in the next one
    finally:
        if saved < here.epoch < config.epochs:
            save(paths, here)
        if config.timeline:
            write_timeline(config.timeline, spans)
    return here, returns, code or 0


def save(paths: IndependentPaths, here: Boundary) -> None:
    """Write all that a run goes on from."""
    checkpoint.save_resume(paths.resume, jax.tree.map(_plain, here))


def load(paths: IndependentPaths, like: Boundary) -> Boundary:
    """What was saved last; the leaves of `like` have the same shapes.

    Raises:
      ExpertError: it is damaged, or of a run with other sizes.
    """
    found = checkpoint.load_resume(paths.resume, jax.tree.map(_plain, like))
    found = jax.tree.map(lambda x, y: jax.random.wrap_key_data(y) if _is_key(x) else y, like, found)
    return found._replace(epoch=int(found.epoch))


def write_timeline(path: Path, spans: Sequence[Span]) -> None:
    """Write a Chrome trace, for ui.perfetto.dev or chrome://tracing; its times are microseconds.

    If that fails, warn, and let the run end as it would.
    """
    lanes = {"collect": 0, "learn": 1}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": lane, "args": {"name": side}}
        for side, lane in lanes.items()
    ]
    for side, name, epoch, began, ended in spans:
        times = {"ts": (began - spans[0].began) * 1e6, "dur": (ended - began) * 1e6}
        place = {"pid": 0, "tid": lanes[side], "args": {"epoch": epoch}}
        events.append({"ph": "X", "name": name, **times, **place})
    try:
        storage.write_json(path, {"traceEvents": events}, durable=False)
    except OSError as error:
        logger.warning("--timeline %s is not written: %s", path, format_error(error))


class Reports:
    """Writes progress.json and a line on the terminal, at most every _SHOW_SECONDS."""

    def __init__(self, run: _Run, epochs: int) -> None:
        self._run = run
        self._start = time.monotonic(), run.frames(epochs)
        self._shown_at = float("-inf")

    def log(self, figures: Mapping[str, float], *, frames: int) -> None:
        """Report the figures of an epoch."""
        now, (start, before) = time.monotonic(), self._start
        total = self._run.frames(self._run.config.epochs)
        if frames < total and now - self._shown_at < _SHOW_SECONDS:
            return
        self._shown_at, speed = now, (frames - before) / (now - start)
        progress = Progress(
            run_id=runs.STANDALONE,
            updates=int(figures["epoch"]) + 1,
            frames=frames,
            total_frames=total,
            steps_per_second=speed,
            step_success=(),
            eta_seconds=(total - frames) / speed,
            phase="training",
            updated_at=time.time(),
        )
        runs.write_progress(self._run.paths, progress)
        done = f"{progress.updates:,} · {frames:,} of {total:,} frames · {speed:,.0f} steps/s"
        each = [figures[f"agent_{agent}/return"] for agent in range(self._run.config.agents)]
        returns = " ".join(f"{mean:.3g}" for mean in each)
        logger.info("training%s%s | returns %s", runs.REPORT, done, returns)

    def close(self) -> None:
        """Everything is written already."""


def mean_returns(epoch: Epoch) -> np.ndarray:
    """f64 `[A]`, of the episodes that ended in an epoch; NaN where none did."""
    _, episodes = epoch.experience
    total, number = np.asarray(episodes.total_return, np.float64), np.asarray(episodes.number)
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)


def figures_of(run: _Run, epoch: Epoch) -> dict[str, float]:
    """A line of metrics.jsonl; figures of an agent stand under its number.

    `buffer_age` is the mean age, in epochs, of the rows that were learnt from.
    """
    lag, ring = min(run.config.lag, epoch.number), epoch.after.learner.ring
    older = 0.0 if ring is None else max(0.0, float(ring.size[0]) / run.frames(1) - 1) / 2
    figures = {"epoch": epoch.number, "lag": lag, "buffer_age": lag + older}
    for span in epoch.spans:
        name = f"{span.name}_seconds"
        figures[name] = figures.get(name, 0.0) + span.ended - span.began
    each = {"return": mean_returns(epoch), **jax.device_get(epoch.figures)}
    for name, numbers in each.items():
        figures |= {f"agent_{agent}/{name}": float(x) for agent, x in enumerate(numbers)}
    return figures


def _programs(run: _Run) -> tuple[Collect, Learn, Boundary]:
    """How an epoch is collected and learnt from, and the boundary before the first one."""
    own, sizes = run.config.learner, run.world.sizes
    root = jax.random.fold_in(jax.random.key(own.seed), _ROOT)
    world_key, learn_key = jax.random.split(root)
    program, learning = collecting.collecting(run.world, own), jax.jit(partial(agents.learn, own))

    def collect(learner: Agents, collector: Collector, _: int) -> Any:
        collector, *experience = program(learner.policy, collector)
        return jax.block_until_ready((collector, tuple(experience)))

    def learn(learner: Agents, experience: Any, epoch: int) -> Any:
        epoch_key = jax.random.fold_in(learn_key, epoch)
        return jax.block_until_ready(learning(learner, experience[0], epoch_key))

    collector = collecting.begin(run.world, own, world_key)
    return collect, learn, Boundary(0, agents.init(own, sizes), collector)


def _begin(run: _Run, fresh: Boundary, another: Callable[[], Boundary]) -> Boundary | None:
    """Where a run begins or goes on, None if it is finished; run.json says what the run is.

    `another` returns a boundary of the shapes that a saved one has.

    Raises:
      ConfigError: it was begun with other flags, its world had agents of other sizes, or it has
        as many epochs as are asked for.
    """
    config, paths = run.config, run.paths
    values = flags.to_json(config) | records.to_json(run.world.sizes._asdict())
    finished = paths.result_json.exists()
    if not (config.resume and (finished or checkpoint.has_resume(paths.resume))):
        storage.remove_file(paths.result_json)
        storage.remove_tree(paths.policies)
        records.write(paths.run_json, values)
        return fresh
    begun, free = records.read_document(paths.run_json, remedy=_ANEW), _FREE
    if finished:
        free = _FREE - {"epochs"}
        begun["epochs"] = records.read_document(paths.result_json, remedy=_ANEW)["epochs"]
    for name, now in values.items():
        if name not in free and (was := begun.get(name)) != now:
            what, remedy = f"--{name}", f"give it as before, or {_ANEW}"
            if name in Sizes._fields:
                what, remedy = f"the agents' {name}", _ANEW
            made = f"{paths.folder} was {'finished' if finished else 'begun'}"
            raise ConfigError(f"{made} with {what} {was}, not {now}; {remedy}")
    if finished:
        logger.info("already finished, see %s", paths.result_json)
        return None
    here = load(paths, another())
    if here.epoch >= config.epochs:
        has = f"{paths.folder} has {here.epoch} epochs"
        raise ConfigError(f"--epochs {config.epochs}: {has}; give more, or {_ANEW}")
    logger.info("goes on from epoch %d", here.epoch)
    return here


def _check_agents(before: Boundary, epoch: Epoch) -> None:
    """Report the agents that were frozen in this epoch.

    Raises:
      TrainingError: none is left.
    """
    alive, (_, episodes) = np.asarray(epoch.after.learner.alive), epoch.experience
    for agent in np.nonzero(np.asarray(before.learner.alive) & ~alive)[0]:
        finite = np.asarray(episodes.finite)[agent]
        reason = "its world gave it numbers that are not finite"
        if finite:
            reason = "lower --lr, or mend the world if its numbers are large, or were not finite"
        frozen = f"agent {agent} is frozen, its loss is not finite"
        logger.warning("epoch %d: %s: %s", epoch.number, frozen, reason)
    if not alive.any():
        raise TrainingError(f"epoch {epoch.number}: no agent is left that learns; mend the world")


def _finish(run: _Run, last: Boundary, returns: np.ndarray) -> None:
    """Publish the agents by one rename, each in its own sizes; then write the result."""
    paths, frames, reports = run.paths, run.frames(last.epoch), []
    prepared = paths.finals.with_name(f"{paths.finals.name}.tmp")
    for old in (prepared, paths.finals):
        storage.remove_tree(old)
    networks = jax.device_get(unpack(last.learner.policy.network))
    for agent, own in enumerate(zip(*run.world.sizes, strict=True)):
        like = checkpoint.like_of(expert_shapes(*own, run.config.learner.layer_size))
        params = jax.tree.map(partial(_own_part, agent), like, networks)
        folder = prepared / paths.final(agent).name
        checkpoint.save_expert(folder, params)
        digests = storage.tree_digest(folder), checkpoint.array_digest(params)
        shapes = checkpoint.shapes_of(params)
        reports.append(
            ExpertReport(
                expert=agent, acted=frames, sha256=digests[0], content=digests[1], shapes=shapes
            )
        )
    storage.commit_dir(prepared, paths.finals)
    result = IndependentResult(
        epochs=last.epoch,
        frames=frames,
        agents=tuple(reports),
        frozen=tuple(map(int, np.flatnonzero(~np.asarray(last.learner.alive)))),
        mean_returns=tuple(float(mean) if abs(mean) <= _LARGEST else None for mean in returns),
    )
    records.write(paths.result_json, result)
    storage.remove_tree(paths.resume)


def _own_part(agent: int, like: jax.ShapeDtypeStruct, leaf: np.ndarray) -> np.ndarray:
    """One agent's part of a leaf `[A, …]`, without the padding to the widest agent."""
    return leaf[(agent, *map(slice, like.shape))]


def _plain(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
