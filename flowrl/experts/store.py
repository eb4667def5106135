"""The experts on disk: immutable versions, and one manifest that says which of them count.

A merge copies what it takes into new version folders beside the old ones and then swaps the
manifest, which also holds the ledger of merged runs. Until the swap nothing has changed; after it
everything has. Whatever a killed merge leaves behind is named by no manifest and is collected.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flowrl import storage
from flowrl.errors import ExpertMissingError, FileRefusedError
from flowrl.experts import manifest as manifests
from flowrl.experts.manifest import Manifest
from flowrl.experts.merge import Candidate, Evidence, MergePolicy, Question, Take, Verdict
from flowrl.experts.publishing import Taken, publish, to_flush, withdraw
from flowrl.experts.verdicts import Offer, decided, questions
from flowrl.experts.wholeness import REMEDY, check_digest
from flowrl.paths import GraphPaths
from flowrl.runs import ExpertVersion, LineageEntry
from flowrl.storage import locks

logger = logging.getLogger(__name__)
_INDEX = re.compile(r"0|[1-9][0-9]*")
Pins = Collection[tuple[int, str]] | None  # (index, version); None: unknown, so all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What a merge did; a run that was merged before has no verdicts now."""

    manifest: Manifest
    verdicts: Mapping[int, Verdict]
    already_merged: bool


