"""Which skill code of a graph may be trained on: checked before anything is written, then kept."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from flowrl import notices
from flowrl.errors import SkillError
from flowrl.paths import GraphPaths
from flowrl.runs import CodeApproval
from flowrl.skills.skill import Skill
from flowrl.skills.validation.cache import ApprovalStore
from flowrl.skills.validation.dry_run import Limits, Refusal, SkillCode, try_codes

NOTICE = "trusted_skills"
logger = logging.getLogger(__name__)


def approve_skills(
    layout: GraphPaths,
    skills: Collection[Skill],
    env_name: str,
    *,
    trust: bool,
    limits: Limits | None = None,
) -> Mapping[str, CodeApproval]:
    """An approval for every skill, by name; new code is tried first, and nothing is written.

    Raises:
      SkillError: code is refused, or has only its author's trust without `trust`.
    """
    for skill in skills:
        if skill.trusted and not trust:
            raise SkillError(
                f"{_place(skill)}: {skill.name} is trusted code, which the syntax check refuses; "
                "start with --trust_skills, or rewrite it"
            )
    codes = [SkillCode.of(skill, env_name) for skill in skills]
    outcomes = approvals_of(codes, ApprovalStore(layout.approvals), limits)
    refused = [outcome.text for outcome in outcomes if isinstance(outcome, Refusal)]
    if refused:
        more = f" (and {len(refused) - 1} more: see flowrl check)" if len(refused) > 1 else ""
        raise SkillError(refused[0] + more)
    pairs = zip(skills, outcomes, strict=True)
    return {skill.name: outcome for skill, outcome in pairs if isinstance(outcome, CodeApproval)}


def approvals_of(
    codes: Sequence[SkillCode], store: ApprovalStore, limits: Limits | None = None
) -> list[CodeApproval | Refusal]:
    """The kept approvals, and new ones for the other codes, which are not kept yet."""
    kept = [store.find(code.digest) for code in codes]
    unknown = [code for code, approval in zip(codes, kept, strict=True) if approval is None]
    fresh = iter(try_codes(unknown, limits))
    return [next(fresh) if approval is None else approval for approval in kept]


def keep_approvals(layout: GraphPaths, approvals: Mapping[str, CodeApproval]) -> None:
    """Keep approvals with the graph, and publish a notice of skills that are only trusted."""
    store = ApprovalStore(layout.approvals)
    for name, approval in approvals.items():
        if store.find(approval.digest) is None:
            store.keep(approval, skill=name)
    trusted = sorted(name for name, approval in approvals.items() if approval.trusted)
    if not trusted:
        notices.withdraw(layout, NOTICE)
        return
    text = f"--trust_skills: the syntax check is lifted for {', '.join(trusted)}"
    notices.publish(layout, NOTICE, text)
    logger.warning(text)


def _place(skill: Skill) -> str:
    return skill.origin.place if skill.origin else f"skill {skill.name!r}"
