"""From the start of a process to its first update: `python scripts/bench_startup.py`.

Real processes, each with a compile cache of its own: "cold" finds it empty, "warm" after a run of
the same skill, "second skill" after a run of another library skill. Ours has the environment that
schedulers give to trainers. The baseline is the process of
`baseline_ppo.py` on the same plan, with JAX's compile cache on, too. The figures are
seconds; `--cpu` takes the process's CPU time instead, which says more where others are at work.

With --graph: a demo of eight small skills, two at a time, with an empty cache and again with a full
one; the figures are the shares of the runs' time that went before their first update. What goes
before the first run starts counts for both places. There is no baseline.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import psutil
from benchmarking import Pair, Row, arguments, report

from flowrl import runs
from flowrl.command_line import parse
from flowrl.config import PPOConfig
from flowrl.launchers.sandbox import child_env, compile_cache
from flowrl.parallel import prepare_training_run
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import TrainConfig
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import load_library

FIRST, SECOND = "Collect Wood", "Collect Sapling"
ANOTHER_POINT = (
    *("--lr=3e-4", "--gamma=0.97", "--gae_lambda=0.8", "--clip_eps=0.3"),
    *("--ent_coef=0.02", "--vf_coef=0.7", "--max_grad_norm=0.7"),
)
LIMIT_SECONDS = 600.0
GRAPH_SKILLS, PLACES = 8, 2


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--graph", action="store_true", help="a graph of eight skills")
    parser.add_argument("--cpu", action="store_true", help="CPU time instead of wall time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--baseline", type=Path, metavar="MODULE", help="be the baseline's process")
    args = parser.parse_args()
    if args.baseline:
        be_the_baseline(args.baseline)
    elif args.graph:
        report("startup-graph", graph_rows(), args.json)
    else:
        rounds = 1 if args.small else args.rounds
        rows = startup_rows(rounds, only_warm=args.small, cpu=args.cpu)
        report("startup", rows, args.json)


def startup_rows(rounds: int, *, only_warm: bool, cpu: bool) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        first, second = (
            module_of(place / name.replace(" ", "_"), name) for name in (FIRST, SECOND)
        )
        if only_warm:  # the user's cache may be full; it is filled in any case
            cache = compile_cache(None, os.environ)
            ours(first, cache)
            return [row("warm", first, lambda _: cache, rounds=rounds, cpu=cpu)]
        cold = row("cold", first, lambda number: place / f"cold{number}", rounds=rounds, cpu=cpu)
        warm = row("warm", first, lambda _: place / "cold0", rounds=rounds, cpu=cpu)
        fresh = [place / f"other{number}" for number in range(rounds)]
        for cache in fresh:
            ours(first, cache)
            shutil.copytree(beside(place / "cold0"), beside(cache))
        other = row("second skill", second, lambda number: fresh[number], rounds=rounds, cpu=cpu)
    return [cold, warm, other]


def trial_row(*, rounds: int) -> Row:
    """The second trial of a sweep, with other numbers of all kinds, and the first as baseline."""
    found: dict[str, list[float]] = {"second": [], "first": []}
    with tempfile.TemporaryDirectory() as folder:
        module = module_of(Path(folder, "graph"), FIRST)
        for number in range(rounds):
            cache = Path(folder, f"cache{number}")
            found["first"].append(ours(module, cache)[0])
            found["second"].append(ours(module, cache, *ANOTHER_POINT)[0])
    pair = Pair(tuple(found["second"]), tuple(found["first"]))
    second, first = map(statistics.median, (pair.ours, pair.baseline))
    case = "second trial over first, start-up"
    return Row(case=case, ours=second, baseline=first, unit="s", ratio=pair.speedup)


def row(case: str, module: Path, cache: Callable[[int], Path], *, rounds: int, cpu: bool) -> Row:
    """Ours and the baseline in turns; `cache` is the folder of a round."""
    figure = 1 if cpu else 0
    found: dict[str, list[float]] = {"ours": [], "baseline": []}
    for number in range(rounds):
        found["ours"].append(ours(module, cache(number))[figure])
        found["baseline"].append(baseline(module, beside(cache(number)))[figure])
    pair = Pair(tuple(found["ours"]), tuple(found["baseline"]))
    times = pair.rate_row(case, work=1.0, unit="s")
    return Row(
        case=case,
        ours=1.0 / times.ours,
        baseline=None if times.baseline is None else 1.0 / times.baseline,
        unit="CPU s" if cpu else "s",
        ratio=pair.speedup,
    )


def beside(cache: Path) -> Path:
    """The baseline's cache next to ours."""
    return cache.with_name(f"{cache.name}-baseline")


