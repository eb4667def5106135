"""Rebuild the scheduler's state and the manifest from what else is in the graph's folder.

The manifest names every merged expert and the run folders name every live run. A scheduler whose
state is missing adopts both: merged experts as completed skills, live runs as launched ones. A
skill keeps the expert number that its folders name, even if its expert no longer counts, so that no
number is given twice. The functions that write require the caller to hold the graph's folder.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from flowrl import config as configs
from flowrl.config import BottomUpConfig, PPOConfig, ScheduleConfig
from flowrl.errors import ConfigError, FileRefusedError, FormatVersionError
from flowrl.experts import manifest as manifests
from flowrl.experts.manifest import Manifest
from flowrl.experts.repair import set_aside
from flowrl.experts.store import ExpertStore
from flowrl.games.base import find_game
from flowrl.parallel.events import NewSkill, SkillsAdded
from flowrl.parallel.run_folder import readable_runs
from flowrl.parallel.skill_sources import SkillSources, read_graph_record
from flowrl.parallel.state import SchedulerState
from flowrl.parallel.state_file import StateFile
from flowrl.parallel.status import FRESH, Completed, Running, Status
from flowrl.parallel.transitions import step
from flowrl.paths import GraphPaths, slug
from flowrl.runs import ExpertVersion, TrainingRun, read_result, read_run
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import load_library
from flowrl.storage import records

logger = logging.getLogger(__name__)
_NUMBERED = re.compile(r"(?:skill_)?(0|[1-9][0-9]*)_([A-Za-z0-9_]+)(?:\.attempt[0-9.]+)?")


def known_skills(
    layout: GraphPaths, graph: SkillGraph, state: SchedulerState
) -> tuple[NewSkill, ...]:
    """The skills that the folder knows and `state` does not: merged, in training, or tried once.

    Raises:
      FileRefusedError: the manifest is damaged, or has no expert of a completed skill.
      FormatVersionError: another version of flowrl wrote a live run's record.
    """
    found: dict[str, NewSkill] = {}

    def add(skill: str, expert: int | None = None, status: Status = FRESH) -> None:
        needs = graph.needs(skill) if skill in graph.skills else ()
        before = found[skill].status if skill in found else None
        trained = before if isinstance(before, Completed) else None  # a live run trains it on
        found[skill] = NewSkill(
            skill=skill, needs=needs, expert=expert, status=status, trained=trained
        )

    manifest = ExpertStore(layout).manifest()
    _refuse_lost_experts(layout, state, manifest)
    for index, version in manifest.experts.items():
        add(version.skill, index, _completed(layout, version, manifest))
    for run, status in _live(layout, manifest):
        add(run.skill, run.expert, status)
    past = {} if state.entries else _expert_numbers(layout)
    for skill in [name for name in graph.skills if name not in found]:
        number = past.get(slug(skill))
        if number is not None and number not in {item.expert for item in found.values()}:
            add(skill, number)
    needed = [need for skill in found if skill in graph.skills for need in graph.all_needs(skill)]
    for need in dict.fromkeys(needed):  # even without any trace on disk
        if need not in found:
            add(need)
    return tuple(found[name] for name in found if name not in state.entries)


def _refuse_lost_experts(layout: GraphPaths, state: SchedulerState, manifest: Manifest) -> None:
    """Refuse what a rollback or a repair leaves that is killed before it writes the state."""
    for entry in state.entries.values():
        if entry.expert not in manifest.experts and isinstance(entry.status, Completed):
            raise FileRefusedError(
                f"no expert of {entry.skill} counts any more; run flowrl recover {layout.root}"
            )


def _live(layout: GraphPaths, manifest: Manifest) -> Iterator[tuple[TrainingRun, Running]]:
    """The runs that are not merged yet; whether they have ended is found when they are adopted."""
    for paths, run in readable_runs(layout):
        since = _written(paths.run_json)
        if run.run_id not in manifest.merged:
            facts = {"run_id": run.run_id, "attempt": run.attempt, "since": since}
            yield run, Running(handle=None, **facts)


def _completed(layout: GraphPaths, version: ExpertVersion, manifest: Manifest) -> Completed:
    """From the archived record, or the run folder if a merge was killed before archiving."""
    archive, own = layout.archive(version.index, version.skill), version.own_run
    for paths in (archive, layout.run(version.index, version.skill)):
        try:
            run, result = read_run(paths), read_result(paths)
            config = configs.from_json(PPOConfig, run.config)
        except FormatVersionError:
            raise
        except (FileRefusedError, ConfigError) as error:
            logger.info("%s", error)
            continue
        if run.run_id in manifest.merged and (own is None or run.run_id == own.run_id):
            return Completed(
                run_id=run.run_id,
                attempt=run.attempt,
                frames=result.frames,
                success_rate=result.success_rate,
                wall_seconds=result.wall_seconds,
                at=_written(paths.run_json),
                goal=config.success_state_rate,
                budget=config.total_timesteps,
            )
    logger.warning("%s has no record of %s: its time counts as 0", archive, version.version)
    return Completed(
        run_id=own.run_id if own else version.version,
        attempt=1,
        frames=own.frames if own else version.frames,
        success_rate=(own and own.success_rate) or 0.0,
        wall_seconds=0.0,
        at=_written(layout.manifest),
    )


def _expert_numbers(layout: GraphPaths) -> dict[str, int]:
    """The expert number of every skill that was ever trained, by the slug in a folder's name."""
    folders = (layout.failed_runs, layout.training_runs, layout.skills)
    names = (path.name for folder in folders if folder.is_dir() for path in folder.iterdir())
    return {match[2]: int(match[1]) for name in names if (match := _NUMBERED.fullmatch(name))}


