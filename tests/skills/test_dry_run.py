"""A dry run ends in time whatever it is given, and one culprit does not condemn the others."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from flowrl.errors import LaunchError
from flowrl.games.base import find_game
from flowrl.runs import CodeApproval
from flowrl.skills.skill import parse_skill, skill_from_data
from flowrl.skills.validation import dry_run
from flowrl.skills.validation.dry_run import Limits, SkillCode, try_codes
from flowrl.skills.validation.worker import WORK_LIMIT, equations, work
from tests.envs.making import CLASSIC, FULL
from tests.skills.hostile import reward
from tests.skills.making import skill_text

QUICK = Limits(seconds=3.0, megabytes=512)
ENDLESS = "while True:\n    pass"
GREEDY = "x = []\nwhile True:\n    x += [n] * 1000000"
RECURSIVE = "def again(k):\n    return again(k + 1)\nreturn again(0)"


def code_of(text: str, *, trusted: bool = True, place: str = "skill.py") -> SkillCode:
    """A file's functions; trusted ones, most of which the syntax check refuses."""
    skill = parse_skill(text, place=place, env_name=CLASSIC, trusted=trusted)
    return SkillCode.of(skill, CLASSIC)


def full_code(is_done: str, *asks: str) -> SkillCode:
    text = skill_text(is_done=f"def task_is_done({', '.join(asks)}):\n    return {is_done}")
    return SkillCode.of(parse_skill(text, place="skill.py", env_name=FULL), FULL)


GOOD = code_of(skill_text(), trusted=False)
TOGETHER: dict[str, list[SkillCode]] = {CLASSIC: [], FULL: []}
Outcomes = dict[str, list[CodeApproval | str]]


def together(*codes: SkillCode) -> slice:
    """Have `outcomes` try these codes, none of which ends its process; returns where theirs are."""
    own = TOGETHER[codes[0].env_name]
    own.extend(codes)
    return slice(len(own) - len(codes), len(own))


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """What one dry run for each game says of the codes of several tests: it starts in seconds."""
    return {CLASSIC: try_codes(TOGETHER[CLASSIC], QUICK), FULL: try_codes(TOGETHER[FULL])}


def test_each_culprit_is_refused_and_the_others_are_approved(tmp_path):
    """The rows of hostile code: it loops, allocates, recurses, calls back, reads, is random."""
    written = tmp_path / "written.npy"
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
        "return jnp.linalg.qr(jnp.eye(9) + inventory.wood)[1][0, 0]": "uses geqrf|uses qr",
        "return jnp.linalg.det(jnp.eye(9) + inventory.wood)": "uses lu",
        "return jax.lax.scan(lambda c, x: (c + 1, x), 0, length=5000)[0]": "over 2000 operations",
        "return jnp.ones((1000, 1001)).sum()": "makes an array of shape (1000, 1001)",
        "return jax.random.uniform(jax.random.key(id(n)))": "raises NameError",
        "import os\nreturn 0.0": "raises ImportError",
        "return open('/etc/passwd').read()": "raises NameError",
        "return [c for c in ().__class__.__base__.__subclasses__()][0]": "returns|raises",
        f"jnp.save({str(written)!r}, [n])\nreturn 0.0": "raises OSError",
        "k = jax.device_count()\nreturn f'{k}'": "returns a value of type str",
        "return None": "task_reward returns None; return one number",
        "return {1: 0.0}": "returns a value of type dict",
        "return jnp.ones(3)": "returns shape (3,)",
        "return jnp.ones(2)": "returns shape (2,); return one number",
        "return 0.0, jnp.ones(2)": "raises",
        "return nonsense": "raises NameError: name 'nonsense' is not defined",
        "return 0.0\nyield": "returns a value of type generator",
        "return inventory.wood if n else (yield)": "returns a value of type generator",
        "nonlocal n\nreturn 0.0": "is not Python",
        "raise ValueError('\\x1b[2J')": "raises ValueError: �[2J",
    }
    codes = [code_of(reward(body)) for body in culprits]
    shaped = skill_text(reward="def task_reward(inventory):\n    return 0.0, inventory.wood")
    outcomes = try_codes([GOOD, *codes, code_of(shaped, trusted=False)], QUICK)
    assert isinstance(outcomes[0], CodeApproval)
    assert isinstance(outcomes[-1], CodeApproval)
    for why, outcome in zip(culprits.values(), outcomes[1:-1], strict=True):
        assert isinstance(outcome, str), why
        assert re.search(why if "|" in why else re.escape(why), outcome)
        assert re.fullmatch(r"skill\.py:\d+: [^\n]+; [^\n]+", outcome), outcome
        assert outcome.isprintable()
    assert written.stat().st_size == 0, "of trusted code only bubblewrap keeps files out of reach"


