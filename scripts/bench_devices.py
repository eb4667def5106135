"""One run on several devices: `python scripts/bench_devices.py [--small] [--json FILE]`.

Each side of a pair is a process, or two, that trains as `bench_ppo.py` does, and the two sides take
turns. Host devices stand in for devices, so on a machine with two cores the figures say what the
placement costs, not what devices gain. Baselines:

* `devices=1 threads=2`: one acting thread with the same two shards.
* `devices=2`, `devices=4 of 2 cores`, `256x64`, `64x64 E=16`: one device whose two acting threads
  step the same shards; the last two train on two devices.
* `processes=2`: two devices of one process. `period=4`: two devices, `--grad_sync_period 1`.
* `sync share of an update`: what learning on two devices takes longer than without its collectives,
  as a share of the whole update; `learning with collectives` is that pair, in turns.
* `start warm`: seconds from the start of a trainer on two devices to its first update, against one.
* `GPUs=D` (--gpus): D × 1024 environments, against D times the speed of one GPU.

With --against TREE, another checkout of flowrl: both sides train on one device, the baseline by
the code of that checkout.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmarking import Pair, Row, arguments, paired, report, seconds_of

UPDATES = 8  # per round
ENVS_PER_GPU = 1024
DONE = "done\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """How one side trains."""

    num_envs: int = 64
    experts: int = 1
    processes: int = 1
    gpu: bool = False
    tree: str | None = None  # a checkout of flowrl, if not this one
    flags: Mapping[str, int]

    @property
    def environment(self) -> dict[str, str]:
        if self.gpu:  # both sides stay on it
            return {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4"}
        each = self.flags.get("num_devices", 1) // self.processes
        flag = f"--xla_force_host_platform_device_count={each}"
        return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag}


def on_devices(number: int, **more: Any) -> Side:
    return Side(flags={"num_devices": number}, **more)


def on_threads(number: int, *, shards: int = 2, **more: Any) -> Side:
    return Side(flags={"acting_threads": number, "env_shards": shards}, **more)


CASES = {
    "devices=1 threads=2": (on_threads(2), on_threads(1)),
    "devices=2": (on_devices(2), on_threads(2)),
    "devices=4 of 2 cores": (on_devices(4), on_threads(2, shards=4)),
    "processes=2": (on_devices(2, processes=2), on_devices(2)),
    "period=4": (Side(flags={"num_devices": 2, "grad_sync_period": 4}), on_devices(2)),
    "256x64": (on_devices(2, num_envs=256), on_threads(2, num_envs=256)),
    "64x64 E=16": (on_devices(2, experts=16), on_threads(2, experts=16)),
}
SIZES = {"64x64": {}, "256x64": {"num_envs": 256}, "64x64 E=16": {"experts": 16}}


class Trainers:
    """The processes of a side; they do what is asked for when it is asked for."""

    def __init__(self, side: Side) -> None:
        words = [sys.executable, __file__, "--side", json.dumps(asdict(side)), "--port"]
        words += [str(free_port()), "--process"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self._processes = [
            subprocess.Popen([*words, str(number)], env=side.environment, **pipes)
            for number in range(side.processes)
        ]

    def __call__(self, what: str = "train") -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{what}\n")
        for process in self._processes:
            assert process.stdout is not None
            if DONE not in process.stdout:  # gloo writes lines of its own there
                raise SystemExit("a side's process ended before it had done its part")

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@contextmanager
def trainers(*sides: Side) -> Iterator[list[Trainers]]:
    """The processes of some sides, until the end of the block."""
    running: list[Trainers] = []
    try:
        for side in sides:
            running.append(Trainers(side))
            running[-1]()  # alone, so that all of its programs are compiled
        yield running
    finally:
        for each in running:
            each.end()


def measured(case: str, ours: Side, baseline: Side, *, rounds: int) -> Row:
    """The pair of a case; where ours has more environments, the baseline counts as often."""
    with trainers(ours, baseline) as (one, other):
        pair = paired(one, other, rounds=rounds)
    return pair.rate_row(case, work=UPDATES * ours.num_envs * 64, unit="steps/s")


def sync_rows(*, rounds: int) -> list[Row]:
    """Learning on two devices, with its collectives and without them."""
    with trainers(on_devices(2)) as (run,):
        whole = statistics.median(seconds_of(run) for _ in range(rounds)) / UPDATES
        pair = paired(lambda: run("together"), lambda: run("apart"), rounds=rounds)
    together, apart = map(statistics.median, (pair.ours, pair.baseline))
    share = 100 * (together - apart) / UPDATES / whole
    pair = Pair(*(tuple(each / UPDATES for each in side) for side in (pair.ours, pair.baseline)))
    return [
        Row(case="sync share of an update", ours=share, unit="%"),
        pair.row("learning with collectives"),
    ]


def start_row(*, rounds: int) -> Row:
    """From the start of a trainer's process to its first update, its programs being kept."""
    from bench_startup import FIRST, compile_cache, module_of
    from bench_startup import ours as started

    cache, two = compile_cache(None, os.environ), on_devices(2)
    with tempfile.TemporaryDirectory() as folder:
        module = module_of(Path(folder), FIRST)
        found = [
            (
                started(module, cache, "--num_devices=2", XLA_FLAGS=two.environment["XLA_FLAGS"]),
                started(module, cache),
            )
            for _ in range(rounds + 1)
        ]
    pair = Pair(*(tuple(wall for wall, _ in side[1:]) for side in zip(*found, strict=True)))
    ours, baseline = map(statistics.median, (pair.ours, pair.baseline))
    return Row(case="start warm", ours=ours, baseline=baseline, unit="s", ratio=pair.speedup)


