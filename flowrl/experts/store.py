"""The experts on disk: immutable versions, and one manifest that says which of them count.

A merge copies the experts it uses into new version folders beside the old ones and then replaces
the manifest, which also holds the ledger of merged runs. Before the replacement nothing has
changed; after it everything has. No manifest names what a killed merge leaves behind, so it is
collected as garbage.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from flowrl import storage
from flowrl.errors import (
    BusyError,
    ExpertCorruptError,
    ExpertIndexError,
    ExpertMissingError,
    FileRefusedError,
    closest,
    without_remedy,
)
from flowrl.experts import manifest as manifests
from flowrl.experts.manifest import Manifest
from flowrl.experts.merge import (
    Candidate,
    Evidence,
    MergeDecision,
    MergeRule,
    Question,
    UseCandidate,
    decide,
)
from flowrl.paths import GraphPaths, RunPaths, slug
from flowrl.runs import ExpertVersion, LineageEntry
from flowrl.storage import locks

logger = logging.getLogger(__name__)
_LOCK_SECONDS = 60.0
_INDEX = re.compile(r"0|[1-9][0-9]*")
Pins = Collection[tuple[int, str]] | None  # (index, version); None: unknown, so all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The result of a merge; a run that was merged before has no decisions."""

    manifest: Manifest
    decisions: Mapping[int, MergeDecision]  # by global index
    already_merged: bool


