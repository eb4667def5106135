"""Which skill code of a graph may be trained on: judged before anything is written, then kept."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from flowrl import notices
from flowrl.errors import SkillError
from flowrl.paths import GraphPaths
from flowrl.runs import TrainingRun, Verdict
from flowrl.skills.judging import Limits, Refusal, Subject, verdicts_on
from flowrl.skills.skill import Skill
from flowrl.skills.verdicts import VerdictStore

NOTICE = "trusted_skills"
logger = logging.getLogger(__name__)


def judged(
    layout: GraphPaths,
    skills: Collection[Skill],
    env_name: str,
    *,
    trust: bool,
    limits: Limits | None = None,
) -> Mapping[str, Verdict]:
    """A verdict for every skill, by name; new code is tried first, and nothing is written.

    Raises:
      SkillError: code is refused, or has only its author's trust without `trust`.
    """
    for skill in skills:
        if skill.trusted and not trust:
            raise SkillError(
                f"{_place(skill)}: {skill.name} is trusted code, which the syntax gate refuses; "
                "start with --trust_skills, or rewrite it"
            )
    subjects = [Subject.of(skill, env_name) for skill in skills]
    answers = verdicts_on(subjects, VerdictStore(layout.verdicts), limits)
    refused = [answer.text for answer in answers if isinstance(answer, Refusal)]
    if refused:
        more = f" (and {len(refused) - 1} more: see flowrl check)" if len(refused) > 1 else ""
        raise SkillError(refused[0] + more)
    pairs = zip(skills, answers, strict=True)
    return {skill.name: answer for skill, answer in pairs if isinstance(answer, Verdict)}


def keep(layout: GraphPaths, verdicts: Mapping[str, Verdict]) -> None:
    """Keep what was judged with the graph, and say which skills are there by trust alone."""
    store = VerdictStore(layout.verdicts)
    for name, verdict in verdicts.items():
        if store.find(verdict.digest) is None:
            store.keep(verdict, skill=name)
    trusted = sorted(name for name, verdict in verdicts.items() if verdict.trusted)
    if not trusted:
        notices.withdraw(layout, NOTICE)
        return
    text = f"--trust_skills: the syntax gate is lifted for {', '.join(trusted)}"
    notices.tell(layout, NOTICE, text)
    logger.warning(text)


def kept_verdicts(
    layout: GraphPaths, run: TrainingRun, skills: Mapping[str, Skill]
) -> tuple[Verdict, ...]:
    """The verdicts that the skills of a run's plan have; what has none the trainer refuses."""
    store = VerdictStore(layout.verdicts)
    names = dict.fromkeys(step.skill for step in run.plan)
    subjects = [Subject.of(skills[name], run.config["env_name"]) for name in names]
    found = (store.find(digest) for digest in dict.fromkeys(one.digest for one in subjects))
    return tuple(verdict for verdict in found if verdict is not None)


def _place(skill: Skill) -> str:
    return skill.origin.place if skill.origin else f"skill {skill.name!r}"
