"""How good the choice among rewards is, and how much repair helps: `python scripts/bench_write.py`.

- repair: the answers of `tests/llm/test_repair.py`, which are good, or have one mistake that models
  make and are followed by a correct one. Ours is the share that is accepted with repairs, the
  baseline without.
- choice: a skill of the tests' tiny game (three pies within 40 timesteps, from an empty basket)
  with four rewards: good, poor (the library's reward for a pie, copied: it was written for a player
  who has the berries, and pays for leaving the bush), silent, misleading (it pays for standing at
  the oven). Each draw has a seed and an order of its own; each reward is the first one equally
  often. All four are trained and measured as `flowrl write` does. Frames are those of a candidate's
  training until 80 % of its episodes succeed, or all that it had. The ratio is those of the first
  candidate over those of the chosen one, the median over draws.

Real trainers are started: a draw takes a minute or more. `--small` makes twelve draws, else there
are 32.

`--tick` measures something else, alone: a beat of the scheduler's loop with 1,000 skills while a
child of `--write_skills 1` waits for an endpoint that accepts and never answers. The baseline is
the same scheduler without it. Both are measured in turns; a ratio of 0.91 is a beat of 1.1 times.
`chrt -f 1` before the command keeps other programs of the machine from interrupting a beat.

`--skeleton` measures `flowrl improve` alone: the first text of Classic's *Defeat Skeleton*, the
library's of today and three more compete in a graph, 300,000 frames each. `--folder` names the
folder of the graph, which is trained up to what the texts need.
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarking import Row, arguments, report
from scheduling_runs import SleepingBackend

sys.path.insert(0, str(Path(__file__).parents[1]))

from flowrl.config import BottomUpConfig, with_flags
from flowrl.console import start_logging
from flowrl.games.base import find_game, known_games
from flowrl.launchers.local import LocalLauncher
from flowrl.llm.flow import Flow
from flowrl.measures.objectives import read_curve
from flowrl.parallel.events import Verb
from flowrl.parallel.requests import send_request
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.parallel.skill_sources import record_graph
from flowrl.parallel.status import Entry
from flowrl.parallel.writing import Writing
from flowrl.paths import GraphPaths
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import load_library, parse_skill
from flowrl.tuning.contest import Contest
from tests.games.test_a_game_of_ones_own import installed
from tests.llm.making import Written, contract, rewards
from tests.llm.test_repair import CONTRACTS, GOOD, REWARDS

CLASSIC = "Craftax-Classic-Symbolic-v1"
GOAL, FRAMES = 0.8, 60_000
SKILL = '''"""Bake three pies, from an empty basket."""

name = "Bake Three Pies"
gain = {"baked": 1}
max_steps = 40


def task_is_done(inventory):
    return inventory.pie >= 3


'''
REWARDS_OF_PIES = {
    "good": """def task_reward(inventory, inventory_diff, cell_diff):
    lacks = inventory.berry + inventory.pie < 3
    picked = (inventory_diff.berry > 0) & (inventory.berry + inventory.pie <= 3)
    return picked + inventory_diff.pie + 0.1 * jnp.where(lacks, cell_diff, -cell_diff)
""",
    "poor": """def task_reward(inventory_diff, cell, cell_diff):
    return inventory_diff.pie - 0.1 * cell_diff - 0.01 * (cell == Cell.BUSH.value)
""",
    "silent": """def task_reward():
    return 0.0
""",
    "misleading": """def task_reward(cell):
    return 0.1 * (cell == Cell.OVEN.value)
""",
}
FLAGS = {
    "env_name": "Tiny-v1",
    "launcher": "local",
    "use_wandb": False,
    "num_envs": 32,
    "num_steps": 32,
    "max_task_steps": 40,
    "layer_size": 16,
    "lr": 2e-3,
    "success_state_rate": 0.95,
}

SKELETON_FRAMES = 300_000
FIRST_SKELETON = '''"""Find a skeleton in the caves and defeat it."""

name = "Defeat Skeleton"
requirements = {}
consumption = {}
gain = {"defeated_skeleton": "1"}


def task_is_done(achievements):
    return achievements[Achievement.DEFEAT_SKELETON.value] > 0


def task_reward(achievements_diff, nearest_mobs, nearest_mobs_prev):
    now = jnp.sum(jnp.abs(nearest_mobs[2]))
    before = jnp.sum(jnp.abs(nearest_mobs_prev[2]))
    closer = jnp.minimum(before, 8) - jnp.minimum(now, 8)
    reached = achievements_diff[Achievement.DEFEAT_SKELETON.value]
    # The mob that is gone because of it was not lost sight of.
    return jnp.where(reached > 0, 1.0, 0.1 * closer)
'''
OTHER_REWARDS = {
    "near.py": "0.5 * closer",
    "strike.py": "0.1 * closer + 0.1 * damage_dealt",
    "alone.py": "0.0",
}


def repair() -> Row:
    """The share of answers that are accepted with repairs, and without."""
    told = list(GOOD.values())
    told += [(bad, contract(), rewards()) for bad in CONTRACTS.values()]
    told += [(contract(), bad, rewards()) for bad in REWARDS.values()]
    with tempfile.TemporaryDirectory() as folder:
        write = Written(Path(folder))
        at_once = sum(write(answers, n) is not None for n, answers in enumerate(told))
        after = sum(
            write(answers, 1000 + n, repairs=3) is not None for n, answers in enumerate(told)
        )
    return Row(
        case=f"accepted of {len(told)}", ours=after, baseline=at_once, unit="answers",
        ratio=after / at_once,
    )  # fmt: skip


def frames_to_goal(contest: Contest, trial: int) -> int:
    """The frames until a candidate's episodes succeed often enough, or all that it had."""
    curve = read_curve(contest.paths.trial(trial, 0).metrics)
    return next((point.frames for point in curve if point.success >= GOAL), FRAMES)


