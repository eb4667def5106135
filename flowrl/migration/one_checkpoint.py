"""A checkpoint alone, with all experts in one tree and no word of the skills they are of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowrl.errors import FileRefusedError
from flowrl.migration.networks import leaves_of, numbered_networks
from flowrl.migration.old_expert import Found, OldExpert, saved_tree
from flowrl.migration.old_files import frames_in, newest_step, saved_place, settings
from flowrl.migration.pickles import read_pickle


def in_pickle(path: Path) -> Found:
    """The experts in a pickle with one tree.

    Raises:
      FileRefusedError: it is no plain pickle, or holds more numbers than bytes.
    """
    experts = _experts(read_pickle(path), path)
    refuse_repeats(experts, path)
    return Found(words=f"one pickle with {len(experts)} experts", experts=experts)


def in_folder(folder: Path) -> Found:
    """The experts in an Orbax folder, or in the newest step of a `<i>_policies` folder."""
    place = newest_step(folder) or saved_place(folder)
    if place is None:
        return Found()
    said = settings(folder / "config.yaml")
    frames = frames_in(said.get("TRAINED_TIMESTEPS", said.get("TOTAL_TIMESTEPS")), folder)
    experts = _experts(saved_tree(place), place, frames)
    words = f"one Orbax checkpoint with {len(experts)} experts"
    return Found(words=words, experts=experts, activation=said.get("ACTIVATION", ""))


def refuse_repeats(experts: tuple[OldExpert, ...], path: Path) -> None:
    """Refuse a pickle that shows the same bytes as many arrays, which would fill the disk."""
    leaves = [leaf for expert in experts for leaf in expert.leaves.stored.values()]
    if sum(4 * _volume(leaf.shape) for leaf in leaves) > path.stat().st_size:
        raise FileRefusedError(f"{path} is refused: it holds more numbers than bytes; restore it")


def _volume(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _experts(tree: Any, place: Path, frames: int | None = None) -> tuple[OldExpert, ...]:
    networks = numbered_networks(tree, str(place))
    return tuple(
        OldExpert(
            index=number,
            name=f"Expert {number}",
            place=place,
            leaves=leaves_of(network, f"{place}, expert {number}"),
            frames=frames,
        )
        for number, network in networks.items()
    )
