"""`python -m flowrl.comparing GRAPH RUN_ID`: what a merge asks about two copies of an expert.

The scheduler starts it (`flowrl.parallel.comparisons`); it works on the CPU and ends itself after
the inquiry's limit. It loads both copies, makes sure that they are the ones that were asked about,
and blends them or lets both walk their skill's plan in the same fresh worlds.
Its answers appear at one stroke; killed before, it has changed nothing that counts.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flowrl import config as configs
from flowrl import console, storage
from flowrl.config import PPOConfig
from flowrl.envs.admission import open_module
from flowrl.errors import ExpertCorruptError, FileRefusedError, FlowrlError
from flowrl.evaluate import load_experts, open_player
from flowrl.experts import checkpoint
from flowrl.experts.inquiry import Desk, read_inquiry, write_answers
from flowrl.experts.merge import Blended, Compared, Evidence, Question, Unanswered
from flowrl.experts.remapping import Remapping
from flowrl.experts.store import ExpertStore
from flowrl.launchers import process
from flowrl.parallel.training_setup import expected_shapes
from flowrl.paths import GraphPaths, RunPaths
from flowrl.ppo.trainer import use_compile_cache
from flowrl.runs import read_run

EPISODES = 256


def main(argv: Sequence[str] | None = None) -> int:
    """Answer one inquiry; returns the exit code."""
    graph, run_id = sys.argv[1:] if argv is None else argv
    console.start_logging()
    return console.guarded(lambda: _work(GraphPaths(Path(graph)), run_id))


def blended(current: Any, candidate: Any, gains: tuple[int, int]) -> Any:
    """The mean of two trees of arrays by the frames of each side, never outside of the two.

    >>> blended({"w": np.float32([0, 1])}, {"w": np.float32([1, 1])}, (1, 3))["w"].tolist()
    [0.75, 1.0]
    """
    share = gains[1] / (gains[0] + gains[1])

    def mix(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        mean = one.astype(np.float64) * (1.0 - share) + other.astype(np.float64) * share
        return np.clip(mean, np.minimum(one, other), np.maximum(one, other)).astype(one.dtype)

    return jax.tree.map(mix, current, candidate)


def _work(layout: GraphPaths, run_id: str) -> int:
    desk = Desk(layout.comparisons / run_id)
    inquiry = read_inquiry(desk)
    if inquiry is None:
        raise FileRefusedError(f"{desk.inquiry} is gone; nothing is left to compare")
    signal.setitimer(signal.ITIMER_REAL, inquiry.limit_seconds)  # SIGALRM ends us, whatever hangs
    pid = os.getpid()
    storage.write_json(
        desk.worker, {"format": 1, "pid": pid, "start_time": process.start_time_of(pid)}
    )
    storage.fault_point("comparing.begun")
    place = RunPaths(layout.training_runs / inquiry.run_folder, inquiry.expert)
    answers = [_answer(layout, desk, place, question) for question in inquiry.questions]
    storage.fault_point("comparing.found")
    write_answers(desk, answers)
    return 0


def _answer(layout: GraphPaths, desk: Desk, place: RunPaths, question: Question) -> Evidence:
    try:
        if question.kind == "blend":
            return _blend(layout, desk, place, question)
        return _compare(layout, place, question)
    except FlowrlError as error:
        return Unanswered(question=question, why=str(error).partition("\n")[0])


def _blend(layout: GraphPaths, desk: Desk, place: RunPaths, question: Question) -> Blended:
    like = checkpoint.like_of(expected_shapes(read_run(place).config))
    current, candidate = _copies(layout, place, question, like)
    mean = blended(current, candidate, question.gains)
    folder = desk.blend(question.expert)
    storage.remove_tree(folder)  # of an earlier try
    checkpoint.save_expert(folder, mean)
    return Blended(
        question=question,
        folder=folder,
        sha256=storage.tree_digest(folder),
        content=checkpoint.array_digest(mean),
    )


def _compare(layout: GraphPaths, place: RunPaths, question: Question) -> Compared:
    """Let both copies walk the plan of the expert's own skill, with the same luck."""
    archive = _archive(layout, place, question.expert)
    run, module = read_run(archive), open_module(archive.module)
    config = configs.from_json(PPOConfig, run.config)
    use_compile_cache(config.compile_cache)
    play, luck = open_player(config, module), jax.random.key(_seed(question))
    others = load_experts(ExpertStore(layout), run)
    copies = _copies(layout, place, question, checkpoint.like_of(expected_shapes(run.config)))
    local = run.experts.index(question.expert)
    current, candidate = (play(_with(others, local, copy), luck, EPISODES) for copy in copies)
    lost, won = current.success[:, -1], candidate.success[:, -1]
    return Compared(
        question=question,
        wins=int((won & ~lost).sum()),
        losses=int((lost & ~won).sum()),
        ties=int((won == lost).sum()),
    )


def _seed(question: Question) -> int:
    return int(hashlib.sha256(repr(question).encode()).hexdigest()[:7], 16)


def _archive(layout: GraphPaths, place: RunPaths, expert: int) -> RunPaths:
    """The run that knows the plan and the module of an expert's skill."""
    if expert == place.expert:
        return place
    version = ExpertStore(layout).manifest().experts[expert]
    return RunPaths(layout.skill_folder(expert, version.skill), expert)


def _copies(layout: GraphPaths, place: RunPaths, question: Question, like: Any) -> tuple[Any, Any]:
    """The arrays that count and those that the run brings, just as they were asked about."""
    store, run = ExpertStore(layout), read_run(place)
    version = store.manifest().experts[question.expert]
    local = Remapping(run.experts).global_to_local[question.expert]
    current = checkpoint.load_expert(store.verify(version), like)
    candidate = checkpoint.load_expert(place.final(local), like)
    for copy, wanted in ((current, question.current), (candidate, question.candidate)):
        if checkpoint.array_digest(copy) != wanted:
            raise ExpertCorruptError(
                f"expert {question.expert} is another one than was asked about; merge again"
            )
    return current, candidate


def _with(stacked: Any, local: int, expert: Any) -> Any:
    return jax.tree.map(lambda leaves, leaf: leaves.at[local].set(leaf), stacked, expert)


if __name__ == "__main__":
    sys.exit(main())
