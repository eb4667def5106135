"""How an evaluation is told."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flowrl import evaluate
from flowrl.evaluate import Evaluation, StepRate


@pytest.mark.parametrize("name", ["[red]x[/red]", "[/]", ":skull:"])
def test_a_hostile_name_is_shown_and_not_interpreted(name):
    step = StepRate(
        skill=name, count=1, expert=7, successes=3, success_rate=0.75, low=0.3, high=0.95
    )
    found = Evaluation(
        graph="g",
        generation=2,
        skill=name,
        episodes=4,
        mean_episode_length=12.0,
        mean_episode_return=1.0,
        steps=(step,),
    )
    console = Console(file=io.StringIO(), record=True, width=140)
    console.print(evaluate._table(found))
    title, _, line = console.export_text().splitlines()
    assert title.startswith(f"{name}: 4 episodes of the experts of generation 2")
    assert line.split() == [name, "1", "7", "75.0%", "30.0%", "to", "95.0%"]


@pytest.mark.parametrize(("successes", "trials"), [(0, 1), (1, 1), (0, 256), (256, 256), (7, 9)])
def test_an_interval_holds_its_share_and_stays_a_share(successes, trials):
    low, high = evaluate.wilson(successes, trials)
    assert 0 <= low <= successes / trials <= high <= 1
    assert low < high