def draw(folder: Path, number: int) -> tuple[str, dict[str, int], list[str]]:
    """The chosen reward, the frames of each, and their order."""
    kinds = [*REWARDS_OF_PIES]
    first = kinds.pop(number % len(kinds))
    order = [first, *random.Random(number).sample(kinds, len(kinds))]
    graph_paths = GraphPaths(folder / str(number))
    graph_paths.checkpoints.mkdir(parents=True)
    config = with_flags(BottomUpConfig(), **FLAGS, graph_path=graph_paths.root, seed=number)
    record_graph(graph_paths, config.ppo)
    graph = SkillGraph(load_library("Tiny-v1").values(), capacity=9)
    texts = {name: SKILL + REWARDS_OF_PIES[name] for name in order}
    skills = {name: parse_skill(t, place=name, env_name="Tiny-v1") for name, t in texts.items()}
    alone = graph.plus([skills[first]])
    contest = Contest(
        graph_paths=graph_paths,
        config=config,
        skill="Bake Three Pies",
        graphs={name: alone.replacing(skill) for name, skill in skills.items()},
        frames=FRAMES,
        most=2,
    )
    outcome = contest.run()
    frames = {
        each.label: frames_to_goal(contest, each.trial)
        for each in outcome.standings
        if each.trial is not None
    }
    sys.stderr.write("\n".join([f"draw {number}: {order}, {frames}", *outcome.lines, ""]))
    return outcome.standings[0].label, frames, order


def choice(draws: range) -> list[Row]:
    """Frames to the goal of the first candidate over those of the chosen one."""
    with tempfile.TemporaryDirectory() as folder:
        ended = [draw(Path(folder), number) for number in draws]
    ours = [frames[chosen] for chosen, frames, _ in ended]
    first = [frames[order[0]] for _, frames, order in ended]
    ratios = [b / a for a, b in zip(ours, first, strict=True)]
    kinds = ", ".join(
        f"{name} {sum(chosen == name for chosen, *_ in ended)}" for name in REWARDS_OF_PIES
    )
    medians = {
        name: statistics.median(frames[name] for _, frames, _ in ended) for name in REWARDS_OF_PIES
    }
    rows = [
        Row(case=f"frames to 80 % with the {name} reward", ours=median, unit="frames")
        for name, median in medians.items()
    ]
    main = Row(
        case=f"frames to 80 %, chosen and first of 4 ({kinds} chosen)",
        ours=statistics.median(ours),
        baseline=statistics.median(first),
        unit="frames",
        ratio=statistics.median(ratios),
    )
    return [main, *rows]


def beats(scheduler: SkillScheduler, writing: Writing, number: int) -> list[tuple[float, float]]:
    """The milliseconds, and those of a processor, of each of so many beats of the loop."""
    flow, found = Flow(SkillGraph([]), known=()), []
    for _ in range(number):
        began = time.perf_counter(), time.thread_time()
        scheduler.tick()
        writing.may_come(begin=flow.next_skill() is None)
        found.append(
            (1e3 * (time.perf_counter() - began[0]), 1e3 * (time.thread_time() - began[1]))
        )
    return found


