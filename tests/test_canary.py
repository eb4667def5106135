"""Canaries among the secrets of a whole training: none is found in the graph's folder."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.launchers.tmux import TmuxLauncher
from tests.leaking_story import FAILING
from tests.parallel.making import WOOD
from tests.parallel.stand_in_story import DEADLINE_SECONDS, ROOT, Place
from tests.waiting import until

CANARIES = {
    "WANDB_API_KEY": "canary-wandb-5f2c",
    "MY_TOKEN": "canary-token-81aa",
    "PLAIN_NAME": "canary-plain-e0e0",
    "OPENAI_API_KEY": "canary-openai-77b1",
    "NOT_ALLOWED": "canary-not-allowed-1",
}
PASSED = ("MY_TOKEN", "PLAIN_NAME")


pytestmark = pytest.mark.tmux


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A graph in which one skill was trained and one has failed, and what the daemon said."""
    place = Place(tmp_path_factory.mktemp("canary"))
    socket = str(place.folder / "socket")
    words = [
        *(sys.executable, "-m", "tests.leaking_story", f"--graph_path={place.graph_paths.root}"),
        *(f"--target_skill={FAILING}", "--max_retries=1", "--retry_backoff=0.01", "--use_wandb"),
        *(f"--tmux_socket={socket}", "--pass_env", *PASSED),
    ]
    # Whoever shares a folder by mistake has such a umask.
    done = subprocess.run(
        words,
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        cwd=ROOT,
        env={**os.environ, **CANARIES},
        umask=0,
    )
    assert done.returncode == 1, done.stderr
    assert place.statuses() == {WOOD: "completed", FAILING: "failed"}, done.stderr
    yield place, done.stdout + done.stderr
    TmuxLauncher(socket).server.run("kill-server")


def everything(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def test_the_trainers_have_talked(trained):
    """Or else the tests below would show nothing."""
    place, _ = trained
    paths = list(place.graph_paths.root.rglob("training.log"))
    assert len(paths) == 3, "one archived, two failed"
    last = "401 for [redacted] and [redacted]"
    until(lambda: sum(path.read_text().count(last) for path in paths) == 2)
    for log in [path.read_text() for path in paths]:
        assert "plain [redacted]" in log
        assert "logged [redacted]" in log
        assert log.count("[redacted]") >= 3 * 5


@pytest.mark.parametrize("name", CANARIES)
def test_no_canary_is_anywhere_in_the_graph(trained, name):
    place, said = trained
    word = CANARIES[name].encode()
    assert [path for path in everything(place.graph_paths.root) if word in path.read_bytes()] == []
    assert CANARIES[name] not in said


def test_the_names_of_passed_variables_are_recorded_and_not_their_values(trained):
    place, _ = trained
    text = place.graph_paths.config_json.read_text()
    assert all(name in text for name in PASSED)


def test_everything_is_for_its_owner_alone(trained):
    place, _ = trained
    for path in [place.graph_paths.root, *place.graph_paths.root.rglob("*")]:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path} {mode:o}"