def be_a_side(side: Side, *, port: int, process: int) -> None:
    """Train whenever a line says so, and say when it is done."""
    if side.tree:
        sys.path[:0] = [side.tree, str(Path(side.tree, "scripts"))]
    import bench_ppo

    case = bench_ppo.Case(name="", num_envs=side.num_envs, width=64, experts=side.experts)
    config = replace(case.config, **side.flags)
    bench_ppo.UPDATES = UPDATES // side.flags.get("grad_sync_period", 1)  # of one report each
    with connected(side, config, port, process):
        run = bench_ppo.opened(case.plan, config)
        ours = bench_ppo.Ours(run)
        acts: dict[str, Callable[[], object]] = {"train": ours}
        for line in sys.stdin:
            if line.strip() not in acts:
                acts |= learning(run, ours.update.learner)
            acts[line.strip()]()
            sys.stdout.write(DONE)
            sys.stdout.flush()


def connected(side: Side, config: Any, port: int, process: int) -> Any:
    """The other processes of the side, if there are any."""
    if side.processes == 1:
        return nullcontext()
    from flowrl.ppo import processes
    from flowrl.runs import TrainConfig

    facts = {"num_processes": side.processes, "process_id": process, "peer_timeout": 60}
    place = {"module_path": Path("bench.py"), "coordinator": f"127.0.0.1:{port}"}
    return processes.connected(TrainConfig(ppo=config, **facts, **place), lambda: None)


def learning(run: Any, learner: Any) -> dict[str, Callable[[], object]]:
    """Learning from a rollout as on all devices, and as if each were alone; gives `learner` up."""
    from concurrent.futures import ThreadPoolExecutor
    from functools import partial

    import jax
    import jax.numpy as jnp

    from flowrl.ppo import optimizer
    from flowrl.ppo.loop import update
    from flowrl.ppo.loss import Hyperparameters
    from flowrl.ppo.programs import _learn
    from flowrl.ppo.sharding import COPIED, ONE_DEVICE, SPLIT

    given: list[Any] = []

    def keeping(*args: Any) -> Any:
        given.extend(jax.tree.map(jnp.copy, args))
        return run.programs.learn(*args)

    programs, placement = run.programs._replace(learn=keeping), run.programs.placement
    with ThreadPoolExecutor(len(placement.local_shards)) as threads:
        update(
            run.env,
            programs,
            learner,
            Hyperparameters.of(run.config, np.full(run.env.num_experts, run.config.lr)),
            threads=threads,
        )
    state, *others = given
    like = jax.eval_shape(optimizer.init, state.params)
    moments = jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(state.opt_state))
    given = [state._replace(opt_state=moments), *others]

    def program(axis: Any) -> Callable[[], None]:
        learn = partial(_learn, config=run.config, axis=axis)
        compiled = jax.jit(placement.spread(learn, (COPIED, SPLIT, COPIED, SPLIT)))

        def repeated() -> None:
            for _ in range(UPDATES):
                jax.block_until_ready(compiled(*given))

        return repeated

    return {"together": program(placement.axis), "apart": program(ONE_DEVICE)}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--case", nargs="*", help="of the cases only these")
    parser.add_argument("--gpus", nargs="*", type=int, default=[], metavar="D", help="2 4 8")
    parser.add_argument("--against", metavar="TREE", help="another checkout of flowrl")
    parser.add_argument("--side", help="be a process of a side")
    parser.add_argument("--port", type=int)
    parser.add_argument("--process", type=int)
    args = parser.parse_args()
    if args.side:
        be_a_side(Side(**json.loads(args.side)), port=args.port, process=args.process)
        return
    rounds = 2 if args.small else 6
    if args.against:
        tree = str(Path(args.against).resolve())
        cases = {
            name: (Side(flags={}, **size), Side(flags={}, tree=tree, **size))
            for name, size in SIZES.items()
        }
    else:
        cases = CASES | {f"GPUs={number}": gpu_pair(number) for number in args.gpus}
    wanted = args.case or (["64x64", "devices=2"] if args.small else cases)
    rows = [measured(name, *pair, rounds=rounds) for name, pair in cases.items() if name in wanted]
    if not (args.against or args.case):
        rows += [*sync_rows(rounds=rounds), start_row(rounds=rounds)]
    report("devices-against" if args.against else "devices", rows, args.json)


def gpu_pair(number: int) -> tuple[Side, Side]:
    """That many GPUs against one, each with as many environments."""
    many = on_devices(number, num_envs=number * ENVS_PER_GPU, gpu=True)
    return many, on_devices(1, num_envs=ENVS_PER_GPU, gpu=True)


if __name__ == "__main__":
    main()
