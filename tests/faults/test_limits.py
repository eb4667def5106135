"""Out of descriptors or of processes: that is "later", and nothing is lost meanwhile."""

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
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowrl.layout import GraphLayout
from flowrl.parallel.codec import StateFile
from tests.faults.frozen import Frozen, leftovers
from tests.faults.scenarios import scenarios
from tests.faults.shim import ROOT
from tests.parallel.faults import in_child, in_clean_process

PLENTY = 12


def test_a_merge_short_of_descriptors_is_made_later_and_once(memory):
    in_clean_process(_merge_with_ever_more_descriptors, memory / "graph")


def _merge_with_ever_more_descriptors(root: Path) -> None:
    merge = next(s for s in scenarios(("frame_count",)) if s.name.startswith("merge"))
    logging.disable(logging.CRITICAL)
    layout = GraphLayout(root)
    root.mkdir()
    merge.build(layout)
    start, before = Frozen.of(root), merge.look(layout)
    merge.again(layout)
    after, wanted = merge.look(layout), merge.end(layout)
    ends = []
    for spare in range(PLENTY):
        start.lay_out(root)
        ends.append(in_child(lambda spare=spare: _with_descriptors(spare, merge.act, layout)))
        assert merge.look(layout) in (before, after), spare
        assert not leftovers(root, parts_only=True), spare
        merge.again(layout)
        assert merge.end(layout) == wanted, spare
        assert not leftovers(root), spare
    assert set(ends) == {0, 3}, ends
    assert ends.index(0) > 2, ends
    assert not any(ends[ends.index(0) :])


def _with_descriptors(spare: int, act, layout: GraphLayout) -> None:
    """The act with so many descriptors left; being refused one ends it as an injected fault."""
    free = os.dup(0)
    os.close(free)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, hard))
    try:
        act(layout)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise OSError(error.errno, "injected") from error


@pytest.fixture
def anybodys() -> Iterator[Path]:
    """A folder that another user can reach, which pytest's own cannot be."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def test_a_daemon_that_may_start_no_process_starts_its_runs_later(anybodys):
    module = "tests.faults.few_processes"
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
    state = StateFile(GraphLayout(anybodys / "graph").scheduler_state).load()
    assert state is not None
    assert {entry.failures for entry in state.entries.values()} == {0}, "none was to blame"


def _python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
