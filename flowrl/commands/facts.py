"""`flowrl facts`: the rules of a game, as the game itself says; alone, as every command is."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from flowrl import storage
from flowrl.console import print_report
from flowrl.knowledge.asking import facts_of
from flowrl.knowledge.pages import page_of
from flowrl.output import check_output
from flowrl.storage import records


@dataclass(frozen=True, kw_only=True)
class FactsCommand:
    """Show a game's rules: what each action needs, uses and yields.

    Examples:
      flowrl facts Craftax-Symbolic-v1
      flowrl facts Craftax-Classic-Symbolic-v1 --json | jq '.recipes[].action'
      flowrl facts Craftax-Symbolic-v1 -o craftax.md
    """

    game: tyro.conf.Positional[str]
    """The game's name; its actions are probed the first time, which takes up to a minute."""
    json: bool = False
    """Print JSON, not Markdown."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Write the Markdown to this file instead."""

    def __call__(self) -> int:
        """Print or write the facts; returns 0."""
        if self.output is not None:
            check_output(self.output, endings=(".md",))
        facts = facts_of(self.game)
        page, told = page_of(facts), records.to_json(facts)
        if self.output is not None:
            storage.make_dir(self.output.parent)
            storage.write_atomic(self.output, page)
            line = f"{self.output}: {len(facts.recipes)} recipes"
            print_report(told, [line], as_json=self.json)
        elif self.json:
            print_report(told, (), as_json=True)
        else:
            sys.stdout.write(page)
        return 0
