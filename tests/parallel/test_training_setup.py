from __future__ import annotations

import ast
import dataclasses
import fcntl
import os
import threading

import pytest

from flowrl import notices, storage
from flowrl.config import PPOConfig
from flowrl.envs.skill_module import load_module
from flowrl.errors import (
    BusyError,
    ConfigError,
    ExpertCorruptError,
    ExpertIndexError,
    ExpertMissingError,
    ExpertShapeError,
    FileRefusedError,
    GraphError,
)
from flowrl.experts.store import ExpertStore
from flowrl.launchers import run_status
from flowrl.parallel.training_setup import (
    KEPT_FAILURES,
    build_remapping,
    clear_for_launch,
    fail_run,
    generate_module_with_remapping,
    pinned_versions,
    read_own_run,
)
from flowrl.paths import GraphPaths
from flowrl.runs import read_run
from flowrl.skills.graph import SkillGraph
from tests.experts.making import all_files, content_of, make_expert
from tests.machine import living
from tests.parallel.making import (
    GRAPH,
    LIBRARY,
    PICKAXE,
    TABLE,
    WOOD,
    a_run,
    make_skill,
    prepare,
    train,
    tree,
)


@pytest.fixture
def trained(graph_paths) -> GraphPaths:
    """A graph whose experts 0 and 5 are merged."""
    train(graph_paths, WOOD, 0, {}, acted={0: 50})
    train(graph_paths, TABLE, 5, {WOOD: 0}, acted={0: 10, 5: 20})
    return graph_paths


# --- remapping


@pytest.mark.parametrize(
    "completed",
    [{"A": {"expert_idx": 7, "frames": 3}, "B": {"expert_idx": 2}}, {"A": 7, "B": 2}],
    ids=["entries", "indices"],
)
def test_dependencies_may_be_named(completed):
    global_to_local, _ = build_remapping(["A", "B"], 9, completed)
    assert global_to_local == {2: 0, 7: 1, 9: 2}


def test_a_named_dependency_that_is_not_completed_is_refused():
    with pytest.raises(ExpertMissingError, match="'B' is not completed"):
        build_remapping(["A", "B"], 9, {"A": 7})


# --- the generated module


def constants_of(text: str) -> dict:
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def functions_of(text: str) -> dict[str, ast.FunctionDef]:
    return {n.name: n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)}


def test_the_module_carries_remapping_plan_and_functions_of_every_step():
    text = generate_module_with_remapping(a_run((WOOD, 3, 0), (TABLE, 1, 10)), LIBRARY)
    assert constants_of(text) == {
        "GAME": "Craftax-Classic-Symbolic-v1",
        "GLOBAL_TO_LOCAL": {0: 0, 10: 1},
        "LOCAL_TO_GLOBAL": {0: 0, 1: 10},
        "PLAN": [
            {"skill": WOOD, "count": 3, "expert": 0},
            {"skill": TABLE, "count": 1, "expert": 10},
        ],
    }
    assert list(functions_of(text)) == [
        f"task_{step}_{part}" for step in (0, 1) for part in ("is_done", "reward", "network_number")
    ]
    assert "return GLOBAL_TO_LOCAL[10]" in text
    assert "# Step 0: Collect Wood × 3, expert 0\n" in text


def test_a_step_s_count_is_the_default_of_n():
    text = generate_module_with_remapping(a_run((WOOD, 3, 0), (WOOD, 5, 0)), LIBRARY)
    assert "def task_0_is_done(inventory, n=3):" in text
    assert "def task_1_is_done(inventory, n=5):" in text


def test_n_comes_last_and_is_not_added_unasked():
    skill = make_skill(
        "Odd",
        is_done='def task_is_done(n, inventory):\n    """Enough?"""\n    return inventory.wood > n',
    )
    text = generate_module_with_remapping(a_run(("Odd", 4, 1)), {"Odd": skill})
    assert 'def task_0_is_done(inventory, n=4):\n    """Enough?"""\n' in text
    assert "def task_0_reward(env_reward):" in text