class ExpertStore:
    """All versions of a graph's experts; any number of processes may merge and read at once.

    `still_ours` is called before a merge counts: it raises an error once other hosts may merge.
    """

    def __init__(
        self, graph_paths: GraphPaths, still_ours: Callable[[], object] | None = None
    ) -> None:
        self.graph_paths = graph_paths
        self._still_ours = still_ours

    def manifest(self) -> Manifest:
        """The manifest that counts now; raises as `manifest.read` does."""
        return manifests.read(self.graph_paths)

    def path_of(self, version: ExpertVersion) -> Path:
        """The folder of a version."""
        return self.graph_paths.expert_version(version.index, version.skill, version.version)

    def archive_of(self, skill: str) -> RunPaths:
        """Return a merged skill's archive, by its name, machine name or expert number."""
        merged = self.manifest().experts
        for index, version in merged.items():
            names = (version.skill, slug(version.skill), str(index))
            if skill.strip().casefold() in map(str.casefold, names):
                return self.graph_paths.archive(index, version.skill)
        known = [version.skill for version in merged.values()]
        raise ExpertMissingError(
            f"{self.graph_paths.root} has no merged expert of {skill!r}{closest(skill, known)}; "
            f"merged are: {', '.join(known) or 'none yet'}"
        )

    def verify(self, version: ExpertVersion) -> Path:
        """Return the folder of a version after checking that its files are the committed ones.

        ExpertMissingError: there is none. ExpertCorruptError: a file was changed, added or lost.
        """
        path = self.path_of(version)
        name = f"expert {version.index} ({version.skill})"
        if not path.is_dir():
            raise ExpertMissingError(f"{name}: {path} is missing; {self._remedy}")
        try:
            digest = storage.tree_digest(path)
        except FileRefusedError as error:
            what = f"{name}: {without_remedy(error)}"
            raise ExpertCorruptError(f"{what}; {self._remedy}") from error
        self._check_digest(digest, path, version)
        return path

    def copy(self, version: ExpertVersion, target: Path, *, source: Path | None = None) -> None:
        """Copy the files of a version to a new folder; those of a new version are in `source`.

        ExpertCorruptError: they are not the committed ones.
        """
        folder = source or self.path_of(version)
        self._check_digest(storage.copy_tree(folder, target), folder, version)

    def _check_digest(self, digest: str, folder: Path, version: ExpertVersion) -> None:
        if digest != version.sha256:
            raise ExpertCorruptError(
                f"expert {version.index} ({version.skill}): {folder} has sha256 {digest[:12]}…, "
                f"{version.sha256[:12]}… was committed; {self._remedy}"
            )

    @property
    def _remedy(self) -> str:
        repair = self.graph_paths.command("fsck", "--repair")
        return f"restore it from a backup, or let {repair} find a whole version"

    def questions(
        self, run_id: str, candidates: Sequence[Candidate], *, rule: MergeRule
    ) -> tuple[Question, ...]:
        """Return the questions of the rule about these candidates and today's experts."""
        before = self.manifest()
        if run_id in before.merged:
            return ()
        decisions = (_decide(rule, run_id, before, candidate) for candidate in candidates)
        return tuple(item for item in decisions if isinstance(item, Question))

    def commit(
        self,
        run_id: str,
        candidates: Sequence[Candidate],
        *,
        rule: MergeRule,
        evidence: Mapping[int, Evidence] | None = None,
    ) -> Commit:
        """Merge a run atomically and exactly once, by its id in the ledger.

        Where another run has trained the same expert, the `rule` decides by the `evidence`: the
        answers, by expert, to the `questions` asked before.

        Raises:
          BusyError: the global lock is not free in time, or the evidence is about another version.
          ExpertCorruptError: the files of a candidate are not those that it describes.
          ExpertIndexError: an expert belongs to another skill.
          ResultRefusedError: the arrays of a candidate cannot be merged.
        """
        manifests.checked_run_id(run_id)
        with self.locked() as still_held:
            before = self.manifest()
            if run_id in before.merged:
                manifests.write_pickle(self.graph_paths, before)
                return Commit(manifest=before, decisions={}, already_merged=True)
            decisions: dict[int, MergeDecision] = {}
            new: list[tuple[ExpertVersion, Path]] = []
            for candidate in candidates:
                known = (evidence or {}).get(candidate.expert)
                decision = _decide(rule, run_id, before, candidate, evidence=known)
                if isinstance(decision, Question):
                    raise BusyError(
                        f"expert {candidate.expert} was merged by another run meanwhile; "
                        "merge again"
                    )
                decisions[candidate.expert] = decision
                if isinstance(decision, UseCandidate):
                    version = _new_version(run_id, before, candidate, decision)
                    folder = decision.blend.folder if decision.blend else candidate.folder
                    new.append((version, folder))
            after = before.after(run_id, {version.index: version for version, _ in new})
            self._swap(before, after, still_held, new)
        return Commit(manifest=after, decisions=decisions, already_merged=False)

    def amend(self, change: Callable[[Manifest], Manifest]) -> Manifest:
        """Swap in another manifest, made from the present one; for rollback and repair."""
        with self.locked() as still_held:
            before = self.manifest()
            after = change(before)
            self._swap(before, after, still_held)
        return after

    def recover(self, pinned: Pins = ()) -> tuple[Path, ...]:
        """Remove what a killed merge left, and collect what no manifest names.

        GraphDamagedError: the manifest cannot be used; nothing is removed.
        """
        with self.locked():
            present = self.manifest()
            homes = (
                self.graph_paths.checkpoints,
                self.graph_paths.history,
                *self.graph_paths.skills.glob("*"),
            )
            for folder in (*homes, *self.expert_folders()):
                storage.remove_leftovers(folder)
            for generation in manifests.generations(self.graph_paths):
                if generation > present.generation:  # prepared, never swapped in
                    storage.remove_file(manifests.history_file(self.graph_paths, generation))
            if present.generation:
                manifests.write_history(self.graph_paths, present)
                manifests.write_pickle(self.graph_paths, present)
            return self._collect(present, pinned)

    def collect_garbage(self, pinned: Pins = ()) -> tuple[Path, ...]:
        """Remove versions that neither a kept manifest nor `pinned` (index, version) names."""
        with self.locked():
            return self._collect(self.manifest(), pinned)

    def expert_folders(self) -> list[Path]:
        """The folder of each expert, in which its versions are."""
        folders = self.graph_paths.skills.glob("*/expert_*_policy")
        return sorted(path for path in folders if path.is_dir() and not path.is_symlink())

    def versions(self) -> Iterator[tuple[tuple[int, str], Path]]:
        """Every version on disk, by (index, version)."""
        for folder in self.expert_folders():
            index = folder.name.removeprefix("expert_").removesuffix("_policy")
            for path in folder.iterdir():
                if _INDEX.fullmatch(index) and manifests.is_version_name(path.name):
                    yield (int(index), path.name), path

    def locked(self) -> AbstractContextManager[Callable[[], None]]:
        """Hold the global lock; gives a check that the lock file was not replaced meanwhile."""
        return locks.held(self.graph_paths.global_lock, timeout_seconds=_LOCK_SECONDS)

    def _swap(
        self,
        before: Manifest,
        after: Manifest,
        still_held: Callable[[], None],
        new: Sequence[tuple[ExpertVersion, Path]] = (),
    ) -> None:
        """Replace the manifest, once the `new` versions are copied from their folders."""
        if (
            not self.graph_paths.manifest.exists()
        ):  # so that "history without manifest" means damage
            manifests.swap(self.graph_paths, before)
        try:
            self._publish(new)
            manifests.write_history(self.graph_paths, after)
        except OSError:
            for version, _ in new:  # a full disk needs the space; what stays is garbage
                with suppress(OSError):
                    storage.remove_tree(self.path_of(version))
            raise
        storage.fault_point("commit.history")
        still_held()
        if self._still_ours:
            self._still_ours()
        manifests.swap(self.graph_paths, after)
        storage.fault_point("commit.swapped")
        manifests.write_pickle(self.graph_paths, after)
        logger.debug("manifest swapped", extra={"generation": after.generation})

    def _publish(self, new: Sequence[tuple[ExpertVersion, Path]]) -> None:
        """Copy each new version into its folder, durably; no manifest names it yet."""
        finals = [self.path_of(version) for version, _ in new]
        for left in finals:  # of a merge that was killed before its swap
            storage.remove_tree(left)
        try:
            with ExitStack() as making:  # no version has its name before all are copied
                for (version, folder), final in zip(new, finals, strict=True):
                    copy = making.enter_context(storage.building(final))
                    self.copy(version, copy, source=folder)
                storage.fault_point("commit.copied")
        except BaseException:
            for left in finals:
                storage.remove_unread_tree(left)
            raise
        storage.fault_point("commit.published")

    def _collect(self, present: Manifest, pinned: Pins) -> tuple[Path, ...]:
        if pinned is None:
            return ()
        named = present.versions | set(pinned)
        oldest = present.generation - manifests.KEPT_GENERATIONS + 1
        for generation in manifests.generations(self.graph_paths):
            if generation < oldest:
                storage.remove_file(manifests.history_file(self.graph_paths, generation))
        history = dict(manifests.read_history(self.graph_paths))
        for generation, known in history.items():
            if known is None:
                logger.warning("nothing collected: generation %d is damaged", generation)
                return ()
            named |= known.versions
        # A recent generation that the history has lost may have named what came in with it. What
        # came in later than a killed merge could is of a manifest that was newer than this one.
        lost = set(range(oldest, present.generation + 1)) - history.keys()
        orphans = tuple(
            path
            for key, path in self.versions()
            if key not in named
            and (generation := manifests.generation_of(key[1])) not in lost
            and generation <= present.generation + 1
        )
        for path in orphans:
            storage.remove_tree(path)
        return orphans


