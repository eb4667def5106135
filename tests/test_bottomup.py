"""The programs with stand-in trainers: what the sequential one adds, and what Ctrl-C says."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

import pytest

from flowrl import bottomup, bottomup_parallel, cli, console, notices, storage
from flowrl.config import PPOConfig
from flowrl.errors import EXIT_DISK_FULL, EXIT_IO, FileRefusedError
from flowrl.launchers.sandbox import may_pass
from flowrl.parallel import start
from flowrl.parallel.skill_sources import record_graph
from flowrl.paths import GraphPaths
from tests import sealing
from tests.parallel.making import TABLE, WOOD
from tests.parallel.stand_in_story import Place, replace_trainers


@pytest.mark.usefixtures("unchanged_sigterm")
def test_skills_are_trained_one_after_another_without_tmux(tmp_path, monkeypatch):
    replace_trainers(monkeypatch.setattr)
    monkeypatch.setenv("PATH", "")
    place = Place(tmp_path)
    assert bottomup.main([f"--graph_path={place.graph_paths.root}", "--target_skill", TABLE]) == 0
    assert place.launches() == [WOOD, TABLE]
    assert set(place.statuses().values()) == {"completed"}
    assert notices.read(place.graph_paths)["requested"] == (
        "skills asked for: 2, added one by one; goal: 80% success in training; slots: 1"
    )


@pytest.mark.usefixtures("unchanged_sigterm")
def test_notices_tell_the_slots_of_this_start(tmp_path, monkeypatch):
    replace_trainers(monkeypatch.setattr)
    place = Place(tmp_path)
    words = [f"--graph_path={place.graph_paths.root}", "--target_skill", WOOD, "--launcher=local"]
    assert bottomup_parallel.main([*words, "--auto_scaling"]) == 0
    shown = notices.read(place.graph_paths)
    assert shown["scaling"] == "runs side by side: 1 of 1 to 3"
    assert shown["requested"] == "skills asked for: 1; goal: 80% success in training"
    assert bottomup_parallel.main(words) == 0
    shown = notices.read(place.graph_paths)
    assert "scaling" not in shown
    assert shown["requested"].endswith("; slots: 3")


@pytest.mark.usefixtures("unchanged_sigterm")
@pytest.mark.parametrize("program", [bottomup, bottomup_parallel], ids=lambda one: one.__name__)
@pytest.mark.parametrize("activated", [True, False])
def test_ctrl_c_says_that_runs_go_on_and_how_to_continue(program, activated, monkeypatch, capsys):
    def interrupted(_, **__):
        raise KeyboardInterrupt

    python = Path(sys.executable).with_name("python")
    monkeypatch.setenv("PATH", str(python.parent) if activated else "")
    monkeypatch.setattr(program, "train_graph", interrupted)
    assert program.main(["--max_nodes=3"]) == console.EXIT_INTERRUPTED
    said = capsys.readouterr().err
    assert "go on in their sessions" in said
    called = "python" if activated else python
    assert f"To go on: {called} -m {program.__name__} --max_nodes=3\n" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--graph_path="], "--graph_path has no value"),
        (["--graph-path", ""], "--graph-path has no value"),
        (["--graph-path=FILE"], "FILE is no graph, which is a folder"),
        (["--graph-path=FILE/graph"], "FILE/graph cannot be written (Not a directory"),
        (["--compile_cache=FILE/cache"], "FILE/cache cannot be written (Not a directory"),
        (["--compile_cache=/proc/self"], "/proc/self cannot be written ("),
        (["--coverage_bonus=-1"], "--coverage_bonus is -1.0: must be at least 0"),
        (["--coverage_bonus=0.1", "--no_sight"], "--coverage_bonus 0.1 needs experts that see"),
        (["--use_wandb"], "pip install '.[wandb]'"),
    ],
)
@pytest.mark.usefixtures("unchanged_sigterm")
def test_what_every_run_would_lack_is_refused_first(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    (tmp_path / "FILE").touch()
    assert bottomup.main(words) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "FILE"]


@pytest.mark.usefixtures("unchanged_sigterm")
def test_a_disk_without_room_for_the_folders_is_no_wrong_flag(tmp_path, monkeypatch, capsys):
    def fail(path, **_):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(start.storage, "make_dir", fail)
    assert bottomup.main([f"--graph_path={tmp_path / 'graph'}"]) == EXIT_DISK_FULL
    assert "No space left on device" in capsys.readouterr().err


def test_a_full_disk_has_an_exit_code_of_its_own():
    def refused():
        raise FileRefusedError("no room") from OSError(errno.ENOSPC, "No space left on device")

    def broken():
        raise OSError(errno.EIO, "Input/output error")

    assert (console.guarded(refused), console.guarded(broken)) == (EXIT_DISK_FULL, EXIT_IO)


def test_xla_does_not_report_a_slow_compilation_as_an_error(monkeypatch):
    """Without this a trainer's log shows "Very slow compile?" and a request to file a bug."""
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "")
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    console.start_logging()
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "3"
    assert may_pass("TF_CPP_MIN_LOG_LEVEL"), "trainers get it"


@pytest.mark.usefixtures("unchanged_sigterm")
@pytest.mark.parametrize("flag", ["sight", "egocentric"])
def test_a_graph_whose_experts_see_less_is_not_trained_on_as_if_they_saw_more(
    tmp_path, capsys, flag
):
    record_graph(GraphPaths(storage.make_dir(tmp_path / "graph")), PPOConfig(**{flag: False}))
    assert bottomup.main([f"--graph_path={tmp_path / 'graph'}"]) == 2
    said = capsys.readouterr().err
    assert f"was begun with --no_{flag}, not --{flag} (graph.json); give that, or another" in said


def test_a_graph_of_an_earlier_version_is_not_egocentric(tmp_path, capsys):
    graph_paths = GraphPaths(storage.make_dir(tmp_path / "graph"))
    record_graph(graph_paths, PPOConfig(egocentric=False))
    old = json.loads(graph_paths.graph_json.read_text())
    assert old.pop("egocentric") is False
    graph_paths.graph_json.write_text(json.dumps(old))
    sealing.reseal(graph_paths.graph_json)
    assert bottomup.main([f"--graph_path={tmp_path / 'graph'}"]) == 2
    assert "was begun with --no_egocentric, not --egocentric" in capsys.readouterr().err
    assert cli.main(["plan", str(graph_paths.root), "Collect Wood"]) == 0
    assert "Collect Wood" in capsys.readouterr().out


@pytest.mark.usefixtures("unchanged_sigterm")
@pytest.mark.parametrize("number", [errno.ENOTCONN, errno.EIO, errno.ESTALE])
def test_a_disk_that_is_cut_off_at_the_start_is_no_wrong_flag(
    tmp_path, monkeypatch, capsys, number
):
    """The same command works once the disk is back, so another folder is no remedy."""

    def fail(folder: Path) -> None:
        raise OSError(number, os.strerror(number), str(folder))

    monkeypatch.setattr(storage, "try_writing", fail)
    words = [f"--graph_path={tmp_path / 'graph'}", "--launcher=local", "--no_use_wandb"]
    assert bottomup_parallel.main(words) == EXIT_IO
    assert "choose another" not in capsys.readouterr().err
