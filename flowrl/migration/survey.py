"""What an old folder or file holds, as one list of experts; nothing of it is changed.

Three forms are known, and may lie in one folder:

* the parallel code's: `skills/<i>_<name>/expert_<i>_policy/params.pkl`, one pickle per expert, or
  only `skills/<i>_<name>/<i>_policies`, the run's Orbax checkpoint with its `remap.json`;
* the sequential code's: `<i>/<i>_policies`, an Orbax checkpoint per iteration with all experts;
* one checkpoint alone: a pickle or an Orbax folder with all experts in one tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flowrl.errors import FileRefusedError
from flowrl.layout import slug
from flowrl.migration import one_checkpoint, parallel_form, sequential_form
from flowrl.migration.old_expert import Found, LeftOut, OldExpert


@dataclass(frozen=True, slots=True)
class Survey:
    """Every expert by its index, what was found in words, and what stays behind."""

    found: tuple[str, ...]
    experts: tuple[OldExpert, ...]
    left_out: tuple[LeftOut, ...]
    activations: frozenset[str]


def look(old: Path) -> Survey:
    """What there is to migrate.

    Raises:
      FileRefusedError: nothing of the original is there, or a file cannot be trusted.
      ExpertShapeError: an expert's layers are not those of flowrl.
    """
    if old.is_file():
        forms = [one_checkpoint.in_pickle(old)]
    else:
        forms = [parallel_form.in_folder(old), sequential_form.in_folder(old)]
        if not any(form.words for form in forms):
            forms = [one_checkpoint.in_folder(old)]
    words = tuple(form.words for form in forms if form.words)
    if not words:
        raise FileRefusedError(
            f"{old} is no graph of the original: it holds neither skills/<i>_<name>, nor "
            "<i>/<i>_policies, nor a checkpoint; name the folder that was its --graph-path"
        )
    return _joined(words, forms)


def _joined(words: tuple[str, ...], forms: list[Found]) -> Survey:
    """All forms as one; where two hold an expert or a name, the first form has it."""
    experts: dict[int, OldExpert] = {}
    names: dict[str, OldExpert] = {}
    left_out = [item for form in forms for item in form.left_out]
    for form in forms:
        taken, known = dict(experts), dict(names)
        for expert in form.experts:
            rival = taken.get(expert.index) or known.get(slug(expert.name))
            if rival is not None:
                why = f"expert {rival.index} ({rival.name}) of {rival.place} is taken instead"
                left_out.append(LeftOut(f"expert {expert.index} ({expert.name})", why))
                continue
            _refuse_twin(expert, names.get(slug(expert.name)))
            experts[expert.index] = names[slug(expert.name)] = expert
    activations = frozenset(form.activation for form in forms if form.activation)
    ordered = tuple(experts[index] for index in sorted(experts))
    return Survey(words, ordered, tuple(left_out), activations)


def _refuse_twin(expert: OldExpert, twin: OldExpert | None) -> None:
    if twin is not None:
        raise FileRefusedError(
            f"expert {twin.index} ({twin.name!r}, {twin.place}) and expert {expert.index} "
            f"({expert.name!r}, {expert.place}) would share the folder name {slug(expert.name)}; "
            "rename one in its metadata.json"
        )
