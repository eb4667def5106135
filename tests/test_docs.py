"""The pages say what is so: links resolve, tables match the code, help lines run."""

from __future__ import annotations

import importlib.util
import pkgutil
import re
import shlex
from pathlib import Path

import pytest

from flowrl import cli
from flowrl.arguments import arguments
from flowrl.multiagent.config import IndependentConfig
from flowrl.orchestrator import OrchestratorCommand

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("flowrl/**/*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_internal_link_resolves(page):
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_no_page_or_message_installs_by_a_name_that_another_project_has_on_pypi():
    pages = [*PAGES, *ROOT.glob("docs/*"), *ROOT.glob("scripts/*"), *ROOT.glob("flowrl/**/*.py")]
    for page in (each for each in pages if each.is_file() and each.suffix in {".md", ".py", ".sh"}):
        wrong = re.search(r"pip install \S*\bflowrl\b.*|\bflowrl\[\w+\].*", page.read_text())
        assert not wrong, f"{page.name}: {wrong[0]}; say pip install '.[EXTRA]' in flowrl's folder"


def test_every_line_of_the_how_to_trains_independent_agents_in_a_folder_of_its_own():
    lines = re.findall(
        r"^(?:\w+=\S+ )*python -m flowrl\.independent --.*",
        (ROOT / "docs" / "how-to.md").read_text(),
        flags=re.MULTILINE,
    )
    folders = [re.search(r"--run_folder (\S+)", line)[1] for line in lines]
    assert len({*folders}) == len(lines) > 1


def test_the_reference_lists_every_flag_as_it_is():
    place = ROOT / "scripts" / "write_reference.py"
    spec = importlib.util.spec_from_file_location("write_reference", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.PAGE.read_text()
    assert module.rendered(text) == text, "run python scripts/write_reference.py"


def names_for_another_guides():
    """Names in the right column of the reference's table of another guide on devices."""
    text = (ROOT / "docs" / "reference.md").read_text()
    table = text.partition("## Devices, in the words of another guide")[2].partition("\n## ")[0]
    cells = [row.split(" | ")[1] for row in table.splitlines() if row.startswith("| `")]
    codes = {code for cell in cells for code in re.findall(r"`([^`]+)`", cell)}
    names = {code.partition("(")[0].removeprefix("--").partition(" 0")[0] for code in codes}
    return sorted(name for name in names if re.fullmatch(r"[\w./]+", name))


HOMES = ("config:", "config:PPOConfig.", "runs:TrainConfig.", "config:ScheduleConfig.")
HOMES += ("ppo.sharding:", "ppo.update:", "ppo.run_io:", "ppo.rollout:", "networks.moe:")


def has(home: str, name: str) -> bool:
    try:
        pkgutil.resolve_name(f"flowrl.{home}{name}")
    except AttributeError:
        return False
    return True


@pytest.mark.parametrize("name", names_for_another_guides())
def test_what_stands_for_a_name_of_another_guide_is_there(name):
    if name.endswith(".py"):
        assert (ROOT / name).exists()
    elif name.startswith(("flowrl", "jax.")):
        pkgutil.resolve_name(name)
    elif name != "task_reward":  # a skill file's function
        assert any(has(home, name) for home in HOMES)


def table_of(heading):
    text = (ROOT / "docs" / "reference.md").read_text()
    table = text.partition(f"## {heading}")[2].partition("\n## ")[0]
    cells = [row.split(" | ")[1] for row in table.splitlines() if row.startswith("| ")]
    return {code for cell in cells for code in re.findall(r"`([^`]+)`", cell)}


def test_what_stands_for_names_about_sweeps_and_judges_is_there():
    found = table_of("Sweeps, judges and objectives")
    kinds = [cli.class_of(name) for name in cli.ALL]
    known = {f"--{name}" for kind in (*kinds, OrchestratorCommand) for name in arguments(kind)}
    flags = {flag for code in found for flag in re.findall(r"--\w+", code)}
    assert flags - known - {"--num_processes"} == set()
    for code in found:
        if code.startswith("flowrl."):
            pkgutil.resolve_name(code)


def test_what_stands_for_names_about_independent_learners_is_there():
    found = table_of("Independent learners, in the words")
    flags = {flag for code in found for flag in re.findall(r"--(?:no_)?(\w+)", code)}
    assert flags <= {*arguments(IndependentConfig)}
    for code in found:
        if re.fullmatch(r"(agents|buffers|collect|pipeline|run|world)\.[\w.]+", code):
            home, _, name = code.partition(".")
            assert name == "Boundary.epoch" or pkgutil.resolve_name(
                f"flowrl.multiagent.{home}:{name}"
            )


def example_lines():
    for name in cli.COMMANDS:
        for line in cli.class_of(name).__doc__.partition("Examples:")[2].splitlines():
            if line.strip():
                yield pytest.param(name, re.split(r" [|>] ", line.strip())[0], id=line.strip())


@pytest.mark.parametrize(("name", "line"), list(example_lines()))
def test_every_example_in_help_is_a_command_line_that_parses(name, line, monkeypatch):
    seen = []
    monkeypatch.setattr(cli.class_of(name), "__call__", lambda self: seen.append(self) or 0)
    program, *words = shlex.split(line)
    assert program == "flowrl"
    assert cli.main(words) == 0
    assert isinstance(seen[0], cli.class_of(name))
