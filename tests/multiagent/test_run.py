"""A run's folder: what it leaves, what it goes on from, and what it refuses."""

from __future__ import annotations

import gc
import json
import logging
import re
import shutil
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from flowrl import runs
from flowrl.command_line import parse
from flowrl.errors import BusyError, ConfigError, ExpertCorruptError, TrainingError
from flowrl.experts import checkpoint
from flowrl.multiagent import run
from flowrl.multiagent.config import IndependentConfig
from flowrl.multiagent.own_worlds import MatchTheSign
from flowrl.multiagent.run import IndependentResult
from flowrl.paths import IndependentPaths
from flowrl.ppo import progress
from flowrl.runs import expert_shapes
from flowrl.storage import locks, records

EPOCHS = 5
TINY = (
    "--world=match_the_sign",
    "--agents=3",
    f"--epochs={EPOCHS}",
    "--num_envs=4",
    "--num_steps=8",
    "--layer_size=8",
    "--num_minibatches=2",
    "--update_epochs=1",
)


def never() -> None:
    return None


def stop_after(epochs: int):
    """A stop that is requested in the last of so many epochs."""
    asked = iter([None] * (epochs - 1) + [85])
    return lambda: next(asked)


@pytest.fixture(scope="module")
def programs() -> dict:
    """Compiled programs and fresh agents, by what they are made of."""
    return {}


@pytest.fixture
def train(tmp_path, monkeypatch, programs):
    """Trains in a folder of its own; returns its paths."""
    real = run._programs

    def shared(of):
        key = of.config.learner, type(of.world)
        if key not in programs:
            programs[key] = real(of)
        return programs[key]

    monkeypatch.setattr(run, "_programs", shared)

    def trained(*words, stop=never, expected=0, folder="run"):
        argv = [*TINY, f"--run_folder={tmp_path / folder}", *words]
        assert run.train(parse(IndependentConfig, argv), stop) == expected
        return IndependentPaths(tmp_path / folder)

    return trained


@pytest.fixture(scope="module")
def stopped_once() -> list:
    return []


@pytest.fixture
def stopped(train, stopped_once, tmp_path):
    """A run that was stopped after one epoch, in the folder that `train` goes on in."""
    if not stopped_once:
        stopped_once.append(train(stop=stop_after(1), expected=85, folder="first").folder)
    shutil.copytree(stopped_once[0], tmp_path / "run")
    return IndependentPaths(tmp_path / "run")


def result(run_paths: IndependentPaths) -> IndependentResult:
    return records.read(run_paths.result_json, IndependentResult)


def contents(run_paths: IndependentPaths) -> list[str]:
    """A digest of each agent's parameters."""
    return [report.content for report in result(run_paths).agents]


def lines(run_paths: IndependentPaths) -> list[dict]:
    return [json.loads(line) for line in run_paths.metrics.read_text().splitlines()]


def test_a_run_leaves_what_it_did_and_each_agent_alone(train):
    run_paths = train("--timeline")
    found = result(run_paths)
    assert (found.epochs, found.frames, found.frozen) == (EPOCHS, EPOCHS * 4 * 8, ())
    for agent, sizes in enumerate([(2, 2), (3, 3), (4, 4)]):
        like = checkpoint.like_of(expert_shapes(*sizes, 8))
        params = checkpoint.load_expert(run_paths.final(agent), like)
        assert checkpoint.array_digest(params) == found.agents[agent].content
    assert [line["epoch"] for line in lines(run_paths)] == list(range(EPOCHS))
    assert [line["lag"] for line in lines(run_paths)] == [0, 1, 1, 1, 1]
    for line in lines(run_paths):
        assert line["agent_2/return"] >= 0
        assert {"agent_0/loss", "agent_1/entropy", "buffer_age", "learn_seconds"} <= set(line)
    progress = runs.read_progress(run_paths)
    assert (progress.updates, progress.frames) == (EPOCHS, progress.total_frames)
    assert not run_paths.resume.exists()
    events = json.loads(run_paths.timeline.read_text())["traceEvents"]
    calls = [(each["name"], each["args"]["epoch"]) for each in events if each["ph"] == "X"]
    assert {(name, n) for name in ("collect", "learn") for n in range(EPOCHS)} <= set(calls)
    assert len(calls) == len([each for each in calls if each[0] != "wait"]) + EPOCHS - 1


