"""A judge behind an endpoint: good and bad answers, over real HTTP."""

from __future__ import annotations

import json
import time

import pytest

from flowrl.errors import ConfigError
from flowrl.judging.judge import Judge, JudgeUnavailableError, SkillText
from flowrl.llm.exchange import KEY as VARIABLE
from flowrl.llm.exchange import Budget, Cost
from tests.judging.endpoint import KEY, NO_BOUND, FakeEndpoint, answer, named, needs_openai, serving
from tests.judging.making import at_step

pytestmark = needs_openai

ITEM = SkillText(skill="Dig", text='{"name": "Dig"}')


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setenv(VARIABLE, KEY)
    with serving(FakeEndpoint()) as found:
        yield found


def asking(endpoint: FakeEndpoint, **settings) -> Judge:
    from flowrl.judging.openai import OpenAIJudge

    return OpenAIJudge(**named(endpoint, **settings))


def test_a_good_answer_is_a_judgement(endpoint):
    found = asking(endpoint).score(ITEM)
    assert (found.score, found.why, found.judge) == (0.75, "it looks fine", "openai")
    assert (found.cost.calls, found.cost.tokens) == (1, 100)
    (request,) = endpoint.asked
    assert request["response_format"]["json_schema"]["strict"] is True
    assert request["model"] == "m"
    assert endpoint.keys == {f"Bearer {KEY}"}


def test_an_item_is_data_between_markers(endpoint):
    asking(endpoint).score(ITEM)
    system, user = endpoint.asked[0]["messages"]
    first, *_, last = user["content"].split("\n")
    assert first == last
    assert first in system["content"]
    assert ITEM.text not in system["content"]


def test_an_episode_is_sent_as_a_table(endpoint):
    assert asking(endpoint).score(at_step(1)).score == 0.75
    assert "9 1 0.5" in endpoint.asked[0]["messages"][1]["content"]


@pytest.mark.parametrize(
    "said",
    [
        "I would give it a 0.9.",
        "",
        "{",
        "[0.5]",
        "null",
        '{"score": 7, "why": ""}',
        '{"score": -0.1, "why": ""}',
        '{"score": NaN, "why": ""}',
        '{"score": Infinity, "why": ""}',
        '{"score": true, "why": ""}',
        '{"score": "0.5", "why": ""}',
        '{"score": null, "why": "I cannot help with that"}',
        '{"why": "no score"}',
        "[" * 5000,
    ],
)
def test_what_is_no_score_is_an_abstention(endpoint, said):
    endpoint.say = lambda text: said
    assert asking(endpoint).score(ITEM).score is None


@pytest.mark.parametrize(
    "body",
    [
        "{}",
        "[]",
        "1",
        "[[]]",
        "<html>",
        '{"choices": {"0": 1}}',
        '{"choices": []}',
        '{"choices": [{"message": null}]}',
    ],
)
def test_what_is_no_completion_ends_the_judging(endpoint, tmp_path, body):
    endpoint.body = body
    with pytest.raises(JudgeUnavailableError, match="no completion; correct --base_url"):
        asking(endpoint, answers=tmp_path).score(ITEM)
    assert len(endpoint.asked) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "body",
    [
        '{"choices": [{"message": {"content": null, "refusal": "no"}}]}',
        '{"choices": [{"finish_reason": "length", "message": '
        '{"content": "{\\"score\\": 1, \\"why\\": \\"\\"}"}}], "usage": 3}',
    ],
)
def test_what_is_refused_or_cut_off_is_an_abstention(endpoint, body):
    endpoint.body = body
    assert asking(endpoint).score(ITEM).score is None


@pytest.mark.parametrize("status", [429, 500, 503])
def test_two_refusals_are_retried(endpoint, status):
    endpoint.refuse, endpoint.status = 2, status
    assert asking(endpoint).score(ITEM).score == 0.75
    assert len(endpoint.asked) == 3


def test_an_answer_that_is_cut_off_is_asked_for_again(endpoint):
    endpoint.cut_off = 1
    assert asking(endpoint).score(ITEM).score == 0.75
    assert len(endpoint.asked) == 2


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "refuses the key (401); correct OPENAI_API_KEY"),
        (403, "refuses the key (403)"),
        (429, "asked too often (429)"),
        (404, "answers 404; correct --base_url or --model"),
        (302, "answers 302"),
    ],
)
def test_an_endpoint_that_refuses_is_one_line_without_the_key(endpoint, status, said):
    endpoint.refuse, endpoint.status = 99, status
    with pytest.raises(JudgeUnavailableError) as caught:
        asking(endpoint).score(ITEM)
    text = str(caught.value)
    assert said in text
    assert KEY not in text
    assert "\n" not in text


def test_an_endpoint_that_is_slow_or_not_there_is_one_line(endpoint, monkeypatch):
    monkeypatch.setattr("flowrl.judging.openai.RETRIES", 0)
    monkeypatch.setattr("flowrl.judging.openai.TIMEOUT_SECONDS", 0.2)
    endpoint.delay_seconds = 20
    with pytest.raises(JudgeUnavailableError, match="does not answer in time"):
        asking(endpoint).score(ITEM)
    nowhere = asking(FakeEndpoint(url="http://127.0.0.1:1/v1"))
    with pytest.raises(JudgeUnavailableError, match=r"the judge at 127.0.0.1:1 cannot be reached"):
        nowhere.score(ITEM)