def tick(*, rounds: int, number: int = 300) -> list[Row]:
    """Beats while a child waits for an endpoint that never answers, and without one."""
    os.environ["OPENAI_API_KEY"] = "none"
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        graph_paths = GraphPaths(Path(folder) / "graph")
        graph_paths.root.mkdir()
        config = with_flags(BottomUpConfig(), **FLAGS, graph_path=graph_paths.root)
        record_graph(graph_paths, config.ppo)
        flags = f"--base_url http://127.0.0.1:{server.getsockname()[1]}/v1 --model m"
        with SkillScheduler(graph_paths, launcher=LocalLauncher(), max_parallel_skills=1) as daemon:
            daemon.set_callbacks(backend=SleepingBackend(Path(folder)))
            daemon.add_skills([Entry(skill=f"Task {number}") for number in range(1_000)])
            daemon.tick()
            for turn in range(2 * rounds):
                asks = turn % 4 in (1, 2)  # the order changes from round to round
                with ExitStack() as opened:
                    writing = opened.enter_context(Writing(int(asks), flags, graph_paths))
                    if asks:
                        writing.may_come(begin=True)
                        opened.enter_context(server.accept()[0]).recv(1)
                    found[asks] += beats(daemon, writing, number)
                    if asks and not writing.may_come(begin=False):
                        raise SystemExit("the child has ended; see the notice of the graph")
            send_request(graph_paths, Verb.STOP_NOW)
            daemon.run()

    def row(what: str, which: int, percent: int) -> Row:
        each = {asks: [beat[which] for beat in side] for asks, side in found.items()}
        ours, theirs = (statistics.quantiles(each[asks], n=100)[percent - 1] for asks in each)
        ratio = theirs / ours
        return Row(case=f"{what} of a beat", ours=ours, baseline=theirs, unit="ms", ratio=ratio)

    return [row("p99", 0, 99), row("median", 0, 50), row("p99 of the processor time", 1, 99)]


def skeleton(folder: Path) -> list[Row]:
    """The success of the text that `flowrl improve` chooses, and of the first one."""
    graph, first, proposals = (folder / name for name in ("graph", "first", "proposals"))
    for place in (first, proposals):
        place.mkdir(parents=True, exist_ok=True)
    (first / "skeleton.py").write_text(FIRST_SKELETON)
    library = find_game(CLASSIC).library_folder / "26_defeat_skeleton.py"
    (proposals / "library.py").write_text(library.read_text())
    for name, reward in OTHER_REWARDS.items():
        text = FIRST_SKELETON.replace("0.1 * closer", reward)
        if "damage_dealt" in reward:
            text = text.replace("mobs_prev)", "mobs_prev, damage_dealt)")
        (proposals / name).write_text(text)

    def flowrl(*words: str | Path) -> str:
        argv = [sys.executable, "-m", "flowrl", *map(str, words)]
        return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout

    own = ["--no_use_wandb", "--success_state_rate=0.9"]
    needs = ["--env_name", CLASSIC, "--target_skill=Make Stone Sword"]
    flowrl("train", graph, *own, *needs)
    text = [f"--skills_dir={first}", "--target_skill=Defeat Skeleton"]
    flowrl("train", graph, *own, *text, "--total_timesteps=2e4", "--min_success_rate=0")
    asked = ["--proposals", proposals, f"--candidate_timesteps={SKELETON_FRAMES}", "--json"]
    told = flowrl("improve", graph, "Defeat Skeleton", *asked)
    sys.stderr.write(told)
    rates = {row["candidate"]: row["success_rate"] for row in json.loads(told)["candidates"]}
    before = rates["present text"]
    return [
        Row(
            case=f"success of {name}, and of the first text",
            ours=rate,
            baseline=before,
            unit="share",
            ratio=rate / before if before else None,
        )
        for name, rate in rates.items()
        if name != "present text"
    ]


def main() -> None:
    """Print the table; with --json also as a file. A child does it that finds the tiny game."""
    parser = arguments(__doc__)
    parser.add_argument("--tick", action="store_true", help="a beat while an endpoint hangs")
    parser.add_argument("--draw", type=int, default=0, help="number of the first draw")
    parser.add_argument("--skeleton", action="store_true", help="texts of Defeat Skeleton")
    parser.add_argument("--folder", type=Path, default=Path("exp/skeleton"), help="for --skeleton")
    asked = parser.parse_args()
    if "Tiny-v1" not in [game.name for game in known_games()]:
        with tempfile.TemporaryDirectory() as folder:
            env = {**os.environ, "PYTHONPATH": installed(Path(folder))}
            sys.exit(subprocess.run([sys.executable, *sys.argv], env=env, check=False).returncode)
    if asked.tick:
        report("bench_write --tick", tick(rounds=6 if asked.small else 20), asked.json)
        return
    if asked.skeleton:
        report("bench_write --skeleton", skeleton(asked.folder), asked.json)
        return
    start_logging()
    report(
        "bench_write",
        [repair(), *choice(range(asked.draw, asked.draw + (12 if asked.small else 32)))],
        asked.json,
    )


if __name__ == "__main__":
    main()
