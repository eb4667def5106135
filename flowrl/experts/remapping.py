"""Global expert indices ↔ contiguous local ones: a leaf that scheduler and trainer both import.

A graph numbers its experts once and for all (0, 5, 10, 50); a run holds only those that its plan
needs, side by side (0, 1, 2, 3), so that memory is paid for four networks and not for fifty-one.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from flowrl.errors import ExpertIndexError


@dataclass(frozen=True, slots=True)
class Remapping:
    """`experts[local]` is the global index of a local expert; unpacks into the two dicts.

    >>> global_to_local, local_to_global = Remapping.of([10, 0, 5], 50)
    >>> global_to_local
    {0: 0, 5: 1, 10: 2, 50: 3}
    >>> local_to_global
    {0: 0, 1: 5, 2: 10, 3: 50}
    """

    experts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.experts:
            raise ExpertIndexError("a run needs at least one expert; give its new expert's index")
        for index in self.experts:
            if isinstance(index, bool) or not isinstance(index, int) or index < 0:
                raise ExpertIndexError(f"{index!r} is no expert index; indices are 0, 1, 2, …")
        for before, after in itertools.pairwise(self.experts):
            if before == after:
                raise ExpertIndexError(f"expert {after} occurs twice; name each expert once")
            if before > after:
                raise ExpertIndexError(
                    f"expert {before} stands before expert {after}; sort the indices"
                )

    @classmethod
    def of(cls, dependencies: Collection[int], new: int) -> Remapping:
        """The networks of a run that trains expert `new` on top of `dependencies`.

        Raises:
          ExpertIndexError: an index is negative, or occurs twice.
        """
        if new in dependencies:
            raise ExpertIndexError(f"expert {new} cannot be its own dependency; leave it out")
        return cls(tuple(sorted([*dependencies, new])))

    @property
    def global_to_local(self) -> dict[int, int]:
        """Local index by global index."""
        return {expert: local for local, expert in enumerate(self.experts)}

    @property
    def local_to_global(self) -> dict[int, int]:
        """Global index by local index."""
        return dict(enumerate(self.experts))

    def __iter__(self) -> Iterator[dict[int, int]]:
        """The documented pair: `(global_to_local, local_to_global)`."""
        yield self.global_to_local
        yield self.local_to_global

    def __len__(self) -> int:
        """The number of networks the run holds."""
        return len(self.experts)
