"""Find what is wrong in a graph's folder, and rebuild the scheduler's state from the rest of it.

The manifest names every merged expert and the run folders name every live run. A scheduler whose
state is missing adopts both: merged experts as completed skills, live runs as launched ones. A
skill keeps the expert number that its folders name, so that no number is given twice. The functions
that write require the caller to hold the graph's folder.

`flowrl fsck` and `fsck --repair` go through one list of checks. Damaged files go to `quarantine/`;
only what every start of a scheduler deletes is deleted. Every fix may be repeated. A file that
another version of flowrl wrote is reported and left as it is.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal

from flowrl import config as configs
from flowrl import notices, storage
from flowrl.config import BottomUpConfig, ScheduleConfig
from flowrl.errors import (
    ConfigError,
    FileRefusedError,
    FlowrlError,
    FormatVersionError,
    without_remedy,
)
from flowrl.experts import manifest as manifests
from flowrl.experts.manifest import Manifest
from flowrl.experts.repair import (
    NOTICE,
    damage,
    drop,
    fall_back,
    restore_manifest,
    set_aside,
    spares,
)
from flowrl.experts.store import ExpertStore, refuse_misplaced
from flowrl.games.base import find_game
from flowrl.parallel.events import SkillsAdded
from flowrl.parallel.health import daemon_of
from flowrl.parallel.skill_sources import (
    GraphRecord,
    SkillSources,
    open_graph,
    read_graph_record,
    read_skill_file,
    record_graph,
    record_of_runs,
)
from flowrl.parallel.state import SchedulerState, StateFile
from flowrl.parallel.status import FRESH, Completed, Entry, Running, Status
from flowrl.parallel.training_processor import completion
from flowrl.parallel.training_setup import fail_run, live_runs, pinned_versions, readable_runs
from flowrl.parallel.transitions import step
from flowrl.paths import GraphPaths, RunPaths, slug
from flowrl.runs import ExpertVersion, TrainingRun, check_module, read_result, read_run
from flowrl.skills.graph import SkillGraph
from flowrl.storage import records

logger = logging.getLogger(__name__)
_THAT_VERSION = "use the version of flowrl that wrote it"
_NUMBERED = re.compile(r"(?:skill_)?(0|[1-9][0-9]*)_([A-Za-z0-9_]+)(?:\.attempt[0-9.]+)?")


def known_skills(
    graph_paths: GraphPaths, graph: SkillGraph, state: SchedulerState
) -> tuple[Entry, ...]:
    """The skills that the folder knows and `state` does not: merged, in training, or tried once.

    FileRefusedError: the manifest is damaged or lacks an expert, or a record is of another version.
    """
    skills: dict[str, Entry] = {}

    def add(
        skill: str, expert: int | None = None, status: Status = FRESH, *, anew: bool = False
    ) -> None:
        needs = graph.needs(skill) if skill in graph.skills else ()
        before = skills[skill].status if skill in skills else None
        trained = before if isinstance(before, Completed) else None  # a live run trains it on
        facts = {"needs": needs, "expert": expert, "status": status, "trained": trained}
        skills[skill] = Entry(skill=skill, anew=anew and trained is not None, **facts)

    manifest = ExpertStore(graph_paths).manifest()
    _refuse_lost_experts(graph_paths, state, manifest)
    for index, version in manifest.experts.items():
        add(version.skill, index, _completed(graph_paths, version, manifest))
    for run, status in _live(graph_paths, manifest):
        add(run.skill, run.expert, status, anew=run.anew)
    past = {} if state.entries else _expert_numbers(graph_paths)
    for skill in [name for name in graph.skills if name not in skills]:
        number = past.get(slug(skill))
        if number is not None and number not in {item.expert for item in skills.values()}:
            add(skill, number)
    needed = [need for skill in skills if skill in graph.skills for need in graph.all_needs(skill)]
    for need in dict.fromkeys(needed):  # even without any trace on disk
        if need not in skills:
            add(need)
    return tuple(skills[name] for name in skills if name not in state.entries)


def add_known(graph_paths: GraphPaths, graph: SkillGraph) -> None:
    """Add the skills of `known_skills` to scheduler_state.json, while no scheduler runs."""
    file = StateFile(graph_paths.scheduler_state)
    state = file.load() or SchedulerState()
    added, now = [SkillsAdded(known_skills(graph_paths, graph, state))], datetime.now(UTC)
    file.save(step(state, added, now, ScheduleConfig(), launching=False)[0])


def _refuse_lost_experts(
    graph_paths: GraphPaths, state: SchedulerState, manifest: Manifest
) -> None:
    """Refuse what a rollback or a repair leaves that is killed before it writes the state."""
    for entry in state.entries.values():
        if entry.expert not in manifest.experts and isinstance(entry.status, Completed):
            raise FileRefusedError(
                f"no expert of {entry.skill} counts any more; run {graph_paths.command('recover')}"
            )


def _live(graph_paths: GraphPaths, manifest: Manifest) -> Iterator[tuple[TrainingRun, Running]]:
    """The runs that are not merged yet; whether they have ended is found when they are adopted."""
    for run_paths, run in readable_runs(graph_paths):
        if run.run_id not in manifest.merged:
            since = _written(run_paths.run_json)
            facts = {"run_id": run.run_id, "attempt": run.attempt, "since": since}
            yield run, Running(handle=None, **facts)


def _completed(graph_paths: GraphPaths, version: ExpertVersion, manifest: Manifest) -> Completed:
    """From the archived record, or the run folder if a merge was killed before archiving."""
    archive, own = graph_paths.archive(version.index, version.skill), version.own_run
    for run_paths in (archive, graph_paths.run(version.index, version.skill)):
        if not os.path.lexists(run_paths.run_json):
            continue
        try:
            run, result = read_run(run_paths), read_result(run_paths)
            facts = completion(run, result)
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
                at=_written(run_paths.run_json),
                **facts,
            )
    logger.warning("%s has no record of %s: its time counts as 0", archive.folder, version.version)
    return Completed(
        run_id=own.run_id if own else version.version,
        attempt=1,
        frames=own.frames if own else version.frames,
        success_rate=(own and own.success_rate) or 0.0,
        wall_seconds=0.0,
        at=_written(graph_paths.manifest),
    )


def _expert_numbers(graph_paths: GraphPaths) -> dict[str, int]:
    """The expert number of every skill that was ever trained, by the slug in a folder's name."""
    folders = (graph_paths.failed_runs, graph_paths.training_runs, graph_paths.skills)
    names = (path.name for folder in folders if folder.is_dir() for path in folder.iterdir())
    return {match[2]: int(match[1]) for name in names if (match := _NUMBERED.fullmatch(name))}


