from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from flowrl.config import PPOConfig
from flowrl.paths import RunPaths
from flowrl.ppo import progress
from flowrl.ppo.loop import Counters, UpdateReport
from flowrl.ppo.run_io import Assignment
from flowrl.rates import Rates
from flowrl.runs import REPORT, STANDALONE, PlannedStep, TrainingRun, read_progress

PLAN = (
    PlannedStep(skill="Collect [bold]Wood[/]", count=3, expert=0),
    PlannedStep(skill="Make Pickaxe", count=1, expert=12),
)
RATES = Rates(
    step_success=(0.91, 0.42),
    mean_episode_length=20.0,
    mean_episode_return=1.0,
    episodes=256,
    full=True,
)


def update(frames: int, *, ended: bool = False, clipped: float = 0.0) -> UpdateReport:
    counters = Counters(updates=frames // 64, frames=frames, acted=(frames, 0))
    return UpdateReport(
        learner=None,  # type: ignore[arg-type]
        counters=counters,
        rates=RATES,
        figures={"clipped_rewards": clipped},
        counts=np.full((2, 6), 3),
        ended_episodes=5,
        reached=False,
        ended=ended,
        stop=0,
        episodes=None,  # type: ignore[arg-type]
    )


@pytest.fixture
def now(monkeypatch):
    """The seconds that the clock shows."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def reporter(folder: Path, **flags: float) -> progress.Reporter:
    run = TrainingRun(
        run_id=STANDALONE,
        skill="Make Pickaxe",
        expert=12,
        attempt=1,
        plan=PLAN,
        experts=(0, 12),
        ancestors=(),
        config={},
    )
    assignment = Assignment(RunPaths(folder, 12), run)
    return progress.Reporter(assignment, PPOConfig(num_envs=8, num_steps=8, **flags))  # type: ignore[arg-type]


def test_rewards_that_were_clipped_are_counted_over_all_updates(tmp_path, now, caplog):
    caplog.set_level("INFO", logger="flowrl")
    shown = reporter(tmp_path)
    shown.begin_training(Counters(acted=(0, 0)))
    for frames, share in ((64, 0.0), (128, 3 / 64), (192, 1.0)):
        now[0] += progress.LINE_SECONDS
        shown.report(update(frames, clipped=share))
    shown.close()
    lines = caplog.messages[:-1]  # the last is the curve
    assert ["clipped" in line for line in lines] == [False, False, False, True, True]
    assert "3 rewards clipped to ±10,000" in caplog.messages[3]
    assert "67 rewards clipped to ±10,000" in caplog.messages[4]
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert line["clipped_rewards"] == 0.0


def test_there_is_a_line_every_few_seconds_and_at_each_phase(tmp_path, now, caplog):
    caplog.set_level("INFO", logger="flowrl")
    shown = reporter(tmp_path)
    shown.begin_training(Counters(acted=(0, 0)))
    for seconds in (1.0, 2.0, progress.LINE_SECONDS, progress.LINE_SECONDS + 0.5):
        now[0] = 100.0 + seconds
        shown.report(update(64 * round(100 * seconds)))
    shown.report(update(64_000, ended=True))
    shown.close()
    phases = [line.split()[0] for line in caplog.messages]
    assert phases == ["compiling", "training", "training", "saving", "success"]
    line = caplog.messages[2]
    assert "Collect [bold]Wood[/] 91%, Make Pickaxe 42%" in line
    assert "6,400 steps/s" in line
    assert "at most 0:25:58 left" in line
    assert "left" not in caplog.messages[0], "nothing is known yet"


def test_there_is_a_speed_from_the_first_update_of_a_launch_on(tmp_path, now):
    shown = reporter(tmp_path)
    begun = read_progress(RunPaths(tmp_path, 12))
    shown.begin_training(Counters(acted=(0, 0), updates=10, frames=640))
    resumed = read_progress(RunPaths(tmp_path, 12))
    now[0] += progress.LINE_SECONDS
    shown.report(update(704))
    shown.close()
    speeds = [
        one.steps_per_second for one in (begun, resumed, read_progress(RunPaths(tmp_path, 12)))
    ]
    assert speeds[:2] == [0, 0]
    assert speeds[2] > 0


def test_each_line_of_metrics_has_the_speed_up_to_it(tmp_path, now):
    shown, second = reporter(tmp_path, log_seconds=0.0), 0.1 * progress.PROGRESS_SECONDS
    shown.begin_training(Counters(acted=(0, 0), updates=0, frames=0))
    for frames in (640, 1920):
        now[0] += second
        shown.report(update(frames))
    shown.close()
    lines = RunPaths(tmp_path, 12).metrics.read_text().splitlines()
    speeds = [json.loads(line)["steps_per_second"] for line in lines]
    assert speeds == pytest.approx([640 / second, 1920 / (2 * second)])


def test_a_line_counts_the_episodes_since_the_line_before(tmp_path, now):
    shown = reporter(tmp_path, log_seconds=1.0)
    shown.begin_training(Counters(acted=(0, 0)))
    for seconds in (0.0, 0.3, 0.6, 1.1, 1.2):
        now[0] = 100.0 + seconds
        shown.report(update(64, ended=seconds == 1.2))
    shown.close()
    lines = RunPaths(tmp_path, 12).metrics.read_text().splitlines()
    assert [json.loads(line)["episodes"] for line in lines] == [5, 15, 5]


def test_a_log_ends_with_the_curve_of_all_starts_and_has_it_every_minute(tmp_path, now, caplog):
    caplog.set_level("INFO", logger="flowrl")
    line = {"seconds": 1.0, "mean_episode_length": 9.0, "mean_episode_return": 0.0}
    earlier = [{"frames": 640 * n, "success_rate": 0.0, **line} for n in (1, 2, 99)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in earlier))
    shown = reporter(tmp_path)
    shown.begin_training(Counters(acted=(0, 0), updates=20, frames=1280))
    for seconds in (1.0, progress.CURVE_SECONDS + 1):
        now[0] = 100.0 + seconds
        shown.report(update(round(1280 + 20 * seconds)))
    now[0] += 1
    shown.report(update(2560, ended=True))
    shown.close()
    drawn = [one for one in caplog.messages if one.startswith("success")]
    assert len(drawn) == 2
    assert drawn[-1] == caplog.messages[-1]
    assert REPORT in drawn[-1], "it is no reason of an end"
    assert drawn[-1].endswith("▏ 42%; 0 to 100% over 2,560 frames")
    blocks = drawn[-1].partition("▕")[2].partition("▏")[0]
    assert blocks[:20] == " " * 20, "the earlier start"
    assert blocks[-1] == "▃"
    assert len(drawn[-1]) < 100


def test_a_run_without_a_figure_draws_no_curve(tmp_path, caplog):
    caplog.set_level("INFO", logger="flowrl")
    (tmp_path / "metrics.jsonl").write_text('{"frames": 0, "seconds": "edited"}\n')
    shown = reporter(tmp_path)
    shown.begin_training(Counters(acted=(0, 0)))
    shown.close()
    assert not any(line.startswith("success") for line in caplog.messages)
