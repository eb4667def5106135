"""Commands of flowrl in a row: `python -m flowrl.orchestrator GRAPH --stages train,evaluate`.

Each stage is an ordinary command in a process of its own. `stages.json` says which have ended well;
the same command line goes on with the first that has not, and that command with what it has done.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flowrl import arguments, cli, console, notices
from flowrl.arguments import GraphCommand
from flowrl.config import parse
from flowrl.errors import EXIT_INTERRUPTED, ConfigError, closest
from flowrl.paths import GraphPaths
from flowrl.storage import records
from flowrl.storage.locks import held

PROGRAM = "python -m flowrl.orchestrator"
FLOWRL = (sys.executable, "-m", "flowrl")
_NAMES = ("judge", "sweep", "train", "evaluate")
_NOTICE = "stages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One command, its own words, and how it ended; None until it has."""

    name: str
    words: tuple[str, ...]
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesRecord:
    """`stages.json`."""

    stages: tuple[Stage, ...]


@dataclass(frozen=True, kw_only=True)
class OrchestratorCommand(GraphCommand):
    """Run commands of flowrl one after another; go on after a stop where they stood.

    Examples:
      python -m flowrl.orchestrator exp/demo --stages train,evaluate \
        --train "--max_nodes 3" --evaluate "'Place Table' --at_least 0.8"
      python -m flowrl.orchestrator exp/demo --stages judge,sweep,train \
        --sweep "--skill 'Collect Drink' --trials 20 --vary lr=log:1e-4:1e-2"
    """

    stages: str
    """Which of judge, sweep, train and evaluate, in this order, separated by commas."""
    judge: str = ""
    """Arguments of flowrl judge, besides GRAPH, in quotes."""
    sweep: str = ""
    """Arguments of flowrl sweep."""
    train: str = ""
    """Arguments of flowrl train."""
    evaluate: str = ""
    """Arguments of flowrl evaluate."""

    def __call__(self) -> int:
        """Run what is left; returns the exit code of the first stage that does not end well.

        Raises:
          ConfigError: a stage is unknown, or its arguments are wrong; nothing is written.
          BusyError: the stages of this graph are being run already.
        """
        wanted = tuple(self._stage(name.strip()) for name in self.stages.split(","))
        layout = GraphPaths(self.graph_path)
        with held(layout.stages_lock, timeout_seconds=0.0):
            stages = list(_with_exit_codes(layout.stages, wanted))
            for number, stage in enumerate(stages):
                if stage.exit_code == 0:
                    continue
                notices.publish(layout, _NOTICE, _in_words(stages, number, "under way"))
                code = self._run(stage)
                stages[number] = replace(stage, exit_code=code)
                records.write(layout.stages, StagesRecord(stages=tuple(stages)))
                said = "done" if code == 0 else f"ended with exit code {code}; start again to go on"
                notices.publish(layout, _NOTICE, _in_words(stages, number, said))
                if code:
                    return code
        return 0

    def _stage(self, name: str) -> Stage:
        """The stage of this name, once the command accepts its words."""
        if name not in _NAMES:
            near = closest(name, _NAMES)
            raise ConfigError(f"--stages: no stage {name!r}{near}; there are {', '.join(_NAMES)}")
        try:
            words = tuple(shlex.split(getattr(self, name)))
        except ValueError as error:
            raise ConfigError(f"--{name} {getattr(self, name)}: {error}; mend it") from error
        given = [str(self.graph_path), *words]
        if name in cli.PROGRAMS:
            parse(cli.PROGRAMS[name][0], given, prog=f"flowrl {name}")
        else:
            cli.command_of(name, given)
        return Stage(name=name, words=words)

    def _run(self, stage: Stage) -> int:
        """Run a stage's command; what ends this process by Ctrl-C or SIGTERM ends it, too."""
        argv = (*FLOWRL, stage.name, str(self.graph_path), *stage.words)
        with subprocess.Popen(argv) as child:
            try:
                code = child.wait()
            except KeyboardInterrupt:
                child.terminate()
                child.wait()
                raise
        return code if code >= 0 else EXIT_INTERRUPTED


def _with_exit_codes(path: Path, wanted: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """The stages with how they ended before, if they are the same and not all have ended well."""
    if not path.exists():
        return wanted
    found = records.read(path, StagesRecord, remedy="remove it; all stages run again").stages
    same = [(s.name, s.words) for s in found] == [(s.name, s.words) for s in wanted]
    return found if same and any(s.exit_code != 0 for s in found) else wanted


def _in_words(stages: Sequence[Stage], number: int, said: str) -> str:
    names = ", ".join(stage.name for stage in stages)
    return f"stage {number + 1} of {len(stages)}, {stages[number].name}, is {said} ({names})"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    console.start_logging()

    def run() -> int:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        return arguments.read(OrchestratorCommand, words, prog=PROGRAM, layers={})[0]()

    return 0 if console.print_version(words) else console.guarded(run)


if __name__ == "__main__":
    sys.exit(main())
