"""`flowrl play`, its flags and output."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from flowrl import storage
from flowrl.arguments import Count, GraphCommand, Needs, Seed, SkillArgument
from flowrl.config import Sandbox
from flowrl.errors import BusyError, ConfigError
from flowrl.experts.store import ExpertStore
from flowrl.games.base import renderer_of
from flowrl.launchers.confined import confined_run
from flowrl.measures.episodes import read_episodes
from flowrl.output import check_kept, check_output
from flowrl.paths import AGENT_JSON, GraphPaths, RunPaths, existing_graph
from flowrl.runs import read_run
from flowrl.storage import records
from flowrl.viewing.film import (
    ENDINGS,
    Film,
    check_encoder,
    check_terminal,
    encoded,
    film_of,
    kept_film,
    show,
)


@dataclass(frozen=True, kw_only=True)
class PlayCommand(GraphCommand):
    """Show how an agent plays a skill: a film, or in the terminal.

    GRAPH is a graph's folder or an exported agent's.

    Examples:
      flowrl play exp/demo "Make Wood Pickaxe" -o pickaxe.mp4
      flowrl play exp/demo "Collect Coal" --failures -o deaths.gif
      flowrl play exp/demo "Collect Coal" --recorded --keep
      flowrl play exp/demo "Collect Coal" --recorded --first 7 --episodes 1
      flowrl play agent "Collect Wood"
    """

    skill: SkillArgument
    """The skill's name, or its expert number."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """File of the film, .mp4 (extra `video`) or .gif (default: play in the terminal)."""
    keep: bool = False
    """Keep the film beside the skill's expert in the graph, where `flowrl serve` shows it."""
    episodes: Count = 4
    """Episodes to show, each in a world of its own."""
    failures: bool = False
    """Show only episodes that fail."""
    seed: Annotated[Seed, Needs(recorded=False)] = 0
    """Seed of the first episode; each next one has the next."""
    fps: Annotated[int, records.within(1, 50)] = 10
    """Timesteps that are shown in a second, at most 50."""
    recorded: bool = False
    """Replay the episodes that `flowrl evaluate --record` has recorded of a graph's skill."""
    first: Annotated[Count, Needs(recorded=True)] = 1
    """Number of the first recorded episode to show."""
    trust_skills: bool = False
    """Also run code of an exported agent that the syntax check refuses, if exported as trusted."""
    sandbox: Sandbox = "auto"
    """Confine the episodes by bubblewrap, with the folder read-only; auto: if it is there."""

    def __call__(self) -> int:
        """Play in a child process and write or show the film."""
        output, archive, run, screen = self.output, None, None, Console(color_system="truecolor")
        if self.keep:
            archive = self._archive()
            output, run = check_kept(kept_film(archive)), read_run(archive)
        elif output is not None:
            check_output(output, endings=ENDINGS)
            check_encoder(output)
        elif not sys.stdout.isatty():
            raise ConfigError("standard output is no terminal; name a film with -o play.gif")
        elif sys.stdin is None or not sys.stdin.isatty():
            raise ConfigError("standard input is no terminal; name a film with -o play.gif")
        else:
            check_terminal(screen)
        played = replace(self, graph_path=self.graph_path.absolute())._film()
        if output is None:
            show(played, screen, fps=self.fps)
            return 0
        content = encoded(played, output.suffix, fps=self.fps)
        if archive:
            existing_graph(self.graph_path)  # it may have been removed meanwhile
            if read_run(archive) != run:
                raise BusyError(f"{self.skill} was merged anew meanwhile; play it again")
        storage.make_dir(output.parent)
        storage.write_atomic(output, content)
        seconds = len(played.frames) / self.fps + sum(played.holds)
        number = len({caption.partition(",")[0] for caption in played.captions})  # "episode 1"
        shown = f"{number} episode{'s' if number > 1 else ''}, {seconds:.0f} s"
        sys.stdout.write(f"{output}: {shown}, {len(content) / 1e6:.1f} MB\n")
        return 0

    def _archive(self) -> RunPaths:
        """The archive beside which a film is kept.

        ConfigError if another output is asked for, too; raises as `_film` if there is no such
        skill.
        """
        place, output = self.graph_path, self.output
        if output is not None:
            what = "--keep writes beside the skill's expert"
            raise ConfigError(f"{what}, not to -o {output}; drop one")
        if os.path.lexists(place / AGENT_JSON):
            raise ConfigError(f"{place} is an exported agent, which keeps no film; use -o film.gif")
        return ExpertStore(existing_graph(place)).archive_of(self.skill)

    def _film(self) -> Film:
        """Let a confined process carry this out as its order, and return the film.

        Raises:
          ExpertMissingError: no such skill is merged; says which are.
          FileRefusedError: the folder is neither a graph nor an agent.
          ConfigError: the game draws no pictures.
          ConfinedError: the episodes could not be played; says why.
        """
        place, run = self.graph_path, None
        graph_paths = GraphPaths(place)
        if not os.path.lexists(place / AGENT_JSON):
            graph_paths = existing_graph(place)
            if self.trust_skills:
                raise ConfigError("--trust_skills is for an exported agent; leave it out")
            run = read_run(ExpertStore(graph_paths).archive_of(self.skill))
            renderer_of(run.config["env_name"])  # before anything is compiled
            if self.recorded:
                read_episodes(graph_paths, run)
        elif self.recorded:
            what = f"{place} is an exported agent, which records nothing"
            raise ConfigError(f"{what}; leave --recorded out")
        wanted = None if self.failures else self.episodes  # else more are played
        return film_of(confined_run(self, graph_paths, run, how=self.sandbox, episodes=wanted))

    def work(self) -> int:
        """Play in this process, and write the pictures to standard output."""
        from flowrl.viewing.pictures import open_agent, pictures, recorded_pictures

        agent = open_agent(self.graph_path, self.skill, trust_skills=self.trust_skills)
        asked: dict[str, Any] = {"episodes": self.episodes, "failures": self.failures}
        if self.recorded:
            graph_paths = GraphPaths(self.graph_path)
            run = read_run(ExpertStore(graph_paths).archive_of(self.skill))
            episodes = read_episodes(graph_paths, run)
            drawn = recorded_pictures(agent, self.skill, episodes, first=self.first, **asked)
        else:
            drawn = pictures(agent, self.skill, seed=self.seed, **asked)
        sys.stdout.buffer.write(drawn)
        return 0
