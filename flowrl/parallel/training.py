"""Train a graph of skills, side by side or one after another.

`Flow` chooses the next skill. `SkillScheduler` waits until the skills that it needs are completed.
`TrainingBackend` makes its run folder, the launcher starts its trainer in a session, and when the
run has ended the backend merges its experts into the global checkpoint. `Feeder` then asks the
flow for the skills that this has made possible.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flowrl import notices
from flowrl.config import BottomUpConfig, GraphConfig, LaunchConfig, ScheduleConfig
from flowrl.errors import ConfigError, FileRefusedError, GraphError, SkillError
from flowrl.experts.repair import refuse_lost
from flowrl.experts.store import ExpertStore
from flowrl.launchers import sandbox
from flowrl.llm.flow import Flow, skills_towards
from flowrl.parallel.analysing import ANALYSING, Analyser
from flowrl.parallel.feeder import Feeder
from flowrl.parallel.filming import FILMING, Filmer
from flowrl.parallel.notifying import FAILURE, Notifier
from flowrl.parallel.recovery import known_skills
from flowrl.parallel.scaling import NOTICE, Scaling
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.parallel.skill_sources import (
    SkillConfig,
    SkillSources,
    check_graph_record,
    open_graph,
    record_graph,
    skill_configs,
    trained_skills,
)
from flowrl.parallel.start import check_machine, device_slots, open_scheduler, refuse_shared_folder
from flowrl.parallel.state import StateFile
from flowrl.parallel.status import CANCELLED, Failed, percent
from flowrl.parallel.training_backend import TrainingBackend, merge_rule
from flowrl.parallel.training_processor import recover_graph
from flowrl.parallel.training_setup import expert_of
from flowrl.parallel.writing import WRITING, Writing
from flowrl.paths import GraphPaths, is_graph, refuse_other_folder
from flowrl.runs import CodeApproval
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import Skill
from flowrl.skills.validation.cache import ApprovalStore
from flowrl.skills.validation.dry_run import SkillCode, approve_skills, keep_approvals

Screen = Callable[[GraphPaths], AbstractContextManager[object]]  # what is shown meanwhile


@dataclass(frozen=True, kw_only=True)
class SequentialConfig(BottomUpConfig):
    """Train a graph of skills one after another, without tmux.

    Examples:
      flowrl sequential exp/demo --max_nodes 3
    """

    graph: GraphConfig = GraphConfig(graph_path=Path("exp/bottom_up"))
    schedule: ScheduleConfig = ScheduleConfig(max_parallel_skills=1)
    launch: LaunchConfig = LaunchConfig(launcher="local")

    def problems(self) -> Iterator[str]:
        """Check whether more than one run is wanted at a time."""
        here = "here one skill is trained after another"
        if (runs := self.schedule.max_parallel_skills) > 1:
            yield f"--max_parallel_skills {runs} is for flowrl train; {here}"
        if self.schedule.auto_scaling:
            yield f"--auto_scaling is for flowrl train; {here}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedGraph:
    """A graph that can be trained, with what its start has read and checked."""

    graph: SkillGraph
    sources: SkillSources
    skills: Mapping[str, SkillConfig]
    devices: Mapping[str, int]
    confinement: sandbox.Confinement
    approvals: Mapping[str, CodeApproval]


def train_graph(config: BottomUpConfig, *, screen: Screen) -> int:
    """Train until every skill has ended, or `flowrl stop`; returns the exit code."""
    graph_paths = GraphPaths(config.graph.graph_path)
    notifier = Notifier(config.notify, graph_paths)
    filmer = Filmer(config.video_after, graph_paths)
    analyser = Analyser(graph_paths, asked_for=config.analyse_at > 0)
    writing = Writing(config.write_skills, config.write_flags, graph_paths)
    opened = _open(graph_paths, config)
    scheduler = open_scheduler(graph_paths, config.schedule, config.launch, devices=opened.devices)
    # Nothing in the folder has changed before this line.
    with notifier, filmer, analyser, writing, scheduler, screen(graph_paths):
        scheduler.when_there_is_room(partial(_set_up, graph_paths, config, opened, scheduler))
        skills = opened.skills
        backend = TrainingBackend(
            graph_paths,
            config,
            opened.graph,
            devices=opened.devices,
            confinement=opened.confinement,
            skills=skills,
        )
        backend.merge_while(scheduler.check_lock)
        flow = _flow_of(config.graph, opened, scheduler)
        feeder = Feeder(flow, opened.sources, scheduler, skills=skills, analyser=analyser)
        end = partial(_end, scheduler, (notifier, filmer), feeder=feeder)
        scheduler.set_callbacks(
            backend=backend,
            on_skill_complete=partial(end, feeder.on_skill_complete),
            on_skill_failed=partial(end, feeder.on_skill_failed),
            on_add=partial(_add_kept, config, backend, feeder),
            on_retrain=partial(_take_changed, config, backend, feeder),
            more=partial(_more_may_come, scheduler, flow, feeder, writing),
        )
        if config.schedule.auto_scaling:
            scheduler.set_callbacks(on_tick=Scaling(scheduler, backend.share_cpus).tick)
        scheduler.when_there_is_room(partial(_publish_requested, graph_paths, flow, config))
        scheduler.when_there_is_room(feeder.begin)
        scheduler.run()
        scheduler.when_there_is_room(feeder.add_blocked_skills)
        code, stopped = feeder.exit_code(strict=config.graph.strict), scheduler.stopped_on_request
        notifier.tell("stopped" if stopped else "ended", exit_code=code)
        if not stopped:
            filmer.finish()
        scheduler.close()  # so that the last screen says how to go on
        return code


def _end(
    scheduler: SkillScheduler,
    told: Iterable[Notifier | Filmer],
    follow: Callable[[str], object],
    skill: str,
    *,
    feeder: Feeder,
) -> None:
    """Add the skills that follow from the end of one, then tell it to all who wait for that.

    Nobody is told of one that is trained on.
    """
    follow(skill)
    entry = scheduler.state.entries[skill]
    if not feeder.goes_on(entry):
        for each in told:
            each.skill(entry)


def _more_may_come(scheduler: SkillScheduler, flow: Flow, feeder: Feeder, writing: Writing) -> bool:
    """Have a skill written if none is left to hand out; returns whether anything may come."""
    trained_on = feeder.train_on()
    none_left = flow.next_skill() is None and not scheduler.state.stop_mode and scheduler.disk.ok
    return writing.may_come(begin=none_left) or trained_on


def _open(graph_paths: GraphPaths, config: BottomUpConfig) -> OpenedGraph:
    """Read and check all that a start needs; nothing in the folder changes."""
    _refuse_folder(graph_paths)
    check_graph_record(graph_paths, config.ppo)
    early, goal = config.analyse_at, config.ppo.success_state_rate
    if 0 < early >= goal:
        what = f"--analyse_at {early:g} is not below --success_state_rate {goal:g}"
        raise ConfigError(f"{what}; lower it")
    if 0 < early < (least := config.schedule.min_success_rate):
        raise ConfigError(f"--analyse_at {early:g} is below --min_success_rate {least:g}; raise it")
    StateFile(graph_paths.scheduler_state).load()  # refused now, or never
    merge_rule(config.graph)  # refused now, or never
    refuse_lost(ExpertStore(graph_paths))  # else completed skills would count without an expert
    sandbox.child_env(("0",), passed=config.launch.pass_env)
    each = config.schedule.devices_per_run
    devices = device_slots(config.launch, config.ppo, each=each)
    sources = SkillSources(graph_paths)
    graph = open_graph(config, sources)
    if (given := str(graph_paths.root)) in graph.skills and not graph_paths.root.exists():
        said = f"--target_skill {given!r}"
        raise ConfigError(f"GRAPH is {given!r}, a skill; name a folder, then say {said}")
    skills = skill_configs(config, graph.skills)
    if config.graph.init_from is not None:
        expert_of(ExpertStore(graph_paths), config.graph.init_from)  # refused now, too
    confinement = sandbox.confinement(
        config.launch.sandbox, graph_paths.root, network_wanted=config.ppo.use_wandb
    )
    target, most = config.graph.target_skill, config.graph.max_nodes
    for name in skills_towards(graph, target=target, max_nodes=most):
        graph.plan(name)  # now, not when it is its turn
    approvals = approve_skills(
        graph_paths,
        graph.skills.values(),
        config.ppo.env_name,
        trust=config.graph.trust_skills,
        confine=confinement.in_folder,
    )
    for launch in {config.launch, *(each.launch for each in skills.values())}:
        check_machine(graph_paths.root, config.ppo, launch)
    refuse_shared_folder(graph_paths.root, trust=config.graph.trust_folder)
    return OpenedGraph(
        graph=graph,
        sources=sources,
        skills=skills,
        devices=devices,
        confinement=confinement,
        approvals=approvals,
    )


def _refuse_folder(graph_paths: GraphPaths) -> None:
    """Refuse a folder that is no graph's, and one whose records cannot be written."""
    refuse_other_folder(graph_paths.root)
    if not is_graph(graph_paths.root) and any(graph_paths.root.glob("[!.]*.py")):
        what = f"{graph_paths.root} is no graph and has files *.py"
        raise FileRefusedError(f"{what}; name a new folder, and this one by --skills_dir")
    for path in (graph_paths.config_json, graph_paths.events):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise FileRefusedError(f"{path} is not a plain file; move it away")


