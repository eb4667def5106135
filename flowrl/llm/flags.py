"""Flags of commands that ask a language model; alone, because `flowrl train` reads them, too."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from flowrl.arguments import (
    Count,
    CountOrZero,
    Frames,
    FramesOrZero,
    Needs,
    ReportCommand,
    Seconds,
    Seed,
)
from flowrl.config import Sandbox
from flowrl.llm.exchange import KEY, RETRIES, Endpoint
from flowrl.storage.records import above, within

Temperature = Annotated[float, within(0.0, 2.0)]


@dataclass(frozen=True, kw_only=True)
class AskingFlags(ReportCommand):
    """The flags of a command that asks a language model."""

    base_url: str = ""
    """Endpoint, as https://api.openai.com/v1."""
    model: str = ""
    """The endpoint's model."""
    api_key_env: str = KEY
    """Name of the environment variable that holds the key."""
    temperature: Temperature | None = None
    """Temperature of the model's choices (default: the endpoint's own)."""
    seed: Seed | None = None
    """Seed of the model's choices, for endpoints that take one."""
    timeout_seconds: Annotated[Seconds, above(0)] = 120.0
    """Seconds that one answer may take, with its retries."""
    retries: CountOrZero = RETRIES
    """Further tries after 408, 429, 5xx or a lost connection; Retry-After is obeyed."""
    llm_candidates: Annotated[Count, within(1, 16)] = 4
    """Rewards to ask for. In a graph those that pass all checks are trained side by side."""
    llm_repairs: Annotated[CountOrZero, within(0, 20)] = 3
    """Rounds of corrections of each of the two answers."""
    llm_context_tokens: Count = 8_000
    """Tokens that the graph, examples and former failures take in a question at most."""
    llm_calls: Count = 40
    """Requests that a wish may take at most, retries and earlier starts included."""
    llm_tokens: Frames = 400_000
    """Tokens that it may take at most, of questions and answers."""
    llm_seconds: Annotated[Seconds, above(0)] = 1_800.0
    """Seconds that it may wait for the endpoint at most."""
    llm_replay: Path | None = None
    """Answer from the transcripts in this folder, or from one, instead of an endpoint."""
    sandbox: Sandbox = "auto"
    """Confine the dry run by bubblewrap; auto: if it is there."""

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint that is asked; ConfigError if it cannot be."""
        return Endpoint(**{field.name: getattr(self, field.name) for field in fields(Endpoint)})


@dataclass(frozen=True, kw_only=True)
class WriteFlags(AskingFlags):
    """The flags of `flowrl write`."""

    wish: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="WISH")]] = ""
    """The skill to write, in plain words."""
    next: bool = False
    """Instead of a wish: let the model choose a skill that is new and within reach."""
    target: Annotated[str, Needs(next=True)] = ""
    """With --next: what the new skill is to lead towards, in plain words."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Instead of a graph, a folder for the skill's file; its skills and the library's are known."""
    env_name: str | None = None
    """With -o: the game (default: Craftax-Classic-Symbolic-v1); a graph knows its own."""
    candidate_timesteps: FramesOrZero = 300_000
    """Environment steps with which each reward is trained; 0 takes the first that passes."""
    max_concurrent: Count = 2
    """Most of these runs side by side."""
    llm_rounds: Annotated[Count, within(1, 10), Needs(candidate_timesteps=1)] = 1
    """Contests, each further one with rewards that the model gives once told of the last one's."""
