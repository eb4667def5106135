"""Commands that ask a language model, and the places of what it writes."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowrl import storage
from flowrl.config import BottomUpConfig
from flowrl.errors import EXIT_BUDGET, ConfigError, FileRefusedError, FlowrlError
from flowrl.games.base import find_game
from flowrl.knowledge.asking import facts_of
from flowrl.knowledge.facts import Facts
from flowrl.knowledge.pages import recipe_rows
from flowrl.knowledge.remarks import remarks
from flowrl.launchers.sandbox import confinement
from flowrl.llm.context import bounded, context_of
from flowrl.llm.exchange import Budget, Completion, Cost, EndpointError, Message, tokens_of
from flowrl.llm.flags import AskingFlags
from flowrl.llm.transcript import (
    Accepted,
    Begun,
    Transcript,
    find_source,
    given_up,
    open_transcript,
)
from flowrl.llm.writing import Checks, GivenUpError, Writer, accepted_files
from flowrl.parallel.events import Verb
from flowrl.parallel.health import daemon_of
from flowrl.parallel.recovery import recorded_config
from flowrl.parallel.requests import send_request
from flowrl.parallel.skill_sources import SkillSources, keep_new_skills, open_graph
from flowrl.paths import GraphPaths, existing_graph, slug
from flowrl.redaction import redacted, secrets_of
from flowrl.reports.status import read_rows
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import Skill, load_skill
from flowrl.skills.validation.cache import ApprovalStore
from flowrl.skills.validation.dry_run import SkillCode
from flowrl.tuning.contest import Contest, Standing, earlier_standings


class BudgetUsedUpError(FlowrlError):
    """The budget of a wish is used up; the wish can go on with more."""

    exit_code = EXIT_BUDGET


@dataclass(frozen=True, kw_only=True)
class AskingCommand(AskingFlags):
    """A command that asks a language model."""

    def check_model(self) -> None:
        """Raise ConfigError if no model is named that could be asked; nothing is on disk yet."""
        if self.llm_replay is None:
            _ = self.endpoint
        elif not self.llm_replay.exists():
            raise ConfigError(f"--llm_replay {self.llm_replay} does not exist; name a transcript")

    def _opened(self, place: Destination, begun: Begun) -> tuple[Transcript, Begun]:
        """Return the transcript of a wish, and what is told, as in a replay if there is one."""
        folder, source = place.paths.transcripts, None
        if self.llm_replay is not None:
            source, was = find_source(self.llm_replay, begun.wish, place.env_name)
            begun = replace(was, context=begun.context)
        transcript = open_transcript(folder, begun, source)
        for each in (place.paths.root, place.paths.approvals, folder, transcript.folder):
            storage.remove_part_files(each)  # of a process that was killed
        return transcript, begun

    def _begun_with(self, place: Destination, wish: str, **more: Any) -> Begun:
        """Return what the model is to be told of a wish, and `more` data."""
        facts = _facts(place.env_name)
        context = context_of(
            wish,
            place.graph.skills,
            said=place.said,
            failed=given_up(place.paths.transcripts),
            recipes=recipe_rows(facts) if facts else (),
        )
        context = bounded({**context, **more}, self.llm_context_tokens)
        return Begun(
            wish=self._clean(wish),
            env_name=place.env_name,
            model=self.model,
            candidates=self.llm_candidates,
            repairs=self.llm_repairs,
            temperature=self.temperature,
            seed=self.seed,
            context=self._clean(json.dumps(context, ensure_ascii=False)),
        )

    def _asked(
        self,
        place: Destination,
        transcript: Transcript,
        begun: Begun,
        *,
        present: Skill | None = None,
    ) -> Accepted:
        """Ask for a skill until it is accepted; what was paid for before is not asked again.

        With `present`, other rewards of that skill are asked for.
        """
        most = Cost(self.llm_calls, self.llm_tokens, self.llm_seconds)
        budget = Budget(most, transcript.spent)
        client = None if self.llm_replay is not None else self._client(budget)
        checks = Checks(
            graph=place.graph,
            env_name=place.env_name,
            store=ApprovalStore(place.paths.approvals),
            confine=confinement(self.sandbox).in_folder,
            replaces=present is not None,
            contradictions=contradictions(place.env_name),
        )

        def ask(messages: Sequence[Message], purpose: str, schema: dict[str, Any]) -> Completion:
            before = budget.spent
            if (said := self._used_up(budget, messages)) or client is None:
                transcript.lose(Cost())
                more = "the same command goes on with more"
                raise BudgetUsedUpError(f"{said}: {writer.reached}; {more}")
            try:
                completion = client.complete(messages, purpose, schema)
                text = self._clean(completion.text)
            except EndpointError as error:
                transcript.lose(budget.spent - before)
                where = f"the endpoint at {client.endpoint.place}"
                raise EndpointError(f"{where} {error}") from error
            return replace(completion, text=text)

        told = transcript.find(Begun) or begun
        writer = Writer(transcript, told, checks, ask=ask, clean=self._clean)
        accepted = writer.improve(present) if present else writer.write()
        transcript.note(accepted)
        return accepted

    def _rewards_for(self, place: Destination, present: Skill) -> list[Path]:
        """Ask for other rewards of a skill; an answer that is kept is not paid for again."""
        if present.trusted:
            what = f"{present.name} is trusted code, which the syntax check refuses"
            raise ConfigError(f"{what}: no model can answer for it; rewrite it, or use --proposals")
        digest = SkillCode.of(present, place.env_name).digest[:8]
        reward = {"task_reward": present.reward, **place.said.get(present.name, {})}
        tried = [row.facts for row in earlier_standings(place.paths, present.name)]
        wish = f"improve {present.name} ({digest})"
        transcript, begun = self._opened(
            place, self._begun_with(place, wish, present=reward, tried=tried)
        )
        accepted = transcript.find(Accepted)
        try:
            accepted = accepted or self._asked(place, transcript, begun, present=present)
        except GivenUpError as error:
            reasons = "; ".join(str(error).split("\n"))
            raise GivenUpError(f"no reward of the model passes: {reasons}") from error
        if not transcript.ended:
            transcript.end()
        return accepted_files(transcript, accepted)

    def _client(self, budget: Budget) -> Any:
        """Return the client; ConfigError if its package, imported now, is missing."""
        try:
            from flowrl.llm.client import ChatClient
        except ImportError as error:
            extra = "pip install '.[llm]' in flowrl's folder"
            raise ConfigError(f"flowrl write needs {extra}: {error}") from error
        return ChatClient(self.endpoint, budget)

    def _clean(self, text: str) -> str:
        """Return a text without secrets and the user's own folder."""
        home = str(Path.home())
        text = text.replace(home, "~") if len(home) > 1 else text
        return redacted(text, secrets_of(os.environ, [self.api_key_env]))

    def _used_up(self, budget: Budget, messages: Sequence[Message]) -> str:
        """Return which part of the budget a question would exceed, "" for none."""
        tokens = sum(tokens_of(each["content"]) for each in messages)
        after = budget.spent + Cost(1, tokens, 0)
        for part in ("calls", "tokens", "seconds"):
            now, most = getattr(after, part), getattr(budget.most, part)
            if now > most:
                spent = getattr(budget.spent, part)
                return f"the budget is used up (--llm_{part} {most:g}, {spent:g} spent)"
        return ""


