"""A generated module is read as text, and only if it is exactly what flowrl writes."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from flowrl.config import PPOConfig, to_json
from flowrl.envs.skill_module import load_module
from flowrl.envs.tasks import features_of
from flowrl.errors import CodeRefusedError, FileRefusedError, SkillError
from flowrl.parallel.training_setup import generate_module_with_remapping
from flowrl.runs import PlannedStep, TrainingRun
from flowrl.skills.skill import load_library
from tests.envs.making import CLASSIC, FULL, PLAN, STONE, WOOD, module_text

TEXT = module_text()


def test_a_module_says_its_plan_with_local_experts():
    module = load_module(TEXT)
    assert module.game.name == CLASSIC
    assert module.experts == (0, 2, 5)
    found = [(task.skill, task.count, task.expert_local) for task in module.tasks]
    assert found == [("Collect Wood", 2, 0), ("Collect Stone", 1, 2), ("Collect Coal", 1, 1)]


def test_the_functions_of_a_module_are_those_of_its_text():
    first, second, _ = load_module(TEXT).tasks
    assert not first.functions.is_done(SimpleNamespace(wood=1))
    assert first.functions.is_done(SimpleNamespace(wood=2))
    assert second.functions.reward(SimpleNamespace(stone=3), SimpleNamespace(wood=2)) == (30, 0.5)


def test_n_is_a_default_and_not_asked_of_the_environment():
    first = load_module(TEXT).tasks[0]
    assert features_of(first.functions.is_done) == ("inventory",)


def test_a_module_on_disk_names_itself_in_its_errors(tmp_path):
    path = tmp_path / "2.py"
    path.write_text(TEXT)
    assert len(load_module(path).tasks) == 3
    path.write_text(TEXT.replace("import jax\n", "import os\n"))
    with pytest.raises(SkillError, match=re.escape(f"{path}:3: ")):
        load_module(path)


def test_a_missing_module_and_one_that_is_not_text_are_refused(tmp_path):
    with pytest.raises(FileRefusedError):
        load_module(tmp_path / "2.py")
    (tmp_path / "2.py").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SkillError, match="null bytes"):
        load_module(tmp_path / "2.py")


@pytest.mark.parametrize("gains", ["{'wod': 1}", "{'wood': -1}", "{'wood': 'n'}", "['wood']", "7"])
def test_gains_that_are_none_of_the_inventory_are_refused(gains):
    text = TEXT.replace("'expert': 0}", f"'expert': 0, 'gains': {gains}}}")
    with pytest.raises(SkillError, match="step 0 of PLAN needs a skill"):
        load_module(text)


def test_whatever_the_generator_writes_of_the_library_is_read():
    library = load_library(CLASSIC, None)
    names = list(library)
    plan = tuple(
        PlannedStep(skill=name, count=k % 9 + 1, expert=2 * k, max_steps=library[name].max_steps)
        for k, name in enumerate(names)
    )
    run = TrainingRun(
        run_id="e42.a1.00000000",
        skill=names[-1],
        expert=plan[-1].expert,
        attempt=1,
        plan=plan,
        experts=tuple(step.expert for step in plan),
        ancestors=(),
        config=to_json(PPOConfig()),
    )
    module = load_module(generate_module_with_remapping(run, library))
    assert [(task.skill, task.count, task.max_steps) for task in module.tasks] == [
        (step.skill, step.count, step.max_steps) for step in plan
    ]
    assert [task.skill for task in module.tasks if task.max_steps == 900] == ["Eat Plant"]


MAP = "here stands `GLOBAL_TO_LOCAL = {0: 0, 2: 1, 5: 2}`, not"
DEPARTURES = {
    "no docstring": (TEXT.split("\n", 1)[1], "not `import jax`"),
    "another import": (TEXT.replace("import jax\n", "import os\n"), "import jax"),
    "an unknown game": (TEXT.replace(CLASSIC, "Chess"), "Chess is unknown; choose one of Craftax"),
    "another game's enums": (TEXT.replace("craftax_classic", "craftax"), "craftax_classic.const"),
    "no enums": (re.sub("from .*\n", "", TEXT), "here stands `from craftax"),
    "no game": (re.sub("GAME = .*\n", "", TEXT), "`GAME = …` is missing"),
    "a computed game": (TEXT.replace("GAME = ", "GAME = '' + "), "literal"),
    "an import more": (TEXT.replace("GLOBAL_TO", "import os\nGLOBAL_TO", 1), "GLOBAL_TO_LOCAL"),
    "a star import": (TEXT.replace("Achievement, Action, BlockType", "*"), "not `from"),
    "code between": (TEXT.replace("def task_1_is", "print(1)\n\ndef task_1_is"), "task_1_is_done"),
    "code at the end": (TEXT + "\nprint(1)\n", "beyond the tasks"),
    "a task too many": (TEXT + "\ndef task_3_is_done(n):\n    return n\n", "beyond the tasks"),
    "a computed plan": (TEXT.replace("PLAN = [", "PLAN = 2 * ["), "literal"),
    "a called plan": (TEXT.replace("PLAN = ", "PLAN = list() + "), "literal"),
    "a map to text": (TEXT.replace("{0: 0, 2: 1", "{0: '0', 2: 1"), MAP),
    "a map to true": (TEXT.replace("{0: 0, 2: 1, 5: 2}", "{0: False, 2: True}"), "of [0, 2]"),
    "maps that disagree": (TEXT.replace("{0: 0, 1: 2, 2: 5}", "{0: 0, 1: 5, 2: 2}"), "2: 5}`, not"),
    "a gap in the map": (TEXT.replace("5: 2}", "5: 3}"), MAP),
    "maps out of order": (TEXT.replace("{0: 0, 2: 1, 5: 2}", "{0: 0, 2: 2, 5: 1}"), MAP),
    "an unknown expert": (TEXT.replace("'expert': 5", "'expert': 4"), "step 1 of PLAN"),
    "a count of zero": (TEXT.replace("'count': 2", "'count': 0"), "step 0 of PLAN"),
    "a count of true": (TEXT.replace("'count': 2", "'count': True"), "step 0 of PLAN"),
    "a key too many": (TEXT.replace("'count': 2", "'count': 2, 'x': 1"), "step 0 of PLAN"),
    "a limit of zero": (TEXT.replace("'count': 2", "'count': 2, 'max_steps': 0"), "step 0"),
    "a limit of true": (TEXT.replace("'count': 2", "'count': 2, 'max_steps': True"), "step 0"),
    "a vast limit": (TEXT.replace("'count': 2", "'count': 2, 'max_steps': 100_001"), "100000"),
    "no limit said": (TEXT.replace("'count': 2", "'count': 2, 'max_steps': None"), "step 0"),
    "an empty plan": (re.sub(r"PLAN = .*", "PLAN = []", TEXT), "list of steps"),
    "a shorter plan": (re.sub(r"PLAN = .*", "PLAN = [{'skill': 'a', 'count': 2, 'expert': 0}]", TEXT), "beyond the tasks"),  # noqa: E501
    "a missing function": (TEXT.replace("def task_2_reward", "def task_3_reward"), "def task_2_re"),
    "functions out of order": (module_text((WOOD, STONE)).replace("task_0", "task_9"), "task_0"),
    "an async function": (TEXT.replace("def task_0_is", "async def task_0_is"), "task_0_is_done"),
    "a class": (TEXT.replace("def task_0_is_done(inventory, n=2)", "class task_0_is_done"), "def "),
    "another count": (TEXT.replace("n=2", "n=3"), "must have no default but n=2"),
    "n without its count": (TEXT.replace("n=2", "n"), "must have no default but n=2"),
    "another default": (TEXT.replace("(inventory, n=2)", "(n, inventory=2)"), "only n may have"),
    "another network": (TEXT.replace("GLOBAL_TO_LOCAL[5]", "GLOBAL_TO_LOCAL[2]"), "task_1_network"),
    "a bare network": (TEXT.replace("return GLOBAL_TO_LOCAL[5]", "return 2"), "task_1_network"),
    "a list for a map": (TEXT.replace("{0: 0, 2: 1, 5: 2}", "[0, 2, 5]"), "does not map indices"),
    "two plans": (TEXT.replace("PLAN = ", "PLAN = []\nPLAN = "), "list of steps"),
    "nothing": ("", "`GAME = …` is missing"),
    "only a docstring": ('"""Nothing."""\n', "`GAME = …` is missing"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "why"), DEPARTURES.values(), ids=DEPARTURES)
def test_a_module_that_departs_from_the_frame_is_refused(text, why):
    assert text != TEXT
    with pytest.raises(SkillError, match=re.escape(why)) as refused:
        load_module(text)
    assert re.match(r"<module>:\d+: ", str(refused.value))


HOSTILE = {
    "a system call": "(n=2):\n    return __import__('os').system('id')",
    "a call in the default": "(n=print(1)):\n    return n",
    "another task's function": "(n=2):\n    return task_1_is_done",
    "the maps": "(n=2):\n    return GLOBAL_TO_LOCAL",
}


@pytest.mark.parametrize("is_done", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_function_is_refused_before_it_can_run(is_done):
    with pytest.raises(SkillError):
        load_module(module_text([WOOD._replace(is_done=is_done), *PLAN[1:]]))


@pytest.mark.parametrize(
    ("reward", "named"),
    [
        ("(inventory):\n    return inventory.bow", "inventory.bow is not in Craftax-Classic"),
        (
            "(achievements):\n    return achievements[Achievement.EAT_BAT.value]",
            "Achievement.EAT_BAT is not in Craftax-Classic",
        ),
    ],
    ids=["item", "achievement"],
)
def test_a_name_of_the_other_game_is_refused(reward, named):
    step = WOOD._replace(reward=reward)
    assert load_module(module_text([step], package="craftax")).game.name == FULL
    with pytest.raises(CodeRefusedError, match=re.escape(named)):
        load_module(module_text([step]))


def test_a_decorated_function_is_refused_and_its_decorator_never_called():
    with pytest.raises(CodeRefusedError):
        load_module(TEXT.replace("def task_0_is_done", "@exec\ndef task_0_is_done"))


def test_the_namespace_of_skill_functions_holds_no_other_builtins():
    function = load_module(TEXT).tasks[0].functions.is_done
    assert set(function.__globals__["__builtins__"]) == {
        *("abs", "bool", "float", "int", "len", "max", "min", "range", "sum"),
    }
