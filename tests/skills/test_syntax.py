"""The syntax check admits arithmetic over features and refuses everything else."""

from __future__ import annotations

import ast
import math
import re
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.errors import CodeRefusedError
from flowrl.games.base import COUNT
from flowrl.games.craftax import CLASSIC, FULL
from flowrl.skills.validation.execution import execute_functions
from flowrl.skills.validation.syntax import (
    check_function,
    check_skill_source,
    parse_source,
)
from tests.skills import honest
from tests.skills.making import IS_DONE, skill_text

GAMES = (CLASSIC, FULL)
ALL = ", ".join([COUNT, *CLASSIC.features])


def reward(body: str, parameters: str = ALL) -> str:
    lines = body.strip("\n").splitlines()
    return f"def task_reward({parameters}):\n" + "\n".join(f"    {line}" for line in lines)


def test_another_games_items_change_nothing_for_the_skills_of_a_game():
    words = frozenset({"where", "lax", "select", "clip", "size", "value", "astype", "float32"})
    other = replace(CLASSIC, name="Other-v1", items=words, enums={}, features={"cell": "int"})
    for body in honest.REWARDS.values():
        check_skill_source(skill_text(reward=reward(body)), "skill.py", games=(CLASSIC, other))
    text = skill_text(reward=reward("return inventory.lax", "inventory"))
    with pytest.raises(CodeRefusedError, match=r"inventory\.lax is not in Craftax-Classic"):
        check_skill_source(text, "skill.py", games=(CLASSIC,))
    text = skill_text(reward=reward("return cell * 1.0", "cell"))
    with pytest.raises(CodeRefusedError, match="'cell', which is not a feature of Craftax-Classic"):
        check_skill_source(text, "skill.py", games=(CLASSIC,))


HOSTILE = {
    "class walk": "return ().__class__.__bases__[0].__subclasses__()",
    "globals": "return task_reward.__globals__",
    "print": "print(1)\nreturn 0",
    "jnp save": "return jnp.save('x', n)",
    "debug callback": "return jax.debug.callback(abs, n)",
    "profiler": "return jax.profiler.start_trace('x')",
    "jax config": "return jax.config.update('x', 1)",
    "numpy through jnp": "return jnp.numpy.load",
    "private": "return jax._src",
    "private attribute": "return inventory._replace",
    "wide letters": "return inventory.__ｃｌａｓｓ__",
    "mangled": "return inventory.a__b",
    "a generator's frame": "g = (i for i in range(2))\nreturn g.gi_frame.f_globals",
    "a private attribute of a local": "x = n\nreturn x._x",
    "a function as a value": "def f(x):\n    return x\nreturn f",
    "a function's code": "def f(x):\n    return x\nreturn f.__code__",
    "a function given another meaning": "def f(x):\n    return x\nf = n\nreturn f(1)",
    "a function in an if": "if n:\n    def f(x):\n        return x\nreturn 0",
    "a decorated function": "@jax.jit\ndef f(x):\n    return x\nreturn f(1)",
    "a function named as itself": "def task_reward(x):\n    return x\nreturn task_reward(1)",
    "a dunder function": "def __f(x):\n    return x\nreturn __f(1)",
    "a function of nothing": "def f(x):\n    y = x\nreturn f(1)",
    "a type's method": "return float.fromhex(n)",
    "a number's bytes": "return int.from_bytes",
    "annotated alone": "x: int\nreturn 0",
    "enum walk": "return BlockType.TREE",
    "enum internals": "return BlockType.mro.value",
    "unknown attribute": "return inventory.wod",
    "array file": "return player_intrinsics.tofile(n)",
    "array bytes": "return player_intrinsics.tobytes()",
    "array shape": "return len(player_intrinsics.shape * 1000000)",
    "method as a value": "return player_intrinsics.sum",
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_hostile_code_is_refused_with_its_line_and_a_remedy(body):
    text = skill_text(reward=reward(body))
    with pytest.raises(CodeRefusedError, match=r"^skill\.py:\d+: .+; .+$") as caught:
        check_skill_source(text, "skill.py", games=GAMES)
    line = int(str(caught.value).split(":")[1])
    first = text[: text.index("def task_reward")].count("\n") + 1
    assert line >= first


@pytest.mark.parametrize(
    "signature",
    [
        "def task_reward(state):",
        "def task_reward(n, *args):",
        "def task_reward(**kwargs):",
        "def task_reward(*, n):",
        "def task_reward(n, /):",
        "def task_reward(n: open('x')):",
        "def task_reward(n) -> open('x'):",
        "def task_reward(n=open('x')):",
        "def task_reward(n=0):",
        "def task_reward(n=True):",
        "def task_reward(inventory=1, n=1):",
        "def task_reward(inventory=1):",
        "@jax.jit\ndef task_reward(n):",
        "async def task_reward(n):",
    ],
)
def test_a_signature_asks_for_features_by_name_and_nothing_more(signature):
    with pytest.raises(CodeRefusedError):
        check_skill_source(skill_text(reward=f"{signature}\n    return 0"), "skill.py", games=GAMES)


def test_the_count_may_stand_as_the_default_of_n():
    check_skill_source(
        skill_text(reward="def task_reward(n=3):\n    return n"), "skill.py", games=GAMES
    )


@pytest.mark.parametrize(
    "head",
    [
        "import os\n",
        "helper = 1\n",
        "x, y = 1, 2\n",
        "x, y = 1, 2, 3\n",
        "x = y = 1\n",
        "description = open('x')\n",
        "description = f'{1}'\n",
        "description = 'a' * 9\n",
        "def helper():\n    return 0\n",
        "class A:\n    pass\n",
        "if 1:\n    pass\n",
        "'another text'\n",
        "description: str\n",
        "description: open('x') = 'x'\n",
        "description = 0x" + "f" * 4_000 + "\n",
        "description = " + "9" * 400 + " + 1j\n",
        "from jax import numpy as jnp\n",
        "import jax.numpy\n",
        "import jax, os\n",
        "requirement = {'wood': 1}\n",
        "def gain():\n    return 0\n",
        "_secret = 1\n",
        "task_is_done = 1\n",
    ],
)
def test_a_file_holds_constants_and_two_functions_only(head):
    with pytest.raises(CodeRefusedError, match=r"^skill\.py:2: "):
        check_skill_source(skill_text(head=head), "skill.py", games=GAMES)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x = (", "never closed"),
        ("x\0", "not readable|null"),
        ("x = " + "(" * 5_000, "too many nested|not readable"),
        ("x = " + "-" * 9_000 + "1", "levels|not readable"),
        ("#" * 20_001, "20001 bytes are over 20000"),
        ("x = [" + "1," * 4_000 + "]", "over 4000 nodes"),
        ("x = " + "[" * 61 + "]" * 61, "60 levels"),
        ("", "gain is missing"),
    ],
    ids=["torn", "null", "parentheses", "minuses", "long", "wide", "deep", "empty"],
)
def test_a_text_is_bounded_before_it_is_looked_at(text, complaint):
    with pytest.raises(CodeRefusedError, match=complaint):
        check_skill_source(text, "skill.py", games=GAMES)


