"""A judge that DSPy compiles, against the fake endpoint; DSPy takes seconds to load."""

from __future__ import annotations

import json

import numpy as np
import pytest

from flowrl.errors import ConfigError
from flowrl.games.base import find_game
from flowrl.judging.calibration import labelled_texts
from flowrl.judging.judge import JudgeUnavailableError, SkillText
from flowrl.llm.exchange import Budget, Cost
from flowrl.skills.skill import load_library
from tests.judging.endpoint import KEY, FakeEndpoint, answer, knows, named, serving

pytestmark = pytest.mark.slow
pytest.importorskip("dspy", reason="the extra 'dspy' is not installed")
GAME = find_game("Craftax-Classic-Symbolic-v1")
LIBRARY = list(load_library(GAME.name).values())


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serving(FakeEndpoint(say=knows(LIBRARY))) as found:
        yield found


def asking(endpoint: FakeEndpoint, **settings):
    from flowrl.judging.dspy import DSPyJudge

    return DSPyJudge(**named(endpoint, **settings))


def test_a_program_is_compiled_with_examples_and_kept_as_json(endpoint, tmp_path, capsys):
    judge = asking(endpoint)
    before = judge.version
    items, labels = labelled_texts(LIBRARY[:5], GAME, {})
    judge.compile(items, labels, tmp_path / "program.json")
    cost = judge.budget.spent
    assert capsys.readouterr().out == "", "the output is the report's"
    assert 1 <= cost.calls == len(endpoint.asked) <= 20
    assert cost.tokens == 100 * cost.calls
    kept = json.loads((tmp_path / "program.json").read_text())
    assert len(kept["demos"]) == 4
    assert KEY not in json.dumps(kept)
    assert judge.version != before
    items, labels = labelled_texts(LIBRARY[5:8], GAME, {})
    said = [judge.score(item) for item in items]
    assert np.array_equal([one.score > 0.5 for one in said], labels)
    assert len(endpoint.asked[-1]["messages"]) > 4, "examples are part of the prompt"


@pytest.mark.parametrize("say", [lambda text: "about 0.9", answer(7), answer(-1), answer("high")])
def test_what_is_no_score_is_an_abstention(endpoint, say):
    endpoint.say = say
    assert asking(endpoint).score(SkillText.of(LIBRARY[0])).score is None


def test_a_key_that_is_refused_while_compiling_is_not_shown(endpoint, tmp_path, capfd):
    endpoint.refuse, endpoint.status = 99, 401
    items, labels = labelled_texts(LIBRARY[:2], GAME, {})
    with pytest.raises(JudgeUnavailableError, match="refuses the key"):
        asking(endpoint).compile(items, labels, tmp_path / "p")
    assert KEY not in str(capfd.readouterr())
    assert list(tmp_path.iterdir()) == []


def test_a_refused_key_is_one_line(endpoint):
    endpoint.refuse, endpoint.status = 99, 401
    with pytest.raises(JudgeUnavailableError, match="refuses the key") as caught:
        asking(endpoint).score(SkillText.of(LIBRARY[0]))
    assert KEY not in str(caught.value)
    with pytest.raises(ConfigError, match="an endpoint is asked that you name"):
        asking(FakeEndpoint())


def test_two_refusals_are_retried_and_count(endpoint):
    endpoint.refuse = 2
    judge = asking(endpoint)
    assert judge.score(SkillText.of(LIBRARY[0])).score == 0.95
    assert judge.budget.spent.calls == len(endpoint.asked) == 3


def test_no_more_than_the_budget_is_asked_to_make_a_prompt(endpoint, tmp_path):
    budget = Budget(Cost(calls=2, tokens=1e9, seconds=1e9))
    items, labels = labelled_texts(LIBRARY[:5], GAME, {})
    judge = asking(endpoint, budget=budget)
    with pytest.raises(JudgeUnavailableError, match="used up before its prompt is made"):
        judge.compile(items, labels, tmp_path / "p")
    assert len(endpoint.asked) == budget.spent.calls == 2
    assert judge.score(items[0]).score is None


def test_a_key_that_the_endpoint_repeats_is_in_no_program(endpoint, tmp_path):
    knowing = endpoint.say
    endpoint.say = lambda text: json.dumps({**json.loads(knowing(text)), "why": f"you sent {KEY}"})
    judge = asking(endpoint)
    items, labels = labelled_texts(LIBRARY[:5], GAME, {})
    judge.compile(items, labels, tmp_path / "program.json")
    kept = json.loads((tmp_path / "program.json").read_text())
    assert "you sent [redacted]" in [demo["why"] for demo in kept["demos"]]
    assert KEY not in json.dumps(kept)
    endpoint.asked.clear()
    judge.score(items[0])
    assert KEY not in json.dumps(endpoint.asked)


@pytest.mark.parametrize("compiles", [True, False])
def test_seconds_of_the_budget_bound_each_question(endpoint, tmp_path, compiles):
    """An endpoint that is slow is not waited for until its own time is over."""
    endpoint.delay_seconds = 600.0
    judge = asking(endpoint, budget=Budget(Cost(calls=500, tokens=1e9, seconds=2.0)))
    items, labels = labelled_texts(LIBRARY[:5], GAME, {})
    if compiles:
        with pytest.raises(JudgeUnavailableError, match="budget is used up"):
            judge.compile(items, labels, tmp_path / "p")
    else:
        assert "used up" in judge.score(items[0]).why
    assert len(endpoint.asked) <= 2
    endpoint.released.set()
