"""`Feeder`: adds the flow's skills to the scheduler, and reports to the flow how they ended."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from flowrl.errors import EXIT_RESUMABLE, FileRefusedError
from flowrl.llm.flow import Flow
from flowrl.measures.convergence import learning_progress
from flowrl.measures.objectives import Curve, read_curve
from flowrl.parallel.analysing import Analyser
from flowrl.parallel.events import Verb
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.parallel.skill_sources import SkillConfig, SkillSources
from flowrl.parallel.status import NOT_ASKED_FOR, Blocked, Completed, Entry, Failed, Held, Waiting
from flowrl.paths import GraphPaths, RunPaths
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import Skill

_TRIED = 100  # of a skill's priority, which one that was tried loses unless it learns


class Feeder:
    """Adds the flow's skills to the scheduler, and reports to the flow how they ended."""

    def __init__(
        self,
        flow: Flow,
        sources: SkillSources,
        scheduler: SkillScheduler,
        *,
        skills: Mapping[str, SkillConfig],
        analyser: Analyser,
    ) -> None:
        self.skills = skills
        self._analyser = analyser
        self._flow = flow
        self._sources = sources
        self._scheduler = scheduler

    def begin(self) -> None:
        """Report what ended before this start, hold what is not requested, add the first skills.

        It may be called again after a full disk. A completed skill that a request trains on or anew
        is left to that.
        """
        trains = (Verb.TRAIN_MORE, Verb.RETRAIN)
        pending = self._scheduler.inbox.pending()
        asked = {request.skill for request in pending if request.verb in trains}
        for entry in list(self._scheduler.state.entries.values()):
            requested = entry.skill in self._flow.requested
            match entry.status:
                case Completed() as done:
                    self._flow.on_skill_complete(entry.skill)
                    if requested and entry.skill not in asked:
                        self._train_more(entry, done)
                case Held(why=why) if requested and why == NOT_ASKED_FOR:
                    self._scheduler.ask(entry.skill, Verb.RETRY)
                case Waiting() | Blocked() if not requested and entry.trained is None:
                    self._scheduler.ask(entry.skill, Verb.PAUSE, why=NOT_ASKED_FOR)
                    self._flow.on_skill_failed(entry.skill)
                case Failed() | Held() | Blocked():
                    self._flow.on_skill_failed(entry.skill)
                case _:
                    pass
        self.add_next_skills()

    def add_next_skills(self) -> None:
        """Add skills until the frontier is blocked: the next one needs a skill in training."""
        while not self._flow.check_frontier_blocked() and (skill := self._flow.next_skill()):
            self._add(*skill)

    def on_skill_complete(self, skill: str) -> None:
        """Add the skills that were waiting for this one; its expert is merged."""
        self._flow.on_skill_complete(skill)
        self.add_next_skills()
        self._prefer_learners()

    def on_skill_failed(self, skill: str) -> None:
        """Add the skills that do not need this one, which is given up."""
        self._flow.on_skill_failed(skill)
        self.add_next_skills()
        self._prefer_learners()

    def add(self, graph: SkillGraph, name: str) -> None:
        """Train one more skill of a graph that has grown, and what it needs."""
        for each in self._flow.add(graph, name):
            self._add(each, graph.skills[each])
        for each in (*graph.all_needs(name), name):
            status = self._scheduler.state.entries[each].status
            if isinstance(status, Held) and status.why == NOT_ASKED_FOR:
                self._scheduler.ask(each, Verb.RETRY)

    def add_blocked_skills(self) -> None:
        """Add the skills that can no longer start, so that `flowrl status` names them."""
        if not self._scheduler.stopped_on_request:
            while skill := self._flow.next_skill():
                self._add(*skill)

    def train_on(self) -> bool:
        """Have skills analysed whose runs ended early, and then trained on.

        Returns whether the scheduler should look again soon.
        """
        waited = bool(self._analyser.under_way)
        for skill in self._analyser.take_ended():
            entry = self._scheduler.state.entries[skill]
            if self.goes_on(entry):  # else a user was faster
                self._ask_more(entry.skill)
        for entry in self._scheduler.state.entries.values():
            if self.goes_on(entry) and isinstance(entry.status, Completed):
                self._analyser.begin(entry.skill, entry.status.success_rate)
        return waited or bool(self._analyser.under_way)

    def goes_on(self, entry: Entry) -> bool:
        """Return whether a skill's last run ended early, and it is to have the frames left."""
        done = entry.status
        if not isinstance(done, Completed) or not done.early or done.why:
            return False
        requested = entry.skill in self._flow.requested
        return requested and done.frames < self._budget(entry.skill)[1]

    def exit_code(self, *, strict: bool) -> int:
        """0 if all requested skills are completed, else 1; 85 if `flowrl stop` left any to train.

        What is held or blocked is not left: the same command would not train it. If `strict`, a
        skill below its goal does not count as completed.
        """
        known = self._scheduler.state.entries
        entries = known.values()
        completed = {
            entry.skill
            for entry in entries
            if isinstance(entry.status, Completed) and not (strict and entry.status.below_goal)
        }
        left = {entry.skill for entry in entries if isinstance(entry.status, Waiting)}
        left.update(name for name in self._flow.requested if name not in known)
        left.update(self._analyser.under_way)
        if self._scheduler.stopped_on_request and left:
            return EXIT_RESUMABLE
        return 0 if completed.issuperset(self._flow.requested) else 1

    def _prefer_learners(self) -> None:
        """With `--curriculum`, order the skills that were tried by their learning progress."""
        graph_paths = self._scheduler.graph_paths
        for entry in list(self._scheduler.state.entries.values()):
            waits = isinstance(entry.status, Waiting) and entry.trained is None
            if not (self._scheduler.schedule.curriculum and waits) or entry.expert is None:
                continue
            progress = learning_progress(_newest_curve(graph_paths, entry.expert, entry.skill))
            priority = self._flow.weight(entry.skill) - _TRIED + round(_TRIED * progress)
            if entry.priority != priority:
                self._scheduler.ask(entry.skill, Verb.PRIORITY, number=priority)

    def _train_more(self, entry: Entry, done: Completed) -> None:
        """Train a skill on that is below the goal, if that or the budget is larger than ever.

        A state that was made anew does not know them (0): nothing is larger than that.
        """
        _, left = self._budget(entry.skill)
        larger = 0 < done.goal < self._goal(entry.skill) or 0 < done.budget < left
        if larger and done.success_rate < self._goal(entry.skill) and not self.goes_on(entry):
            self._ask_more(entry.skill)

    def _ask_more(self, skill: str) -> None:
        budget, _ = self._budget(skill)
        self._scheduler.ask(skill, Verb.TRAIN_MORE, goal=self._goal(skill), budget=budget)

    def _goal(self, skill: str) -> float:
        return self.skills[skill].ppo.success_state_rate

    def _budget(self, skill: str) -> tuple[int, int]:
        """The frames of a skill's next run at most, and those that its attempts leave of them."""
        frames = self.skills[skill].ppo.total_timesteps
        most = self._scheduler.schedule.skill_timesteps_budget
        budget = frames if most is None else min(frames, most)
        used = self._scheduler.state.entries[skill].frames_used
        return budget, budget if most is None else min(budget, most - used)

    def _add(self, name: str, skill: Skill) -> None:
        """Add a skill; of those that are ready, the one that most others need starts first."""
        self._sources.record(skill)
        needs, weight = self._flow.dependencies(name), self._flow.weight(name)
        self._scheduler.add_skill(name, skill, needs, priority=weight)
        self._flow.on_skill_added(name)


def _newest_curve(graph_paths: GraphPaths, expert: int, skill: str) -> Curve:
    """The curve of a skill's live run, else of its newest failed one; () if none can be read."""
    live = graph_paths.run(expert, skill).folder
    failed = graph_paths.failed_runs.glob(f"{live.name}.attempt*")
    for folder in (live, *sorted(failed, key=lambda path: path.stat().st_mtime, reverse=True)):
        with suppress(FileRefusedError):
            if curve := read_curve(RunPaths(folder, expert).metrics):
                return curve
    return ()
