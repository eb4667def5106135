"""Graphs of the original's parallel code: one folder per trained skill, one pickle per expert."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowrl.errors import FileRefusedError
from flowrl.layout import display_name
from flowrl.migration.networks import Leaves, leaves_of, numbered_networks, sole_network
from flowrl.migration.old_expert import Found, LeftOut, OldExpert, saved_tree
from flowrl.migration.old_files import (
    facts,
    frames_in,
    is_file,
    is_folder,
    mapping,
    newest_step,
    numbered,
    settings,
    share_in,
)
from flowrl.migration.one_checkpoint import refuse_repeats
from flowrl.migration.pickles import read_pickle

_SKILL_FOLDER = re.compile(r"(0|[1-9]\d{0,5})_(.{1,255})", re.DOTALL)
_EXPERT_FOLDER = re.compile(r"expert_(\d{1,6})_policy")
_RUN_FOLDER = re.compile(r"skill_(\d{1,6})_.*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What the original's own books say of an expert."""

    name: str
    frames: int | None = None
    success_rate: float | None = None
    data: Any = None


def in_folder(old: Path) -> Found:
    """The experts below `skills/`; those with a pickle of their own first.

    Raises:
      FileRefusedError: two folders claim one index, or a file cannot be trusted.
    """
    folders = list(numbered(old / "skills", _SKILL_FOLDER))
    if not folders:
        return Found()
    records = _records(old)
    experts: dict[int, OldExpert] = {}
    for index, match, folder in folders:
        if _has_pickle(folder, index):
            _refuse_second(index, experts, folder)
            experts[index] = _of_pickle(index, match[2], folder, records.get(index))
    for index, match, folder in folders:
        if index not in experts:
            expert = _of_orbax(index, match[2], folder, records.get(index))
            experts |= {index: expert} if expert else {}
    words = f"{len(experts)} experts of the parallel code (skills/)"
    said = [settings(path / f"{index}_policies" / "config.yaml") for index, _, path in folders]
    activations = sorted({item["ACTIVATION"] for item in said if item.get("ACTIVATION")})
    return Found(
        words=words,
        experts=tuple(experts.values()),
        left_out=(*_without_arrays(experts, folders, records), *_unfinished(old)),
        activation=next((item for item in activations if item != "tanh"), "tanh"),
    )


def _has_pickle(folder: Path, index: int) -> bool:
    for number, _, path in numbered(folder, _EXPERT_FOLDER):
        if number != index:
            raise FileRefusedError(f"{path} is not of expert {index}; put it where it belongs")
    policy = folder / f"expert_{index}_policy"
    return is_folder(policy) and is_file(policy / "params.pkl")


def _refuse_second(index: int, experts: Mapping[int, OldExpert], folder: Path) -> None:
    if index in experts:
        raise FileRefusedError(
            f"{experts[index].place.parent.parent} and {folder} both hold expert {index}; move "
            "one of them away"
        )


def _of_pickle(index: int, word: str, folder: Path, record: Record | None) -> OldExpert:
    policy = folder / f"expert_{index}_policy"
    path = policy / "params.pkl"
    tree = read_pickle(path)
    said = facts(policy / "metadata.json") or dict(mapping(mapping(tree).get("metadata")))
    if said.get("global_expert_idx", index) != index:
        raise FileRefusedError(f"{policy} says that it is of another expert than {index}")
    leaves = leaves_of(sole_network(tree, index, str(path)), str(path))
    frames = frames_in(said.get("total_frames"), policy)
    expert = _expert(
        index, (said.get("skill_name"), word), place=path, leaves=leaves, record=record
    )
    refuse_repeats((expert,), path)
    known = expert if frames is None else replace(expert, frames=frames)
    return _with_metrics(known, folder)


def _of_orbax(index: int, word: str, folder: Path, record: Record | None) -> OldExpert | None:
    policies = folder / f"{index}_policies"
    place = newest_step(policies) if is_folder(policies) else None
    if place is None:
        return None
    remap, said = facts(policies / "remap.json"), settings(policies / "config.yaml")
    local = mapping(remap.get("global_to_local")).get(str(index), None if remap else index)
    networks = numbered_networks(saved_tree(place), str(place))
    if type(local) is not int or local not in networks:
        raise FileRefusedError(f"{policies}: remap.json names no network of {place} as {index}")
    leaves = leaves_of(networks[local], f"{place}, network {local}")
    before = frames_in(mapping(remap.get("initial_frame_counts")).get(str(index)), policies) or 0
    trained = frames_in(said.get("TRAINED_TIMESTEPS", said.get("TOTAL_TIMESTEPS")), policies)
    expert = _expert(
        index, (remap.get("skill_name"), word), place=place, leaves=leaves, record=record
    )
    if expert.frames is None and trained is not None:
        expert = replace(expert, frames=before + trained)
    return _with_metrics(expert, folder, share_in(said.get("SUCCESS_RATE")))


def _expert(
    index: int, names: tuple[Any, str], *, place: Path, leaves: Leaves, record: Record | None
) -> OldExpert:
    """An expert by the name it says itself, else the books' name, else its folder's."""
    said, word = names
    named = said if isinstance(said, str) else None
    return OldExpert(
        index=index,
        name=display_name(named or (record.name if record else word.replace("_", " "))),
        place=place,
        leaves=leaves,
        frames=record.frames if record else None,
        success_rate=record.success_rate if record else None,
        data=record.data if record else None,
    )


def _with_metrics(expert: OldExpert, folder: Path, rate: float | None = None) -> OldExpert:
    """The expert with the success rate that lies in its folder, if nothing else says one."""
    if expert.success_rate is not None:
        return expert
    found = share_in(facts(folder / "metrics.json").get("success_rate"))
    return replace(expert, success_rate=rate if found is None else found)


def _records(old: Path) -> dict[int, Record]:
    """What global_latest.pkl and scheduler_state.json say, by expert index."""
    records: dict[int, Record] = {}
    path = old / "checkpoints" / "global_latest.pkl"
    if is_folder(path.parent) and is_file(path):
        for name, value in mapping(mapping(read_pickle(path)).get("skills")).items():
            said = mapping(value)
            index = said.get("expert_idx")
            if isinstance(name, str) and type(index) is int:
                records[index] = Record(
                    name=name,
                    frames=frames_in(said.get("total_frames"), path),
                    success_rate=share_in(mapping(said.get("metrics")).get("success_rate")),
                    data=said,
                )
    for said in mapping(facts(old / "scheduler_state.json").get("skills")).values():
        name, index = mapping(said).get("skill_name"), mapping(said).get("expert_idx")
        if isinstance(name, str) and type(index) is int:
            known = records.get(index, Record(name=name))
            if known.name == name:
                records[index] = replace(known, data=said.get("skill_data"))
    return records


def _without_arrays(
    experts: Mapping[int, OldExpert], folders: list, records: Mapping[int, Record]
) -> tuple[LeftOut, ...]:
    why = "neither params.pkl nor a whole Orbax checkpoint is there"
    places = {index: str(path) for index, _, path in folders if index not in experts}
    names = {index: record.name for index, record in records.items() if index not in experts}
    return tuple(
        LeftOut(f"expert {index} ({names.get(index) or places[index]})", why)
        for index in sorted({*places, *names})
    )


def _unfinished(old: Path) -> tuple[LeftOut, ...]:
    runs = numbered(old / "training_runs", _RUN_FOLDER)
    why = "a run that the original had not merged; let it finish there, or train the skill again"
    return tuple(LeftOut(str(path), why) for _, _, path in runs)
