"""`flowrl why` says in which step a plan fails, what of, which need is lost where, and a remedy."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl import cli, storage
from flowrl.measures.causes import Explanation, explain
from flowrl.measures.episodes import EpisodesOrigin
from flowrl.paths import GraphPaths
from flowrl.runs import PlannedStep, StepEnds, read_result, read_run, write_result, write_run
from tests.commands.making import DONE, FAILED, HELD, WAITING, running, save, tell_progress
from tests.parallel.making import TABLE, WOOD
from tests.viewing.test_episodes import recorded

NAMES = ("Collect Wood", "Place Furnace", "Make Iron Pickaxe")
PLAN = tuple(PlannedStep(skill=name, count=1, expert=n) for n, name in enumerate(NAMES))


def ended(done: int, died: int = 0, cut: int = 0, **more) -> StepEnds:
    begun = done + died + cut
    return StepEnds(
        begun=begun, done=done, died=died, cut=cut, running=0, timesteps=9 * begun, **more
    )


def of(*ends: StepEnds, bound: bool = False, **own: float) -> Explanation:
    by_name = {name.replace("_", " "): success for name, success in own.items()}
    return explain(PLAN, ends, own=by_name, bound=bound)


def test_the_step_that_loses_most_and_the_need_that_it_loses():
    """As the iron pickaxe did: the furnace's expert walks away and spends the wood."""
    found = of(
        ended(96, died=4, causes={"mob": 4}),
        ended(90, died=6, causes={"mob": 4, "arrow": 2}, kept={"wood": 36}),
        ended(25, died=5, cut=60, causes={"lava": 5}),
        Place_Furnace=0.95,
    )
    assert found.success == 0.25
    assert found.episodes == 100
    assert (found.worst.step, found.worst.cause) == (3, "time limit")
    assert found.worst.lost == 0.65
    (need,) = found.lost_needs
    assert (need.need, need.skill, need.after) == ("wood", "Place Furnace", 0.4)
    assert found.line == (
        "65% of its episodes end in step 3, Make Iron Pickaxe, mostly by time limit; "
        "wood is lost in Place Furnace"
    )
    assert "--keep_needs" in found.remedy


@pytest.mark.parametrize(
    ("ends", "own", "remedy"),
    [
        ((ended(60, died=40), ended(60), ended(60)), {"Collect_Wood": 0.95}, "situations here"),
        ((ended(60, died=40), ended(60), ended(60)), {"Collect_Wood": 0.65}, "own success"),
        ((ended(90), ended(50, cut=40), ended(50)), {"Place_Furnace": 0.6}, "max_steps"),
        ((ended(90), ended(90), ended(40, died=50)), {}, "keeps the player alive"),
        ((ended(90), ended(90), ended(90)), {}, "nothing to do"),
    ],
)
def test_one_remedy_by_rule(ends, own, remedy):
    assert remedy in of(*ends, **own).remedy


def test_a_need_that_was_lost_before_is_not_told_of_later_steps():
    found = of(ended(100, kept={"wood": 50}), ended(100, kept={"wood": 48}), ended(90, cut=10))
    assert [need.step for need in found.lost_needs] == [1]


@given(st.lists(st.tuples(*[st.integers(0, 50)] * 3), min_size=3, max_size=3))
def test_losses_and_success_are_all_episodes(numbers):
    found = of(*(ended(*three) for three in numbers))
    total = sum(loss.died + loss.cut for loss in found.losses) + found.success
    assert found.episodes == 0 or total == pytest.approx(1)
    assert all(loss.cause for loss in found.losses if loss.lost)


@pytest.fixture
def weak(graph_paths: GraphPaths) -> GraphPaths:
    """A graph whose second skill is below its goal, with the counts of its run."""
    archive = graph_paths.archive(1, TABLE)
    ends = (ended(90, died=10, causes={"mob": 10}), ended(50, cut=40))
    write_result(archive, replace(read_result(archive), step_ends=ends))
    below = replace(DONE, goal=0.9, success_rate=0.5)
    save(graph_paths.root, (WOOD, DONE), (TABLE, below, (WOOD,)))
    return graph_paths


def test_the_command_says_it_in_a_screen_and_in_json(weak, flowrl):
    lines = flowrl("why", weak.root, "place_table").out.splitlines()
    assert lines[0] == (
        f"{TABLE}: 50% of 100 episodes succeed; 40% of its episodes end in step 2, {TABLE}, "
        "mostly by time limit"
    )
    assert lines[1] == f"  1  {WOOD}: 90% of its attempts, 10% of the episodes end here by mob"
    assert lines[-1].startswith("remedy: ")
    assert len(lines) < 24
    assert json.loads(flowrl("why", weak.root, "1", "--json").out)["losses"][1]["lost"] == 0.4


