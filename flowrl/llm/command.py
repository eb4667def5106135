"""`flowrl write`, its flags and output: a leaf, because the client is loaded only to ask."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrl import storage
from flowrl.config import PPOConfig
from flowrl.console import print_report
from flowrl.errors import ConfigError
from flowrl.games.base import find_game
from flowrl.llm.asking import AskingCommand, Destination, graph_destination
from flowrl.llm.flags import WriteFlags
from flowrl.llm.transcript import NEXT, Accepted, Answered, Chosen, Transcript, find_source
from flowrl.llm.writing import GivenUpError, accepted_files
from flowrl.paths import GraphPaths, is_graph, refuse_other_folder
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import load_library, load_skill
from flowrl.storage import locks

_WISH_LIMIT = 2_000  # characters


@dataclass(frozen=True, kw_only=True)
class WriteCommand(AskingCommand, WriteFlags):
    """Let a language model write a skill that checks must admit.

    Examples:
      flowrl write exp/demo "Collect a sapling" --base_url http://localhost:8000/v1 --model qwen3
      flowrl write "Collect a sapling" -o my_skills --llm_replay docs/replays
      flowrl write exp/demo --next --target "a diamond" --base_url http://localhost:8000/v1
    """

    def __call__(self) -> int:
        """Ask, check, keep; returns 1 for a wish that is given up."""
        if self.next and self.wish:
            raise ConfigError("a wish and --next both say what is written; leave one of them out")
        told = self.target if self.next else self.wish
        if not (self.next or told.strip()) or len(told) > _WISH_LIMIT:
            what = f"the wish is empty or over {_WISH_LIMIT} characters"
            raise ConfigError(f"{what}; say it shortly, or leave it to the model by --next")
        if self.output is None:
            place = graph_destination(self.graph_path)
            if self.env_name not in (None, place.env_name):
                what = f"the graph is of {place.env_name}; leave it out, or use -o"
                raise ConfigError(f"--env_name: {what}")
        else:
            if self.graph_path != WriteCommand.graph_path:
                raise ConfigError("GRAPH and -o both say where the skill is kept; leave one out")
            place = self._folder(self.output)
        self.check_model()
        wish = self.wish or self._next(place)
        if self.llm_replay is not None:
            find_source(self.llm_replay, wish, place.env_name)  # before anything is made
        with locks.held(place.paths.transcripts / "write.lock", timeout_seconds=0):
            return self._write(place, wish)

    def _write(self, place: Destination, wish: str) -> int:
        transcript, begun = self._opened(place, self._begun_with(place, wish))
        accepted = transcript.find(Accepted)
        if accepted is None:
            try:
                accepted = self._asked(place, transcript, begun)
            except GivenUpError as error:
                lines = str(error).split("\n")
                facts = {"skill": None, "reasons": lines, "transcript": str(transcript.path)}
                print_report(facts, [f"given up: {line}" for line in lines], as_json=self.json)
                return 1
        files = accepted_files(transcript, accepted)
        kept = "granted before"
        if not transcript.ended:
            kept = self._kept(place, transcript, files)
            transcript.end()
        chosen = transcript.find(Chosen) or Chosen(file=accepted.file, standings=())
        facts = {"skill": accepted.skill, "file": str(transcript.folder / chosen.file)}
        facts |= {"transcript": str(transcript.path), "candidates": chosen.standings}
        asked = sum(isinstance(event, Answered) for event in transcript.kept)
        line = f"{accepted.skill}: {kept}, by {asked} answers ({transcript.path})"
        print_report(facts, [line, *chosen.standings], as_json=self.json)
        return 0

    def _next(self, place: Destination) -> str:
        """Return the wish that leaves the choice to the model; another one for other skills."""
        names = " ".join(sorted(place.graph.skills))
        digest = hashlib.sha256(names.encode()).hexdigest()[:8]
        towards = f", on the way to: {self.target}" if self.target else ""
        return f"{NEXT}{towards} (beside {len(place.graph.skills)} skills, {digest})"

    def _kept(self, place: Destination, transcript: Transcript, files: Sequence[Path]) -> str:
        """Keep the first candidate, or the one that is best in training; returns where."""
        alone = len(files) < 2 and self.llm_rounds == 1
        if place.config is None or alone or not self.candidate_timesteps:
            return place.keep(files[0])
        named, file, left = {file.name: file for file in files}, files[0], self.llm_rounds
        while True:
            contest = place.contest(
                named, frames=self.candidate_timesteps, most=self.max_concurrent
            )
            if need := contest.missing():
                return f"{place.keep(file)}, not compared, because {need!r} has no expert yet"
            outcome = contest.run()
            best = outcome.standings[0]
            file = named[best.label] if best.successes else file
            left -= 1
            if not (more := self._more(place, file) if left else []):
                break
            named = {os.path.relpath(each, transcript.folder): each for each in (file, *more)}
        chosen = os.path.relpath(file, transcript.folder)
        transcript.choose(Chosen(file=chosen, standings=outcome.lines))
        if not best.successes:
            return f"{place.keep(file)}, the first one, because none succeeded"
        return place.keep_trained(file, contest, best)

    def _more(self, place: Destination, file: Path) -> list[Path]:
        """Ask for other rewards of the skill in a file, as its contests went; [] if none passes."""
        present = load_skill(file, env_name=place.env_name)
        try:
            return self._rewards_for(place.having(present), present)
        except GivenUpError:
            return []

    def _folder(self, folder: Path) -> Destination:
        """Return a folder of skills as the place of the new one."""
        refuse_other_folder(folder)
        if is_graph(folder):
            raise ConfigError(f"{folder} is a graph; name it without -o, or another folder")
        game = find_game(self.env_name or PPOConfig.env_name)
        own = folder if any(folder.glob("[!.]*.py")) else None
        graph = SkillGraph(load_library(game.name, own).values(), capacity=game.capacity)
        storage.try_writing(folder)
        return Destination(paths=GraphPaths(folder), graph=graph, said={}, env_name=game.name)
