"""`flowrl improve`: other texts of a trained skill compete with the present one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowrl.arguments import Count, Frames, SkillArgument
from flowrl.config import BottomUpConfig
from flowrl.console import print_report
from flowrl.errors import ConfigError, GraphError, SkillError
from flowrl.launchers.sandbox import confinement
from flowrl.llm.asking import AskingCommand, graph_destination
from flowrl.parallel.events import REFUSED, Verb, why_not
from flowrl.parallel.recovery import recorded_config
from flowrl.parallel.requests import send_request
from flowrl.parallel.skill_sources import (
    SkillSources,
    keep_other_text,
    open_graph,
    skill_configs,
    trained_skills,
)
from flowrl.paths import GraphPaths, existing_graph
from flowrl.reports.status import find_row, last_command, read_rows
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import Skill, load_skill, skill_files
from flowrl.skills.validation.cache import ApprovalStore
from flowrl.skills.validation.dry_run import SkillCode, approvals_of
from flowrl.storage import locks
from flowrl.tuning.contest import Contest, ContestOutcome, Standing

_PRESENT = "present text"
_MAY_DIFFER = ("description", "requirements", "reward", "training", "like", "provided_by")


@dataclass(frozen=True, kw_only=True)
class ImproveCommand(AskingCommand):
    """Let other texts of a skill compete with its present one.

    They may differ in reward, requirements and settings. All are trained side by side with the same
    frames and play in the same worlds; the best replaces the present text if it is surely better.
    Texts are those of --proposals, and with --model or --llm_replay rewards of a model.

    Examples:
      flowrl improve exp/demo "Collect Iron" --proposals my_proposals
      flowrl improve exp/demo "Collect Iron" --base_url http://localhost:8000/v1 --model qwen3
    """

    skill: SkillArgument
    """The skill's name, or its expert number."""
    proposals: Path | None = None
    """Folder of skill files, each another text of the skill."""
    candidate_timesteps: Frames = 1_000_000
    """Environment steps with which each text is trained at most."""
    max_concurrent: Count = 2
    """Most runs side by side."""

    def __call__(self) -> int:
        """Compare the texts; returns 0 if another one is taken, 1 if none, 85 if it is to go on."""
        graph_paths = existing_graph(self.graph_path)
        row = find_row(read_rows(graph_paths), self.skill, graph_paths.root)
        if refusal := why_not(Verb.RETRAIN, row.status):
            raise GraphError(f"improve {row.skill}: {REFUSED}{refusal}")
        config = recorded_config(graph_paths)
        admission = _Admission(graph_paths, config, row.skill)
        graphs, refused = admission.admitted(self._texts(admission.present))
        if not graphs:
            return self._report(row.skill, None, refused, "no proposal is admitted")
        contest = Contest(
            graph_paths=graph_paths,
            config=config,
            skill=row.skill,
            graphs={_PRESENT: admission.graph, **graphs},
            frames=self.candidate_timesteps,
            most=self.max_concurrent,
        )
        outcome = contest.run()
        present = outcome.of(_PRESENT)
        if present.trial is None:
            said = f"nothing is changed, because the present text failed: {present.why}"
            return self._report(row.skill, outcome, refused, said)
        better = [each for each in outcome.standings if each.interval[0] > present.rate]
        best = (better or outcome.standings)[0]
        if not better:
            return self._report(row.skill, outcome, refused, _why_kept(best, present))
        other = graphs[best.label].skills[row.skill]
        keep_other_text(graph_paths, config, other, outcome.lines)
        send_request(graph_paths, Verb.RETRAIN, row.skill)
        begins = f"it is trained anew by {last_command(graph_paths)}"
        said = f"{best.label} replaces the present text; {begins}"
        return self._report(row.skill, outcome, refused, said, chosen=best.label)

    def _texts(self, present: Skill) -> dict[str, Path]:
        """Return the files of the proposals by their names in the table."""
        files = skill_files([self.proposals]) if self.proposals else []
        texts = {file.name: file for file in files}
        if not (self.base_url or self.model or self.llm_replay):
            if not self.proposals:
                raise ConfigError("name texts by --proposals FOLDER, or a model by --base_url")
            return texts
        place = graph_destination(self.graph_path)
        self.check_model()
        with locks.held(place.paths.transcripts / "write.lock", timeout_seconds=0):
            asked = self._rewards_for(place, present)
        return texts | {f"{file.parent.name}/{file.name}": file for file in asked}

    def _report(
        self,
        skill: str,
        outcome: ContestOutcome | None,
        refused: Mapping[str, str],
        said: str,
        *,
        chosen: str | None = None,
    ) -> int:
        """Print the table, the best first; returns the exit code."""
        standings = outcome.standings if outcome else ()
        facts = {
            "skill": skill,
            "chosen": chosen,
            "reason": said,
            "candidates": [each.facts for each in standings],
            "refused": dict(refused),
        }
        lines = [f"{skill}: {said}", *(outcome.lines if outcome else ())]
        lines += [f"  {name} is refused: {why}" for name, why in refused.items()]
        print_report(facts, lines, as_json=self.json)
        return 0 if chosen else 1


