"""The price of being watched, paid by trainers: `bench_watching.py GRAPH SKILL`.

GRAPH trains meanwhile (`flowrl train GRAPH …` in another terminal), and SKILL is one of its
completed skills. Page and films are stopped and continued every few seconds, in random order, and
the frames that all trainers make in between are compared with those of the nearest time without
either. So a machine that changes its speed from minute to minute changes both sides. Hand-overs
are told by events.jsonl: from a run's end to the launch of a skill that waits for it. Give each
skill a slot (`--max_nodes`), else a hand-over waits for one.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from benchmarking import Row, arguments, report

from flowrl.launchers.child import run_when_idle
from flowrl.parallel.training_setup import live_runs
from flowrl.paths import GraphPaths
from flowrl.reports.status import read_rows
from flowrl.runs import read_progress

_BROWSER = """
import sys, time
from playwright.sync_api import sync_playwright
with sync_playwright() as driver:
    flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    page = driver.chromium.launch(executable_path=sys.argv[1], args=flags).new_page()
    page.goto(sys.argv[2])
    time.sleep(1e6)
"""
_FILMS = """
import subprocess, sys
while True:
    subprocess.run([sys.executable, "-m", "flowrl.cli", "play", *sys.argv[1:]], capture_output=True)
"""
_SETTLE_SECONDS, _MEASURED_SECONDS, _LOOK_SECONDS = 2.0, 12.0, 0.05


def main() -> int:
    """Measure and report."""
    parser = arguments(__doc__)
    parser.add_argument("graph", type=Path)
    parser.add_argument("skill")
    args = parser.parse_args()
    graph_paths = GraphPaths(args.graph)
    with tempfile.TemporaryDirectory() as folder:
        watchers = started(graph_paths, args.skill, Path(folder))
        try:
            found, seconds = measured(graph_paths, watchers, rounds=3 if args.small else 10)
        finally:
            for processes in watchers.values():
                for process in processes:
                    send(process, signal.SIGKILL)
    bare = found.pop("none")
    rows = []
    for name, rates in found.items():
        ratios = sorted(rate / other for rate, other in zip(rates, bare, strict=True) if other)
        spread = f"{ratios[len(ratios) // 4]:.2f} to {ratios[3 * len(ratios) // 4]:.2f}"
        what = f"trainers' steps/s with {name}, against none ({spread})"
        middle = statistics.median(ratios)
        ours, baseline = statistics.median(rates), statistics.median(bare)
        rows.append(Row(case=what, ours=ours, baseline=baseline, unit="steps/s", ratio=middle))
    bare = seconds.pop("none", [])
    for name, watched in seconds.items():
        if bare and watched:
            what = f"hand-over with {name}, median of {len(watched)}, against {len(bare)} with none"
            ours, baseline = statistics.median(watched), statistics.median(bare)
            rows.append(
                Row(case=what, ours=ours, baseline=baseline, unit="s", ratio=baseline / ours)
            )
    report("watching", rows, args.json)
    return 0


def started(
    graph_paths: GraphPaths, skill: str, folder: Path
) -> dict[str, list[subprocess.Popen[str]]]:
    """What watches, by name: a server with a page open in Chromium, and one film after another."""
    own: dict[str, Any] = {"text": True, "start_new_session": True}
    words = [sys.executable, "-m", "flowrl.cli", "serve", str(graph_paths.root), "--port=0"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, **own)
    assert server.stdout is not None
    address = server.stdout.readline().split()[0]
    chromium = shutil.which("chromium") or "chromium"
    browser = subprocess.Popen([sys.executable, "-c", _BROWSER, chromium, address], **own)
    film = [str(graph_paths.root), f"--skill={skill}", "--episodes=2", f"-o={folder / 'x.mp4'}"]
    films = subprocess.Popen([sys.executable, "-c", _FILMS, *film], **own)
    run_when_idle(films.pid)
    time.sleep(20)  # until both are at work
    return {"page": [server, browser], "films": [films]}


def measured(
    graph_paths: GraphPaths, watchers: dict[str, list[subprocess.Popen[str]]], *, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Frames per second of all trainers, one figure a round, and hand-overs; by who watches."""
    states = {"none": [], "page": ["page"], "films": ["films"], "page and films": ["page", "films"]}
    found: dict[str, list[float]] = {name: [] for name in states}
    spans: list[tuple[datetime, str]] = []
    while len(found["none"]) < rounds:
        rates, runs = {}, running(graph_paths)
        for name in random.sample(list(states), len(states)):
            for watcher, processes in watchers.items():
                for process in processes:
                    send(process, signal.SIGCONT if watcher in states[name] else signal.SIGSTOP)
            spans.append((datetime.now(UTC), name))
            time.sleep(_SETTLE_SECONDS)
            rates[name] = frames_per_second(graph_paths)
        if all(rates.values()) and runs == running(graph_paths):  # else one has ended or begun
            for name, rate in rates.items():
                found[name].append(rate)
            print({name: round(rate) for name, rate in rates.items()}, flush=True)
    return found, hand_overs(graph_paths, spans)


def hand_overs(
    graph_paths: GraphPaths, spans: Sequence[tuple[datetime, str]]
) -> dict[str, list[float]]:
    """Seconds from the end of a skill's last need to its launch, by who watched at that end."""
    needs = {row.skill: set(row.needs) for row in read_rows(graph_paths)}
    ended: dict[str, datetime] = {}
    found: dict[str, list[float]] = {name: [] for _, name in spans}
    for line in map(json.loads, graph_paths.events.read_text().splitlines()):
        at, skill = datetime.fromisoformat(line["at"]), line.get("skill")
        own, first = needs.get(skill), line.get("attempt") == 1
        if line.get("status") == "merging":
            ended[skill] = at
        elif line.get("status") == "running" and first and own and own <= ended.keys():
            last = max(ended[name] for name in own)
            watching = [name for since, name in spans if since <= last]
            for name in watching[-1:]:
                found[name].append((at - last).total_seconds())
    return found


def running(graph_paths: GraphPaths) -> set[Path]:
    """The folders of the runs that train."""
    return {run.folder for run in live_runs(graph_paths) if run.progress.exists()}


def frames_per_second(graph_paths: GraphPaths) -> float:
    """The frames of all runs from one update's end to another's; 0 if a run has too few updates.

    An update takes seconds, so frames over the whole time would be rounded to whole updates.
    """
    runs = list(live_runs(graph_paths))
    ended: dict[Path, list[tuple[float, int]]] = {run.folder: [] for run in runs}
    until = time.monotonic() + _MEASURED_SECONDS
    while (now := time.monotonic()) < until:
        for run in runs:
            progress, updates = read_progress(run), ended[run.folder]
            if progress and (not updates or progress.frames != updates[-1][1]):
                updates.append((now, progress.frames))
        time.sleep(_LOOK_SECONDS)
    # The first look sees a count whose update ended some time before.
    if not all(len(updates) > 2 for updates in ended.values()):
        return 0.0
    spans = [(updates[1], updates[-1]) for updates in ended.values()]
    return sum((last[1] - first[1]) / (last[0] - first[0]) for first, last in spans)


def send(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Send a signal to a process and all that it has started."""
    with suppress(psutil.Error):
        own = psutil.Process(process.pid)
        for one in (own, *own.children(recursive=True)):
            with suppress(psutil.Error, ProcessLookupError):
                os.kill(one.pid, number)


if __name__ == "__main__":
    sys.exit(main())
