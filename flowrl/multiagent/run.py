"""A run of independent learners: from a world to checkpoints of all agents and result.json.

A checkpoint to resume from holds all that a run goes on from: networks, optimizers, buffers, the
worlds' states and keys, and at lag 1 the epoch that is collected and not learnt from yet.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from flowrl import config as flags
from flowrl import runs, storage
from flowrl.arguments import other_flags
from flowrl.errors import ConfigError, TrainingError, format_error
from flowrl.experts import checkpoint
from flowrl.multiagent import agents, pipeline
from flowrl.multiagent import collect as collecting
from flowrl.multiagent.agents import Agents
from flowrl.multiagent.collect import Collector, Episodes
from flowrl.multiagent.config import IndependentConfig
from flowrl.multiagent.pipeline import Boundary, Call, Epoch, Span, Threads
from flowrl.multiagent.world import World, module_file, open_world
from flowrl.networks.grouped import unpack
from flowrl.paths import IndependentPaths, graph_around, is_graph
from flowrl.ppo import run_io
from flowrl.ppo.progress import ProgressReporter
from flowrl.ppo.sharding import check_backend
from flowrl.ppo.trackers import open_trackers
from flowrl.ppo.trainer import use_compile_cache
from flowrl.runs import ExpertReport, expert_shapes
from flowrl.storage import locks, records
from flowrl.storage.records import Natural, Word

logger = logging.getLogger(__name__)
_REPORT = " · epoch "  # in a line that says how far the run is
_LARGEST = 1e12  # number that a record may have
_ROOT = 2**31  # of the worlds' and the learning keys; agents' networks take 0, 1 and so on
_ANEW = "give --no_resume to begin anew, or another --run_folder"
# Flags that may change when a run goes on, besides epochs: they change no bit of the result.
_FREE = {
    *("run_folder", "overlap", "resume", "checkpoint_seconds", "stall_timeout"),
    *("timeline", "debug", "use_tensorboard", "use_wandb", "wandb_project", "wandb_entity"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class IndependentResult:
    """The result of a run; written last, and only by a whole run."""

    epochs: Natural
    frames: Natural  # turns of all copies of the world
    agents: tuple[ExpertReport, ...]  # `expert` is an agent's number
    frozen: tuple[Natural, ...]  # the agents whose loss was not finite
    mean_returns: tuple[float | None, ...]  # of the episodes that ended in the last epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class IndependentRun:
    """The record of a run, written before it begins: the flags, and what the world is made of."""

    config: Mapping[str, Any]
    observations: tuple[Natural, ...]  # sizes of each agent's
    actions: tuple[Natural, ...]
    module_sha256: Word | None  # of the file of a world of one's own


class _Run(NamedTuple):
    config: IndependentConfig
    world: World
    run_paths: IndependentPaths

    def frames(self, epochs: int) -> int:
        """Turns that all copies of the world take in so many epochs."""
        return epochs * self.config.learner.num_envs * self.config.learner.num_steps


def train(config: IndependentConfig, stop: Callable[[], int | None]) -> int:
    """Train until the last epoch or a stop; whatever ends the run, what is whole is saved.

    `stop` returns an exit code to stop with, or None; it is called after every epoch.

    Returns 0 if the run is finished, now or before, else the stop's exit code; raises FlowrlError.
    """
    use_compile_cache(None)
    check_backend()
    run_paths = IndependentPaths(config.run_folder.absolute())
    if is_graph(run_paths.folder):
        raise ConfigError(f"--run_folder {run_paths.folder} is a graph; name another folder")
    if outer := graph_around(run_paths.folder):
        where = f"--run_folder {run_paths.folder} is inside the graph {outer.root}"
        raise ConfigError(f"{where}, where flowrl train alone writes; name a folder outside")
    run = _Run(config, open_world(config.world, config.agents), run_paths)
    overlap = config.overlap and not config.debug
    with Threads(overlap=overlap, stall_timeout=config.stall_timeout) as threads:
        (((collect, learn, new), _),) = threads.results(Call("collect", 0, lambda: _programs(run)))
        with locks.held(run_paths.lock, timeout_seconds=1):
            start = _start(run, new)
            if start is None:
                return 0
            train_from = partial(pipeline.run, collect, learn, lag=config.lag, threads=threads)
            epochs = train_from(start=start, epochs=config.epochs)
            last, returns, code = _train(run, start, epochs, stop)
            if last.epoch < config.epochs:
                logger.info("saved at epoch %d; the same command goes on", last.epoch)
                return code
            _finish(run, last, returns)
    logger.info("finished, see %s", run_paths.result_json)
    return 0


def _train(
    run: _Run, boundary: Boundary, epochs: Iterable[Epoch], stop: Callable[[], int | None]
) -> tuple[Boundary, np.ndarray, int]:
    """Train from a boundary on; returns the last one, its mean returns, and the exit code."""
    config, run_paths, begun = run.config, run.run_paths, boundary.epoch
    trackers = open_trackers(
        run_paths, flags.flags(config), run_id=runs.STANDALONE, frames=run.frames(begun)
    )
    facts = {"run_id": runs.STANDALONE, "step_success": ()}
    total = run.frames(config.epochs)
    progress = ProgressReporter(run_paths, report=_REPORT, total_frames=total, **facts)
    progress.show("compiling", updates=begun, frames=run.frames(begun))
    checkpoints = run_io.Checkpointer(config.checkpoint_seconds)
    returns, code, spans = np.full(config.agents, np.nan), None, []
    try:
        for epoch in epochs:
            _check_agents(boundary, epoch)
            boundary, returns = epoch.after, _mean_returns(epoch.experience[1])
            done, frames = boundary.epoch, run.frames(boundary.epoch)
            trackers.log(figures_of(run, epoch), frames=frames)
            phase = "training" if done < config.epochs else "saving"
            said = " ".join(f"{mean:.3g}" for mean in returns)
            progress.show(phase, updates=done, frames=frames, ending=f" | returns {said}")
            spans += epoch.spans if config.timeline else ()
            if (code := stop()) is not None:
                break
            if done < config.epochs:
                checkpoints.due(partial(checkpoint.save_resume, run_paths.resume, boundary))
            del epoch  # it holds a buffer, and two others are needed in the next one
    finally:
        if begun < boundary.epoch < config.epochs:
            checkpoint.save_resume(run_paths.resume, boundary)
        if config.timeline:
            _write_timeline(run_paths.timeline, spans)
        trackers.close()
    return boundary, returns, code or 0


def _write_timeline(path: Path, spans: Sequence[Span]) -> None:
    """Write a Chrome trace for ui.perfetto.dev, times in microseconds; if that fails, warn."""
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
        logger.warning("%s is not written: %s", path.name, format_error(error))


def _mean_returns(episodes: Episodes) -> np.ndarray:
    """f64 `[A]`, of the episodes that ended in an epoch; NaN where none did."""
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
    of_agents = {"return": _mean_returns(epoch.experience[1]), **jax.device_get(epoch.figures)}
    for name, numbers in of_agents.items():
        figures |= {f"agent_{agent}/{name}": float(x) for agent, x in enumerate(numbers)}
    return figures


def _programs(run: _Run) -> tuple[Callable[..., Any], Callable[..., Any], Boundary]:
    """Return the programs that collect and learn, and the boundary before the first epoch."""
    own, sizes = run.config.learner, run.world.sizes
    root = jax.random.fold_in(jax.random.key(own.seed), _ROOT)
    world_key, learn_key = jax.random.split(root)
    program = collecting.collecting(run.world, own)
    learning = jax.jit(partial(agents.learn, own))
    logger.info("making %d copies of the world %s", own.num_envs, run.config.world)

    def collect(learner: Agents, collector: Collector, _: int) -> Any:
        collector, *experience = program(learner.policy, collector)
        return jax.block_until_ready((collector, tuple(experience)))

    def learn(learner: Agents, experience: Any, epoch: int) -> Any:
        epoch_key = jax.random.fold_in(learn_key, epoch)
        return jax.block_until_ready(learning(learner, experience[0], epoch_key))

    collector = collecting.begin(run.world, own, world_key)
    return collect, learn, Boundary(0, agents.init(own, sizes), collector)


def _start(run: _Run, new: Boundary) -> Boundary | None:
    """Return the boundary at which a run begins or goes on, None if it is finished.

    Raises ConfigError if it was begun as another one, or has as many epochs as are asked for.
    """
    config, run_paths, record = run.config, run.run_paths, record_of(run.config, run.world)
    finished = run_paths.result_json.exists()
    if not (config.resume and (finished or checkpoint.has_resume(run_paths.resume))):
        storage.remove_file(run_paths.result_json)
        storage.remove_tree(run_paths.policies)
        records.write(run_paths.run_json, record)
        return new
    begun = records.read(run_paths.run_json, IndependentRun, remedy=_ANEW)
    made = f"{run_paths.folder} was {'finished' if finished else 'begun'}"
    free = _FREE if finished else {*_FREE, "epochs"}
    fixed = {name: value for name, value in record.config.items() if name not in free}
    for said in other_flags(begun.config, fixed):
        raise ConfigError(f"{made} with {said}; give it as before, or {_ANEW}")
    if replace(begun, config=record.config) != record:
        world = module_file(config.world) or config.world
        problem = "with other code, or agents of other sizes, in"
        raise ConfigError(f"{made} {problem} {world}; restore it, or {_ANEW}")
    if finished:
        logger.info("already finished, see %s", run_paths.result_json)
        return None
    experience = collecting.experience_like(run.world.sizes, config.learner) if config.lag else None
    like = new._replace(epoch=np.int64(0), experience=experience)
    saved = checkpoint.load_resume(run_paths.resume, like)
    saved = saved._replace(epoch=int(saved.epoch))
    if saved.epoch >= config.epochs:
        has = f"{run_paths.folder} has {saved.epoch} epochs"
        raise ConfigError(f"--epochs {config.epochs}: {has}; give more, or {_ANEW}")
    records.write(run_paths.run_json, record)
    logger.info("goes on from epoch %d", saved.epoch)
    return saved


def record_of(config: IndependentConfig, world: World) -> IndependentRun:
    """Return the record of a run in this world."""
    code = module_file(config.world)
    return IndependentRun(
        config=flags.to_json(config),
        observations=tuple(world.sizes.observations),
        actions=tuple(world.sizes.actions),
        module_sha256=hashlib.sha256(code.read_bytes()).hexdigest() if code else None,
    )


def _check_agents(before: Boundary, epoch: Epoch) -> None:
    """Report the agents that were frozen in this epoch; TrainingError if none is left."""
    alive = np.asarray(epoch.after.learner.alive)
    for agent in np.nonzero(np.asarray(before.learner.alive) & ~alive)[0]:
        frozen = f"agent {agent} is frozen, its loss is not finite"
        remedy = "lower --lr, or repair the world if its numbers are large or not finite"
        logger.warning("epoch %d: %s; %s", epoch.number, frozen, remedy)
    if not alive.any():
        raise TrainingError(f"epoch {epoch.number}: no agent is left that learns; repair the world")


def _finish(run: _Run, last: Boundary, returns: np.ndarray) -> None:
    """Publish the agents by one rename, each in its own sizes; then write the result."""
    run_paths, frames, params = run.run_paths, run.frames(last.epoch), []
    networks = jax.device_get(unpack(last.learner.policy.network))
    for agent, own in enumerate(zip(*run.world.sizes, strict=True)):
        like = checkpoint.like_of(expert_shapes(*own, run.config.learner.layer_size))
        params.append(jax.tree.map(partial(_own_part, agent), like, networks))
    numbers, acted = range(len(params)), [frames] * len(params)
    result = IndependentResult(
        epochs=last.epoch,
        frames=frames,
        agents=run_io.publish(run_paths, numbers, params, acted=acted),
        frozen=tuple(map(int, np.flatnonzero(~np.asarray(last.learner.alive)))),
        mean_returns=tuple(float(mean) if abs(mean) <= _LARGEST else None for mean in returns),
    )
    records.write(run_paths.result_json, result)
    storage.remove_tree(run_paths.resume)


def _own_part(agent: int, like: jax.ShapeDtypeStruct, leaf: np.ndarray) -> np.ndarray:
    """One agent's part of a leaf `[A, …]`, without the padding to the widest agent."""
    return leaf[(agent, *map(slice, like.shape))]
