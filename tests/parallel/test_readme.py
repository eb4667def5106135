from __future__ import annotations

import doctest
from pathlib import Path

README = Path(__file__).parents[2] / "flowrl" / "parallel" / "README.md"


def test_the_examples_of_the_readme_run(tmp_path):
    found = doctest.testfile(str(README), module_relative=False, globs={"folder": tmp_path})
    assert found.attempted > 10
    assert found.failed == 0


def test_the_readme_names_modules_that_are_there():
    names = {part for part in README.read_text().split("`") if part.endswith(".py")}
    places = (README.parent, README.parents[2])
    assert {"training_setup.py", "training_processor.py", "scheduler.py"} <= names
    missing = [name for name in names if not any((place / name).exists() for place in places)]
    assert missing == []
