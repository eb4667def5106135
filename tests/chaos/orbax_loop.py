"""Kill a trainer while Orbax saves its resumable state: `python -m tests.chaos.orbax_loop FOLDER`.

Needs the shim preloaded. Orbax starts threads, so this process never calls it: every save and
every load happens in a forked child. One whose save fails ends: what it leaves open is gone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from flowrl.experts import checkpoint
from tests.chaos.frozen import Frozen, leftovers
from tests.chaos.shim import End, Mode, Shim

LIKE = {"a": np.zeros((64, 32), np.float32), "b": {"c": np.zeros(7, np.int32)}}
MODES = (Mode.KILL_BEFORE, Mode.KILL_AFTER, Mode.TORN, Mode.FULL)


def tree(number: int) -> dict:
    """A state that is `number` everywhere."""
    return {"a": LIKE["a"] + number, "b": {"c": LIKE["b"]["c"] + number}}


def save(folder: Path, number: int) -> None:
    """Save, as a trainer does."""
    checkpoint.save_resume(folder, tree(number))


def loaded(folder: Path) -> int:
    """Which state is loaded; every number of it must be of the same one."""
    found = checkpoint.load_resume(folder, LIKE)
    values = {*np.unique(found["a"]).tolist(), *np.unique(found["b"]["c"]).tolist()}
    assert len(values) == 1, values
    return int(values.pop())


def whole_after(folder: Path) -> None:
    """The old state or the new one is there, and the next save leaves itself alone."""
    assert loaded(folder) in {1, 2}
    save(folder, 3)
    assert loaded(folder) == 3
    assert len(list(folder.iterdir())) == 1, sorted(folder.iterdir())
    assert not leftovers(folder)


def main(folder: Path, stride: int) -> int:
    """How many faults were injected, and those after which something was wrong."""
    shim, room = Shim(), folder / "resume"
    room.mkdir()
    assert shim.meet(room, Mode.COUNT, -1, lambda: save(room, 1)).end is End.DONE
    start = Frozen.of(room)
    injected, wrong = {mode.name: 0 for mode in MODES}, []
    for offset, mode in enumerate(MODES):
        at = offset
        while True:
            start.lay_out(room)
            met = shim.meet(room, mode, at, lambda: save(room, 2), tidy=False)
            if not met.met:
                break
            injected[mode.name] += 1
            after = shim.meet(room, Mode.COUNT, -1, lambda: whole_after(room))
            if after.end is not End.DONE:
                wrong.append(f"{mode.name} at {at} ({met.where}): {after.end}")
            at += stride
    print(json.dumps({"injected": injected, "wrong": wrong}))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
