"""`flowrl write`: what is asked, checked, kept and replayed, over real HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.errors import EXIT_BUDGET, EXIT_UNAVAILABLE, EXIT_USAGE
from flowrl.llm.answers import Contract, ItemAmount, skill_text
from flowrl.llm.transcript import Answered, CallLost, Ended, read_events
from flowrl.parallel.skill_sources import SkillSources
from flowrl.skills.skill import load_skill
from flowrl.skills.validation.cache import ApprovalStore
from flowrl.skills.validation.dry_run import SkillCode
from tests.experts.making import all_files
from tests.judging.endpoint import KEY, FakeEndpoint, needs_openai, serving
from tests.llm.making import GAME, WISH, WOOD, amounts, approve, contract, rewards, scripted

pytestmark = needs_openai
GOOD = (contract(), rewards())
CALL = "def task_reward(n):\n    return open('x')"


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serving(FakeEndpoint()) as found:
        yield scripted(found, GOOD)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder for skills, in which the predicate has its approval without a reward."""
    approve(tmp_path / "mine")
    return tmp_path / "mine"


def words(endpoint: FakeEndpoint, folder: Path, *more: object, wish: str = WISH) -> list[object]:
    told = ["write", "--wish", wish, "-o", folder, "--base_url", endpoint.url, "--model", "m"]
    return [*told, *more]


def events_in(folder: Path, number: int = 1) -> list:
    return read_events(folder / "transcripts" / f"{number}.jsonl")


def test_a_skill_is_written_in_the_form_of_the_librarys(endpoint, tmp_path, flowrl):
    said = flowrl(*words(endpoint, tmp_path / "new")).out
    assert "Fell Trees: written to" in said
    assert len(endpoint.asked) == 2
    file = tmp_path / "new" / "fell_trees.py"
    assert file.read_text().startswith('"""Fell trees for logs."""\n\nname = "Fell Trees"\n')
    skill = load_skill(file, env_name=GAME)
    assert {item: str(n) for item, n in skill.gain.items()} == {"logs": "n"}
    assert ApprovalStore(tmp_path / "new" / "approvals").find(SkillCode.of(skill, GAME).digest)
    assert endpoint.keys == {f"Bearer {KEY}"}


def test_refusals_go_back_to_the_model_until_an_answer_passes(endpoint, folder, flowrl):
    bad = ["I cannot help with that.", contract(gain=[]), contract("Collect Wood"), contract()]
    scripted(endpoint, [*bad, rewards(CALL, WOOD.reward)])
    flowrl(*words(endpoint, folder))
    told = [request["messages"][-1]["content"] for request in endpoint.asked]
    assert "is no JSON; give one JSON object" in told[1]
    assert "gain is empty" in told[2]
    assert "the graph has 'Collect Wood' already" in told[3]
    assert (folder / "transcripts" / "1" / "candidate_1.py").read_text().endswith(f"{CALL}\n")
    assert load_skill(folder / "fell_trees.py", env_name=GAME).reward == WOOD.reward


def test_a_wish_may_be_longer_than_the_name_of_a_file(endpoint, folder, flowrl):
    wish = "Carry wood to the water, " * 12
    told = words(endpoint, folder)
    assert "Fell Trees: written to" in flowrl("write", wish, *told[3:]).out
    assert wish.strip() in endpoint.asked[0]["messages"][-1]["content"]


def test_a_wish_is_given_up_with_reasons_that_the_next_one_is_told(endpoint, folder, flowrl):
    scripted(endpoint, [contract(requirements=amounts({"moon": 1}))])
    said = flowrl(*words(endpoint, folder, "--llm_repairs", 1), code=1).out
    assert "given up: " in said
    assert "moon" in said
    assert len(endpoint.asked) == 2
    assert list(folder.glob("*.py")) == []
    scripted(endpoint, GOOD)
    flowrl(*words(endpoint, folder))
    context = json.loads(endpoint.asked[2]["messages"][1]["content"].split("\n", 1)[1][:-17])
    assert "moon" in context["failed"][0]


def test_a_reward_cannot_change_the_contract(endpoint, folder, flowrl):
    for more in ("max_steps = 1", 'like = "Collect Stone"', 'ephemeral = ["logs"]'):
        scripted(endpoint, [contract(), rewards(f"{more}\n\n\n{WOOD.reward}")])
        said = flowrl(*words(endpoint, folder, "--llm_repairs", 0, wish=more), code=1).out
        assert "the reward changes the contract" in said


