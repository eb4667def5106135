"""Records edited by hand, sealed again: what a test means to break is then all that is broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowrl.storage import records


def reseal(path: Path) -> None:
    """Give a record the seal of what it says now."""
    path.write_text(json.dumps(records.sealed(json.loads(path.read_text())), indent=2) + "\n")


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the facts of a record in place, and seal it again."""
    facts = json.loads(path.read_text())
    change(facts)
    path.write_text(json.dumps(facts, indent=2) + "\n")
    reseal(path)


def edit(path: Path, old: str, new: str) -> None:
    """Replace a piece of a record's text, and seal it again."""
    text = path.read_text()
    assert old in text, f"{path} does not hold {old!r}"
    path.write_text(text.replace(old, new))
    reseal(path)
