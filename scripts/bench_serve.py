"""How soon `flowrl serve` shows what happens, and what it costs: `bench_serve.py`.

A real server and real Chromium. A trainer's move is the rename of a state file; it is painted when
the page's text has changed and the next picture is drawn, both by the clock of this machine.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from benchmarking import Row, arguments, report
from measure_scheduler import graph

from flowrl import storage
from flowrl.parallel.state import SchedulerState, StateFile
from flowrl.parallel.status import Completed, Entry, Waiting
from flowrl.paths import GraphPaths

_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
_FIRST = """
new MutationObserver(() => {
    const count = document.querySelectorAll("#rows tr").length;
    if (count && !window.first) requestAnimationFrame(() => setTimeout(() => {
        window.first ??= Date.now() / 1000;
    }));
}).observe(document, {childList: true, subtree: true});
"""
_WATCHED = """
window.painted = [];
new MutationObserver(() => requestAnimationFrame(() => setTimeout(() => window.painted.push(
    [Date.now() / 1000, document.getElementById("tally").textContent]
)))).observe(document.getElementById("tally"), {childList: true, subtree: true});
"""

_PAINTED = """
new Promise(done => requestAnimationFrame(() => setTimeout(() => done(Date.now() / 1000))))
"""


def main() -> int:
    """Measure and report."""
    args = arguments(__doc__).parse_args()
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("Chromium is missing: apt-get install chromium")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=_FLAGS)
        for skills in (20, 1000):
            file = StateFile(GraphPaths(Path(name) / str(skills)).scheduler_state)
            storage.make_dir(file.path.parent)
            rows += measured(browser, file, skills, small=args.small)
        browser.close()
    report("serve", rows, args.json)
    return 0


def measured(browser: Any, file: StateFile, skills: int, *, small: bool) -> list[Row]:
    """The rows of a graph of so many skills, with one browser open."""
    file.save(state(skills, done=0))
    words = [sys.executable, "-m", "flowrl.cli", "serve", str(file.path.parent), "--port=0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[0]
        try:
            firsts = [first_paint(browser, address, skills) for _ in range(3 if small else 7)]
            page = browser.new_page()
            page.goto(address)
            page.locator("#rows tr").nth(skills - 1).wait_for(state="attached")
            page.evaluate(_WATCHED)
            late = [
                seconds_to_paint(page, file, skills, 1 + number % 19)
                for number in range(10 if small else 40)
            ]
            time.sleep(2)
            share = idle(process.pid, seconds=5 if small else 30)
            page.close()
        finally:
            process.terminate()
    what = f"{skills:,} skills"
    table, both = (statistics.median(side) for side in zip(*firsts, strict=True))
    late.sort()
    ninetyfifth = late[min(len(late) - 1, int(0.95 * len(late)))]
    return [
        Row(case=f"event to paint, {what}, p50", ours=1e3 * statistics.median(late), unit="ms"),
        Row(case=f"event to paint, {what}, p95", ours=1e3 * ninetyfifth, unit="ms"),
        Row(case=f"first paint, {what}, table", ours=1e3 * table, unit="ms"),
        Row(case=f"first paint, {what}, picture, too", ours=1e3 * both, unit="ms"),
        Row(case=f"idle, {what}, one browser", ours=100 * share, unit="% of a core"),
    ]


def state(skills: int, *, done: int) -> SchedulerState:
    """A graph of which so many skills are completed."""
    now = datetime.now(UTC)
    completed = Completed(
        run_id="e0.a1.x", attempt=1, frames=10**6, success_rate=0.9, wall_seconds=60.0, at=now
    )
    entries: dict[str, Entry] = {
        entry.skill: replace(entry, status=completed if n < done else Waiting(), expert=n)
        for n, entry in enumerate(graph(skills))
    }
    return SchedulerState(entries=entries, next_expert=skills)


def first_paint(browser: Any, address: str, skills: int) -> tuple[float, float]:
    """Seconds from the address until the table of all skills is painted, and the picture, too."""
    context = browser.new_context()
    page = context.new_page()
    page.add_init_script(_FIRST)
    began = time.time()
    page.goto(address)
    page.locator("#rows tr").nth(skills - 1).wait_for(state="attached")
    page.locator("#graph canvas").first.wait_for(state="attached")
    first, both = page.evaluate("window.first"), page.evaluate(_PAINTED)
    context.close()
    return first - began, both - began


def seconds_to_paint(page: Any, file: StateFile, skills: int, done: int) -> float:
    """Seconds from a saved state until the page has painted its count of completed skills."""
    new = state(skills, done=done)
    time.sleep(0.9 + 0.013 * done)  # at all phases of the server's looks
    began = time.time()
    file.save(new)
    deadline = began + 20
    while time.time() < deadline:
        for at, text in page.evaluate("window.painted.splice(0)"):
            if text.startswith(f"{done} completed"):
                return at - began
        page.wait_for_timeout(50)
    raise SystemExit(f"{done} completed was not painted within 20 s")


def idle(pid: int, *, seconds: float) -> float:
    """The share of a core that the server takes while nothing happens."""
    process = psutil.Process(pid)
    before = process.cpu_times()
    time.sleep(seconds)
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / seconds


if __name__ == "__main__":
    raise SystemExit(main())
