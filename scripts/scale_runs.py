"""Real graphs for `bench_scale.py`: operations on the shared disk, and hand-overs under Slurm."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from datetime import datetime
from pathlib import Path

from benchmarking import Row

from tests.chaos.place import ChaosPlace
from tests.games.test_a_game_of_ones_own import FLAGS, installed
from tests.launchers.slurm_cluster import cluster, missing

RUNS = 2  # of the tiny game's graph
TRACED = "trace=%file,%process,fsync,fdatasync,getdents64"
STRACE = ("strace", "-f", "-ff", "--seccomp-bpf", "-qq", "-y", "-s", "400", "-e", TRACED)
ROLES = {
    "runner": "/runner.py",
    "log's writer": "/log_writer.py",
    "trainer": "flowrl.ppo_flow",
    "array reader": "array_reader",
    "scheduler": '"flowrl", "train"',
}
KINDS = {
    "opens": {"open", "openat", "creat"},
    "stats": {"stat", "lstat", "newfstatat", "statx", "access", "faccessat2", "readlink"},
    "renames": {"rename", "renameat", "renameat2"},
    "fsyncs": {"fsync", "fdatasync"},
    "others": {
        "unlink",
        "unlinkat",
        "rmdir",
        "mkdir",
        "mkdirat",
        "getdents64",
        "utimensat",
        "link",
    },
}
CALL = re.compile(r"(\w+)\((.*)", re.DOTALL)
CHILD = re.compile(r"^(?:clone3?|v?fork)\(.*= (\d+)(?:<.*>)?$")
HERE = re.compile(r'AT_FDCWD<[^>]*>(?=, "/)')  # a working folder that an absolute path ignores
SKILLS = 12


def operations(folder: Path) -> Iterator[Row]:
    """Calls by strace that name something in the graph, for each of the tiny game's two runs."""
    for launcher in ("local", "slurm"):
        if launcher == "slurm" and (why := missing()):
            raise SystemExit(f"no Slurm: {why}; choose other parts by --only")
        place = folder / launcher
        place.mkdir()
        found = traced_graph(place, launcher)
        for role in (*ROLES, "other"):
            for kind in KINDS:
                if count := found[role, kind]:
                    case = f"--launcher {launcher}, {role}: {kind}"
                    yield Row(case=case, ours=count / RUNS, unit="a run")