@pytest.mark.parametrize(
    ("env_name", "package", "more"),
    [
        ("Craftax-Classic-Symbolic-v1", "craftax.craftax_classic", ""),
        ("Craftax-Symbolic-v1", "craftax.craftax", ", ItemType, MobType"),
    ],
)
def test_the_enums_come_from_the_run_s_environment(env_name, package, more):
    text = generate_module_with_remapping(a_run((WOOD, 1, 0), env_name=env_name), LIBRARY)
    assert f"from {package}.constants import Achievement, Action, BlockType{more}\n" in text


@pytest.mark.parametrize(
    "name",
    [
        'a"""\nimport os\nos.abort()\n"""',
        "x\nimport os",
        "x\rimport os",
        'quote " and \' and """',
        "ends with a backslash \\",
        "\\u000aimport os",
        "line\u2028import os",
        "木を集める",
        "{0} %s $(id)",
        '"',
    ],
    ids=repr,
)
def test_a_name_never_becomes_code(name):
    skills = {name: dataclasses.replace(LIBRARY[WOOD], name=name)}
    plain = generate_module_with_remapping(a_run((WOOD, 2, 0)), LIBRARY)
    text = generate_module_with_remapping(a_run((name, 2, 0)), skills)
    assert constants_of(text)["PLAN"] == [{"skill": name, "count": 2, "expert": 0}]
    shape, wanted = ([type(n) for n in ast.parse(t).body] for t in (text, plain))
    assert shape == wanted
    assert len(text.splitlines()) == len(plain.splitlines())


@pytest.mark.parametrize(
    "is_done",
    ["def task_is_done(n):\n    return n\nimport os", "task_is_done = 1", "def ("],
    ids=["two statements", "no function", "no Python"],
)
def test_a_source_that_is_not_one_function_is_refused(is_done):
    skills = {WOOD: dataclasses.replace(LIBRARY[WOOD], is_done=is_done)}
    with pytest.raises((ValueError, SyntaxError, AssertionError)):
        generate_module_with_remapping(a_run((WOOD, 2, 0)), skills)


# --- preparing a run


def test_a_first_run_has_no_seeds_and_one_network(graph_paths):
    run_folder, module_path, policies_folder = prepare(graph_paths, WOOD, 0, {})
    assert run_folder == graph_paths.training_runs / "skill_0_Collect_Wood"
    assert module_path == run_folder / "0.py"
    assert policies_folder == run_folder / "0_policies"
    assert tree(run_folder) == ["0.py", "0_policies", "run.json"]


def test_run_json_says_what_the_run_is(trained):
    ready = prepare(trained, PICKAXE, 50, {WOOD: 0, TABLE: 5}, attempt=2)
    run = read_run(ready.run_paths)
    assert run == ready.run
    assert run.run_id.startswith("e50.a2.")
    assert run.experts == (0, 5, 50)
    assert [(s.skill, s.count, s.expert) for s in run.plan] == [
        (WOOD, 3, 0),
        (TABLE, 1, 5),
        (PICKAXE, 1, 50),
    ]
    assert [(a.index, a.skill, a.frames) for a in run.ancestors] == [(0, WOOD, 60), (5, TABLE, 20)]
    assert run.config["layer_size"] == PPOConfig().layer_size
    assert run.config["lr"] == PPOConfig().lr


def test_a_new_expert_begins_as_a_copy_of_another_skill_s_and_only_a_new_one(trained):
    ready = prepare(trained, PICKAXE, 50, {WOOD: 0, TABLE: 5}, init_from=TABLE)
    assert content_of(ready.run_paths.seed(2)) == content_of(ready.run_paths.seed(1))
    assert [ancestor.index for ancestor in ready.run.ancestors] == [0, 5]
    again = prepare(trained, TABLE, 5, {WOOD: 0}, init_from=WOOD)
    assert content_of(again.run_paths.seed(1)).endswith("expert 5")


def liking(name: str) -> SkillGraph:
    """The graph, in which the pickaxe is like another skill."""
    skills = {**GRAPH.skills, PICKAXE: dataclasses.replace(GRAPH.skills[PICKAXE], like=name)}
    return SkillGraph(skills.values(), capacity=GRAPH.capacity)


