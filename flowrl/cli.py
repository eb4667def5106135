"""The program `flowrl`: train a graph, look into it, steer its scheduler, repair it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tyro

from flowrl import arguments, console
from flowrl.bottomup_parallel import SequentialConfig, train_graph
from flowrl.commands.average import AverageCommand
from flowrl.commands.check import CheckCommand
from flowrl.commands.control import (
    AddCommand,
    CancelCommand,
    PauseCommand,
    PriorityCommand,
    PruneCommand,
    ResumeCommand,
    RetryCommand,
    StopCommand,
    TrainMoreCommand,
)
from flowrl.commands.evaluate import EvaluateCommand
from flowrl.commands.export import ExportCommand
from flowrl.commands.judge import JudgeCommand
from flowrl.commands.logs import LogsCommand
from flowrl.commands.repair import FsckCommand, RecoverCommand, RollbackCommand
from flowrl.commands.sessions import AttachCommand, PsCommand
from flowrl.commands.skills import PlanCommand, SkillsCommand
from flowrl.commands.status import StatusCommand
from flowrl.commands.sweep import SweepConfig, run_sweep
from flowrl.config import BottomUpConfig
from flowrl.errors import ConfigError, closest


@dataclass(frozen=True, kw_only=True)
class CompletionCommand:
    """Print a script that completes commands in your shell.

    Examples:
      flowrl completion bash > ~/.local/share/bash-completion/completions/flowrl
      flowrl completion zsh > ~/.zfunc/_flowrl
      flowrl completion fish > ~/.config/fish/completions/flowrl.fish
    """

    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]
    """bash, zsh or fish."""

    def __call__(self) -> int:
        """Print the script, which tyro makes of all commands; it ends the program."""
        words = ["--tyro-print-completion", self.shell]
        flat = (tyro.conf.OmitArgPrefixes,)
        tyro.extras.subcommand_cli_from_dict(ALL, args=words, prog="flowrl", config=flat)
        return 0


PROGRAMS: Mapping[str, tuple[type, Callable[[Any], int]]] = {
    "train": (BottomUpConfig, train_graph),
    "sequential": (SequentialConfig, train_graph),
    "sweep": (SweepConfig, run_sweep),
}
GROUPS: Mapping[str, Mapping[str, type]] = {
    "train": {**{name: kind for name, (kind, _) in PROGRAMS.items()}, "add": AddCommand},
    "look": {
        "status": StatusCommand,
        "logs": LogsCommand,
        "attach": AttachCommand,
        "ps": PsCommand,
        "skills": SkillsCommand,
        "plan": PlanCommand,
        "check": CheckCommand,
    },
    "steer": {
        "retry": RetryCommand,
        "train-more": TrainMoreCommand,
        "pause": PauseCommand,
        "resume": ResumeCommand,
        "cancel": CancelCommand,
        "prune": PruneCommand,
        "priority": PriorityCommand,
        "stop": StopCommand,
    },
    "repair": {
        "fsck": FsckCommand,
        "rollback": RollbackCommand,
        "recover": RecoverCommand,
    },
    "take": {
        "evaluate": EvaluateCommand,
        "judge": JudgeCommand,
        "export": ExportCommand,
        "average": AverageCommand,
        "completion": CompletionCommand,
    },
}
ALL = {name: kind for group in GROUPS.values() for name, kind in group.items()}
COMMANDS = {name: kind for name, kind in ALL.items() if name not in PROGRAMS}
HEAD = """flowrl trains a graph of skills in parallel and merges them into one agent.

  flowrl train exp/demo --target_skill "Make Wood Pickaxe" --total_timesteps 5M
  flowrl status exp/demo --watch

GRAPH, here exp/demo, may be left out where FLOWRL_GRAPH is set.
flowrl COMMAND --help says more.

"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if console.print_version(words):
        return 0
    if not words or words[0] in ("--help", "-h", "help"):
        sys.stdout.write(overview())
        return 0
    name, *rest = words
    if name in PROGRAMS:
        return console.run_program(f"flowrl {name}", *PROGRAMS[name], rest)
    console.start_logging()

    def command() -> int:
        return command_of(name, rest)()

    return console.guarded(command)


def overview() -> str:
    """Return what `flowrl --help` prints: the commands by what they are for."""
    lines = [HEAD]
    for group, commands in GROUPS.items():
        for number, (name, kind) in enumerate(commands.items()):
            summary = (kind.__doc__ or "").partition("\n")[0]
            lines.append(f"{group if number == 0 else '':8}{name:11}{summary}\n")
    return "".join(lines)


def command_of(name: str, words: Sequence[str]) -> Any:
    """Return the command with its arguments.

    Raises:
      ConfigError: there is no such command.
    """
    if name not in COMMANDS:
        near = closest(name, [*ALL, "--version"]) or f"; there are {', '.join(ALL)}"
        raise ConfigError(f"there is no command {name!r}{near}")
    kind = COMMANDS[name]
    given = arguments.environment(BottomUpConfig, os.environ)  # refuses FLOWRL_GRPAH, say
    graph = {"graph_path"} & given.keys() & arguments.arguments(kind).keys()
    layers: dict[arguments.Origin, arguments.Given] = {
        "environment": {name: given[name] for name in graph}
    }
    return arguments.read(kind, words, prog=f"flowrl {name}", layers=layers)[0]


if __name__ == "__main__":
    sys.exit(main())
