"""What the scheduler costs, with real sessions on a tmux server of its own: `bench_scheduler.py`.

Beside it, on the same tasks: what users' scripts do (ask tmux every second whether a session is
there), and a state that is written whole.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench_launch import make_job, seconds_to_notice
from benchmarking import Row, arguments, report, seconds_of
from measure_scheduler import NOW, SCHEDULE, graph
from scheduling_runs import Chain, SleepingBackend, sleepers

from flowrl.config import ScheduleConfig
from flowrl.launchers.local import LocalLauncher
from flowrl.launchers.tmux import TmuxLauncher
from flowrl.parallel import events
from flowrl.parallel.events import Verb
from flowrl.parallel.requests import send_request
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.parallel.state import SchedulerState, StateFile
from flowrl.parallel.transitions import step

SKILLS = 1_000
SESSIONS = 20
POLL_SECONDS = 1.0  # as users' scripts do; the original looks every 30 s


def main() -> int:
    """Measure and report."""
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help="the rows whose name begins so")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        os.environ["TMUX_TMPDIR"] = name
        os.environ.pop("TMUX", None)
        benches = {
            "noticed": noticed,
            "handed": handed_over,
            "idle": idle,
            "state": state_of_many,
        }
        rows: list[Row] = []
        try:
            for word, bench in benches.items():
                if word.startswith(args.only):
                    place = folder / word
                    place.mkdir()
                    rows += bench(place, small=args.small)
        finally:
            subprocess.run(["tmux", "-L", "bench", "kill-server"], check=False, capture_output=True)
    report("scheduler", rows, args.json)
    return 0


def noticed(folder: Path, *, small: bool) -> list[Row]:
    """A trainer's end until its outcome is known, one of twenty sessions ending at a time."""
    launcher = TmuxLauncher("bench")
    seconds: list[float] = []
    for number in range(2 if small else 6):
        jobs = [make_job(folder, number * SESSIONS + place) for place in range(SESSIONS)]
        runs = [(launcher.launch(job), job) for job in jobs]
        until(lambda jobs=jobs: all((job.folder / "ready").exists() for job in jobs))
        time.sleep(0.5)
        seconds += seconds_to_notice(launcher, runs)
    launcher.close()
    polled = polling_of_sessions(ends=4 if small else 10)
    rows = []
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        ours, theirs = at(seconds, share), at(polled, share)
        rows.append(
            Row(
                case=f"exit to noticed, {SESSIONS} sessions, {name}",
                ours=1e3 * ours,
                baseline=1e3 * theirs,
                unit="ms",
                ratio=theirs / ours,
            )
        )
    return rows


def polling_of_sessions(*, ends: int) -> list[float]:
    """How late a script hears of an end that asks `has-session` for each session every second."""
    tmux = ("tmux", "-L", "polled")
    dice = random.Random(ends)
    names = [f"s{number}" for number in range(SESSIONS)]
    for name in names:
        subprocess.run([*tmux, "new-session", "-d", "-s", name, "sleep", "600"], check=True)
    seconds = []
    for name in names[:ends]:
        due = time.monotonic() + dice.uniform(0, POLL_SECONDS)
        ended = None
        gone = False
        while not gone:
            wake = time.monotonic() + POLL_SECONDS
            if ended is None and due < wake:
                time.sleep(max(0.0, due - time.monotonic()))
                subprocess.run([*tmux, "kill-session", "-t", f"={name}"], check=True)
                ended = time.monotonic()
            time.sleep(max(0.0, wake - time.monotonic()))
            for other in names[names.index(name) :]:
                asked = subprocess.run(
                    [*tmux, "has-session", "-t", f"={other}"], check=False, capture_output=True
                )
                gone = gone or asked.returncode != 0
        assert ended is not None
        seconds.append(time.monotonic() - ended)
    subprocess.run([*tmux, "kill-server"], check=False)
    return seconds


def handed_over(folder: Path, *, small: bool) -> list[Row]:
    """The end of a trainer until that of a skill that needs its 1 MB expert has begun."""
    chain = Chain(folder, pairs=4 if small else 12)
    seconds = chain.run(TmuxLauncher("bench"))
    return [
        Row(case=f"exit to merged to dependant running, 1 MB, {name}", ours=1e3 * value, unit="ms")
        for name, value in (("p50", at(seconds, 0.5)), ("most", max(seconds)))
    ]


