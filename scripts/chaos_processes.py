"""Faults of real processes by the dozen: what each costs, and that nothing is lost or repeated.

PYTHONPATH=. python scripts/chaos_processes.py [--kills 36] [--rounds 5] [--only NAME] [--json FILE]

The scheduler is killed at random instants while eight skills train in real tmux sessions on a
private socket; every other fault gets `--rounds` trials of its own. Exit code 1 when anything
was relaunched, lost, merged twice or left over.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.chaos import keeping, trials
from tests.chaos.merging import six_mergers
from tests.chaos.place import ChaosPlace, Trial
from tests.ppo.chaos_pair import one_of_two

COUNTS = ("relaunched", "lost", "merged_twice", "left_over")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=36, help="of the scheduler")
    parser.add_argument("--rounds", type=int, default=5, help="of every other fault")
    parser.add_argument("--mergers", type=int, default=10, help="rounds of six mergers")
    parser.add_argument("--keeping", type=int, default=40, help="kills of trainers, of runners")
    parser.add_argument("--interruptions", type=int, default=20, help="rounds of Ctrl-C and start")
    parser.add_argument("--pairs", type=int, default=20, help="rounds of runs of two processes")
    parser.add_argument("--only", default="", help="faults whose function's name holds this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    chance = random.Random(args.seed)
    kept = {"runners_killed_after_results": {"skills": 8}} | {
        "interrupted_again_and_again": {"rounds": args.interruptions},
        "trainers_killed_at_random": {"kills": args.keeping},
    }
    times = {"runners_killed_after_results": args.keeping // 8}
    faults = {
        trials.scheduler_killed_at_random: killed(args.kills, chance),
        **{trial: rounds(trial, args.rounds, chance) for trial in trials.ALL[1:]},
        six_mergers: (six_mergers_once(chance) for _ in range(args.mergers)),
        **{
            trial: rounds(partial(trial, **kept[name]), times.get(name, 1), chance)
            for name, trial in vars(keeping).items()
            if name in kept
        },
        one_of_two_killed: pairs(one_of_two_killed, args.pairs, chance),
        one_of_two_stopped: pairs(one_of_two_stopped, args.pairs, chance),
    }
    rows = [row(trial, found) for trial, found in faults.items() if args.only in trial.__name__]
    if args.json:
        args.json.write_text(json.dumps({"format": 1, "faults": rows}, indent=2) + "\n")
    return 1 if any(found["errors"] or any(found[name] for name in COUNTS) for found in rows) else 0


def row(trial: Callable[..., list[Trial]], found: Iterator[list[Trial]]) -> dict:
    """One line of the table, printed as soon as its trials are over."""
    made: list[Trial] = []
    errors = 0
    while True:
        try:
            made += next(found)
        except StopIteration:
            break
        except AssertionError:
            traceback.print_exc()
            errors += 1
            break  # a generator that raised has no more trials
    # A daemon that finds nothing left to wait for ends at once: that is no time of a restart.
    timed = [one for one in made if one.cpu_millis] or made
    millis = [one.millis for one in timed] or [0.0]
    facts = {
        "fault": made[0].fault if made else trial.__name__,
        "trials": len(made),
        "median_ms": round(statistics.median(millis), 1),
        "max_ms": round(max(millis), 1),
        "cpu_ms": round(max((one.cpu_millis for one in made), default=0.0), 1),
        **{name: sum(getattr(one, name) for one in made) for name in COUNTS},
        "errors": errors,
    }
    print(" ".join(f"{name}={value!r}" for name, value in facts.items()), flush=True)
    return facts


def killed(kills: int, chance: random.Random) -> Iterator[list[Trial]]:
    """Graph after graph until the scheduler was killed often enough."""
    met = 0
    while met < kills:
        with Places() as place:
            found = trials.scheduler_killed_at_random(place, chance, kills=6)
        met += len(found)
        yield found


def rounds(trial: Callable[..., list[Trial]], count: int, chance: random.Random):
    """The same fault in one fresh place after another."""
    for _ in range(count):
        with Places() as place:
            found = trial(place, chance)
        yield found


def six_mergers_once(chance: random.Random) -> list[Trial]:
    with tempfile.TemporaryDirectory() as folder:
        return six_mergers(Path(folder), chance)


def one_of_two_killed(folder: Path, chance: random.Random) -> list[Trial]:
    return one_of_two(folder, chance, signal.SIGKILL)


def one_of_two_stopped(folder: Path, chance: random.Random) -> list[Trial]:
    return one_of_two(folder, chance, signal.SIGTERM)


def pairs(trial: Callable[..., list[Trial]], count: int, chance: random.Random):
    """The same fault of one of two processes, in fresh folders until it met so many runs."""
    met = 0
    while met < count:
        with tempfile.TemporaryDirectory() as folder:
            found = trial(Path(folder), chance)
        met += len(found)
        yield found


class Places:
    """A fresh place, whose processes and files are gone afterwards."""

    def __enter__(self) -> ChaosPlace:
        self._folder = tempfile.TemporaryDirectory(prefix="chaos")
        self._place = ChaosPlace(Path(self._folder.name))
        return self._place

    def __exit__(self, *_: object) -> None:
        self._place.end()
        self._folder.cleanup()


if __name__ == "__main__":
    sys.exit(main())
