"""Whatever a skill file holds: the gate admits what reaches nothing, or says why it does not."""

from __future__ import annotations

import ast
import random
import re
from pathlib import Path

import pytest

from flowrl.errors import FlowrlError
from flowrl.skills.skill import Skill, load_skill
from flowrl.skills.validation.allowed import CALLS, MODULES
from tests.skills import hostile

FILES = Path(__file__).parents[1] / "data" / "honest_skills.txt"
HONEST = re.split(r"^=== \w+\n", FILES.read_text(), flags=re.MULTILINE)[1:]
REACHING = (ast.Import, ast.ImportFrom, ast.Lambda, ast.While, ast.Global, ast.With, ast.ClassDef)
TEXTS = (str, bytes, complex)
BASES = HONEST + [text for text in hostile.BY_SYNTAX.values() if isinstance(text, str)]
PIECES = (
    "9" * 400,
    "0x" + "f" * 4_000,
    "9" * 400 + "+1j",
    "1e999",
    "-1e999",
    "1j",
    "0o7",
    "1_0",
    "...",
    "'x'",
    '"',
    "'''",
    "b'x'",
    "f'{n!r:>{n}}'",
    "f'{1+f\"{2}\"}'",
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    "[" * 70,
    "range(9223372036854775808)",
    "range(0, 18446744073709551615)",
    "{**n}",
    "{1: n}",
    "{'a': n}['a']",
    "[i for i in (1, 2)]",
    "(i for i in range(3))",
    "*n",
    "**n",
    "lambda: n",
    "n if n else n",
    "n and n",
    "not n",
    "1 < n < 3",
    "n in {1: 2}",
    "n := 1",
    "~n",
    "@",
    "open",
    "__import__('os')",
    "jnp",
    "jax",
    "jnp.sum",
    "jnp.load",
    "n.__class__",
    "n._x",
    "_x",
    "abs",
    "task_reward",
    "BlockType",
    "BlockType.TREE",
    "BlockType.TREE.value",
    "inventory.wood",
    "n",
    "\nimport os\n",
    "\nx = n\n",
    "\nx: int = 1\n",
    "\ndef f(x):\n    return x\n",
    "\nglobal n\n",
    "\nasync ",
    "\n    def f(x):\n        return f(x)\n    x = f(1)\n",
    "\n    def f(x=n):\n        return x\n",
    "type X = n",
    "\0",
    "\x0c",
    "\x1b[2J",
    "\r",
    "\t",
    "\\",
    "\u202e",
    "\ufeff",
    "木",
    "ﬁ",
    "\N{GREEK SMALL LETTER ALPHA}",
    "name = 'x'\n",
    "gain = {'wood': 0x" + "f" * 99 + "}\n",
    "max_steps = -1\n",
    "training = {'lr': 1e999}\n",
    "ephemeral = [[]]\n",
    "requirements = {'wood': {}}\n",
    "provided_by = {1: 2}\n",
    "x, y = 1, 2\n",
    ";",
)


def mutated(draw: random.Random) -> bytes:
    """A file with pieces and words put before others or in their place, or with a part lost."""
    text = draw.choice(HONEST if draw.random() < 0.6 else BASES)
    for _ in range(draw.choice((1, 1, 2, 3))):
        words = list(re.finditer(r"\w+|[^\w\s]|\n", text)) or [re.match("", text)]
        word, other = draw.choice(words), draw.choice(words)
        piece = draw.choice(PIECES) if draw.random() < 0.5 else other.group()
        match draw.randrange(5):
            case 0:
                text = text[: word.start()] + piece + text[word.start() :]
            case 1:
                text = text[: word.start()] + text[word.start() + draw.randint(1, 20) :]
            case _:
                text = text[: word.start()] + piece + text[word.end() :]
    content = text.encode(errors="replace")
    if draw.random() < 0.05:
        place = draw.randrange(len(content) + 1)
        content = content[:place] + draw.randbytes(2) + content[place:]
    return content


def reaches(skill: Skill) -> list[str]:
    """What the functions of a skill could reach beyond arithmetic, by rules of this test's own."""
    found = []
    for function in (ast.parse(skill.is_done).body[0], ast.parse(skill.reward).body[0]):
        parts = list(ast.walk(function))
        helpers = {part.name for part in parts[1:] if isinstance(part, ast.FunctionDef)}
        harmless = {id(part.body[0].value) for part in _documented(function)}
        harmless |= {id(key) for part in parts for key in _unread(part)}
        roots = {id(part.value) for part in parts if isinstance(part, ast.Attribute)}
        called = {id(part.func) for part in parts if isinstance(part, ast.Call)}
        found += [part for part in parts if isinstance(part, REACHING)]
        attributes = [part for part in parts if isinstance(part, ast.Attribute)]
        found += [part for part in attributes if part.attr[0] == "_" or "__" in part.attr]
        texts = [part for part in parts if isinstance(getattr(part, "value", 0), TEXTS)]
        found += [part for part in texts if id(part) not in harmless]
        for part in (part for part in parts if isinstance(part, ast.Name)):
            is_module, is_helper = part.id in MODULES, part.id in helpers
            may_be_called = part.id in CALLS | helpers | {"range"}
            if (is_module and id(part) not in roots) or (is_helper and id(part) not in called):
                found.append(part)
            if id(part) in called and not may_be_called:
                found.append(part)
    return [ast.unparse(part) for part in found]


def _documented(function: ast.FunctionDef) -> list[ast.FunctionDef]:
    inner = [part for part in ast.walk(function) if isinstance(part, ast.FunctionDef)]
    return [part for part in inner if ast.get_docstring(part) is not None]


def _unread(part: ast.AST) -> list[ast.expr | None]:
    match part:
        case ast.Dict(keys=keys):
            return keys
        case ast.Subscript(slice=key):
            return [key]
        case ast.arg(annotation=note) | ast.AnnAssign(annotation=note) if note:
            return [each for each in ast.walk(note) if isinstance(each, ast.expr)]
        case ast.FunctionDef(returns=note) if note:
            return [each for each in ast.walk(note) if isinstance(each, ast.expr)]
    return []


def loaded(path: Path) -> Skill | str:
    try:
        return load_skill(path)
    except FlowrlError as error:
        return str(error)


@pytest.mark.parametrize(
    ("seed", "files"),
    [(1, 400), pytest.param(2, 20_000, marks=pytest.mark.slow)],
    ids=["some", "twenty thousand"],
)
def test_a_generated_file_is_refused_in_one_line_or_reaches_nothing(tmp_path, seed, files):
    draw, path, admitted = random.Random(seed), tmp_path / "skill.py", 0
    for _ in range(files):
        path.write_bytes(mutated(draw))
        skill = loaded(path)
        if isinstance(skill, str):
            assert re.fullmatch(rf"{re.escape(str(path))}:\d+: .+; .+", skill), skill
            assert skill.isprintable(), repr(skill)
            continue
        admitted += 1
        assert reaches(skill) == [], path.read_text()
        assert Skill.from_json(skill.to_json()) == skill, path.read_text()
    assert admitted > files / 50, "otherwise this looks at nothing but syntax errors"