def _written(path: Path) -> datetime:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC)


# scheduler_state.json


def state_fault(layout: GraphPaths) -> str:
    """What is wrong with scheduler_state.json; "" if it is whole and agrees with the manifest.

    Raises:
      FileRefusedError: the manifest is damaged.
      FormatVersionError: another version of flowrl wrote the state.
    """
    manifest = ExpertStore(layout).manifest()
    try:
        state = StateFile(layout.scheduler_state).load()
    except FormatVersionError:
        raise
    except FileRefusedError as error:
        return str(error)
    if state is None:
        return "the scheduler's state is lost" if manifest.experts else ""
    return "; ".join(_disagreements(state, manifest))


def recover_state(layout: GraphPaths) -> str:
    """Make scheduler_state.json anew from the manifest and the run folders if anything is wrong.

    A completed skill whose expert no longer counts waits again, with the same expert number. What
    had failed or was held is tried again. The old file goes to quarantine.

    Returns:
      A sentence about the new state; "" if nothing was wrong.

    Raises:
      FileRefusedError: the manifest, a skill's file or config.json is damaged.
      FormatVersionError: another version of flowrl wrote the state.
    """
    fault = state_fault(layout)
    if not fault:
        return ""
    skills = known_skills(layout, _recorded_graph(layout), SchedulerState())
    added, now = [SkillsAdded(skills)], datetime.now(UTC)
    state, _ = step(SchedulerState(), added, now, ScheduleConfig(), launching=False)
    number = max([state.next_expert - 1, *_expert_numbers(layout).values()]) + 1
    set_aside(layout, layout.scheduler_state, fault, copy=True)
    StateFile(layout.scheduler_state).save(replace(state, next_expert=number))
    kinds = [item.status.kind for item in skills]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    return f"{layout.scheduler_state} is made anew ({counts}); an old one is in {layout.quarantine}"


def _disagreements(state: SchedulerState, manifest: Manifest) -> Iterator[str]:
    numbers = {version.skill: index for index, version in manifest.experts.items()}
    for entry in state.entries.values():
        if entry.expert is None:
            continue
        owner = manifest.experts.get(entry.expert)
        number = numbers.get(entry.skill)
        if owner is not None and owner.skill != entry.skill:
            yield f"expert {entry.expert} is {owner.skill}; the state says {entry.skill}"
        elif number is not None and number != entry.expert:
            yield f"{entry.skill} is expert {number}; the state says {entry.expert}"
        elif isinstance(done := entry.trained or entry.status, Completed):
            if owner is None:
                yield f"{entry.skill} is completed, but no expert of it is in the manifest"
            elif _is_of_another_run(owner, done, manifest, training=entry.trained is not None):
                yield f"{entry.skill} has another expert than that of run {done.run_id}"


