"""The build hook of the source distribution: it takes the files that git tracks, and no others."""

from __future__ import annotations

import subprocess
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class TrackedFiles(BuildHookInterface):
    """Names every tracked file; hatch alone takes whatever .gitignore does not name."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Raise subprocess.CalledProcessError outside of a git clone."""
        listed = subprocess.run(
            ["git", "ls-files", "-z"],  # noqa: S607
            cwd=self.root,
            capture_output=True,
            text=True,
            check=True,
        )
        tracked = filter(None, listed.stdout.split("\0"))
        build_data["force_include"] |= {path: path for path in tracked}
