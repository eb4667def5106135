"""The page in a real browser, against the real server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest

from flowrl.parallel.health import DaemonLock
from tests.commands.conftest import template  # noqa: F401 — the fixture
from tests.commands.making import (
    DONE,
    FAILED,
    HELD,
    WAITING,
    running,
    save,
    tell_progress,
    write_log,
)
from tests.games.installing import installed
from tests.games.test_a_game_of_ones_own import FLAGS
from tests.serving.making import a_graph, a_judge, hostile_names, write_run
from tests.serving.test_server import asked, stream
from tests.waiting import limit, until

pytest.importorskip("flowrl.serving.app", reason="pip install '.[web]' is missing")
expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect
expect.set_options(timeout=limit(10_000))


def cells(page, skill: str):
    """The table's line of one skill."""
    return page.locator("#rows tr").filter(has=page.get_by_role("button", name=skill, exact=True))


def shown(page, served):
    page.goto(served.address)
    expect(page.locator("#live")).to_have_text("live")
    return page


def test_a_change_of_state_is_on_the_page_without_a_reload(tmp_path, serve, page):
    graph_paths = save(tmp_path / "graph", ("A", WAITING), ("B", WAITING, ("A",)))
    shown(page, serve(graph_paths.root))
    expect(cells(page, "A")).to_contain_text("waiting")
    expect(cells(page, "B")).to_contain_text("A")
    save(graph_paths.root, ("A", running()), ("B", WAITING, ("A",)))
    expect(cells(page, "A")).to_contain_text("running")
    tell_progress(graph_paths.run(0, "A"), phase="training", step_success=(0.625,))
    expect(cells(page, "A")).to_contain_text("training62.5 %5121,2350:")
    save(graph_paths.root, ("A", replace(DONE, success_rate=0.75)), ("B", FAILED, ("A",)))
    expect(page.locator("#tally")).to_have_text("1 completed · 1 failed")
    expect(cells(page, "A")).to_contain_text("completed75 %")
    save(graph_paths.root, ("A", DONE), ("B", FAILED, ("A",)), ("C", WAITING))
    expect(page.locator("#rows tr")).to_have_count(3)
    daemon = DaemonLock(graph_paths.daemon_lock)
    daemon.acquire()
    expect(page.locator("#facts")).to_contain_text("scheduler" + "process ")
    daemon.release()
    expect(page.locator("#facts")).to_contain_text("none: nothing is started or merged")


def test_hostile_names_are_shown_as_text(tmp_path, serve, page):
    names = hostile_names()
    assert len(names) > 200
    statuses = (DONE, FAILED, HELD, WAITING)
    graph = [(name, statuses[place % 4], names[:place][-2:]) for place, name in enumerate(names)]
    save(tmp_path / "graph", *((name, status, tuple(needs)) for name, status, needs in graph))
    shown(page, serve(tmp_path / "graph"))
    buttons = page.locator("#rows .name")
    expect(buttons).to_have_count(len(names))
    assert buttons.all_text_contents() == names
    assert page.locator("#rows script, #rows b, #rows a").count() == 0
    for place in range(0, len(names), 12):
        buttons.nth(place).click()
        expect(page.locator("#skill-name")).to_have_text(names[place].strip() or names[place])
        expect(page.locator("#skill-body > *").first).to_be_visible()


def test_a_skill_is_opened_by_keyboard_with_all_that_is_known_of_it(tmp_path, serve, page):
    graph_paths = a_graph(tmp_path / "graph")
    shown(page, serve(graph_paths.root))
    page.get_by_role("button", name="Place Table", exact=True).focus()
    page.keyboard.press("Enter")
    body = page.locator("#skill-body")
    expect(body.locator("tbody tr")).to_have_text(["1Collect Wood90 %", "2Place Table25 %"])
    expect(body.locator("canvas")).to_have_count(2)
    expect(body.locator(".key").first).to_contain_text("2 Place Table, now 42.8 %")
    expect(body).to_contain_text("lr 0.5 (command line)")
    expect(body.locator("pre")).to_have_text("first\n<b>last</b> line")
    expect(page.locator("#buttons button")).to_have_count(0)
    page.keyboard.press("Escape")
    expect(page.locator("#skill")).to_be_hidden()
    expect(page.get_by_role("button", name="Place Table", exact=True)).to_be_focused()


