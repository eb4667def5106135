"""One of flowrl's stories with a part of the library: of use to `bench_parallel.py`.

python scripts/training_some.py {bottomup,bottomup_parallel} SKILLS [FLAGS]

SKILLS are names with commas between them. Nothing else differs from `python -m flowrl.…`.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from flowrl.parallel import skill_sources
from flowrl.skills.skill import load_library


def main(story: str, names: str, *words: str) -> int:
    """Train them; returns the exit code."""
    wanted = names.split(",")

    def part_of_it(*where: Any, **how: Any) -> dict[str, Any]:
        library = load_library(*where, **how)
        return {name: library[name] for name in wanted}

    skill_sources.load_library = part_of_it
    return importlib.import_module(f"flowrl.{story}").main(words)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