def test_a_graph_is_told_of_and_gets_the_skill(endpoint, graph_paths, flowrl):
    approve(graph_paths.root)
    told = ["write", graph_paths.root, WISH, "--base_url", endpoint.url, "--model", "m"]
    assert "Fell Trees: added to" in flowrl(*told).out
    context = endpoint.asked[0]["messages"][1]["content"]
    assert '"success_rate"' in context
    assert SkillSources(graph_paths).recorded()["Fell Trees"].reward == WOOD.reward
    [request] = graph_paths.requests.glob("*.json")
    assert json.loads(request.read_text())["verb"] == "add"
    assert "Fell Trees: granted before" in flowrl(*told).out
    assert len(endpoint.asked) == 2, "the same wish is not paid twice"
    assert len([*graph_paths.requests.glob("*.json")]) == 1


def test_no_file_of_a_user_is_written_over(endpoint, folder, flowrl):
    mine = folder / "fell_trees.py"
    hew = Contract(**{**json.loads(contract("Hew")), "gain": [ItemAmount(item="hew", amount="1")]})
    mine.write_text(skill_text(hew, WOOD.reward))
    said = flowrl(*words(endpoint, folder), code=1).err
    assert "fell_trees.py is there already, with another text; move it away" in said
    mine.rename(folder / "hew.py")
    assert "Fell Trees: written to" in flowrl(*words(endpoint, folder)).out
    mine.write_text(f"# mine\n{mine.read_text()}")
    assert "Fell Trees: granted before" in flowrl(*words(endpoint, folder)).out
    assert mine.read_text().startswith("# mine\n")
    assert len(endpoint.asked) == 2


def test_a_replay_makes_the_same_files_without_network_and_extra(endpoint, folder, tmp_path):
    scripted(endpoint, [contract(gain=[]), contract(), rewards(CALL, WOOD.reward)])
    code = "import sys; from flowrl import cli; sys.exit(cli.main(sys.argv[1:]))"
    env = {"PATH": "/usr/bin", "HOME": "/", "OPENAI_API_KEY": KEY}
    run = [sys.executable, "-c"]
    subprocess.run([*run, code, *map(str, words(endpoint, folder))], env=env, check=True)
    endpoint.refuse = 99
    blocked = f"import sys; sys.modules['openai'] = sys.modules['httpx'] = None; {code}"
    for other in (tmp_path / "one", tmp_path / "two"):
        approve(other)
        told = ["write", WISH, "-o", str(other), "--llm_replay", str(folder / "transcripts")]
        subprocess.run([*run, blocked, *told], check=True, env={"PATH": "/usr/bin", "HOME": "/"})
        assert all_files(other) == all_files(folder)
    assert len(endpoint.asked) == 3


def test_a_replay_that_departs_says_where(endpoint, folder, tmp_path, flowrl):
    flowrl(*words(endpoint, folder))
    source = folder / "transcripts"

    def replayed(*more: object, wish: str = WISH, code: int = 1) -> str:
        approve(tmp_path / "other")
        told = ["write", "--wish", wish, "-o", tmp_path / "other", "--llm_replay", source, *more]
        said = flowrl(*told, code=code).err
        assert said.count("\n") == 1
        return said

    (tmp_path / "other").mkdir()
    text = (
        (folder / "fell_trees.py").read_text().replace("Fell Trees", "Hew").replace("logs", "hew")
    )
    (tmp_path / "other" / "hew.py").write_text(text)
    assert "1.jsonl: event 1 departs: begun.context at character" in replayed()
    (tmp_path / "other" / "hew.py").unlink()
    assert "has no transcript of the wish 'Fly'; there are 'Fell trees" in replayed(wish="Fly")
    assert "is of the game" in replayed("--env_name", "Craftax-Symbolic-v1")
    lines = (source / "1.jsonl").read_text().splitlines(keepends=True)
    (source / "1.jsonl").write_text("".join(lines[:-4]))
    assert "it ends before its wish does" in replayed()
    lines[2] = lines[2].replace("Fell Trees", "Fell Tree")
    (source / "1.jsonl").write_text("".join(lines))
    assert "line 3 is damaged or was edited" in replayed()


