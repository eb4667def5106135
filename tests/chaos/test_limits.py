"""Out of descriptors, processes or room: that is "later", and nothing is lost meanwhile."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from flowrl.parallel.state import StateFile
from flowrl.paths import GraphPaths
from tests import machine
from tests.chaos.frozen import Frozen, leftovers
from tests.chaos.scenarios import Work, scenarios
from tests.chaos.shim import ROOT
from tests.parallel.faults import DONE, FAILED, in_child, in_clean_process

PLENTY = 12
Limit = Callable[[int, Work, GraphPaths], None]


def test_a_merge_short_of_descriptors_is_made_later_and_once(memory):
    in_clean_process(_merge_with_ever_more, memory / "graph", _descriptors, range(PLENTY))


def test_a_merge_on_a_disk_with_too_little_room_is_made_later_and_once(small_disk):
    room = [0, 4, 16, 64, 256, 1024]  # in kilobytes
    in_clean_process(_merge_with_ever_more, small_disk / "graph", _kilobytes, room)


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    with machine.small_disk(tmp_path / "disk", "4m") as folder:
        yield folder


def _merge_with_ever_more(root: Path, limit: Limit, amounts: Sequence[int]) -> None:
    """A merge with so little of something fails and changes nothing, until there is enough."""
    merge = next(s for s in scenarios(("frame_count",)) if s.name.startswith("merge"))
    logging.disable(logging.CRITICAL)
    graph_paths = GraphPaths(root)
    root.mkdir()
    merge.build(graph_paths)
    start, before = Frozen.of(root), merge.look(graph_paths)
    merge.end_it(graph_paths)
    after, wanted = merge.look(graph_paths), merge.end(graph_paths)
    ends = []
    for amount in amounts:
        start.lay_out(root)
        ends.append(in_child(lambda amount=amount: limit(amount, merge.act, graph_paths)))
        assert merge.look(graph_paths) in (before, after), amount
        assert not leftovers(root, parts_only=True), amount
        (root.parent / "filler").unlink(missing_ok=True)
        merge.end_it(graph_paths)
        assert merge.end(graph_paths) == wanted, amount
        assert not leftovers(root), amount
    assert set(ends) == {DONE, FAILED}, ends
    assert ends == sorted(ends, reverse=True), "more is enough"
    assert ends.count(FAILED) > 2, ends


def _descriptors(spare: int, act: Work, graph_paths: GraphPaths) -> None:
    """The act with so many descriptors left; being refused one ends it as an injected fault."""
    free = os.dup(0)
    os.close(free)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, hard))
    _limited(errno.EMFILE, act, graph_paths)


def _kilobytes(left: int, act: Work, graph_paths: GraphPaths) -> None:
    """The act with so much room left on the disk."""
    facts = os.statvfs(graph_paths.root)
    with (graph_paths.root.parent / "filler").open("wb") as filler:
        filler.write(bytes(facts.f_bavail * facts.f_frsize - left * 1024))
    _limited(errno.ENOSPC, act, graph_paths)


def _limited(number: int, act: Work, graph_paths: GraphPaths) -> None:
    try:
        act(graph_paths)
    except OSError as error:
        if error.errno != number:
            raise
        raise OSError(number, "injected") from error


@pytest.fixture
def anybodys() -> Iterator[Path]:
    """A folder that another user can reach, which pytest's own cannot be."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def test_a_daemon_that_may_start_no_process_starts_its_runs_later(anybodys):
    module = "tests.chaos.few_processes"
    done = _python("-m", module, str(anybodys))
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        word, why = json.loads(line)
        assert word == "waiting", line
        assert "temporarily unavailable" in why, line
    if os.geteuid() == 0:  # from here on it is root's again
        subprocess.run(["chown", "-R", "0:0", str(anybodys)], check=True)
    later = _python("-m", "tests.parallel.daemon_of_scripts", str(anybodys))
    assert later.returncode == 0, later.stderr
    merged = (anybodys / "ledger").read_text().split()
    assert len(merged) == len(set(merged)) == 2
    for run_id in merged:
        assert (anybodys / "runs" / run_id / "launches").read_text().split() == [run_id]
    state = StateFile(GraphPaths(anybodys / "graph").scheduler_state).load()
    assert state is not None
    assert {entry.failures for entry in state.entries.values()} == {0}, "none was to blame"


def _python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
