"""The program `flowrl`: train a graph, look into it, steer its scheduler, repair it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Literal

import tyro

from flowrl import arguments, command_line, console
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
        kinds = {name: class_of(name) for name in ALL if " " not in name}
        tyro.extras.subcommand_cli_from_dict(kinds, args=words, prog="flowrl", config=flat)
        return 0


# Classes and functions below flowrl: the module of a command is imported when it is called.
PROGRAMS: Mapping[str, str] = {
    "train": "bottomup_parallel:train",
    "sequential": "bottomup:train",
    "sweep": "tuning.command:run_sweep",
}
_GROUPS: Mapping[str, Mapping[str, str]] = {
    "train": {
        "train": "config:BottomUpConfig",
        "sequential": "parallel.training:SequentialConfig",
        "sweep": "tuning.start:SweepConfig",
        "sweep status": "tuning.command:SweepStatusCommand",
        "sweep apply": "tuning.command:SweepApplyCommand",
        "sweep forget": "tuning.command:SweepForgetCommand",
        "add": "commands.control:AddCommand",
        "write": "llm.command:WriteCommand",
    },
    "look": {
        "status": "commands.status:StatusCommand",
        "logs": "commands.sessions:LogsCommand",
        "attach": "commands.sessions:AttachCommand",
        "ps": "commands.sessions:PsCommand",
        "skills": "commands.skills:SkillsCommand",
        "plan": "commands.skills:PlanCommand",
        "why": "commands.why:WhyCommand",
        "analyse": "analysis.command:AnalyseCommand",
        "plot": "commands.plot:PlotCommand",
        "serve": "serving.command:ServeCommand",
        "check": "commands.check:CheckCommand",
        "facts": "commands.facts:FactsCommand",
        "new game": "commands.new:NewGameCommand",
    },
    "steer": {
        "retry": "commands.control:RetryCommand",
        "train-more": "commands.control:TrainMoreCommand",
        "retrain": "commands.control:RetrainCommand",
        "improve": "llm.improve:ImproveCommand",
        "pause": "commands.control:PauseCommand",
        "resume": "commands.control:ResumeCommand",
        "cancel": "commands.control:CancelCommand",
        "prune": "commands.control:PruneCommand",
        "priority": "commands.control:PriorityCommand",
        "stop": "commands.control:StopCommand",
    },
    "repair": {
        "fsck": "commands.repair:FsckCommand",
        "rollback": "commands.repair:RollbackCommand",
        "recover": "commands.repair:RecoverCommand",
    },
    "take": {
        "evaluate": "commands.evaluate:EvaluateCommand",
        "play": "commands.play:PlayCommand",
        "judge": "judging.command:JudgeCommand",
        "export": "commands.average:ExportCommand",
        "average": "commands.average:AverageCommand",
        "completion": "cli:CompletionCommand",
    },
}
ALL = {name: place for group in _GROUPS.values() for name, place in group.items()}
COMMANDS = tuple(name for name in ALL if name not in PROGRAMS)
# Words of other tools.
_INSTEAD = {
    **dict.fromkeys(("list", "ls"), "; flowrl skills lists skills, flowrl ps your graphs"),
    **dict.fromkeys(
        ("render", "video", "record", "watch"),
        "; flowrl play shows how an agent plays, flowrl evaluate measures it",
    ),
    **dict.fromkeys(
        ("curves", "tensorboard"),
        "; flowrl plot draws curves, metrics.jsonl has them, --use_tensorboard writes them",
    ),
    **dict.fromkeys(("dashboard", "web", "ui"), "; flowrl serve shows graphs on a web page"),
    **dict.fromkeys(("new", "init", "create"), "; flowrl new game NAME writes a game of your own"),
    **dict.fromkeys(("run", "start"), "; flowrl train starts a graph and goes on with it"),
    "--version": "; flowrl --version takes no other word",
    **dict.fromkeys(("kill", "delete", "rm"), "; flowrl cancel ends a skill, flowrl stop a graph"),
}
_HEAD = """Train a graph of skills into one agent. flowrl COMMAND --help says more.
  flowrl train exp/demo --target_skill "Make Wood Pickaxe" --total_timesteps 5M
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    return console.run_words(_run, argv)


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("--help", "-h") or words == ["help"]:
        sys.stdout.write(_overview())
        return 0
    name, *rest = words
    if name == "help":
        name, *rest = (*rest, "--help")
    if rest and f"{name} {rest[0]}" in ALL:  # sweep status
        name, rest = f"{name} {rest[0]}", rest[1:]
    elif len(rest) > 1 and f"{name} {rest[1]}" in ALL:
        order = shlex.join([name, rest[1], rest[0], *rest[2:]])
        raise ConfigError(f"{rest[1]} stands before GRAPH: flowrl {order}")
    elif rest and not os.path.exists(rest[0]):  # noqa: PTH110 - a wish may be too long for a name
        below = [each.partition(" ")[2] for each in ALL if each.startswith(f"{name} ")]
        if near := closest(rest[0], below):
            graph = f"; a new graph of that name is ./{rest[0]}" if name in ALL else ""
            raise ConfigError(f"there is no command '{name} {rest[0]}'{near}{graph}")
    if name in PROGRAMS:
        work = resolve_name(f"flowrl.{PROGRAMS[name]}")
        return console.run_program(f"flowrl {name}", class_of(name), work, rest)
    return command_of(name, rest)()


def _overview() -> str:
    """Return what `flowrl --help` prints: the commands by what they are for."""
    lines = [_HEAD]
    for group, commands in _GROUPS.items():
        below = [word for word in commands if " " in word and word.split()[0] in commands]
        for number, name in enumerate(word for word in commands if word not in below):
            summary = (class_of(name).__doc__ or "").partition("\n")[0]
            lines.append(f"{group if number == 0 else '':8}{name:11}{summary}\n")
    return "".join(lines)


def class_of(name: str) -> type:
    """Return the class whose fields are the flags of a command; imports its module."""
    return resolve_name(f"flowrl.{ALL[name]}")


def command_of(name: str, words: Sequence[str]) -> Any:
    """Return the command with its arguments; raises ConfigError if there is none."""
    if name not in COMMANDS:
        known = [word for word in ALL if " " not in word]
        near = closest(name, [*known, "--version"]) or f"; there are {', '.join(known)}"
        if late := next((word for word in words if word in ALL), None):
            near = f"; the command comes first: flowrl {late} …"
        raise ConfigError(f"there is no command {name!r}{_INSTEAD.get(name, near)}")
    kind = class_of(name)
    layers = command_line.graph_layer(kind)
    command, origins = arguments.read(kind, words, prog=f"flowrl {name}", layers=layers)
    arguments.check_needs(kind, vars(command), origins)
    return command


if __name__ == "__main__":
    sys.exit(main())
