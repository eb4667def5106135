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
from flowrl.skills.validation.syntax import check_function, check_skill_source, parse_source
from tests.skills.making import IS_DONE, skill_text
from tests.waiting import limit

GAMES = (CLASSIC, FULL)
ALL = ", ".join([COUNT, *CLASSIC.features])
ONCE = ", ".join(name for name in ALL.split(", ") if not name.endswith(("_prev", "_diff")))
LONG = """inventory, inventory_diff, closest_blocks, closest_blocks_prev, player_intrinsics,
    player_intrinsics_diff, achievements, achievements_diff, n"""


def reward(body: str, parameters: str = ALL) -> str:
    lines = body.strip("\n").splitlines()
    return f"def task_reward({parameters}):\n" + "\n".join(f"    {line}" for line in lines)


HONEST = {
    "a diff": "return inventory_diff.wood",
    "a docstring": '"""Reward for wood."""\nreturn inventory_diff.wood',
    "a distance": "return jnp.linalg.norm(closest_blocks[BlockType.TREE.value, :, 0])",
    "where": "return jnp.where(inventory_diff.wood > 0, 1.0, 0.0)",
    "select": "return jax.lax.select(inventory_diff.wood > 0, 1.0, 0.0)",
    "logic": "return jnp.logical_and(inventory.wood > 0, inventory.stone > 0).astype(jnp.float32)",
    "constants choose": "if n > 3:\n    a = 1\nelif n > 1:\n    a = 2\nelse:\n    a = 0\nreturn a",
    "locals": "now = inventory.wood\nbefore = now - inventory_diff.wood\nreturn now - before",
    "augmented": "total = 0.0\ntotal += inventory_diff.wood\ntotal *= 2\nreturn total",
    "a ternary": "return 1.0 if n > 1 else inventory_diff.wood * 0.5",
    "a short loop": "t = 0.0\nfor i in range(5):\n    t += closest_blocks[3, 0, i]\nreturn t",
    "nested loops": "t = 0\nfor i in range(2):\n    for j in range(5):\n        t += j\nreturn t",
    "two targets": "a, b = closest_blocks[5, 0, 0], closest_blocks[5, 1, 0]\nreturn abs(a) + b",
    "powers": "return inventory.wood ** 2 - 2 ** -1 + n ** 0.5",
    "masks": "return ((inventory.wood > 0) & ~(inventory.stone > 1) | (n > 3)) * 1.0",
    "achievements": "return achievements_diff[Achievement.EAT_COW.value] * 1.0",
    "an update": "return closest_blocks.at[0, 0, 0].set(1.0).sum()",
    "array methods": "return closest_blocks[5].min(axis=0).clip(0, 9).mean()",
    "small arrays": "w = jnp.array([1.0, 2.0])\nreturn jnp.zeros((2, 3)).sum() + jnp.sum(w)",
    "stacked": "return jnp.max(jnp.stack([inventory.wood, inventory.stone]))",
    "chained comparison": "return 1.0 * (0 < n <= 9)",
    "builtins": "return float(max(min(abs(n), 3), 1)) + len(player_intrinsics)",
    "clipping": "return jnp.clip(env_reward + health_penalty, -1, 1)",
    "everything asked": "return 0.0",
    "slices": "return player_intrinsics[1:3].sum() + closest_blocks[..., 0].sum()",
    "a local of a later builtin": "sum = inventory_diff.wood\nreturn sum * 1.0",
    "a local of the other function": "task_is_done = n > 1\nreturn task_is_done * 1.0",
    "a helper": "def f(x, k=2):\n    return k * x\nreturn f(inventory.wood)",
    "helpers of helpers": (
        "def f(x):\n    return 2 * x\ndef g(x):\n    y = f(x)\n    return y + 1\n"
        "return g(inventory.wood) + f(1)"
    ),
    "a dict": "w = {1: 0.5, 2: 0.25}\nreturn w[n] if n < 3 else 0.0",
    "a dict of words": "w = {'wood': 0.5}\nreturn w['wood'] * inventory_diff.wood",
    "a dict of blocks": "w = {BlockType.TREE.value: 0.5}\nreturn w[BlockType.TREE.value]",
    "comprehensions": "return sum([0.1 * i for i in range(3)]) + sum(i for i in (1, 2))",
    "underscores": "def _f(_x):\n    return _x\nfor _ in range(2):\n    pass\nreturn _f(1)",
    "a key that is there": "return 1.0 if n in {1: 2} else 0.5",
    "annotations": "x: float = 1.0\nreturn x",
    "a range from to": "t = 0\nfor i in range(1, 9, 2):\n    t += i\nreturn t",
    "a loop over a list": "t = 0\nfor k in (BlockType.TREE.value, 3):\n    t += k\nreturn t",
    "a sum": "return sum([inventory.wood, inventory.stone]) * 1.0",
    "types": "return inventory.wood.astype(float) + inventory.stone.astype(int)",
    "rounding": "return env_reward.round()",
    "membership": "return jnp.isin(closest_blocks[3, 0, 0], jnp.array([3, 5])).astype(float)",
    "a power": "return jnp.power(inventory.wood, 2) * 0.1",
    "nn": "return jax.nn.sigmoid(jnp.tanh(jnp.exp(-env_reward)))",
}