def traced_graph(place: Path, launcher: str) -> Counter[tuple[str, str]]:
    """Train the tiny game's graph; returns the calls by role and kind."""
    env = {**os.environ, "PYTHONPATH": installed(place)}
    traces, graph = place / "traces", place / "graph"
    traces.mkdir()
    path = os.environ["PATH"]
    if launcher == "slurm":  # nodes are traced, since runners are their children
        shim = place / "bin" / "slurmd"
        shim.parent.mkdir()
        words = " ".join([*STRACE, "-D", "-o", str(traces / "node"), str(shutil.which("slurmd"))])
        shim.write_text(f'#!/bin/sh\nexec {words} "$@" >/dev/null 2>&1\n')
        shim.chmod(0o755)
        os.environ["PATH"] = f"{shim.parent}:{path}"
    try:
        with cluster(place / "slurm") if launcher == "slurm" else nullcontext():
            env |= {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
            words = ("-m", "flowrl", "train", str(graph), *FLAGS, f"--launcher={launcher}")
            argv = [*STRACE, "-o", str(traces / "own"), sys.executable, *words]
            done = subprocess.run(argv, cwd=place, env=env, check=False, capture_output=True)
            if done.returncode:
                raise SystemExit(done.stderr.decode())
    finally:
        os.environ["PATH"] = path
    return counted(traces, str(graph))


def counted(traces: Path, graph: str) -> Counter[tuple[str, str]]:
    """The calls in files of one thread each that name a path of the graph."""
    texts = {int(path.suffix[1:]): path.read_text(errors="replace") for path in traces.iterdir()}
    roles = roles_of(texts)
    found: Counter[tuple[str, str]] = Counter()
    for thread, text in texts.items():
        lines = (HERE.sub("", line) for line in text.splitlines() if "AT_EMPTY_PATH" not in line)
        calls = (CALL.match(line) for line in lines)
        of_graph = [call[1] for call in calls if call and graph in call[2]]
        for kind, names in KINDS.items():
            found[roles[thread], kind] += sum(name in names for name in of_graph)
    return found


def roles_of(texts: dict[int, str]) -> dict[int, str]:
    """What each thread is: by the program that it executed last, else as the one it is of."""
    parents, roles = dict[int, int](), dict[int, str]()
    for thread, text in texts.items():
        for line in text.splitlines():
            if child := CHILD.match(line):
                parents[int(child[1])] = thread
            for role, word in ROLES.items():
                if line.startswith("execve(") and word in line:
                    roles[thread] = role
                    break

    def role_of(thread: int) -> str:
        known = roles.get(thread)
        return known or (role_of(parents[thread]) if thread in parents else "other")

    return {thread: role_of(thread) for thread in texts}


class HandingPlace(ChaosPlace):
    """A graph of Classic's skills whose stand-in trainers end after half a second, on Slurm."""

    flags = (
        *("--launcher=slurm", "--sandbox=none", "--shared_folder", f"--max_nodes={SKILLS}"),
        f"--max_parallel_skills={SKILLS}",
    )


def slurm_handovers(folder: Path) -> Iterator[Row]:
    """From a run's end, by its runner, to the launch of the last run that needed it."""
    if why := missing():
        raise SystemExit(f"no Slurm: {why}; choose other parts by --only")
    taken, begun = list[float](), list[float]()
    for number in range(3):
        with cluster(folder / f"slurm{number}", nodes=4):
            place = HandingPlace(folder / f"place{number}")
            try:
                later, started = handovers(place)
            finally:
                place.end()
        taken += later
        begun += started
    for what, seconds in (("launched", taken), ("its runner runs", begun)):
        name = f"Slurm, run's end to dependant {what}, {len(seconds)} hand-overs"
        yield Row(case=f"{name}, p50", ours=statistics.median(seconds), unit="s")
        yield Row(case=f"{name}, most", ours=max(seconds), unit="s")


def handovers(place: HandingPlace) -> tuple[list[float], list[float]]:
    """Seconds from the end of the last need to the launch, and to the start of the runner."""
    ended, started, over = dict[str, float](), dict[str, float](), threading.Event()
    watch = threading.Thread(target=watch_runs, args=(place, ended, started, over))
    watch.start()
    try:
        daemon = place.start()
        _, said = daemon.communicate(timeout=600)
    finally:
        over.set()
        watch.join()
    if daemon.returncode:
        raise SystemExit(said)
    lines = [json.loads(line) for line in place.graph_paths.events.read_text().splitlines()]
    launched = {
        line["skill"]: (datetime.fromisoformat(line["at"]).timestamp(), line["run_id"])
        for line in lines
        if line["status"] == "running" and line["before"] == "preparing"
    }
    taken, begun = [], []
    for skill, facts in place.lines().items():
        if needs := [ended[launched[need][1]] for need in facts["needs"]]:
            moment, run_id = launched[skill]
            taken.append(moment - max(needs))
            begun.append(started[run_id] - max(needs))
    return taken, begun


def watch_runs(
    place: HandingPlace, ended: dict[str, float], started: dict[str, float], over: threading.Event
) -> None:
    """Note when each run's runner has started and recorded its end, before its folder goes."""
    notes = (("exit.json", "ended_at", ended), ("start.json", "started_at", started))
    while not over.wait(0.02):
        for name, key, known in notes:
            for path in place.graph_paths.training_runs.glob(f"*/{name}"):
                with suppress(FileNotFoundError, json.JSONDecodeError):
                    record = json.loads(path.read_text())
                    known[record["run_id"]] = record[key]