def _set_up(
    graph_paths: GraphPaths, config: BottomUpConfig, opened: OpenedGraph, scheduler: SkillScheduler
) -> None:
    """Bring the folder and the scheduler's state up to date, and say what is started."""
    keep_approvals(graph_paths, opened.approvals)
    recover_graph(graph_paths)
    scheduler.add_skills(known_skills(graph_paths, opened.graph, scheduler.state))
    record_graph(graph_paths, config.ppo)
    for earlier in (NOTICE, FAILURE, FILMING, ANALYSING, WRITING):
        notices.withdraw(graph_paths, earlier)
    if config.command:
        notices.publish(graph_paths, "command", config.command)
    notices.publish(graph_paths, sandbox.NOTICE, opened.confinement.described)


def _cancelled_skills(scheduler: SkillScheduler) -> set[str]:
    """The skills that a user has given up."""
    ended = {name: entry.status for name, entry in scheduler.state.entries.items()}
    return {n for n, one in ended.items() if isinstance(one, Failed) and one.why == CANCELLED}


def _flow_of(given: GraphConfig, opened: OpenedGraph, scheduler: SkillScheduler) -> Flow:
    """The flow of what is asked for, and of what users have added and not cancelled."""
    added = opened.sources.added - _cancelled_skills(scheduler)
    known, towards = scheduler.state.entries, given.target_skill
    return Flow(opened.graph, known=known, target=towards, max_nodes=given.max_nodes, added=added)


