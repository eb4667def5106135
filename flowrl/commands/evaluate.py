"""`flowrl evaluate`, its flags and output: a leaf, because the work loads jax.

Playing runs skill code, so a process of its own does it, confined like a trainer:
`python -m flowrl.commands.evaluate MODULE CLASS FIELDS`, with the fields of a dataclass in JSON.
`flowrl judge` and `flowrl sweep` play by the same `confined_run`.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from flowrl import config as configs
from flowrl import console
from flowrl.arguments import ReportCommand, SkillArgument
from flowrl.commands.repair import existing_graph
from flowrl.config import Positive, PPOConfig, Sandbox
from flowrl.experts.store import ExpertStore
from flowrl.launchers import sandbox
from flowrl.paths import GraphPaths
from flowrl.runs import TrainingRun, read_run
from flowrl.storage import records


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand(ReportCommand):
    """Play a skill's plan in fresh worlds, and count successes.

    Examples:
      flowrl evaluate exp/demo "Collect Wood" --episodes 256
      flowrl evaluate exp/demo "Place Table" --json
    """

    skill: SkillArgument
    """The skill's name, or its expert number."""
    episodes: Positive = 256
    """Episodes to play, each in a world of its own."""
    seed: int = 1_000_003
    """Seed of the worlds and actions."""
    at_least: float = 0.0
    """Exit with 1 when less than this share of the episodes completes the plan."""
    sandbox: Sandbox = "auto"
    """Confine the evaluation by bubblewrap, with the graph read-only; auto: if it is there."""

    def __call__(self) -> int:
        """Evaluate in a child process, which prints; returns its exit code.

        Raises:
          ExpertMissingError: no such skill is merged; says which are.
        """
        layout = existing_graph(self.graph_path.absolute())
        run = read_run(ExpertStore(layout).archive_of(self.skill))
        order = replace(self, graph_path=layout.root)
        code = confined_run(order, layout, run, how=self.sandbox).returncode
        return code if code >= 0 else 128 - code

    def work(self) -> int:
        """Evaluate and print in this process."""
        from flowrl.evaluate import evaluate

        paths = GraphPaths(self.graph_path)
        found = evaluate(paths, self.skill, episodes=self.episodes, seed=self.seed)
        lines = [
            f"{found.skill}: {found.episodes} episodes of the experts of generation "
            f"{found.generation}, {found.mean_episode_length:.0f} steps each"
        ]
        for one in found.steps:
            interval = f"95 % interval {one.low:.1%} to {one.high:.1%}"
            rate = f"{one.success_rate:.1%} succeed ({interval})"
            lines.append(f"{one.count} x {one.skill}, expert {one.expert}: {rate}")
        if found.clipped_rewards:
            lines.append(f"{found.clipped_rewards:,} rewards were clipped to ±10,000")
        console.print_report(asdict(found), lines, as_json=self.json)
        return 0 if found.success_rate >= self.at_least else 1


class ConfinedWork(Protocol):
    """A dataclass at the top of a module; its fields are JSON."""

    def work(self) -> int:
        """Do it in this process; returns the exit code."""
        ...


def confined_run(
    order: ConfinedWork,
    layout: GraphPaths,
    run: TrainingRun,
    *,
    how: Sandbox,
    stdout: int | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Let a confined process do what plays a run's plan; it sees the graph, read-only."""
    confined = sandbox.confinement(how, layout.root)
    env = sandbox.confined_env(sandbox.child_env())
    config = configs.from_json(PPOConfig, run.config)
    cache = sandbox.compile_cache(config.compile_cache, env).absolute()
    around = confined.around(None, cwd=Path.cwd(), env=env, cache=cache, reads_graph=True)
    kind, fields = type(order), json.dumps(records.to_json(order))
    words = (*around, sys.executable, "-m", __name__, kind.__module__, kind.__name__, fields)
    return subprocess.run(words, env=env, check=False, start_new_session=True, stdout=stdout)


def main(argv: Sequence[str]) -> int:
    """Do the work that `confined_run` orders; returns the exit code."""
    module, name, fields = argv
    order = records.from_json(getattr(importlib.import_module(module), name), json.loads(fields))
    console.start_logging()
    return console.guarded(order.work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