def test_a_new_expert_begins_as_a_copy_of_the_one_that_its_skill_is_like(trained):
    needs = {WOOD: 0, TABLE: 5}
    ready = prepare(trained, PICKAXE, 50, needs, graph=liking(WOOD))
    assert content_of(ready.run_paths.seed(2)) == content_of(ready.run_paths.seed(0))
    assert ready.run.copied == read_run(ready.run_paths).copied == ready.run.ancestors[0]
    assert [ancestor.index for ancestor in ready.run.ancestors] == [0, 5]
    asked = prepare(trained, PICKAXE, 50, needs, graph=liking(WOOD), init_from=TABLE)
    assert asked.run.copied == asked.run.ancestors[1]


def test_a_skill_that_is_like_one_that_is_not_merged_begins_from_nothing(trained):
    ready = prepare(trained, PICKAXE, 50, {WOOD: 0, TABLE: 5}, graph=liking("Collect Sapling"))
    assert ready.run.copied is None
    assert not ready.run_paths.seed(2).exists()


def test_a_skill_without_an_expert_cannot_be_copied(trained):
    before = all_files(trained.root)
    with pytest.raises(ConfigError, match=r"--init_from Place Tabel has no .*'Place Table'; train"):
        prepare(trained, PICKAXE, 50, {WOOD: 0, TABLE: 5}, init_from="Place Tabel")
    assert all_files(trained.root) == before


def drop_version(graph_paths: GraphPaths) -> None:
    store = ExpertStore(graph_paths)
    storage.remove_tree(store.path_of(store.manifest().experts[5]))


def flip_a_bit(graph_paths: GraphPaths) -> None:
    store = ExpertStore(graph_paths)
    file = store.path_of(store.manifest().experts[5]) / "arrays" / "d0"
    file.write_bytes(b"\x00" + file.read_bytes()[1:])


@pytest.mark.parametrize(
    ("completed", "damage", "error", "words"),
    [
        ({WOOD: 0}, None, ExpertMissingError, "'Place Table' is not completed"),
        ({WOOD: 0, TABLE: 7}, None, ExpertMissingError, r"expert 7 \(Place Table\) is not in"),
        ({WOOD: 5, TABLE: 0}, None, ExpertIndexError, "expert 5 is that of 'Place Table'"),
        ({WOOD: 0, TABLE: 0}, None, ExpertIndexError, "0, 0, 50"),
        ({WOOD: 0, TABLE: 50}, None, ExpertIndexError, "0, 50, 50"),
        ({WOOD: 0, TABLE: 5}, drop_version, ExpertMissingError, r"expert 5 \(Place Table\)"),
        ({WOOD: 0, TABLE: 5}, flip_a_bit, ExpertCorruptError, r"expert 5 \(Place Table\)"),
    ],
    ids=["not trained", "not merged", "swapped", "shared", "itself", "lost", "bit flip"],
)
def test_a_refused_run_leaves_the_disk_as_it_was(trained, completed, damage, error, words):
    if damage:
        damage(trained)
    before = all_files(trained.root)
    with pytest.raises(error, match=words):
        prepare(trained, PICKAXE, 50, completed)
    after = all_files(trained.root)
    told = {name for name in after if name.startswith("notices/")}
    assert {name: after[name] for name in after.keys() - told} == before
    assert told == ({"notices/damage_expert_5.json"} if damage else set())
    assert tree(trained.training_runs) == []


@pytest.mark.parametrize("damage", [drop_version, flip_a_bit], ids=["lost", "bit flip"])
def test_a_damaged_expert_is_replaced_by_its_previous_version_before_a_run_starts(trained, damage):
    earlier = ExpertStore(trained).manifest().experts[5]
    train(trained, TABLE, 5, {WOOD: 0}, acted={5: 90})
    damage(trained)
    ready = prepare(trained, PICKAXE, 50, {WOOD: 0, TABLE: 5})
    assert ready.run.ancestors[1].version == earlier.version
    assert content_of(ready.run_paths.seed(1)) == content_of(
        trained.expert_version(5, TABLE, earlier.version)
    )
    assert ExpertStore(trained).manifest().experts[5] == earlier
    assert "counts again" in notices.read(trained)["damage_expert_5"]