def test_judges_machine_and_what_is_left_are_told(tmp_path, serve, page):
    graph_paths = a_graph(tmp_path / "graph")
    a_judge(graph_paths)
    shown(page, serve(graph_paths.root))
    facts = page.locator("#facts")
    expect(facts).to_contain_text("judgesrule, 200 of 200 unseen episodes: AUC 0.")
    expect(facts).to_contain_text(re.compile(r"cpu load\d[\d.]* of \d"))
    expect(facts).to_contain_text(re.compile(r"memory gb[\d.]+ of [\d.]+"))
    expect(facts).to_contain_text("runs left frames512")


def test_a_skill_is_opened_by_a_click_in_the_picture(tmp_path, serve, page):
    save(tmp_path / "graph", ("A", DONE))
    shown(page, serve(tmp_path / "graph"))

    def opened() -> bool:
        """True once a click has opened the only skill, in the middle; the picture comes later."""
        page.locator("#graph").click()
        page.wait_for_timeout(200)
        return page.locator("#skill-name").text_content() == "A"

    until(opened, what="the skill that was clicked on")


def test_a_graph_that_vanishes_is_shown_as_such_until_it_is_back(tmp_path, serve, page):
    graph_paths = a_graph(tmp_path / "graph")
    shown(page, serve(graph_paths.root))
    page.get_by_role("button", name="Place Table", exact=True).click()
    expect(page.locator("#skill-body pre")).to_be_visible()
    graph_paths.root.rename(tmp_path / "elsewhere")
    expect(page.locator("#problem")).to_contain_text("This graph cannot be read now")
    expect(page.locator("#rows tr")).to_have_count(3)
    (tmp_path / "elsewhere").rename(graph_paths.root)
    expect(page.locator("#problem")).to_be_hidden()
    graph_paths.scheduler_state.write_bytes(graph_paths.scheduler_state.read_bytes()[:-9])
    expect(page.locator("#problem")).to_contain_text("is damaged")


def test_a_thousand_skills_are_shown(tmp_path, serve, page):
    skills = [
        (f"Skill {n}", DONE if n < 400 else WAITING, tuple({f"Skill {n // 3}", f"Skill {n // 2}"}))
        for n in range(1, 1000)
    ]
    save(tmp_path / "graph", ("Skill 0", DONE), *skills)
    shown(page, serve(tmp_path / "graph"))
    expect(page.locator("#rows tr")).to_have_count(1000)
    page.locator("#search").fill("skill 99")
    expect(page.locator("#count")).to_have_text("11 of 1,000")
    page.locator("#show").select_option("trouble")
    expect(page.locator("#count")).to_have_text("0 of 1,000")


def test_buttons_send_what_the_commands_send(tmp_path, serve, page, flowrl):
    graph_paths = save(tmp_path / "graph", ("A", running()), ("B", FAILED), ("C", DONE))
    shown(page, serve(graph_paths.root, "--allow_control"))
    assert "token" not in page.url
    assert "#" not in page.url
    for skill, verbs in (("C", []), ("B", ["Retry"]), ("A", ["Pause"])):
        page.get_by_role("button", name=skill, exact=True).click()
        expect(page.locator("#buttons button")).to_have_text(verbs)
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#answer")).to_have_text("pause: asked; done when a scheduler starts")
    flowrl("pause", graph_paths.root, "A")
    ours, theirs = (path.read_text() for path in sorted(graph_paths.requests.iterdir()))
    assert ours == theirs


def test_one_of_several_graphs_is_chosen(tmp_path, serve, page):
    for name in ("one", "two"):
        save(tmp_path / name, (f"Skill of {name}", DONE))
    page.goto(serve(tmp_path / "one", tmp_path / "two").address)
    expect(page.locator("#rows")).to_contain_text("Skill of one")
    page.locator("#graphs").select_option(str(tmp_path / "two"))
    expect(page.locator("#rows")).to_contain_text("Skill of two")
    expect(page.locator("#rows tr")).to_have_count(1)


def test_the_page_says_that_the_server_has_gone(tmp_path, serve, browser):
    save(tmp_path / "graph", ("A", DONE))
    served, page = serve(tmp_path / "graph"), browser.new_page()
    shown(page, served)
    served.process.terminate()
    expect(page.locator("#live")).to_contain_text("no server")
    page.close()