@pytest.mark.parametrize(
    ("lengths", "number"),
    [([2, 2], 2), ([1, 1, 1, 1], 4), ([2], None), ([1, 1], None)],
    ids=["the only failure", "an earlier step fails, too", "no failure", "in another step"],
)
def test_a_recorded_failure_in_the_worst_step_is_named(weak, flowrl, lengths, number):
    """Every other recorded episode fails; the plan's second step begins at the third timestep."""
    archive = weak.archive(1, TABLE)
    origin = EpisodesOrigin.of(read_run(archive), generation=1, seed=0)
    file = archive.folder / "episodes.npz"
    file.write_bytes(replace(recorded(lengths), origin=origin).encode())
    command = f"flowrl play {weak.root} '{TABLE}' --recorded --first {number} --episodes 1"
    seen = f"see it: {command}" if number else ""
    lines = flowrl("why", weak.root, TABLE).out.splitlines()
    assert [line for line in lines if line.startswith("see")] == ([seen] if seen else [])
    assert json.loads(flowrl("why", weak.root, TABLE, "--json").out)["see"] == seen


def test_a_recording_without_the_plans_steps_is_one_line(weak, flowrl):
    file = weak.archive(1, TABLE).folder / "episodes.npz"
    np.savez(
        file,
        record=np.array("{}"),
        **{name: column for name, column in recorded([2]).columns.items() if name != "steps"},
    )
    line = flowrl("why", weak.root, TABLE).out.splitlines()[-1]
    assert line.startswith(f"no episode of it can be seen: {file} cannot be read: ")
    assert line.endswith("; record again with flowrl evaluate --record")