def test_a_generated_modules_functions_pass_one_by_one():
    text = IS_DONE.replace("task_is_done(inventory, n)", "task_0_is_done(inventory, n=3)")
    [function] = parse_source(text * 1, "2.py", limit_bytes=2_000_000).body
    assert isinstance(function, ast.FunctionDef)
    check_function(function, "2.py", game=CLASSIC)


def test_a_refusal_says_what_may_be_asked_for():
    with pytest.raises(CodeRefusedError, match=re.escape(ALL)):
        check_skill_source(
            skill_text(is_done="def task_is_done(stat):\n    return 0"), "x.py", games=GAMES
        )


LEAKS = {
    "the least key": 'return min({"%s": 1})',
    "keys that come apart": 'k, j = {"%s": 1, "b": 2}\nreturn k',
    "keys that join a list": 'keys = []\nkeys += {"%s": 1}\nreturn keys[0]',
    "a key of a helper": 'def f(x):\n    return max({"%s": x})\nreturn f(1)',
}


@pytest.mark.parametrize("body", LEAKS.values(), ids=LEAKS)
def test_no_text_is_there_when_a_function_runs(body):
    """Text could be formatted, and so tell a trace from a run: it is a number instead."""
    source = reward(body, "n")
    [function] = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    check_function(function, "skill.py", game=CLASSIC)
    [call] = execute_functions([function], CLASSIC, place="skill.py")
    assert isinstance(call(1), int)
    assert ast.unparse(function) == ast.unparse(ast.parse(source)), "the digest is of this"


def test_a_dict_by_names_is_the_same_with_numbers():
    body = '"""wood"""\nweights = {"wood": 2, "stone": 3, 1: 5}\n'
    body += 'return weights["wood"] * weights["stone"] * weights[1]'
    calls = [
        execute_functions(ast.parse(reward(each, "n")).body, CLASSIC, place="skill.py")[0]  # type: ignore[arg-type]
        for each in (body, body.replace('"""wood"""\n', ""))
    ]
    assert [call(1) for call in calls] == [30, 30]