@pytest.mark.parametrize(
    ("behaves", "seconds", "said"),
    [
        ({"refuse": 99, "status": 503}, 30.0, "answers 503"),
        ({"body": " " * 2**21}, 0.4, "answers with more than 1,048,576 bytes until the time is"),
    ],
    ids=["busy", "endless"],
)
def test_an_endpoint_that_never_answers_well_is_told_by_its_last_answer(
    endpoint, monkeypatch, behaves, seconds, said
):
    monkeypatch.setattr("flowrl.judging.openai.TIMEOUT_SECONDS", seconds)
    for name, value in behaves.items():
        setattr(endpoint, name, value)
    with pytest.raises(JudgeUnavailableError, match=said):
        asking(endpoint).score(ITEM)


@pytest.mark.parametrize(
    ("url", "model", "env", "said"),
    [
        ("", "m", {VARIABLE: KEY}, "an endpoint is asked that you name"),
        ("api.openai.com", "m", {VARIABLE: KEY}, "such as https"),
        ("file:///etc/passwd", "m", {VARIABLE: KEY}, "such as https"),
        ("https://ann:hunter2@x/v1", "m", {VARIABLE: KEY}, "without a user or a password"),
        ("https://x/v1", "", {VARIABLE: KEY}, "--model is missing"),
        ("https://x/v1", "m", {}, "OPENAI_API_KEY is not set"),
    ],
)
def test_what_is_missing_is_one_line(url, model, env, said, monkeypatch):
    from flowrl.judging.openai import OpenAIJudge

    monkeypatch.delenv(VARIABLE, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said) as caught:
        OpenAIJudge(url, model, Budget(NO_BOUND))
    assert "hunter2" not in str(caught.value)


def test_a_judgement_is_kept_and_costs_nothing_again(endpoint, tmp_path):
    judge = asking(endpoint, answers=tmp_path / "answers")
    first, again = judge.score(ITEM), judge.score(ITEM)
    assert again.score == first.score
    assert again.cost == Cost()
    assert len(endpoint.asked) == 1
    (kept,) = (tmp_path / "answers").iterdir()
    kept.write_text(kept.read_text().replace("0.75", "0.99"))
    assert judge.score(ITEM).score == 0.75, "an edited answer is asked for again"
    asking(endpoint, answers=tmp_path / "answers", model="n").score(ITEM)
    assert len(endpoint.asked) == 3, "another model is asked itself"
    assert judge.score(ITEM, kept=False).cost.calls == 1


@pytest.mark.parametrize(
    "most", [Cost(calls=2, tokens=1e9, seconds=1e9), Cost(calls=1e9, tokens=150, seconds=1e9)]
)
def test_a_judge_abstains_when_its_budget_is_used_up(endpoint, most):
    judge = asking(endpoint, budget=Budget(most))
    found = [judge.score(SkillText(skill="Dig", text=str(n))) for n in range(4)]
    assert [one.score is None for one in found] == [False, False, True, True]
    assert "--judge_budget" in found[-1].why
    assert len(endpoint.asked) == 2


def test_seconds_count_once(endpoint):
    endpoint.delay_seconds = 0.1
    judge, began = asking(endpoint), time.monotonic()
    judge.score(ITEM)
    assert 0.1 <= judge.budget.spent.seconds <= time.monotonic() - began


def test_each_request_counts_and_two_judges_share_a_budget(endpoint):
    from flowrl.judging.openai import USED_UP

    budget = Budget(Cost(calls=6, tokens=1e9, seconds=1e9))
    one, other = (asking(endpoint, budget=budget, model=model) for model in "ab")
    endpoint.refuse = 2
    assert one.score(ITEM).cost == Cost(3, 100, budget.spent.seconds), "with two retries"
    assert other.score(ITEM).score == 0.75
    endpoint.refuse = 99
    found = other.score(SkillText(skill="Dig", text="2"))
    assert (found.score, found.why) == (None, USED_UP), "two retries of four are left"
    assert one.score(SkillText(skill="Dig", text="3")).score is None
    assert budget.spent.calls == len(endpoint.asked) == 6


def test_a_call_that_failed_has_cost_its_requests(endpoint):
    judge = asking(endpoint)
    endpoint.refuse, endpoint.status = 99, 401
    with pytest.raises(JudgeUnavailableError):
        judge.score(ITEM)
    assert judge.budget.spent.calls == len(endpoint.asked) == 1
    assert judge.budget.spent.seconds > 0


@pytest.mark.parametrize("kind", ["a reason", "prose", "no completion"])
def test_no_part_of_a_key_is_kept_wherever_an_answer_is_cut(endpoint, tmp_path, kind):
    judge = asking(endpoint, answers=tmp_path)
    for before in range(0, 64, 6):
        said = f"{'x' * before} {KEY} is your key"
        reason = json.dumps({"score": 0.5, "why": f"{'y' * 240}{said}"})
        told = reason if kind == "a reason" else said
        endpoint.say = lambda _, told=told: told
        endpoint.body = said if kind == "no completion" else None
        try:
            why = judge.score(SkillText(skill="Dig", text=f"{before}")).why
        except JudgeUnavailableError as error:
            why = str(error)
        assert "xx"[:before] in why
        assert KEY[:6] not in why, before
    kept = [path.read_text() for path in tmp_path.iterdir()]
    assert len(kept) == (0 if kind == "no completion" else 11)
    assert all(KEY[:6] not in text for text in kept)


def test_a_key_that_the_endpoint_repeats_is_not_kept(endpoint, tmp_path):
    endpoint.say = answer(0.5, f"your key is {KEY}")
    judge = asking(endpoint, answers=tmp_path)
    assert KEY not in judge.score(ITEM).why
    assert all(KEY not in path.read_text() for path in tmp_path.iterdir())
