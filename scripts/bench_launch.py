"""How long a launch takes and how soon its end is noticed, with 20 runs at a time.

python scripts/bench_launch.py [--launcher tmux|local] [--runs 100]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from flowrl.launchers import run_status
from flowrl.launchers.base import Handle, Job
from flowrl.launchers.launcher import Launcher
from flowrl.launchers.local import LocalLauncher
from flowrl.launchers.tmux import TmuxLauncher

SLEEP = "open('ready', 'w').close(); import time; time.sleep(600)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launcher", choices=["tmux", "local"], default="tmux")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--at_once", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMUX_TMPDIR"] = folder
        os.environ.pop("TMUX", None)
        launcher = TmuxLauncher("bench") if args.launcher == "tmux" else LocalLauncher()
        launches, starts, notices = [], [], []
        for first in range(0, args.runs, args.at_once):
            runs = []
            for number in range(first, min(first + args.at_once, args.runs)):
                job = make_job(Path(folder), number)
                began = time.perf_counter()
                handle = launcher.launch(job)
                launches.append(time.perf_counter() - began)
                while not (job.folder / "ready").exists():
                    time.sleep(0.0005)
                starts.append(time.perf_counter() - began)
                runs.append((handle, job))
            notices.extend(seconds_to_notice(launcher, runs))
        say("launch call", launches)
        say("launch → trainer's first line", starts)
        say("trainer killed → outcome known", notices)
        if isinstance(launcher, TmuxLauncher):
            launcher.server.run("kill-server")
        launcher.close()
    return 0


def make_job(folder: Path, number: int) -> Job:
    place = folder / str(number)
    place.mkdir()
    argv = (sys.executable, "-I", "-S", "-c", SLEEP)
    env = {"PATH": os.defpath}
    return Job(
        name=f"flowrl_e{number}_x", run_id=f"r{number}", argv=argv, env=env, cwd=place, folder=place
    )


def seconds_to_notice(launcher: Launcher, runs: list[tuple[Handle, Job]]) -> list[float]:
    """Ends the runs one after another while the launcher waits for all of them."""
    seconds = []
    while runs:
        handle, job = runs.pop()
        while (start := run_status.read_start(job.folder, job.run_id)) is None or not start.job_pid:
            time.sleep(0.001)
        killed = time.perf_counter()
        os.kill(start.job_pid, signal.SIGKILL)
        while launcher.poll(handle, job.folder) is None:
            launcher.wait([handle, *(other for other, _ in runs)], timeout_seconds=10.0)
        seconds.append(time.perf_counter() - killed)
    return seconds


def say(what: str, seconds: list[float]) -> None:
    millis = sorted(1000 * value for value in seconds)
    figures = {
        "what": what,
        "n": len(millis),
        "median_ms": round(statistics.median(millis), 2),
        "p99_ms": round(millis[int(0.99 * (len(millis) - 1))], 2),
    }
    print(json.dumps(figures, ensure_ascii=False))


if __name__ == "__main__":
    raise SystemExit(main())
