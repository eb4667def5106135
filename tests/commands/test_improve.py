"""Texts of one skill compete: `flowrl improve`, and the rewards of `flowrl write`.

All but the trainers and the episodes in fresh worlds is real.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.errors import EXIT_UNAVAILABLE
from flowrl.experts import manifest as manifests
from flowrl.experts.manifest import Manifest
from flowrl.experts.store import ExpertStore
from flowrl.llm.transcript import Chosen, read_events
from flowrl.parallel.health import DaemonLock
from flowrl.parallel.recovery import recorded_config
from flowrl.parallel.skill_sources import SkillSources, keep_other_text
from flowrl.paths import GraphPaths, SweepPaths
from flowrl.reports.status import read_rows
from flowrl.runs import CodeApproval, read_run
from flowrl.skills.skill import load_skill
from flowrl.skills.validation.cache import ApprovalStore
from flowrl.skills.validation.dry_run import SkillCode
from flowrl.storage import records
from flowrl.tuning.contest import ContestOutcome, Standing, ranked
from tests.experts.making import all_files
from tests.judging.endpoint import KEY, FakeEndpoint, serving
from tests.llm.making import GAME, WISH, WOOD, approve, contract, rewards, scripted
from tests.tuning.place import ROOT, replace_trainers
from tests.waiting import AT_ONCE, limit, until

FRAMES = ("--candidate_timesteps=10k", "--max_concurrent=4")
FILE = f'''"""Collect wood."""

name = "Collect Wood"
gain = {{"wood": "n"}}
training = {{"lr": LR}}


{WOOD.is_done}


{WOOD.reward}
'''
OWN = {"egocentric": True}  # as graph.json says
BETTER = WOOD.reward.replace("return ", "return 2.0 * ")
WORSE = WOOD.reward.replace("return ", "return 0.5 * ")
START = "import sys, tests.tuning.place as p; p.replace_trainers(setattr); "
START += "from flowrl import cli; sys.exit(cli.main(sys.argv[1:]))"


@pytest.fixture
def graph(graph_paths, monkeypatch, unchanged_sigterm) -> GraphPaths:
    """A graph with the trained skill Collect Wood, whose trials have stand-ins for trainers."""
    config = {"format": 1, "env_name": GAME, "launcher": "local", "sandbox": "none"} | OWN
    records.write(graph_paths.config_json, config)
    replace_trainers(monkeypatch.setattr)
    order(graph_paths)
    return graph_paths


def order(graph: GraphPaths, **orders: object) -> None:
    (graph.root.parent / "orders.json").write_text(json.dumps(orders))


def launches(graph: GraphPaths) -> list[str]:
    path = graph.root.parent / "launches"
    return path.read_text().split() if path.exists() else []


def proposals(graph: GraphPaths, **texts: str) -> Path:
    """A folder of texts by their names; the library's learns best at a rate of 3e-3."""
    folder = graph.root.parent / "proposals"
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def contests(graph: GraphPaths) -> list[SweepPaths]:
    return [SweepPaths(path.parent) for path in graph.sweeps.glob("*/sweep.json")]


def requests(graph: GraphPaths) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(graph.requests.glob("*.json"))]


def at(rate: str) -> str:
    return FILE.replace("LR", rate)