def _written(path: Path) -> datetime:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC)


# scheduler_state.json


def state_fault(graph_paths: GraphPaths) -> str:
    """Return the fault of scheduler_state.json; "" if it is whole and agrees with the manifest.

    FileRefusedError: the manifest is damaged, or another version of flowrl wrote the state.
    """
    manifest = ExpertStore(graph_paths).manifest()
    try:
        state = StateFile(graph_paths.scheduler_state).load()
    except FormatVersionError:
        raise
    except FileRefusedError as error:
        return without_remedy(error)
    if state is None:
        return "the scheduler's state is lost" if manifest.experts else ""
    return "; ".join(_disagreements(state, manifest))


def recover_state(graph_paths: GraphPaths) -> str:
    """Make scheduler_state.json anew from the manifest and the run folders if anything is wrong.

    A completed skill whose expert no longer counts waits again, with the same expert number. What
    had failed or was held is tried again. The old file goes to quarantine. Returns a sentence about
    the new state; "" if nothing was wrong.

    FileRefusedError: the manifest, a skill's file or config.json is damaged, or of another version.
    """
    if not (fault := state_fault(graph_paths)):
        return ""
    skills = found_skills(graph_paths)
    added, now = [SkillsAdded(skills)], datetime.now(UTC)
    state, _ = step(SchedulerState(), added, now, ScheduleConfig(), launching=False)
    number = max([state.next_expert - 1, *_expert_numbers(graph_paths).values()]) + 1
    kept = set_aside(graph_paths, graph_paths.scheduler_state, fault, copy=True)
    StateFile(graph_paths.scheduler_state).save(replace(state, next_expert=number))
    kinds = Counter(item.status.kind for item in skills)
    counts = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
    said = f"{graph_paths.scheduler_state} is made anew ({counts or 'no skill is left'})"
    return f"{said}; an old one is in {graph_paths.quarantine}" if kept.exists() else said


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
        elif fault := _fault_of(entry, owner, manifest):
            yield f"{entry.skill} {fault}"


