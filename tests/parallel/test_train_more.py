"""Completed skills that are trained on: the whole chain with stand-in trainers."""

from __future__ import annotations

import json
import shutil

import pytest

from flowrl import bottomup, cli, runs, storage
from flowrl.config import ScheduleConfig
from flowrl.experts import repair
from flowrl.experts.store import ExpertStore
from flowrl.parallel import outcomes
from flowrl.parallel.events import MergeDone
from flowrl.parallel.outcomes import StepContext
from flowrl.parallel.status import Completed, Entry, Merging
from flowrl.paths import GraphPaths
from tests.parallel import making
from tests.parallel.faults import killed_at
from tests.parallel.making import TABLE, WOOD, approve
from tests.parallel.scheduling import NOW
from tests.parallel.stand_in_story import Place, read_stand_ins, replace_trainers

pytestmark = pytest.mark.usefixtures("unchanged_sigterm")
AT_ONCE = ("--retry_backoff=0", "--scheduler_poll_interval=0.2")
IN_TURN = ("--launcher=local", "--max_parallel_skills=1", *AT_ONCE)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A graph in which Collect Wood is completed with 60 %, below its goal of 80 %.

    It has the approval of `CHANGED`, which one test takes out again and has it tried.
    """
    place = Place(tmp_path_factory.mktemp("begun"))
    place.order({WOOD: {"success_rate": 0.6}})
    assert place.run(*IN_TURN, f"--target_skill={WOOD}")[0] == 0
    approve(place.graph_paths, CHANGED)
    return place


@pytest.fixture
def place(begun, tmp_path, monkeypatch):
    """A copy of that graph."""
    replace_trainers(monkeypatch.setattr)
    read_stand_ins(monkeypatch.setattr)
    return begun.copied(tmp_path)


def train(place: Place, *flags: str, target: str = WOOD) -> int:
    words = (f"--graph_path={place.graph_paths.root}", f"--target_skill={target}", *AT_ONCE, *flags)
    return bottomup.main(words)


def ask_for_more(place: Place, *flags: str) -> int:
    return cli.main(["train-more", str(place.graph_paths.root), WOOD, *flags])


def row(place: Place, capsys, skill: str = WOOD) -> dict:
    capsys.readouterr()
    assert cli.main(["status", str(place.graph_paths.root), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["skills"]
    return next(row for row in rows if row["skill"] == skill)


def lineage(graph_paths: GraphPaths) -> list[tuple[int, float | None]]:
    """Frames and success rate of each run that has trained the first expert."""
    version = ExpertStore(graph_paths).manifest().experts[0]
    return [(entry.frames, entry.success_rate) for entry in version.lineage]


def test_a_skill_below_its_goal_is_shown_so_and_fails_a_strict_start(place, capsys):
    found = row(place, capsys)
    assert (found["status"], found["below_goal"], found["goal"]) == ("completed", True, 0.8)
    assert found["why"] == f"flowrl train-more {place.graph_paths.root} 'Collect Wood'"
    assert cli.main(["status", str(place.graph_paths.root)]) == 0
    assert "1 below goal" in capsys.readouterr().out
    assert train(place, "--strict") == 1
    assert train(place) == 0
    assert place.launches() == [WOOD], "the same command trains nothing on"


@pytest.mark.parametrize(
    "flag", ["--success_state_rate=0.85", "--total_timesteps=20000000"], ids=["goal", "budget"]
)
def test_a_larger_goal_or_budget_trains_on_once_from_the_skills_own_expert(place, capsys, flag):
    (first,) = place.merged()
    before = ExpertStore(place.graph_paths).manifest().experts[0]
    place.order({WOOD: {"success_rate": 0.7}})
    assert train(place, flag) == 0
    assert train(place, flag) == 0
    assert place.launches() == [WOOD, WOOD]
    assert lineage(place.graph_paths) == [(100, 0.6), (100, 0.7)]
    assert place.experts() == {0: (WOOD, 200)}
    record = runs.read_run(place.graph_paths.archive(0, WOOD))
    assert record.ancestors == (before,)
    assert place.merged() == (first, record.run_id)
    assert row(place, capsys)["success_rate"] == 0.7


@pytest.mark.parametrize(
    "flag", ["--success_state_rate=0.85", "--total_timesteps=20000000"], ids=["goal", "budget"]
)
def test_a_larger_goal_or_budget_in_vain_is_not_tried_again(place, flag):
    place.order({WOOD: {"success_rate": 0.3}})
    for _ in range(2):
        assert train(place, flag) == 0
    assert place.launches() == [WOOD, WOOD]
    assert lineage(place.graph_paths) == [(100, 0.6)]


def test_a_state_that_was_made_anew_knows_no_goal_that_could_be_smaller(place, capsys):
    place.graph_paths.scheduler_state.unlink()
    place.graph_paths.archive(0, WOOD).run_json.unlink()
    assert cli.main(["recover", str(place.graph_paths.root)]) == 0
    assert row(place, capsys)["below_goal"] is False
    assert train(place, "--success_state_rate=0.99", "--total_timesteps=20000000") == 0
    assert place.launches() == [WOOD]


def test_a_smaller_goal_or_budget_trains_nothing_on(place):
    assert train(place, "--success_state_rate=0.5", "--total_timesteps=5000") == 0
    assert place.launches() == [WOOD]


def test_the_request_waits_for_a_scheduler_and_says_how_many_frames(place, capsys):
    assert ask_for_more(place, "--total_timesteps", "200k") == 0
    assert "train-more Collect Wood: done when you start" in capsys.readouterr().out
    place.order()
    assert train(place) == 0
    record = runs.read_run(place.graph_paths.archive(0, WOOD))
    assert record.config["total_timesteps"] == 200_000
    assert record.origins["total_timesteps"] == "flowrl train-more"
    assert lineage(place.graph_paths) == [(100, 0.6), (100, 0.9)]
    assert place.lines()[WOOD].get("trained") is None
    assert train(place, "--strict") == 0
    assert place.launches() == [WOOD, WOOD], "a small continuation does not shrink the budget"


def test_a_continuation_with_less_success_by_chance_is_merged(place, capsys):
    ask_for_more(place)
    place.order({WOOD: {"success_rate": 0.55}})
    assert train(place) == 0
    assert row(place, capsys)["success_rate"] == 0.55


ENDS = {
    "less success": ({"success_rate": 0.4}, "success was 60.0% before and 40.0% then"),
    "failures": ({"fails": 9}, "it was ordered to fail"),
    "too little success": ({"success_rate": 0.0}, "success was 60.0% before and 0.0% then"),
}


@pytest.mark.parametrize(("order", "why"), ENDS.values(), ids=ENDS.keys())
def test_a_skill_that_was_trained_on_in_vain_keeps_its_expert(place, capsys, order, why):
    before = ExpertStore(place.graph_paths).manifest()
    ask_for_more(place)
    place.order({WOOD: order})
    assert train(place, "--max_retries=1") == 0
    assert len(place.launches()) == (3 if "fails" in order else 2)
    assert ExpertStore(place.graph_paths).manifest() == before
    found = row(place, capsys)
    assert (found["status"], found["success_rate"]) == ("completed", 0.6)
    assert "training on has changed nothing" in found["why"]
    assert why in found["why"] or "exit 1" in found["why"]
    assert not place.graph_paths.run(0, WOOD).folder.exists()


def test_a_skill_starts_only_on_needs_of_enough_success(tmp_path, monkeypatch, capsys):
    replace_trainers(monkeypatch.setattr)
    place = Place(tmp_path)
    place.order({WOOD: {"success_rate": 0.06}})
    assert train(place, target=TABLE) == 1
    found = row(place, capsys, TABLE)
    assert (found["status"], found["waits_for"]) == ("blocked", [WOOD])
    remedy = f"flowrl train-more {place.graph_paths.root} 'Collect Wood'"
    assert found["why"] == f"Collect Wood has 6.0% of 25.0%; {remedy}"
    place.order({WOOD: {"success_rate": 0.2}})
    ask_for_more(place)
    assert train(place, target=TABLE) == 1
    assert row(place, capsys, TABLE)["why"].startswith("Collect Wood has 20.0% of 25.0%")
    assert train(place, "--needs_success_rate=0.2", target=TABLE) == 0
    assert place.launches() == [WOOD, WOOD, TABLE]
    assert train(place, target=TABLE) == 0, "what is completed stays"


POINTS = [
    "scheduler.prepared",
    "scheduler.launched",
    pytest.param("commit.published", marks=pytest.mark.slow),
    "commit.swapped",
    pytest.param("scheduler.merged", marks=pytest.mark.slow),
    "merge.archived",
]


@pytest.mark.parametrize("point", POINTS)
def test_a_continuation_of_a_killed_scheduler_is_merged_once(place, point):
    ask_for_more(place, "--total_timesteps=5000")
    place.order()
    flags = (f"--graph_path={place.graph_paths.root}", f"--target_skill={WOOD}", "--launcher=local")
    assert killed_at(point, "tests.parallel.stand_in_story", *flags)
    assert train(place) == 0
    assert place.launches() == [WOOD, WOOD]
    assert lineage(place.graph_paths) == [(100, 0.6), (100, 0.9)]
    assert len(place.merged()) == 2
    assert list(place.graph_paths.training_runs.glob("skill_*")) == []


def test_a_lost_state_knows_that_a_live_run_trains_a_skill_on(place, capsys):
    ask_for_more(place, "--total_timesteps=5000")
    place.order({WOOD: {"success_rate": 0.3}})
    flags = (f"--graph_path={place.graph_paths.root}", f"--target_skill={WOOD}", "--launcher=local")
    assert killed_at("scheduler.launched", "tests.parallel.stand_in_story", *flags)
    place.graph_paths.scheduler_state.unlink()
    assert cli.main(["recover", str(place.graph_paths.root)]) == 0
    line = place.lines()[WOOD]
    assert (line["status"], line["trained"]["success_rate"]) == ("running", 0.6)
    assert train(place) == 0
    assert row(place, capsys)["success_rate"] == 0.6
    assert lineage(place.graph_paths) == [(100, 0.6)]


def test_after_a_rollback_a_skill_has_the_success_of_the_expert_that_counts(place, capsys):
    place.order()
    ask_for_more(place)
    assert train(place) == 0
    assert row(place, capsys)["success_rate"] == 0.9
    assert cli.main(["rollback", str(place.graph_paths.root), "1"]) == 0
    assert row(place, capsys)["success_rate"] == 0.6
    assert cli.main(["fsck", str(place.graph_paths.root)]) == 0
    place.order({WOOD: {"success_rate": 0.7}})
    ask_for_more(place)
    assert train(place) == 0
    assert lineage(place.graph_paths) == [(100, 0.6), (100, 0.7)]
    assert cli.main(["rollback", str(place.graph_paths.root), "2"]) == 0
    assert row(place, capsys)["success_rate"] == 0.9
    store = ExpertStore(place.graph_paths)
    assert not repair.damage(store, store.manifest().experts[0])


def test_a_lost_record_leaves_the_success_that_the_manifest_has(place, capsys):
    place.graph_paths.archive(0, WOOD).result_json.unlink()
    place.graph_paths.scheduler_state.unlink()
    assert cli.main(["recover", str(place.graph_paths.root)]) == 0
    assert row(place, capsys)["success_rate"] == 0.6


def test_a_continuation_that_loses_to_another_runs_copy_says_so(tmp_path):
    graph_paths = GraphPaths(tmp_path / "graph")
    making.train(graph_paths, WOOD, 0, {}, acted={0: 50})
    more = making.prepare(graph_paths, WOOD, 0, {})
    assert making.train(graph_paths, TABLE, 1, {WOOD: 0}, acted={0: 500, 1: 10})["taken"]
    making.finish(more.run_paths, {0: 20})
    done = making.merge(graph_paths, more)
    assert (done["taken"], done["goal"]) == (False, 0.8)
    assert making.merge(graph_paths, more)["taken"] is False, "also if it is merged again"
    assert making.frames(graph_paths) == {0: 550, 1: 10}
    merging = Merging(
        run_id="b", attempt=2, frames=9, success_rate=0.9, wall_seconds=1.0, since=NOW
    )
    before = Completed(
        run_id="a", attempt=1, frames=9, success_rate=0.7, wall_seconds=1.0, at=NOW, budget=9
    )
    entry = Entry(skill=WOOD, status=merging, expert=0, trained=before)
    context = StepContext(now=NOW, schedule=ScheduleConfig(), devices={})
    kept = outcomes.completed(entry, MergeDone(WOOD, "b", taken=False), context)
    assert kept.status.run_id == "a"
    assert kept.status.why.endswith("the copy of its expert that another run trained counts")
    taken = outcomes.completed(entry, MergeDone(WOOD, "b", goal=0.8, budget=4), context)
    assert (taken.status.run_id, taken.status.goal, taken.status.budget) == ("b", 0.8, 9)
    assert (kept.trained, taken.trained) == (None, None)


CHANGED = """\
name = "Collect Wood"
gain = {"wood": "n"}


