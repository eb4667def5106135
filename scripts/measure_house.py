#!/usr/bin/env python3
"""How much of flowrl a reader has to pass: `measure_house.py [--json] [--no-walk]`.

Counts what grows unnoticed: lines and files, imports that form a circle, one name for two classes,
short modules, and the files through which a run, an expert and a user's request travel.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "flowrl"
SHORT = 80  # lines; a module below says in its first line why it stands alone
LONGEST_MODULE, LONGEST_FUNCTION = 500, 50  # lines, as CONTRIBUTING.md says
REASONS = ("alone", "face", "leaf", "program", "protocol", "interface")
ARRAY_ROOMS = ("networks", "ppo", "envs", "games", "averaging", "replicas", "multiagent")
SHAPE = re.compile(
    r"\[[A-Z…\d][^\]\n]*\]|`\[[a-z][^\]\n]*\]`|\[\]|"
    r"\bscalars?\b|any shape|same shape|of shapes?\b"
)
# Words with one meaning each, the rooms that may use them, and names that the user's documents fix.
RESERVED = {
    "judge": ("judging",),
    "trial": ("tuning",),
    "sweep": ("tuning",),
    "policy": ("networks", "ppo", "evaluation"),
}
FIXED_NAMES = {"merge_policy", "policies", "policies_folder", "expert_policy"}
REQUEST_TYPES = {"Request", "Verb", "Asked", "Answer", "ControlRequest", "Response"}
EXPERT_FACTS = {"sha256", "content", "shapes", "version", "frames", "acted", "skill"}


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    path: Path
    name: str  # dotted
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """The package, or the module at the top, in which the file lies."""
        return self.name.split(".")[1] if "." in self.name else ""

    @property
    def lines(self) -> int:
        """Lines of the file, blank ones counted."""
        return self.text.count("\n")

    def definitions(self) -> Iterator[ast.ClassDef | ast.FunctionDef]:
        """Classes and functions at any depth."""
        return (n for n in ast.walk(self.tree) if isinstance(n, ast.ClassDef | ast.FunctionDef))


def modules(package: Path = PACKAGE) -> list[Module]:
    """All modules but the library's skill files."""
    found = []
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package)
        if "library" in inside.parts:
            continue
        words = ("flowrl", *inside.with_suffix("").parts)
        name = ".".join(words[:-1] if words[-1] == "__init__" else words)
        text = path.read_text()
        found.append(Module(path=path, name=name, text=text, tree=ast.parse(text)))
    return found


def circles(house: list[Module]) -> list[list[str]]:
    """Groups of files that import each other in a circle; imports for types are counted."""
    names = {module.name for module in house}
    arrows = {module.name: _imported(module, names) - {module.name} for module in house}
    reached = {name: _reach(name, arrows) for name in names}
    groups = {
        frozenset({name} | {other for other in reached[name] if name in reached[other]})
        for name in names
        if name in reached[name]
    }
    return sorted(sorted(group) for group in groups)


def _imported(module: Module, names: set[str]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in names else str(node.module))
    return found & names