def test_the_better_text_replaces_the_present_one_and_is_trained_anew(graph, flowrl):
    folder = proposals(graph, better=at("3e-3"), worse=at("1e-2"))
    proposals(graph, other=at("1e-3").replace('"Collect Wood"', '"Fell Trees"'))
    proposals(graph, easier=at("1e-3").replace(">=", ">"), broken="name = ")
    proposals(graph, dear=at("1e-3").replace("gain", 'requirements = {"iron": 1}\ngain', 1))
    said = flowrl("improve", graph.root, WOOD.name, "--proposals", folder, *FRAMES, "--json")
    told = json.loads(said.out)
    assert told["chosen"] == "better.py"
    assert [row["candidate"] for row in told["candidates"]] == [
        *("better.py", "present text", "worse.py")
    ]
    assert told["candidates"][0]["success_rate"] == pytest.approx(0.9, abs=0.01)
    assert told["candidates"][0]["low"] > told["candidates"][1]["success_rate"]
    assert {name: why.split(";")[-1] for name, why in told["refused"].items()}.keys() == {
        *("other.py", "easier.py", "broken.py", "dear.py")
    }
    assert "its name differs from that of 'Collect Wood'" in told["refused"]["other.py"]
    assert "its is_done differs" in told["refused"]["easier.py"]
    [sweep] = contests(graph)
    runs = [read_run(sweep.trial(number, 0)) for number in range(3)]
    assert {(run.config["seed"], run.config["total_timesteps"]) for run in runs} == {(0, 10_000)}
    assert sorted(run.config["lr"] for run in runs) == [1e-3, 3e-3, 1e-2]
    sources = SkillSources(graph)
    assert sources.recorded()[WOOD.name].training == {"lr": 3e-3}
    [former] = sources._former(sources.recorded()[WOOD.name])
    assert former.reward == WOOD.reward, "so that its file is no news to a later start"
    assert [(each["verb"], each["skill"]) for each in requests(graph)] == [("retrain", WOOD.name)]


def test_without_a_surely_better_text_nothing_is_changed(graph, flowrl):
    order(graph, words={"2.0 *": 0.60, "0.5 *": 0.0}, success=0.94)  # present 0.583
    texts = {"a_little": at("1e-3").replace(WOOD.reward, BETTER)}
    texts["silent"] = at("1e-3").replace(WOOD.reward, WORSE)
    folder, store = proposals(graph, **texts), ApprovalStore(graph.approvals)
    for reward in (BETTER, WORSE):
        digest = SkillCode.of(replace(WOOD, reward=reward), GAME).digest
        store.keep(CodeApproval(digest=digest, trusted=False))
    before = all_files(graph.root)
    words = ("improve", graph.root, WOOD.name, "--proposals", folder, *FRAMES)
    said = flowrl(*words, code=1).out
    assert "nothing is changed, because a_little.py is not surely better: its lower" in said
    assert "silent.py: 0.0% [0.0%, 1.5%] success after 10,000 frames" in said.splitlines()[-4]
    assert said.splitlines()[-1] == "    b: 0 ± 0, not 0 in 0.0%"
    sweeps = str(graph.sweeps)
    kept = {name: text for name, text in all_files(graph.root).items() if sweeps not in str(name)}
    assert {name: text for name, text in kept.items() if name in before} == before
    assert len(launches(graph)) == 3
    assert flowrl(*words, code=1).out == said  # nothing is trained again
    assert len(launches(graph)) == 3
    [sweep] = contests(graph)
    assert "0 of 3" not in flowrl("sweep", "status", graph.root, "--name", sweep.root.name).out
    told = flowrl("sweep", graph.root, "--name", sweep.root.name, code=2).err
    assert "compares texts of Collect Wood; the command that began it goes on with it" in told
    assert "no dimensions" in flowrl("plot", sweep.root, code=2).err


def test_a_quick_proposal_that_is_not_surely_better_hides_none_that_is(graph, flowrl):
    order(graph, success=0.0)
    folder = proposals(graph, quick=at("3e-3"), sure=at("1e-2"))
    words = ("improve", graph.root, WOOD.name, "--proposals", folder, *FRAMES, "--json")
    flowrl(*words, code=1)
    [sweep] = contests(graph)
    results = {"present text": (245, 10_000), "quick.py": (250, 2_000), "sure.py": (256, 10_000)}
    standings = [
        Standing(label=label, trial=number, successes=successes, frames=frames)
        for number, (label, (successes, frames)) in enumerate(results.items())
    ]
    found = ContestOutcome(standings=ranked(standings, budget=10_000))
    assert found.standings[0].label == "quick.py"
    records.write(sweep.contest_json, found)
    assert json.loads(flowrl(*words).out)["chosen"] == "sure.py"


