"""`flowrl judge`, its flags and output: a leaf, because judges load jax or a client.

Episodes run skill code, so a process of its own plays them, confined like a trainer:
`python -m flowrl.commands.judge FLAGS`. It writes a recording; this process reads it and judges.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

import numpy as np
import tyro

from flowrl import console, storage
from flowrl.arguments import ReportCommand
from flowrl.commands.evaluate import confined_child
from flowrl.commands.repair import existing_graph
from flowrl.config import Positive, Sandbox
from flowrl.errors import ConfigError, FlowrlError
from flowrl.experts.store import ExpertStore
from flowrl.judging.calibration import Calibration, answered, measure, scaled, split
from flowrl.judging.judge import Judge, Recording, RuleJudge, Trajectory
from flowrl.paths import GraphPaths
from flowrl.runs import RunResult, read_result, read_run
from flowrl.storage import records
from flowrl.storage.records import Natural, Share

JudgeName = Literal["rule", "logistic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReport:
    """`judging/<judge>.json`: what was measured of a judge, and what it says of each skill."""

    generation: Natural
    calibrations: tuple[Calibration, ...]
    scores: Mapping[str, Share]  # the mean over the skill's episodes


@dataclass(frozen=True, kw_only=True)
class JudgeCommand(ReportCommand):
    """Score episodes and skills; say how far to trust the scores.

    Examples:
      flowrl judge exp/demo
      flowrl judge exp/demo "Collect Wood" --judge logistic --json
    """

    skills: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="SKILL")] = ()
    """Skills, by name or expert number (default: all that are merged)."""
    judge: JudgeName = "logistic"
    """The judge."""
    episodes: Positive = 512
    """Episodes of each skill to play, each in a world of its own."""
    seed: int = 2_000_003
    """Seed of the worlds, of the actions, and of the choice which episodes a judge may see."""
    sandbox: Sandbox = "auto"
    """Confine the episodes by bubblewrap, with the graph read-only; auto: if it is there."""

    def __call__(self) -> int:
        """Play, judge, measure; print and keep what was found.

        Raises:
          ExpertMissingError: no such skill is merged; says which are.
        """
        layout = existing_graph(self.graph_path.absolute())
        store = ExpertStore(layout)
        merged = store.manifest()
        named = self.skills or [version.skill for version in merged.experts.values()]
        if not named:
            raise ConfigError(f"{layout.root} has no merged skill yet; train one first")
        archives = [store.archive_of(skill) for skill in named]
        results = {read_run(place).skill: read_result(place) for place in archives}
        recordings = [self._recorded(layout, skill) for skill in results]
        judge, calibration, scores = self._judged(recordings, results)
        report = JudgeReport(
            generation=merged.generation, calibrations=(calibration,), scores=scores
        )
        storage.make_dir(layout.judging)
        records.write(layout.judging / f"{judge.name}.json", report)
        self._print(judge, report)
        return 0

    def _judged(
        self, recordings: Sequence[Recording], results: Mapping[str, RunResult]
    ) -> tuple[Judge, Calibration, dict[str, float]]:
        """The judge, what was measured of it, and its mean score of each skill's episodes."""
        found = [recording.prefixes() for recording in recordings]
        items = [item for some, _ in found for item in some]
        labels = np.concatenate([outcomes for _, outcomes in found])
        learn, tune, test = split(len(items), seed=self.seed)
        judge = _made(self.judge, [items[row] for row in learn], labels[learn], results)
        said = [judge.score(item) for item in items]
        unseen, tuned = (answered([said[r] for r in rows], labels[rows]) for rows in (test, tune))
        calibration = measure(judge, "trajectory", unseen, asked=len(test), tuned=tuned)
        scores = {}
        for skill in results:
            given = [
                one.score
                for item, one in zip(items, said, strict=True)
                if item.skill == skill and one.score is not None
            ]
            if given:
                scores[skill] = float(scaled(given, calibration.temperature).mean())
        return judge, calibration, scores

    def _recorded(self, layout: GraphPaths, skill: str) -> Recording:
        """Episodes of a skill, played by a process of their own."""
        flags = json.dumps(
            records.to_json(replace(self, graph_path=layout.root, skills=(skill,), json=False))
        )
        run = read_run(ExpertStore(layout).archive_of(skill))
        words, env = confined_child(layout, run, "flowrl.commands.judge", flags, how=self.sandbox)
        child = subprocess.run(
            words, env=env, check=False, start_new_session=True, stdout=subprocess.PIPE
        )
        if child.returncode:
            raise FlowrlError(f"the episodes of {skill} could not be played; see above")
        return Recording.from_bytes(skill, child.stdout)

    def record(self) -> int:
        """Play in this process and write the recording to the standard output."""
        from flowrl.evaluate import record

        (skill,) = self.skills
        found = record(GraphPaths(self.graph_path), skill, episodes=self.episodes, seed=self.seed)
        sys.stdout.buffer.write(found.to_bytes())
        return 0

    def _print(self, judge: Judge, report: JudgeReport) -> None:
        if self.json:
            document = {"judge": judge.name, "version": judge.version, **asdict(report)}
            for one, shown in zip(report.calibrations, document["calibrations"], strict=True):
                shown["advisory"] = one.advisory
            sys.stdout.write(json.dumps(document, indent=2) + "\n")
            return
        for one in report.calibrations:
            sys.stdout.write(f"{_line(one)}\n")
        for skill, score in report.scores.items():
            sys.stdout.write(f"{skill}: {score:.3f}\n")


def _made(
    name: JudgeName,
    items: Sequence[Trajectory],
    labels: np.ndarray,
    results: Mapping[str, RunResult],
) -> Judge:
    if name == "rule":
        return RuleJudge(results)
    from flowrl.judging.learned import fit_logistic

    return fit_logistic(items, labels)


def _line(one: Calibration) -> str:
    """What was measured of a judge, in one line."""
    head = f"{one.judge} on {one.answered} of {one.asked} unseen items ({one.items})"
    if one.auc is None or one.ece is None or one.kappa is None:
        return f"{head}: too few labels of either kind to measure; advisory"
    named = {"AUC": one.auc, "ECE": one.ece, "κ": one.kappa}
    figures = ", ".join(
        f"{name} {each.value:.2f} [{each.low:.2f}, {each.high:.2f}]" for name, each in named.items()
    )
    return f"{head}: {figures}; {'advisory, it decides nothing' if one.advisory else 'trusted'}"


def main(argv: Sequence[str]) -> int:
    """Carry out a command that `JudgeCommand` has handed on; returns the exit code."""
    command = records.from_json(JudgeCommand, json.loads(argv[0]))
    console.start_logging()
    return console.guarded(command.record)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