def _reach(name: str, arrows: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    ahead = list(arrows[name])
    while ahead:
        other = ahead.pop()
        if other not in reached:
            reached.add(other)
            ahead += arrows[other]
    return reached


def classes_twice(house: list[Module]) -> list[str]:
    """Names of classes and type aliases that stand in two places or more."""
    counted = Counter(
        node.name
        for module in house
        for node in module.definitions()
        if isinstance(node, ast.ClassDef)
    )
    counted.update(name for module in house for name in _aliases(module.tree))
    return sorted(name for name, times in counted.items() if times > 1)


def _aliases(tree: ast.Module) -> Iterator[str]:
    """Type aliases and type variables at the top of a module: `Name = …`, `Name: TypeAlias = …`."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else ()
        if isinstance(node, ast.AnnAssign):
            targets = (node.target,)
        for name in (each.id for each in targets if isinstance(each, ast.Name)):
            if re.fullmatch(r"[A-Z]\w*[a-z]\w*", name):
                yield name


def too_long(house: list[Module]) -> list[str]:
    """Modules and functions with more lines than CONTRIBUTING.md admits."""
    functions = (
        (f"{module.name}:{node.name}", (node.end_lineno or 0) - node.lineno + 1)
        for module in house
        for node in module.definitions()
        if isinstance(node, ast.FunctionDef)
    )
    found = [module.name for module in house if module.lines > LONGEST_MODULE]
    return found + [name for name, lines in functions if lines > LONGEST_FUNCTION]


def short_without_reason(house: list[Module]) -> list[str]:
    """Modules below `SHORT` lines whose first line does not say why they stand alone."""
    return [
        module.name
        for module in house
        if module.lines < SHORT
        and not module.path.name.startswith("__")
        and not any(word in _first_line(module.tree).lower() for word in REASONS)
    ]


def _first_line(node: ast.Module | ast.FunctionDef | ast.ClassDef) -> str:
    return (ast.get_docstring(node) or "").partition("\n")[0]


def array_functions(house: list[Module]) -> tuple[list[str], list[str]]:
    """Public functions over arrays whose docstring says shapes, and those whose does not."""
    says, silent = [], []
    for module in house:
        if module.room not in ARRAY_ROOMS and module.name != "flowrl.evaluation":
            continue
        for node in _public_functions(module.tree):
            if _takes_arrays(node):
                doc = ast.get_docstring(node) or ""
                (says if SHAPE.search(doc) else silent).append(f"{module.name}.{node.name}")
    return says, silent


def _public_functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node


def _takes_arrays(node: ast.FunctionDef) -> bool:
    said = [arg.annotation for arg in (*node.args.args, *node.args.kwonlyargs)] + [node.returns]
    return any(
        item is not None and re.search(r"\bArray\b|ndarray", ast.unparse(item)) for item in said
    )


def expert_carriers(house: list[Module]) -> list[str]:
    """Dataclasses that name an expert or its version and say two or more facts of it."""
    found = []
    for module in house:
        for node in module.definitions():
            if isinstance(node, ast.ClassDef) and _is_record(node):
                fields = _fields(node)
                facts = fields & EXPERT_FACTS
                if len(facts) >= 2 and facts & {"sha256", "content", "shapes", "version"}:
                    found.append(f"{module.name}.{node.name}")
    return found


def _is_record(node: ast.ClassDef) -> bool:
    marks = [ast.unparse(item) for item in (*node.decorator_list, *node.bases)]
    return any(
        "dataclass" in mark or mark in ("NamedTuple", "Struct", "TypedDict") for mark in marks
    )


def _fields(node: ast.ClassDef) -> set[str]:
    return {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


def request_files(house: list[Module]) -> list[str]:
    """Files that name a type in which a user's request, `flowrl pause` say, travels."""
    return [module.name for module in house if REQUEST_TYPES & _names(module.tree)]


def _names(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            found.add(node.name)
    return found


def reserved_words(house: list[Module]) -> dict[str, list[str]]:
    """Reserved words in the names of modules, classes and functions of other rooms."""
    used: dict[str, list[str]] = {}
    for word, rooms in RESERVED.items():
        for module in house:
            if module.room in rooms:
                continue
            names = [module.path.stem, *(node.name for node in module.definitions())]
            for name in names:
                if name not in FIXED_NAMES and word in _words(name):
                    used.setdefault(word, []).append(f"{module.name}:{name}")
    return used


def _words(name: str) -> set[str]:
    parts = re.findall(r"[A-Z]?[a-z]+", name)
    return {part.lower().removesuffix("s") for part in parts}


def walk() -> list[str]:
    """Files entered in the scheduler from a run's end to the launch of the run that waits for it.

    Stand-in skills train in real tmux sessions on a server of their own.
    """
    sys.path.insert(0, str(ROOT / "scripts"))
    from scheduling_runs import Chain

    from flowrl.launchers.tmux import TmuxLauncher

    entered: list[tuple[float, str]] = []
    launched: list[float] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            entered.append((time.time(), frame.f_code.co_filename))

    class Launcher(TmuxLauncher):
        def launch(self, job: Any) -> Any:
            handle = super().launch(job)
            launched.append(time.time())
            return handle

    with tempfile.TemporaryDirectory(dir=ROOT) as name:
        chain = Chain(Path(name), pairs=2)
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            waits = chain.run(Launcher(f"house-{Path(name).name}"))
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
            server = f"house-{Path(name).name}"
            subprocess.run(["tmux", "-L", server, "kill-server"], check=False, capture_output=True)
    # Skills end and start in turn: A, B (which needs it), A, B.
    windows = [(chain.ended[number], launched[2 * number + 1]) for number in range(len(waits))]
    passed = [
        {file for when, file in entered if since <= when <= until} for since, until in windows
    ]
    longest = max(passed, key=len)
    return sorted(str(Path(file).relative_to(PACKAGE)) for file in longest)


def measures(*, with_walk: bool) -> dict[str, Any]:
    """All figures, and below `details` the names behind them."""
    house = modules()
    says, silent = array_functions(house)
    reserved = reserved_words(house)
    details: dict[str, Any] = {
        "circles": circles(house),
        "classes_twice": classes_twice(house),
        "short_without_reason": short_without_reason(house),
        "too_long": too_long(house),
        "request_files": request_files(house),
        "expert_carriers": expert_carriers(house),
        "array_functions_without_shapes": silent,
        "reserved_words": reserved,
    }
    figures: dict[str, Any] = {
        "lines": sum(module.lines for module in house),
        "files": len(house),
        **{
            name: len(details[name]) for name in details if name != "array_functions_without_shapes"
        },
        "shapes_percent": round(100 * len(says) / max(1, len(says) + len(silent))),
    }
    if with_walk:
        details["walk"] = walk()
        figures["walk"] = len(details["walk"])
    return {**figures, "details": details}


ROWS = {
    "lines": "lines of flowrl/ without skills/library",
    "files": "files",
    "circles": "circles among files",
    "classes_twice": "names of classes and type aliases that stand twice",
    "too_long": f"modules of > {LONGEST_MODULE} lines, functions of > {LONGEST_FUNCTION}",
    "short_without_reason": f"modules of < {SHORT} lines without a reason in the first line",
    "walk": "files entered from a run's end to its dependant's launch",
    "request_files": "files that a user's request passes",
    "expert_carriers": "dataclasses that carry an expert",
    "shapes_percent": "public array functions whose docstring says shapes, %",
    "reserved_words": "reserved words used for something else",
}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON, with the names behind it")
    parser.add_argument("--no-walk", action="store_true", help="launch nothing")
    args = parser.parse_args()
    found = measures(with_walk=not args.no_walk)
    if args.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return 0
    for key, what in ROWS.items():
        if key in found:
            sys.stdout.write(f"{found[key]:>7,}  {what}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