@dataclass(frozen=True, kw_only=True)
class Destination:
    """A graph, or a folder of skill files, that a new skill is written for."""

    paths: GraphPaths
    graph: SkillGraph
    said: dict[str, dict[str, Any]]
    env_name: str
    config: BottomUpConfig | None = None

    def keep(self, file: Path) -> str:
        """Keep the skill in an accepted file, again if need be; returns where."""
        skill = load_skill(file, env_name=self.env_name)
        if self.config is None:
            path = self.paths.root / f"{slug(skill.name).lower()}.py"
            content = storage.read_bytes(file)
            if path.exists() and storage.read_bytes(path) != content:
                what = f"{path} is there already, with another text"
                raise FileRefusedError(f"{what}; move it away, and the same command goes on")
            storage.write_atomic(path, content)
            return f"written to {path}"
        keep_new_skills(self.paths, self.config, [skill])
        send_request(self.paths, Verb.ADD, skill.name)
        return f"added to {self.paths.root}"

    def having(self, skill: Skill) -> Destination:
        """Return the place with a new skill, or this text of it if a killed start has kept it."""
        kept = skill.name in self.graph.skills
        graph = self.graph.replacing(skill) if kept else self.graph.plus([skill])
        return replace(self, graph=graph)

    def contest(self, files: Mapping[str, Path], *, frames: int, most: int) -> Contest:
        """Return the contest of candidates in files by their labels, which share their contract."""
        assert self.config
        texts = {name: load_skill(file, env_name=self.env_name) for name, file in files.items()}
        first, *_ = texts.values()
        graph = self.having(first).graph
        graphs = {name: graph.replacing(text) for name, text in texts.items()}
        given: dict[str, Any] = {"graph_paths": self.paths, "config": self.config}
        return Contest(skill=first.name, graphs=graphs, frames=frames, most=most, **given)

    def keep_trained(self, file: Path, contest: Contest, best: Standing) -> str:
        """Keep the winner of a contest; its expert too, if no scheduler lives. Returns where."""
        if daemon_of(self.paths.daemon_lock) is not None:
            return f"{self.keep(file)}, to be trained anew, because a scheduler trains the graph"
        assert self.config
        keep_new_skills(self.paths, self.config, [load_skill(file, env_name=self.env_name)])
        if not contest.keep_expert(best):
            return f"{self.keep(file)}, to be trained anew, because its expert's number is taken"
        if contest.reached(best):
            return f"added to {self.paths.root}, with its expert"
        send_request(self.paths, Verb.TRAIN_MORE, contest.skill)
        return f"added to {self.paths.root}, with its expert, which is trained on"


def graph_destination(graph_path: Path) -> Destination:
    """Return a graph as the place of new skills."""
    graph_paths = existing_graph(graph_path)
    rows = read_rows(graph_paths)
    config = recorded_config(graph_paths)
    said = {
        row.skill: {"status": row.status, "success_rate": row.success_rate, "why": row.why}
        for row in rows
    }
    graph = open_graph(config, SkillSources(graph_paths))
    env_name = config.ppo.env_name
    return Destination(paths=graph_paths, graph=graph, said=said, env_name=env_name, config=config)


def contradictions(env_name: str) -> Callable[[Skill], Sequence[str]]:
    """Return the comparison of a skill with the facts of its game; it is empty without probes."""
    facts, items = _facts(env_name), find_game(env_name).items
    return lambda skill: remarks(skill, facts, items) if facts else []


@functools.cache
def _facts(env_name: str) -> Facts | None:
    """Return the facts of a game; None if it cannot be probed."""
    return facts_of(env_name) if find_game(env_name).probes else None
