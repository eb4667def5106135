from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from flowrl.ppo.progress import LINE_SECONDS, LiveTable, PlainLines, headline, open_display
from flowrl.runs import PlannedStep, Progress

PLAN = (
    PlannedStep(skill="Collect [bold]Wood[/]", count=3, expert=0),
    PlannedStep(skill="Make Pickaxe", count=1, expert=12),
)
PROGRESS = Progress(
    run_id="e12.a1.0badcafe",
    updates=1234,
    frames=50_000,
    total_frames=200_000,
    steps_per_second=8123.4,
    step_success=(0.91, 0.42),
    eta_seconds=75.2,
    phase="training",
    updated_at=100.0,
)


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)


def text_of(shown: Console) -> str:
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue()


def test_a_terminal_gets_a_table_with_every_step_of_the_plan():
    shown = console(terminal=True)
    display = open_display(PLAN, shown)
    assert isinstance(display, LiveTable)
    display.show(PROGRESS)
    display.close()
    for words in ("Collect [bold]Wood[/] × 3", "expert 12", "91%", "42%", "8,123 steps/s"):
        assert words in text_of(shown)


def test_elsewhere_there_is_a_line_every_few_seconds_and_at_each_phase():
    shown = console(terminal=False)
    display = open_display(PLAN, shown)
    assert isinstance(display, PlainLines)
    for seconds, phase in ((0, "training"), (1, "training"), (2, "saving"), (2.5, "saving")):
        display.show(replace(PROGRESS, updated_at=100.0 + seconds, phase=phase))
    display.show(replace(PROGRESS, updated_at=102.0 + LINE_SECONDS, phase="saving"))
    lines = text_of(shown).splitlines()
    assert [line.split()[0] for line in lines] == ["training", "saving", "saving"]
    assert "Collect [bold]Wood[/] 91%, Make Pickaxe 42%" in lines[0]


@pytest.mark.parametrize("eta", [None, 75.2])
def test_time_left_is_said_when_it_is_known(eta):
    line = headline(replace(PROGRESS, eta_seconds=eta))
    assert ("0:01:15 left" in line) == (eta is not None)