def refuse_misplaced(graph_paths: GraphPaths) -> None:
    """Raise FileRefusedError if a link or a file is in the place of a folder of the graph."""
    checkpoints = (graph_paths.checkpoints, graph_paths.history)
    runs = (graph_paths.training_runs, graph_paths.failed_runs)
    told = (graph_paths.notices, graph_paths.skill_files)
    refuse_links((graph_paths.skills, *checkpoints, *runs, *told))


def refuse_links(folders: Iterable[Path]) -> None:
    """Raise FileRefusedError if one of these folders is a link or no folder; any may be missing.

    If the disk that a link inside a graph leads to is not mounted, its content would count as lost.
    """
    for path in folders:
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise FileRefusedError(
                f"{path} is a link or a file; flowrl follows no links inside a graph: put the "
                "folder itself there, or move the whole graph to a larger disk (a mount or a link "
                "that leads to all of it is fine)"
            )


def _decide(
    rule: MergeRule,
    run_id: str,
    before: Manifest,
    candidate: Candidate,
    *,
    evidence: Evidence | None = None,
) -> MergeDecision | Question:
    current = before.experts.get(candidate.expert)
    if current is not None and current.skill != candidate.skill:
        raise ExpertIndexError(
            f"expert {candidate.expert} is that of {current.skill!r}, not of {candidate.skill!r}; "
            "train the skill as another expert"
        )
    return decide(rule, run_id=run_id, current=current, candidate=candidate, evidence=evidence)


def _new_version(
    run_id: str, before: Manifest, candidate: Candidate, decision: UseCandidate
) -> ExpertVersion:
    blend = decision.blend  # the runs of both copies are in it
    parent = candidate.ancestor if blend is None else before.experts[candidate.expert]
    lineage = parent.lineage if parent else ()
    entry = LineageEntry(
        run_id=run_id, frames=candidate.gained, success_rate=candidate.success_rate
    )
    return ExpertVersion(
        index=candidate.expert,
        skill=candidate.skill,
        version=manifests.version_name(before.generation + 1, run_id),
        frames=(parent.frames if parent else 0) + candidate.gained,
        sha256=blend.sha256 if blend else candidate.sha256,
        content=blend.content if blend else candidate.content,
        shapes=candidate.shapes,
        lineage=(*lineage, entry),
    )
