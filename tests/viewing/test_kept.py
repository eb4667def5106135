"""Films and recorded episodes beside an expert: none without its graph, and the newest counts."""

from __future__ import annotations

import io
import os
import shutil

import numpy as np
import pytest

import flowrl
from flowrl import cli
from flowrl.api import PlayOrder
from flowrl.errors import FileRefusedError
from flowrl.measures.causes import EvaluationReport, StepRate
from flowrl.measures.episodes import decode_episodes
from flowrl.paths import GraphPaths
from flowrl.runs import StepEnds
from flowrl.serving.documents import film_of_skill
from tests.parallel.making import WOOD, train
from tests.viewing.making import a_row
from tests.viewing.test_episodes import recorded

ENDS = ("begun", "done", "died", "cut", "running", "timesteps")


@pytest.fixture
def graph_paths(tmp_path) -> GraphPaths:
    graph_paths = GraphPaths(tmp_path / "graph")
    train(graph_paths, WOOD, 0, {}, acted={0: 50})
    return graph_paths


def removing(graph_paths: GraphPaths, content: bytes):
    """A confined process that plays while its graph is removed."""

    def run(*_: object, **__: object) -> bytes:
        shutil.rmtree(graph_paths.root)
        return content

    return run


def test_a_graph_that_is_removed_meanwhile_keeps_no_recording(graph_paths, monkeypatch):
    content = b"{}\n" + recorded([3]).encode()
    monkeypatch.setattr("flowrl.api.confined_run", removing(graph_paths, content))
    with pytest.raises(FileRefusedError, match="is no graph"):
        flowrl.evaluate(graph_paths.root, WOOD, record=1)
    assert not graph_paths.root.exists()


def test_a_recording_of_no_failure_is_kept_and_read(graph_paths, monkeypatch, capsysbinary):
    """All episodes succeeded, and only failures were asked for."""
    facts = {
        "success_rate": 1.0,
        "low": 1.0,
        "high": 1.0,
        "ends": StepEnds(**dict.fromkeys(ENDS, 0)),
    }
    step = StepRate(skill=WOOD, count=1, expert=0, successes=8, **facts)
    numbers = {"mean_episode_length": 1.0, "mean_episode_return": 1.0, "deaths": 0.0}
    names = {"graph": "g", "generation": 1, "skill": WOOD, "episodes": 8, "clipped_rewards": 0}
    played = EvaluationReport(**names, **numbers, steps=(step,)), recorded([])
    monkeypatch.setattr("flowrl.evaluation.evaluate", lambda *_, **__: played)

    def run(order: PlayOrder, *_: object, **__: object) -> bytes:
        order.work()
        return capsysbinary.readouterr().out

    monkeypatch.setattr("flowrl.api.confined_run", run)
    assert flowrl.evaluate(graph_paths.root, WOOD, episodes=8, record_failures=2) == played[0]
    file = graph_paths.archive(0, WOOD).folder / "episodes.npz"
    assert len(decode_episodes(file.read_bytes(), str(file))) == 0


def test_a_graph_that_is_removed_meanwhile_keeps_no_film(graph_paths, monkeypatch, capsys):
    content = io.BytesIO()
    frames = np.zeros((2, 8, 8, 3), np.uint8)
    np.savez(content, frames=frames, captions=np.array(["a", "b"]), holds=np.zeros(2))
    play = removing(graph_paths, content.getvalue())
    monkeypatch.setattr("flowrl.commands.play.confined_run", play)
    assert cli.main(["play", str(graph_paths.root), WOOD, "--keep"]) == 1
    assert "is no graph" in capsys.readouterr().err
    assert not graph_paths.root.exists()


@pytest.mark.parametrize("newest", ["video.mp4", "video.gif"])
def test_the_film_that_was_kept_last_is_shown(graph_paths, newest):
    folder = graph_paths.archive(0, WOOD).folder
    for name in ("video.mp4", "video.gif"):
        (folder / name).write_bytes(b"film")
        os.utime(folder / name, (1, 2 if name == newest else 1))
    film = film_of_skill(graph_paths, a_row(WOOD, expert=0))
    assert film == folder / newest


def test_a_film_is_not_kept_beside_another_run_than_it_shows(graph_paths, monkeypatch, capsys):
    content = io.BytesIO()
    np.savez(content, frames=np.zeros((1, 8, 8, 3), np.uint8), captions=["a"], holds=[0.0])

    def run(*_: object, **__: object) -> bytes:
        train(graph_paths, WOOD, 0, {}, acted={0: 20})
        return content.getvalue()

    monkeypatch.setattr("flowrl.commands.play.confined_run", run)
    assert cli.main(["play", str(graph_paths.root), WOOD, "--keep"]) == 75
    assert f"{WOOD} was merged anew meanwhile; play it again" in capsys.readouterr().err
    assert film_of_skill(graph_paths, a_row(WOOD, expert=0)) is None
