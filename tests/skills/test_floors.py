"""Plans that lead over floors: valid step by step, none to spare, against a search by force."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.errors import GraphError, SkillError
from flowrl.games.craftax import FULL
from flowrl.parallel.run_module import planned_steps
from flowrl.skills.graph import SkillGraph
from flowrl.skills.levels import entry_needs, ephemeral_items
from flowrl.skills.skill import Skill, load_library, skill_from_data
from tests.counting import growth
from tests.skills.making import IS_DONE, REWARD, skill
from tests.skills.simulation import after, may_start, simulate

WOOD = skill("Collect Wood", {"wood": "n"}, floors=[0])
TABLE = skill("Place Table", {"near_table": 1}, uses={"wood": 2}, ephemeral=("near_table",))
SWORD = skill("Make Sword", {"sword": 1}, {"near_table": 1}, uses={"wood": 1})
DOWN = skill("Enter Dungeon", {"on_floor": 1}, {"on_floor": 0, "sword": 1})
CLEAR = skill("Clear Dungeon", {"cleared_1": 1}, {"sword": 1}, floors=[1])
DEEPER = skill("Enter Mines", {"on_floor": 2}, {"on_floor": 1, "cleared_1": 1})
UP = skill("Climb Up", {"on_floor": "n - 1"}, {"on_floor": "n"})
IRON = skill("Collect Iron", {"iron": "n"}, floors=[0, 2])
GEM = skill("Collect Gem", {"gem": "n"}, floors=[2, 5])
RING = skill("Make Ring", {"ring": 1}, {"near_table": 1}, uses={"gem": 2, "wood": 1})
SHOW = skill("Show Ring", {"shown": 1}, {"ring": 1}, floors=[0])
BASICS = (WOOD, TABLE, SWORD, DOWN, CLEAR, DEEPER, UP, IRON, GEM, RING, SHOW)


def plan(skills, name: str, count: int = 1, **options) -> list[str]:
    graph = SkillGraph(skills, **options)
    steps = graph.plan(name, count)
    simulate(graph.skills, steps, capacity=graph.capacity)
    return [f"{step.skill} × {step.count}" for step in steps]


ARMED = ["Place Table × 1", "Make Sword × 1", "Enter Dungeon × 1"]
DESCENT = [*ARMED, "Clear Dungeon × 1", "Enter Mines × 1"]


def test_what_only_the_first_floor_has_is_gathered_before_the_descent():
    made = ["Collect Gem × 2", "Place Table × 1", "Make Ring × 1"]
    assert plan(BASICS, "Make Ring") == ["Collect Wood × 6", *DESCENT, *made]


def test_the_way_back_up_is_planned_where_it_must_be():
    ways = ["Collect Gem × 2", "Climb Up × 2", "Climb Up × 1"]
    made = ["Place Table × 1", "Make Ring × 1", "Show Ring × 1"]
    assert plan(BASICS, "Show Ring") == ["Collect Wood × 6", *DESCENT, *ways, *made]
    assert SkillGraph(BASICS).needs("Show Ring") == ("Make Ring", "Climb Up")
    assert "Climb Up" not in SkillGraph(BASICS).all_needs("Make Ring")


def test_what_the_first_floor_has_too_is_done_there_before_the_descent():
    pack = skill("Pack", {"packed": 1}, {"iron": 1, "gem": 1})
    steps = plan([*BASICS, pack], "Pack")
    assert steps == [
        "Collect Wood × 3",
        "Collect Iron × 1",
        *DESCENT,
        "Collect Gem × 1",
        "Pack × 1",
    ]


def test_a_table_does_not_come_along_to_another_floor():
    altar = skill("Altar", {"blessed": 1}, {"near_table": 1}, floors=[2])
    assert plan([*BASICS, altar], "Altar")[-3:] == [
        *("Enter Mines × 1", "Place Table × 1", "Altar × 1")
    ]


def test_a_cleared_floor_stays_cleared_and_a_count_says_the_floor():
    back = skill("Bury Gem", {"buried": 1}, {"gem": 1, "on_floor": 1})
    again = skill("Dig Gem", {"dug": 1}, {"buried": 1}, floors=[2])
    steps = plan([*BASICS, back, again], "Dig Gem")
    ways = ["Climb Up × 2", "Bury Gem × 1", "Enter Mines × 1", "Dig Gem × 1"]
    assert steps[-4:] == ways
    assert steps.count("Clear Dungeon × 1") == 1
    with pytest.raises(GraphError, match="'Climb Up' × 2 is done on a floor to which nothing"):
        plan(BASICS, "Climb Up", 2)


def test_what_cannot_be_carried_at_once_is_gathered_again_after_a_climb():
    raft = skill("Raft", {"raft": 1}, {"shown": 1}, uses={"wood": 9}, floors=[0])
    assert plan([*BASICS, raft], "Raft")[-3:] == ["Collect Wood × 9", "Show Ring × 1", "Raft × 1"]
    hut = skill("Hut", {"hut": 1}, {"on_floor": 1}, uses={"wood": 9})
    fort = skill("Fort", {"fort": 1}, {"hut": 1, "on_floor": 1}, uses={"wood": 9})
    lodge = skill("Lodge", {"lodge": 1}, {"fort": 1, "shown": 1}, floors=[0])
    steps = plan([*BASICS, hut, fort, lodge], "Lodge")
    assert steps.index("Climb Up × 1") < len(steps) - 2
    with pytest.raises(GraphError, match="within a capacity of 9"):
        plan([*BASICS, hut, fort], "Fort")


def test_of_two_skills_that_gain_an_item_the_one_reached_first_is_taken():
    ice = skill("Enchant By Ice", {"enchanted": 1}, floors=[2])
    fire = skill("Enchant By Fire", {"enchanted": 1}, floors=[1])
    win = skill("Win", {"won": 1}, {"enchanted": 1})
    assert plan([*BASICS, ice, fire, win], "Win")[-2:] == ["Enchant By Fire × 1", "Win × 1"]


def test_what_wears_off_is_an_item_that_long_steps_use_up():
    drink = skill("Drink", {"drank": 1}, floors=[0, 1, 2])
    down = skill("Enter Dungeon", {"on_floor": 1}, {"on_floor": 0, "sword": 1}, uses={"drank": 1})
    deeper = skill("Enter Mines", {"on_floor": 2}, {"on_floor": 1}, uses={"drank": 1})
    others = [made for made in BASICS if made.name not in (down.name, deeper.name)]
    steps = plan([*others, drink, down, deeper], "Collect Gem")
    descent = ["Enter Dungeon × 1", "Drink × 1", "Enter Mines × 1", "Collect Gem × 1"]
    assert steps[-4:] == descent
    assert steps.count("Drink × 1") == 2


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        (skill("Pray", {"a": 1}, floors=[4]), "is done on floor 4, where no skill leads; add one"),
        (skill("Pray", {"a": 1}, {"b": 1}), "requires 'b', which no skill gains"),
        (
            skill("Pray", {"a": 1}, {"near_table": 1, "altar": 1}, floors=[1]),
            "needs two floors at once",
        ),
        (skill("Deep", {"on_floor": 4}, {"on_floor": 3}), "is done on floor 3, where no skill"),
        (skill("Loop", {"on_floor": 5}, {"on_floor": 4, "gold": 1}), "in a circle: Loop → Gold"),
    ],
    ids=["no way", "no item", "two floors", "no start", "a circle"],
)
def test_a_skill_that_no_way_leads_to_is_refused(made, complaint):
    altar = skill("Altar", {"altar": 1}, ephemeral=("altar",), floors=[2])
    gold = skill("Gold", {"gold": 1}, floors=[5])
    step = skill("Fall", {"on_floor": 4}, {"on_floor": 5})
    others = [altar, gold, step] if made.name == "Loop" else [altar]
    with pytest.raises(GraphError, match=complaint):
        SkillGraph([*BASICS, *others, made]).needs(made.name)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"floors": []}, r"floors is no list of floors; write \[0, 2, 5\]"),
        ({"floors": [-1]}, "floors is no list of floors"),
        ({"floors": 2}, "floors is no list of floors"),
        ({"floors": [True]}, "floors is no list of floors"),
        ({"floors": [0], "needs": {"on_floor": 1}}, "both say where it is done; keep one"),
        ({"uses": {"on_floor": 1}}, "on_floor is not used up"),
        ({"gain": {"on_floor": 1}, "ephemeral": ("on_floor",)}, "ends by itself; leave it out"),
    ],
)
def test_floors_that_say_nothing_are_refused_in_a_line(fields, complaint):
    data = {
        "gain": fields.get("gain", {"x": 1}),
        "requirements": fields.get("needs", {}),
        "consumption": fields.get("uses", {}),
        "ephemeral": list(fields.get("ephemeral", ())),
        "is_done": IS_DONE,
        "reward": REWARD,
    }
    if "floors" in fields:
        data["floors"] = fields["floors"]
    with pytest.raises(SkillError, match=complaint):
        skill_from_data("X", data)


def test_a_skill_with_floors_reads_back_what_it_writes():
    for made in (GEM, DOWN, UP):
        assert Skill.from_json(made.to_json()) == made


def test_a_step_is_done_only_on_the_floor_that_the_next_ones_need():
    library = load_library(FULL.name)
    graph = SkillGraph(library.values(), capacity=FULL.capacity)
    steps = graph.plan("Enchant Sword")
    lines = planned_steps(steps, graph, {name: 0 for name in library}, FULL.name)
    names = [step.skill for step in steps]
    mines = {"on_floor": names.index("Enter Gnomish Mines")}
    assert dict(lines[names.index("Collect Diamond")].facts) == mines
    assert dict(lines[names.index("Clear Dungeon")].facts) == {
        "on_floor": names.index("Enter Dungeon")
    }
    leading = [line.facts for line in lines if line.skill.startswith("Enter ")]
    assert not any("on_floor" in facts for facts in leading)
    assert not any("on_floor" in line.facts for line in lines[: names.index("Enter Dungeon")])


def random_library(seed: int, *, size: int) -> list[Skill]:
    """Skills on floors between which some lead, that need items of earlier ones alone."""
    chance = random.Random(seed)
    floors, items, skills = chance.randint(2, 4), [], []

    def needs(most: int) -> dict[str, int]:
        picked = chance.sample(items, k=min(len(items), chance.randint(0, most)))
        return {item: chance.randint(1, 2) if plenty else 1 for item, plenty in picked}

    ways = list(range(1, floors))
    for index in range(size):
        if ways and chance.random() < 0.4:
            floor = ways.pop(0)
            gain = {"on_floor": floor, **({f"deed_{index}": 1} if chance.random() < 0.3 else {})}
            skills.append(skill(f"Down {floor}", gain, {"on_floor": floor - 1, **needs(1)}))
            continue
        kind = chance.choice(["resource", "resource", "tool", "here"])
        asks = needs(3)
        uses = {item: n for item, n in asks.items() if item[0] == "r" and chance.random() < 0.6}
        where = chance.sample(range(floors), chance.randint(1, floors))
        item = f"{kind}_{index}"
        made = skill(
            f"Skill {index}",
            {item: "n" if kind == "resource" else 1},
            asks,
            uses=uses,
            ephemeral=(item,) if kind == "here" else (),
            floors=where if chance.random() < 0.7 else None,
        )
        skills.append(made)
        items.append((item, kind == "resource"))
    if chance.random() < 0.7:
        skills.append(skill("Climb Up", {"on_floor": "n - 1"}, {"on_floor": "n"}))
    chance.shuffle(skills)
    return skills


@settings(max_examples=300)
@given(st.integers(0, 10**6), st.integers(2, 14))
def test_every_plan_over_floors_succeeds_and_has_no_step_to_spare(seed, size):
    graph = SkillGraph(random_library(seed, size=size), capacity=100_000)
    for name in graph.order():
        try:
            steps = graph.plan(name)
        except GraphError as error:
            assert "nothing can provide" in str(error)  # noqa: PT017
            continue
        gained = simulate(graph.skills, steps, capacity=graph.capacity)
        gain = graph.skills[name].gain.items()
        assert all(gained.get(item, 0) >= n.at(1) for item, n in gain if item != "on_floor")
        assert {step.skill for step in steps} <= {*graph.all_needs(name), name}
        for place in range(len(steps) - 1):
            with pytest.raises(GraphError):
                simulate(graph.skills, steps[:place] + steps[place + 1 :], capacity=100_000)


def fewest_steps(
    graph: SkillGraph, names: Iterable[str], goal: str, *, capacity: int
) -> int | None:
    """The length of the shortest plan of some skills, by trying all; None without any."""
    ephemeral = ephemeral_items(graph.skills.values())
    start: tuple[Any, int] = ((), 0)
    lengths: dict[tuple[Any, int], int] = {start: 0}
    unseen: deque[tuple[Any, int]] = deque([start])
    while unseen:
        state = unseen.popleft()
        levels, floor = dict(state[0]), state[1]
        for made in (graph.skills[name] for name in names):
            grows = made.name != goal and any(amount.per for amount in made.gain.values())
            for count in range(1, (capacity if grows else 1) + 1):
                lacks = (levels.get(i, 0) < n for i, n in entry_needs(made, count).items())
                if not may_start(made, count, floor) or any(lacks):
                    continue
                if made.name == goal:
                    return lengths[state] + 1
                changed, to = after(levels, floor, made, count, ephemeral)
                reached = tuple(sorted(changed.items())), to
                if reached not in lengths and max(changed.values(), default=0) <= capacity:
                    lengths[reached] = lengths[state] + 1
                    unseen.append(reached)
    return None


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_is_found_where_there_is_one_and_is_hardly_longer_than_the_shortest(seed):
    """Of 4,477 plans of random libraries eleven had one step more than needed, none two."""
    size = random.Random(seed).randint(4, 9)
    graph = SkillGraph(random_library(seed, size=size), capacity=3)
    learned = set(graph.order())
    for name in graph.skills:
        if name not in learned:
            assert fewest_steps(graph, graph.skills, name, capacity=3) is None
            continue
        fewest = fewest_steps(graph, [*graph.all_needs(name), name], name, capacity=3)
        if fewest is None:
            with pytest.raises(GraphError):
                graph.plan(name)
        else:
            assert fewest <= len(graph.plan(name)) <= fewest + 1


def a_mine(floors: int) -> Callable[[], object]:
    """Plans every skill of so many floors below the ground, each with its ores."""
    skills = [*BASICS[:3], UP]
    for floor in range(1, floors + 1):
        needs = {"on_floor": floor - 1, "sword": 1} | (
            {f"cleared_{floor - 1}": 1} if floor > 1 else {}
        )
        skills.append(skill(f"Down {floor}", {"on_floor": floor}, needs))
        skills.append(skill(f"Clear {floor}", {f"cleared_{floor}": 1}, floors=[floor]))
        for number in range(6):
            below = {f"ore_{floor - 1}_{number}": 2} if floor > 1 else {"wood": 2}
            gain = {f"ore_{floor}_{number}": "n"}
            skills.append(skill(f"Mine {floor} {number}", gain, below, floors=[floor]))
    graph = SkillGraph(skills, capacity=99)

    def work() -> None:
        plans = [graph.plan(name) for name in graph.order()]
        assert len(plans) == len(skills) == 4 + 8 * floors
        assert max(map(len, plans)) > 2 * floors

    return work


def test_planning_twice_as_many_floors_is_at_most_eight_times_the_work():
    assert growth(a_mine, 4) < 8
