"""Rounds of averaging over real ranks of MPI; each case runs in mpi_program.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from flowrl.averaging import MPISyncCoordinator
from flowrl.errors import ConfigError
from tests.waiting import limit

MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
PROGRAM = Path(__file__).with_name("mpi_program.py")
RANKS = 3
CASES = (
    "averages",
    "left_out",
    "refusals",
    "trained",
    "outlived",
    "went_on",
    "barriers",
)
needs_mpi = pytest.mark.skipif(
    MPIRUN is None or find_spec("mpi4py") is None,
    reason="MPI is missing: pip install '.[mpi]' in flowrl's folder",
)


def run_ranks(folder, *cases, ranks=RANKS, by=("-m", "mpi4py")):
    """Run cases on ranks; mpirun and all ranks are ended after two minutes."""
    argv = [MPIRUN, "-n", str(ranks), sys.executable, *by, str(PROGRAM), str(folder), *cases]
    return subprocess.run(argv, capture_output=True, text=True, timeout=limit(120), check=False)


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each rank found, from one start of all cases that end well."""
    folder = tmp_path_factory.mktemp("ranks")
    done = run_ranks(folder, *CASES)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@needs_mpi
def test_all_ranks_get_the_same_bits(said):
    # each rank compared its mean with the one in f64: 1e-6 of the greatest number
    assert all(each["averages"] == said[0]["averages"] for each in said)


@needs_mpi
def test_nan_is_named_and_left_out_on_all_ranks(said):
    for each in said:
        assert each["left_out"]["left_out"] == {"a6": "its weights are not finite"}
        assert each["left_out"]["members"] == ["a0", "a2", "a3", "a4", "a5"]  # a1 did not join
        assert each["left_out"]["bits"] == said[0]["left_out"]["bits"]


@needs_mpi
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("agents", "rank 1 has another list of agents than rank 0"),
        ("config", "rank 2 has another outer step or config than rank 0"),
        ("shape", "rank 1 has another round or form of weights than rank 0"),
        ("dtype", "rank 1 has another round or form of weights than rank 0"),
        ("keys", "rank 1 has another round or form of weights than rank 0"),
        ("round", "rank 1 has another round or form of weights than rank 0"),
        ("train", "rank 1 has another number for train than rank 0"),
        ("twice", "8 agents with 7 ids for 3 ranks"),
        ("few", "2 agents with 2 ids for 3 ranks"),
        ("ints", "weights are int64"),
        ("no numbers", "weights hold no numbers"),
        ("empty", "weights are neither a NumPy array nor a dict"),
        ("nan", "no weights are finite and count"),
    ],
)
def test_all_ranks_refuse_in_one_line(said, case, message):
    for each in said:
        assert message in each["refusals"][case]
        assert "\n" not in each["refusals"][case]


@needs_mpi
def test_agents_of_all_ranks_learn_one_thing_without_one_that_raises(said):
    assert {tuple(each["trained"]["bits"]) for each in said} == {tuple(said[0]["trained"]["bits"])}
    assert len(said[0]["trained"]["bits"]) == 1
    assert len({each["trained"]["noise"] for each in said}) == RANKS
    assert said[0]["trained"]["left_out"] == {"a6": "ValueError: it fell over"}
    assert all(each["trained"]["loss"] < 0.05 for each in said)  # from 5


@needs_mpi
def test_a_rank_that_lost_its_agents_lets_the_others_go_on(said):
    agents = [f"a{number}" for number in range(3 * RANKS)]
    for case in ("first", "later"):
        for rank, each in enumerate(said):
            error, left_out, bits, summary = each["outlived"][case]
            why = "ValueError: it fell over" if rank == 1 else "it raised on another rank"
            assert error == "nothing was refused"
            assert left_out == dict.fromkeys(agents[1::RANKS], why)
            assert bits == ([] if rank == 1 else said[0]["outlived"][case][2])
            assert (summary["total_agents"], summary["active_agents"]) == (9, 6)
        assert len(said[0]["outlived"][case][2]) == 1
    for each in said:
        assert each["outlived"]["few"][0].startswith("fewer than 7 agents are left, without")


@needs_mpi
def test_training_goes_on_from_a_file_of_each_rank(said):
    assert [each["went_on"] for each in said] == [4] * RANKS


@needs_mpi
def test_ranks_with_other_files_of_flowrl_are_refused(tmp_path):
    package = Path(MPISyncCoordinator.__module__.replace(".", "/")).parent.parent
    shutil.copytree(PROGRAM.parents[2] / package, tmp_path / "other" / package)
    with (tmp_path / "other" / package / "averaging" / "mpi.py").open("a") as file:
        file.write("# other\n")
    one = ["-n", "1", sys.executable, "-m", "mpi4py", str(PROGRAM), str(tmp_path), "made"]
    other = ["-n", "1", "-env", "PYTHONPATH", str(tmp_path / "other"), *one[2:]]
    done = subprocess.run(
        [MPIRUN, *one, ":", *other], capture_output=True, text=True, timeout=limit(120), check=False
    )
    assert done.returncode == 1
    assert "rank 1 has another version of flowrl than rank 0; start all alike" in done.stderr


@needs_mpi
def test_a_barrier_is_for_all_ranks_and_false_for_one_agent_alone(said):
    assert [each["barriers"] for each in said] == [False] * RANKS


@needs_mpi
@pytest.mark.parametrize(
    ("case", "code", "words"),
    [("killed", 9, ""), ("raises", 1, "it fell over"), ("broken", 1, "ZeroDivisionError")],
)
def test_a_rank_that_dies_or_raises_ends_all(tmp_path, case, code, words):
    done = run_ranks(tmp_path, case)
    assert done.returncode == code
    assert not [*tmp_path.iterdir()]
    assert words in done.stderr


@needs_mpi
@pytest.mark.parametrize(
    ("ranks", "by", "needs"),
    [(1, ("-m", "mpi4py"), "2 ranks or more"), (2, (), "`-m mpi4py` before the program")],
    ids=["one", "plain"],
)
def test_a_start_that_could_hang_is_refused(tmp_path, ranks, by, needs):
    done = run_ranks(tmp_path, "averages", ranks=ranks, by=by)
    assert done.returncode != 0
    assert f"MPI needs {needs}: mpirun -n 2 python -m mpi4py PROGRAM" in done.stderr


def test_without_mpi4py_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[mpi\]'"):
        MPISyncCoordinator(["a", "b"])