def test_a_damaged_run_record_keeps_every_version_from_the_garbage(trained):
    ready = prepare(trained, PICKAXE, 50, {WOOD: 0, TABLE: 5})
    ready.run_paths.run_json.write_text("{")
    assert pinned_versions(trained) is None
    stale = trained.expert_version(0, WOOD, "v000001-stale")
    make_expert(stale, "named by nobody")
    assert ExpertStore(trained).collect_garbage(pinned_versions(trained)) == ()
    ExpertStore(trained).recover(pinned_versions(trained))
    assert stale.is_dir()
    fail_run(trained, 50, PICKAXE)
    assert ExpertStore(trained).collect_garbage(pinned_versions(trained)) == (stale,)


@pytest.mark.parametrize("changed", [0, 5])
def test_a_seed_that_changes_while_it_is_copied_is_refused(trained, monkeypatch, changed):
    copy_tree = storage.copy_tree
    store = ExpertStore(trained)
    versions = store.path_of(store.manifest().experts[changed]).parent

    def copy_late(source, target):
        if source.parent == versions:
            (source / "arrays" / "d0").write_text("other")
        return copy_tree(source, target)

    monkeypatch.setattr(storage, "copy_tree", copy_late)
    with pytest.raises(ExpertCorruptError, match=rf"^expert {changed} "):
        prepare(trained, PICKAXE, 50, {WOOD: 0, TABLE: 5})
    assert tree(trained.training_runs) == []


def test_a_run_of_another_width_is_refused_with_the_remedy(trained):
    with pytest.raises(ExpertShapeError) as refused:
        prepare(trained, PICKAXE, 50, {WOOD: 0, TABLE: 5}, config=PPOConfig(layer_size=128))
    message = str(refused.value)
    for words in (
        "expert 0 (Collect Wood, ",
        "actor/dense_0/bias",
        "(64,)",
        "(128,)",
        "start with --layer_size 64",
    ):
        assert words in message


def test_experts_that_see_other_observations_ask_for_the_version_that_trained_them(trained):
    with pytest.raises(ExpertShapeError, match="go on with the version of flowrl that trained it"):
        prepare(trained, PICKAXE, 50, {WOOD: 0, TABLE: 5}, config=PPOConfig(sight=False))


def test_an_unknown_skill_is_refused_before_anything_is_made(graph_paths):
    with pytest.raises(GraphError):
        prepare(graph_paths, "Fly", 0, {})
    assert not graph_paths.root.exists()


def test_the_folder_of_a_dead_attempt_moves_to_failed(graph_paths):
    first = prepare(graph_paths, WOOD, 0, {})
    (first.run_folder / "half.txt").write_text("left")
    second = prepare(graph_paths, WOOD, 0, {}, attempt=2)
    assert tree(second.run_folder) == ["0.py", "0_policies", "run.json"]
    failed = graph_paths.failed_runs / "skill_0_Collect_Wood.attempt1"
    assert (failed / "half.txt").read_text() == "left"
    assert first.run.run_id != second.run.run_id


def test_a_living_run_is_not_prepared_over(graph_paths):
    ready = prepare(graph_paths, WOOD, 0, {})
    for over in (
        lambda: prepare(graph_paths, WOOD, 0, {}, attempt=2),
        lambda: clear_for_launch(ready.run_paths),
    ):
        with living(ready.run_paths), pytest.raises(BusyError, match=r"run\.lock"):
            over()
    assert read_run(ready.run_paths) == ready.run


def test_a_disk_that_fails_while_building_leaves_nothing(trained, monkeypatch):
    monkeypatch.setenv("FLOWRL_FAULT", "prepare.built:enospc")
    before = all_files(trained.root)
    with pytest.raises(OSError, match="No space left"):
        prepare(trained, PICKAXE, 50, {WOOD: 0, TABLE: 5})
    assert all_files(trained.root) == before
    assert tree(trained.training_runs) == []


# --- run folders afterwards


def test_the_same_attempt_is_launched_again_without_its_old_ending(graph_paths):
    ready = prepare(graph_paths, WOOD, 0, {})
    make_expert(ready.run_paths.resume, "half trained")
    for path in (
        ready.run_paths.start_json,
        ready.run_paths.exit_json,
        ready.run_paths.training_log,
    ):
        path.write_text("{}")
    clear_for_launch(graph_paths.run(0, WOOD))
    assert read_own_run(graph_paths.run(0, WOOD), WOOD) == ready.run
    assert not ready.run_paths.start_json.exists()
    assert not ready.run_paths.exit_json.exists()
    assert ready.run_paths.training_log.exists()
    assert content_of(ready.run_paths.resume) == "half trained"