@pytest.mark.parametrize(
    "words",
    [
        ("--lag=1",),
        ("--lag=0",),
        ("--lag=1", "--algorithm=dqn", "--capacity=100", "--batch_size=8"),
        pytest.param(("--acting=call", "--num_steps=4"), marks=pytest.mark.slow),
        pytest.param(("--turns=sequential",), marks=pytest.mark.slow),
    ],
    ids=["lag 1", "lag 0", "dqn", "call", "in turn"],
)
def test_a_stopped_run_goes_on_to_the_same_bits_with_overlap_or_without(train, words):
    whole = train(*words, folder="whole")
    run_paths = train(*words, stop=stop_after(2), expected=85)
    assert not run_paths.result_json.exists()
    before = lines(run_paths)
    train(*words, "--no_overlap")
    assert lines(run_paths)[:2] == before  # with their seconds: no epoch is trained twice
    assert contents(run_paths) == contents(whole)
    assert [line["epoch"] for line in lines(run_paths)] == list(range(EPOCHS))
    for one, other in zip(lines(run_paths), lines(whole), strict=True):
        kept = {name for name in one if "seconds" not in name}
        assert {name: one[name] for name in kept} == {name: other[name] for name in kept}


def all_files(run_paths: IndependentPaths) -> dict:
    return {path: path.read_bytes() for path in run_paths.folder.rglob("*") if path.is_file()}


def test_a_person_is_told_where_a_run_stops_and_goes_on_and_ends(train, caplog):
    caplog.set_level(logging.INFO, "flowrl")
    run_paths = train(stop=stop_after(2), expected=85)
    assert caplog.messages[-1] == "saved at epoch 2; the same command goes on"
    caplog.clear()
    train()
    assert caplog.messages[0] == "goes on from epoch 2"
    assert caplog.messages[-1] == f"finished, see {run_paths.result_json}"
    before = all_files(run_paths)
    train("--debug")
    assert caplog.messages[-1] == f"already finished, see {run_paths.result_json}"
    assert all_files(run_paths) == before
    for word, problem in (
        ("--seed=1", "--seed 0, not --seed 1"),
        ("--epochs=9", "--epochs 5, not --epochs 9"),
    ):
        with pytest.raises(ConfigError) as refused:
            train(word)
        assert f"was finished with {problem}; give it as before, or give" in str(refused.value)
        assert "--no_resume to begin anew, or another --run_folder" in str(refused.value)
    with pytest.raises(ConfigError, match="--world match_the_sign, not --world only_apple; give"):
        train("--world=only_apple", "--seed=1")  # the world comes first, whatever else differs
    with pytest.raises(ConfigError, match=r"--lr 0\.001, not --lr 0\.1 0\.2 0\.3; give"):
        train("--lr", "0.1", "0.2", "0.3")
    assert all_files(run_paths) == before
    train("--seed=1", "--no_resume", stop=stop_after(1), expected=85)
    assert not run_paths.result_json.exists()
    assert not run_paths.finals.exists()
    assert [line["epoch"] for line in lines(run_paths)] == [0]


def test_other_code_of_a_world_of_ones_own_is_refused(train, tmp_path, monkeypatch):
    code = tmp_path / "signs_of_ones_own.py"
    code.write_text("from flowrl.multiagent.own_worlds import MatchTheSign as Signs\n")
    monkeypatch.syspath_prepend(tmp_path)
    world = "--world=signs_of_ones_own:Signs"
    run_paths = train(world, stop=stop_after(1), expected=85)
    train(world, stop=stop_after(1), expected=85)
    before, text = all_files(run_paths), code.read_text()
    code.write_text(f"{text}# another\n")
    with pytest.raises(ConfigError) as refused:
        train(world)
    problem = f"{run_paths.folder} was begun with other code, or agents of other sizes, in {code}"
    assert str(refused.value).startswith(f"{problem}; restore it, or give --no_resume")
    assert all_files(run_paths) == before
    code.write_text(text)
    assert result(train(world)).epochs == EPOCHS


def test_a_second_process_in_a_folder_is_refused(train, stopped):
    before = all_files(stopped)
    with (
        locks.held(stopped.lock, timeout_seconds=0),
        pytest.raises(BusyError, match=r"run.lock was held by .* for 1 s; try again later"),
    ):
        train()
    assert all_files(stopped) == before


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_run_that_has_the_epochs_asked_for_is_not_ended_by_them(train, epochs):
    run_paths = train(stop=stop_after(2), expected=85)
    before = all_files(run_paths)
    with pytest.raises(
        ConfigError, match=rf"--epochs {epochs}: .* has 2 epochs; give more, or give --no_"
    ):
        train(f"--epochs={epochs}")
    assert all_files(run_paths) == before


def test_a_timeline_that_cannot_be_written_costs_nothing_else(train, tmp_path, caplog):
    IndependentPaths(tmp_path / "run").timeline.mkdir(parents=True)
    assert result(train("--timeline")).epochs == EPOCHS
    (warning,) = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert warning.startswith("timeline.json is not written: Is a directory")


