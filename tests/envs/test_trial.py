"""The trial ends in time whatever it is given, and one culprit does not condemn the others."""

from __future__ import annotations

import os
import re
import subprocess
import time

import jax
import numpy as np
import psutil
import pytest

from flowrl.envs.craftax import make_env
from flowrl.envs.features import Moment, compute
from flowrl.envs.moments import flat, moments, shape_of_one
from flowrl.envs.skill_module import load_module
from flowrl.errors import LaunchError
from flowrl.runs import Verdict
from flowrl.skills import judging
from flowrl.skills.admitted import INJECTED
from flowrl.skills.games import table_of
from flowrl.skills.judging import Limits, Refusal, Subject, judge
from flowrl.skills.skill import parse_skill
from tests.envs.making import CLASSIC, FULL, module_text
from tests.skills.hostile import reward
from tests.skills.making import skill_text

QUICK = Limits(seconds=3.0, megabytes=512)
ENDLESS = "while True:\n    pass"
GREEDY = "x = []\nwhile True:\n    x += [n] * 1000000"
RECURSIVE = "def again(k):\n    return again(k + 1)\nreturn again(0)"


def subject(text: str, *, trusted: bool = True, place: str = "skill.py") -> Subject:
    """A file's functions; trusted ones, since the gate refuses most of what is tried here."""
    skill = parse_skill(text, place=place, env_name=CLASSIC, trusted=trusted)
    return Subject.of(skill, CLASSIC)


GOOD = subject(skill_text(), trusted=False)


def test_each_culprit_is_told_and_the_others_are_judged():
    """The rows of hostile code: it loops, allocates, recurses, calls back, reads, is random."""
    culprits = {
        ENDLESS: "task_reward took longer than 3 s",
        GREEDY: "task_reward needed more than 512 MB|task_reward took longer than 3 s",
        "return len([0] * 10**12)": "task_reward needed more than 512 MB",
        RECURSIVE: "task_reward raises RecursionError",
        "return 1.0 / (n - 1)": "task_reward raises ZeroDivisionError: float division by zero",
        "return jax.pure_callback(abs, inventory.wood, inventory.wood)": "uses pure_callback",
        "jax.debug.callback(abs, inventory.wood)\nreturn 0.0": "uses debug_callback",
        "jax.debug.print('x')\nreturn 0.0": "uses debug",
        "return jax.lax.while_loop(lambda x: x > 0, lambda x: x - 1, inventory.wood)": "uses while",
        "return jax.lax.scan(lambda c, x: (c + 1, x), 0, length=5000)[0]": "over 2000 operations",
        "return jnp.ones((1000, 1001)).sum()": "makes an array of shape (1000, 1001)",
        "return jax.random.uniform(jax.random.key(id(n)))": "raises NameError",
        "import os\nreturn 0.0": "raises ImportError",
        "return open('/etc/passwd').read()": "raises NameError",
        "return [c for c in ().__class__.__base__.__subclasses__()][0]": "returns|raises",
        "jnp.save('/tmp/flowrl-trial-was-here', achievements)\nreturn 0.0": "raises",
        "k = jax.device_count()\nreturn f'{k}'": "raises TypeError",
        "return nonsense": "raises NameError: name 'nonsense' is not defined",
        "return 0.0\nyield": "raises TypeError",
        "return inventory.wood if n else (yield)": "raises TypeError",
        "nonlocal n\nreturn 0.0": "is not Python",
        "raise ValueError('\\x1b[2J')": "raises ValueError: �[2J",
    }
    subjects = [subject(reward(body)) for body in culprits]
    answers = judge([GOOD, *subjects, GOOD], QUICK)
    assert isinstance(answers[0], Verdict)
    assert isinstance(answers[-1], Verdict)
    for why, answer in zip(culprits.values(), answers[1:-1], strict=True):
        assert isinstance(answer, Refusal), why
        assert re.search(why if "|" in why else re.escape(why), answer.text)
        assert re.fullmatch(r"skill\.py:\d+: [^\n]+; [^\n]+", answer.text), answer.text
        assert answer.text.isprintable()
    assert not os.path.exists("/tmp/flowrl-trial-was-here")  # noqa: PTH110


