"""Several graphs on one tmux server: none touches a session of another."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.launchers import process
from flowrl.launchers.base import Job
from flowrl.launchers.run_status import LOG_WRITER
from flowrl.launchers.tmux import TmuxLauncher
from tests.launchers.conftest import SLEEP, MakeJob, end_of, start_of, until
from tests.launchers.tmux_sessions import sessions

pytestmark = pytest.mark.tmux

WOOD = "flowrl_e0_Wood"
OTHER_RUN = "e0.a1.other"


@pytest.fixture
def of_graph(make_job: MakeJob, tmp_path: Path) -> Callable[..., Job]:
    """Makes a job of a graph: its run folder lies in the graph's."""

    def make(graph: str, source: str, run_id: str) -> Job:
        folder = tmp_path / graph / "skill_0_Wood"
        folder.mkdir(parents=True, exist_ok=True)
        return replace(make_job(source, run_id=run_id), folder=folder, cwd=folder)

    return make


@pytest.mark.parametrize("name", ["first", "odd;", "a\tb\n#{pid} c%d"], ids=["plain", ";", "odd"])
def test_two_graphs_run_the_same_skill_side_by_side(tmux, of_graph, name):
    first, second = of_graph(name, SLEEP, "e0.a1.x"), of_graph("second", SLEEP, OTHER_RUN)
    handles = [tmux.launch(first), tmux.launch(second)]
    assert [handle.session for handle in handles] == [WOOD, f"{WOOD}_2"]
    for handle, job in zip(handles, (first, second), strict=True):
        start_of(job)
        assert tmux.poll(handle, job.folder) is None
        assert TmuxLauncher("test").find(job) == handle


def test_the_session_that_another_graph_keeps_for_reading_stays(tmux, of_graph):
    failed = of_graph("first", "print('what went wrong'); raise SystemExit(1)", "e0.a1.x")
    end_of(tmux, tmux.launch(failed), failed)
    handle = tmux.launch(of_graph("second", SLEEP, OTHER_RUN))
    assert handle.session == f"{WOOD}_2"
    text = tmux.server.run("capture-pane", "-p", "-S", "-", "-t", f"={WOOD}:").stdout
    assert "what went wrong\n" in text


def test_a_retry_goes_into_its_own_graphs_session(tmux, of_graph):
    tmux.launch(of_graph("first", SLEEP, "e0.a1.x"))
    failed = of_graph("second", "raise SystemExit(1)", OTHER_RUN)
    before = tmux.launch(failed)
    end_of(tmux, before, failed)
    after = tmux.launch(of_graph("second", SLEEP, "e0.a2.other"))
    assert (after.session, after.pane) == (f"{WOOD}_2", before.pane)
    assert sessions(tmux) == [WOOD, f"{WOOD}_2"]


def test_a_name_that_is_taken_at_the_last_moment_is_no_failure(tmux, of_graph, monkeypatch):
    tmux.launch(of_graph("first", SLEEP, "e0.a1.x"))
    panes, looks = tmux.server.panes, []

    def blind_at_first():
        looks.append(1)
        return panes() if len(looks) > 1 else []

    monkeypatch.setattr(tmux.server, "panes", blind_at_first)
    assert tmux.launch(of_graph("second", SLEEP, OTHER_RUN)).session == f"{WOOD}_2"


def dead(tmux: TmuxLauncher) -> int:
    """How many panes the server knows to be dead."""
    return sum(pane.dead for pane in tmux.server.panes())


def log_writers(folder: Path) -> list[int]:
    return process.of_script(LOG_WRITER, str(folder / "training.log"))


def test_only_the_sessions_of_a_graphs_own_done_jobs_are_closed(tmux, of_graph):
    failing = "print('what went wrong'); raise SystemExit(1)"
    done, other, gone = (of_graph(graph, failing, "e0.a1.x") for graph in ("a", "b", "c"))
    runs = done.folder.parent
    kept = replace(of_graph("a", failing, "e1.a1.x"), name="flowrl_e1_Table", folder=runs / "table")
    lives = replace(of_graph("a", SLEEP, "e2.a1.x"), name="flowrl_e2_Pick", folder=runs / "pick")
    for job in (kept, lives):
        job.folder.mkdir()
    for job in (done, kept, other, gone):
        end_of(tmux, tmux.launch(job), job)
    tmux.launch(lives)
    until(lambda: log_writers(lives.folder))
    until(lambda: tmux.wait([], timeout_seconds=0) or dead(tmux) == 4)
    gone.folder.parent.rename(gone.folder.parent.with_name("away"))
    reader = subprocess.Popen(["tail", "-f", str(kept.folder / "training.log")])
    tmux.clear(runs, [done.folder, lives.folder])
    assert sessions(tmux) == [f"{WOOD}_2", f"{WOOD}_3", "flowrl_e1_Table", "flowrl_e2_Pick"]
    text = tmux.server.run("capture-pane", "-p", "-S", "-", "-t", "=flowrl_e1_Table:").stdout
    assert "what went wrong\n" in text
    until(lambda: not log_writers(done.folder) and not log_writers(kept.folder))
    assert log_writers(lives.folder)
    assert reader.poll() is None, "a user who reads the log is left alone"
    reader.kill()
    reader.wait()
    assert tmux.launch(replace(kept, run_id="e1.a2.x")).session == "flowrl_e1_Table"


def test_a_pane_that_lives_where_its_process_cannot_be_seen_is_not_closed(
    tmux, of_graph, monkeypatch
):
    job = of_graph("a", SLEEP, "e0.a1.x")
    tmux.launch(job)
    until(lambda: log_writers(job.folder))
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(process, "start_time_of", lambda _: "")
        tmux.clear(job.folder.parent, [job.folder])
    assert sessions(tmux) == [WOOD]
    assert log_writers(job.folder)


def test_clearing_without_a_server_does_nothing(tmux, tmp_path):
    tmux.clear(tmp_path, [tmp_path / "a"])