def test_a_run_that_an_error_ends_goes_on_from_its_last_whole_epoch(train, monkeypatch):
    whole = train(folder="whole")
    real = run.figures_of

    def fails_at_3(of, epoch):
        if epoch.number == 3:
            raise TrainingError("broken")
        return real(of, epoch)

    monkeypatch.setattr(run, "figures_of", fails_at_3)
    with pytest.raises(TrainingError, match="broken"):
        train()
    monkeypatch.undo()
    resumed = train()
    assert contents(resumed) == contents(whole)


@pytest.mark.parametrize("words", [("--lag=0",), ("--overlap",), ("--no_overlap",)])
def test_no_more_than_two_buffers_are_held(train, monkeypatch, words):
    real, held, counts = run._programs, [], []

    def counting(of):
        collect, learn, fresh = real(of)

        def counted(*values):
            gc.collect()
            counts.append(sum(each() is not None for each in held))
            collector, (rollout, episodes) = collect(*values)
            held.append(weakref.ref(rollout.obs))
            return collector, (rollout, episodes)

        return counted, learn, fresh

    monkeypatch.setattr(run, "_programs", counting)
    gc.freeze()  # JAX's own objects are many
    train(*words)
    gc.unfreeze()
    assert max(counts) <= 1  # and the one that is collected then


def addresses(tree) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("words", [("--lag=0",), ("--overlap",), ("--no_overlap",)])
def test_an_epochs_arrays_are_handed_over_where_they_lie(train, monkeypatch, words):
    real, collected, learnt = run._programs, {}, {}

    def watched(of):
        collect, learn, new = real(of)

        def collects(learner, collector, epoch):
            collector, experience = collect(learner, collector, epoch)
            collected[epoch] = addresses(experience)
            return collector, experience

        def learns(learner, experience, epoch):
            learnt[epoch] = addresses(experience)
            return learn(learner, experience, epoch)

        return collects, learns, new

    monkeypatch.setattr(run, "_programs", watched)
    train(*words)
    assert len(learnt) == EPOCHS
    assert learnt == collected


def test_worlds_networks_and_the_learning_of_every_epoch_have_keys_of_their_own(monkeypatch):
    def learn(_, learner, rollout, key):
        return learner, jax.random.key_data(key)

    monkeypatch.setattr(run.agents, "learn", learn)
    world = MatchTheSign("match_the_sign", 3)
    _, learn, new = run._programs(run._Run(parse(IndependentConfig, [*TINY]), world, None))
    keys = [learn(new.learner, (None, None), epoch)[1] for epoch in range(3)]
    keys.append(jax.random.key_data(new.collector.key))
    networks = jax.vmap(lambda agent: jax.random.fold_in(jax.random.key(0), agent))(jnp.arange(99))
    keys += list(jax.random.key_data(networks))
    assert len({tuple(key.tolist()) for key in keys}) == 4 + 99


def test_the_age_of_a_buffer_is_the_mean_of_its_rows_and_the_lag(train):
    run_paths = train("--algorithm=dqn", "--capacity=100", "--batch_size=8")
    ages = [line["buffer_age"] for line in lines(run_paths)]  # an epoch has 32 rows
    assert ages == [0, 1.5, 2, 2.0625, 2.0625]
    assert [line["buffer_age"] for line in lines(train(folder="ppo"))] == [0, 1, 1, 1, 1]


def test_the_terminal_counts_epochs(stopped, train, caplog):
    with caplog.at_level(logging.INFO, logger="flowrl"):
        train()
    said = [each for each in caplog.messages if "frames" in each]
    assert said[0] == f"compiling · epoch 1 · 32 of {EPOCHS * 32} frames"
    assert said[-1].startswith(f"saving · epoch {EPOCHS} · ")
    assert re.search(r" left \| returns \S+ \S+ \S+$", said[-1])
    assert not [each for each in caplog.messages if "update" in each]


def test_progress_is_shown_from_compiling_on_and_again_after_a_full_disk(
    train, monkeypatch, caplog
):
    monkeypatch.setattr(progress, "PROGRESS_SECONDS", 0.0)
    real, shown = runs.write_progress, []

    def full_at_first(run_paths, each):
        shown.append(each)
        if len(shown) == 1:
            raise OSError(28, "No space left on device")
        real(run_paths, each)

    monkeypatch.setattr(runs, "write_progress", full_at_first)
    run_paths = train()
    phases = ["compiling", *["training"] * (EPOCHS - 1), "saving"]
    assert [(each.updates, each.phase) for each in shown] == list(enumerate(phases))
    assert runs.read_progress(run_paths).updates == EPOCHS
    (warning,) = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert warning == "progress.json cannot be written: No space left on device"
    begun, first, *others = [each.steps_per_second for each in shown]
    assert begun == first == 0, "compiling is no speed"
    assert "steps/s" not in shown[1].line()
    assert min(others) > 0