def ours(module: Path, cache: Path, *flags: str, **variables: str) -> tuple[float, float]:
    """Seconds, and CPU seconds, until the trainer has written down its first update."""
    run_paths = RunPaths(module.parent, int(module.stem))
    run_paths.metrics.unlink(missing_ok=True)
    flags = (f"--module_path={module}", *trainer_flags(), "--no_resume", *flags)
    words = ["-m", "flowrl.ppo_flow", *flags]
    env = child_env(environ=environment(cache) | variables)
    return timed(
        words, env, lambda: run_paths.metrics.exists() and run_paths.metrics.stat().st_size > 0
    )


def baseline(module: Path, cache: Path) -> tuple[float, float]:
    """The same of the baseline's process."""
    sign = module.parent / "baseline.first"
    sign.unlink(missing_ok=True)
    return timed([__file__, f"--baseline={module}"], environment(cache), sign.exists)


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PLATFORMS": "cpu"}


def timed(
    words: Sequence[str], env: Mapping[str, str], reached: Callable[[], object]
) -> tuple[float, float]:
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, *words], env=env, stdout=subprocess.DEVNULL)
    try:
        while not reached():
            if process.poll() is not None:
                raise SystemExit(f"{words} ended with {process.returncode} before its first update")
            if time.perf_counter() - began > LIMIT_SECONDS:
                raise SystemExit(f"{words} takes more than {LIMIT_SECONDS:g} s")
            time.sleep(0.01)
        cpu = psutil.Process(process.pid).cpu_times()
        return time.perf_counter() - began, cpu.user + cpu.system
    finally:
        process.kill()
        process.wait()


def be_the_baseline(module: Path) -> None:
    """Train as `baseline_ppo.py` does, and leave a sign of the first update."""
    import jax
    from baseline_envs import TaskEnv
    from baseline_ppo import Baseline

    from flowrl.envs.skill_module import load_module

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    config = parse(TrainConfig, [f"--module_path={module}", *trainer_flags()]).ppo
    Baseline(TaskEnv(load_module(module), config), config, updates=1)()
    (module.parent / "baseline.first").touch()
    signal.pause()  # so that its CPU time can be asked


def module_of(folder: Path, skill: str) -> Path:
    """The generated module of the run of a library skill that needs no other."""
    config = PPOConfig()
    graph_paths = GraphPaths(folder)
    prepare_training_run(
        graph_paths=graph_paths,
        graph=SkillGraph(load_library(config.env_name, None).values()),
        skill=skill,
        expert=0,
        attempt=1,
        completed={},
        config=config,
    )
    return next(graph_paths.training_runs.glob("*/0.py"))


def trainer_flags() -> list[str]:
    return ["--total_timesteps=1e6", "--log_seconds=0"]


def graph_rows() -> list[Row]:
    """The share of start-up in a graph, with an empty and with a full cache."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder, "cache")
        shares = {name: graph_share(Path(folder, name), cache) for name in ("cold", "warm")}
    return [
        Row(case=f"graph of {GRAPH_SKILLS}, {name}", ours=found, unit=unit)
        for name, (share, wall) in shares.items()
        for found, unit in ((100 * share, "% start-up"), (wall, "s in all"))
    ]


def graph_share(graph: Path, cache: Path) -> tuple[float, float]:
    env = environment(cache)
    flags = f"--graph-path={graph} --max_nodes={GRAPH_SKILLS} --max_parallel_skills={PLACES}"
    small = "--total_timesteps=1e6 --success_state_rate=0.9 --launcher=local --sandbox=none"
    words = [sys.executable, "-m", "flowrl.bottomup_parallel", *flags.split(), *small.split()]
    began = time.time()
    subprocess.run([*words, "--log_seconds=0"], env=env, check=True, stdout=subprocess.DEVNULL)
    wall = time.time() - began
    started, lasted, first_start = 0.0, 0.0, math.inf
    ends = ends_of(graph)
    for folder in sorted((graph / "skills").iterdir()):
        run_paths = RunPaths(folder, int(folder.name.partition("_")[0]))
        lines = [json.loads(line) for line in run_paths.metrics.read_text().splitlines()]
        update = lines[1]["seconds"] - lines[0]["seconds"] if len(lines) > 1 else 0.0
        started += lines[0]["seconds"] - update
        result = runs.read_result(run_paths)
        lasted += result.wall_seconds
        first_start = min(first_start, ends[result.run_id] - result.wall_seconds)
    ahead = PLACES * (first_start - began)
    return (ahead + started) / (ahead + lasted), wall


def ends_of(graph: Path) -> dict[str, float]:
    """When each run's end was heard of, in seconds since 1970."""
    moves = map(json.loads, GraphPaths(graph).events.read_text().splitlines())
    return {
        move["run_id"]: datetime.fromisoformat(move["at"]).timestamp()
        for move in moves
        if move["status"] == "completed"
    }


if __name__ == "__main__":
    main()
