"""The order of the suite: files that step the real game come first, since they take longest."""

from __future__ import annotations

import pytest
from hypothesis import settings

# How long an example takes is the machine's affair: no test asserts a time.
settings.register_profile("flowrl", deadline=None)
settings.load_profile("flowrl")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    long = {item.path for item in items if item.get_closest_marker("craftax")}
    items.sort(key=lambda item: item.path not in long)
