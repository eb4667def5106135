"""scheduler_state.json, made anew from what else is in the folder, or held to the manifest.

Whoever calls these holds the graph's claim: no scheduler is at work.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from flowrl import config as configs
from flowrl import storage
from flowrl.config import BottomUpConfig
from flowrl.errors import ConfigError, FileRefusedError
from flowrl.experts.manifest import Manifest
from flowrl.experts.store import ExpertStore
from flowrl.parallel.claim import Claim
from flowrl.parallel.codec import StateFile
from flowrl.parallel.known import highest_number, known_skills
from flowrl.parallel.obstacles import refuse_obstacles
from flowrl.parallel.run_folders import live_runs
from flowrl.parallel.signals import NewSkill, Rules, SkillsAdded
from flowrl.parallel.skill_book import SkillBook
from flowrl.parallel.state import SchedulerState, step
from flowrl.parallel.status import Completed, Entry, Waiting
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import read_run
from flowrl.skills.graph import CAPACITIES, SkillGraph
from flowrl.skills.skill import load_library
from flowrl.storage import records

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What was found for a new scheduler_state.json, and where the damaged one is kept."""

    skills: tuple[NewSkill, ...]
    next_expert: int
    kept: Path | None


@contextmanager
def claimed(layout: GraphPaths) -> Iterator[None]:
    """Hold the graph's folder, so that no scheduler starts meanwhile.

    Raises:
      FileRefusedError: there is no graph in it.
      BusyError: a scheduler has it, or another repair.
    """
    if not (layout.checkpoints.is_dir() or layout.scheduler_state.is_file()):
        raise FileRefusedError(
            f"{layout.root} is no graph: it has neither checkpoints/ nor scheduler_state.json; "
            "name the folder that --graph_path named"
        )
    claim = Claim(layout.daemon_lock)
    claim.acquire()
    try:
        yield
    finally:
        claim.release()


def read_state(layout: GraphPaths) -> SchedulerState | None:
    """The saved state; None when there is none.

    Raises:
      FileRefusedError: it is damaged.
    """
    return StateFile(layout.scheduler_state).load()


def recover_state(layout: GraphPaths, *, anew: bool = False) -> Recovered | None:
    """Make scheduler_state.json from the manifest and the run folders; None if it is whole.

    `anew` makes it although it can be read. The old one is kept as
    scheduler_state.json.damaged-1, -2, …

    Raises:
      FileRefusedError: the manifest, a live run's record or the record of a skill is damaged, or
        something is in the way of any repair, see `obstacles`.
    """
    refuse_obstacles(layout)
    try:
        if read_state(layout) is not None and not anew:
            return None
    except FileRefusedError as error:
        logger.warning("%s", error)
    skills = known_skills(layout, recorded_graph(layout), SchedulerState())
    rules = Rules(launching=False)
    state, _ = step(SchedulerState(), [SkillsAdded(skills)], datetime.now(UTC), rules)
    number = max(state.next_expert, highest_number(layout) + 1)
    kept = _set_aside(layout.scheduler_state)
    StateFile(layout.scheduler_state).save(replace(state, next_expert=number))
    return Recovered(skills=skills, next_expert=number, kept=kept)


def train_lost_again(layout: GraphPaths) -> tuple[str, ...]:
    """Let completed skills wait whose expert no longer counts; says which.

    `completed` means that an expert of the skill counts. One that was rolled back or lost is
    trained again, as the same expert number, when the scheduler starts.

    Raises:
      FileRefusedError: the manifest or the state is damaged.
    """
    state = read_state(layout)
    lost = lost_skills(layout, state) if state else ()
    if state is None or not lost:
        return ()
    entries = [_waiting(e) if e.skill in lost else e for e in state.entries.values()]
    again = SchedulerState.of(
        entries, next_expert=state.next_expert, wish=state.wish, answers=state.answers
    )
    StateFile(layout.scheduler_state).save(again)
    return lost


def lost_skills(layout: GraphPaths, state: SchedulerState) -> tuple[str, ...]:
    """The skills that are completed although the manifest names no expert of theirs."""
    experts = ExpertStore(layout).manifest().experts
    counted = {(index, version.skill) for index, version in experts.items()}
    return tuple(
        entry.skill
        for entry in state.entries.values()
        if isinstance(entry.status, Completed) and (entry.expert, entry.skill) not in counted
    )


def state_disagrees(state: SchedulerState, present: Manifest) -> Iterator[str]:
    """Where the state says other expert numbers than the manifest, in words."""
    owners = {e.expert: e.skill for e in state.entries.values() if e.expert is not None}
    for index, version in present.experts.items():
        entry = state.entries.get(version.skill)
        if owners.get(index, version.skill) != version.skill:
            yield f"expert {index} is {version.skill}; the state says {owners[index]}"
        elif entry is not None and entry.expert not in {None, index}:
            yield f"{version.skill} is expert {index}; the state says {entry.expert}"


def recorded_graph(layout: GraphPaths) -> SkillGraph:
    """The skills that this graph trains, as config.json and skill_files/ name them.

    Raises:
      FileRefusedError: nothing says which environment the graph is for, or a skill is damaged.
    """
    config = recorded_config(layout)
    skills = SkillBook(layout).over(load_library(config.env_name, config.skills_dir))
    return SkillGraph(skills.values(), capacity=CAPACITIES[config.env_name])


def recorded_config(layout: GraphPaths) -> BottomUpConfig:
    """The configuration of the last start; without it, what the records of runs say.

    Raises:
      FileRefusedError: neither is there.
    """
    try:
        return usable_config(layout)
    except (FileRefusedError, ConfigError) as error:
        for place in live_runs(layout):
            return configs.from_json(BottomUpConfig, read_run(place).config)
        for index, version in ExpertStore(layout).manifest().experts.items():
            archive = RunPaths(layout.skill_folder(index, version.skill), index)
            if archive.run_json.exists():
                return configs.from_json(BottomUpConfig, read_run(archive).config)
        raise FileRefusedError(
            f"{error}. Nothing else says what the graph is for: start its scheduler again, with "
            "the flags it began with"
        ) from error


def usable_config(layout: GraphPaths) -> BottomUpConfig:
    """What config.json says.

    Raises:
      FileRefusedError: it is missing or damaged.
      ConfigError: it says something that makes no sense, or names no environment we know.
    """
    facts = records.read(layout.config_json, formats=(1,), sealed_from=1)
    try:
        config = configs.from_json(BottomUpConfig, facts)
    except ConfigError as error:
        raise ConfigError(f"{layout.config_json} cannot be used: {error}") from error
    if config.env_name not in CAPACITIES:
        raise ConfigError(f"{layout.config_json} names an unknown env_name {config.env_name!r}")
    return config


def _waiting(entry: Entry) -> Entry:
    status = entry.status
    assert isinstance(status, Completed)
    waiting = Waiting(attempt=status.attempt + 1, why="its expert counts no more")
    return replace(entry, status=waiting, failures=0, frames_used=0, refusals=0, requeues=0)


def _set_aside(path: Path) -> Path | None:
    if not path.exists() and not path.is_symlink():
        return None
    for number in itertools.count(1):
        kept = path.with_name(f"{path.name}.damaged-{number}")
        if not kept.exists() and not kept.is_symlink():
            storage.move_dir(path, kept)
            return kept
    return None