def test_a_refusal_names_the_line_of_the_file():
    text = reward("a = 1.0\nb = 1 / (n - n)\nreturn a + b")
    [answer] = judge([subject(text, trusted=False)], QUICK)
    line = 1 + text[: text.index("b = 1")].count("\n")
    assert isinstance(answer, Refusal)
    assert answer.text.startswith(f"skill.py:{line}: task_reward raises ZeroDivisionError")


def test_code_that_chooses_by_its_count_is_tried_with_every_one():
    chooses = subject(reward("return 1.0 if n > 3 else 0.5"), trusted=False)
    plain = subject(reward("return 1.0 * n"), trusted=False)
    late = subject(reward("if n == 61:\n    return achievements\nreturn 0.0"), trusted=False)
    first, second, third = judge([chooses, plain, late], QUICK)
    assert isinstance(first, Verdict)
    assert isinstance(second, Verdict)
    assert (first.most_count, second.most_count) == (64, None)
    assert isinstance(third, Refusal)


def test_trusted_code_may_use_more_of_python_within_the_budget():
    body = "pairs = [(k, f'{k}') for k in range(3)]\nreturn sum(float(k) for k, _ in pairs) * 1.0"
    [answer] = judge([subject(reward(body))], QUICK)
    assert isinstance(answer, Verdict)
    assert answer.trusted


@pytest.mark.slow
def test_the_real_limits_end_what_does_not_end_by_itself():
    began = time.monotonic()
    answers = judge([subject(reward(body)) for body in (ENDLESS, GREEDY, RECURSIVE)])
    texts = [answer.text for answer in answers if isinstance(answer, Refusal)]
    assert [text.split(" ", 2)[2].partition(";")[0] for text in texts] == [
        "took longer than 30 s",
        "needed more than 1,024 MB",
        "raises RecursionError: maximum recursion depth exceeded",
    ]
    assert time.monotonic() - began < 30 + 60


def test_the_process_has_an_environment_and_a_folder_of_its_own(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "canary")
    started = []
    popen = subprocess.Popen

    def start(*args, **facts):
        started.append(facts)
        return popen(*args, **facts)

    monkeypatch.setattr(judging.subprocess, "Popen", start)
    judge([GOOD], QUICK)
    [facts] = started
    assert "canary" not in facts["env"].values()
    assert facts["env"]["HOME"] not in ("", os.environ["HOME"])
    assert not facts["cwd"].exists(), "its folder is gone with it"
    assert facts["start_new_session"]


def test_a_trial_that_cannot_start_says_why(monkeypatch):
    monkeypatch.setattr(judging.sys, "executable", "/bin/false")
    with pytest.raises(LaunchError, match="does not start"):
        judge([GOOD], QUICK)


def test_a_judge_that_gives_up_leaves_no_process(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(judging._Trial, "_note", interrupted)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(KeyboardInterrupt):
        judge([subject(reward(ENDLESS))], QUICK)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@pytest.mark.craftax
@pytest.mark.parametrize("env_name", [CLASSIC, FULL])
def test_the_kept_moments_have_the_features_of_the_game(env_name):
    """When this fails: `python scripts/write_moments.py`."""
    package = table_of(env_name).folder
    env = make_env(env_name, load_module(module_text(package=package)), max_task_steps=5)
    names = [name for name in INJECTED if name != "n"]
    world = jax.eval_shape(env.new_world, jax.random.key(0))

    def features(before, after):
        return compute(names, env.game, Moment(before, after, np.float32(0)))

    real = jax.eval_shape(features, world, world)
    kept = shape_of_one(moments(env_name))
    form = {name: (leaf.shape, leaf.dtype) for name, leaf in _leaves(real).items()}
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in _leaves(kept).items()} == form


def _leaves(features):
    paths = jax.tree_util.tree_flatten_with_path(dict(features))[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in paths}


@pytest.mark.parametrize("env_name", [CLASSIC, FULL])
def test_the_kept_moments_are_varied(env_name):
    leaves = flat(moments(env_name))
    assert {len(leaf) for leaf in leaves.values()} == {48}
    never_zero_in_classic = {"player_level", "monsters_killed"}
    for name, leaf in leaves.items():
        assert np.isfinite(leaf.astype(float)).all()
        if env_name == FULL or not name.startswith(tuple(never_zero_in_classic)):
            assert len(np.unique(leaf)) > 1, name