def test_another_games_items_change_nothing_for_the_skills_of_a_game():
    words = frozenset({"where", "lax", "select", "clip", "size", "value", "astype", "float32"})
    facts = {"items": words, "enums": {}, "features": {"cell": "int"}, "intrinsics": ()}
    other = replace(CLASSIC, name="Other-v1", **facts)
    for body in HONEST.values():
        check_skill_source(skill_text(reward=reward(body)), "skill.py", games=(CLASSIC, other))
    text = skill_text(reward=reward("return inventory.lax", "inventory"))
    with pytest.raises(CodeRefusedError, match=r"inventory\.lax is not in Craftax-Classic"):
        check_skill_source(text, "skill.py", games=(CLASSIC,))
    text = skill_text(reward=reward("return cell * 1.0", "cell"))
    with pytest.raises(CodeRefusedError, match="'cell', which is not a feature of Craftax-Classic"):
        check_skill_source(text, "skill.py", games=(CLASSIC,))


HOSTILE = {
    "import": "import os\nreturn 0",
    "from import": "from os import system\nreturn 0",
    "dunder import": "return __import__('os').system('id')",
    "class walk": "return ().__class__.__bases__[0].__subclasses__()",
    "globals": "return task_reward.__globals__",
    "eval": "return eval('1')",
    "exec": "return exec('1')",
    "open": "return open('/etc/passwd')",
    "getattr": "return getattr(jnp, 'load')",
    "vars": "return vars()",
    "print": "print(1)\nreturn 0",
    "type": "return type(n)",
    "jnp load": "return jnp.load('x')",
    "jnp save": "return jnp.save('x', n)",
    "jnp fromfile": "return jnp.fromfile('x')",
    "jnp as a value": "x = jnp\nreturn x.load",
    "jnp in a call": "return abs(jnp)",
    "jax as a value": "return [jax]",
    "a jnp function as a value": "f = jnp.sum\nreturn 0",
    "pure callback": "return jax.pure_callback(abs, n, n)",
    "debug callback": "return jax.debug.callback(abs, n)",
    "io callback": "return jax.experimental.io_callback(abs, n, n)",
    "profiler": "return jax.profiler.start_trace('x')",
    "jax config": "return jax.config.update('x', 1)",
    "numpy through jnp": "return jnp.numpy.load",
    "private": "return jax._src",
    "private attribute": "return inventory._replace",
    "wide underscore": "return inventory.＿＿class＿＿",
    "wide letters": "return inventory.__ｃｌａｓｓ__",
    "mangled": "return inventory.a__b",
    "format": "return '{0.__class__}'.format(n)",
    "f-string": "return f'{n.__class__}'",
    "percent": "return '%s' % n",
    "a string": "return 'x'",
    "bytes": "return b'x'",
    "complex": "return 1j",
    "lambda": "return (lambda: 0)()",
    "nested class": "class A:\n    pass\nreturn 0",
    "while": "while True:\n    pass\nreturn 0",
    "try": "try:\n    a = 1\nexcept ValueError:\n    a = 0\nreturn a",
    "raise": "raise ValueError",
    "with": "with n:\n    pass\nreturn 0",
    "del": "del n\nreturn 0",
    "assert": "assert n\nreturn 0",
    "global": "global x\nx = 1\nreturn 0",
    "nonlocal": "nonlocal x\nreturn 0",
    "walrus": "return (a := 1)",
    "a comprehension over features": "return [x for x in achievements]",
    "a long comprehension": "return [i for i in range(65)]",
    "a comprehension over jnp": "return sum(jnp for jnp in (1, 2))",
    "a comprehension that calls": "return [open('x') for i in range(2)]",
    "a generator's frame": "g = (i for i in range(2))\nreturn g.gi_frame.f_globals",
    "a private attribute of a local": "x = n\nreturn x._x",
    "a dunder local": "__x = n\nreturn __x",
    "builtins": "return __builtins__",
    "an underscored argument": "return jnp.sum(n, _x=1)",
    "set comprehension": "return {i for i in range(9)}",
    "dict comprehension": "return {i: i for i in range(9)}",
    "a merged dict": "return {**{}}",
    "text in a dict": "return {1: 'x'}[1]",
    "text elsewhere": "return ['x'][0]",
    "a feature's item by name": "return inventory['wood']",
    "a function that calls itself": "def f(x):\n    return f(x)\nreturn f(1)",
    "functions that call one another": (
        "def f(x):\n    return g(x)\ndef g(x):\n    return f(x)\nreturn f(1)"
    ),
    "a function as a value": "def f(x):\n    return x\nreturn f",
    "a function's code": "def f(x):\n    return x\nreturn f.__code__",
    "a function under another name": "def f(x):\n    return x\ng = f\nreturn g(1)",
    "a function given another meaning": "def f(x):\n    return x\nf = n\nreturn f(1)",
    "a function of the same name": (
        "def f(x):\n    return x\ndef f(x):\n    return f(x)\nreturn f(1)"
    ),
    "a function that is passed": "def f(x):\n    return x(1)\nreturn f(abs)",
    "a function in an if": "if n:\n    def f(x):\n        return x\nreturn 0",
    "a function that imports": "def f(x):\n    import os\n    return x\nreturn f(1)",
    "a default that acts": "def f(x=open('/x')):\n    return x\nreturn f()",
    "a decorated function": "@jax.jit\ndef f(x):\n    return x\nreturn f(1)",
    "a function of anything": "def f(*x):\n    return x\nreturn f(1)",
    "a function named jnp": "def jnp(x):\n    return x\nreturn jnp(1)",
    "a function named as itself": "def task_reward(x):\n    return x\nreturn task_reward(1)",
    "a parameter named abs": "def f(abs):\n    return abs(1)\nreturn f(1)",
    "a dunder function": "def __f(x):\n    return x\nreturn __f(1)",
    "a dunder parameter": "def f(__x):\n    return __x\nreturn f(1)",
    "a function of nothing": "def f(x):\n    y = x\nreturn f(1)",
    "a type's method": "return float.fromhex(n)",
    "a number's bytes": "return int.from_bytes",
    "no number": "return jnp.nan",
    "no end": "return jnp.where(n > 1, jnp.inf, 0.0)",
    "400 digits": "return " + "9" * 400,
    "a hexadecimal of 4,000 digits": "return 0x" + "f" * 4_000,
    "400 digits and an imaginary part": "return " + "9" * 400 + " + 1j",
    "starred": "return jnp.array([*player_intrinsics])",
    "double star": "return jnp.sum(**n)",
    "yield": "yield 1",
    "await": "return await n",
    "match": "match n:\n    case _:\n        return 0",
    "endless range": "for i in range(65):\n    pass\nreturn 0",
    "range of a name": "for i in range(n):\n    pass\nreturn 0",
    "a range of nothing": "for i in range(1, 9, 0):\n    pass\nreturn 0",
    "a far range": "for i in range(9, 90):\n    pass\nreturn 0",
    "a long list": "for i in [" + "0, " * 65 + "]:\n    pass\nreturn 0",
    "range of true": "for i in range(True):\n    pass\nreturn 0",
    "negative range": "for i in range(-1):\n    pass\nreturn 0",
    "for over an array": "for x in player_intrinsics:\n    pass\nreturn 0",
    "for else": "for i in range(2):\n    pass\nelse:\n    pass\nreturn 0",
    "range as a value": "return range(5)",
    "a huge number": "return 10000000",
    "an infinite number": "return 1e999",
    "a shift": "return 1 << 60",
    "matmul": "return player_intrinsics @ player_intrinsics",
    "assigned attribute": "inventory.wood = 1\nreturn 0",
    "assigned item": "closest_blocks[0] = 1\nreturn 0",
    "annotated by a call": "x: open('x') = 1\nreturn x",
    "annotated alone": "x: int\nreturn 0",
    "jnp shadowed": "jnp = n\nreturn jnp.load",
    "abs shadowed": "abs = n\nreturn abs",
    "enum shadowed": "BlockType = n\nreturn BlockType.TREE.value",
    "a called feature": "return inventory()",
    "a called local": "f = n\nreturn f(1)",
    "enum class": "return BlockType",
    "enum walk": "return BlockType.TREE",
    "enum internals": "return BlockType.mro.value",
    "enum lookup": "return BlockType['TREE'].value",
    "unknown name": "return wood",
    "unknown attribute": "return inventory.wod",
    "array file": "return player_intrinsics.tofile(n)",
    "array bytes": "return player_intrinsics.tobytes()",
    "array shape": "return len(player_intrinsics.shape * 1000000)",
    "method as a value": "return player_intrinsics.sum",
    "no return": "a = n",
    "an empty return": "return",
    "an idle expression": "jnp.sum(n)\nreturn 0",
}


@pytest.mark.parametrize("body", HONEST.values(), ids=HONEST)
def test_honest_code_passes(body):
    check_skill_source(skill_text(reward=reward(body)), "skill.py", games=GAMES)
    check_skill_source(
        skill_text(reward=reward(body, f"{LONG}, env_reward, health_penalty")), "x", games=GAMES
    )


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
    with pytest.raises(CodeRefusedError, match=re.escape(f"{ONCE}, of which many also end in")):
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
    assert time.monotonic() - began < limit(1)
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
