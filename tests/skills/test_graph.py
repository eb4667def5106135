"""The skill graph: needs, plans, cycles, and laws over random libraries."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.errors import GraphError
from flowrl.games.craftax import CLASSIC
from flowrl.skills.amount import Amount
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import Skill, load_library
from tests.counting import growth
from tests.skills.making import skill
from tests.skills.simulation import simulate

WOOD = skill("Collect Wood", {"wood": "n"})
TABLE = skill(
    "Place Table", {"near_table": 1}, {"wood": "2"}, uses={"wood": "2"}, ephemeral=("near_table",)
)
WOOD_PICKAXE = skill(
    "Make Wood Pickaxe", {"wood_pickaxe": 1}, {"wood": 1, "near_table": 1}, uses={"wood": 1}
)
STONE = skill("Collect Stone", {"stone": "n"}, {"wood_pickaxe": 1})
STONE_PICKAXE = skill(
    "Make Stone Pickaxe",
    {"stone_pickaxe": 1},
    {"wood": 1, "stone": 1, "near_table": 1},
    uses={"wood": 1, "stone": 1},
)
BASICS = (WOOD, TABLE, WOOD_PICKAXE, STONE, STONE_PICKAXE)


def plan(skills, name, count=1, **options) -> list[tuple[str, int]]:
    graph = SkillGraph(skills, **options)
    steps = graph.plan(name, count)
    simulate(graph.skills, steps, capacity=graph.capacity)
    return [(step.skill, step.count) for step in steps]


def test_a_plan_gathers_once_and_places_the_table_right_before_it_is_needed():
    assert plan(BASICS, "Make Wood Pickaxe") == [
        ("Collect Wood", 3),
        ("Place Table", 1),
        ("Make Wood Pickaxe", 1),
    ]


def test_a_table_that_was_left_is_placed_again():
    assert plan(BASICS, "Make Stone Pickaxe") == [
        ("Collect Wood", 6),
        ("Place Table", 1),
        ("Make Wood Pickaxe", 1),
        ("Collect Stone", 1),
        ("Place Table", 1),
        ("Make Stone Pickaxe", 1),
    ]


def test_tools_made_at_the_same_table_share_it():
    sword = skill("Make Sword", {"sword": 1}, {"wood": 1, "near_table": 1}, uses={"wood": 1})
    hunt = skill("Hunt", {"meat": "n"}, {"sword": 1, "wood_pickaxe": 1})
    assert plan((*BASICS, sword, hunt), "Hunt") == [
        ("Collect Wood", 4),
        ("Place Table", 1),
        ("Make Wood Pickaxe", 1),
        ("Make Sword", 1),
        ("Hunt", 1),
    ]


def test_gathering_is_split_where_the_inventory_would_overflow():
    house = skill("Build House", {"house": 1}, {"wood": 8}, uses={"wood": 8})
    tower = skill("Build Tower", {"tower": 1}, {"wood": 8, "house": 1}, uses={"wood": 8})
    assert plan((WOOD, house, tower), "Build Tower") == [
        ("Collect Wood", 8),
        ("Build House", 1),
        ("Collect Wood", 8),
        ("Build Tower", 1),
    ]
    assert plan((WOOD, house, tower), "Build Tower", capacity=16)[0] == ("Collect Wood", 16)


@pytest.mark.parametrize("capacity", [3, 4, 5])
def test_what_cannot_be_carried_at_once_is_gathered_again_as_early_as_possible(capacity):
    """No wood can be gathered between a table and what is made beside it."""
    assert plan(BASICS, "Make Stone Pickaxe", capacity=capacity) == [
        ("Collect Wood", 3),
        ("Place Table", 1),
        ("Make Wood Pickaxe", 1),
        ("Collect Wood", 3),
        ("Collect Stone", 1),
        ("Place Table", 1),
        ("Make Stone Pickaxe", 1),
    ]


def test_what_the_librarys_deepest_plan_cannot_carry_at_once_is_gathered_again():
    """An iron sword beside the pickaxe needs 10 wood, of which 9 can be carried."""
    both = skill("Arm", {"armed": 1}, {"iron_pickaxe": 1, "iron_sword": 1})
    skills = [*load_library(CLASSIC.name).values(), both]
    names = [name for name, _ in plan(skills, "Arm", capacity=CLASSIC.capacity)]
    assert names.count("Collect Wood") == 2


def test_two_new_skills_of_one_name_are_refused():
    graph = SkillGraph([skill("Wood", {"wood": "n"})])
    twice = [skill("Raft", {"raft": 1}, {"wood": 2}), skill("Raft", {"raft": 1}, {"wood": 3})]
    with pytest.raises(GraphError, match="two of the new skills are 'Raft'; rename one"):
        graph.plus(twice)


def test_what_comes_one_at_a_time_is_made_anew_for_each_use():
    key = skill("Forge Key", {"key": 1})
    door = skill("Open Door", {"door": 1}, {"key": 1}, uses={"key": 1})
    chest = skill("Open Chest", {"gold": 1}, {"key": 1, "door": 1}, uses={"key": 1})
    names = [name for name, _ in plan((key, door, chest), "Open Chest")]
    assert names == ["Forge Key", "Open Door", "Forge Key", "Open Chest"]


def test_a_better_tool_is_provided_by_the_skill_that_yields_that_level():
    first = skill("Wood Pickaxe", {"pickaxe": 1}, {"wood": 1}, uses={"wood": 1})
    stone = skill("Stone", {"stone": "n"}, {"pickaxe": 1})
    second = skill("Stone Pickaxe", {"pickaxe": 2}, {"stone": 1}, uses={"stone": 1})
    iron = skill("Iron", {"iron": "n"}, {"pickaxe": 2})
    assert plan((WOOD, first, stone, second, iron), "Iron", 2) == [
        ("Collect Wood", 1),
        ("Wood Pickaxe", 1),
        ("Stone", 1),
        ("Stone Pickaxe", 1),
        ("Iron", 2),
    ]


def test_the_goals_count_scales_what_it_needs():
    plank = skill("Saw", {"plank": "n"}, {"wood": "2*n + 1"}, uses={"wood": "2*n"})
    assert plan((WOOD, plank), "Saw", 3) == [("Collect Wood", 7), ("Saw", 3)]


def test_the_first_of_equal_providers_is_taken_and_one_that_grows_goes_before_it():
    one = skill("Find Stick", {"wood": 1})
    other = skill("Chop", {"wood": "n"})
    fire = skill("Fire", {"warm": 1}, {"wood": 1})
    assert SkillGraph((WOOD, other, fire)).needs("Fire") == ("Collect Wood",)
    assert SkillGraph((other, WOOD, fire)).needs("Fire") == ("Chop",)
    assert SkillGraph((one, WOOD, fire)).needs("Fire") == ("Collect Wood",)


def test_a_skill_may_ask_for_more_of_what_it_yields_when_another_provides_it():
    more = skill("Breed Cows", {"cow": "n"}, {"cow": 2})
    graph = SkillGraph((more, skill("Find Cow", {"cow": "n"})))
    assert graph.needs("Breed Cows") == ("Find Cow",)


@pytest.mark.parametrize(
    ("name", "count", "complaint"),
    [
        ("Collect Wood", 10, "yields 10 wood; at most 9 can be carried"),
        ("Make Wood Pickaxe", 0, "at least 1"),
        ("Collect Wod", 1, "no skill 'Collect Wod'; closest are 'Collect Wood'"),
        ("Greedy", 1, "nothing can provide 8 wood, 1 near_table|within a capacity of 9"),
    ],
)
def test_an_impossible_goal_is_refused(name, count, complaint):
    greedy = skill("Greedy", {"x": 1}, {"wood": 8, "near_table": 1})
    graph = SkillGraph((*BASICS, greedy))
    with pytest.raises(GraphError, match=complaint):
        graph.plan(name, count)


def test_a_need_above_the_capacity_is_refused_at_once():
    with pytest.raises(GraphError, match=r"requires 12 wood, more than .* can yield"):
        SkillGraph([*BASICS, skill("Hoard", {"y": 1}, {"wood": 12})]).check()


def test_a_missing_gain_is_named_with_the_closest_ones():
    fire = skill("Fire", {"warm": 1}, {"wod": 1})
    with pytest.raises(GraphError, match=re.escape("'wod', which no skill gains; closest")):
        SkillGraph([*BASICS, fire]).needs("Fire")
    with pytest.raises(GraphError, match=re.escape("wood (Collect Wood)")):
        SkillGraph((*BASICS, fire)).check()


@pytest.mark.parametrize("order", list(itertools.permutations("ABC")), ids="".join)
def test_a_cycle_is_drawn(order):
    needs = {"A": "b", "B": "c", "C": "a"}
    made = {name: skill(name, {name.lower(): 1}, {needs[name]: 1}) for name in needs}
    graph = SkillGraph([made[name] for name in order])
    with pytest.raises(GraphError, match=r"A → B → C → A|B → C → A → B|C → A → B → C"):
        graph.check()
    with pytest.raises(GraphError, match="circle"):
        graph.plan("A")


def test_a_skill_that_needs_only_itself_is_a_cycle():
    with pytest.raises(GraphError, match="Egg → Egg"):
        SkillGraph([skill("Egg", {"egg": 1}, {"egg": 1})]).check()


@pytest.mark.parametrize(
    ("like", "complaint"),
    [
        ("Collect Stne", "is no skill here; closest are 'Collect Stone'"),
        ("Make Stone Pickaxe", "is learned later"),
        ("Collect Stone", "is learned later"),
    ],
)
def test_a_skill_is_like_one_that_is_learned_before_it(like, complaint):
    others = [made for made in BASICS if made.name != STONE.name]
    SkillGraph([*others, replace(STONE, like="Collect Wood")]).check()
    with pytest.raises(GraphError, match=re.escape(complaint)) as caught:
        SkillGraph([*others, replace(STONE, like=like)]).check()
    assert "'Collect Stone' is like" in str(caught.value)


@pytest.mark.parametrize("other", ["Collect  Wood", "Collect__Wood", "Collect _Wood"])
def test_names_that_differ_in_blanks_alone_are_refused(other):
    with pytest.raises(GraphError, match="share the slug 'Collect_Wood'"):
        SkillGraph((skill("Collect Wood", {"a": 1}), skill(other, {"b": 1})))


def test_two_names_with_one_slug_are_refused_by_both_names():
    with pytest.raises(GraphError, match="'A B' and 'A_B'"):
        SkillGraph((skill("A B", {"a": 1}), skill("A_B", {"b": 1})))


def test_the_order_puts_every_skill_after_its_needs():
    graph = SkillGraph(BASICS[::-1])
    assert graph.order() == tuple(made.name for made in BASICS)
    assert graph.all_needs("Collect Stone") == ("Collect Wood", "Place Table", "Make Wood Pickaxe")


def random_library(seed: int, *, size: int, fixed: bool = False) -> list[Skill]:
    """Skills that need only items of earlier ones: resources, tools and ephemeral facts."""
    chance = random.Random(seed)
    items: list[tuple[str, bool]] = []
    skills: list[Skill] = []
    for index in range(size):
        kind = chance.choice(["resource", "resource", "tool", "here"])
        picked = chance.sample(items, k=min(len(items), chance.randint(0, 3)))
        needs = {item: chance.randint(1, 2) if plenty else 1 for item, plenty in picked}
        uses = {item: need for item, need in needs.items() if chance.random() < 0.6}
        uses = {item: need for item, need in uses.items() if fixed or item.startswith("resource")}
        item = f"{kind}_{index}"
        grows = kind == "resource" and not (fixed and chance.random() < 0.5)
        here = (item,) if kind == "here" else ()
        gain = {item: "n" if grows else 1}
        skills.append(skill(f"Skill {index}", gain, needs, uses=uses, ephemeral=here))
        items.append((item, grows))
    chance.shuffle(skills)
    return skills


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.integers(1, 14))
def test_every_plan_succeeds_is_repeatable_and_has_no_step_to_spare(seed, size):
    skills = random_library(seed, size=size)
    graph = SkillGraph(skills, capacity=100_000)
    graph.check()
    for name in graph.skills:
        steps = graph.plan(name)
        gained = simulate(graph.skills, steps, capacity=graph.capacity)
        assert all(gained[item] >= amount.at(1) for item, amount in graph.skills[name].gain.items())
        assert steps == SkillGraph(skills, capacity=100_000).plan(name)
        assert {step.skill for step in steps} <= {*graph.all_needs(name), name}
        for place in range(len(steps) - 1):
            with pytest.raises(GraphError):
                simulate(graph.skills, steps[:place] + steps[place + 1 :], capacity=100_000)


def with_preferences(seed: int, skills: list[Skill]) -> list[Skill]:
    """The skills with second providers of their items, some embedded, and some needs named."""
    chance = random.Random(seed)
    items = [item for made in skills for item in made.gain if item.startswith("resource")]
    for number, item in enumerate(items):
        tools = [other for made in skills for other in made.gain if other.startswith("tool")]
        needs = {chance.choice(tools): 1} if tools and chance.random() < 0.6 else {}
        skills.append(skill(f"Other {number}", {item: "n"}, needs))
    graph = SkillGraph(skills, capacity=100_000)
    offers = {item: [made.name for made in skills if item in made.gain] for item in items}

    def preferring(made: Skill) -> Skill:
        named = {
            item: name
            for item in made.requirements
            if chance.random() < 0.3
            for name in offers.get(item, ())
            if name != made.name and made.name not in graph.all_needs(name)
        }
        return replace(made, embedded=chance.random() < 0.5, provided_by=named)

    return [preferring(made) for made in skills]


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.integers(1, 14))
def test_every_plan_with_preferred_providers_succeeds(seed, size):
    skills = with_preferences(seed, random_library(seed, size=size))
    graph = SkillGraph(skills, capacity=100_000)
    with contextlib.suppress(GraphError):  # several names together may close a circle
        graph.check()
    for name in graph.order():
        simulate(graph.skills, graph.plan(name), capacity=graph.capacity)
        chosen = {choice.item: choice.provider for choice in graph.choices(name)}
        assert chosen.items() >= graph.skills[name].provided_by.items()
        assert set(chosen.values()) == set(graph.needs(name))


def embedded(*skills: Skill) -> list[Skill]:
    return [replace(made, embedded=True) for made in skills]


PLANT = skill("Place Plant", {"plant": 1}, {"sapling": 1}, uses={"sapling": 1})
PICK = skill("Collect Sapling", {"sapling": "n"})
GATHER = skill("Gather Saplings", {"sapling": "n"}, {"wood_pickaxe": 1})


def test_a_users_own_skill_provides_before_the_librarys_and_the_graph_says_why():
    graph = SkillGraph([*embedded(*BASICS, PICK, PLANT), GATHER])
    assert graph.needs("Place Plant") == ("Gather Saplings",)
    assert [step.skill for step in graph.plan("Place Plant")][-3:] == [
        *("Make Wood Pickaxe", "Gather Saplings", "Place Plant")
    ]
    [choice] = graph.choices("Place Plant")
    assert (choice.provider, choice.others) == ("Gather Saplings", ("Collect Sapling",))
    assert choice.why == "your own skill goes before the library's"


def test_a_users_own_skill_does_not_provide_what_it_depends_on_itself():
    better = skill("Better Wood", {"wood": "n"}, {"wood_pickaxe": 1})
    graph = SkillGraph([*embedded(*BASICS), better])
    assert graph.needs("Make Wood Pickaxe") == ("Collect Wood", "Place Table")
    assert graph.needs("Make Stone Pickaxe")[0] == "Better Wood"


def test_an_own_skill_of_a_fixed_gain_leaves_the_librarys_plans_as_they_are():
    library = load_library(CLASSIC.name)
    own = skill("Gather Two Wood", {"wood": 2})
    graph = SkillGraph([*library.values(), own], capacity=CLASSIC.capacity)
    before = SkillGraph(library.values(), capacity=CLASSIC.capacity)
    for name in library:
        assert graph.plan(name) == before.plan(name)
    fixed = skill("Find Two Wood", {"wood": 2})
    crate = skill("Make Crate", {"crate": 1}, {"wood": 2})
    graph = SkillGraph([*embedded(fixed, crate), own])
    assert graph.needs("Make Crate") == ("Gather Two Wood",)


def test_a_skill_without_a_plan_does_not_go_into_a_graph():
    graph = SkillGraph([skill("Gather Two Wood", {"wood": 2}), TABLE])
    with pytest.raises(
        GraphError, match="nothing can provide 1 near_table, 1 wood before 'Make Wood"
    ):
        graph.plus([WOOD_PICKAXE])


@pytest.mark.parametrize("own", [False, True])
def test_a_skill_names_who_provides_its_needs(own):
    for name in ("Collect Sapling", "Gather Saplings"):
        plant = replace(PLANT, provided_by={"sapling": name}, embedded=not own)
        graph = SkillGraph([*embedded(*BASICS, PICK), plant, GATHER])
        assert graph.needs("Place Plant") == (name,)
        assert graph.plan("Place Plant")[-2].skill == name
        assert graph.choices("Place Plant")[0].why == "named in provided_by"


def test_a_provider_that_does_not_yield_the_item_is_refused():
    plant = replace(PLANT, provided_by={"sapling": "Collect Wood"})
    complaint = "1 sapling is provided by 'Collect Wood', which is no such skill here"
    with pytest.raises(GraphError, match=complaint):
        SkillGraph([*BASICS, PICK, plant]).check()


def test_providers_that_need_one_another_are_a_circle():
    more = skill("More Saplings", {"sapling": "n"}, {"plant": 1})
    plant = replace(PLANT, provided_by={"sapling": "More Saplings"})
    with pytest.raises(GraphError, match="Place Plant → More Saplings → Place Plant"):
        SkillGraph([PICK, plant, more]).check()


def chain(size: int, *, closed: bool) -> list[Skill]:
    made, one = skill("Link", {"x": 1}), Amount(per=0, base=1)
    return [
        replace(
            made,
            name=f"Link {number}",
            gain={f"x_{number}": one},
            requirements={f"x_{(number - 1) % size}": one} if number or closed else {},
        )
        for number in range(size)
    ]


def test_a_chain_of_skills_is_checked_in_linear_time():
    def check(size: int) -> Callable[[], None]:
        skills = chain(size, closed=False)[::-1]

        def work() -> None:
            graph = SkillGraph(skills)
            graph.check()
            assert graph.order()[0] == "Link 0"
            assert len(graph.all_needs(f"Link {size - 1}")) == size - 1

        return work

    assert growth(check, 400) < 2.2


def test_a_circle_of_a_thousand_skills_is_drawn_in_a_few_lines():
    with pytest.raises(GraphError) as caught:
        SkillGraph(chain(1_000, closed=True)).check()
    assert "→ … 992 more … →" in str(caught.value)
    assert len(str(caught.value)) < 400


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(3, 9))
def test_in_a_small_inventory_a_plan_succeeds_or_is_refused(seed, size, capacity):
    graph = SkillGraph(random_library(seed, size=size, fixed=True), capacity=capacity)
    for name in graph.order():
        with contextlib.suppress(GraphError):
            simulate_plan(graph, name)


def simulate_plan(graph: SkillGraph, name: str) -> None:
    steps = graph.plan(name)
    try:
        simulate(graph.skills, steps, capacity=graph.capacity)
    except GraphError as error:
        raise AssertionError(f"the plan {steps} fails: {error}") from error


def a_long_plan(size: int) -> SkillGraph:
    """So many skills, each needing the one before; every other one takes wood and a table."""
    chain = [WOOD, TABLE]
    for index in range(size):
        before = {f"tool_{index - 1}": 1} if index else {}
        needs = {"wood": 1, "near_table": 1, **before}
        if index % 2:
            needs = {**before}
        uses = {"wood": 1} if not index % 2 else {}
        chain.append(skill(f"Make {index}", {f"tool_{index}": 1}, needs, uses=uses))
    return SkillGraph(chain)


def test_the_work_of_planning_grows_as_the_square_of_a_plan():
    graph = a_long_plan(198)
    steps = graph.plan("Make 197")
    simulate(graph.skills, steps)
    assert len(steps) > 300
    assert growth(lambda size: partial(a_long_plan(size).plan, f"Make {size - 1}"), 40) < 4.5


def test_a_plan_that_doubles_with_every_level_is_refused_soon():
    skills = [skill("0 a", {"made_0_a": 1}), skill("0 b", {"made_0_b": 1})]
    for level in range(1, 14):
        below = {f"made_{level - 1}_{side}": 1 for side in "ab"}
        for side in "ab":
            skills.append(skill(f"{level} {side}", {f"made_{level}_{side}": 1}, below, uses=below))
    with pytest.raises(GraphError, match="the plan for '13 a' has over 400 steps"):
        SkillGraph(skills).plan("13 a")
