"""Plots: the figures against plain counts, and names that matplotlib or a browser would read."""

from __future__ import annotations

import json
import random
import re
import warnings
from dataclasses import replace
from functools import partial
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

from flowrl import cli
from flowrl.errors import ConfigError, FileRefusedError
from flowrl.measures.objectives import CurvePoint
from flowrl.parallel.status import FRESH
from flowrl.paths import GraphPaths
from flowrl.runs import StepEnds, read_result, read_run, write_result, write_run
from flowrl.viewing import drawing
from flowrl.viewing.curves import read_lines, skill_picture, step_curves
from flowrl.viewing.plots import (
    Bar,
    _difference,
    _over_minutes,
    bars,
    compare_picture,
    graph_picture,
    needs_picture,
)
from tests.commands.making import DONE, save
from tests.counting import growth
from tests.parallel.making import WOOD, train
from tests.viewing.making import STEPS, a_row, events_of, lines_of

HOSTILE = (
    "$x^{2}$ <script>alert(1)</script>",
    "\\frac{",
    "$\\input{/etc/passwd}",
    "a\nb",
    "木 ✓ %s {}",
    "$",
)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), updates=st.integers(1, 60))
def test_shares_are_those_of_the_newest_episodes(seed, updates):
    lines = lines_of(seed, updates=updates)
    curves = step_curves(lines)
    assert [curve.skill for curve in curves] == [name[2:].replace("_", " ") for name in STEPS]
    for point in range(len(curves[0].places)):
        ends = sum(curve.died[point] + curve.cut[point] for curve in curves)
        assert ends + curves[-1].success[point] == pytest.approx(1)
        assert all(c.low[point] <= c.success[point] <= c.high[point] for c in curves)
    newest, episodes = [], 0
    while lines and episodes < 256:
        newest.append(lines.pop())
        episodes += newest[-1][f"begun/{STEPS[0]}"]
    if episodes:
        done = sum(line[f"done/{STEPS[-1]}"] for line in newest)
        assert curves[-1].success[-1] == pytest.approx(done / episodes)
        assert curves[-1].places[-1] == 4096 * updates


