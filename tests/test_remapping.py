from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import ExpertIndexError
from flowrl.runs import Remapping

EXPERTS = st.sets(st.integers(0, 10_000), min_size=1, max_size=40)


@given(EXPERTS)
def test_there_and_back_is_where_one_started(experts):
    global_to_local, local_to_global = Remapping(tuple(sorted(experts)))
    assert {local_to_global[local] for local in global_to_local.values()} == experts
    assert all(global_to_local[local_to_global[local]] == local for local in local_to_global)


@given(EXPERTS)
def test_local_indices_are_contiguous_and_keep_the_global_order(experts):
    remapping = Remapping(tuple(sorted(experts)))
    assert sorted(remapping.local_to_global) == list(range(len(experts)))
    assert [remapping.local_to_global[local] for local in range(len(experts))] == sorted(experts)


@given(EXPERTS, st.randoms())
def test_the_order_of_dependencies_does_not_matter(experts, random):
    new, *dependencies = sorted(experts)
    shuffled = random.sample(dependencies, len(dependencies))
    assert Remapping.of(shuffled, new) == Remapping.of(dependencies, new)


@pytest.mark.parametrize(
    "experts",
    [(), (0, 0), (5, 3), (-1, 3), (True, 3), ("1",)],
    ids=["empty", "twice", "unsorted", "negative", "bool", "text"],
)
def test_impossible_indices_are_refused(experts):
    with pytest.raises(ExpertIndexError, match="in rising order"):
        Remapping(experts)


def test_impossible_dependencies_are_refused_with_the_indices():
    with pytest.raises(ExpertIndexError, match="3, 4, 4"):
        Remapping.of([3, 4], 4)