def test_a_killed_contest_goes_on_with_the_same_command(graph):
    order(graph, update_seconds=0.1)
    folder = proposals(graph, better=at("3e-3"), worse=at("1e-2"))
    words = ["improve", graph.root, WOOD.name, "--proposals", folder, "--candidate_timesteps=10k"]
    argv = [sys.executable, "-c", START, *map(str, words)]

    def start() -> subprocess.Popen:
        return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    process = start()
    until(lambda: len(launches(graph)) == 2, every=AT_ONCE)
    process.kill()
    process.wait()
    second = start()
    until(lambda: len(launches(graph)) == 3, every=AT_ONCE)
    second.send_signal(signal.SIGINT)
    second.communicate(timeout=limit(60))
    third = start()
    out, said = third.communicate(timeout=limit(60))
    assert third.returncode == 0, said
    assert b"better.py replaces the present text" in out
    assert len([*contests(graph)[0].training_runs.iterdir()]) == 3
    assert [each["verb"] for each in requests(graph)] == ["retrain"]


def test_a_candidate_that_fails_twice_is_told_with_its_reason(graph, flowrl):
    order(graph, diverge_above=5e-3)
    folder = proposals(graph, better=at("3e-3"), wild=at("1e-2"))
    said = flowrl("improve", graph.root, WOOD.name, "--proposals", folder, *FRAMES).out
    assert "better.py replaces the present text" in said.splitlines()[0]
    assert said.splitlines()[-1].startswith("  wild.py: ")
    assert "%" not in said.splitlines()[-1]


def test_a_present_text_that_fails_is_not_replaced(graph, flowrl):
    order(graph, diverge_above=5e-4)
    folder = proposals(graph, slow=at("3e-4"))
    said = flowrl("improve", graph.root, WOOD.name, "--proposals", folder, *FRAMES, code=1).out
    assert "nothing is changed, because the present text failed: " in said.splitlines()[0]
    assert "slow.py: " in said, "which succeeds"
    assert requests(graph) == []


def test_a_contest_of_experts_that_are_no_more_is_held_again(graph, flowrl):
    order(graph, success=0.0)
    folder = proposals(graph, other=at("3e-3"))
    words = ("improve", graph.root, WOOD.name, "--proposals", folder, *FRAMES)
    flowrl(*words, code=1)
    flowrl(*words, code=1)
    assert len(launches(graph)) == 2
    [sweep], manifest = contests(graph), ExpertStore(graph).manifest()
    former = replace(manifest.experts[0], version="v000001-e0.a1.0f", skill="Collect Sapling")
    manifests.swap(sweep, Manifest(generation=1, experts={0: former}))
    flowrl(*words, code=1)
    assert len(launches(graph)) == 4


