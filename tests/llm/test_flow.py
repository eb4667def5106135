"""What the flow hands out, in which order, and when it pauses."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.errors import GraphError
from flowrl.llm.flow import Flow, skills_towards
from flowrl.skills.graph import SkillGraph
from tests.counting import growth
from tests.skills.making import skill


def graph_of(**needs: str) -> SkillGraph:
    """Skills by letters: `graph_of(a="", b="a")`; each gains an item of its own name."""
    return SkillGraph(
        skill(name, {f"item_{name}": 1}, {f"item_{need}": 1 for need in wanted})
        for name, wanted in needs.items()
    )


def taken(flow: Flow):
    """The next skill, which the scheduler then has."""
    if handed := flow.next_skill():
        flow.on_skill_added(handed[0])
    return handed


def offered(flow: Flow) -> list[str]:
    """What the story takes before it waits."""
    names = []
    while not flow.check_frontier_blocked() and (handed := taken(flow)):
        names.append(handed[0])
    return names


DIAMOND = graph_of(a="", b="a", c="a", d="bc")


def test_skills_that_can_start_at_once_come_first():
    flow = Flow(graph_of(a="", b="a", c=""), known=())
    assert [taken(flow)[0] for _ in range(3)] == ["a", "c", "b"]
    assert flow.next_skill() is None


def test_one_skill_is_handed_out_ahead_and_then_the_frontier_is_blocked():
    flow = Flow(DIAMOND, known=())
    assert offered(flow) == ["a", "b"]
    assert flow.training_skills == {"a", "b"}


def test_a_skill_that_the_scheduler_could_not_add_is_handed_out_again():
    flow = Flow(DIAMOND, known=())
    assert flow.next_skill()[0] == flow.next_skill()[0] == "a"
    assert flow.training_skills == set()
    flow = Flow(DIAMOND, known=(), target="a")
    assert flow.add(DIAMOND, "b") == flow.add(DIAMOND, "b") == ("a", "b")


def test_a_skill_waits_for_indirect_needs_too():
    flow = Flow(graph_of(a="", b="a", c="b"), known=["b", "a"])
    flow.on_skill_complete("b")
    assert offered(flow) == ["c"]
    assert flow.check_frontier_blocked(), "c waits for a, through b"


def test_what_the_scheduler_knows_is_not_handed_out_and_counts_as_in_training():
    flow = Flow(DIAMOND, known=["a", "b"])
    assert flow.training_skills == {"a", "b"}
    assert offered(flow) == ["c"]
    flow.on_skill_complete("a")
    assert offered(flow) == ["d"]
    assert flow.next_skill() is None


def test_a_handed_out_skill_comes_with_its_definition_and_its_needs():
    flow = Flow(DIAMOND, known="abc")
    assert flow.next_skill() == ("d", DIAMOND.skills["d"])
    assert flow.dependencies("d") == ("b", "c")


def test_a_target_limits_the_flow_to_what_it_needs():
    assert skills_towards(DIAMOND, target="c", max_nodes=None) == ("a", "c")
    assert skills_towards(DIAMOND, target="c", max_nodes=2) == ("a", "c")


@pytest.mark.parametrize(("most", "names"), [(None, "abcd"), (1, "a"), (3, "abc"), (9, "abcd")])
def test_without_a_target_the_first_skills_of_the_library_are_trained(most, names):
    assert "".join(skills_towards(DIAMOND, target=None, max_nodes=most)) == names


def test_an_unknown_target_is_refused_with_the_names_there_are():
    with pytest.raises(GraphError, match=r"--target_skill 'x' is no skill here.*a, b, c, d"):
        skills_towards(DIAMOND, target="x", max_nodes=None)


def test_a_target_that_takes_too_many_skills_is_refused_with_the_number():
    with pytest.raises(GraphError, match=r"d takes 4 skills \(a, b, c, d\).*raise it to 4"):
        skills_towards(DIAMOND, target="d", max_nodes=3)


def test_walking_a_chain_of_skills_costs_at_most_its_square():
    def walk(length: int) -> Callable[[], None]:
        names = [f"s{k}" for k in range(length)]
        graph = SkillGraph(
            skill(name, {f"item_{k}": 1}, {f"item_{k - 1}": 1} if k else {})
            for k, name in enumerate(names)
        )

        def work() -> None:
            flow, handed = Flow(graph, known=()), []
            while len(handed) < length:
                for name in offered(flow):
                    handed.append(name)
                    assert flow.weight(name) == length - len(handed)
                flow.on_skill_complete(min(flow.training_skills, key=handed.index))
            assert handed == names

        return work

    assert growth(walk, 100) < 4.5


@st.composite
def graphs(draw) -> SkillGraph:
    """Up to nine skills, each needing some of those before it, in a library of any order."""
    size = draw(st.integers(1, 9))
    letters = "abcdefghi"[:size]
    needs = {
        letter: draw(
            st.sets(st.sampled_from(letters[:place]), max_size=3) if place else st.just("")
        )
        for place, letter in enumerate(letters)
    }
    order = draw(st.permutations(letters))
    return graph_of(**{letter: "".join(sorted(needs[letter])) for letter in order})


def waits(graph: SkillGraph, skill_name: str, training: set[str]) -> bool:
    return bool(training & set(graph.all_needs(skill_name)))


@settings(deadline=None, max_examples=200)
@given(graph=graphs(), seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0.0, 0.3, 1.0]))
def test_every_skill_is_handed_out_once_after_its_needs_however_trainings_end(graph, seed, share):
    chance = random.Random(seed)
    flow, started, training = Flow(graph, known=()), [], set()
    while True:
        while not flow.check_frontier_blocked() and (handed := taken(flow)):
            started.append(handed[0])
            training.add(handed[0])
            assert flow.training_skills == training
        left = [name for name in graph.order() if name not in started]
        ahead = bool(started) and waits(graph, started[-1], training)
        blocked = ahead and all(waits(graph, name, training) for name in left)
        assert flow.check_frontier_blocked() == blocked
        assert blocked or not left, "it pauses only where all that is left waits"
        if not training:
            break
        can_end = [name for name in sorted(training) if not waits(graph, name, training)]
        assert can_end, "somebody in training waits for nobody"
        over = chance.choice(can_end)
        training.discard(over)
        (flow.on_skill_failed if chance.random() < share else flow.on_skill_complete)(over)
    assert sorted(started) == sorted(graph.order()), "everything is handed out, once"
    for place, name in enumerate(started):
        assert set(graph.all_needs(name)) <= set(started[:place])


def test_a_skill_weighs_as_much_as_the_wanted_skills_that_wait_for_it():
    flow = Flow(DIAMOND, known=())
    assert {name: flow.weight(name) for name in "abcd"} == {"a": 3, "b": 1, "c": 1, "d": 0}
    assert Flow(DIAMOND, known=(), target="b").weight("a") == 1
