"""Choose which skill to train next; today from the skill library, requirements first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from flowrl.errors import GraphError, closest
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import Skill


class Flow:
    """Returns skills one by one, and pauses while the frontier is blocked.

    Skills that can start at once come first. If all remaining skills wait for one in training, one
    of them is returned and the frontier is blocked: what comes next may depend on how the training
    ends. `requested` are all skills to train, requirements first; `training_skills` are those that
    were added and have not ended.

    >>> flow = Flow(SkillGraph([]), known=())
    >>> flow.next_skill() is None
    True
    """

    def __init__(
        self,
        graph: SkillGraph,
        *,
        known: Collection[str],
        target: str | None = None,
        max_nodes: int | None = None,
        added: Collection[str] = (),
    ) -> None:
        """Start after the skills that the scheduler already has (`known`).

        The skills of `added` are asked for besides, as far as the graph has them.
        """
        self.requested: tuple[str, ...] = ()
        self._known = set(known)
        self._request(graph, skills_towards(graph, target=target, max_nodes=max_nodes))
        for name in sorted(graph.skills.keys() & set(added)):
            self.add(graph, name)
        self._newest: str | None = None
        self.training_skills: set[str] = set(known)

    def next_skill(self) -> tuple[str, Skill] | None:
        """Return the next skill and its definition; the same one until `on_skill_added`."""
        remaining = [name for name in self.requested if name not in self._known]
        if not remaining:
            return None
        name = next((name for name in remaining if not self._waits(name)), remaining[0])
        return name, self._graph.skills[name]

    def add(self, graph: SkillGraph, skill: str) -> tuple[str, ...]:
        """Request one more skill of a graph that has grown; returns what is to be added for it.

        These are the skill and its needs, requirements first, without those that were added.
        """
        wanted = (*graph.all_needs(skill), skill)
        self._request(graph, wanted)
        return tuple(name for name in wanted if name not in self._known)

    def dependencies(self, skill: str) -> tuple[str, ...]:
        """The skills that `skill` needs directly."""
        return self._graph.needs(skill)

    def weight(self, skill: str) -> int:
        """The number of skills to train that need this one, directly or not."""
        return self._weights[skill]

    def check_frontier_blocked(self) -> bool:
        """Return whether the newest skill and all remaining ones wait for one in training."""
        remaining = (name for name in self.requested if name not in self._known)
        if self._newest is None or not self._waits(self._newest):
            return False
        return all(self._waits(name) for name in remaining)

    def on_skill_added(self, skill: str) -> None:
        """Note that the scheduler has a skill, which is in training from now on."""
        self._known.add(skill)
        self.training_skills.add(skill)
        self._newest = skill

    def on_skill_complete(self, skill: str) -> None:
        """Note that a skill's expert is merged, which may unblock the frontier."""
        self.training_skills.discard(skill)

    def on_skill_failed(self, skill: str) -> None:
        """Note that a skill is given up; the others go on without it."""
        self.training_skills.discard(skill)

    def _request(self, graph: SkillGraph, skills: tuple[str, ...]) -> None:
        self._graph = graph
        self.requested = tuple(dict.fromkeys((*self.requested, *skills)))
        self._needs = {name: graph.all_needs(name) for name in self.requested}
        self._weights = Counter(need for needs in self._needs.values() for need in needs)

    def _waits(self, skill: str) -> bool:
        return not self.training_skills.isdisjoint(self._needs[skill])


def skills_towards(
    graph: SkillGraph, *, target: str | None, max_nodes: int | None
) -> tuple[str, ...]:
    """Return the skills to train, requirements first.

    Raises GraphError if the target is unknown, or needs more than `max_nodes` skills.
    """
    if target is None:
        return graph.order()[:max_nodes]
    if target not in graph.skills:
        raise GraphError(
            f"--target_skill {target!r} is no skill here{closest(target, graph.skills)}; "
            f"there are: {', '.join(graph.order())}"
        )
    skills = (*graph.all_needs(target), target)
    if max_nodes is not None and len(skills) > max_nodes:
        raise GraphError(
            f"{target} takes {len(skills)} skills ({', '.join(skills)}), over "
            f"--max_nodes {max_nodes}; raise it to {len(skills)} or leave it out"
        )
    return skills