def test_a_run_of_long_episodes_is_counted_in_linear_time():
    """Hours of a game in which few episodes end between two lines."""

    def curves(updates: int) -> partial[object]:
        lines = lines_of(1, updates=updates)
        few = [{key: int(n > updates // 100) for key, n in line.items()} for line in lines]
        return partial(step_curves, few)

    assert growth(curves, 600) < 2.2


def test_a_skill_trains_from_its_start_to_what_follows():
    moves = events_of(
        (0, "A", "waiting"),
        (1, "A", "running"),
        (2, "B", "running"),
        (4, "A", "waiting"),
        (5, "A", "running"),
        (9, "B", "completed"),
    )
    found = bars(moves, {})
    trained = [(each.skill, each.begun, each.ended) for each in found if each.status == "running"]
    assert trained == [("A", 1, 4), ("B", 2, 9), ("A", 5, 9)]
    assert [(x.begun, x.ended) for x in found if x.status == "waiting"] == [(0, 1), (4, 5)]
    assert bars([], {}) == bars(events_of((0, "A", "waiting")), {}) == []


def test_a_skill_waits_for_a_slot_once_its_needs_are_met():
    moves = events_of(
        (0, "A", "waiting"),
        (0, "B", "waiting"),
        (0, "A", "running"),
        (3, "A", "merging"),
        (4, "A", "completed"),
        (6, "B", "preparing"),
        (7, "B", "running"),
    )
    found = bars([*moves, *events_of((9, "B", "failed"))], {"B": ("A",)})
    of_b = [(x.status, x.begun, x.ended) for x in found if x.skill == "B"]
    assert of_b == [("waiting", 4, 6), ("preparing", 6, 7), ("running", 7, 9)]
    assert ("merging", 3, 4) in [(x.status, x.begun, x.ended) for x in found]


@pytest.mark.parametrize("name", HOSTILE)
def test_any_name_is_drawn_as_text(name):
    lines = lines_of(1, updates=4, steps=("0_Collect_Wood", f"1_{name}"))
    picture = ElementTree.fromstring(skill_picture(name, lines).written(".svg"))
    assert not [node for node in picture.iter() if node.tag.endswith(("script", "image"))]


@pytest.mark.parametrize("ending", drawing.ENDINGS)
@pytest.mark.parametrize("name", ["木を集める", "جمع الخشب", "나무 모으기", "🪓🌲"])
def test_a_name_in_any_script_is_drawn_without_a_warning(monkeypatch, ending, name):
    monkeypatch.setattr(warnings, "showwarning", lambda text, *_: pytest.fail(str(text)))
    warnings.simplefilter("always")
    assert skill_picture(name, lines_of(1, updates=4)).written(ending)


def test_what_the_font_lacks_is_drawn_by_an_installed_one(monkeypatch):
    own, other = (
        {*FT2Font(font_manager.findfont(name)).get_charmap()}
        for name in ("DejaVu Sans", "STIXGeneral")
    )
    name = chr(next(code for code in sorted(other - own) if chr(code).isprintable()))
    drawn = []
    for installed in ("nothing", "^STIXGeneral$"):
        monkeypatch.setattr(drawing, "_OTHER_SCRIPTS", re.compile(installed))
        drawn.append(skill_picture(name, lines_of(1, updates=4)).written(".png"))
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(
    ("ending", "begins"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF")]
)
def test_a_skill_is_drawn_in_every_format(ending, begins):
    assert skill_picture("A", lines_of(2, updates=30)).written(ending).startswith(begins)


def test_half_a_last_line_is_left_out_and_another_is_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_lines(path) == []
    path.write_text('{"frames": 1}\n{"frames": 2, "sec')
    assert read_lines(path) == [{"frames": 1}]
    for bad in ("[1]", "3", "{", "nonsense", "[" * 100_000):
        path.write_text('{"frames": 1}\n' + bad + "\n")
        with pytest.raises(FileRefusedError, match=r"metrics\.jsonl:2 is no JSON object; remove"):
            read_lines(path)
    for count in (-1, 1.5, True, "1", None, 10**400):
        with pytest.raises(FileRefusedError, match="no count; remove the line"):
            step_curves([{"frames": 1, f"begun/{STEPS[0]}": 1, f"died/{STEPS[0]}": count}])


@pytest.mark.parametrize("frames", [None, "x", -1, {}])
def test_frames_that_are_none_are_refused(frames):
    line = {**lines_of(3, updates=9)[-1], "frames": frames}
    with pytest.raises(FileRefusedError, match=r"a line: frames is .*, no count; remove"):
        step_curves([line])


@pytest.mark.parametrize("line", [{}, {"at": "x"}, {"at": None}, {"at": 3}, {"at": ["2026"]}])
def test_a_line_of_events_without_its_time_is_refused(line):
    with pytest.raises(FileRefusedError, match=r"a line: at is .*, no time; remove the line"):
        bars([line], {})


def test_an_error_about_a_line_names_its_file_and_its_number(tmp_path):
    graph_paths = GraphPaths(tmp_path)
    graph_paths.events.write_text('{"at": "2026-01-01T00:00:00"}\n{"at": "noon"}\n')
    with pytest.raises(FileRefusedError) as refused:
        graph_picture(graph_paths, [])
    assert str(refused.value) == f"{graph_paths.events}:2: at is 'noon', no time; remove the line"
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"frames": 1, "begun/0_A": 1, "done/0_A": "3"}\n')
    with pytest.raises(FileRefusedError, match=r"metrics\.jsonl:1: done/0_A is '3', no count"):
        step_curves(read_lines(metrics))


def test_lines_of_events_that_are_of_no_skill_are_left_out():
    at = "2026-01-01T00:00:00"
    assert (
        bars([{"at": at, "skill": ["A"], "status": {}}, {"at": f"{at}Z", "skill": None}], {}) == []
    )


def test_the_newest_run_is_laid_into_the_last_spells():
    curve = [CurvePoint(frames, 60.0 * frames, 0.1 * frames, 9.0) for frames in range(1, 7)]
    own = [Bar(skill="A", begun=0, ended=10), Bar(skill="A", begun=100, ended=110)]
    assert _over_minutes(curve, own)[0] == [105, 106, 107, 108, 109, 110]
    assert _over_minutes(curve, [Bar(skill="A", begun=0, ended=2), own[1]])[0][0] == 105
    short = [Bar(skill="A", begun=0, ended=4), Bar(skill="A", begun=7, ended=9)]
    assert _over_minutes(curve, short)[0] == [1, 2, 3, 7, 8, 9]
    assert _over_minutes((), own) == ([], [])


def test_what_has_not_trained_yet_cannot_be_drawn(tmp_path):
    with pytest.raises(
        ConfigError, match=r"no episode of A has ended in its metrics\.jsonl; plot it later, or"
    ):
        skill_picture("A", [])
    with pytest.raises(ConfigError, match="has trained yet; plot it later"):
        graph_picture(GraphPaths(tmp_path), [])


def test_a_graph_is_drawn_from_its_events_alone(tmp_path):
    graph_paths = GraphPaths(tmp_path)
    moves = events_of((0, "A", "running"), (3, "$B", "running"), (4, "A", "completed"))
    graph_paths.events.write_text("".join(f"{json.dumps(line)}\n" for line in moves))
    assert "$B" in graph_picture(graph_paths, []).written(".svg").decode()


def test_a_picture_needs_an_ending(tmp_path, capsys):
    assert cli.main(["plot", str(tmp_path), "-o", str(tmp_path / "curves.txt")]) == 2
    assert (
        "curves.txt does not end in .svg or .png or .pdf or .html; choose"
        in capsys.readouterr().err
    )
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=5, deadline=None)
@given(there=st.floats(0.05, 0.95), gap=st.floats(-0.1, 0.1))
def test_intervals_of_differences_hold_what_is_true(there, gap):
    here, draw = min(max(there + gap, 0.0), 1.0), random.Random(1)
    held = 0
    for _ in range(300):
        numbers = ((there, 256), (here, 512))
        found = [(sum(draw.random() < p for _ in range(n)) / n, n) for p, n in numbers]
        one = _difference(*found)
        held += one["low"] <= here - there <= one["high"]
    assert held >= 300 * 0.91


def test_graphs_are_compared_skill_by_skill():
    one, other = {"A": (0.5, 256), "B": (1.0, 256)}, {"A": (0.75, 256)}
    picture = compare_picture({"a": one, "b": other, "c": {}})
    first, second, *others = picture.rows
    assert (first["skill"], first["graph"], first["beside"]) == ("A", "b", "a")
    assert first["difference"] == 0.25
    assert 0.15 < first["low"] < 0.25 < first["high"] < 0.35
    assert (first["episodes"], first["episodes beside"]) == (256, 256)
    more = compare_picture({"a": {"A": (0.5, 4096)}, "b": {"A": (0.75, 4096)}}).rows[0]
    assert 4 * (more["high"] - more["low"]) == pytest.approx(first["high"] - first["low"], rel=0.05)
    assert second["success beside"] == 1.0
    assert {row["difference"] for row in (second, *others)} == {None}
    with pytest.raises(ConfigError, match="no skill of a and b has success yet; plot it later"):
        compare_picture({"a": {}, "b": {}})


def test_a_skill_stands_right_of_what_it_needs():
    needs = {"A": (), "B": ("A",), "C": ("A", "B"), "D": ()}
    rows = [a_row(name, needs=own, success_rate=0.2) for name, own in needs.items()]
    picture = needs_picture("g", rows)
    assert [row["column"] for row in picture.rows] == [0, 1, 2, 0]
    assert picture.rows[0]["success"] == 0.2
    with pytest.raises(ConfigError, match="g has no skill yet; plot it later"):
        needs_picture("g", [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["A", "--graph"], "SKILL and --graph exclude each other; give one of them"),
        (["--compare", "g"], "--compare names g twice, with GRAPH; name others"),
        (["--compare", "h", "./h"], "--compare names h twice, with GRAPH; name others"),
        (["--compare", "nosuch"], "nosuch is no graph: it has neither checkpoints/ nor"),
        (["--metric", "lr"], "--metric lr is for a skill or a run folder; name one"),
        (["--x", "minutes"], "--x minutes is for a skill or a run folder; name one"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_go_together_is_refused(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "g", ("A", FRESH))
    assert cli.main(["plot", "g", *words]) in (1, 2)
    assert said in capsys.readouterr().err


def refusal(capsys, *words: object) -> str:
    assert cli.main(["plot", *map(str, words)]) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_sweep_without_its_record_is_said_to_be_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    graph_paths = save(tmp_path / "g", ("A", FRESH))
    save(graph_paths.sweeps / "mine", ("A t0", FRESH))
    said = "g/sweeps/mine is a sweep that has lost its sweep.json; restore it from a copy"
    assert said in refusal(capsys, "g/sweeps/mine")
    assert said in refusal(capsys, "g", "--compare", "g/sweeps/mine")


def test_a_graph_that_has_lost_its_events_has_not_never_trained(tmp_path, capsys):
    graph_paths = save(tmp_path / "g", ("A", DONE))
    said = refusal(capsys, graph_paths.root)
    assert f"{graph_paths.events} does not say when skills trained; restore it" in said


@pytest.mark.parametrize("word", ["A", "--graph", "--judges", "--compare=g"])
def test_a_run_folder_has_no_pictures_of_a_graph(tmp_path, monkeypatch, capsys, word):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "g", ("A", DONE))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    what = "SKILL" if word == "A" else word.partition("=")[0]
    assert f"run is a run's folder, and {what} is for a graph" in refusal(capsys, "run", word)


@pytest.mark.parametrize(
    ("num_envs", "ended", "episodes"), [(4, 90, 90), (4, 999, 256), (256, 999, 512), (4, None, 256)]
)
def test_success_is_compared_by_the_episodes_that_it_is_of(
    tmp_path, capsys, num_envs, ended, episodes
):
    graphs = [GraphPaths(tmp_path / name) for name in "ab"]
    for graph_paths in graphs:
        train(graph_paths, WOOD, 0, {}, acted={0: 50})
        save(graph_paths.root, (WOOD, DONE))
        archive = graph_paths.archive(0, WOOD)
        run, result = read_run(archive), read_result(archive)
        write_run(archive, replace(run, config={**run.config, "num_envs": num_envs}))
        counts = {"begun": ended, "done": ended - 9, "died": 4, "cut": 5} if ended else {}
        ends = [StepEnds(**counts, running=0, timesteps=9)] if ended else []
        write_result(archive, replace(result, step_ends=tuple(ends)))
    words = (
        "plot",
        graphs[0].root,
        "--compare",
        graphs[1].root,
        "--json",
        "-o",
        tmp_path / "x.svg",
    )
    assert cli.main([*map(str, words)]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["episodes"], row["episodes beside"]) == (episodes, episodes)