def _fault_of(entry: Entry, owner: ExpertVersion | None, manifest: Manifest) -> str:
    """Return what is wrong with a skill's status beside its expert in the manifest."""
    done = entry.trained or entry.status
    if not isinstance(done, Completed):
        waits = owner is not None and done.run_id not in manifest.merged
        return f"has merged expert {entry.expert}, but is {done.kind}" if waits else ""
    if owner is None:
        return "is completed, but no expert of it is in the manifest"
    if _is_of_another_run(owner, done, manifest, training=entry.trained is not None):
        return f"has another expert than that of run {done.run_id}"
    return ""


def _is_of_another_run(
    owner: ExpertVersion, done: Completed, manifest: Manifest, *, training: bool
) -> bool:
    """Return whether the expert that counts neither came of the run `done` nor replaced its expert.

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


def found_skills(graph_paths: GraphPaths) -> tuple[Entry, ...]:
    """Return the skills of a state that is made anew; raises as `recover_state`, changes nothing.

    The skills that the graph trains are those of config.json and skill_files/.
    """
    try:
        config = recorded_config(graph_paths)
    except (FileRefusedError, ConfigError) as error:
        raise FileRefusedError(
            f"{without_remedy(error)}; run {graph_paths.command('fsck', '--repair')}, which goes "
            f"on with graph.json, or move {graph_paths.scheduler_state} away and start the "
            "scheduler with the flags it began with, which makes all of them anew"
        ) from error
    graph = open_graph(config, SkillSources(graph_paths))
    return known_skills(graph_paths, graph, SchedulerState())


def recorded_config(graph_paths: GraphPaths) -> BottomUpConfig:
    """The flags with which the newest run was made; before the first, what graph.json says.

    FileRefusedError: neither can be read. ConfigError: a value, or the environment, is unknown.
    """
    only_graph = graph_paths.graph_json.exists() and not graph_paths.config_json.exists()
    record = asdict(read_graph_record(graph_paths)) if only_graph else None
    data = record or records.read_document(graph_paths.config_json)
    try:
        config = configs.from_json(BottomUpConfig, data)
        find_game(config.ppo.env_name)
    except ConfigError as error:
        raise ConfigError(f"{graph_paths.config_json} cannot be used: {error}") from error
    return config


# fsck: a check yields a finding for every fault, with the fix that `repair` calls


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault; if it has no remedy, `flowrl fsck --repair` is one. A *warning* can wait."""

    severity: Literal["error", "warning"]
    thing: str
    place: Path
    remedy: str = ""
    fix: Callable[[], str] | None = None  # returns a sentence about what it did, "" for nothing


