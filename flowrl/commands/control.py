"""`flowrl retry`, `train-more`, `pause` and others: requests to a scheduler.

Each command leaves a request in the graph's folder, whether the scheduler is up or down.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from flowrl.arguments import Frames, GraphCommand, Seconds, SkillArgument
from flowrl.console import print_report
from flowrl.errors import EXIT_BUSY, ConfigError, GraphError
from flowrl.parallel.events import DONE, MOST_PRIORITY, REFUSED, Response, Verb, why_not
from flowrl.parallel.health import daemon_of, in_words
from flowrl.parallel.recovery import recorded_config
from flowrl.parallel.requests import send_request
from flowrl.parallel.skill_sources import SkillSources, keep_new_skills, keep_other_text
from flowrl.parallel.state import SchedulerState, StateFile
from flowrl.parallel.status import Running
from flowrl.paths import GraphPaths, graph_or_sweep, printable, refuse_other_folder
from flowrl.reports.status import SkillRow, find_row, last_command, read_rows
from flowrl.runs import read_run
from flowrl.skills.skill import load_library, load_skill, skill_files
from flowrl.storage.records import within

_LOOK_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class ControlCommand(GraphCommand):
    """The flags that all of these commands take."""

    wait: Seconds = 0.0
    """Seconds to wait until it is done, runs that end have saved, too; else exit code 75."""
    json: bool = False
    """Print the request and its response as JSON."""

    def _send(self, verb: Verb, skill: str | None, *, number: int = 0) -> int:
        """Send a request, wait for its response if that is wanted, and print both."""
        graph_paths = GraphPaths(self.graph_path)
        if skill is None or verb is Verb.ADD:
            read_rows(graph_paths)  # the folder is a graph's
        else:
            row = find_row(read_rows(graph_paths), skill, graph_paths.root)
            skill = row.skill
            _refuse_senseless(verb, row)
        daemon = daemon_of(graph_paths.daemon_lock)  # refused before anything is sent
        name = send_request(graph_paths, verb, skill, number=number)
        response, under_way = await_response(graph_paths, name, self.wait)
        outcome = response.outcome if response else None
        if verb in (Verb.TRAIN_MORE, Verb.RETRAIN) and outcome == DONE:
            outcome = "asked"  # the training itself is seen in flowrl status
        left = f"done when you start {last_command(graph_paths)}"
        if daemon is not None:
            left = under_way or f"left for {in_words(daemon)}"
        if self.json:
            data = {"id": name, "verb": verb, "skill": skill, "number": number, "daemon": daemon}
            sys.stdout.write(json.dumps({**data, "outcome": outcome}) + "\n")
        else:
            print_report({}, [f"{verb.command} {skill or 'all'}: {outcome or left}"], as_json=False)
        if response is None:
            return EXIT_BUSY if self.wait else 0
        return 1 if response.refused else 0


@dataclass(frozen=True, kw_only=True)
class OneSkillCommand(ControlCommand):
    """The flags of a command about one skill."""

    verb: ClassVar[Verb]
    skill: SkillArgument
    """The skill's name, or its expert number."""

    def __call__(self) -> int:
        """Run the command."""
        return self._send(self.verb, self.skill)


@dataclass(frozen=True, kw_only=True)
class OneOrAllCommand(ControlCommand):
    """The flags of a command about one skill or all."""

    verb: ClassVar[Verb]
    skill: SkillArgument = ""
    """The skill's name, or its expert number."""
    all: bool = False
    """Every skill that is in the graph now; `resume --all` takes a `flowrl stop` back as well."""

    def __call__(self) -> int:
        """Run the command; raises ConfigError without a skill and without `--all`, or with both."""
        if self.all == bool(self.skill):
            raise ConfigError("name one skill, or say --all")
        return self._send(self.verb, self.skill or None)


@dataclass(frozen=True, kw_only=True)
class RetryCommand(OneSkillCommand):
    """Let a failed or held skill train again.

    Examples:
      flowrl retry exp/demo "Collect Iron"
    """

    verb = Verb.RETRY