class _Admission:
    """The checks that another text of a skill must pass; nothing but approvals is written."""

    def __init__(self, graph_paths: GraphPaths, config: BottomUpConfig, skill: str) -> None:
        self._graph_paths, self._config = graph_paths, config
        self.graph = open_graph(config, SkillSources(graph_paths))
        self.present = self.graph.skills[skill]
        self._trained = trained_skills(graph_paths)

    def admitted(self, files: Mapping[str, Path]) -> tuple[dict[str, SkillGraph], dict[str, str]]:
        """Return the graph with each text that is admitted, and why the others are refused."""
        graphs: dict[str, SkillGraph] = {}
        refused: dict[str, str] = {}
        for name, file in files.items():
            try:
                graphs[name] = self._with(load_skill(file, env_name=self._config.ppo.env_name))
            except (SkillError, GraphError, ConfigError) as error:
                refused[name] = str(error)
        texts = [graph.skills[self.present.name] for graph in graphs.values()]
        codes = [SkillCode.of(text, self._config.ppo.env_name) for text in texts]
        store = ApprovalStore(self._graph_paths.approvals)
        confine = confinement(self._config.launch.sandbox).in_folder
        for name, outcome in zip(
            [*graphs], approvals_of(codes, store, confine=confine), strict=True
        ):
            if isinstance(outcome, str):
                refused[name] = outcome
                del graphs[name]
            else:
                store.keep(outcome)
        return graphs, refused

    def _with(self, text: Skill) -> SkillGraph:
        """Return the graph with another text; an error says why it is not comparable."""
        present = self.present
        fixed: dict[str, Any] = {key: getattr(present, key) for key in _MAY_DIFFER}
        for key in ("name", "gain", "consumption", "is_done"):
            if getattr(text, key) != getattr(present, key):
                what = f"its {key} differs from that of {present.name!r}"
                raise SkillError(f"{what}, which the contract fixes; leave {key} as it is")
        if replace(text, **fixed) != present:
            may = ", ".join(_MAY_DIFFER)
            raise SkillError(f"it changes the contract; change only {may}")
        if text == present:
            raise SkillError("it is the present text; leave it out")
        graph = self.graph.replacing(text, trained=self._trained)
        skill_configs(self._config, graph.skills)
        if missing := [n for n in graph.all_needs(text.name) if n not in self._trained]:
            raise GraphError(f"it needs {missing[0]!r}, which has no expert; train that first")
        return graph


def _why_kept(best: Standing, present: Standing) -> str:
    if best.label == _PRESENT:
        return "nothing is changed, because no proposal is better than the present text"
    low, rate = best.interval[0], present.rate
    bound = f"its lower bound is {low:.1%}, the present text's estimate {rate:.1%}"
    return f"nothing is changed, because {best.label} is not surely better: {bound}"
