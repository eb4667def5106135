"""`python -m flowrl.comparing GRAPH RUN_ID`: what a merge asks about two copies of an expert.

The scheduler launches it as a job (`flowrl.parallel.comparisons`); it works on the CPU and ends
itself after the comparison's limit. It loads both copies, checks that they are those that were
asked about, and blends them or lets both walk their skill's plan in the same fresh worlds. All its
answers are written in one step; if it is killed before, nothing has changed.
"""

from __future__ import annotations

import hashlib
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import jax
import numpy as np

from flowrl import console, storage
from flowrl.errors import ConfigError, ExpertCorruptError, FileRefusedError, FlowrlError
from flowrl.evaluation import Tally, load_experts, open_plan
from flowrl.experts import checkpoint
from flowrl.experts.merge import Blended, Compared, Evidence, Question, Unanswered
from flowrl.experts.store import ExpertStore
from flowrl.measures.objectives import EPISODE_MEASURES, parse_objective
from flowrl.parallel import comparisons
from flowrl.parallel.training_setup import expected_shapes
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import Remapping, read_run
from flowrl.storage import records

EPISODES = 256


def main(argv: Sequence[str] | None = None) -> int:
    """Answer the questions of one comparison; returns the exit code."""
    return console.run_words(_called, argv)


def _called(words: list[str]) -> int:
    if len(words) != 2:
        raise ConfigError("a scheduler calls it: python -m flowrl.comparing GRAPH RUN_ID")
    return _work(GraphPaths(Path(words[0])), words[1])


def blended(current: Any, candidate: Any, gains: tuple[int, int]) -> Any:
    """The mean of two experts by the frames that each side has added, never outside of the two.

    All are trees of arrays of the same shapes and dtypes, without a leading expert axis.

    >>> blended({"w": np.float32([0, 1])}, {"w": np.float32([1, 1])}, (1, 3))["w"].tolist()
    [0.75, 1.0]
    """
    share = gains[1] / (gains[0] + gains[1])

    def mix(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        mean = one.astype(np.float64) * (1.0 - share) + other.astype(np.float64) * share
        return np.clip(mean, np.minimum(one, other), np.maximum(one, other)).astype(one.dtype)

    return jax.tree.map(mix, current, candidate)


def _work(graph_paths: GraphPaths, run_id: str) -> int:
    folder = graph_paths.comparisons / run_id
    asked = comparisons.read_record(folder)
    if asked is None:
        raise FileRefusedError(f"{folder} has no record; nothing is left to compare")
    signal.setitimer(signal.ITIMER_REAL, asked.limit_seconds)  # SIGALRM ends us, whatever hangs
    storage.fault_point("comparing.begun")
    run_paths = RunPaths(graph_paths.training_runs / asked.run_folder, asked.expert)
    answers = tuple(
        _answer(graph_paths, folder, run_paths, question) for question in asked.questions
    )
    storage.fault_point("comparing.found")
    records.write(comparisons.record_of(folder), replace(asked, answers=answers))
    return 0


def _answer(
    graph_paths: GraphPaths, folder: Path, run_paths: RunPaths, question: Question
) -> Evidence:
    try:
        if question.kind == "blend":
            return _blend(
                graph_paths, comparisons.blend_of(folder, question.expert), run_paths, question
            )
        return _compare(graph_paths, run_paths, question)
    except FlowrlError as error:
        return Unanswered(question=question, why=str(error).partition("\n")[0])


def _blend(
    graph_paths: GraphPaths, folder: Path, run_paths: RunPaths, question: Question
) -> Blended:
    like = checkpoint.like_of(expected_shapes(read_run(run_paths).config))
    current, candidate = _copies(graph_paths, run_paths, question, like)
    mean = blended(current, candidate, question.gains)
    storage.remove_tree(folder)  # of an earlier launch
    checkpoint.save_expert(folder, mean)
    return Blended(
        question=question,
        folder=folder,
        sha256=storage.tree_digest(folder),
        content=checkpoint.array_digest(mean),
    )


def _compare(graph_paths: GraphPaths, run_paths: RunPaths, question: Question) -> Compared:
    """Let both copies walk the plan of the expert's own skill, with the same luck."""
    archive, store = run_paths, ExpertStore(graph_paths)
    if question.expert != run_paths.expert:
        version = store.manifest().experts[question.expert]
        archive = graph_paths.archive(question.expert, version.skill)
    run, _, play = open_plan(archive)
    luck = jax.random.key(int(hashlib.sha256(repr(question).encode()).hexdigest()[:7], 16))
    others, local = load_experts(store, run), run.experts.index(question.expert)

    def episodes(copy: Any) -> list[dict[str, float]]:
        experts = jax.tree.map(lambda leaves, leaf: leaves.at[local].set(leaf), others, copy)
        return _figures(play(experts, luck, EPISODES))

    like = checkpoint.like_of(expected_shapes(run.config))
    there, found = map(episodes, _copies(graph_paths, run_paths, question, like))
    objective = parse_objective(question.objective or "success=1")
    old, new = (np.array([objective.mean(each) for each in each_of]) for each_of in (there, found))
    return Compared(
        question=question,
        wins=int((new > old).sum()),
        losses=int((old > new).sum()),
        ties=int((new == old).sum()),
        broken=tuple(objective.broken({name: fmean(e[name] for e in found) for name in found[0]})),
    )


def _figures(tally: Tally) -> list[dict[str, float]]:
    """The figures of each episode, by the measures of `EPISODE_MEASURES`."""
    of_episodes = zip(tally.success[:, -1], tally.total, tally.died, strict=True)
    return [dict(zip(EPISODE_MEASURES, map(float, row), strict=True)) for row in of_episodes]


def _copies(
    graph_paths: GraphPaths, run_paths: RunPaths, question: Question, like: Any
) -> tuple[Any, Any]:
    """The arrays that count and those that the run brings: those that were asked about."""
    store, run = ExpertStore(graph_paths), read_run(run_paths)
    version = store.manifest().experts[question.expert]
    local = Remapping(run.experts).global_to_local[question.expert]
    current = checkpoint.load_expert(store.verify(version), like)
    candidate = checkpoint.load_expert(run_paths.final(local), like)
    for copy, expected in ((current, question.current), (candidate, question.candidate)):
        if checkpoint.array_digest(copy) != expected:
            raise ExpertCorruptError(
                f"expert {question.expert} is another one than was asked about; merge again"
            )
    return current, candidate


if __name__ == "__main__":
    sys.exit(main())