def _is_of_another_run(
    owner: ExpertVersion, done: Completed, manifest: Manifest, *, training: bool
) -> bool:
    """Whether the expert that counts neither came of the run `done` nor replaced its expert.

    A dependant's copy of an earlier version, merged later, replaces it; so does the skill's next
    run, which the state knows once it is no longer `training`.
    """
    if owner.own_run is None:
        return False
    if done.run_id not in manifest.merged:
        return True
    place = {run_id: place for place, run_id in enumerate(manifest.merged)}
    after = place[done.run_id]
    if place.get(owner.own_run.run_id, -1) > after:
        return not training
    return place.get(owner.lineage[-1].run_id, -1) < after


def _recorded_graph(layout: GraphPaths) -> SkillGraph:
    """The skills that this graph trains, from the recorded configuration and skill_files/."""
    try:
        config = recorded_config(layout)
    except (FileRefusedError, ConfigError) as error:
        raise FileRefusedError(
            f"{error}. Run flowrl fsck {layout.root} --repair, which goes on with graph.json; "
            f"without that, move {layout.scheduler_state} away and start the scheduler with the "
            "flags it began with, which makes all of them anew"
        ) from error
    game = config.ppo.env_name
    skills = SkillSources(layout).over(load_library(game, config.graph.skills_dir))
    return SkillGraph(skills.values(), capacity=find_game(game).capacity)


def recorded_config(layout: GraphPaths) -> BottomUpConfig:
    """The flags with which the newest run was made; before the first, what graph.json says.

    Raises:
      FileRefusedError: config.json is damaged, or it and graph.json are missing.
      ConfigError: a value cannot be used, or names an unknown environment.
    """
    if layout.graph_json.exists() and not layout.config_json.exists():
        data = asdict(read_graph_record(layout))
    else:
        data = records.read_document(layout.config_json)
    try:
        config = configs.from_json(BottomUpConfig, data)
        find_game(config.ppo.env_name)
    except ConfigError as error:
        raise ConfigError(f"{layout.config_json} cannot be used: {error}") from error
    return config


# The manifest


def restore_manifest(layout: GraphPaths) -> str:
    """Replace a damaged manifest by the newest generation of its history.

    A generation is written to the history before it counts, so the newest one is either what the
    manifest said or a merge that was about to count. If it cannot be read, an older one is taken
    only if no version on disk was made by a later merge.

    Returns:
      What was done; "" if the manifest is whole.

    Raises:
      FileRefusedError: no generation can be read, or a merge would be lost; says which.
      FormatVersionError: another version of flowrl wrote the manifest.
    """
    store = ExpertStore(layout)
    try:
        store.manifest()
    except FormatVersionError:
        raise
    except FileRefusedError as error:
        problem = str(error)
    else:
        return ""
    readable = [known for _, known in manifests.read_history(layout) if known is not None]
    if not readable:
        raise FileRefusedError(
            f"{layout.manifest} is damaged, and no generation in {layout.history} can be read; "
            f"restore {layout.checkpoints} from a backup"
        )
    found = readable[-1]
    made = ((manifests.generation_of(name), path) for (_, name), path in store.versions())
    if later := [str(path) for generation, path in made if generation > found.generation]:
        path = manifests.history_file(layout, found.generation)
        raise FileRefusedError(
            f"{layout.manifest} is damaged, and so is the newest of its history. Generation "
            f"{found.generation} can be read, but these later versions would be lost: "
            f"{', '.join(later)}. Restore {layout.checkpoints} from a backup, or lose them: "
            f"cp {path} {layout.manifest}"
        )
    with store.locked():
        set_aside(layout, layout.manifest, problem, copy=True)
        manifests.swap(layout, found)
    return f"the manifest is generation {found.generation} of its history again"
