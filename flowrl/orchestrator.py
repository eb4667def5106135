"""Commands of flowrl in a row: `python -m flowrl.orchestrator GRAPH --stages train,evaluate`.

Each stage is an ordinary command in a process of its own. A stop needs no record: the same command
line runs the stages again, and a graph and a sweep go on where they stood.
"""

from __future__ import annotations

import logging
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from flowrl import arguments, cli, console, notices, storage
from flowrl.arguments import GraphCommand
from flowrl.command_line import graph_layer, parse
from flowrl.errors import EXIT_INTERRUPTED, ConfigError, closest
from flowrl.paths import GraphPaths, existing_graph
from flowrl.storage.locks import held

logger = logging.getLogger(__name__)
PROGRAM = "python -m flowrl.orchestrator"
FLOWRL = (sys.executable, "-m", "flowrl")
_NAMES = ("judge", "sweep", "train", "evaluate")


@dataclass(frozen=True, kw_only=True)
class OrchestratorCommand(GraphCommand):
    """Run commands of flowrl one after another; go on after a stop where they stood.

    Examples:
      python -m flowrl.orchestrator exp/demo --stages train,evaluate --evaluate="'Place Table'"
      python -m flowrl.orchestrator exp/demo --stages judge,train --judge="--judge rule"
    """

    stages: str
    """Stages, which run in this order: some of judge, sweep, train and evaluate, with commas."""
    judge: str = ""
    """Arguments of flowrl judge, besides GRAPH, as --judge="--episodes 64"."""
    sweep: str = ""
    """Arguments of flowrl sweep."""
    train: str = ""
    """Arguments of flowrl train."""
    evaluate: str = ""
    """Arguments of flowrl evaluate."""

    def __call__(self) -> int:
        """Run the stages; returns the exit code of the first that does not end well.

        Raises ConfigError for unknown stages or wrong arguments, BusyError if stages run already.
        """
        names = [name.strip() for name in self.stages.split(",")]
        stages = [(name, self._words(name)) for name in names]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"--stages {self.stages} has {name} twice; name it once")
        for name in [name for name in _NAMES if getattr(self, name) and name not in names]:
            raise ConfigError(f"--{name} is given, and {name} is none of --stages {self.stages}")
        needed = names[0] in ("judge", "evaluate")
        graph_paths = existing_graph(self.graph_path) if needed else GraphPaths(self.graph_path)
        new, own = not graph_paths.root.exists(), {graph_paths.stages_lock, graph_paths.notices}
        with held(graph_paths.stages_lock, timeout_seconds=1.0):
            for number, (name, words) in enumerate(stages, start=1):
                text = f"stage {number} of {len(stages)}: {name} ({', '.join(names)})"
                notices.publish(graph_paths, notices.STAGES, text)
                logger.info(text)
                if code := _run(name, words):
                    logger.error("%s has ended with %d; the rest was not begun", text, code)
                    if new and {*graph_paths.root.iterdir()} <= own:
                        storage.remove_tree(graph_paths.root)  # nothing was begun
                    return code
            notices.withdraw(graph_paths, notices.STAGES)
        return 0

    def _words(self, name: str) -> tuple[str, ...]:
        """The words of the stage's command, once it accepts them."""
        if name not in _NAMES:
            near = closest(name, _NAMES)
            raise ConfigError(f"--stages: no stage {name!r}{near}; there are {', '.join(_NAMES)}")
        try:
            words = (f"--graph_path={self.graph_path}", *shlex.split(getattr(self, name)))
        except ValueError as error:
            raise ConfigError(f"--{name} {getattr(self, name)}: {error}; mend it") from error
        try:
            if name in cli.PROGRAMS:
                parse(cli.class_of(name), words, prog=f"flowrl {name}")
            else:
                cli.command_of(name, words)
        except ConfigError as error:
            raise ConfigError(f'--{name}: {error}; give it as --{name}="…"') from error
        return words


def _run(name: str, words: tuple[str, ...]) -> int:
    """Run a stage's command; what ends this process by Ctrl-C or SIGTERM ends it, too."""
    with subprocess.Popen((*FLOWRL, name, *words)) as child:
        try:
            code = child.wait()
        except KeyboardInterrupt:
            child.terminate()
            child.wait()
            raise
    asked = -code in (signal.SIGINT, signal.SIGTERM)
    return EXIT_INTERRUPTED if asked else code if code >= 0 else 128 - code  # as a shell says it


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""

    def run(words: Sequence[str]) -> int:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        layers = graph_layer(OrchestratorCommand)
        return arguments.read(OrchestratorCommand, words, prog=PROGRAM, layers=layers)[0]()

    return console.run_words(run, argv)


if __name__ == "__main__":
    sys.exit(main())