@dataclass(frozen=True, kw_only=True)
class TrainMoreCommand(OneSkillCommand):
    """Train a completed skill on, as the same expert.

    What needs it waits for that.

    Examples:
      flowrl train-more exp/demo "Collect Iron"
      flowrl train-more exp/demo "Collect Iron" --total_timesteps 5M
    """

    verb = Verb.TRAIN_MORE
    total_timesteps: Frames | None = None
    """So many environment steps more, at most (default: the scheduler's own --total_timesteps)."""

    def __call__(self) -> int:
        """Run the command; says so if the skill's goal would end the training at once."""
        refuse_other_folder(self.graph_path)
        graph_paths = GraphPaths(self.graph_path)
        row = find_row(read_rows(graph_paths), self.skill, graph_paths.root)
        if row.goal and row.success_rate is not None and row.success_rate >= row.goal:
            sys.stderr.write(
                f"flowrl: {printable(row.skill)} has {row.success_rate:.1%} success of its goal "
                f"{row.goal:.1%} already, so this would end after one update; raise "
                "--success_state_rate at the next start\n"
            )
        return self._send(self.verb, self.skill, number=self.total_timesteps or 0)


@dataclass(frozen=True, kw_only=True)
class RetrainCommand(OneSkillCommand):
    """Train a completed skill anew under its changed text.

    The result is a new version of its expert; the former one stays for `flowrl rollback`. Experts
    of other skills stay as they are.

    Examples:
      flowrl retrain exp/demo "Collect Iron" --skills_dir my_skills
    """

    verb = Verb.RETRAIN
    skills_dir: Path | None = None
    """Folder with the skill's changed file (default: that of the graph's last start)."""

    def __call__(self) -> int:
        """Check the new text, keep it with the graph, and ask the scheduler to train the skill.

        What is refused changes nothing.
        """
        refuse_other_folder(self.graph_path)
        graph_paths = GraphPaths(self.graph_path)
        row = find_row(read_rows(graph_paths), self.skill, graph_paths.root)
        _refuse_senseless(self.verb, row)
        config = recorded_config(graph_paths)
        game, trust = config.ppo.env_name, config.graph.trust_skills
        folder = self.skills_dir or config.graph.skills_dir
        texts = load_library(game, folder, trust=trust)
        if row.skill not in texts or (self.skills_dir and texts[row.skill].embedded):
            raise ConfigError(
                f"there is no {row.skill!r} in {folder or f'the library of {game}'}; name the "
                "folder of its file by --skills_dir"
            )
        skill = texts[row.skill]
        if SkillSources(graph_paths).recorded().get(skill.name) == skill:
            sys.stderr.write(
                f"flowrl: the text of {printable(skill.name)} is the one that its expert was "
                "trained on: it is trained anew all the same, with other luck\n"
            )
        keep_other_text(graph_paths, config, skill, ["its user gave another text"])
        return self._send(self.verb, skill.name)


@dataclass(frozen=True, kw_only=True)
class AddCommand(ControlCommand):
    """Add skills of your own to a graph, also while it trains.

    Examples:
      flowrl add exp/demo my_skills/fell_a_tree.py
      flowrl add exp/demo my_skills --wait 60
    """

    files: tyro.conf.Positional[tuple[Path, ...]]
    """Skill files, and folders of them; their code is checked and tried first."""

    def __call__(self) -> int:
        """Check the files, keep them with the graph, and ask the scheduler to train them.

        Skills that are kept already are asked for again. What is refused changes nothing.
        """
        files = {file.resolve(): file for file in skill_files(self.files)}.values()
        graph_paths = GraphPaths(self.graph_path)
        read_rows(graph_paths)  # the folder is a graph's
        config = recorded_config(graph_paths)
        skills = [load_skill(file, env_name=config.ppo.env_name) for file in files]
        keep_new_skills(graph_paths, config, skills)
        return max([self._send(Verb.ADD, skill.name) for skill in skills])


@dataclass(frozen=True, kw_only=True)
class PauseCommand(OneOrAllCommand):
    """Let a running skill save and end, and a waiting one wait.

    Examples:
      flowrl pause exp/demo "Collect Iron"
      flowrl pause exp/demo --all --wait 60
    """

    verb = Verb.PAUSE


@dataclass(frozen=True, kw_only=True)
class ResumeCommand(OneOrAllCommand):
    """Let a held skill go on from its checkpoint.

    Examples:
      flowrl resume exp/demo "Collect Iron"
      flowrl resume exp/demo --all
    """

    verb = Verb.RESUME


