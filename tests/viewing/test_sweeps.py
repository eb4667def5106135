"""Pictures of sweeps, and what they say is important."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from flowrl import cli, storage
from flowrl.errors import ConfigError
from flowrl.tuning.surrogate import fit
from flowrl.viewing.sweeps import importance, sweep_picture
from tests.tuning.making import a_sweep, a_trial

TRIED = [
    *(a_trial(number, 10 ** (-4 + number / 4), 0.9 - abs(number - 4) / 10) for number in range(8)),
    a_trial(8, 1e-2),
    replace(cut := a_trial(9, 1e-2, 0.2), outcome=replace(cut.outcome, cut_at=512)),
]


def labels_of(picture):
    return [axes.get_xlabel() for axes in picture.figure.axes if axes.axison]


def test_a_sweep_is_drawn_by_its_trials(tmp_path):
    picture = sweep_picture(a_sweep(tmp_path), TRIED)
    assert picture.title == "Collect Wood: 9 of 10 trials have a score"
    assert [row["trial"] for row in picture.rows] == list(range(10))
    assert picture.rows[4]["score"] == 0.9
    assert picture.rows[8]["why"] == "exit 65"
    history, *_ = picture.figure.axes
    named = {line.get_label(): list(line.get_ydata()) for line in history.lines}
    assert named["failed"] == [0.0]
    assert named["cut"] == [0.2]
    assert named["best so far"][-1] == max(named["ended"]) == 0.9
    assert "frames so far" in labels_of(picture)
    assert picture.written(".svg").startswith(b"<?xml")


def test_two_objectives_have_a_front(tmp_path):
    sweep = a_sweep(tmp_path, objective="success=1,frames=1")
    for number, success, frames in ((0, 0.9, 9000), (1, 0.5, 2000), (2, 0.4, 3000)):
        figures = {"success_rate": success, "mean_episode_length": 5, "mean_episode_return": 1}
        run_paths = sweep.run(number)
        storage.make_dir(run_paths.folder)
        line = {"frames": frames, "seconds": 1, **figures}
        run_paths.metrics.write_text(json.dumps(line) + "\n")
    front = sweep_picture(sweep, TRIED[:3]).figure.axes[3]
    shown = {line.get_label(): list(line.get_xdata()) for line in front.lines}
    assert shown["trials"] == [0.9, 0.5, 0.4]
    assert shown["front"] == [0.9], "frames count as the worst where the goal is not reached"


def test_what_changes_nothing_is_not_important():
    points = np.random.default_rng(1).random((40, 3))
    first, second, third = importance(fit(points, np.sin(3 * points[:, 0]) + points[:, 2]), points)
    assert second < 0.02 < 0.1 < min(first, third)


def test_a_sweep_without_scores_cannot_be_drawn(tmp_path):
    with pytest.raises(ConfigError, match="has a score yet; plot it later"):
        sweep_picture(a_sweep(tmp_path), [a_trial(1, 1e-3)])


def test_the_agents_of_a_run_folder_are_drawn(tmp_path, capsys):
    run, picture = tmp_path / "run", tmp_path / "returns.svg"
    run.mkdir()
    lines = [{"frames": n, "agent_0/return": n / 2, "agent_1/return": None} for n in range(5)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert cli.main(["plot", str(run), "-o", str(picture), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["picture"] == str(picture)
    last = {"frames": 4.0, "agent_0/return": 2.0, "agent_1/return": None}
    assert document["rows"][-1] == last
    assert cli.main(["plot", str(run), "--metric", "retrun"]) == 2
    said = capsys.readouterr().err
    assert "--metric retrun is not in metrics.jsonl; closest is 'return'; it has: " in said
    (run / "metrics.jsonl").write_text('{"frames": 1, "agent_x": 2}\n')
    assert cli.main(["plot", str(run), "--metric", "nosuch"]) == 2
    assert "it has: agent_x, frames" in capsys.readouterr().err