SECOND_LINE = reward("a = 1.0\nb = 1 / (n - n)\nreturn a + b")
OF_A_LINE = together(code_of(SECOND_LINE, trusted=False))


def test_a_refusal_names_the_line_of_the_file(outcomes):
    [outcome] = outcomes[CLASSIC][OF_A_LINE]
    line = 1 + SECOND_LINE[: SECOND_LINE.index("b = 1")].count("\n")
    assert isinstance(outcome, str)
    assert outcome.startswith(f"skill.py:{line}: task_reward raises ZeroDivisionError")


PYTHON = {
    "return 1.0 * (inventory.wood > 3 and n > 1)": "write a & b, with brackets around each",
    "return 1.0 * (inventory.wood > 3 or n > 1)": "write a | b, with brackets around each",
    "return 1.0 * (not inventory.wood)": "write ~a",
    "return 1.0 * (0 < inventory.wood < 3)": "write (a < b) & (b < c)",
    "return max(inventory.wood, 1.0)": "write jnp.maximum(a, b)",
    "return float(inventory.wood)": "write a.astype(float)",
    "if inventory.wood:\n    return 1.0\nreturn 0.0": "choose by features with jnp.where",
}
OF_PYTHON = together(*(code_of(reward(body), trusted=False) for body in PYTHON))


def test_what_python_cannot_ask_of_features_is_told_with_what_to_write(outcomes):
    for outcome, remedy in zip(outcomes[CLASSIC][OF_PYTHON], PYTHON.values(), strict=True):
        assert remedy in str(outcome)


HELPER = "HALF = 0\n\n\ndef share(x):\n    return x / HALF\n\n\n"
HELPED = skill_text(reward="def task_reward(n):\n    return share(n)", head=HELPER)
OF_HELPERS = together(code_of(HELPED, trusted=False))


def test_a_function_with_helpers_is_named_by_its_line_and_what_failed(outcomes):
    [outcome] = outcomes[CLASSIC][OF_HELPERS]
    line = 1 + HELPED[: HELPED.index("def task_reward")].count("\n")
    assert str(outcome).startswith(f"skill.py:{line}: task_reward raises ZeroDivisionError")
    assert "in `return x / HALF`" in str(outcome)


@pytest.mark.parametrize("game", [find_game(CLASSIC), find_game(FULL)], ids=["classic", "full"])
def test_a_skill_may_compute_much_less_than_the_game_itself(game):
    """The two functions of a skill, in the same measure as a timestep of the game."""
    engine = game.make()
    world = jax.eval_shape(engine.reset, jax.random.key(0))
    traced = jax.make_jaxpr(engine.step)(jax.random.key(0), world, jnp.int32(0))
    own = sum(times * work(equation) for equation, times in equations(traced.jaxpr))
    assert own > 20 * 2 * WORK_LIMIT


