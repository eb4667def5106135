"""Copies of a run's experts, made while it is still being found out whether they may count.

They lie in a folder of their own below `checkpoints/`, from which a merge renames what it takes;
the rest is removed. Their digests are of the very bytes that were copied, so whoever can still
write into the run's folder can change nothing after it was checked. What a kill leaves is swept by
the next start.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from flowrl import storage
from flowrl.errors import FileRefusedError
from flowrl.experts import manifest as manifests
from flowrl.paths import GraphPaths

logger = logging.getLogger(__name__)


class Staging:
    """One merge's copies, durable but for their names; they are gone once the block has ended.

    Where they are not `wanted`, nothing is copied.
    """

    def __init__(self, layout: GraphPaths, run_id: str, *, wanted: bool = True) -> None:
        self._layout = layout
        self._wanted = wanted
        name = f".tmp-{manifests.checked_run_id(run_id)}.{secrets.token_hex(4)}"
        self._folder = layout.checkpoints / name
        self._copies: dict[Path, Path] = {}

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        storage.remove_unread_tree(self._folder)

    def digests(self, sources: Sequence[Path]) -> dict[Path, str]:
        """Copy these folders and answer the digest of each; none where they cannot be copied.

        Then the merge copies by itself, and says what it meets.
        """
        targets = {self._folder / str(number): path for number, path in enumerate(sources)}
        if not targets or not self._wanted:
            return {}
        try:
            if not self._is_beside_versions():
                return {}
            found = storage.copy_trees(targets, durable=False)
            storage.flush(storage.everything(self._folder))
        except (OSError, FileRefusedError) as error:
            logger.debug("nothing is copied ahead", extra={"why": str(error)})
            storage.remove_unread_tree(self._folder)
            return {}
        self._copies = {source: target for target, source in targets.items()}
        return {source: found[target] for source, target in self._copies.items()}

    def _is_beside_versions(self) -> bool:
        """Whether a copy can be renamed into a version: some have `skills/` on another disk."""
        rooms = (self._layout.skills, self._layout.checkpoints)
        return len({storage.make_dir(room, durable=False).stat().st_dev for room in rooms}) == 1

    def copy_of(self, source: Path) -> Path | None:
        """The copy of a folder, if there is one."""
        return self._copies.get(source)