def test_why_loads_no_jax(weak):
    code = (
        f"import sys; from flowrl import cli; cli.main(['why', {str(weak.root)!r}, {TABLE!r}]); "
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_status_says_the_first_line_of_it(weak, capsys):
    cli.main(["status", str(weak.root), "--json"])
    rows = {row["skill"]: row for row in json.loads(capsys.readouterr().out)["skills"]}
    assert "end in step 2" in rows[TABLE]["why"]
    assert "train-more" in rows[TABLE]["why"]
    assert not rows[WOOD]["why"]


def test_a_run_without_counts_is_an_error_with_its_remedy(graph_paths, flowrl):
    save(graph_paths.root, (WOOD, DONE))
    said = flowrl("why", graph_paths.root, WOOD, code=2).err
    assert f"no run of {WOOD}" in said
    assert "train it" in said
    assert len(said.splitlines()) == 1


def test_a_damaged_result_is_named_and_status_goes_on(weak, capsys):
    result = weak.archive(1, TABLE).result_json
    result.write_text(result.read_text()[:-9])
    assert cli.main(["why", str(weak.root), TABLE]) != 0
    said = capsys.readouterr().err
    assert str(result) in said
    assert len(said.splitlines()) == 1
    cli.main(["status", str(weak.root), "--json"])
    assert json.loads(capsys.readouterr().out)["skills"]


def log(graph_paths, *changes: tuple[str, str, str]) -> None:
    """Lines of events.jsonl: the status before a change and after it, and the reason."""
    for second, (before, status, why) in enumerate(changes):
        line = {"at": f"2030-01-01T00:00:{second:02}Z", "skill": TABLE, "before": before}
        storage.append_line(
            graph_paths.events,
            json.dumps({**line, "status": status, "why": why, "text": f"tries again: {why}"}),
        )


def test_a_skill_that_waits_says_for_which_needs(tmp_path, flowrl):
    graph_paths = save(tmp_path, (WOOD, running()), (TABLE, WAITING, (WOOD,)))
    tell_progress(graph_paths.run(0, WOOD))
    lines = flowrl("why", tmp_path, TABLE).out.splitlines()
    assert lines == [
        f"{TABLE}: waiting, attempt 1; no run of it is merged yet",
        f"needs {WOOD}: running, 25% success",
    ]
    told = json.loads(flowrl("why", tmp_path, TABLE, "--json").out)
    assert [need["skill"] for need in told["waits_for"]] == [WOOD]


def test_a_skill_that_trains_says_how_often_its_steps_succeed_so_far(graph_paths, flowrl):
    shutil.move(graph_paths.archive(1, TABLE).folder, graph_paths.run(1, TABLE).folder)
    save(graph_paths.root, (WOOD, DONE), (TABLE, running(), (WOOD,)))
    tell_progress(graph_paths.run(1, TABLE), phase="training")
    log(graph_paths, ("running", "waiting", "exit code 1"), ("waiting", "preparing", ""))
    assert flowrl("why", graph_paths.root, TABLE).out.splitlines() == [
        f"{TABLE}: running, attempt 1; no run of it is merged yet",
        "training",
        "25% success so far, after 512 of 1,024 frames",
        f"  1  {WOOD}: 90%",
        f"  2  {TABLE}: 25%",
        f"2030-01-01T00:00:00Z {TABLE} tries again: exit code 1",
        f"its log: flowrl logs {graph_paths.root} '{TABLE}'",
    ]
    told = json.loads(flowrl("why", graph_paths.root, TABLE, "--json").out)
    assert told["steps"][0] == {"skill": WOOD, "success_rate": 0.9}
    run = read_run(graph_paths.run(1, TABLE))
    write_run(graph_paths.run(1, TABLE), replace(run, plan=(*run.plan[:1] * 40, *run.plan[1:])))
    tell_progress(graph_paths.run(1, TABLE), step_success=(0.9,) * 40 + (0.25,))
    lines = flowrl("why", graph_paths.root, TABLE).out.splitlines()
    assert len(lines) < 24, "a long plan is one screen, too"
    assert f" 41  {TABLE}: 25%" in lines


def test_a_run_that_trains_or_waits_says_where_its_newest_episodes_end(graph_paths, flowrl):
    shutil.move(graph_paths.archive(1, TABLE).folder, graph_paths.run(1, TABLE).folder)
    run_paths = graph_paths.run(1, TABLE)
    ends = (ended(90, died=10, causes={"mob": 10}), ended(30, cut=60, kept={"wood": 9}))
    tell_progress(run_paths, read_run(run_paths).run_id, phase="training", step_ends=ends)
    for status in (running(), HELD):
        save(graph_paths.root, (WOOD, DONE), (TABLE, status, (WOOD,)))
        lines = flowrl("why", graph_paths.root, TABLE).out.splitlines()
        first = f"{TABLE}: 30% of 100 episodes succeed; 60% of its episodes end in step 2, {TABLE}"
        assert any(line.startswith(first) for line in lines)
        assert f"  2  {TABLE}: 33% of its attempts, 60% of the episodes end here by time limit" in (
            lines
        )
        assert lines[-2].startswith("remedy: ")
        told = json.loads(flowrl("why", graph_paths.root, TABLE, "--json").out)
        assert told["so_far"]["losses"][0]["cause"] == "mob"
    tell_progress(run_paths, "e1.a2.another", phase="training", step_ends=ends)
    assert "remedy" not in flowrl("why", graph_paths.root, TABLE).out, "it is another run's"


@given(
    needs=st.integers(0, 40),
    attempts=st.lists(st.sampled_from(["exit code 1", "a\nb", "$x$ \x1b[2J"]), max_size=40),
    rows=st.lists(st.text(max_size=30), max_size=40),
)
@settings(max_examples=20, deadline=None)
def test_what_is_known_of_a_failed_skill_is_one_screen(tmp_path_factory, needs, attempts, rows):
    """All attempts are in the JSON, the newest in the lines; its last line says how to go on."""
    names = [f"Need {number}" for number in range(needs)]
    failed = replace(FAILED, why="exit code 1", log=tuple(rows))
    waiting = [(name, WAITING) for name in names]
    graph_paths = save(tmp_path_factory.mktemp("g"), (TABLE, failed, tuple(names)), *waiting)
    log(graph_paths, *(("running", "waiting", why) for why in attempts))
    with redirect_stdout(io.StringIO()) as out:
        assert cli.main(["why", str(graph_paths.root), TABLE]) == 0
    lines = out.getvalue().splitlines()
    assert len(lines) < 24
    assert lines[0].startswith(f"{TABLE}: failed, attempt 3")
    assert "exit code 1" in lines[1]
    assert lines[-1] == f"its log: flowrl logs {graph_paths.root} '{TABLE}'"
    with redirect_stdout(io.StringIO()) as out:
        assert cli.main(["why", str(graph_paths.root), TABLE, "--json"]) == 0
    told = json.loads(out.getvalue())
    assert [each["why"] for each in told["attempts"]] == attempts
    assert [each["skill"] for each in told["waits_for"]] == names