def inspect(graph_paths: GraphPaths) -> tuple[Finding, ...]:
    """Find what is wrong with a graph's folder; changes nothing.

    A damaged manifest is reported alone, because the other checks need it. While a scheduler is at
    work, the state, which it may be about to change, is not checked. FileRefusedError means that a
    link or a file is in the place of a folder.
    """
    refuse_misplaced(graph_paths)
    try:
        ExpertStore(graph_paths).manifest()
    except FileRefusedError as error:
        what, _, remedy = str(error).partition("; ")
        return (Finding("error", what, graph_paths.manifest, remedy),)
    left_out = [_check_state] if daemon_of(graph_paths.daemon_lock) else []
    checks = (check for check in _CHECKS if check not in left_out)
    findings = [finding for check in checks for finding in check(graph_paths)]
    named = {finding.place for finding in findings}
    return (*findings, *(one for one in _check_links(graph_paths) if one.place not in named))


def repair(graph_paths: GraphPaths) -> Iterator[str]:
    """Repair what can be in a held folder; yield what was done or could not be, "" for nothing."""
    try:
        yield restore_manifest(graph_paths)
    except FileRefusedError as error:
        yield f"not repaired: {error}"
        return  # every other repair needs the manifest
    for check in _CHECKS:
        for finding in check(graph_paths):
            try:
                yield finding.fix() if finding.fix else ""
            except FlowrlError as error:
                yield f"not repaired: {error}"
    ExpertStore(graph_paths).recover(pinned_versions(graph_paths))
    for key in notices.read(graph_paths):
        if key.startswith(NOTICE):
            notices.withdraw(graph_paths, key)


def _check_records(graph_paths: GraphPaths) -> Iterator[Finding]:
    """The records of live runs, kept skills, the graph and its configuration."""
    for run_paths in live_runs(graph_paths):
        skill = run_paths.folder.name.split("_", 2)[2]  # a slug is the slug of itself
        fix = partial(_fail_run, graph_paths, run_paths.expert, skill)
        yield from _unreadable(graph_paths, run_paths.run_json, partial(read_run, run_paths), fix)
    for path in sorted(graph_paths.skill_files.glob("*.json")):
        yield from _unreadable(graph_paths, path, partial(read_skill_file, path))
    graph, config = graph_paths.graph_json, graph_paths.config_json
    if os.path.lexists(graph):
        yield from _unreadable(graph_paths, graph, partial(records.read, graph, GraphRecord))
    if not os.path.lexists(graph) and (record := record_of_runs(graph_paths)):
        fix = partial(_record_graph, graph_paths, record)
        yield Finding("warning", f"{graph} is missing", graph, fix=fix)
    if os.path.lexists(config):  # the next run that is made writes it again
        read = partial(recorded_config, graph_paths)
        yield from _unreadable(graph_paths, config, read, severity="warning")


def _record_graph(graph_paths: GraphPaths, record: GraphRecord) -> str:
    record_graph(graph_paths, record)
    return f"{graph_paths.graph_json} is made anew of the runs' records"


def _fail_run(graph_paths: GraphPaths, expert: int, skill: str) -> str:
    return f"set aside: {fail_run(graph_paths, expert, skill)}"


def _check_experts(graph_paths: GraphPaths) -> Iterator[Finding]:
    store = ExpertStore(graph_paths)
    for version in store.manifest().experts.values():
        if why := damage(store, version):
            fix = partial(_fall_back_or_drop, store, version, why)
            place, again = store.path_of(version), graph_paths.command("fsck", "--repair")
            back = "" if place.is_dir() else f"put it back, or stop the scheduler and run {again}"
            yield Finding("error", why, place, back, fix)
    for version in spares(store):
        place = store.path_of(version)
        if place.is_dir() and (why := damage(store, version)):
            fix = partial(_set_aside, graph_paths, place, why)
            yield Finding("warning", f"{why} (nothing uses it now)", place, fix=fix)


def _fall_back_or_drop(store: ExpertStore, broken: ExpertVersion, why: str) -> str:
    name = f"expert {broken.index} ({broken.skill})"
    fallback = fall_back(store, broken, why)
    if fallback is None:
        drop(store, broken, why)
        return f"{name} has no whole version: its skill will be trained again"
    return f"{name} is {fallback.version} again, of {fallback.frames:,} frames"


