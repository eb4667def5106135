"""The Python functions of `import flowrl`: each does what the command of its name does.

They take paths with `~` and `..`, raise FlowrlError, end no interpreter and load no JAX into this
process. So they work in a notebook, too.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flowrl import command_line, storage
from flowrl import config as configs
from flowrl.arguments import Count, Seed, arguments, closest_flag
from flowrl.calls import by_annotation, value_given
from flowrl.config import BottomUpConfig, Sandbox
from flowrl.errors import ConfigError
from flowrl.experts.store import ExpertStore
from flowrl.launchers.confined import confined_run
from flowrl.measures.causes import EvaluationReport
from flowrl.measures.episodes import decode_episodes, episodes_file
from flowrl.output import check_kept
from flowrl.parallel.training import train_graph
from flowrl.paths import GraphPaths, existing_graph, graph_or_sweep
from flowrl.reports.status import SkillRow, read_rows, training_screen
from flowrl.runs import read_run
from flowrl.storage import records
from flowrl.storage.records import Natural

EPISODES = 256
SEED = 1_000_003  # of worlds that no training has seen


@by_annotation("flowrl.train")
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
      flags: as on the command line: `total_timesteps="5M"`, `gpu_ids=[0, 1]`; None leaves one
        out. The environment's FLOWRL_… and `config`, a TOML file, count as for the command.

    Raises:
      ConfigError: a flag is unknown, or its value cannot be used.
      FlowrlError: as the command says; BusyError while another scheduler trains the graph.
    """
    known = configs.flags(BottomUpConfig()).keys() - {"graph_path"}
    for name in sorted(flags.keys() - known):
        near = closest_flag(name, known, dashes="")
        raise ConfigError(f"flowrl.train has no flag {name!r}{near}; see flowrl train --help")
    given = {"graph_path": graph, "target_skill": target_skill, **flags}
    words = [word for name, value in given.items() for word in _words(name, value)]
    config = command_line.parse(BottomUpConfig, words, prog="flowrl train")
    train_graph(config, screen=training_screen if show else lambda _: nullcontext())
    return status(graph)


@by_annotation("flowrl.status")
def status(graph: str | Path) -> list[SkillRow]:
    """Return every skill of a graph, as `flowrl status --json`.

    >>> [row.skill for row in status("exp/demo") if row.status == "failed"]  # doctest: +SKIP

    Raises:
      FileRefusedError: the folder is no graph.
    """
    return read_rows(graph_or_sweep(Path(graph)))


@by_annotation("flowrl.evaluate")
def evaluate(  # noqa: PLR0913 — the flags of its command
    graph: str | Path,
    skill: str | int,
    *,
    episodes: Count = EPISODES,
    seed: Seed = SEED,
    record: Natural = 0,
    record_failures: Natural = 0,
    sandbox: Sandbox = "auto",
) -> EvaluationReport:
    """Play a skill's plan in fresh worlds, as `flowrl evaluate`, in a confined process.

    Args:
      graph: its folder.
      skill: its name, or its expert number.
      episodes: how many to play, each in a world of its own.
      seed: of the worlds and actions.
      record: how many episodes episodes.npz beside the expert records.
      record_failures: how many more of those that fail.
      sandbox: confine the process by bubblewrap; auto: if it is there.

    Raises:
      ConfigError: more episodes are to be recorded than are played.
      ExpertMissingError: no such skill is merged; says which are.
      ConfinedError: the episodes could not be played; says why.
    """
    graph_paths = existing_graph(Path(graph).absolute())
    for flag, asked in {"record": record, "record_failures": record_failures}.items():
        if asked > episodes:
            what = f"--{flag} {asked:,} is more than the {episodes:,} episodes that are played"
            raise ConfigError(f"{what}; ask for fewer, or for more --episodes")
    run = read_run(ExpertStore(graph_paths).archive_of(str(skill)))
    kept = episodes_file(graph_paths, run)
    if record or record_failures:
        check_kept(kept)
    order = PlayOrder(
        graph_path=graph_paths.root,
        skill=str(skill),
        episodes=episodes,
        seed=seed,
        record=record,
        record_failures=record_failures,
    )
    printed = confined_run(order, graph_paths, run, how=sandbox, episodes=episodes)
    said, _, recorded = printed.partition(b"\n")
    if record or record_failures:
        decode_episodes(recorded, "what the evaluation recorded")
        existing_graph(graph_paths.root)  # it may have been removed meanwhile
        storage.write_atomic(kept, recorded)
    return records.from_json(EvaluationReport, json.loads(said))


@dataclass(frozen=True, kw_only=True)
class PlayOrder:
    """The order to let merged experts play a skill's plan in fresh worlds."""

    graph_path: Path
    skill: str
    episodes: int
    seed: int
    record: int
    record_failures: int

    def work(self) -> int:
        """Play in this process; print the report as JSON on a line, and after it episodes.npz."""
        from flowrl.evaluation import evaluate

        report, episodes = evaluate(
            GraphPaths(self.graph_path),
            self.skill,
            episodes=self.episodes,
            seed=self.seed,
            first=self.record,
            failed=self.record_failures,
        )
        recorded = b"" if episodes is None else episodes.encode()
        sys.stdout.buffer.write(json.dumps(asdict(report)).encode() + b"\n" + recorded)
        return 0


def _words(name: str, value: Any) -> list[str]:
    """Return the words of a command line that say a flag's value; None says nothing."""
    argument, place = arguments(BottomUpConfig)[name], f"flowrl.train: {name}"
    if value is None:
        return []
    if argument.type is bool:
        return [f"--{name}" if value_given(place, bool, value) else f"--no_{name}"]
    items = value if isinstance(value, list | tuple) else [value]
    if not items:
        raise ConfigError(f"{place} is empty; give a value, or None to leave it out")
    if any(isinstance(item, list | tuple | dict) for item in items):
        raise ConfigError(f"{place} is {value!r:.100}; give a value or a plain list of them")
    if len(items) > 1 and not argument.many:
        raise ConfigError(f"{place} takes one value, not {len(items)}")
    if argument.type is Path:
        items = [value_given(place, str | Path, item) for item in items]
    return [f"--{name}={item}" for item in items if item is not None]
