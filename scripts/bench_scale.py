"""What a graph of 10,000 skills on 1,000 nodes costs, and where it breaks first: `bench_scale.py`.

`--only` names the parts: simulate, restart, poll, manifest, disk, slurm. The last two train real
graphs (`scale_runs.py`) and are left out by `--small`; they need strace, and Slurm as root.
"""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench_launch import make_job
from benchmarking import Row, arguments, report, seconds_of
from scale_runs import operations, slurm_handovers
from scale_simulation import BEGIN, Cluster, Costs, Found, Simulation, wide_graph
from scheduling_runs import SleepingBackend

from flowrl.config import ScheduleConfig
from flowrl.experts import manifest as manifests
from flowrl.experts.manifest import Manifest
from flowrl.experts.store import ExpertStore
from flowrl.games.base import env_sizes
from flowrl.launchers.claims import BEAT_SECONDS
from flowrl.launchers.remote import LISTED_SECONDS
from flowrl.launchers.slurm import SlurmLauncher
from flowrl.parallel import events
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.parallel.state import SchedulerState, StateFile, decode
from flowrl.parallel.status import Completed, Entry
from flowrl.parallel.transitions import step
from flowrl.paths import GraphPaths
from flowrl.runs import ExpertVersion, LineageEntry, expert_shapes
from flowrl.storage import READ_LIMIT_BYTES

SIZES = (100, 1_000, 3_000, 10_000)
JOBS = 200
LINEAGE = 4  # runs that have trained an expert: its own, and those whose plans walk through it
SAVES_ENCODED = 2_000  # about, of one simulation
MOST_COLLECTED = 1_000  # experts; of more, only the reading of the history is counted
MEGA = 1e6
SBATCH = r"""#!/bin/sh
for word; do case $word in --comment=*) launch=${word#--comment=} ;; esac; done
cat >/dev/null
echo x >>"$0.jobs"
number=$(wc -l <"$0.jobs")
echo "$number|$launch|RUNNING|None" >>"${0%/*}/listed"
echo "$number"
"""
SQUEUE = '#!/bin/sh\necho x >>"$0.calls"\nexec cat "${0%/*}/listed"\n'
DOWN = """#!/bin/sh
echo x >>"$0.calls"
echo "slurm_load_jobs error: Unable to contact slurm controller" >&2
exit 1
"""


def main() -> int:
    """Measure and report."""
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", default=(), metavar="PART", help="these parts alone")
    parser.add_argument("--skills", nargs="+", type=int, default=(), help="sizes of graphs")
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--slot_minutes", type=float, default=0.0, help="as of the scheduler")
    args = parser.parse_args()
    sizes = tuple(args.skills) or (SIZES[:2] if args.small else SIZES)
    seconds = 10.0 if args.small else 60.0
    parts: dict[str, Callable[[Path], Iterator[Row]]] = {
        "simulate": lambda _: simulated(sizes, args.nodes, args.slot_minutes),
        "restart": lambda folder: restarted(folder, sizes),
        "poll": lambda folder: polled(folder, seconds),
        "manifest": lambda folder: kept_experts(folder, sizes),
        "disk": operations,
        "slurm": slurm_handovers,
    }
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        for part, bench in parts.items():
            if part in (args.only or (list(parts)[:4] if args.small else parts)):
                place = Path(name, part)
                place.mkdir()
                rows += bench(place)
    report("scale", rows, args.json)
    return 0


