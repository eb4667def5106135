"""Skill files that nobody should run, whole, by what they try."""

from __future__ import annotations

from tests.skills.making import IS_DONE, REWARD, skill_text

FEATURES = "inventory, inventory_diff, achievements, player_intrinsics, closest_blocks, n"


def reward(body: str, parameters: str = FEATURES) -> str:
    """A skill file whose reward has this body."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return skill_text(reward=f"def task_reward({parameters}):\n{lines}")


def done(body: str, parameters: str = FEATURES) -> str:
    """A skill file whose predicate has this body."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return skill_text(is_done=f"def task_is_done({parameters}):\n{lines}")


def signed(signature: str) -> str:
    """A skill file whose reward begins like this."""
    return skill_text(reward=f"{signature}\n    return 0.0")


def constant(old: str, new: str) -> str:
    """A skill file in which a constant is another."""
    text = skill_text()
    assert old in text
    return text.replace(old, new)


GOOD = skill_text()
NAME = 'name = "Collect Wood"'
GAIN = 'gain = {"wood": "n"}'

# What the reading of the file or its syntax tree gives away; nothing of it is run.
BY_SYNTAX: dict[str, str | bytes] = {
    "an import": skill_text(head="import os\n"),
    "an import of a submodule": skill_text(head="import os.path as jnp\n"),
    "a star import": skill_text(head="from os import *\n"),
    "a relative import": skill_text(head="from . import x\n"),
    "an import in a body": reward("import os\nreturn 0.0"),
    "an import by name": reward("return __import__('os').system('id')"),
    "an import in a default": signed("def task_reward(n=__import__('os')):"),
    "an import in an annotation": signed("def task_reward(n: __import__('os').system('id')):"),
    "an import in a returned type": signed("def task_reward(n) -> __import__('os'):"),
    "an import as a decorator": signed("@__import__('os').system\ndef task_reward(n):"),
    "an import in a base class": skill_text(head="class A(__import__('os').PathLike): pass\n"),
    "a class body that acts": skill_text(head="class A:\n    open('/tmp/x')\n"),
    "a metaclass": skill_text(head="class A(metaclass=print): pass\n"),
    "a lambda that acts": skill_text(head="requirements = (lambda: {})()\n"),
    "a lambda in a body": reward("return (lambda: eval('1'))()"),
    "eval": reward("return eval('1+1')"),
    "exec": reward("exec('import os')\nreturn 0.0"),
    "compile": reward("return compile('1', '', 'eval')"),
    "open": reward("return open('/etc/passwd').read()"),
    "input": reward("return input()"),
    "breakpoint": reward("breakpoint()\nreturn 0.0"),
    "globals": reward("return globals()"),
    "locals": reward("return locals()"),
    "getattr": reward("return getattr(jnp, 'lo' 'ad')('x')"),
    "setattr": reward("setattr(jnp, 'sum', abs)\nreturn 0.0"),
    "type": reward("return type(n).mro()"),
    "a walk to object": reward("return ().__class__.__base__.__subclasses__()"),
    "a walk from a feature": reward("return inventory.__class__.__init__.__globals__"),
    "a walk from a function": reward("return task_reward.__code__"),
    "a walk from jnp": reward("return jnp.sum.__globals__"),
    "a walk from an enum": reward("return BlockType.TREE.__class__.value"),
    "a walk of one underscore": reward("return jnp._src"),
    "a wide dunder": reward("return inventory.＿＿ｃｌａｓｓ＿＿"),
    "a wide name": reward("return ｏｐｅｎ('x')"),
    "mathematical letters": reward("return 𝐞𝐱𝐞𝐜('x')"),
    "a Cyrillic name": reward("inventоry = 1\nreturn inventоry"),
    "a Greek item": reward("return inventory.wοοd"),
    "an invisible joiner": reward("return inventory.wo\u200dod"),
    "text turned round": reward("return inventory.wood  \u202e# )'x'(nepo\nreturn open('x')"),
    "str.format": reward("return '{0.__class__}'.format(n)"),
    "format_map": reward("return '{n.__class__}'.format_map(inventory)"),
    "an f-string": reward("return f'{n.__class__}'"),
    "a percent format": reward("return '%c' % n"),
    "joined text": reward("return ''.join(['a'])"),
    "bytes": reward("return b'x'[0]"),
    "jnp.load": reward("return jnp.load('/etc/passwd')"),
    "jnp.save": reward("jnp.save('/tmp/x', n)\nreturn 0.0"),
    "jnp.fromfile": reward("return jnp.fromfile('/etc/passwd')"),
    "jnp.frompyfunc": reward("return jnp.frompyfunc(abs, 1, 1)(n)"),
    "jnp.vectorize": reward("return jnp.vectorize(abs)(n)"),
    "jnp.apply_along_axis": reward("return jnp.apply_along_axis(abs, 0, achievements)"),
    "jnp.piecewise": reward("return jnp.piecewise(n, [True], [abs])"),
    "jnp.fromfunction": reward("return jnp.fromfunction(abs, (9, 9))"),
    "jnp.einsum": reward("return jnp.einsum('i,j->', achievements, achievements)"),
    "jax.pure_callback": reward("return jax.pure_callback(abs, n, n)"),
    "jax.debug.callback": reward("jax.debug.callback(abs, n)\nreturn 0.0"),
    "jax.debug.print": reward("jax.debug.print('x')\nreturn 0.0"),
    "io_callback": reward("return jax.experimental.io_callback(abs, n, n)"),
    "host_callback": reward("return jax.experimental.host_callback.call(abs, n)"),
    "ffi": reward("return jax.ffi.ffi_call('x', n)(n)"),
    "the profiler": reward("jax.profiler.start_trace('/tmp/x')\nreturn 0.0"),
    "jax's settings": reward("jax.config.update('jax_platforms', 'tpu')\nreturn 0.0"),
    "jax's devices": reward("return jax.devices()[0].id"),
    "numpy behind jax": reward("return jax.numpy.numpy.load('x')"),
    "a loop of jax": reward("return jax.lax.while_loop(abs, abs, n)"),
    "a scan of jax": reward("return jax.lax.fori_loop(0, 1000000, abs, n)"),
    "randomness of jax": reward("return jax.random.uniform(jax.random.key(n))"),
    "jnp under another name": reward("x = jnp\nreturn x.load('x')"),
    "jax in a list": reward("return [jax][0].devices()"),
    "a function under another name": reward("f = jnp.sum\nreturn f(achievements)"),
    "jnp given a meaning": reward("jnp = inventory\nreturn jnp.wood"),
    "a builtin given a meaning": reward("abs = n\nreturn abs"),
    "a builtin as a loop variable": reward("for len in range(3):\n    pass\nreturn 0.0"),
    "an enum given a meaning": reward("BlockType = inventory\nreturn BlockType.wood"),
    "jnp as a parameter": signed("def task_reward(jnp):"),
    "a builtin as a parameter": signed("def task_reward(abs):"),
    "self as a parameter": signed("def task_reward(self):"),
    "a parameter twice": signed("def task_reward(n, n):"),
    "star arguments": signed("def task_reward(*n):"),
    "double star arguments": signed("def task_reward(**n):"),
    "keyword-only arguments": signed("def task_reward(*, n):"),
    "positional-only arguments": signed("def task_reward(n, /):"),
    "a mutable default": signed("def task_reward(inventory, n=[]):"),
    "a starred call": reward("return jnp.sum(*achievements)"),
    "a double starred call": reward("return jnp.sum(**inventory)"),
    "a starred list": reward("return jnp.array([*achievements])"),
    "an async function": signed("async def task_reward(n):"),
    "await": reward("return await n"),
    "yield": reward("yield 1.0"),
    "yield from": reward("yield from achievements"),
    "while": reward("while True:\n    pass\nreturn 0.0"),
    "for over features": reward("for x in achievements:\n    pass\nreturn 0.0"),
    "for over a count": reward("for x in range(n):\n    pass\nreturn 0.0"),
    "for over far too much": reward("for x in range(10**9):\n    pass\nreturn 0.0"),
    "for over 2**63": reward("for i in range(9223372036854775808):\n    pass\nreturn 0.0"),
    "a list of 2**64": reward("return sum([i for i in range(0, 18446744073709551615)]) * 1.0"),
    "a called local": reward("sum = abs(n)\nreturn sum([1.0])"),
    "a function for a local": reward("for abs in range(3):\n    pass\nreturn abs"),
    "a break": reward("for i in range(3):\n    break\nreturn 0.0"),
    "try": reward("try:\n    x = 1\nexcept ValueError:\n    x = 0\nreturn x"),
    "raise": reward("raise SystemExit"),
    "assert": reward("assert n > 0\nreturn 0.0"),
    "del": reward("del inventory\nreturn 0.0"),
    "with": reward("with inventory:\n    pass\nreturn 0.0"),
    "match": reward("match n:\n    case 1:\n        return 1.0\nreturn 0.0"),
    "global": reward("global jnp\njnp = n\nreturn 0.0"),
    "nonlocal": reward("nonlocal n\nreturn 0.0"),
    "a walrus": reward("return (x := 1.0) + x"),
    "a walrus in a test": reward("if (jnp := n) > 0:\n    return 1.0\nreturn 0.0"),
    "a comprehension of text": reward("return sum([x for x in 'abc'])"),
    "a comprehension's scope": reward("return [jnp for jnp in achievements][0]"),
    "a generator": reward("return max(x for x in achievements)"),
    "a nested function": reward("def f():\n    return f()\nreturn f()"),
    "a nested class": reward("class A:\n    pass\nreturn 0.0"),
    "a call of itself": reward("return task_reward(inventory)"),
    "a call of the other function": reward("return task_is_done(inventory, n)"),
    "a call of a feature": reward("return inventory(n)"),
    "an assignment to an item": reward("closest_blocks[0] = 1\nreturn 0.0"),
    "an assignment to an attribute": reward("inventory.wood = 99\nreturn 1.0"),
    "an assignment to jnp": reward("jnp.sum = abs\nreturn 1.0"),
    "a deleted attribute": reward("del inventory.wood\nreturn 1.0"),
    "an annotated name": reward("x: eval('1') = 1.0\nreturn x"),
    "a type alias": skill_text(head="type X = int\n"),
    "a huge literal": reward("return 99999999"),
    "a huge float": reward("return 1e300"),
    "an infinite literal": reward("return 1e999"),
    "a literal of many digits": reward("return " + "9" * 5_000),
    "a shift": reward("return 1 << 999999"),
    "a matrix product": reward("return achievements @ achievements"),
    "deep brackets": reward("return " + "(" * 300 + "1" + ")" * 300),
    "deep minuses": reward("return " + "-" * 300 + "1"),
    "deep attributes": reward("return inventory" + ".T" * 300),
    "deep ifs": reward("".join(" " * k + "if n:\n" for k in range(90)) + " " * 90 + "return 1.0"),
    "far too deep brackets": reward("return " + "[" * 9_000),
    "20 kB": GOOD + "#" * 20_000,
    "a megabyte": GOOD + "#" * 1_000_000,
    "many nodes": reward("return " + "+".join(["1"] * 4_000)),
    "a NUL byte": GOOD.replace("wood", "wo\0od").encode(),
    "a NUL at the end": GOOD.encode() + b"\0",
    "UTF-16": GOOD.encode("utf-16"),
    "Latin-1": GOOD.replace("Harvest", "Récolter").encode("latin-1"),
    "half a character": GOOD.encode() + "木".encode()[:2],
    "an encoding of its own": b"# -*- coding: utf-7 -*-\n" + reward("+AC8-return 0.0").encode(),
    "a byte order mark in the middle": GOOD.replace("gain", "\ufeffgain"),
    "a form feed for a name": constant(NAME, "\x0cname = 'x' 'y'\nname = 'z'"),
    "a torn file": GOOD[: len(GOOD) // 2],
    "nothing": "",
    "only a docstring": '"""Nothing."""\n',
    "JSON": '{"name": "Collect Wood"}',
    "a shell script": "#!/bin/sh\nrm -rf ~\n",
    "Python 2": 'print "x"\n',
    "tabs and spaces": GOOD.replace("    return", "  \treturn\n    \t  return"),
    "a newline in the name": constant(NAME, 'name = "Collect\\nWood"'),
    "a control in the name": constant(NAME, 'name = "Collect\\x1b[2JWood"'),
    "a right-to-left name": constant(NAME, 'name = "Collect \\u202edooW"'),
    "an empty name": constant(NAME, 'name = "  "'),
    "an endless name": constant(NAME, f'name = "{"W" * 300}"'),
    "a name that is a number": constant(NAME, "name = 7"),
    "a computed name": constant(NAME, 'name = "W" * 9'),
    "a formatted name": constant(NAME, 'name = f"{1}"'),
    "a name twice": constant(NAME, f"{NAME}\n{NAME}"),
    "an unpacked name": constant(NAME, 'name, x = "a", "b"'),
    "no gain": constant(GAIN, "gain = {}"),
    "a gain of nothing": constant(GAIN, 'gain = {"wood": 0}'),
    "a gain that is a list": constant(GAIN, 'gain = ["wood"]'),
    "a negative gain": constant(GAIN, 'gain = {"wood": -1}'),
    "a gain that turns negative": constant(GAIN, 'gain = {"wood": "1 - 2*n"}'),
    "a gain of NaN": constant(GAIN, 'gain = {"wood": "nan"}'),
    "an infinite gain": constant(GAIN, 'gain = {"wood": 1e999}'),
    "a huge gain": constant(GAIN, f'gain = {{"wood": {"9" * 40}}}'),
    "half a gain": constant(GAIN, 'gain = {"wood": 0.5}'),
    "a true gain": constant(GAIN, 'gain = {"wood": True}'),
    "a squared gain": constant(GAIN, 'gain = {"wood": "n*n"}'),
    "a gain that acts": constant(GAIN, "gain = {\"wood\": \"__import__('os').system('id')\"}"),
    "a gain of another lambda": constant(GAIN, 'gain = {"wood": "lambda n: open(n)"}'),
    "a gain of a path": constant(GAIN, 'gain = {"../../x": 1}'),
    "a gain of a dunder": constant(GAIN, 'gain = {"__class__": 1}'),
    "a gain of a newline": constant(GAIN, 'gain = {"wood\\n": 1}'),
    "a called gain": constant(GAIN, "gain = dict(wood=1)"),
    "a merged gain": constant(GAIN, 'gain = {**{}, "wood": 1}'),
    "a requirement that is text": constant("requirements = {}", 'requirements = "wood"'),
    "a consumption of everything": constant("consumption = {}", "consumption = {1: 1}"),
    "ephemeral text": constant(GAIN, f'{GAIN}\nephemeral = "wood"'),
    "an ephemeral stranger": constant(GAIN, f'{GAIN}\nephemeral = ["stone"]'),
    "an endless step": constant(GAIN, f"{GAIN}\nmax_steps = 10**9"),
    "a negative step": constant(GAIN, f"{GAIN}\nmax_steps = -1"),
    "a word too many": constant(GAIN, f"{GAIN}\n__name__ = 'x'"),
    "trust by the file itself": constant(GAIN, f"{GAIN}\ntrusted = True"),
    "a function too many": skill_text(head="def helper(n):\n    return n\n"),
    "helpers in a circle": skill_text(
        head="def f(x):\n    return g(x)\ndef g(x):\n    return f(x)\n",
        reward="def task_reward(n):\n    return f(n)",
    ),
    "a constant for a feature": skill_text(
        head="timestep = 3\n", reward="def task_reward(n):\n    return n * timestep"
    ),
    "a function twice": skill_text(reward=f"{REWARD}\n\n\n{REWARD}"),
    "code between": skill_text(is_done=f"print(1)\n{IS_DONE}"),
    "code at the end": GOOD + "\nprint(1)\n",
    "main": GOOD + '\nif __name__ == "__main__":\n    pass\n',
    "a missing function": skill_text(reward=""),
    "a function that is a lambda": skill_text(reward="task_reward = lambda n: n"),
    "names of two games": reward("return inventory.bow + inventory.wood_pickaxe"),
    "a block of no game": reward("return BlockType.BEDROCK.value * 1.0"),
    "an item of no game": reward("return inventory.netherite"),
    "the features as text": reward("return inventory['wood']"),
    "a method of files": reward("return achievements.tofile(n)"),
    "a pointer": reward("return achievements.unsafe_buffer_pointer()"),
    "a shape": reward("return achievements.shape[0]"),
    "NaN for a reward": reward("return jnp.nan"),
    "infinity for a reward": reward("return -jnp.inf"),
    "a literal of 400 digits": reward("return " + "9" * 400),
    "a literal of 4,000 hexadecimal digits": reward("return 0x" + "f" * 4_000),
    "a gain of 400 digits": constant(GAIN, f'gain = {{"wood": {"9" * 400}}}'),
    "a gain of 4,000 hexadecimal digits": constant(GAIN, f'gain = {{"wood": 0x{"f" * 4_000}}}'),
    "steps of 400 digits": constant(GAIN, f"{GAIN}\nmax_steps = {'9' * 400}"),
    "a gain too large for a complex number": constant(GAIN, f"gain = {'9' * 400} + 1j"),
    "no return": reward("x = n"),
    "an empty return": reward("return"),
}

# More bodies of a reward, a line each. Were one of them run, it would do no harm.
_LINES = r"""
return inventory.__dict__
return inventory.__class__.__mro__[1].__subclasses__()
return (1).__class__
return [].__class__.__base__
return {}.__class__
return inventory._asdict()
return inventory._fields
return BlockType.__members__
return BlockType.TREE.__init__.__globals__
return BlockType.TREE.name
return BlockType['TREE'].value
return BlockType(5).value
return Action
return achievements.__array_interface__
return achievements.__reduce__()
return achievements.device
return achievements.addressable_data(0)
return achievements.block_until_ready()
return achievements.tolist()
return achievements.item()
return achievements.view(n)
return achievements.dtype.type
return achievements.at[0].apply(abs)
return achievements.at[0].get.__self__
return achievements.sum.__func__
return achievements.sum
return jnp
return jax
return jnp.sum
return (jnp, jax)[0]
return {1: jnp}[1]
return {'a': abs}['a']
return {abs: 1}[abs]
return {**inventory}
return {'x': '{0.__class__}'}['x']
return {'x': 1}.get('x')
return {'x': 1}.items()
return {'x': 1}.__class__
return 'x'
return 'x' 'y'
return ('x')
return ['x']
return 'x' + 'y'
return 'x' * 9
return abs('x')
return int('9')
return float('nan')
return float('inf')
return 1e400
return -1e400
return 1e400 - 1e400
return 1j
return b'x'
return jnp.nan
return jnp.inf
return -jnp.inf
return jnp.NINF
return jnp.loadtxt('x')
return jnp.genfromtxt('x')
return jnp.savez('x', n)
return jnp.frombuffer(n)
return jnp.from_dlpack(n)
return jnp.array_str(n)
return jnp.lax.sort(n)
return jnp.jax.devices()
return jnp.linalg.svd(achievements)
return jnp.fft.fft(achievements)
return jnp.ufunc(abs, 1, 1)
return jnp.bincount(achievements)
return jnp.unique(achievements)
return jax.numpy.load('x')
return jax.jit(abs)(n)
return jax.vmap(abs)(n)
return jax.grad(abs)(n)
return jax.eval_shape(abs, n)
return jax.make_jaxpr(abs)(n)
return jax.device_put(n)
return jax.device_get(n)
return jax.local_devices()
return jax.clear_caches()
return jax.distributed.initialize()
return jax.lax.cond(n > 1, abs, abs, n)
return jax.lax.scan(abs, n, n)
return jax.lax.map(abs, achievements)
return jax.lax.switch(0, [abs], n)
return jax.lax.custom_root(n, n, n, n)
return jax.lax.psum(n, 'i')
return jax.lax.infeed(n)
return jax.tree.map(abs, inventory)
return jax.tree_util.Partial(abs)(n)
return jax.debug.breakpoint()
return jax.monitoring.record_event('x')
return jax.extend.core
return jax.interpreters.xla
return jax.export.export(abs)
return jax.dlpack.to_dlpack(n)
return jax.scipy.special.erf(n)
return jax.random.bits(n)
return np.load('x')
return numpy.load('x')
return os.getcwd()
return sys.modules
return math.sqrt(n)
return builtins.open
return dir()
return vars(inventory)
return id(n)
return hash(n)
return repr(n)
return str(n)
return print(n)
return help()
return memoryview(n)
return object()
return super()
return isinstance(n, int)
return callable(n)
return iter(achievements)
return next(achievements)
return slice(n)
return complex(n)
return list(achievements)
return dict(x=n)
return map(abs, achievements)
return filter(abs, achievements)
return sorted(achievements)
return task_is_done
return task_reward.__defaults__
return (lambda: n)()
return [x for x in achievements]
return [x for x in range(99)]
return [x for x in range(n)]
return [x async for x in achievements]
return [jnp for jnp in (1, 2)]
return [x for x in (open, abs)]
return sum(x for x in jnp)
return (x for x in (1, 2)).gi_frame
return (x for x in (1, 2)).throw(n)
return {x for x in (1, 2)}
return {x: x for x in (1, 2)}
return n if (y := n) else n
return n @ n
return n << 9
return n >> 9
return await n
yield n
raise n
assert n
del n
import os
from os import path
global n
pass
...
"""
BY_SYNTAX |= {line: reward(line) for line in _LINES.strip().splitlines()}
BY_SYNTAX |= {
    "an overflow": reward("return ((1000000.0 ** 8) ** 8) ** 8"),
    "a tower of powers": reward("return inventory.wood_pickaxe + 2**2**2**2**2**2"),
    "powers of powers": reward("return ((((9**8)**8)**8)**8)**8"),
    "a large power of a count": reward("return n ** 64"),
}

# What only shows when the functions are traced and computed.
BY_DRY_RUN: dict[str, str] = {
    "a nest of loops": reward(
        "x = inventory.wood_pickaxe\ny = 0\nfor i in range(64):\n  for j in range(64):\n"
        "    for k in range(64):\n      for m in range(64):\n        for o in range(64):\n"
        "          y += 1\nreturn x + y"
    ),
    "loops side by side": reward(
        "x = inventory.wood\n"
        + "for i in range(64):\n  for j in range(16):\n    x += i\n" * 16
        + "return x"
    ),
    "a number squared in a loop": reward(
        "x = n + 1\nfor i in range(64):\n    x *= x\nreturn x + inventory.wood_pickaxe"
    ),
    "a list multiplied": reward("return len([0] * 1000000 * 1000) + inventory.wood_pickaxe"),
    "a tuple doubled in a loop": reward(
        "x = (0, 0)\nfor i in range(64):\n  x += x\nreturn len(x) + inventory.wood_pickaxe"
    ),
    "a list added on": reward("x = n\nx += [1]\nreturn len(x)"),
    "lists compared for their least": reward(
        "return len(min([0], [1]) * 1000000 * 1000) + inventory.wood_pickaxe"
    ),
    "a large array": reward("return jnp.ones(10**8).sum()"),
    "a large array of a shape": reward("return jnp.zeros((4096, 4096)).sum()"),
    "a large range": reward("return jnp.arange(n, 10**9).sum()"),
    "an array of a computed size": reward("return jnp.full(n * 1000000, 1.0).sum()"),
    "an item of an array": reward("return inventory.sum()"),
    "an array doubled in a loop": reward(
        "x = achievements\nfor i in range(64):\n    x = jnp.concatenate([x, x])\nreturn x.sum()"
    ),
    "arrays broadcast": reward(
        "x = achievements\nfor i in range(9):\n    x = x[..., None] * achievements\nreturn x.sum()"
    ),
    "arrays stacked": reward(
        "x = achievements\nfor i in range(40):\n    x = jnp.stack([x, x])\nreturn x.sum()"
    ),
    "growth for one count": reward(
        "x = player_intrinsics\nif n == 7:\n    for i in range(30):\n"
        "        x = jnp.concatenate([x, x])\nreturn x.sum() * 0.0"
    ),
    "too many operations": reward(
        "x = inventory.wood\nfor i in range(64):\n    for j in range(16):\n"
        "        x = jnp.sin(x) + jnp.cos(x) + i\nreturn x"
    ),
    "many sines": reward("return jnp.sin(jnp.arange(6000) * inventory.wood).sum()"),
    "a long sort": reward("return jnp.sort(jnp.arange(999) * inventory.wood)[0]"),
    "singular values": reward(
        "return jnp.linalg.norm(jnp.full((64, 64), inventory.wood * 1.0), 2)"
    ),
    "a sum of singular values": reward(
        "return jnp.linalg.norm(jnp.ones((9, 9)) * inventory.wood, ord=-2) * 1.0"
    ),
    "a product of matrices": reward(
        "x = (jnp.arange(1600) * inventory.wood).reshape(40, 40)\nreturn jnp.dot(x, x).sum()"
    ),
    "a doneness of always": done("return True"),
    "a doneness of never": done("return False"),
    "a doneness of the count": done("return n > 3"),
    "a doneness that is always true": done("return inventory.wood >= 0"),
    "a doneness of arrays without features": done("return jnp.zeros(3).sum() < 1"),
    "an array for a reward": reward("return achievements * 1.0"),
    "an array of one for a reward": reward("return achievements[:1] * 1.0"),
    "three numbers for a reward": reward("return 1.0, 2.0, 3.0"),
    "a list for a reward": reward("return [1.0, 2.0, 3.0]"),
    "nothing for a reward": reward("return None"),
    "an ellipsis for a reward": reward("return ..."),
    "the inventory for a reward": reward("return inventory"),
    "a type for a reward": reward("return jnp.float32"),
    "NaN at times": reward("return jnp.where(inventory.wood > 3, jnp.log(-1.0), 1.0)"),
    "infinity for a reward": reward("return 1.0 / jnp.zeros(())"),
    "minus infinity at times": reward("return jnp.log(inventory.wood)"),
    "zero by zero": reward("return inventory.wood / inventory.wood"),
    "a root of what may be negative": reward("return jnp.sqrt(inventory_diff.wood)"),
    "a division by zero": reward("return 1 / (n - n)"),
    "a division by zero at a count": reward("return 1.0 / (n - 2)"),
    "an overflow of exp": reward("return jnp.exp(inventory.wood * 100.0)"),
    "a number over 32 bits": reward("return inventory.wood + n * 999999 * 999999"),
    "a name before its value": reward("x = y\ny = 1.0\nreturn x"),
    "a name of one path": reward("if n > 3:\n    x = 1.0\nreturn x"),
    "a choice by a feature": reward("if inventory.wood > 3:\n    return 1.0\nreturn 0.0"),
    "an and of features": done("return inventory.wood > 3 and n > 1"),
    "a chain of features": done("return 0 < inventory.wood < n"),
    "a number out of a feature": reward("return float(inventory.wood)"),
    "a slice by a feature": reward("return achievements[: inventory.wood].sum() * 1.0"),
    "unlike shapes": reward("return (achievements + player_intrinsics).sum()"),
    "an index too many": reward("return achievements[0, 0] * 1.0"),
    "an unknown axis": reward("return achievements.sum(axis=3) * 1.0"),
    "an unknown argument": reward("return jnp.sum(achievements, speed=3)"),
    "too few arguments": reward("return jnp.where(inventory.wood > 3) * 1.0"),
    "an array comes apart wrongly": reward("a, b = player_intrinsics\nreturn a"),
    "a number comes apart": reward("a, b = n\nreturn a"),
    "unlike sequences": reward("a, b = 1, 2, 3\nreturn a"),
    "a doneness that is a number": done("return inventory.wood * 1.0"),
    "a doneness that is an array": done("return achievements > 0"),
    "a doneness that is nothing": done("return None"),
    "a doneness that fails": done("return 1 // (n - 1) > 0"),
}