def test_the_budget_outlives_a_restart_and_says_what_was_reached(endpoint, folder, flowrl):
    scripted(endpoint, [contract(gain=[]), *GOOD])
    said = flowrl(*words(endpoint, folder, "--llm_calls", 2), code=EXIT_BUDGET).err
    assert "(--llm_calls 2, 2 spent): the contract of 'Fell Trees' is accepted, no reward" in said
    flowrl(*words(endpoint, folder, "--llm_calls", 2), code=EXIT_BUDGET)
    assert len(endpoint.asked) == 2
    assert (
        "--llm_tokens"
        in flowrl(*words(endpoint, folder, "--llm_tokens", 300), code=EXIT_BUDGET).err
    )
    flowrl(*words(endpoint, folder, "--llm_calls", 3))
    assert len(endpoint.asked) == 3, "what was answered is not asked again"


def test_requests_that_fail_count_as_well(endpoint, folder, flowrl):
    endpoint.refuse, endpoint.status = 3, 401
    assert "refuses the key (401)" in flowrl(*words(endpoint, folder), code=EXIT_UNAVAILABLE).err
    assert [type(event) for event in events_in(folder)][-1] is CallLost
    endpoint.refuse = 0
    assert "1 spent" in flowrl(*words(endpoint, folder, "--llm_calls", 1), code=EXIT_BUDGET).err
    flowrl(*words(endpoint, folder))
    assert sum(isinstance(event, Answered) for event in events_in(folder)) == 2
    assert isinstance(events_in(folder)[-1], Ended)


@pytest.mark.parametrize("known", ["json_schema", "tools", "fenced"])
def test_the_form_of_an_answer_is_found_once(endpoint, folder, flowrl, known):
    """The endpoint refuses the forms that it does not know, each once."""
    order = ("json_schema", "tools", "fenced")
    endpoint.lacks = order[: order.index(known)]
    scripted(endpoint, GOOD)
    flowrl(*words(endpoint, folder))
    assert len(endpoint.asked) == order.index(known) + 2
    assert {e.form for e in events_in(folder) if isinstance(e, Answered)} == {known}
    said = endpoint.asked[-1]
    assert ("response_format" in said, "tools" in said) == (known == order[0], known == order[1])


def test_settings_reach_the_endpoint_and_retries_count(endpoint, folder, flowrl):
    endpoint.refuse, endpoint.status = 2, 429
    flowrl(*words(endpoint, folder, "--temperature", 0.3, "--seed", 7))
    assert {(each["temperature"], each["seed"]) for each in endpoint.asked} == {(0.3, 7)}
    assert len(endpoint.asked) == 4
    assert [e.calls for e in events_in(folder) if isinstance(e, Answered)] == [3, 1]


def test_no_secret_and_no_home_reaches_the_disk_or_the_output(
    endpoint, folder, flowrl, monkeypatch, tmp_path
):
    home = tmp_path / "home-of-canary"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("MY_LLM", "canary-of-forty-two")
    escaped = "".join(f"\\u{ord(char):04x}" for char in "canary-of-forty-two")
    leak = contract(description=f"Bearer canary-of-forty-two in {home}/x", gain=[])
    hidden = contract(description="@@").replace("@@", escaped)
    reward = f"# {home} canary-of-forty-two\n{WOOD.reward}"
    scripted(endpoint, [leak, hidden, rewards(reward)])
    said = flowrl(*words(endpoint, folder, "--api_key_env", "MY_LLM", wish=f"{WISH} in {home}"))
    assert endpoint.keys == {"Bearer canary-of-forty-two"}
    told = str(all_files(folder)) + said.out + said.err + str(endpoint.asked)
    assert "canary-of-forty-two" not in told
    assert str(home) not in str(all_files(folder)) + str(endpoint.asked)
    assert (folder / "fell_trees.py").exists()
    endpoint.body = "<p>canary-of-forty-two</p>"
    told = words(endpoint, folder, "--api_key_env", "MY_LLM", wish="Fly")
    said = flowrl(*told, code=EXIT_UNAVAILABLE).err
    assert "answers '<p>[redacted]</p>', no completion" in said