def simulated(sizes: tuple[int, ...], nodes: int, slot_minutes: float) -> Iterator[Row]:
    """Graphs trained on nodes that are lost, from which runs are taken, and which crash."""
    for size in sizes:
        every = max(1, 5 * size // SAVES_ENCODED)
        simulation = Simulation(
            wide_graph(size),
            Cluster(nodes=nodes),
            costs=Costs(),
            slot_minutes=slot_minutes,
            encode_every=every,
        )
        yield from rows_of(size, simulation.play())


def rows_of(size: int, found: Found) -> Iterator[Row]:
    """The figures of a simulation as rows."""
    hours, ideal = found.makespan / 3_600, found.ideal / 3_600
    name = f"{size:,} skills:"
    yield Row(case=f"{name} makespan against ideal", ours=hours, baseline=ideal, unit="h",
              ratio=ideal / hours)  # fmt: skip
    per_event = {part: 1e3 * s / found.events for part, s in found.cpu.items()}
    figures: dict[str, tuple[float, str]] = {
        "completed": (found.completed, "skills"),
        "launches beyond one for each": (found.launches - size, "launches"),
        "charged attempts": (found.charged, "attempts"),
        "most skills that waited for a slot": (found.ready, "skills"),
        "most runs in the engine's queue": (found.queued, "runs"),
        "events": (found.events, "events"),
        **{f"{part} for an event": (ms, "ms") for part, ms in sorted(per_event.items())},
        "scheduler's core time": (found.cpu_seconds, "s"),
        "of it in an hour of the clock": (found.cpu_seconds / hours, "s/h"),
        "state file at most": (found.state_bytes / MEGA, "MB"),
        "written to it": (found.written_bytes / 1e9, "GB"),
    }
    for what, (value, unit) in figures.items():
        yield Row(case=f"{name} {what}", ours=value, unit=unit)


def restarted(folder: Path, sizes: tuple[int, ...]) -> Iterator[Row]:
    """What a new daemon does before its first tick, and a durable save, half of the graph done."""
    for size in sizes:
        entries = wide_graph(size)
        state = SchedulerState({e.skill: done(e, n, size) for n, e in enumerate(entries)}, size)
        file = StateFile(folder / "scheduler_state.json")
        content = file.encode(state)
        loading = core_seconds_of(partial(decode, content, "state"))
        again = core_seconds_of(
            lambda state=state: step(state, [events.Restarted()], BEGIN, ScheduleConfig())
        )
        saving = statistics.median(seconds_of(partial(file.save, state)) for _ in range(9))
        name = f"{size:,} skills, half completed:"
        yield Row(case=f"{name} state loaded", ours=1e3 * loading, unit="core ms")
        yield Row(case=f"{name} step of a restart", ours=1e3 * again, unit="core ms")
        yield Row(case=f"{name} save, nothing changed, with fsync", ours=1e3 * saving, unit="ms")
        most = READ_LIMIT_BYTES * size / len(content)
        yield Row(case=f"{name} most skills that can be loaded", ours=most, unit="skills")


def done(entry: Entry, number: int, size: int) -> Entry:
    """The entry, completed if it is of the first half."""
    if number > size // 2:
        return entry
    status = Completed(
        run_id=f"e{number}.a1.0123abcd",
        attempt=1,
        frames=5_000_000,
        success_rate=0.9,
        wall_seconds=1_800.0,
        at=BEGIN,
    )
    return Entry(skill=entry.skill, needs=entry.needs, status=status, expert=number)


# Polling


def polled(folder: Path, seconds: float) -> Iterator[Row]:
    """Calls of squeue and core time while 200 jobs live; Slurm's programs are shell scripts."""
    with fake_slurm(folder):
        for interval in (30.0, 1.0):
            yield from polled_by_scheduler(folder, interval, seconds)
        launcher, calls = SlurmLauncher(), folder / "bin" / "squeue.calls"
        jobs = [make_job(folder, number) for number in range(JOBS)]
        runs = [(launcher.launch(job), job) for job in jobs]
        before, until = lines_in(calls), time.monotonic() + seconds
        for number in range(JOBS, 10 * JOBS):
            if time.monotonic() > until:
                break
            job = make_job(folder, number)
            runs.append((launcher.launch(job), job))
            for handle, one in runs:
                launcher.poll(handle, one.folder)
            time.sleep(2.0)
        rate = 60 * (lines_in(calls) - before) / seconds
        case = f"{JOBS} live jobs, one more every 2 s: calls of squeue"
        yield Row(case=case, ours=rate, unit="a minute")
        (folder / "bin" / "squeue").write_text(DOWN)
        time.sleep(LISTED_SECONDS + 1)
        before = lines_in(calls)
        for handle, one in runs[:JOBS]:
            launcher.poll(handle, one.folder)
        case = f"{JOBS} live jobs, Slurm is down: calls of squeue"
        yield Row(case=case, ours=lines_in(calls) - before, unit="a look")


def polled_by_scheduler(folder: Path, interval: float, seconds: float) -> Iterator[Row]:
    """The whole scheduler, which looks at all runs every `interval` seconds."""
    calls, graph = folder / "bin" / "squeue.calls", folder / f"every_{interval:g}"
    launcher = SlurmLauncher()
    flags = {"max_parallel_skills": JOBS, "scheduler_poll_interval": interval}
    with SkillScheduler(graph, launcher=launcher, **flags) as scheduler:
        scheduler.set_callbacks(backend=SleepingBackend(graph))
        scheduler.add_skills([Entry(skill=f"Task {number}") for number in range(JOBS)])
        while len(scheduler.state.launched()) < JOBS:
            scheduler.tick()
        scheduler.wait()
        before, worked, began = lines_in(calls), core_seconds(), time.monotonic()
        while time.monotonic() - began < seconds:
            scheduler.tick()
            scheduler.wait()
        passed = time.monotonic() - began
        case = f"{JOBS} live jobs, a look every {interval:g} s:"
        rate, share = 60 / passed * (lines_in(calls) - before), core_seconds() - worked
        yield Row(case=f"{case} calls of squeue", ours=rate, unit="a minute")
        yield Row(case=f"{case} core, with squeue", ours=100 * share / passed, unit="% of a core")


@contextmanager
def fake_slurm(folder: Path) -> Iterator[None]:
    """Programs that know all jobs that were submitted, and say that they run."""
    programs, path = folder / "bin", os.environ["PATH"]
    programs.mkdir()
    for name, text in {"sbatch": SBATCH, "squeue": SQUEUE, "scancel": "#!/bin/sh\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    os.environ["PATH"] = f"{programs}:{path}"
    try:
        yield
    finally:
        os.environ["PATH"] = path


def lines_in(path: Path) -> int:
    """Return the number of lines in a file that may be missing."""
    return path.read_text().count("\n") if path.exists() else 0


def core_seconds() -> float:
    """What this process and its ended children have taken of the cores."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def core_seconds_of(act: Callable[[], object]) -> float:
    """What a call takes of the cores."""
    began = core_seconds()
    act()
    return core_seconds() - began


# Experts


def kept_experts(folder: Path, sizes: tuple[int, ...]) -> Iterator[Row]:
    """The manifest, its history and the collection of old versions; folders of experts are empty.

    A merge writes the manifest three times: as history, itself, and as a pickle.
    """
    yield Row(case="beats of 1,000 runs", ours=1_000 / BEAT_SECONDS, unit="beats/s")
    for size in sizes:
        graph_paths = GraphPaths(folder / str(size))
        store, present = ExpertStore(graph_paths), manifest_of(size)
        for version in present.experts.values():
            if size <= MOST_COLLECTED:
                store.path_of(version).mkdir(parents=True)
        writing = core_seconds_of(partial(write_all, graph_paths, present))
        size_bytes = graph_paths.manifest.stat().st_size
        pickled = graph_paths.manifest_pickle.stat().st_size
        reading = core_seconds_of(store.manifest)
        again = core_seconds_of(store.manifest)
        collecting = manifests.KEPT_GENERATIONS * reading  # less than it takes
        if size <= MOST_COLLECTED:
            for generation in range(size - manifests.KEPT_GENERATIONS, size):
                manifests.write_history(graph_paths, manifest_of(size, generation=generation))
            collecting = core_seconds_of(store.collect_garbage)
        name = f"{size:,} experts:"
        figures = {
            "manifest": (size_bytes / MEGA, "MB"),
            "history": (manifests.KEPT_GENERATIONS * size_bytes / MEGA, "MB"),
            "written by a merge beside experts": ((2 * size_bytes + pickled) / MEGA, "MB"),
            "manifest written three times": (1e3 * writing, "core ms"),
            "manifest read": (1e3 * reading, "core ms"),
            "manifest read again": (1e3 * again, "core ms"),
            "old versions collected": (1e3 * collecting, "core ms"),
            "of it for a merge": (1e3 * collecting / manifests.KEPT_GENERATIONS, "core ms"),
            "most that can be read": (READ_LIMIT_BYTES * size / size_bytes, "experts"),
        }
        for what, (value, unit) in figures.items():
            yield Row(case=f"{name} {what}", ours=value, unit=unit)


def manifest_of(size: int, *, generation: int | None = None) -> Manifest:
    """A manifest of so many experts of Craftax-Classic, after one merge for each."""
    shapes = expert_shapes(
        *env_sizes("Craftax-Classic-Symbolic-v1", sight=True, egocentric=True), 64
    )
    runs = [f"e{number}.a1.{number:08x}" for number in range(size)]
    experts = {
        number: ExpertVersion(
            index=number,
            skill=f"Collect Thing {number}",
            version=manifests.version_name(number + 1, run_id),
            frames=LINEAGE * 5_000_000,
            sha256=f"{number:064x}",
            content=f"{number:064x}",
            shapes=shapes,
            lineage=tuple(
                LineageEntry(run_id=run_id, frames=5_000_000, success_rate=None if n else 0.9)
                for n in range(LINEAGE)
            ),
        )
        for number, run_id in enumerate(runs)
    }
    return Manifest(generation=generation or size, experts=experts, merged=tuple(runs))


def write_all(graph_paths: GraphPaths, manifest: Manifest) -> None:
    """Write what a merge writes of the manifest."""
    manifests.write_history(graph_paths, manifest)
    manifests.swap(graph_paths, manifest)
    manifests.write_pickle(graph_paths, manifest)


if __name__ == "__main__":
    raise SystemExit(main())
