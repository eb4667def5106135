"""Mappings in pages: a changed copy shares all pages but the changed ones.

With 10,000 skills a step of the scheduler changes a handful of entries; whoever keeps something
made from a page, such as its lines in a file, sees by `is` which pages are the same as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Generic, TypeVar

PAGE = 64  # items
Item = TypeVar("Item")


class Pages(Mapping[str, Item]):
    """An immutable mapping in order of insertion; keys are never removed."""

    def __init__(self, items: Mapping[str, Item] | None = None) -> None:
        items = items or {}
        values = tuple(items.values())
        self._places: dict[str, int] = {key: place for place, key in enumerate(items)}
        self.pages = tuple(values[at : at + PAGE] for at in range(0, len(values), PAGE))

    @classmethod
    def _of(cls, places: dict[str, int], pages: Iterable[tuple[Item, ...]]) -> Pages[Item]:
        made: Pages[Item] = cls()
        made._places, made.pages = places, tuple(pages)
        return made

    def __getitem__(self, key: str) -> Item:
        number, place = divmod(self._places[key], PAGE)
        return self.pages[number][place]

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return f"Pages({dict(self)!r})"

    def in_order(self) -> Iterator[Item]:
        """The values in order of insertion, as fast as a tuple's."""
        return chain.from_iterable(self.pages)


class EditedPages(Generic[Item]):
    """A changed copy in the making."""

    def __init__(self, pages: Pages[Item]) -> None:
        self._before = pages
        self._places = pages._places
        self._pages: list[tuple[Item, ...] | list[Item]] = list(pages.pages)
        self._grown = False

    def __getitem__(self, key: str) -> Item:
        number, place = divmod(self._places[key], PAGE)
        return self._pages[number][place]

    def __setitem__(self, key: str, value: Item) -> None:
        place = self._places.get(key)
        if place is None:
            place = self._grow(key, value)
        self._own(place // PAGE)[place % PAGE] = value

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def reader(self) -> Pages[Item]:
        """The mapping as it is now, for whoever only reads."""
        pages = (page if isinstance(page, tuple) else tuple(page) for page in self._pages)
        return Pages._of(self._places, pages)

    def close(self) -> Pages[Item]:
        """The mapping with all changes; the first one itself when there are none."""
        if all(isinstance(page, tuple) for page in self._pages):
            return self._before
        return self.reader()

    def _grow(self, key: str, value: Item) -> int:
        if not self._grown:
            self._places = dict(self._places)
            self._grown = True
        place = self._places[key] = len(self._places)
        if place // PAGE == len(self._pages):
            self._pages.append([])
        self._own(place // PAGE).append(value)
        return place

    def _own(self, number: int) -> list[Item]:
        page = self._pages[number]
        if isinstance(page, list):
            return page
        self._pages[number] = own = list(page)
        return own