def test_there_is_nothing_to_resume_without_a_folder(graph_paths):
    with pytest.raises(FileRefusedError, match=r"run\.json"):
        read_own_run(graph_paths.run(0, WOOD), WOOD)


def test_the_newest_failures_are_kept_also_after_attempts_began_anew(graph_paths):
    for attempt in (*range(1, KEPT_FAILURES + 2), 1):
        prepare(graph_paths, WOOD, 0, {}, attempt=attempt)
        target = fail_run(graph_paths, 0, WOOD)
        assert target is not None
        assert target.is_dir()
    kept = {path.name.partition(".")[2] for path in graph_paths.failed_runs.iterdir()}
    assert kept == {"attempt1", "attempt3", "attempt4", "attempt5", "attempt6"}


def test_a_failure_of_one_skill_forgets_none_of_another(graph_paths):
    prepare(graph_paths, WOOD, 0, {})
    fail_run(graph_paths, 0, WOOD)
    for attempt in range(1, KEPT_FAILURES + 3):
        prepare(graph_paths, "Collect Drink", 1, {}, attempt=attempt)
        fail_run(graph_paths, 1, "Collect Drink")
    assert graph_paths.failed_run(0, WOOD, 1).is_dir()


def test_a_run_that_lives_is_not_moved_away_under_its_trainer(graph_paths):
    ready = prepare(graph_paths, WOOD, 0, {})
    with living(ready.run_paths), pytest.raises(BusyError, match=r"run\.lock"):
        fail_run(graph_paths, 0, WOOD)
    assert read_run(ready.run_paths) == ready.run
    assert not graph_paths.failed_runs.exists()
    assert fail_run(graph_paths, 0, WOOD) == graph_paths.failed_run(0, WOOD, 1)


def test_a_run_whose_runner_is_just_ending_is_moved(graph_paths, monkeypatch):
    assert run_status.RUNNER_EXIT_SECONDS == 1.0
    monkeypatch.setattr(run_status, "RUNNER_EXIT_SECONDS", 60.0)
    ready = prepare(graph_paths, WOOD, 0, {})
    holder = os.open(ready.run_paths.lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)
    ending = threading.Timer(0.1, os.close, [holder])
    ending.start()
    assert fail_run(graph_paths, 0, WOOD) == graph_paths.failed_run(0, WOOD, 1)
    ending.join()


def test_failing_a_run_without_a_folder_is_no_error(graph_paths):
    assert fail_run(graph_paths, 0, WOOD) is None


def test_a_live_run_pins_the_versions_it_started_from(trained):
    prepare(trained, PICKAXE, 50, {WOOD: 0, TABLE: 5})
    experts = ExpertStore(trained).manifest().experts
    assert pinned_versions(trained) == {(0, experts[0].version), (5, experts[5].version)}


def test_the_limit_that_a_skill_sets_is_in_the_run_and_in_its_module(graph_paths):
    graph = SkillGraph([make_skill("Long", max_steps=900), make_skill("Short", gain="other")])
    for expert, (name, limit) in enumerate([("Long", 900), ("Short", None)]):
        prepared = prepare(graph_paths, name, expert, {}, graph=graph)
        assert [step.max_steps for step in read_run(prepared.run_paths).plan] == [limit]
        plan = prepared.run_paths.module.read_text().partition("PLAN = ")[2].partition("]")[0]
        assert ("'max_steps': 900" in plan) == (limit is not None)


def test_what_the_inventory_must_hold_is_in_the_run_and_in_its_module(trained):
    prepared = prepare(trained, PICKAXE, 50, {WOOD: 0, TABLE: 5})
    steps = {step.skill: dict(step.gains) for step in read_run(prepared.run_paths).plan}
    assert steps == {WOOD: {"wood": 3}, TABLE: {}, PICKAXE: {"wood_pickaxe": 1}}
    tasks = load_module(prepared.run_paths.module).tasks
    assert {task.skill: dict(task.gains) for task in tasks} == steps