BAD_FLAGS = {
    "no scheme": (("--base_url", "api.openai.com/v1"), "give one such as https"),
    "a password": (("--base_url", "https://ann:hunter2@x/v1"), "without a user or a password"),
    "half an address": (("--base_url", "http://[::1/v1"), "--base_url is no address"),
    "a port that is none": (("--base_url", "http://x:99999/v1"), "--base_url is no address"),
    "no model": (("--model=",), "has no value"),
    "no key": (("--api_key_env", "NOBODY_SET_THIS"), "NOBODY_SET_THIS is not set"),
    "the key itself": (("--api_key_env", "sk-hunter2"), "the name of a variable"),
    "no calls": (("--llm_calls", "0"), "must be at least 1"),
    "no tokens": (("--llm_tokens", "0"), "must be at least 1"),
    "no seconds": (("--llm_seconds", "0"), "must be above 0"),
    "no candidates": (("--llm_candidates", "0"), "must be at least 1"),
    "a temperature of a fire": (("--temperature", "900"), "must lie in [0, 2]"),
    "few tokens for the context": (("--llm_context_tokens", "5"), "raise --llm_context_tokens"),
    "an unknown game": (("--env_name", "Chess"), "the game Chess is unknown"),
}


@pytest.mark.parametrize(("more", "said"), BAD_FLAGS.values(), ids=BAD_FLAGS)
def test_what_cannot_be_is_one_line_and_asks_nobody(endpoint, folder, flowrl, more, said):
    told = flowrl(*words(endpoint, folder, *more), code=EXIT_USAGE).err
    assert said in told
    assert told.count("\n") == 1
    assert "hunter2" not in told
    assert endpoint.asked == []
    if "--llm_context_tokens" not in more:  # the context is made of what was written before
        assert not (folder / "transcripts").exists()


def test_without_the_extra_one_line_says_what_to_install(endpoint, folder, flowrl, monkeypatch):
    monkeypatch.setitem(sys.modules, "flowrl.llm.client", None)
    assert "pip install '.[llm]'" in flowrl(*words(endpoint, folder), code=EXIT_USAGE).err


FAULTS = {
    "a wrong key": ({"refuse": 99, "status": 401}, "refuses the key (401)"),
    "an unknown model": ({"refuse": 99, "status": 404}, "answers 404; correct --base_url or --m"),
    "a request that is bad in every form": ({"refuse": 99, "status": 400}, "answers 400"),
    "429 for ever": ({"refuse": 99, "status": 429}, "asked too often (429)"),
    "503 for ever": ({"refuse": 99, "status": 503}, "answers 503"),
    "a stream cut in half": ({"cut_off": 99}, "cannot be reached"),
    "HTML": ({"body": "<html>Sign in</html>"}, "answers '<html>Sign in</html>', no completion"),
    "10 MB": ({"body": " " * 10**7}, "cannot be read: answers with more than"),
    "no completion": ({"body": "{}"}, "no completion"),
}


@pytest.mark.parametrize(("behaves", "said"), FAULTS.values(), ids=FAULTS)
def test_an_endpoint_that_fails_is_one_line_and_writes_no_skill(
    endpoint, folder, flowrl, behaves, said
):
    for name, value in behaves.items():
        setattr(endpoint, name, value)
    told = flowrl(*words(endpoint, folder, "--retries", 1), code=EXIT_UNAVAILABLE).err
    assert said in told
    assert told.count("\n") == 1
    assert KEY not in told + str(all_files(folder))
    assert list(folder.glob("*.py")) == []
    for name, value in vars(FakeEndpoint()).items():
        if name in behaves:
            setattr(endpoint, name, value)
    scripted(endpoint, GOOD)
    flowrl(*words(endpoint, folder))


ANSWERS = {
    "a refusal in words": ("I'm sorry, I can't.", "is no JSON"),
    "JSON of another schema": ('{"skill": "x"}', "skill is unknown"),
    "a list": ("[1]", "not a JSON object"),
    "a number": ("7", "not a JSON object"),
    "nothing": ("", "is no JSON"),
    "a deep list": ("[" * 9_000, "is no JSON"),
    "a name with a newline": (contract("Fell\nTrees"), "cannot be seen"),
    "a name that is taken": (contract("Collect Wood"), "has 'Collect Wood' already"),
    "a name of the same slug": (contract("Collect_Wood"), "share the slug"),
    "an item twice": (contract(gain=[*amounts({"a": 1}), *amounts({"a": 2})]), "an item twice"),
    "an amount that is code": (contract(gain=amounts({"a": "open('x')"})), "not linear"),
    "a cycle": (contract(requirements=amounts({"logs": 1})), "need one another in a circle"),
    "a need that nobody provides": (contract(requirements=amounts({"moon": 1})), "moon"),
    "nothing new": (contract(gain=amounts({"stone": "n", "a b": 1})), "names 'a b'"),
    "a setting of the graph": (
        contract(training=[{"flag": "env_name", "value": "x"}]),
        "is the same for all skills",
    ),
    "a setting that cannot be": (
        contract(training=[{"flag": "lr", "value": "fast"}]),
        "not a number",
    ),
    "half a character": (contract("Fell \ud800", gain=[]), "gain is empty"),
}