@dataclass(frozen=True, kw_only=True)
class CancelCommand(OneSkillCommand):
    """End a skill's run and give it up, and what needs it.

    Examples:
      flowrl cancel exp/demo "Collect Iron"
    """

    verb = Verb.CANCEL


@dataclass(frozen=True, kw_only=True)
class PruneCommand(OneSkillCommand):
    """End a skill's run with what it has, as if it were whole.

    Examples:
      flowrl prune exp/demo "Collect Iron"
    """

    verb = Verb.PRUNE

    def __call__(self) -> int:
        """Run the command; raises ConfigError if the run has replicas, which cannot end so."""
        graph_paths = graph_or_sweep(self.graph_path)
        row = find_row(read_rows(graph_paths), self.skill, graph_paths.root)
        run_paths = graph_paths.run(row.expert or 0, row.skill)
        if row.status == Running.kind and read_run(run_paths).config["replicas"] > 1:
            raise ConfigError(
                f"{row.skill}: a run with --replicas cannot end with what it has; "
                "pause or cancel it"
            )
        return super().__call__()


@dataclass(frozen=True, kw_only=True)
class PriorityCommand(OneSkillCommand):
    """Say which skills start sooner: those of higher numbers.

    Examples:
      flowrl priority exp/demo "Collect Iron" 10
    """

    number: tyro.conf.Positional[Annotated[int, within(-MOST_PRIORITY, MOST_PRIORITY)]]
    """The new priority; skills have as many as others wait for them."""

    def __call__(self) -> int:
        """Run the command."""
        return self._send(Verb.PRIORITY, self.skill, number=self.number)


@dataclass(frozen=True, kw_only=True)
class StopCommand(ControlCommand):
    """Let the scheduler end once what runs is merged.

    Examples:
      flowrl stop exp/demo
      flowrl stop exp/demo --now --wait 60
    """

    now: bool = False
    """Let the runs save what they have and end; the next start goes on with them."""

    def __call__(self) -> int:
        """Run the command; without a scheduler nothing is left that would end the next one."""
        graph_paths = GraphPaths(self.graph_path)
        read_rows(graph_paths)  # the folder is a graph's
        if daemon_of(graph_paths.daemon_lock) is None:
            raise GraphError(
                f"no scheduler is running for {graph_paths.root}, so nothing is stopped; runs that "
                f"still go on end by {graph_paths.command('pause', '--all')} and the next start"
            )
        return self._send(Verb.STOP_NOW if self.now else Verb.STOP, None)


def _refuse_senseless(verb: Verb, row: SkillRow) -> None:
    """Raise GraphError if the request means nothing in the skill's status."""
    if refusal := why_not(verb, row.status):
        raise GraphError(f"{verb.command} {row.skill}: {REFUSED}{refusal}")


def await_response(
    graph_paths: GraphPaths, name: str, wait_seconds: float
) -> tuple[Response | None, str]:
    """Return the response once its runs have ended; None, and why, while they have not."""
    until = time.monotonic() + wait_seconds
    under_way = ""
    while wait_seconds:
        nobody = (
            daemon_of(graph_paths.daemon_lock) is None
        )  # before the look: it may respond and end
        state = StateFile(graph_paths.scheduler_state).load() or SchedulerState()
        for response in (each for each in state.responses if each.id == name):
            under_way = _under_way(graph_paths, state, response)
            if not under_way:
                return response, ""
        if nobody or time.monotonic() > until:
            break
        time.sleep(_LOOK_SECONDS)
    return None, under_way


def _under_way(graph_paths: GraphPaths, state: SchedulerState, response: Response) -> str:
    """Return what of a request that the scheduler has taken is not done yet, "" for nothing."""
    saving = [
        entry.skill
        for entry, _ in state.launched()
        if isinstance(entry.status, Running)
        and entry.status.stop_reason == response.verb
        and response.skill in (None, entry.skill)
    ]
    if saving:
        return f"asked; still saving: {', '.join(saving)}"
    stopping = response.verb in (Verb.STOP, Verb.STOP_NOW) and daemon_of(graph_paths.daemon_lock)
    return f"asked; not ended yet: {in_words(stopping)}" if stopping else ""
