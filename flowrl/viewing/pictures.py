"""The process of `flowrl play`: an agent plays a skill's plan, and each timestep is drawn."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flowrl.agent import (
    Agent,
    AgentRecord,
    AgentStep,
    ExportedExpert,
    load_agent,
    read_agent_record,
)
from flowrl.envs.skill_module import open_module
from flowrl.errors import ConfigError, GraphError
from flowrl.evaluation import load_experts
from flowrl.experts.store import ExpertStore
from flowrl.games.base import renderer_of
from flowrl.launchers.confined import ENDED, EPISODES
from flowrl.measures.episodes import RecordedEpisodes
from flowrl.paths import AGENT_JSON, GraphPaths
from flowrl.ppo.sharding import check_backend
from flowrl.runs import check_module, read_run

_TRIED = 32  # episodes played for each failure that is looked for
_MOST = 5000  # pictures of a film: they are held in memory
_HANDED_ON = 0.5  # seconds that the last picture of a step stays longer
_LAST = 1.5  # and that of an episode


def pictures(agent: Agent, skill: str, *, episodes: int, seed: int, failures: bool) -> bytes:
    """Play episodes of a skill; pictures, captions and seconds to hold them as npz.

    With `failures` only episodes that fail count. Raises GraphError if too few do, and ConfigError
    if there are more pictures than a film may have.
    """
    most = _TRIED * episodes if failures else episodes
    seeds = range(seed, seed + most)
    wanted = (n for n in seeds if not (failures and _succeeds(agent, skill, n)))
    shown = list(islice(wanted, episodes))
    if len(shown) < episodes:
        problem = f"only {len(shown)} of {most} episodes of {skill} fail"
        fewer = f"ask for --episodes {len(shown)}, or " if shown else ""
        raise GraphError(f"{problem}; {fewer}leave --failures out")
    played = (agent.play(skill, seed=n, frames=True) for n in shown)
    return _drawn(agent, skill, enumerate(played, 1))


def recorded_pictures(
    agent: Agent,
    skill: str,
    recorded: RecordedEpisodes,
    *,
    episodes: int,
    failures: bool,
    first: int = 1,
) -> bytes:
    """Replay recorded episodes of a skill from number `first` on, those that fail if `failures`.

    Returns as `pictures`; raises GraphError if none is recorded.
    """
    counted = [episode for episode in recorded if episode.number >= first]
    wanted = [episode for episode in counted if not (failures and episode.success)][:episodes]
    if not wanted:
        what, flag = ("failure", "record_failures") if failures else ("episode", "record")
        problem = f"no {what} of {skill} is recorded" + f" from number {first} on" * (first > 1)
        raise GraphError(f"{problem}; use flowrl evaluate --{flag} {episodes}")
    replays = ((each.number, agent.replay(skill, each, frames=True)) for each in wanted)
    return _drawn(agent, skill, replays)


def _drawn(agent: Agent, skill: str, played: Iterable[tuple[int, Iterator[AgentStep]]]) -> bytes:
    """The pictures of numbered episodes as npz."""
    length, shown = len(agent.plan(skill)), []
    for number, timesteps in played:
        steps = list(islice(timesteps, _MOST + 1 - len(shown)))
        shown += _shown(number, steps, length)
        logging.getLogger(EPISODES).debug(ENDED, 1)
        if len(shown) > _MOST:
            problem = f"the episodes of {skill} up to number {number} have over {_MOST:,} timesteps"
            raise ConfigError(f"{problem}, more than a film holds; ask for fewer --episodes")
    captions, frames, holds = zip(*shown, strict=True)
    content = io.BytesIO()
    np.savez(content, frames=np.stack(frames), captions=np.array(captions), holds=holds)
    return content.getvalue()


def _succeeds(agent: Agent, skill: str, seed: int) -> bool:
    return any(step.success for step in agent.play(skill, seed=seed))


def open_agent(place: Path, skill: str, *, trust_skills: bool) -> Agent:
    """The agent of an exported folder, or of a graph as far as one skill's plan needs it.

    Raises as `load_agent`, and as `load_experts` for a graph.
    """
    if os.path.lexists(place / AGENT_JSON):
        renderer_of(read_agent_record(place).env_name)  # before anything is loaded
        check_backend()
        return load_agent(place, trust_skills=trust_skills)
    check_backend()
    store = ExpertStore(GraphPaths(place))
    run_paths = store.archive_of(skill)
    run = read_run(run_paths)
    check_module(run_paths, run)
    experts = load_experts(store, run)
    manifest = store.manifest()
    version = manifest.experts[run.expert]
    expert = ExportedExpert(
        index=run.expert,
        skill=run.skill,
        frames=version.frames,
        arrays=version.sha256,
        module=run.module_sha256 or "",
        max_task_steps=run.config["max_task_steps"],
        keep_needs=run.config["keep_needs"],
        approvals=run.approvals,
    )
    record = AgentRecord.of(run, manifest.generation, [expert])
    params = {
        index: jax.tree.map(lambda leaves, local=local: leaves[local], experts)
        for local, index in enumerate(run.experts)
    }
    return Agent(record=record, params=params, modules={run.expert: open_module(run_paths.module)})


def _shown(
    number: int, steps: Sequence[AgentStep], length: int
) -> Iterator[tuple[str, Any, float]]:
    """The caption, the picture and the seconds that it stays longer, of each timestep."""
    for place, timesteps in groupby(steps, key=lambda step: step.step):
        of_step = list(timesteps)
        for timestep, step in enumerate(of_step, 1):
            count = f" × {step.count}" if step.count > 1 else ""
            line = f"episode {number}, step {place + 1}/{length} {step.skill}{count}, "
            line += f"expert {step.expert}, timestep {timestep}"
            hold = _HANDED_ON * (timestep == len(of_step))
            if step.done:
                ended = f"died: {step.cause}" if step.cause else "not done"
                line, hold = f"{line}: {'done' if step.success else ended}", _LAST
            yield "\n".join([line, *_player(step)]), step.frame, hold


def _player(step: AgentStep) -> Iterator[str]:
    """The lines of what the game says of the player."""
    for values in filter(None, (step.intrinsics, step.inventory)):
        yield ", ".join(f"{name.replace('_', ' ')} {n:.3g}" for name, n in values.items())
