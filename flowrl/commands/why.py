"""`flowrl why`: in which step of its plan a skill fails, or why it has no run yet; a leaf."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from flowrl.arguments import ReportCommand, SkillArgument
from flowrl.console import print_report
from flowrl.errors import ConfigError, FileRefusedError
from flowrl.measures.causes import Explanation, explanation_of, explanation_so_far
from flowrl.measures.episodes import episodes_file, read_episodes
from flowrl.parallel.status import Completed, percent
from flowrl.paths import GraphPaths, existing_graph
from flowrl.reports.status import SkillRow, find_row, read_rows
from flowrl.runs import TrainingRun, read_run
from flowrl.viewing.curves import read_lines

_ENDS = ("waiting", "failed", "held")  # what follows an attempt without a result
_BEGUN = ("preparing", "running", "merging")
_SHOWN = 5  # needs, attempts and lines of a log, so that all is one screen; twice as many steps


@dataclass(frozen=True, kw_only=True)
class WhyCommand(ReportCommand):
    """Say where in its plan a skill fails, or why it has no run.

    Examples:
      flowrl why exp/demo "Make Iron Pickaxe"
      flowrl why exp/demo "Make Iron Pickaxe" --json | jq '.losses[].lost'
    """

    skill: SkillArgument
    """The skill's name, or its expert number."""

    def __call__(self) -> int:
        """Explain the newest merged run of the skill, or say what is known without one.

        ConfigError: the skill is completed by a run without counts.
        """
        graph_paths = existing_graph(self.graph_path)
        rows = read_rows(graph_paths)
        row = find_row(rows, self.skill, self.graph_path)
        explanation = explanation_of(graph_paths, row.skill, row.expert)
        if explanation is None and row.status != Completed.kind:
            facts = _known(graph_paths, rows, row)
            so_far = explanation_so_far(graph_paths, row.skill, row.expert)
            lines = _lines_of_known(row, facts, so_far)
            facts["so_far"] = so_far and asdict(so_far)
            print_report(facts, lines, as_json=self.json)
            return 0
        if explanation is None:
            problem = f"no run of {row.skill} in {graph_paths.root} has ended with its counts"
            remedy = f"see {graph_paths.command('fsck')}, or train it on"
            raise ConfigError(f"{problem}; {remedy}")
        run = read_run(graph_paths.archive(row.expert or 0, row.skill))
        see = _see(graph_paths, run, explanation)
        facts = {**asdict(explanation), "see": see}
        print_report(facts, [*_lines(explanation), see], as_json=self.json)
        return 0


def _see(graph_paths: GraphPaths, run: TrainingRun, found: Explanation) -> str:
    """The command that plays a recorded failure in the worst step; "" if none is recorded."""
    if not episodes_file(graph_paths, run).exists():
        return ""
    try:
        for episode in read_episodes(graph_paths, run):
            if not episode.success and episode.steps[-1] == found.worst.step - 1:
                words = ("--recorded", "--first", str(episode.number), "--episodes", "1")
                return f"see it: {graph_paths.command('play', run.skill, *words)}"
    except FileRefusedError as error:
        return f"no episode of it can be seen: {error}"
    return ""


def _lines(found: Explanation) -> list[str]:
    lines = [
        f"{found.skill}: {found.success:.0%} of {found.episodes} episodes succeed; {found.line}"
    ]
    for loss in found.losses:
        own = "" if loss.own_success is None else f" ({loss.own_success:.0%} in its own run)"
        lost = f", {loss.lost:.0%} of the episodes end here by {loss.cause}" if loss.lost else ""
        lines.append(f"{loss.step:3}  {loss.skill}: {loss.success:.0%} of its attempts{own}{lost}")
    for need in found.lost_needs:
        kept = f"{need.after:.0%} still have it, {need.before:.0%} before"
        lines.append(f"{need.need} is lost in step {need.step}, {need.skill}: {kept}")
    return [*lines, f"remedy: {found.remedy}"]


def _known(graph_paths: GraphPaths, rows: Sequence[SkillRow], row: SkillRow) -> dict[str, Any]:
    """The status of a skill without a merged run, its needs, and its attempts so far."""
    plan: Sequence[str] = ()
    with suppress(FileRefusedError):  # it has no run
        plan = [step.skill for step in read_run(graph_paths.run(row.expert or 0, row.skill)).plan]
    begun = row.expert is not None
    return {
        **asdict(row),
        "steps": [
            {"skill": skill, "success_rate": share}
            for skill, share in zip(plan, row.step_success, strict=False)
        ],
        "waits_for": [
            {name: getattr(need, name) for name in ("skill", "status", "success_rate", "why")}
            for need in rows
            if need.skill in row.waits_for
        ],
        "attempts": [
            {name: line.get(name) for name in ("at", "status", "why", "text")}
            for line in read_lines(graph_paths.events)
            if line.get("skill") == row.skill
            and (line.get("before") in _BEGUN and line.get("status") in _ENDS)
        ],
        "see": f"its log: {graph_paths.command('logs', row.skill)}" if begun else "",
    }


def _lines_of_known(row: SkillRow, facts: dict[str, Any], so_far: Explanation | None) -> list[str]:
    said = ", ".join(filter(None, [row.phase, row.waits, row.why]))
    attempt = f", attempt {row.attempt}" if row.attempt else ""
    lines = [f"{row.skill}: {row.status}{attempt}; no run of it is merged yet", said]
    if row.success_rate is not None:
        frames = f"after {row.frames or 0:,} of {row.total_frames:,} frames"
        lines.append(f"{percent(row.success_rate)} success so far, {frames}")
    if so_far is not None and so_far.episodes:
        lines += _lines(so_far)
    else:
        steps = [*enumerate(facts["steps"], 1)][-2 * _SHOWN :]
        lines += [f"{n:3}  {step['skill']}: {percent(step['success_rate'])}" for n, step in steps]
    for need in facts["waits_for"][:_SHOWN]:
        share = "" if need["success_rate"] is None else f", {percent(need['success_rate'])} success"
        why = f"; {need['why']}" if need["why"] else ""
        lines.append(f"needs {need['skill']}: {need['status']}{share}{why}")
    if (more := len(facts["waits_for"]) - _SHOWN) > 0:
        lines.append(f"and {more} more; see flowrl status")
    lines += [f"{each['at']} {row.skill} {each['text']}" for each in facts["attempts"][-_SHOWN:]]
    return [*lines, *(f"  {line}" for line in row.log[-_SHOWN:]), facts["see"]]
