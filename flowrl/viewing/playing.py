"""Films of what agents play: the order, and who carries it out in a confined process."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from flowrl.config import Sandbox
from flowrl.experts.store import ExpertStore
from flowrl.launchers.confined import confined_run
from flowrl.paths import AGENT_JSON, GraphPaths, existing_graph
from flowrl.runs import read_run
from flowrl.viewing.film import Film, film_of


@dataclass(frozen=True, kw_only=True)
class PictureOrder:
    """The order to play and draw episodes; `place` is a graph's folder or an exported agent's."""

    place: Path
    skill: str
    episodes: int
    seed: int
    failures: bool
    trust_skills: bool

    def work(self) -> int:
        """Play in this process, and write the pictures to standard output."""
        from flowrl.viewing.pictures import open_agent, pictures

        agent = open_agent(self.place, self.skill, trust_skills=self.trust_skills)
        drawn = pictures(
            agent, self.skill, episodes=self.episodes, seed=self.seed, failures=self.failures
        )
        sys.stdout.buffer.write(drawn)
        return 0


def film(order: PictureOrder, *, sandbox: Sandbox) -> Film:
    """Carry the order out.

    Raises:
      ExpertMissingError: no such skill is merged; says which are.
      FileRefusedError: the folder is neither a graph nor an agent.
      ConfinedError: the episodes could not be played; says why.
    """
    graph_paths, run = GraphPaths(order.place), None
    if not (order.place / AGENT_JSON).is_file():
        graph_paths = existing_graph(order.place)
        run = read_run(ExpertStore(graph_paths).archive_of(order.skill))
    return film_of(confined_run(order, graph_paths, run, how=sandbox))