def task_is_done(inventory, n):
    return inventory.wood >= n


def task_reward(inventory_diff):
    return 2.0 * inventory_diff.wood
"""


@pytest.fixture(scope="module")
def begun_two(begun, tmp_path_factory):
    """A graph where Collect Wood has 90 %, and Place Table is trained, too."""
    place = begun.copied(tmp_path_factory.mktemp("two"))
    place.order({WOOD: {"success_rate": 0.9}})
    ask_for_more(place)
    assert place.run(*IN_TURN, f"--target_skill={TABLE}")[0] == 0
    return place


@pytest.fixture
def changed(place, begun_two, tmp_path):
    """The folder of a changed Collect Wood; `place` is a copy of the graph of two skills."""
    shutil.rmtree(place.folder / "graph")
    begun_two.copied(place.folder)
    folder = tmp_path / "changed"
    folder.mkdir()
    (folder / "wood.py").write_text(CHANGED)
    return folder


def retrain(place: Place, folder, *flags: str) -> int:
    return cli.main(
        ["retrain", str(place.graph_paths.root), WOOD, f"--skills_dir={folder}", *flags]
    )


def test_a_retrained_skill_is_a_new_version_that_begins_from_nothing(place, changed, capsys):
    before = ExpertStore(place.graph_paths).manifest()
    approvals = storage.tree_digest(place.graph_paths.approvals)
    storage.remove_tree(place.graph_paths.approvals)
    place.order({WOOD: {"success_rate": 0.4}})
    assert retrain(place, changed) == 0
    assert storage.tree_digest(place.graph_paths.approvals) == approvals, "it was tried anew"
    assert train(place, target=TABLE) == 0
    after = ExpertStore(place.graph_paths).manifest()
    assert lineage(place.graph_paths) == [(100, 0.4)], (
        "fewer frames and less success count all the same"
    )
    assert after.experts[1] == before.experts[1], "dependants keep theirs"
    assert row(place, capsys)["success_rate"] == 0.4
    module = place.graph_paths.archive(0, WOOD).module.read_text()
    assert "2.0 * inventory_diff.wood" in module
    assert cli.main(["rollback", str(place.graph_paths.root), str(before.generation)]) == 0
    assert ExpertStore(place.graph_paths).manifest().experts == before.experts


def test_a_retraining_is_not_lost_to_a_start_with_a_larger_budget(place, tmp_path):
    (tmp_path / "wood.py").write_text(CHANGED)
    place.order({WOOD: {"success_rate": 0.4}})
    assert retrain(place, tmp_path) == 0
    assert train(place, "--total_timesteps=20000000") == 0
    assert lineage(place.graph_paths) == [(100, 0.4)], "begun from nothing, not trained on"
    assert place.launches() == [WOOD, WOOD]


def test_a_retraining_in_vain_keeps_the_former_expert(place, changed, capsys):
    before = ExpertStore(place.graph_paths).manifest()
    place.order({WOOD: {"fails": 9, "code": 7}})
    assert retrain(place, changed) == 0
    assert train(place, "--max_retries=0", target=TABLE) == 0
    assert ExpertStore(place.graph_paths).manifest() == before
    assert "training anew has changed nothing: exit 7" in row(place, capsys)["why"]


@pytest.mark.parametrize(
    ("state", "point"),
    [
        ("kept", "scheduler.prepared"),
        pytest.param("kept", "scheduler.launched", marks=pytest.mark.slow),
        ("kept", "merge.committed"),
        pytest.param("lost", "scheduler.prepared", marks=pytest.mark.slow),
        ("lost", "scheduler.launched"),
        ("lost", "merge.committed"),
    ],
)
def test_a_killed_scheduler_goes_on_retraining(place, changed, point, state):
    place.order({WOOD: {"success_rate": 0.4}})
    assert retrain(place, changed) == 0
    flags = (
        f"--graph_path={place.graph_paths.root}",
        f"--target_skill={TABLE}",
        "--launcher=local",
    )
    assert killed_at(point, "tests.parallel.stand_in_story", *flags)
    if state == "lost":
        place.graph_paths.scheduler_state.unlink()
        assert cli.main(["recover", str(place.graph_paths.root)]) == 0
    assert train(place, target=TABLE) == 0
    assert lineage(place.graph_paths) == [(100, 0.4)]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"wood": "n"', '"sapling": "n"', "Place Table"),
        ("gain =", 'requirements = {"sapling": 1}\ngain =', "would need Collect Sapling"),
        ("2.0 *", "open('/x') *", "open"),
        ('"Collect Wood"', '"Fell Trees"', "--skills_dir"),
    ],
    ids=["gains", "needs", "code", "name"],
)
def test_a_refused_text_changes_nothing(place, changed, capsys, old, new, why):
    kept = place.graph_paths.skill_file(WOOD).read_bytes()
    (changed / "wood.py").write_text(CHANGED.replace(old, new))
    assert retrain(place, changed) != 0
    assert why in (said := capsys.readouterr().err)
    assert len(said.splitlines()) == 1
    assert place.graph_paths.skill_file(WOOD).read_bytes() == kept
    assert not list(place.graph_paths.requests.glob("*"))


def test_a_changed_file_is_told_with_both_remedies(place, changed, caplog):
    assert train(place, f"--skills_dir={changed}", target=TABLE) == 0
    assert f"flowrl retrain {place.graph_paths.root} 'Collect Wood'" in caplog.text
    assert "another --graph_path" in caplog.text
