"""Over three hundred files that nobody should run: each is refused, in one line that says why."""

from __future__ import annotations

import re

import pytest

from flowrl.commands.check import check_files
from flowrl.skills.validation.dry_run import Limits
from tests.skills import hostile


def one_line(path, why: str | None) -> bool:
    """`file:line: what; remedy`, and nothing else."""
    form = re.escape(str(path)) + r":[1-9]\d*: [^\n]{3,400}; [^\n]{3,400}"
    return why is not None and re.fullmatch(form, why) is not None and why.isprintable()


@pytest.mark.parametrize("content", hostile.BY_SYNTAX.values(), ids=hostile.BY_SYNTAX)
def test_a_hostile_file_is_refused_before_anything_of_it_runs(tmp_path, content):
    path = tmp_path / "skill.py"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    [checked] = check_files([path], trace=False)
    assert one_line(path, checked.why), checked.why


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """Every file that passes the syntax check and should not pass the dry run."""
    folder = tmp_path_factory.mktemp("hostile")
    paths = {name: folder / f"{number}.py" for number, name in enumerate(hostile.BY_DRY_RUN)}
    for name, path in paths.items():
        path.write_text(hostile.BY_DRY_RUN[name])
    assert [each.why for each in check_files(list(paths.values()), trace=False) if each.why] == []
    checked = check_files(list(paths.values()), limits=Limits(seconds=2.0))
    return {name: (paths[name], each) for name, each in zip(paths, checked, strict=True)}


@pytest.mark.parametrize("name", hostile.BY_DRY_RUN)
def test_a_hostile_function_is_refused_by_the_dry_run(tried, name):
    path, checked = tried[name]
    assert one_line(path, checked.why), checked.why
    assert checked.games == ()


def test_there_are_over_three_hundred_of_them():
    assert len(hostile.BY_SYNTAX) + len(hostile.BY_DRY_RUN) >= 300


HARMLESS = {
    "line ends of another system": hostile.GOOD.replace("\n", "\r\n"),
    "a form feed": hostile.GOOD + "\x0c\n",
    "a ligature, which Python reads as plain letters": hostile.reward("ﬁle = 1.0\nreturn ﬁle"),
    "code in a docstring": hostile.reward('"""import os"""\nreturn 0.0'),
    "code in a comment": hostile.reward("return 0.0  # ; import os"),
    "code in the description": hostile.GOOD.replace("Harvest", "__import__('os')"),
    "a name that is code": hostile.GOOD.replace("Collect Wood", "$(id); import os # '"),
    "a path for a name": hostile.GOOD.replace("Collect Wood", "../../x"),
}


@pytest.mark.parametrize("text", HARMLESS.values(), ids=HARMLESS)
def test_what_only_looks_hostile_passes(tmp_path, text):
    (tmp_path / "skill.py").write_bytes(text.encode())
    [checked] = check_files([tmp_path / "skill.py"], trace=False)
    assert checked.why is None
