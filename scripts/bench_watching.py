"""The price of being watched: `bench_watching.py GRAPH SKILL [--hand_overs]`.

SKILL is a completed skill of GRAPH, of which films are made.

Steps of trainers: GRAPH trains meanwhile (`flowrl train GRAPH …` in another terminal). Page and
films are stopped and continued every few seconds, in random order, and the frames that all trainers
make in between are compared with those of the nearest time without either. So a machine that
changes its speed from minute to minute changes both sides.

With `--hand_overs` nothing trains: a scheduler of its own gives one slot from stand-ins for
trainers to others, as in `bench_scheduler.py`, and a page shows that graph. A hand-over is the time
from a run's end to the beginning of the run that needed it. `--busy 2` keeps two processors busy
all the time, as the trainers of the other two slots do.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from benchmarking import Row, arguments, report
from scheduling_runs import Chain

from flowrl.launchers.child import run_when_idle
from flowrl.launchers.tmux import TmuxLauncher
from flowrl.parallel.training_setup import live_runs
from flowrl.paths import GraphPaths
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
_BUSY = "while True: pass"
_STATES = {
    "none": (),
    "page": ("page",),
    "films": ("films",),
    "page and films": ("page", "films"),
}
_START_SECONDS = 20.0  # until a page is shown, or a film's programs are loaded
_PAIRS, _FIRST_COUNTED = 40, 4  # hand-overs of a chain, and from which on the page is shown
_SETTLE_SECONDS, _MEASURED_SECONDS, _LOOK_SECONDS = 2.0, 12.0, 0.05


def main() -> int:
    """Measure and report."""
    parser = arguments(__doc__)
    parser.add_argument("graph", type=Path)
    parser.add_argument("skill")
    parser.add_argument("--hand_overs", action="store_true")
    parser.add_argument("--busy", type=int, default=0, help="busy processes beside hand-overs")
    args = parser.parse_args()
    graph_paths = GraphPaths(args.graph.absolute())
    if args.hand_overs:
        rounds = 1 if args.small else 3
        rows = handed_over(graph_paths, args.skill, rounds=rounds, busy=args.busy)
        report("hand-overs", rows, args.json)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        film = filming(graph_paths, args.skill, Path(folder))
        watchers = {"page": showing(graph_paths), "films": [film]}
        time.sleep(_START_SECONDS)
        try:
            found = measured(graph_paths, watchers, rounds=3 if args.small else 10)
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
    report("watching", rows, args.json)
    return 0


def showing(graph_paths: GraphPaths) -> list[subprocess.Popen[str]]:
    """A server of the graph, and Chromium with its page."""
    words = [sys.executable, "-m", "flowrl.cli", "serve", str(graph_paths.root), "--port=0"]
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    server = subprocess.Popen(words, **piped)
    assert server.stdout is not None
    address = server.stdout.readline().split()[0]
    chromium = shutil.which("chromium") or "chromium"
    return [server, started(_BROWSER, chromium, address)]


def filming(graph_paths: GraphPaths, skill: str, folder: Path) -> subprocess.Popen[str]:
    """One film of the skill after another, made as the scheduler has it made."""
    words = [str(graph_paths.root), f"--skill={skill}", "--episodes=2", f"-o={folder / 'x.mp4'}"]
    films = started(_FILMS, *words)
    run_when_idle(films.pid)
    return films


def started(code: str, *words: str) -> subprocess.Popen[str]:
    """A Python process in a session of its own, as trainers and films have one."""
    argv = [sys.executable, "-c", code, *words]
    return subprocess.Popen(argv, text=True, start_new_session=True)


def handed_over(graph_paths: GraphPaths, skill: str, *, rounds: int, busy: int) -> list[Row]:
    """A row for each kind of watching: its hand-overs and those without any."""
    seconds: dict[str, list[float]] = {name: [] for name in _STATES}
    for _ in range(rounds):
        for name in random.sample(list(_STATES), len(_STATES)):
            with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
                beside = [started(_BUSY) for _ in range(busy)]
                try:
                    found = chain(graph_paths, skill, Path(folder), _STATES[name])
                finally:
                    for process in beside:
                        send(process, signal.SIGKILL)
            seconds[name] += found[_FIRST_COUNTED:]
        middles = {name: round(1e3 * statistics.median(one)) for name, one in seconds.items()}
        print(middles, flush=True)
    bare = seconds.pop("none")
    baseline = 1e3 * statistics.median(bare)
    rows = []
    for name, watched in seconds.items():
        ours = 1e3 * statistics.median(watched)
        what = f"hand-over with {name}, median of {len(watched)}, against none"
        rows.append(Row(case=what, ours=ours, baseline=baseline, unit="ms", ratio=baseline / ours))
    return rows


def chain(graph_paths: GraphPaths, skill: str, folder: Path, watched: Sequence[str]) -> list[float]:
    """Seconds of each hand-over of a small graph in `folder`, watched so from its beginning on."""
    os.environ["TMUX_TMPDIR"] = str(folder)
    os.environ.pop("TMUX", None)
    runs = Chain(folder, pairs=_PAIRS)
    watchers = [filming(graph_paths, skill, folder)] if "films" in watched else []
    if watchers:
        time.sleep(_START_SECONDS)  # until pictures are made
    later = threading.Timer(0.5, lambda: watchers.extend(showing(GraphPaths(folder / "graph"))))
    if "page" in watched:
        later.start()
    try:
        return runs.run(TmuxLauncher("bench"))
    finally:
        later.cancel()
        for process in watchers:
            send(process, signal.SIGKILL)
        subprocess.run(["tmux", "-L", "bench", "kill-server"], check=False, capture_output=True)


def measured(
    graph_paths: GraphPaths, watchers: dict[str, list[subprocess.Popen[str]]], *, rounds: int
) -> dict[str, list[float]]:
    """Frames per second of all trainers, one figure a round; by who watches."""
    found: dict[str, list[float]] = {name: [] for name in _STATES}
    while len(found["none"]) < rounds:
        rates, runs = {}, running(graph_paths)
        for name in random.sample(list(_STATES), len(_STATES)):
            for watcher, processes in watchers.items():
                for process in processes:
                    send(process, signal.SIGCONT if watcher in _STATES[name] else signal.SIGSTOP)
            time.sleep(_SETTLE_SECONDS)
            rates[name] = frames_per_second(graph_paths)
        if all(rates.values()) and runs == running(graph_paths):  # else one has ended or begun
            for name, rate in rates.items():
                found[name].append(rate)
            print({name: round(rate) for name, rate in rates.items()}, flush=True)
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