@pytest.mark.parametrize(("answer", "said"), ANSWERS.values(), ids=ANSWERS)
def test_an_answer_that_cannot_be_is_refused_by_a_line_with_a_remedy(
    endpoint, folder, flowrl, answer, said
):
    scripted(endpoint, [answer, *GOOD])
    flowrl(*words(endpoint, folder))
    [refusal] = events_in(folder)[3].refusals
    assert said in refusal
    assert refusal.isprintable()


def test_one_process_writes_in_a_folder(endpoint, folder, flowrl):
    endpoint.delay_seconds = 20
    run = [sys.executable, "-m", "flowrl", *map(str, words(endpoint, folder))]
    with subprocess.Popen(run, stderr=subprocess.DEVNULL) as other:
        while not endpoint.asked:
            assert other.poll() is None
        assert "was held by" in flowrl(*words(endpoint, folder), code=75).err
        other.kill()
    endpoint.released.set()


def test_the_model_chooses_a_skill_once_for_the_skills_that_are_there(
    endpoint, graph_paths, flowrl
):
    approve(graph_paths.root)
    told = ["write", graph_paths.root, "--next", "--base_url", endpoint.url, "--model", "m"]
    told += ["--target", "many logs"]
    assert "Fell Trees: added to" in flowrl(*told).out
    [asked] = [r["messages"][-1]["content"] for r in endpoint.asked[:1]]
    assert "choose the skill to learn next" in asked
    assert ", on the way to: many logs (beside " in asked
    scripted(endpoint, [contract("Fell More", gain=amounts({"beams": "n"})), rewards()])
    assert "Fell More: added to" in flowrl(*told).out
    assert "Fell Trees" in endpoint.asked[2]["messages"][-1]["content"]
    assert "leave one of them out" in flowrl(*told, "--wish", WISH, code=2).err
    assert "by --next" in flowrl("write", graph_paths.root, code=2).err
    assert "--target" in flowrl("write", graph_paths.root, WISH, "--target", "x", code=2).err


def test_a_graph_that_is_none_or_takes_no_file_is_one_line(endpoint, graph_paths, tmp_path, flowrl):
    told = flowrl(*words(endpoint, graph_paths.root), code=EXIT_USAGE).err
    assert "is a graph; name it without -o" in told
    told = flowrl(*words(endpoint, graph_paths.root / "skills" / "mine"), code=1).err
    assert "is inside the graph" in told
    told = flowrl("write", graph_paths.root, WISH, "--env_name", "Craftax-Symbolic-v1", code=2).err
    assert "the graph is of Craftax-Classic-Symbolic-v1" in told
    told = flowrl("write", tmp_path / "none", WISH, "--base_url", endpoint.url, code=1).err
    assert "is no graph" in told


def test_a_killed_writer_pays_for_no_call_twice_and_tears_no_file(endpoint, tmp_path):
    """SIGKILL at the k-th write for every k; then the same command goes on to the same files."""
    endpoint.say = lambda data: contract() if '"wish"' in data else rewards()
    scripts = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.llm.killed", endpoint.url, str(tmp_path)],
        cwd=scripts,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(outcomes) > 20
    expected = all_files(tmp_path / "whole" / "mine")
    for outcome in outcomes:
        asked = sum(each["model"] == outcome["model"] for each in endpoint.asked)
        lost = outcome["torn_answer"]
        assert asked == 2 + lost, outcome
        found = all_files(tmp_path / outcome["model"] / "mine")
        if not lost:
            model = json.dumps(outcome["model"])[1:-1]
            assert without_model(found, model) == without_model(expected, "whole"), outcome


def without_model(files: dict, model: str) -> dict:
    """Contents by name, but for seals and the seconds that were measured."""
    return {name: content for name, content in files.items() if "transcripts" not in str(name)}
