"""Mistakes that models make: each is answered by a line by which the next answer passes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from flowrl.llm.asking import contradictions
from tests.llm.making import GAME, LIBRARY, STONE, WOOD, Written, amounts, contract, rewards

CONTRACTS = {
    "prose": "Sure! Here is a skill that fells trees.",
    "a refusal": "I cannot write code for games.",
    "half of it": contract()[:200],
    "another schema": json.dumps({"skill": {"name": "Fell Trees"}}),
    "a key too many": json.dumps({**json.loads(contract()), "reward": "1"}),
    "a key too few": json.dumps({k: v for k, v in json.loads(contract()).items() if k != "gain"}),
    "amounts as an object": contract(gain={"logs": "n"}),
    "a number for an amount": contract(gain=[{"item": "logs", "amount": 1}]),
    "a taken name": contract("Collect Wood"),
    "an empty name": contract(" "),
    "no gain": contract(gain=[]),
    "a need of nobody": contract(requirements=amounts({"chainsaw": 1})),
    "a need of itself": contract(requirements=amounts({"logs": 1})),
    "an amount that is no line": contract(gain=amounts({"logs": "n*n"})),
    "an item in capitals": contract(gain=amounts({"LOGS": 1})),
    "an ephemeral that is no gain": contract(ephemeral=["wood"]),
    "no steps": contract(max_steps=0),
    "a setting of the graph": contract(training=[{"flag": "layer_size", "value": "64"}]),
    "an unknown setting": contract(training=[{"flag": "learning", "value": "1"}]),
    "an import": contract(task_is_done=f"import numpy as np\n{WOOD.is_done}"),
    "a class": contract(task_is_done="class Skill:\n    pass"),
    "a feature that is none": contract(task_is_done=WOOD.is_done.replace("inventory", "state")),
    "an item that is none": contract(task_is_done=WOOD.is_done.replace(".wood", ".logs")),
    "another function": contract(task_is_done=WOOD.is_done.replace("task_is_done", "is_done")),
    "code between fences": contract(task_is_done=f"```python\n{WOOD.is_done}\n```"),
    "the same as another": contract(gain=amounts({"wood": "n"})),
}
REWARDS = {
    "prose": "The reward should pay for wood.",
    "none": json.dumps({"rewards": []}),
    "code alone": WOOD.reward,
    "a list of texts": json.dumps({"rewards": [WOOD.reward]}),
    "numpy": rewards("import numpy as np\n" + WOOD.reward.replace("jnp.", "np.")),
    "a lambda": rewards("task_reward = lambda inventory: inventory.wood"),
    "print": rewards(WOOD.reward + "\n    print(n)"),
    "an unknown feature": rewards("def task_reward(state):\n    return state.wood"),
    "a loop without end": rewards(
        "def task_reward(n):\n    while True:\n        n = n + 1\n    return n"
    ),
    "a return too few": rewards("def task_reward(n):\n    x = n"),
    "the predicate again": rewards(f"{WOOD.is_done}\n\n\n{WOOD.reward}"),
    "a new gain": rewards(f'gain = {{"diamond": "9"}}\n\n\n{WOOD.reward}'),
    "more steps": rewards(f"max_steps = 9\n\n\n{WOOD.reward}"),
    "a helper of nobody": rewards(f"LIMIT = 8\n\n\n{WOOD.reward}"),
    "tabs and spaces": rewards("def task_reward(n):\n\tx = 1\n        return x"),
    "two of it": rewards(f"{WOOD.reward}\n\n\n{WOOD.reward}"),
}
GOOD = {
    **{
        f"a name {name!r}": (contract(name), rewards())
        for name in ("Hew", "Fell 2", "Bäume fällen")
    },
    **{
        f"a gain of {n}": (contract(gain=amounts({"logs": n})), rewards())
        for n in ("1", "n", "2*n + 1")
    },
    "a need": (contract(requirements=amounts({"wood_pickaxe": 1})), rewards()),
    "a need that is used up": (
        contract(requirements=amounts({"stone": 1}), consumption=amounts({"stone": 1})),
        rewards(),
    ),
    "steps": (contract(max_steps=500), rewards()),
    "settings": (contract(training=[{"flag": "lr", "value": "3e-4"}]), rewards()),
    "what does not last": (contract(ephemeral=["logs"]), rewards()),
    "quotes": (contract(description='He said: "fell" \\ trees'), rewards()),
    "lines": (contract(description="Fell\n  trees."), rewards()),
    "indented code": (
        contract(task_is_done=f"\n{WOOD.is_done}\n\n"),
        rewards(f"\n{WOOD.reward}\n"),
    ),
    "a comment": (contract(), rewards(f"# by differences\n{WOOD.reward}")),
    "the second of two": (contract(), rewards("def task_reward(n):\n    return x", WOOD.reward)),
    "types": (contract(task_is_done=WOOD.is_done.replace("n)", "n: int) -> bool", 1)), rewards()),
}


@pytest.fixture(scope="module")
def write(tmp_path_factory) -> Written:
    return Written(tmp_path_factory.mktemp("repair"))


def test_each_mistake_has_a_line_with_a_remedy_and_is_accepted_once_corrected(write):
    at_once = after = 0
    told = [(answers, 0) for answers in GOOD.values()]
    told += [((bad, contract(), rewards()), 0) for bad in CONTRACTS.values()]
    told += [((contract(), bad, rewards()), 1) for bad in REWARDS.values()]
    assert len(told) >= 59
    for number, (answers, place) in enumerate(told):
        first = write(answers, number)
        accepted = write(answers, 1000 + number, repairs=3)
        assert accepted is not None, answers
        at_once, after = at_once + (first is not None), after + 1
        if len(answers) == 3:
            [refusal] = write.refusals(number)[place]
            assert first is None, answers
            assert "; " in refusal, refusal
            assert (write.root / str(1000 + number) / accepted.file).exists()
    assert at_once == len(GOOD)
    assert after / at_once >= 1.5


def test_a_contract_that_the_games_rules_contradict_is_refused_with_the_rule(write):
    """A table costs more than one piece of wood."""
    table = LIBRARY["Place Table"]
    asked = {"wood": 1}
    text = contract(
        "Set Table",
        like=table,
        requirements=amounts(asked),
        consumption=amounts(asked),
        gain=amounts({"near_table": 1}),
        ephemeral=["near_table"],
    )
    knowing = Written(write.root / "knowing")
    knowing.checks = replace(knowing.checks, contradictions=contradictions(GAME))
    assert knowing([text], 6000) is None
    [refusal] = knowing.refusals(6000)[0]
    assert refusal.startswith("the game says otherwise: "), refusal
    assert "wood" in refusal


def test_mistakes_that_go_on_are_given_up_after_so_many_rounds(write):
    assert write([contract(gain=[])] * 3, 5000, repairs=2) is None
    assert len(write.refusals(5000)) == 3
    assert write([contract(), *[rewards("x")] * 2], 5001, repairs=1) is None
    assert write([contract(like=STONE, name="x" * 300), contract(), rewards()], 5002, repairs=1)