CONSTANT = {
    "(n):\n    return n > 0": "task_is_done is true in every known state",
    "(n):\n    return n < 0": "task_is_done is never true",
    "(inventory):\n    return inventory.wood >= 0": "task_is_done is true in every known state",
    "(timestep):\n    return timestep == timestep": "task_is_done is true in every known state",
}
HONEST = (
    "(inventory, n):\n    return inventory.diamond > 7 + n",
    "(achievements):\n    return achievements[3] > 0",
    "(timestep):\n    return timestep >= 7",
)
OF_ENDS = together(
    *(code_of(skill_text(f"def task_is_done{each}")) for each in [*CONSTANT, *HONEST])
)


def test_a_skill_that_is_always_done_or_never_is_refused(outcomes):
    """Such a skill would yield its gain for nothing, and every plan would use it."""
    found = outcomes[CLASSIC][OF_ENDS]
    for outcome, why in zip(found, CONSTANT.values(), strict=False):
        assert why in str(outcome)
    assert all(isinstance(each, CodeApproval) for each in found[len(CONSTANT) :])


BY_TIME = reward("return 1.0 / timestep + 1.0 / episode_timestep", "timestep, episode_timestep")
OF_TIME = together(code_of(BY_TIME, trusted=False))


def test_a_timestep_is_never_zero_where_code_is_tried(outcomes):
    [outcome] = outcomes[CLASSIC][OF_TIME]
    assert isinstance(outcome, CodeApproval), outcome


OF_COUNTS = together(
    code_of(reward("return 1.0 if n > 3 else 0.5"), trusted=False),
    code_of(reward("if n == 10:\n    return achievements\nreturn 0.0"), trusted=False),
    code_of(reward("return 1.0 / (n - 11)"), trusted=False),
)


def test_code_is_tried_with_every_count_that_a_plan_may_have(outcomes):
    first, second, third = outcomes[CLASSIC][OF_COUNTS]
    assert isinstance(first, CodeApproval)
    assert isinstance(second, str)
    assert isinstance(third, CodeApproval), "an inventory holds 9, so no plan asks for more than 10"


MORE = "pairs = [(k, f'{k}') for k in range(3)]\nreturn sum(float(k) for k, _ in pairs) * 1.0"
OF_TRUST = together(code_of(reward(MORE)))


def test_trusted_code_may_use_more_of_python_within_the_budget(outcomes):
    [outcome] = outcomes[CLASSIC][OF_TRUST]
    assert isinstance(outcome, CodeApproval)
    assert outcome.trusted


@pytest.mark.slow
def test_the_real_limits_end_what_does_not_end_by_itself():
    began = time.monotonic()
    outcomes = try_codes([code_of(reward(body)) for body in (ENDLESS, GREEDY, RECURSIVE)])
    texts = [outcome for outcome in outcomes if isinstance(outcome, str)]
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

    monkeypatch.setattr(dry_run.subprocess, "Popen", start)
    try_codes([GOOD], QUICK)
    [facts] = started
    assert "canary" not in facts["env"].values()
    assert facts["env"]["HOME"] not in ("", os.environ["HOME"])
    assert not Path(facts["cwd"]).exists(), "its folder is gone with it"
    assert facts["start_new_session"]


def test_a_confined_dry_run_reaches_no_file_and_ends_for_the_same_reasons(tmp_path, bubblewrap):
    secret = tmp_path / "secret.npy"
    np.save(secret, np.ones(3))
    body = f"return jnp.load('{secret}').sum() * 1.0"
    cut = f"jnp.save('{secret}', [n])\nreturn 0.0"
    codes = [code_of(reward(text)) for text in (body, ENDLESS, cut)]
    unbound, _ = try_codes(codes[:1] * 2, QUICK)
    assert not isinstance(unbound, str), "or else this would show nothing"
    read, endless, written = try_codes(codes, QUICK, confine=bubblewrap.in_folder)
    assert "FileNotFoundError" in str(read)
    assert "FileNotFoundError" in str(written)
    assert np.load(secret).tolist() == [1, 1, 1]
    assert "task_reward took longer than 3 s" in str(endless)