def _check_history(graph_paths: GraphPaths) -> Iterator[Finding]:
    for generation in manifests.generations(graph_paths):
        path = manifests.history_file(graph_paths, generation)
        yield from _unreadable(graph_paths, path, partial(manifests.read_file, path))
    present = ExpertStore(graph_paths).manifest()
    path = manifests.history_file(graph_paths, present.generation)
    if present.experts and not os.path.lexists(path):
        lost = f"{path} is missing: flowrl rollback could not come back to what counts now"
        yield Finding("warning", lost, path, fix=partial(_keep, graph_paths, present))


def _keep(graph_paths: GraphPaths, manifest: Manifest) -> str:
    manifests.write_history(graph_paths, manifest)
    return f"{manifests.history_file(graph_paths, manifest.generation)} is made anew"


def _check_archives(graph_paths: GraphPaths) -> Iterator[Finding]:
    """The records of merged skills, but for those that the next start archives."""
    live = {run_paths.expert for run_paths in live_runs(graph_paths)}
    for index, version in ExpertStore(graph_paths).manifest().experts.items():
        run_paths = graph_paths.archive(index, version.skill)
        for path, read in _readers(run_paths) if index not in live else ():
            if os.path.lexists(path):
                yield from _unreadable(graph_paths, path, read)


def _readers(run_paths: RunPaths) -> Iterator[tuple[Path, Callable[[], object]]]:
    yield run_paths.run_json, partial(read_run, run_paths)
    yield run_paths.result_json, partial(read_result, run_paths)
    with suppress(FileRefusedError):  # the module cannot be checked without the record
        yield run_paths.module, partial(check_module, run_paths, read_run(run_paths))


def _check_links(graph_paths: GraphPaths) -> Iterator[Finding]:
    """The dangling links in the graph's own folders; those below, other programs may have made."""
    depths = ("*", "*/*", "*/*/*")
    for path in sorted(path for depth in depths for path in graph_paths.root.glob(depth)):
        if path.is_symlink() and not path.exists():
            remedy = "remove it, or put back what it led to"
            yield Finding("warning", f"{path} is a link that leads nowhere", path, remedy)


def _check_state(graph_paths: GraphPaths) -> Iterator[Finding]:
    place, remedy = graph_paths.scheduler_state, graph_paths.command("recover")
    try:
        if thing := state_fault(graph_paths):
            yield Finding("error", thing, place, remedy, partial(recover_state, graph_paths))
    except FormatVersionError as error:
        yield Finding("error", without_remedy(error), place, _THAT_VERSION)


# In the order of repair: the state is made anew from all others.
_CHECKS: tuple[Callable[[GraphPaths], Iterator[Finding]], ...] = (
    _check_records,
    _check_experts,
    _check_history,
    _check_archives,
    _check_state,
)


def _unreadable(
    graph_paths: GraphPaths,
    path: Path,
    read: Callable[[], object],
    fix: Callable[[], str] | None = None,
    *,
    severity: Literal["error", "warning"] = "error",
) -> Iterator[Finding]:
    """A finding if a file cannot be used; unless there is another `fix`, it is set aside."""
    try:
        read()
    except FormatVersionError as error:
        yield Finding(severity, without_remedy(error), path, _THAT_VERSION)
    except (FileRefusedError, ConfigError) as error:
        if isinstance(error.__cause__, PermissionError):  # nothing says that it is damaged
            yield Finding(severity, without_remedy(error), path, storage.RIGHTS)
            return
        fix = fix or partial(_set_aside, graph_paths, path, str(error))
        yield Finding(severity, without_remedy(error), path, fix=fix)


def _set_aside(graph_paths: GraphPaths, path: Path, why: str) -> str:
    return f"set aside: {path} is {set_aside(graph_paths, path, why)} now"
