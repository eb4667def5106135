"""What a migration would do: everything is read and checked before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flowrl import checkpoints
from flowrl.config import Activation, PPOConfig
from flowrl.errors import ConfigError, ExpertShapeError, FileRefusedError
from flowrl.migration.networks import Sizes, nested, unusable
from flowrl.migration.old_expert import LeftOut, OldExpert
from flowrl.migration.old_skills import Decision, Skills, Trial, decide, tried
from flowrl.migration.survey import Survey, look
from flowrl.skills.skill import load_library


@dataclass(frozen=True, slots=True)
class Plan:
    """What a migration does; made without writing anything."""

    survey: Survey
    sizes: Sizes
    config: PPOConfig
    experts: tuple[OldExpert, ...]  # that are migrated
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]
    skills: Skills

    def decision(self, expert: OldExpert) -> Decision:
        """What becomes of an expert's skill."""
        return self.skills.decisions[expert.index]


def plan_migration(
    old: Path, *, activation: Activation | None = None, trial: Trial = tried
) -> Plan:
    """Read and check all of an old graph.

    Raises:
      FlowrlError: nothing can be migrated, or a file cannot be trusted; says which and why.
    """
    survey = look(old.resolve())
    sizes = _common_sizes(survey)
    experts, damaged, contents = _usable(survey.experts)
    if not experts:
        reasons = "; ".join(f"{item.what}: {item.why}" for item in (*damaged, *survey.left_out))
        raise FileRefusedError(f"{old} has no expert that can be migrated: {reasons or 'none'}")
    config = PPOConfig(
        env_name=sizes.env_name,
        layer_size=sizes.layer_size,
        activation=activation or _activation(survey),
    )
    return Plan(
        survey=survey,
        sizes=sizes,
        config=config,
        experts=experts,
        left_out=(*damaged, *survey.left_out),
        notes=_twins(contents),
        skills=decide(experts, load_library(sizes.env_name), env_name=sizes.env_name, trial=trial),
    )


def _common_sizes(survey: Survey) -> Sizes:
    if not survey.experts:
        reasons = "; ".join(f"{item.what}: {item.why}" for item in survey.left_out) or "none"
        raise FileRefusedError(f"no expert is there to migrate: {reasons}")
    first = survey.experts[0]
    for other in survey.experts:
        if other.leaves.sizes != first.leaves.sizes:
            ours, theirs = first.leaves.sizes, other.leaves.sizes
            raise ExpertShapeError(
                f"actor/dense_0 of {first.place} has width {ours.layer_size} for {ours.env_name}, "
                f"that of {other.place} has width {theirs.layer_size} for {theirs.env_name}; a "
                "graph has one of each, migrate them apart"
            )
    return first.leaves.sizes


def _activation(survey: Survey) -> Activation:
    """tanh, which the networks of the original are whatever its flag says; a doubt is told."""
    doubtful = sorted(survey.activations - {"tanh"})
    if doubtful:
        raise ConfigError(
            f"config.yaml says activation {doubtful[0][:20]!r}, which the original's mixture of "
            "experts did not heed: it used tanh; say which, --activation tanh or another"
        )
    return "tanh"


def _usable(
    experts: tuple[OldExpert, ...],
) -> tuple[tuple[OldExpert, ...], tuple[LeftOut, ...], dict[int, str]]:
    """Those whose numbers can act, those that cannot, and a digest of each that can."""
    whole: list[OldExpert] = []
    damaged: list[LeftOut] = []
    contents: dict[int, str] = {}
    for expert in experts:
        arrays = expert.arrays()
        why = unusable(arrays)
        if why is None:
            whole.append(expert)
            contents[expert.index] = checkpoints.array_digest(nested(arrays))
        else:
            damaged.append(LeftOut(f"expert {expert.index} ({expert.name}) of {expert.place}", why))
    return tuple(whole), tuple(damaged), contents


def _twins(contents: Mapping[int, str]) -> tuple[str, ...]:
    """Experts with the same numbers: the original matched keys by prefix, so 1 could get 10's."""
    seen: dict[str, int] = {}
    notes: list[str] = []
    for index, content in contents.items():
        other = seen.setdefault(content, index)
        if other != index:
            notes.append(
                f"experts {other} and {index} hold the same numbers: the original may have "
                f"overwritten one with the other; evaluate both"
            )
    return tuple(notes)
