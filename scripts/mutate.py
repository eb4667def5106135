#!/usr/bin/env python3
"""Which faults in the pure core no test notices: `mutate.py [--most N] [--only MODULE]`.

Changes one operator, number or condition at a time in a copy of the tree (cosmic-ray, of the extra
`dev`), runs the tests that are to notice it, and prints the changes that survive. By hand: a full
run takes half an hour.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A module of the pure core, and the tests that ask what it does.
TESTS = {
    "flowrl/ppo/metrics.py": ["tests/ppo/test_metrics.py"],
    "flowrl/ppo/gae.py": ["tests/ppo/test_gae.py"],
    "flowrl/skills/planner.py": ["tests/skills/test_planner.py", "tests/skills/test_graph.py"],
    "flowrl/experts/merge.py": ["tests/experts/test_merge.py", "tests/experts/test_merge_rules.py"],
    "flowrl/runs.py": ["tests/test_remapping.py"],
    "flowrl/parallel/outcomes.py": [
        "tests/parallel/test_outcomes.py",
        "tests/parallel/test_scheduler_ends.py",
        "tests/parallel/test_isolation.py",
        "tests/parallel/test_limits.py",
    ],
    "flowrl/parallel/state.py": ["tests/parallel/test_transitions.py"],
    "flowrl/parallel/transitions.py": [
        "tests/parallel/test_transitions.py",
        "tests/parallel/test_scheduler.py",
        "tests/parallel/test_scheduler_ends.py",
        "tests/parallel/test_requests.py",
    ],
}
# The rest of these modules is no algorithm.
ONLY_CLASS = {"flowrl/runs.py": "Remapping", "flowrl/parallel/state.py": "Slots"}
# Left out: operators that no one writes by mistake, and `is` for `==`, which is often the same.
LEFT_OUT = re.compile(r"_(Bit\w+|[LR]Shift|Pow|Mod|FloorDiv|Is|IsNot|Invert|UAdd)$|RemoveDecorator")
TIMEOUT_SECONDS = 180.0


def main() -> int:
    """Mutate, test and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=40, help="mutants of each module at most")
    parser.add_argument("--only", default="", help="modules whose path contains this")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    args = parser.parse_args()
    found = {
        module: mutate(module, tests, most=args.most)
        for module, tests in TESTS.items()
        if args.only in module
    }
    total = {"killed": 0, "survived": 0}
    for module, figures in found.items():
        sys.stdout.write(f"{module}: {figures['killed']} killed, {len(figures['survivors'])} not\n")
        sys.stdout.writelines(f"{diff}\n" for diff in figures["survivors"])
        total["killed"] += figures["killed"]
        total["survived"] += len(figures["survivors"])
    share = total["killed"] / max(1, sum(total.values()))
    sys.stdout.write(f"{total['killed']} of {sum(total.values())} killed: {100 * share:.0f} %\n")
    if args.json:
        args.json.write_text(json.dumps({**total, "modules": found}, indent=2) + "\n")
    return 0


def mutate(module: str, tests: list[str], *, most: int) -> dict:
    """Test mutants of one module, drawn with a fixed seed."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "copy"
        left = shutil.ignore_patterns(".venv", ".git", "exp", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, copy, ignore=left)
        (copy / "exp").mkdir()
        session, config = Path(name) / "session.sqlite", Path(name) / "config.toml"
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        config.write_text(
            f'[cosmic-ray]\nmodule-path = "{module}"\ntimeout = {TIMEOUT_SECONDS}\n'
            f'excluded-modules = []\ntest-command = "env PYTHONPATH=. {" ".join(command)}"\n'
            '[cosmic-ray.distributor]\nname = "local"\n'
        )
        cosmic_ray = [str(Path(sys.executable).with_name("cosmic-ray"))]
        subprocess.run([*cosmic_ray, "init", str(config), str(session)], cwd=copy, check=True)
        _sample(session, copy / module, _rows(module), most)
        subprocess.run([*cosmic_ray, "exec", str(config), str(session)], cwd=copy, check=True)
        dump = [*cosmic_ray, "dump", str(session)]
        lines = subprocess.run(dump, check=True, capture_output=True, text=True).stdout.splitlines()
    results = [json.loads(line)[1] for line in lines]
    survivors = [item["diff"] for item in results if item["test_outcome"] == "survived"]
    return {"killed": len(results) - len(survivors), "survivors": survivors}


def _sample(session: Path, module: Path, rows: range, most: int) -> None:
    """Keep so many mutants, drawn by what they change, so that two runs test the same ones."""
    source = module.read_text().splitlines()
    with sqlite3.connect(session) as database:
        ranked = [
            job
            for job, operator, row in database.execute(
                "select job_id, operator_name, start_pos_row from mutation_specs "
                "order by operator_name, start_pos_row, start_pos_col, occurrence"
            )
            if not LEFT_OUT.search(operator) and row in rows and "@dataclass" not in source[row - 1]
        ]
        kept = random.Random(0).sample(ranked, min(most, len(ranked)))
        marks = ", ".join("?" * len(kept))
        for table in ("mutation_specs", "work_items"):
            database.execute(f"delete from {table} where job_id not in ({marks})", kept)


def _rows(module: str) -> range:
    """The lines of a module that are mutated."""
    source = (ROOT / module).read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == ONLY_CLASS.get(module):
            return range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return range(1, source.count("\n") + 1)


if __name__ == "__main__":
    raise SystemExit(main())
