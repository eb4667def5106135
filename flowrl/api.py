"""The Python functions of `import flowrl`: each does what the command of its name does.

They take paths with `~` and `..`, raise FlowrlError, end no interpreter and load no JAX into this
process but for the type of `evaluate`'s report. So they work in a notebook, too.
"""

from __future__ import annotations

import json
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl import config as configs
from flowrl.commands.evaluate import EvaluateCommand
from flowrl.config import BottomUpConfig, Sandbox
from flowrl.errors import ConfigError, FlowrlError
from flowrl.parallel.training import train_graph
from flowrl.paths import graph_paths, plain
from flowrl.reports.status import SkillRow, read_rows, training_screen
from flowrl.storage import records

if TYPE_CHECKING:
    from flowrl.evaluation import EvaluationReport


def train(
    graph: str | Path, *, target_skill: str | None = None, show: bool = True, **flags: Any
) -> list[SkillRow]:
    """Train a graph until every skill has ended, as `flowrl train`; returns its `status`.

    Ctrl-C, or a notebook's stop, raises KeyboardInterrupt and leaves the runs going; the
    same call goes on. The runs are processes of their own.

    Args:
      graph: its folder; made when missing, continued when there.
      target_skill: train what this skill needs (default: the whole library).
      show: print the table of skills.
      flags: as on the command line: `total_timesteps=5_000_000`, `max_parallel_skills=2`.

    Raises:
      ConfigError: a flag is unknown, or its value cannot be used.
      FlowrlError: as the command says; BusyError while another scheduler trains the graph.
    """
    given = {"graph_path": _path(graph), "target_skill": target_skill, **flags}
    if unknown := given.keys() - configs.flags(BottomUpConfig()).keys():
        raise ConfigError(f"flowrl.train has no flag {min(unknown)!r}; see flowrl train --help")
    paths = {name: _path(value) for name, value in given.items() if isinstance(value, Path)}
    config = configs.checked(configs.with_flags(BottomUpConfig(), **given | paths))
    train_graph(config, screen=training_screen if show else lambda _: nullcontext())
    return status(graph)


def status(graph: str | Path) -> list[SkillRow]:
    """Return every skill of a graph, as `flowrl status --json`.

    >>> [row.skill for row in status("exp/demo") if row.status == "failed"]  # doctest: +SKIP

    Raises:
      FileRefusedError: the folder is no graph.
    """
    return read_rows(graph_paths(_path(graph)))


def evaluate(
    graph: str | Path,
    skill: str,
    *,
    episodes: int = 256,
    seed: int = EvaluateCommand.seed,
    sandbox: Sandbox = "auto",
) -> EvaluationReport:
    """Play a skill's plan in fresh worlds, as `flowrl evaluate`, in a confined process.

    Raises:
      ExpertMissingError: no such skill is merged; says which are.
      FlowrlError: the episodes could not be played; the process has said why on standard error.
    """
    command = EvaluateCommand(
        graph_path=_path(graph),
        skill=skill,
        episodes=episodes,
        seed=seed,
        sandbox=sandbox,
        json=True,
    )
    played = command.played(stdout=subprocess.PIPE)
    if played.returncode:
        raise FlowrlError(f"{skill!r} could not be played (exit code {played.returncode})")
    from flowrl.evaluation import EvaluationReport  # loads JAX

    return records.from_json(EvaluationReport, json.loads(played.stdout))


def _path(given: str | Path) -> Path:
    return plain(Path(given).expanduser())