class ExpertStore:
    """All versions of a graph's experts; any number of processes may merge and read at once."""

    def __init__(self, layout: GraphPaths, *, lock_seconds: float = 60.0) -> None:
        self.layout = layout
        self._lock_seconds = lock_seconds

    def manifest(self) -> Manifest:
        """The manifest that counts now; raises as `manifest.read` does."""
        return manifests.read(self.layout)

    def path_of(self, version: ExpertVersion) -> Path:
        """The folder of a version."""
        return self.layout.expert_version(version.index, version.skill, version.version)

    def verify(self, version: ExpertVersion) -> Path:
        """The folder of a version, once its files are known to be those that were committed.

        Raises:
          ExpertMissingError: the folder is not there.
          ExpertCorruptError: a file was changed, added, lost or replaced by a link.
        """
        path = self.path_of(version)
        if not path.is_dir():
            raise ExpertMissingError(
                f"expert {version.index} ({version.skill}): {path} is missing; {REMEDY}"
            )
        check_digest(path, version)
        return path

    def questions(
        self, run_id: str, offers: Sequence[Offer], *, policy: MergePolicy
    ) -> tuple[Question, ...]:
        """What the policy has to know before it can merge these offers into today's experts."""
        return questions(policy, run_id, self.manifest(), offers)

    def commit(
        self,
        run_id: str,
        offers: Sequence[Offer],
        *,
        policy: MergePolicy,
        evidence: Mapping[int, Evidence] | None = None,
    ) -> Commit:
        """Merge a run: all that the policy takes counts at one stroke, and exactly once.

        `evidence` answers, by expert, the `questions` of a moment ago.

        Raises:
          BusyError: another process merged for longer than the lock's timeout, or an expert is
            another one by now than the one that the evidence is about.
          ExpertCorruptError: an offered folder is not the one that its candidate describes.
          ExpertIndexError: an offered expert belongs to another skill.
          ResultRefusedError: the arrays of an offer cannot be merged.
        """
        manifests.checked_run_id(run_id)
        with self._locked() as still_held:
            before = self.manifest()
            if run_id in before.merged:
                manifests.write_pickle(self.layout, before)
                return Commit(manifest=before, verdicts={}, already_merged=True)
            verdicts = decided(policy, run_id, before, offers=offers, evidence=evidence or {})
            taken = [
                self._taken(run_id, before, offer, verdict)
                for offer in offers
                if isinstance(verdict := verdicts[offer.candidate.expert], Take)
            ]
            publish(run_id, taken)
            after = before.after(run_id, {one.version.index: one.version for one in taken})
            self._swap(before, after, still_held, taken)
        return Commit(manifest=after, verdicts=verdicts, already_merged=False)

    def amend(self, change: Callable[[Manifest], Manifest]) -> Manifest:
        """Swap in another manifest, made from the present one; for rollback and repair."""
        with self._locked() as still_held:
            before = self.manifest()
            after = change(before)
            self._swap(before, after, still_held)
        return after

    def recover(self, pinned: Pins = ()) -> tuple[Path, ...]:
        """Put right what a killed merge left, and collect what no manifest names."""
        with self._locked():
            present = self.manifest()
            homes = (self.layout.checkpoints, self.layout.history, *self.layout.skills.glob("*"))
            for folder in (*homes, *self.expert_folders()):
                storage.remove_leftovers(folder)
            for generation in manifests.generations(self.layout):
                if generation > present.generation:  # prepared, never swapped in
                    storage.remove_file(manifests.history_file(self.layout, generation))
            if present.generation:
                manifests.write_history(self.layout, present)
                manifests.write_pickle(self.layout, present)
            return self._collect(present, pinned)

    def collect_garbage(self, pinned: Pins = ()) -> tuple[Path, ...]:
        """Remove versions that neither a kept manifest nor `pinned` (index, version) names."""
        with self._locked():
            return self._collect(self.manifest(), pinned)

    def _locked(self) -> AbstractContextManager[Callable[[], None]]:
        """Hold the global lock; gives a check that nobody replaced the lock file meanwhile."""
        return locks.held(self.layout.global_lock, timeout_seconds=self._lock_seconds)

    def _taken(self, run_id: str, before: Manifest, offer: Offer, verdict: Take) -> Taken:
        version = self._version(run_id, before, offer.candidate, verdict)
        blend = verdict.blend
        return Taken(
            version=version,
            final=self.path_of(version),
            source=blend.folder if blend else offer.copy or offer.folder,
            is_copy=not blend and offer.copy is not None,
        )

    def _version(
        self, run_id: str, before: Manifest, candidate: Candidate, verdict: Take
    ) -> ExpertVersion:
        blend = verdict.blend
        return ExpertVersion(
            index=candidate.expert,
            skill=candidate.skill,
            version=manifests.version_name(before.generation + 1, run_id),
            frames=verdict.frames,
            sha256=blend.sha256 if blend else candidate.sha256,
            content=blend.content if blend else candidate.content,
            shapes=candidate.shapes,
            lineage=self._lineage(run_id, before, candidate, verdict),
        )

    def _swap(
        self,
        before: Manifest,
        after: Manifest,
        still_held: Callable[[], None],
        taken: Collection[Taken] = (),
    ) -> None:
        """Let another manifest count, once what it has newly `taken` is durable."""
        if not self.layout.manifest.exists():  # so that "history without manifest" means damage
            manifests.swap(self.layout, before)
        manifests.succeed(
            self.layout,
            after,
            besides=to_flush(taken),
            unless=still_held,
            otherwise=partial(withdraw, taken),
        )
        storage.fault_point("commit.swapped")
        manifests.write_pickle(self.layout, after)
        logger.debug("manifest swapped", extra={"generation": after.generation})

    def _lineage(
        self, run_id: str, before: Manifest, candidate: Candidate, verdict: Take
    ) -> tuple[LineageEntry, ...]:
        if verdict.blend is not None:  # both sides' runs are in it
            added = LineageEntry(run_id=run_id, frames=candidate.gained)
            return (*before.experts[candidate.expert].lineage, added)
        gained = LineageEntry(run_id=run_id, frames=verdict.frames - candidate.ancestor_frames)
        if candidate.ancestor is None:
            return (gained,)
        return (*candidate.ancestor.lineage, gained)

    def _history(self, present: Manifest) -> Iterator[Manifest]:
        """The kept manifests, newest first; raises FileRefusedError at a damaged one."""
        return map(manifests.read_file, self._kept_files(present))

    def _kept_files(self, present: Manifest) -> Iterator[Path]:
        oldest = present.generation - manifests.KEPT_GENERATIONS
        for generation in reversed(manifests.generations(self.layout)):
            if oldest < generation <= present.generation:
                yield manifests.history_file(self.layout, generation)

    def _collect(self, present: Manifest, pinned: Pins) -> tuple[Path, ...]:
        if pinned is None:
            return ()
        try:
            named = {
                (version.index, version.version)
                for known in (present, *self._history(present))
                for version in known.experts.values()
            }
        except FileRefusedError as error:
            logger.warning("nothing collected: the history is damaged", extra={"why": str(error)})
            return ()
        named.update(pinned)
        for generation in manifests.generations(self.layout):
            if generation <= present.generation - manifests.KEPT_GENERATIONS:
                storage.remove_file(manifests.history_file(self.layout, generation))
        orphans = tuple(
            path
            for key, path in self.versions()
            if key not in named and not self.is_recent(present, key[1])
        )
        for path in orphans:
            storage.remove_tree(path)
        return orphans

    def is_recent(self, present: Manifest, version: str) -> bool:
        """Whether a version came in with a recent generation that the history has lost.

        That generation alone may have named it, so it is kept as long as the history would be.
        """
        born = manifests.born_as(version)
        kept = present.generation - manifests.KEPT_GENERATIONS < born <= present.generation
        return kept and born not in manifests.generations(self.layout)

    def expert_folders(self) -> list[Path]:
        """The folder of each expert, in which its versions are."""
        return sorted(self.layout.skills.glob("*/expert_*_policy"))

    def versions(self) -> Iterator[tuple[tuple[int, str], Path]]:
        """Every version on disk, by (index, version)."""
        for folder in self.expert_folders():
            index = folder.name.removeprefix("expert_").removesuffix("_policy")
            for path in folder.iterdir():
                if _INDEX.fullmatch(index) and manifests.is_version_name(path.name):
                    yield (int(index), path.name), path
