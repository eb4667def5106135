"""A sweep with real processes: its trials, what it records, and how it goes on after a kill."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import subprocess
import time

import pytest

from flowrl import cli
from flowrl.config import BottomUpConfig, PPOConfig, to_json, with_flags
from flowrl.errors import BusyError
from flowrl.experts.store import ExpertStore
from flowrl.launchers.confined import ConfinedError
from flowrl.parallel.health import DaemonLock
from flowrl.paths import GraphPaths, RunPaths, SweepPaths
from flowrl.runs import read_run
from flowrl.storage import records
from flowrl.tuning.outcome import EvaluateTrials
from flowrl.tuning.running import show
from flowrl.tuning.start import SweepConfig, training_config
from flowrl.tuning.sweep import create_sweep
from flowrl.tuning.trials import OUTCOME, TRIAL, Sweep
from tests.parallel import making
from tests.parallel.making import GRAPH, train
from tests.tuning.making import a_record, a_sweep, a_trial
from tests.tuning.place import Place, replace_trainers
from tests.waiting import until

VARY = ("--vary", "lr=log:1e-4:1e-1", "--skill", "Collect Wood", "--total_timesteps", "10k")
QUICK = (*VARY, "--method=random", "--confirm=0", "--launcher=local")
TWO_POINTS = ("--vary", "lr=choice:1e-3,3e-3", *VARY[2:], "--method=grid", "--launcher=local")
CONFIRMED = (*TWO_POINTS, "--confirm=2", "--max_concurrent=4")


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def sweep(place, capsys, monkeypatch, unchanged_sigterm):
    """Run `flowrl sweep` in this process; returns its exit code, and what it printed and said."""
    replace_trainers(monkeypatch.setattr)

    def run(*flags: str) -> tuple[int, str, str]:
        words, flags = ([flags[0]], flags[1:]) if flags[:1] and flags[0].isalpha() else ([], flags)
        code = cli.main(["sweep", *words, str(place.graph_paths.root), "--name=s", *flags])
        return code, *capsys.readouterr()

    return run


def test_a_sweep_trains_its_trials_and_names_the_best(place, sweep):
    code, printed, said = sweep(*QUICK, "--trials=3")
    assert code == 0, said
    trials, outcomes = place.records(), place.records("outcome.json")
    assert sorted(place.launches()) == ["0", "1", "2"]
    assert trials[0]["point"] == {"lr": 1e-3}  # the default comes first
    assert len({trial["seed"] for trial in trials.values()}) == 3
    scores = {number: outcome["score"] for number, outcome in outcomes.items()}
    best = max(scores, key=lambda number: scores[number])
    assert f"best {scores[best]:.3f} by trial {best} (lr " in printed.splitlines()[0]
    for number, trial in trials.items():
        assert sorted(trial["ended"] + trial["pending"]) == list(range(number))

    first = place.records(), place.records("outcome.json")
    assert not place.sweep_paths.outcome_json.exists()  # --confirm 0 confirms nothing
    assert "no sweeper lives" not in printed
    code, _, refused = sweep("apply")
    assert (code, "has --confirm 0 and confirms no point" in refused) == (2, True)
    assert sweep()[:2] == (0, printed)  # the same again changes nothing
    assert sweep("status")[1] == printed
    assert (place.records(), place.records("outcome.json")) == first
    assert len(place.launches()) == 3
    for words in (("--trials=2",), ("--lr=1e-2",), ("--vary", "gamma=uniform:0.9:0.99")):
        code, _, said = sweep(*words)
        assert code == 2
        assert "was begun with --" in said or "give more to prolong it" in said
    assert len(place.launches()) == 3

    place.file(1, TRIAL).write_text("{")
    foreign = place.file(2, TRIAL)
    foreign.write_text(foreign.read_text().replace('"number": 2', '"number": 3'))
    code, printed, _ = sweep("status")
    assert "left out: trial 1: " in printed
    assert "left out: trial 2: " in printed
    assert sweep()[0] == 0
    assert sorted(place.launches()) == ["0", "1", "2", "3", "4"]  # two others in their place
    assert json.loads(place.file(3, TRIAL).read_text())["ended"] == [0]
    code, printed, _ = sweep("--trials=4")  # more than before prolongs it
    assert (code, len(place.launches())) == (0, 6)
    assert ": ended, 4 of 4 trials" in printed


def test_a_terminal_is_told_how_many_trials_have_ended_and_the_best(sweep, monkeypatch):
    shown: list[tuple] = []

    @contextlib.contextmanager
    def bar(text: str, total: int | None):
        shown.append((text, total))
        yield lambda done, text: shown.append((done, text))

    monkeypatch.setattr("flowrl.tuning.running.progress_bar", bar)
    code, printed, said = sweep(*QUICK, "--trials=2")
    assert code == 0, said
    assert shown[0] == ("trials of Collect Wood", 2)
    assert [done for done, _ in shown[1:]] == [1, 2]
    assert shown[-1][1] == printed.splitlines()[0]


def test_a_sweep_goes_on_beside_the_training_of_its_graph(place, sweep):
    train(place.graph_paths, "Collect Wood", 0, {}, acted={0: 50})
    lock = DaemonLock(place.graph_paths.daemon_lock)
    lock.acquire()
    flags = ("--skill=Place Table", *VARY[:2], "--trials=1", "--confirm=0", "--method=random")
    code, _, said = sweep(*flags, "--launcher=local", "--total_timesteps=10k")
    lock.release()
    assert code == 0, said
    run = read_run(RunPaths(place.sweep_paths.training_runs / "0", 1))
    (wood,) = run.ancestors
    assert (run.skill, run.expert, wood.skill) == ("Place Table", 1, "Collect Wood")
    pinned = ExpertStore(place.sweep_paths)
    assert pinned.verify(pinned.manifest().experts[0]).is_relative_to(place.sweep_paths.root)
    assert list(ExpertStore(place.graph_paths).manifest().experts) == [0]


def test_what_is_better_on_fresh_seeds_becomes_the_skills_settings(place, sweep):
    place.order(success=0.95)
    code, printed, said = sweep(*CONFIRMED, "--keep_winner")
    assert code == 0, said
    assert "these are the settings of Collect Wood now" in printed
    assert "lr = 0.003" in place.graph_paths.tuned_file("Collect Wood").read_text()
    assert len(ExpertStore(place.graph_paths).manifest().merged) == 1
    assert "has its defaults again" in sweep("forget")[1]
    assert "these are the settings" in sweep("apply")[1]
    code, printed, said = sweep("--keep_winner")  # merged before
    assert code == 0, said
    assert "is that of trial " in printed
    assert len(ExpertStore(place.graph_paths).manifest().merged) == 1
    (gain,) = json.loads(place.sweep_paths.outcome_json.read_text())["gains"]
    shown = f"trial 1 gains {gain['mean']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}]"
    assert gain["low"] > 0
    first = sweep("status")[1].splitlines()[0]
    assert first.endswith(f"({place.records()[1]['point']}), {shown}") or first.endswith(shown)


MALFORMED = "the evaluation of trials is malformed"
BROKEN = {
    None: "it broke off",
    b"[3, 4]\n[3]": MALFORMED,
    b"[3, 4, 5, 257]": MALFORMED,
    b"": MALFORMED,
}


def test_an_evaluation_that_breaks_off_confirms_nothing(place, sweep, monkeypatch):
    flags = CONFIRMED
    for printed, why in BROKEN.items():

        def broken(*_, printed=printed, **__):
            if printed is None:
                raise ConfinedError("it broke off", 1)
            return printed

        with monkeypatch.context() as patch:
            patch.setattr("flowrl.tuning.outcome.confined_run", broken)
            found, _, said = sweep(*flags)
            flags = ()  # the same again goes on from there
        assert found == 1
        assert why in said.splitlines()[-1]
        assert not place.sweep_paths.outcome_json.exists()
        first, second, *_ = sweep("status")[1].splitlines()
        assert "confirming, 2 of 2 trials have ended" in first
        goes_on = f"flowrl sweep {place.graph_paths.root} --name s goes on"
        assert second == f"  no sweeper lives; {goes_on}"
    assert sweep()[0] == 0
    assert len(place.launches()) == 6


def test_trials_that_diverge_have_no_score_and_end_the_search(place, sweep):
    place.order(diverge_above=0.0)
    flags = (*QUICK, "--trials=9", "--max_failures=2", "--max_retries=0", "--confirm=2")
    code, printed, said = sweep(*flags)
    assert code == 1, said
    assert "no point is confirmed better than the default; the defaults" in printed
    outcomes = place.records("outcome.json").values()
    assert 2 <= len(outcomes) <= 3
    assert {outcome["score"] for outcome in outcomes} == {None}
    assert all("65" in outcome["why"] for outcome in outcomes)


def test_a_trial_that_is_tried_again_begins_anew_in_its_folder(place, sweep):
    place.order(fails_once=True)
    code, _, said = sweep(*QUICK, "--trials=1", "--retry_backoff=0.1")
    assert code == 0, said
    assert place.launches() == ["0", "0"]
    assert json.loads(place.file(0, "run.json").read_text())["attempt"] == 2
    outcome = place.records("outcome.json")[0]
    assert outcome["score"] > 0
    assert (outcome["frames"], outcome["seconds"]) == (15_000, pytest.approx(1.5))


def test_a_trial_that_is_pruned_counts_with_what_it_has(place, sweep, capsys):
    place.order(update_seconds=1.0)
    process = place.start(*QUICK, "--trials=1")
    until(place.file(0, "progress.json").exists)
    code, _, said = sweep(*QUICK, "--trials=1")  # a second sweep of the name is refused
    assert code == 75
    assert str(process.pid) in said
    place_of = str(place.sweep_paths.root)
    assert cli.main(["status", place_of, "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)["skills"]
    assert (shown["skill"], shown["phase"]) == ("Collect Wood t0", "training")
    assert cli.main(["prune", place_of, "Collect Wood t0"]) == 0
    printed, said = process.communicate()
    assert process.returncode == 0, said
    outcome = place.records("outcome.json")[0]
    assert outcome["stopped"] == "pruned"
    assert outcome["frames"] < 10_000
    assert place.launches() == ["0"]
    assert f"best {outcome['score']:.3f} by trial 0 (lr 0.001)" in printed
    capsys.readouterr()
    assert cli.main(["logs", place_of, "Collect Wood t0"]) == 0


def test_asha_ends_the_trials_that_are_behind(place, sweep):
    place.order(update_seconds=0.3)
    flags = (*VARY, "--method=grid", "--confirm=0", "--launcher=local", "--pruner=asha")
    code, _, said = sweep(*flags, "--max_concurrent=4", "--scheduler_poll_interval=0.1")
    assert code == 0, said
    outcomes = place.records("outcome.json").values()
    assert {outcome["stopped"] for outcome in outcomes} == {"pruned", ""}
    assert all((each["cut_at"] > 0) == (each["stopped"] == "pruned") for each in outcomes)
    assert all(each["cut_at"] <= each["frames"] for each in outcomes)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--vary", "lr=log:1e-2:1e-4"), "min 0.01 must be below max 0.0001"),
        (("--vary", "layer_size=pow2:32:64"), "the same for all experts"),
        ((*VARY[:2], "--budget=7x"), "--budget 7x is no time above 0"),
        ((*VARY[:2], "--objective=deaths=1"), "deaths is not measured here"),
        ((*VARY[:2], "--confirm=1"), "--confirm 1 confirms nothing"),
        ((*VARY[:2], "--merge_policy=eval_gate", "--merge_objective=x=1"), "x is not measured"),
        ((), "say what is varied"),
        ((*VARY[:2], "--space=x.toml"), "--vary and --space both say what is varied"),
        (("--vary", "num_envs=choice:63,65", "--env_shards=32"), "finds no point for trial 0"),
        ((*VARY[:2], "--skill=Collect Stone"), "has no expert yet; flowrl train"),
        ((*VARY[:2], "--max_nodes=1"), "flowrl sweep has no flag --max_nodes;"),
        ((*VARY[:2], "--max_parallel_skills=4"), "flowrl sweep has no flag --max_parallel_skills"),
        ((*VARY[:2], "--replicas=2", "--pruner=asha"), "--pruner cannot end"),
        ((*VARY[:2], "--keep_winner", "--confirm=0"), "--keep_winner keeps a confirmed point's"),
        ((*VARY[:2], "--skill=Collect Wod"), "there is no skill 'Collect Wod'"),
        (("--status",), "write flowrl sweep status GRAPH --name NAME"),
        (("--apply",), "write flowrl sweep apply GRAPH --name NAME"),
        (("--forget",), "write flowrl sweep forget GRAPH --name NAME"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(place, sweep, words, why):
    skill = () if any("--skill" in word for word in words) else ("--skill=Collect Wood",)
    code, _, said = sweep(*skill, *words)
    assert code == 2, said
    assert why in said.splitlines()[-1]
    assert not place.graph_paths.sweeps.exists()


def test_flags_of_training_are_refused_wherever_they_are_given(place, sweep, monkeypatch, tmp_path):
    (tmp_path / "flags.toml").write_text("max_parallel_skills = 4\n")
    code, _, said = sweep(*QUICK, f"--config={tmp_path / 'flags.toml'}")
    assert code == 2
    assert "flags.toml: 'max_parallel_skills' is no flag" in said
    monkeypatch.setenv("FLOWRL_STRICT", "1")
    code, _, said = sweep(*QUICK)
    assert code == 2
    assert "the environment's FLOWRL_STRICT is no flag" in said
    assert not place.graph_paths.sweeps.exists()


def test_a_trial_that_a_user_lets_try_again_counts_anew(place, sweep, capsys):
    place.order(fails_once=True)
    flags = (*QUICK, "--trials=1", "--max_retries=0")
    assert sweep(*flags)[0] == 1
    assert place.records("outcome.json")[0]["score"] is None
    assert ": ended, 1 of 1 trials" in sweep("status")[1]
    place.file(0, OUTCOME).unlink()  # as the trial's next start does
    first, second, *_ = sweep("status")[1].splitlines()
    assert ": searching, 0 of 1 trials" in first
    assert "no sweeper lives" in second
    capsys.readouterr()
    assert cli.main(["retry", str(place.sweep_paths.root), "Collect Wood t0"]) == 0
    code, _, said = sweep(*flags)
    assert code == 0, said
    outcome = place.records("outcome.json")[0]
    assert outcome["score"] > 0
    assert outcome["frames"] == 15_000
    assert place.launches() == ["0", "0"]


def test_a_seed_that_was_tried_again_is_not_played_nor_compared(place, sweep, monkeypatch):
    place.order(success=0.95, fails_once=True)  # each second attempt has another seed
    played: list[EvaluateTrials] = []
    monkeypatch.setattr(
        "flowrl.tuning.outcome.confined_run", lambda order, *_, **__: played.append(order)
    )
    code, printed, said = sweep(*TWO_POINTS, "--confirm=2", "--retry_backoff=0.1")
    assert code == 0, said
    assert played == []
    assert "no point is confirmed" in printed
    assert json.loads(place.sweep_paths.outcome_json.read_text())["gains"] == []


def test_a_sweep_that_is_not_begun_has_a_status(place, capsys):
    create_sweep(Sweep(place.sweep_paths, a_record()), place.graph_paths, GRAPH)
    assert cli.main(["status", str(place.sweep_paths.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["skills"] == []


def test_the_same_command_goes_on_with_the_sweep(place, sweep, tmp_path):
    (tmp_path / "flags.toml").write_text("lr = 1e-2\n")
    (tmp_path / "skills.toml").write_text('["Collect Wood"]\nlr = 2e-2\n')
    files = (f"--config={tmp_path / 'flags.toml'}", f"--skill_config={tmp_path / 'skills.toml'}")
    vary = ("--vary", "ent_coef=choice:0.01,0.02", "gamma=choice:0.9,0.99", "--method=grid")
    flags = (*files, *vary, *VARY[2:], "--launcher=local", "--confirm=0", "--trials=100")
    assert sweep(*flags)[0] == 0
    assert len(place.launches()) == 4
    assert sweep(*flags)[0] == 0
    code, _, said = sweep(*flags, "--trials=3")
    assert code == 2
    assert "--trials is less than" in said
    assert len(place.launches()) == 4


def test_a_start_that_finds_a_sweep_begun_meanwhile_does_not_begin_it_again(tmp_path):
    graph_paths = GraphPaths(tmp_path)
    sweep_paths = SweepPaths(graph_paths.sweeps / "s")
    create_sweep(Sweep(sweep_paths, a_record()), graph_paths, GRAPH)
    with pytest.raises(BusyError, match="begun meanwhile"):
        create_sweep(Sweep(sweep_paths, a_record(sweep="other")), graph_paths, GRAPH)


def test_flags_of_the_graph_that_choose_its_skills_are_no_sweeps(tmp_path):
    graph_paths = GraphPaths(tmp_path)
    trained = with_flags(BottomUpConfig(), max_nodes=1, merge_policy="eval_gate", lr=0.5)
    records.write(graph_paths.config_json, to_json(trained))
    found = training_config(SweepConfig(), graph_paths)
    assert (found.graph.max_nodes, found.graph.merge_policy) == (None, "eval_gate")
    assert found.ppo.lr == 0.5


def test_a_trained_skill_is_tuned_as_its_own_run_was_trained(tmp_path):
    graph_paths = GraphPaths(tmp_path)
    ppo = dataclasses.replace(making.CONFIG, lr=0.5, num_steps=16, gamma=0.5, total_timesteps=10**9)
    origins = {"lr": "command line", "num_steps": "skill file", "gamma": "sweep"}
    ready = making.prepare(graph_paths, "Collect Wood", 0, {}, config=ppo, origins=origins)
    making.finish(ready.run_paths, {0: 50})
    making.merge(graph_paths, ready)
    records.write(graph_paths.config_json, to_json(with_flags(BottomUpConfig(), lr=0.25)))
    found = training_config(SweepConfig(skill="Collect Wood"), graph_paths).ppo
    assert found == PPOConfig(lr=0.5), "what files and sweeps set may change"
    assert training_config(SweepConfig(skill="Place Table"), graph_paths).ppo.lr == 0.25


def test_the_status_of_a_sweep_has_whole_trials_first_and_marks_those_that_were_cut(tmp_path):
    sweep = a_sweep(tmp_path)
    for number, (score, cut_at) in enumerate([(0.5, 0), (0.8, 1111), (0.4, 0), (None, 0)]):
        tried = a_trial(number, 1e-3, score)
        folder = sweep.run(number).folder
        folder.mkdir(parents=True)
        records.write(folder / TRIAL, tried.trial)
        records.write(folder / OUTCOME, dataclasses.replace(tried.outcome, cut_at=cut_at))
    lines = show(sweep).splitlines()  # the second line says how to go on
    assert [line.split()[0] for line in lines[2:]] == ["t0", "t2", "t1", "t3"]
    assert lines[4].endswith("0.800 in 10,000 frames, cut at 1,111")
    assert "best 0.500 by trial 0" in lines[0]


def test_the_status_of_a_graph_shows_each_of_its_sweeps(place, sweep, capsys):
    place.order(success=0.95)
    assert sweep(*CONFIRMED)[0] == 0
    other = SweepPaths(place.graph_paths.sweeps / "other")
    create_sweep(Sweep(other, a_record()), place.graph_paths, GRAPH)
    assert not place.graph_paths.scheduler_state.exists()
    assert cli.main(["status", str(place.graph_paths.root), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["notices"]
    assert shown["sweep other"] == "sweep other: no trial has ended yet"
    said = shown["sweep s"]
    assert said.startswith("sweep s: Collect Wood: ended, 2 of 2 trials have ended, 4 of 4 confirm")
    found = json.loads(place.sweep_paths.outcome_json.read_text())["gains"][0]
    best = place.records("outcome.json")[1]["score"]
    assert f"best {best:.3f} by trial 1 (lr 0.003), trial 1 gains {found['mean']:+.3f} [" in said
    lock = DaemonLock(other.daemon_lock)
    lock.acquire()
    cli.main(["status", str(place.graph_paths.root)])
    lock.release()
    assert "sweep other is under way: no trial" in capsys.readouterr().out


def test_a_sweep_that_is_killed_again_and_again_is_like_one_that_was_not(place, tmp_path):
    whole = Place(tmp_path / "whole")
    kill_and_compare(place, whole, kills=2, trials=2, seconds=0.3, flags=QUICK)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_in_tmux_survives_thirty_kills(place, tmp_path, socket):
    flags = (*VARY, "--method=cooled", "--confirm=0", f"--tmux_socket={socket}")
    whole = Place(tmp_path / "whole")
    kill_and_compare(place, whole, kills=30, trials=12, seconds=2.0, flags=flags)
    listed = subprocess.run(
        ["tmux", "-S", socket, "list-sessions"], capture_output=True, text=True, check=False
    )
    assert "flowrl" not in listed.stdout


@pytest.fixture
def socket(tmp_path):
    path = str(tmp_path / "tmux")
    yield path
    subprocess.run(["tmux", "-S", path, "kill-server"], capture_output=True, check=False)


def kill_and_compare(
    place: Place, whole: Place, *, kills: int, trials: int, seconds: float, flags
) -> None:
    """Kill the sweeper at random instants; its trials are those of a sweep that was left alone."""
    flags = (*flags, "--max_concurrent=1", f"--trials={trials}")
    seed = int.from_bytes(os.urandom(4))
    instants = random.Random(seed)
    place.order(update_seconds=seconds / 10)
    for _ in range(kills):
        sweeper = place.start(*flags)
        time.sleep(instants.uniform(0.5, 0.5 + seconds))
        sweeper.kill()
        sweeper.communicate()
    code, _, said = place.run(*flags)
    assert code == 0, (seed, said)
    assert whole.run(*flags)[0] == 0

    def points(of: Place) -> dict[int, tuple]:
        return {n: (trial["point"], trial["seed"]) for n, trial in of.records().items()}

    def scores(of: Place) -> dict[int, float]:
        return {n: outcome["score"] for n, outcome in of.records("outcome.json").items()}

    assert points(place) == points(whole), seed
    assert scores(place) == scores(whole), seed
    assert sorted(place.launches(), key=int) == [str(n) for n in range(trials)], seed
