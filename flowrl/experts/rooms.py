"""Are the folders of a graph folders? A link in the place of one hides what it was moved to.

flowrl follows no links inside a graph: what a link leads to may be gone tomorrow, with a disk that
is not mounted, and would then count as lost. A link that leads *to* the whole graph is no matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from flowrl.errors import FileRefusedError
from flowrl.paths import GraphPaths


def refuse_moved(layout: GraphPaths) -> None:
    """Make sure that what a graph cannot do without is where it belongs.

    Raises:
      FileRefusedError: a link or a file is in the place of a folder; says how to go on.
    """
    for _, error in moved(_needed(layout)):
        raise error


def misplaced(layout: GraphPaths) -> Iterator[tuple[Path, FileRefusedError]]:
    """The folders that a repair needs and that are not where they belong, with a refusal each."""
    yield from moved((*_needed(layout), layout.quarantine, layout.notices))


def moved(folders: Iterable[Path]) -> Iterator[tuple[Path, FileRefusedError]]:
    """Those of these folders that are links or no folders, with a refusal each; any may lack."""
    for path in folders:
        if path.is_symlink():
            text = (
                f"{path} is a link to {path.readlink()}; flowrl follows no links inside a graph: "
                "put the folder itself in the place of the link, or move the whole graph to where "
                "there is room (a mount or a link that leads to all of it is fine)"
            )
        elif path.exists() and not path.is_dir():
            text = (
                f"{path} is no folder; move it away, and restore the folder from a backup if it "
                "held anything"
            )
        else:
            continue
        yield path, FileRefusedError(text)


def _needed(layout: GraphPaths) -> tuple[Path, ...]:
    return (
        layout.skills,
        layout.checkpoints,
        layout.history,
        layout.training_runs,
        layout.failed_runs,
        layout.skill_files,
    )