class Poisoned(MatchTheSign):
    """Its agent 1 is rewarded by NaN in the fifth turn of every episode."""

    everybody = False

    def step(self, state, actions, key):
        state, reward, done = super().step(state, actions, key)
        hit = (state.turn == 5) & ((jnp.arange(3) == 1) | self.everybody)
        return state, jnp.where(hit, jnp.nan, reward), done


def test_a_poisoned_agent_is_frozen_and_reported_and_the_others_keep_their_bits(
    train, monkeypatch, caplog
):
    whole = train(folder="whole")
    monkeypatch.setattr(run, "open_world", Poisoned)
    with caplog.at_level(logging.WARNING):
        run_paths = train()
    (record,) = [each for each in caplog.records if "frozen" in each.message]
    assert "epoch 0: agent 1" in record.message
    assert "repair the world if its numbers are large or not finite" in record.message
    assert result(run_paths).frozen == (1,)
    assert result(run_paths).mean_returns[1] is None
    for agent in (0, 2):
        assert contents(run_paths)[agent] == contents(whole)[agent]
        for one, other in zip(lines(run_paths), lines(whole), strict=True):
            own = [name for name in one if name.startswith(f"agent_{agent}/")]
            assert [one[name] for name in own] == [other[name] for name in own]


class Rich(MatchTheSign):
    """Its rewards are finite, and their squares are not."""

    def step(self, state, actions, key):
        state, reward, done = super().step(state, actions, key)
        return state, jnp.where(jnp.arange(3) == 1, 1e30, reward), done


def test_an_agent_is_frozen_by_finite_numbers_too(train, monkeypatch, caplog):
    monkeypatch.setattr(run, "open_world", Rich)
    assert result(train("--epochs=1")).frozen == (1,)
    (record,) = [each for each in caplog.records if " is frozen" in each.message]
    assert "lower --lr, or repair the world if its numbers are large" in record.message


class PoisonedAll(Poisoned):
    everybody = True


def test_a_run_without_an_agent_that_learns_ends(train, monkeypatch):
    monkeypatch.setattr(run, "open_world", PoisonedAll)
    with pytest.raises(TrainingError, match="epoch 0: no agent is left that learns"):
        train()


@pytest.mark.parametrize("word", ["--agents=2", "--world=only_apple", "--layer_size=9"])
def test_a_run_does_not_go_on_as_another_one(train, stopped, word):
    before = all_files(stopped)
    with pytest.raises(
        ConfigError, match=r"was begun with --(\w+) .*, not --\1 .*; give it as before"
    ):
        train(word)
    assert all_files(stopped) == before


def test_a_run_does_not_go_on_in_a_world_whose_agents_have_grown(train, stopped, monkeypatch):
    class Grown(MatchTheSign):
        def __init__(self, name, agents):
            super().__init__(name, agents)
            self.sizes = self.sizes._replace(actions=(2, 3, 5))

    monkeypatch.setattr(run, "open_world", Grown)
    with pytest.raises(ConfigError, match="or agents of other sizes, in match_the_sign; restore"):
        train()


def test_a_damaged_checkpoint_is_refused(train, stopped):
    for path in stopped.resume.rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(ExpertCorruptError, match="cannot be read"):
        train()


def test_a_world_and_an_agent_of_the_how_to_work(tmp_path, monkeypatch):
    text = Path(__file__).parents[2].joinpath("docs/how-to.md").read_text()
    section = text.partition("## Train independent agents")[2].partition("\n## ")[0]
    agent, world = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (tmp_path / "echo.py").write_text(world)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["--world=echo:Echo", "--agents=2", "--epochs=15", "--run_folder=exp/signs"]
    small = ["--num_envs=16", "--num_steps=16", "--num_minibatches=2"]
    assert run.train(parse(IndependentConfig, [*words, *small]), never) == 0
    opened = {}
    exec(agent, opened)
    params, network = {"params": opened["params"]}, opened["network"]
    logits, _ = network.apply(params, jnp.array([[0.0], [1.0]]))
    assert logits.argmax(-1).tolist() == [0, 1]


def test_figures_go_to_tensorboard_as_those_of_skills(train):
    run_paths = train("--use_tensorboard")
    (events,) = run_paths.tensorboard.iterdir()
    assert b"agent_2/return" in events.read_bytes()
    assert run_paths.metrics.exists()


def test_a_graphs_folder_is_no_run_folder(train, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "graph.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a graph; name another folder"):
        train()


@pytest.mark.parametrize("words", [(), ("--no_resume",)])
def test_a_folder_in_a_graph_is_no_run_folder_and_keeps_its_files(train, tmp_path, words):
    (tmp_path / "scheduler_state.json").write_text("{}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is inside the graph .* name a folder outside"):
        train(*words)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["result.json"]
