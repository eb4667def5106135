from __future__ import annotations

import builtins
import json
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboardX.proto.event_pb2 import Event

from flowrl.config import PPOConfig, flags
from flowrl.errors import ConfigError
from flowrl.paths import RunPaths
from flowrl.ppo.trackers import Guarded, JsonLines, TensorBoard, open_trackers


class Recorder:
    def __init__(self) -> None:
        self.logged: list[tuple[dict, int]] = []
        self.closed = False

    def log(self, figures, *, frames):
        self.logged.append((dict(figures), frames))

    def close(self):
        self.closed = True


class FullDisk(Recorder):
    def log(self, figures, *, frames):
        super().log(figures, frames=frames)
        raise OSError(28, "No space left on device")


@pytest.fixture
def run_paths(tmp_path):
    return RunPaths(tmp_path, 0)


def test_a_line_of_metrics_is_json_even_when_a_figure_is_no_number(run_paths):
    tracker = JsonLines(run_paths, 0)
    tracker.log({"loss": float("nan"), "success_rate": 0.5}, frames=64)
    tracker.log({"loss": 1.0}, frames=128)
    lines = [json.loads(line) for line in run_paths.metrics.read_text().splitlines()]
    assert lines == [
        {"frames": 64, "loss": None, "success_rate": 0.5},
        {"frames": 128, "loss": 1.0},
    ]


@pytest.mark.parametrize(
    ("frames", "left"), [(0, []), (64, [64]), (100, [64]), (128, [64, 128]), (999, [64, 128])]
)
def test_a_run_that_goes_back_forgets_the_lines_beyond(run_paths, frames, left):
    tracker = JsonLines(run_paths, frames)  # there is none yet
    for logged in (64, 128):
        tracker.log({"loss": 1.0}, frames=logged)
    with run_paths.metrics.open("a") as file:
        file.write('{"frames": 1')  # torn by a kill
    JsonLines(run_paths, frames).log({"loss": 1.0}, frames=frames + 1)
    lines = [json.loads(line) for line in run_paths.metrics.read_text().splitlines()]
    assert [line["frames"] for line in lines] == [*left, frames + 1]


def events_in(file: Path) -> list[Event]:
    """TensorBoard's records: a length and its checksum, an event and its checksum."""
    content, events = file.read_bytes(), []
    while content:
        (length,) = struct.unpack_from("<Q", content)
        events.append(Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    return events


def test_tensorboard_is_told_from_where_a_run_goes_on(run_paths):
    tracker = TensorBoard(run_paths, 64)
    tracker.log({"loss": 1.0}, frames=65)
    tracker.close()
    (file,) = run_paths.tensorboard.iterdir()
    assert file.name.startswith("events.")
    assert [event.step for event in events_in(file) if event.HasField("session_log")] == [65]


def test_a_tracker_that_fails_is_left_out_and_the_others_go_on(caplog):
    full, good = FullDisk(), Recorder()
    trackers = Guarded([full, good])
    trackers.log({"loss": 1.0}, frames=1)
    trackers.log({"loss": 2.0}, frames=2)
    trackers.close()
    assert len(full.logged) == 1
    assert [frames for _, frames in good.logged] == [1, 2]
    assert good.closed
    assert "FullDisk is left out" in caplog.text


def test_weights_and_biases_without_its_package_says_what_to_install(run_paths, monkeypatch):
    real = builtins.__import__

    def without_wandb(name, *rest, **more):
        if name == "wandb":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_wandb)
    with pytest.raises(ConfigError, match=r"pip install '\.\[wandb\]'"):
        open_trackers(run_paths, WANDB, run_id="e0.a1.0badcafe", frames=0)


WANDB = flags(PPOConfig(use_wandb=True))


class FakeWandb(Recorder):
    """As much of wandb as is used."""

    class Error(Exception):
        pass

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.errors = SimpleNamespace(Error=self.Error)
        self.fails = fails
        self.settings: dict = {}

    def init(self, **settings):
        self.settings = settings
        return SimpleNamespace(log=self.take, finish=self.close)

    def take(self, figures, step):
        self.logged.append((figures, step))
        if self.fails:
            raise self.Error("the network is gone")


@pytest.mark.parametrize(
    ("key_place", "mode"),
    [("nowhere", "offline"), ("environment", None), ("netrc", None)],
    ids=["no key", "a key in the environment", "a key in .netrc"],
)
def test_weights_and_biases_works_offline_when_there_is_no_key(
    run_paths, monkeypatch, key_place, mode
):
    wandb = FakeWandb()
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(run_paths.folder))
    if key_place == "environment":
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    if key_place == "netrc":
        netrc = run_paths.folder / ".netrc"
        netrc.write_text("machine api.wandb.ai login user password k\n")
        netrc.chmod(0o600)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    trackers = open_trackers(run_paths, WANDB, run_id="e0.a1.0badcafe", frames=0)
    trackers.log({"loss": 1.0}, frames=64)
    trackers.close()
    assert wandb.settings["mode"] == mode
    assert wandb.settings["id"] == "e0-a1-0badcafe"
    assert "seed" in wandb.settings["config"]
    assert wandb.logged == [({"loss": 1.0}, 64)]
    assert wandb.closed


def test_a_network_that_goes_away_does_not_stop_training(run_paths, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(fails=True))
    trackers = open_trackers(run_paths, WANDB, run_id="e0.a1.0badcafe", frames=0)
    trackers.log({"loss": 1.0}, frames=64)
    assert "the network is gone" in caplog.text
    assert run_paths.metrics.exists()
