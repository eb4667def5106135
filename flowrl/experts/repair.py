"""When experts on disk are not what the manifest says: find out, go back, or fall back.

Going back never rewrites the past: it swaps in a new generation with the experts of an old one.
The ledger stays whole, so a run that was rolled back is not merged again by a late process.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from types import MappingProxyType

from flowrl.errors import ExpertCorruptError, ExpertError, ExpertMissingError, FileRefusedError
from flowrl.experts import manifest as manifests
from flowrl.experts.manifest import Manifest
from flowrl.experts.merge import ExpertVersion
from flowrl.experts.store import ExpertStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A version that counts but cannot be used, and why."""

    version: ExpertVersion
    why: str


def fsck(store: ExpertStore) -> tuple[Damage, ...]:
    """Hold every expert of the present manifest against its digest; empty when all is well."""
    damages: list[Damage] = []
    for version in store.manifest().experts.values():
        try:
            store.verify(version)
        except ExpertError as error:
            damages.append(Damage(version=version, why=str(error)))
    return tuple(damages)


def rollback(store: ExpertStore, generation: int) -> Manifest:
    """Make the experts of an earlier generation count again, as a new generation.

    Raises:
      FileRefusedError: the history does not hold that generation.
      ExpertMissingError, ExpertCorruptError: one of its versions cannot be used any more.
    """
    known = manifests.generations(store.layout)
    if generation not in known:
        span = f"{known[0]} to {known[-1]}" if known else "none"
        raise FileRefusedError(
            f"{store.layout.history} holds no generation {generation}; choose among {span}"
        )
    past = manifests.read_file(manifests.history_file(store.layout, generation))
    for version in past.experts.values():
        store.verify(version)
    logger.warning("rolled back", extra={"generation": generation})
    return store.amend(
        lambda before: dataclasses.replace(
            before, generation=before.generation + 1, experts=past.experts
        )
    )


def fall_back(store: ExpertStore, expert: int) -> ExpertVersion:
    """Make the newest earlier version of one expert that is whole count again.

    Raises:
      ExpertMissingError: the manifest does not name this expert.
      ExpertCorruptError: no earlier version is whole.
    """
    present = store.manifest()
    if expert not in present.experts:
        raise ExpertMissingError(f"expert {expert} is not in {store.layout.manifest}; train it")
    version = _newest_whole(store, present.experts[expert])
    logger.warning("fell back", extra={"expert": expert, "version": version.version})
    store.amend(lambda before: _with(before, version))
    return version


def _with(before: Manifest, version: ExpertVersion) -> Manifest:
    experts = MappingProxyType({**before.experts, version.index: version})
    return dataclasses.replace(before, generation=before.generation + 1, experts=experts)


def _newest_whole(store: ExpertStore, broken: ExpertVersion) -> ExpertVersion:
    for generation in reversed(manifests.generations(store.layout)):
        try:
            past = manifests.read_file(manifests.history_file(store.layout, generation))
            version = past.experts.get(broken.index)
            if version is not None and version.version != broken.version:
                store.verify(version)
                return version
        except (ExpertError, FileRefusedError):
            continue
    raise ExpertCorruptError(
        f"expert {broken.index} ({broken.skill}) has no earlier version that is whole; "
        "train the skill again or restore it from a backup"
    )