def _publish_requested(graph_paths: GraphPaths, flow: Flow, config: BottomUpConfig) -> None:
    """Let `flowrl status` say what is trained."""
    count = len(flow.requested)
    how = ", added one by one" if count > 1 else ""
    goal = percent(config.ppo.success_state_rate)
    text = f"skills asked for: {count}{how}; goal: {goal} success in training"
    if not config.schedule.auto_scaling:  # which has a notice of its own
        text += f"; slots: {config.schedule.max_parallel_skills}"
    notices.publish(graph_paths, "requested", text)


def _add_kept(config: BottomUpConfig, backend: TrainingBackend, feeder: Feeder, name: str) -> None:
    """Add a skill that `flowrl add` has kept to a graph in training; twice is once.

    Of a known one the contract is taken that `flowrl analyse` may have corrected. GraphError: it is
    not kept, or does not fit. SkillError: its code has no approval. ConfigError: it cannot be
    trained as it says.
    """
    known = backend.graph.skills
    if name not in known:
        new = _kept_skills(config, name, without=known)
        _use(config, backend, feeder, backend.graph.plus(new))
    elif kept := SkillSources(GraphPaths(config.graph.graph_path)).recorded().get(name):
        corrected = known[name].with_contract_of(kept)
        if corrected != known[name]:
            _use(config, backend, feeder, backend.graph.replacing(corrected, trained=known))
    feeder.add(backend.graph, name)


def _take_changed(
    config: BottomUpConfig, backend: TrainingBackend, feeder: Feeder, name: str
) -> None:
    """Use the text of a skill that `flowrl retrain` has kept; raises as `_add_kept`."""
    without = backend.graph.skills.keys() - {name}
    (changed,) = (s for s in _kept_skills(config, name, without=without) if s.name == name)
    trained = trained_skills(GraphPaths(config.graph.graph_path))
    _use(config, backend, feeder, backend.graph.replacing(changed, trained=trained))


def _use(
    config: BottomUpConfig, backend: TrainingBackend, feeder: Feeder, graph: SkillGraph
) -> None:
    backend.skills = feeder.skills = skill_configs(config, graph.skills)
    backend.graph = graph


def _kept_skills(config: BottomUpConfig, name: str, *, without: Collection[str]) -> list[Skill]:
    """The approved kept skills but for some: `name` and its needs; raises as `_add_kept` does."""
    graph_paths, game = GraphPaths(config.graph.graph_path), config.ppo.env_name
    kept, store = SkillSources(graph_paths).recorded(), ApprovalStore(graph_paths.approvals)
    if name not in kept:
        raise GraphError(f"no skill {name!r} is kept with the graph; use flowrl add GRAPH FILE")
    new = [skill for skill in kept.values() if skill.name not in without]
    approved = [skill for skill in new if store.find(SkillCode.of(skill, game).digest)]
    if kept[name] not in approved:
        raise SkillError(f"the code of {name!r} has no approval; use flowrl add GRAPH FILE")
    return approved