def test_a_dry_run_that_cannot_start_says_why(monkeypatch):
    monkeypatch.setattr(dry_run.sys, "executable", "/bin/false")
    with pytest.raises(LaunchError, match="does not start"):
        try_codes([GOOD], QUICK)


def test_an_interrupted_dry_run_leaves_no_process(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(KeyboardInterrupt):
        try_codes([code_of(reward(ENDLESS))], QUICK)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


WRONG = {
    "player_intrinsics[4] > 3": "number 4 of player_intrinsics, which has 4 there (0 to 3)",
    "player_intrinsics[-5] > 3": "number -5 of player_intrinsics, which has 4 there",
    "player_intrinsics[jnp.array([0, 4])].sum() > 3": "number 4 of player_intrinsics",
    "player_intrinsics[jnp.arange(3) + 2].sum() > 3": "number 4 of player_intrinsics",
    "jnp.take(player_intrinsics, 7) > 3": "number 7 of player_intrinsics",
    "(player_intrinsics + 1)[4] > 3": "number 4 of a value, which has 4 there",
    "achievements[Achievement.COLLECT_WOOD.value + 90] > 0": "number 90 of achievements, which",
    "monsters_killed[12] > 0": "number 12 of monsters_killed, which has 9 there (0 to 8)",
    "inventory.potions[6] > 0": "number 6 of inventory.potions, which has 6 there (0 to 5)",
    "closest_blocks[1, 0, 5] < n": "number 5 of closest_blocks, which has 5 there (0 to 4)",
    "closest_items[5, 0, 0] < n": "number 5 of closest_items, which has 5 there",
    "monsters_killed[n] > 0": "number 9 of monsters_killed",
}
RIGHT = (
    "player_intrinsics[-4] > 12",
    "inventory.potions[jnp.array([0, 5])].sum() > n",
    "closest_blocks[facing_block, 0, 0] == 0",
    "achievements[jnp.minimum(n, 66)] > 0",
    "local_map[4 + player_level_diff, 5] == 3",
)
FEATURES = (
    *("player_intrinsics", "achievements", "monsters_killed", "inventory", "closest_blocks"),
    *("closest_items", "facing_block", "local_map", "player_level_diff", "n"),
)
OF_INDICES = together(*(full_code(body, *FEATURES) for body in (*WRONG, *RIGHT)))


def test_an_index_beyond_a_features_shape_is_refused_and_one_within_is_not(outcomes):
    """Also a computed one, as far as it can be known; JAX would clamp it."""
    found = outcomes[FULL][OF_INDICES]
    for (body, what), outcome in zip(WRONG.items(), found, strict=False):
        assert f"task_is_done asks for {what}" in str(outcome), (body, outcome)
    for body, outcome in zip(RIGHT, found[len(WRONG) :], strict=True):
        assert isinstance(outcome, CodeApproval), (body, outcome)


SURFACE = full_code("player_level == 0", "player_level")
BACK = {"requirements": {"on_floor": 1}, "gain": {"on_floor": 0}}
BACK |= {"is_done": SURFACE.is_done, "reward": SURFACE.reward}
OF_BEGINNINGS = together(
    full_code("monsters_killed[0] >= 8", "monsters_killed"),
    SURFACE,
    SkillCode.of(skill_from_data("Return", BACK), FULL),
    full_code("jnp.all(player_intrinsics[1:] >= 7)", "player_intrinsics"),
    full_code("light_level > 0.5", "light_level"),
)


def test_a_success_before_anything_is_done_is_refused_unless_the_skill_begins_elsewhere(outcomes):
    found = outcomes[FULL][OF_BEGINNINGS]
    for outcome in found[:2]:
        assert "is true in all 280 states in which nothing was done on purpose" in str(outcome)
    assert all(isinstance(outcome, CodeApproval) for outcome in found[2:]), found
