"""Which device a run gets; a device's memory is shared by declaration, never by measuring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from flowrl.parallel.signals import Rules
from flowrl.parallel.status import Entry, Slotted


class Slots:
    """What the running skills leave free.

    A run that ran out of memory is given a device alone. Without devices only the number of
    runs is limited.
    """

    def __init__(self, rules: Rules, active: Iterable[Entry]) -> None:
        self._rules = rules
        self._load: Counter[str | None] = Counter()
        self._taken_alone: set[str | None] = set()
        for entry in active:
            if isinstance(entry.status, Slotted):
                self._occupy(entry.status.device, alone=entry.status.alone)

    @property
    def full(self) -> bool:
        """No run of any kind fits in."""
        return self._load.total() >= self._rules.max_parallel or (
            bool(self._rules.devices) and not self._free(alone=False)
        )

    def fits(self, *, alone: bool) -> bool:
        """Whether a run can start now."""
        if self.full:
            return False
        return not self._rules.devices or bool(self._free(alone=alone))

    def take(self, *, alone: bool) -> str | None:
        """Occupy the device with most of its slots free; None where there are no devices."""
        free = self._free(alone=alone)
        device = min(free, key=self._share_taken) if free else None
        self._occupy(device, alone=alone)
        return device

    def _occupy(self, device: str | None, *, alone: bool) -> None:
        self._load[device] += 1
        if alone:
            self._taken_alone.add(device)

    def _free(self, *, alone: bool) -> list[str]:
        return [
            name
            for name in self._rules.devices
            if self._load[name] < (1 if alone else self._rules.runs_on(name))
            and name not in self._taken_alone
        ]

    def _share_taken(self, device: str) -> float:
        return self._load[device] / self._rules.runs_on(device)
