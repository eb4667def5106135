"""Both ends of the seam: experts with real arrays, and modules as the trainer reads them."""

from __future__ import annotations

import dataclasses

import pytest

from flowrl import storage
from flowrl.envs.skill_module import load_module
from flowrl.errors import SkillError
from flowrl.experts import checkpoint
from flowrl.experts.merge import frame_count
from flowrl.experts.store import ExpertStore
from flowrl.parallel.training_setup import PreparedRun, generate_module_with_remapping
from flowrl.paths import GraphPaths
from flowrl.runs import read_result
from flowrl.skills.graph import SkillGraph
from tests.experts.making import SHAPES, candidate_in, digest_of_arrays, random_expert
from tests.parallel.making import (
    GRAPH,
    LIBRARY,
    WOOD,
    a_run,
    finish,
    make_skill,
    merge,
    prepare,
    report_anew,
)

ITEMS = tuple(f"item{letter}" for letter in "abcdefghijkl")
LIKE = checkpoint.like_of(SHAPES)


def number_of(folder, numbers) -> int:
    """Which of the experts is in a folder, bit for bit."""
    found = checkpoint.load_expert(folder, LIKE)
    (number,) = [number for number in numbers if _same(found, random_expert(number))]
    return number


def _same(one: dict, other: dict) -> bool:
    return all(
        one[net][layer][leaf].tobytes() == other[net][layer][leaf].tobytes()
        for net, layer, leaf in (path.split("/") for path in SHAPES)
    )


@pytest.fixture
def twelve(tmp_path) -> GraphPaths:
    graph_paths = GraphPaths(tmp_path / "graph")
    store = ExpertStore(graph_paths)
    candidates = []
    for number in range(12):
        folder = tmp_path / "offers" / str(number)
        checkpoint.save_expert(folder, random_expert(number))
        content = checkpoint.array_digest(random_expert(number))
        candidates.append(candidate_in(folder, number, acted=5, content=content))
    store.commit("r0", candidates, rule=frame_count)
    return graph_paths


def trained(ready: PreparedRun, numbers: dict[int, int]) -> None:
    """Finish a run; experts named in `numbers` come back with the arrays of that number.

    All are saved anew, as a trainer does, and the others come back as they were.
    """
    finish(ready.run_paths, dict.fromkeys(numbers, 100))
    for local, expert in enumerate(ready.run.experts):
        place = ready.run_paths.final(local)
        storage.remove_tree(place)
        checkpoint.save_expert(place, random_expert(numbers.get(expert, expert)))
    report_anew(ready.run_paths, *range(len(ready.run.experts)), digest=digest_of_arrays)
    assert read_result(ready.run_paths).frames == 100 * len(numbers)


def test_twelve_experts_come_back_bit_for_bit_and_1_is_not_10(twelve):
    skills = [make_skill(f"Skill {i}", gain=item) for i, item in enumerate(ITEMS)]
    graph = SkillGraph([*skills, make_skill("Last", needs=ITEMS, gain="last")])
    completed = {f"Skill {i}": i for i in range(12)}
    ready = prepare(twelve, "Last", 30, completed, graph=graph)
    for local in range(12):
        assert number_of(ready.run_paths.seed(local), range(12)) == local
    trained(ready, {1: 101, 10: 110, 30: 130})
    done = merge(twelve, ready)
    taken = {index for index, entry in done["experts"].items() if entry["verdict"] == "take"}
    assert taken == {1, 10, 30}
    store = ExpertStore(twelve)
    numbers = [*range(12), 101, 110, 130]
    found = {
        index: number_of(store.verify(version), numbers)
        for index, version in store.manifest().experts.items()
    }
    assert found == {**{i: i for i in range(12)}, 1: 101, 10: 110, 30: 130}


@pytest.mark.parametrize("accounting", ["acted", "total"])
def test_an_expert_that_did_not_act_is_kept_although_its_files_are_others(twelve, accounting):
    skills = [make_skill(f"Skill {i}", gain=ITEMS[i]) for i in range(2)]
    graph = SkillGraph([*skills, make_skill("Last", needs=ITEMS[:2], gain="last")])
    ready = prepare(twelve, "Last", 30, {"Skill 0": 0, "Skill 1": 1}, graph=graph)
    trained(ready, {1: 101, 30: 130})
    before = ExpertStore(twelve).manifest().experts
    assert read_result(ready.run_paths).experts[0].sha256 != before[0].sha256
    done = merge(twelve, ready, frame_accounting=accounting)
    assert done["experts"][0]["why"] == "the run did not change it"
    assert [done["experts"][expert]["verdict"] for expert in (0, 1, 30)] == ["keep", "take", "take"]
    assert ExpertStore(twelve).manifest().experts[0] == before[0]


@pytest.mark.parametrize("skill", LIBRARY)
def test_the_trainer_reads_every_generated_module(skill):
    steps = GRAPH.plan(skill)
    numbers = {name: 3 * place for place, name in enumerate(LIBRARY)}
    run = a_run(*((step.skill, step.count, numbers[step.skill]) for step in steps))
    module = load_module(generate_module_with_remapping(run, LIBRARY))
    assert [(task.skill, task.count) for task in module.tasks] == [
        (step.skill, step.count) for step in steps
    ]
    assert [module.experts[task.expert_local] for task in module.tasks] == [
        numbers[step.skill] for step in steps
    ]


def module_of(name: str):
    skills = {name: dataclasses.replace(LIBRARY[WOOD], name=name)}
    return load_module(generate_module_with_remapping(a_run((name, 2, 0)), skills))


def test_the_trainer_reads_a_module_with_a_hostile_name():
    name = 'a"""; import os; """\\\\'
    assert [task.skill for task in module_of(name).tasks] == [name]
    with pytest.raises(SkillError, match="needs a skill"):  # run.json has no such name, either
        module_of('a"""\nimport os\n"""\\')