def test_a_model_is_not_asked_for_trusted_code(graph, flowrl, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    text = "def task_reward(inventory):\n    return float(len(str(inventory)))"
    config = {"format": 1, "env_name": GAME, "launcher": "local", "sandbox": "none"} | OWN
    records.write(graph.config_json, {**config, "trust_skills": True})
    trusted = replace(WOOD, reward=text, trusted=True)
    keep_other_text(graph, recorded_config(graph), trusted, ())
    words = ("improve", graph.root, WOOD.name, "--base_url", "http://localhost:1/v1", "--model=m")
    assert "Collect Wood is trusted code" in flowrl(*words, code=2).err


def test_what_cannot_compete_is_one_line(graph, flowrl, tmp_path):
    folder = proposals(graph, other=at("1e-3").replace('"Collect Wood"', '"Fell Trees"'))
    words = ("improve", graph.root, WOOD.name, "--proposals")
    assert "no proposal is admitted" in flowrl(*words, folder, code=1).out
    assert "has no file *.py" in flowrl(*words, tmp_path, code=2).err
    assert "--proposals" in flowrl("improve", graph.root, WOOD.name, code=2).err
    told = flowrl("improve", graph.root, "Collect Iron", "--proposals", folder, code=1).err
    assert "Collect Iron has not begun" in told
    assert contests(graph) == []


@pytest.fixture
def write(graph, flowrl, monkeypatch):
    """Write a skill with three rewards, of which the second learns best."""
    pytest.importorskip("openai", reason="the extra 'llm' is not installed")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    approve(graph.root)
    order(graph, words={"2.0 *": 0.7, "0.5 *": 0.0}, success=0.3)
    for reward in (BETTER, WORSE):
        digest = SkillCode.of(replace(WOOD, reward=reward), GAME).digest
        ApprovalStore(graph.approvals).keep(CodeApproval(digest=digest, trusted=False))
    with serving(FakeEndpoint()) as endpoint:
        scripted(endpoint, [contract(), rewards(WORSE, BETTER, WOOD.reward)])
        told = ["write", graph.root, WISH, "--base_url", endpoint.url, "--model", "m", *FRAMES]

        def written(*more: str, code: int = 0):
            return flowrl(*told, *more, code=code)

        written.endpoint = endpoint
        yield written


def test_the_best_reward_is_kept_with_its_expert_and_trained_on(graph, write):
    said = write().out
    assert f"Fell Trees: added to {graph.root}, with its expert, which is trained on" in said
    assert [line.split(":")[0].strip() for line in said.splitlines()[1::4]] == [
        *("candidate_2.py", "candidate_3.py", "candidate_1.py")
    ]
    assert SkillSources(graph).recorded()["Fell Trees"].reward == BETTER
    expert = ExpertStore(graph).manifest().experts[2]
    assert (expert.skill, expert.frames) == ("Fell Trees", 10_000)
    row = next(row for row in read_rows(graph) if row.skill == "Fell Trees")
    assert (row.status, row.success_rate) == ("completed", 0.7)
    assert [each["verb"] for each in requests(graph)] == ["train-more"]
    chosen = [e for e in read_events(graph.transcripts / "1.jsonl") if isinstance(e, Chosen)]
    assert chosen[0].file == "candidate_2.py"
    assert "0.0% [0.0%, 1.5%] success" in chosen[0].standings[-4]
    assert write().out.startswith("Fell Trees: granted before")
    assert len(launches(graph)) == 3


def test_a_command_that_is_ended_before_its_last_write_goes_on(graph, write, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("flowrl.llm.asking.send_request", end)
        write(code=130)
    assert "with its expert, which is trained on" in write().out
    assert len(launches(graph)) == 3
    assert [each["verb"] for each in requests(graph)] == ["train-more"]
    assert len(ExpertStore(graph).manifest().experts[2].lineage) == 1


@pytest.mark.parametrize("stopped", [False, True])
def test_a_further_round_is_told_of_the_contest_and_its_best_reward_is_kept(graph, write, stopped):
    """Its reward succeeds in all episodes; a start that is stopped in it goes on there."""
    best = WOOD.reward.replace("return ", "return 4.0 * ")
    digest = SkillCode.of(replace(WOOD, reward=best), GAME).digest
    ApprovalStore(graph.approvals).keep(CodeApproval(digest=digest, trusted=False))
    order(graph, words={"4.0 *": 0.9, "2.0 *": 0.7, "0.5 *": 0.0}, success=0.3)
    answers = [contract(), rewards(WORSE, BETTER, WOOD.reward), rewards(best)]
    endpoint = scripted(write.endpoint, answers)
    say = endpoint.say

    def say_and_refuse(data: str) -> str:
        endpoint.status, endpoint.refuse = 401, int(stopped and len(endpoint.asked) == 2)
        return say(data)

    endpoint.say = say_and_refuse
    if stopped:
        assert "refuses the key" in write("--llm_rounds=2", code=EXIT_UNAVAILABLE).err
        assert "Fell Trees" not in SkillSources(graph).recorded()
    said = write("--llm_rounds=2").out
    assert "Fell Trees: added to" in said
    assert [line.split(":")[0].strip() for line in said.splitlines()[1::4]] == [
        *("../2/candidate_1.py", "candidate_2.py")
    ]
    told = json.loads("\n".join(endpoint.asked[2]["messages"][-1]["content"].split("\n")[1:-1]))
    tried = {row["candidate"]: row for row in told["tried"]}
    assert tried["candidate_1.py"]["success_rate"] == 0.0
    assert tried["candidate_1.py"]["terms"][0]["source"] == "a"
    second = tried["candidate_2.py"]
    assert [point["frames"] for point in second["curve"]] == [
        *(2000, 3000, 4000, 5000, 7000, 8000, 9000, 10_000)
    ]
    assert second["curve"][-1]["success"] == pytest.approx(0.7)
    assert second["loss"].startswith("30% of its episodes end in step 1, Fell Trees, mostly by")
    assert SkillSources(graph).recorded()["Fell Trees"].reward == best
    chosen = [e for e in read_events(graph.transcripts / "1.jsonl") if isinstance(e, Chosen)]
    assert chosen[0].file == "../2/candidate_1.py"
    assert write("--llm_rounds=2").out.startswith("Fell Trees: granted before")
    assert len(endpoint.asked) == 3 + stopped
    assert len(launches(graph)) == 5


def test_a_further_round_without_a_reward_that_passes_changes_nothing(graph, write):
    answers = [contract(), rewards(WORSE, BETTER, WOOD.reward), "I cannot."]
    scripted(write.endpoint, answers)
    assert "Fell Trees: added to" in write("--llm_rounds=3", "--llm_repairs=1").out
    assert SkillSources(graph).recorded()["Fell Trees"].reward == BETTER
    assert len(write.endpoint.asked) == 4
    assert len(launches(graph)) == 3


def end(*_: object) -> None:
    raise KeyboardInterrupt


def test_while_a_scheduler_lives_the_best_reward_is_added_without_its_expert(graph, write):
    lock = DaemonLock(graph.daemon_lock)
    lock.acquire()
    try:
        said = write().out
    finally:
        lock.release()
    assert "to be trained anew, because a scheduler trains the graph" in said
    assert SkillSources(graph).recorded()["Fell Trees"].reward == BETTER
    assert [each["verb"] for each in requests(graph)] == ["add"]
    assert 2 not in ExpertStore(graph).manifest().experts


def test_where_none_succeeds_the_first_reward_is_added(graph, write):
    order(graph, success=0.0)
    assert "the first one, because none succeeded" in write().out
    assert SkillSources(graph).recorded()["Fell Trees"].reward == WORSE
    assert [each["verb"] for each in requests(graph)] == ["add"]


def test_a_models_rewards_compete_with_the_present_text(graph, flowrl, monkeypatch):
    pytest.importorskip("openai", reason="the extra 'llm' is not installed")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    order(graph, words={"2.0 *": 0.9, "0.5 *": 0.0}, success=0.5)
    for reward in (BETTER, WORSE):
        digest = SkillCode.of(replace(WOOD, reward=reward), GAME).digest
        ApprovalStore(graph.approvals).keep(CodeApproval(digest=digest, trusted=False))
    told = ["improve", graph.root, WOOD.name, *FRAMES, "--proposals"]
    told += [proposals(graph, same=at("3e-3")), "--llm_candidates=2"]
    with serving(FakeEndpoint()) as endpoint:
        asked = [*told, "--base_url", endpoint.url, "--model", "m"]
        cheat = f"max_steps = 900\n\n\n{WOOD.reward}"
        scripted(endpoint, [rewards(cheat), rewards(WORSE, BETTER)])
        said = flowrl(*asked).out
    assert "1/candidate_3.py replaces the present text" in said
    [first, second] = [request["messages"] for request in endpoint.asked]
    assert '"task_reward": ' in first[1]["content"].split('"present": ')[1]
    assert "the reward changes the contract" in second[-1]["content"]
    [text] = [skill for skill in SkillSources(graph).recorded().values() if skill.name == WOOD.name]
    assert (text.reward, text.training, text.is_done) == (BETTER, {}, WOOD.is_done)
    file = graph.transcripts / "1" / "candidate_3.py"
    assert load_skill(file, env_name=GAME) == text
    assert len(launches(graph)) == 4