def test_who_merged_what_is_told(template, serve, page):  # noqa: F811
    shown(page, serve(template.root))
    page.locator("#merges summary").click()
    lines = page.locator("#generations tbody tr")
    expect(lines).to_have_count(3)
    expect(lines.first).to_contain_text("Collect Wood (")


def test_ten_graphs_are_shown_by_one_server(tmp_path, serve, page):
    """Each has a page that watches it, and its own answers, at once."""
    roots = [tmp_path / f"graph{n}" for n in range(10)]
    for root in roots:
        write_run(save(root, (f"Skill of {root.name}", running())).run(0, f"Skill of {root.name}"))
    served = serve(*roots)
    pages = [page, *(page.context.new_page() for _ in range(2))]
    for place, each in enumerate(pages):
        shown(each, served)
        each.locator("#graphs").select_option(str(roots[9 - place]))
    for place, each in enumerate(pages):
        expect(each.locator("#rows")).to_contain_text(f"Skill of graph{9 - place}")
        expect(each.locator("#rows tr")).to_have_count(1)
    with ExitStack() as streams, ThreadPoolExecutor(10) as threads:
        lines = [streams.enter_context(stream(served, number)) for number in range(10)]
        names = [f"Skill%20of%20graph{number}" for number in range(10)]
        words = [f"/graphs/{number}/skill?skill={name}" for number, name in enumerate(names)]
        answers = list(threads.map(partial(asked, served), words))
        for number, (line, (code, _, content)) in enumerate(zip(lines, answers, strict=True)):
            until(lambda line=line, number=number: f"graph{number}" in line.recv(2**20).decode())
            assert (code, len(json.loads(content)["plan"])) == (200, 2)


def test_a_hostile_log_is_shown_as_text(tmp_path, serve, page):
    graph_paths = a_graph(tmp_path / "graph")
    log = graph_paths.run(1, "Place Table").training_log
    hostile = "\x1b]0;evil\x07\x1b[31m<script>alert(1)</script>\0\u202e<img src=x onerror=alert(1)>"
    page.set_viewport_size({"width": 360, "height": 800})
    shown(page, serve(graph_paths.root))
    for content, seen in ((hostile, "onerror=alert(1)>"), ("<b>x</b>" * 2**17, "</b><b>x</b>")):
        write_log(log, f"{content}\nlast")
        page.get_by_role("button", name="Place Table", exact=True).click()
        said = page.locator("#skill-body pre")
        expect(said).to_contain_text(seen)
        assert said.text_content().endswith("\nlast")
        assert said.locator("*").count() == 0
        assert not {"\x1b", "\x07", "\0", "\u202e"} & set(said.text_content())
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.keyboard.press("Escape")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280, 1920])
def test_nothing_is_wider_than_the_screen(tmp_path, serve, page, width, scheme):
    graph_paths = a_graph(tmp_path / "graph")
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    shown(page, serve(graph_paths.root))
    page.get_by_role("button", name="Place Table", exact=True).click()
    expect(page.locator("#skill-body canvas").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    bright = min(map(int, re.findall(r"\d+", paper)[:3])) > 127
    assert bright == (scheme == "light")


def test_a_graph_is_watched_while_it_trains(tmp_path, serve, page):
    root = tmp_path / "graph"
    env_of_tiny = {"PYTHONPATH": installed(tmp_path)}
    words = [sys.executable, "-m", "flowrl.bottomup_parallel", f"--graph-path={root}", *FLAGS]
    words += ["--max_nodes=1"]
    with (tmp_path / "train.log").open("w") as log:
        trained = subprocess.Popen(words, env={**os.environ, **env_of_tiny}, stderr=log, stdout=log)
    try:
        until((root / "scheduler_state.json").exists)
        shown(page, serve(root))
        expect(page.locator("#facts")).to_contain_text(f"process {trained.pid} ")
        expect(page.locator("#tally")).to_have_text("1 completed", timeout=limit(120_000))
        trained.wait(limit(60))
    finally:
        trained.kill()
        trained.wait()
    expect(page.locator("#facts")).to_contain_text("none, all has ended")
    page.get_by_role("button", name="Pick Berry", exact=True).click()
    expect(page.locator("#skill-body")).to_contain_text("episodes succeed")
    expect(page.locator("#skill-body canvas").first).to_be_visible()
    shutil.rmtree(root)
    expect(page.locator("#problem")).to_contain_text("no graph")