def idle(folder: Path, *, small: bool) -> list[Row]:
    """What waiting costs while 100 sessions run, as per cent of a core."""
    sessions = 20 if small else 100
    seconds = 8.0 if small else 30.0
    with sleepers(folder, TmuxLauncher("bench"), sessions=sessions) as scheduler:
        until(lambda: scheduler.tick() or len(scheduler.state.launched()) == sessions)
        scheduler.schedule = ScheduleConfig(scheduler_poll_interval=0.1)
        scheduler.wait()  # the first wait opens a descriptor for each run
        scheduler.tick()
        began, worked = time.monotonic(), time.process_time()
        while (left := began + seconds - time.monotonic()) > 0:
            scheduler.schedule = ScheduleConfig(scheduler_poll_interval=min(left, 30.0))
            scheduler.wait()
            scheduler.tick()
        share = (time.process_time() - worked) / (time.monotonic() - began)
        send_request(scheduler.graph_paths, Verb.STOP_NOW)
    return [Row(case=f"idle with {sessions} sessions", ours=100 * share, unit="% of a core")]


def state_of_many(folder: Path, *, small: bool) -> list[Row]:
    """Saving, stepping and a whole tick with 1,000 skills; beside it a file written whole.

    The skills wait, as those of a graph that is being trained do. When those that need nothing are
    held, all others are blocked, and a line names what blocks it: the largest state that there is.
    """
    skills = graph(SKILLS)
    needed = {need for item in skills for need in item.needs}
    leaves = [item.skill for item in skills if item.skill not in needed]
    held = leaves[: 50 if small else 200]
    waiting, _ = step(
        SchedulerState(), [events.SkillsAdded(skills)], NOW, SCHEDULE, launching=False
    )
    row, row_of_event = _saves(folder / "scheduler_state.json", waiting, held, "")
    with SkillScheduler(folder, launcher=LocalLauncher(), max_parallel_skills=1) as scheduler:
        scheduler.set_callbacks(backend=SleepingBackend(folder))
        scheduler.tick()  # one skill takes the only slot, and the others wait
        ticks = [seconds_of(scheduler.tick) for _ in range(100)]
        send_request(scheduler.graph_paths, Verb.STOP_NOW)
        scheduler.run()
    tick = Row(case="idle tick, 1,000 skills", ours=1e3 * statistics.median(ticks), unit="ms")
    if small:
        return [row, row_of_event, tick]
    holds = [events.Asked(item.skill, Verb.PAUSE) for item in skills if not item.needs]
    blocked, _ = step(waiting, holds, NOW, SCHEDULE, launching=False)
    largest, _ = _saves(folder / "blocked.json", blocked, held[:50], ", all blocked")
    return [row, row_of_event, tick, largest]


def _saves(path: Path, state: SchedulerState, held: list[str], what: str) -> tuple[Row, Row]:
    """The rows of a save and of the event before it, beside a file that is written whole.

    The events are holds of skills that no other needs, so that each changes one line.
    """
    file = StateFile(path)
    file.save(state)
    facts = json.loads(path.read_bytes())
    whole = path.with_name("whole.json")
    stepping, saving, theirs = [], [], []
    for number, skill in enumerate(held):
        began = time.perf_counter()
        state, _ = step(state, [events.Asked(skill, Verb.PAUSE)], NOW, SCHEDULE, launching=False)
        stepped = time.perf_counter()
        file.save(state)
        stepping.append(stepped - began)
        saving.append(time.perf_counter() - stepped)
        time.sleep(0.01)
        if number % (len(held) // 3) == 0:
            theirs.append(seconds_of(lambda: whole.write_text(json.dumps(facts, indent=2))))
    ours, baseline = (1e3 * statistics.median(side) for side in (saving, theirs))
    case = f"save, 1,000 skills{what}"
    save = Row(case=case, ours=ours, baseline=baseline, unit="ms", ratio=baseline / ours)
    one = 1e3 * statistics.median(stepping)
    return save, Row(case=f"one event, 1,000 skills{what}", ours=one, unit="ms")


def until(holds: Callable[[], object]) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + 60.0
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit("it did not come about within a minute")
        time.sleep(0.002)


def at(seconds: list[float], share: float) -> float:
    """The value below which so large a share of them lies."""
    ranked = sorted(seconds)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    raise SystemExit(main())
