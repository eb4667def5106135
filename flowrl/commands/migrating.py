"""The command that brings a graph of the original research code over."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from flowrl.config import Activation


@dataclass(frozen=True, kw_only=True)
class Migrate:
    """Import experts of the original research code into a new graph.

    OLD is a graph folder of its parallel or its sequential code, or one checkpoint, a pickle or
    an Orbax folder, with all experts in one tree. It is neither unpickled nor changed, no link in
    it is followed, and of its code only skills that pass the gate are tried, as any skill is.

    Examples:
      flowrl migrate old/exp/bottom_up_parallel exp/migrated --dry_run
      flowrl migrate old/exp/bottom_up exp/migrated
      flowrl migrate old/exp/bottom_up exp/migrated --json | jq '.experts[].name'
    """

    old: tyro.conf.Positional[Path]
    """What to import; it stays as it is."""
    new: tyro.conf.Positional[Path]
    """Folder of the new graph; it must not exist, or be empty."""
    dry_run: bool = False
    """Say what would be done, and write nothing."""
    activation: Activation | None = None
    """Activation of the old networks, where their config.yaml leaves a doubt."""
    json: bool = False
    """Print JSON instead of a table."""

    def __call__(self) -> int:
        """Run the command."""
        from flowrl.migration import report  # it loads jax

        return report.run(
            self.old,
            self.new,
            dry_run=self.dry_run,
            as_json=self.json,
            activation=self.activation,
        )