def test_a_constant_may_stand_below_the_helper_that_uses_it():
    head = "def f(x):\n    return x * K\nK = 2\n"
    text = skill_text(head=head, reward="def task_reward(n):\n    return f(n)")
    function = check_skill_source(text, "x.py", games=GAMES).body[-1]
    written = ast.parse(ast.unparse(function)).body
    [call] = execute_functions(written, CLASSIC, place="x.py")  # type: ignore[arg-type]
    assert call(3) == 6


def test_a_constant_with_a_features_name_is_refused_as_that():
    text = skill_text(head="n = 3\n", reward="def task_reward():\n    return n * 1.0")
    with pytest.raises(CodeRefusedError, match=r"x\.py:2: n is the name of a feature; choose an"):
        check_skill_source(text, "x.py", games=GAMES)


@settings(max_examples=300)
@given(data=st.data())
def test_constant_arithmetic_is_refused_exactly_when_a_value_is_too_large(data):
    """A random expression of literals and of names for them, against Python's own arithmetic."""
    names = [f"k{number}" for number in range(data.draw(st.integers(0, 3)))]
    literals = st.integers(0, 99).map(str) | st.floats(0.5, 9.0).map(repr)
    lines, known = [], {}
    for number, name in enumerate([*names, "value"]):
        leaf = literals | st.sampled_from(names[:number]) if number else literals
        term = st.recursive(
            leaf,
            lambda part: st.tuples(part, st.sampled_from(["+", "-", "*", "**"]), part).map(
                lambda three: f"({' '.join(three)})"
            ),
            max_leaves=4,
        )
        lines.append(f"{name} = {data.draw(term)}")
    too_large = False
    for line in lines:
        name, _, expression = line.partition(" = ")
        known[name], large = value_of(ast.parse(expression, mode="eval").body, known)
        too_large |= large
    body = "\n".join([*lines, "return value"])
    began = time.monotonic()
    try:
        check_function(ast.parse(reward(body)).body[0], "place", game=CLASSIC)
        refused = ""
    except CodeRefusedError as error:
        refused = str(error)
    assert time.monotonic() - began < 1
    assert ("a number over 64 bits" in refused) is too_large, body


def value_of(node, known):
    """The value of an expression, None where Python has none, and whether a part is too large."""
    match node:
        case ast.Constant(value=value):
            return value, False
        case ast.Name(id=name):
            return known[name], False
        case ast.BinOp(left=left, op=op, right=right):
            (first, large), (second, larger) = value_of(left, known), value_of(right, known)
            if large or larger or first is None or second is None:
                return None, large or larger
            if isinstance(op, ast.Pow) and abs(first) > 1 and second * math.log2(abs(first)) > 64:
                return None, True
            signs = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Pow: "**"}
            try:
                value = eval(f"({first!r}) {signs[type(op)]} ({second!r})")
            except ArithmeticError:
                return None, False
            if isinstance(value, complex):
                return None, False
            return (None, True) if abs(value) >= 2**64 else (value, False)


def test_no_refusal_names_a_class_of_pythons_syntax_tree():
    """Each statement and expression of Python's grammar, as far as a function may hold it."""
    bodies = [
        "print(1)",
        "class A:\n    pass",
        "f = lambda: 1",
        "x = {1}",
        "x = f'{n}'",
        "x = n << 1",
    ]
    bodies += [
        "async def f():\n    pass",
        "x = yield",
        "x = await n",
        "import os",
        "del n",
        "x = *n, 1",
    ]
    bodies += ["with n:\n    pass", "try:\n    pass\nfinally:\n    pass", "while n:\n    pass"]
    bodies += ["raise n", "assert n", "global n", "match n:\n    case _:\n        pass", "(x := 1)"]
    bodies += ["x = n @ n", "x = {k: 1 for k in (1, 2)}", "n", "n.wood = 1", "x = n is None"]
    classes = {kind.__name__ for kind in (*ast.stmt.__subclasses__(), *ast.expr.__subclasses__())}
    for body in bodies:
        with pytest.raises(CodeRefusedError) as refused:
            check_function(ast.parse(reward(f"{body}\nreturn 1.0")).body[0], "f", game=CLASSIC)
        assert not classes & set(re.findall(r"\w+", str(refused.value))), refused.value
