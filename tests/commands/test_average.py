"""`flowrl average` on real checkpoints and graphs."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from flowrl import cli, storage
from flowrl.experts import checkpoint
from flowrl.experts.merge import frame_count
from flowrl.experts.store import ExpertStore
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import TrainingRun, write_run
from tests.experts.making import SHAPES, candidate_in, make_expert

LIKE = checkpoint.like_of(SHAPES)
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def expert(folder, *values):
    return make_expert(folder, folder.name, values=values * 17)


def biases(folder):
    return checkpoint.load_expert(folder, LIKE)["actor"]["dense_3"]["bias"]


def refused(capsys, *words) -> str:
    code = cli.main(["average", *map(str, words)])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert code == 2, line
    return line


@pytest.fixture
def versions(tmp_path):
    """Two versions of one expert in a graph, the second trained on from the first."""
    store, ancestor = ExpertStore(GraphPaths(tmp_path / "graph")), None
    for number in range(2):
        folder = expert(tmp_path / f"made{number}", float(number))
        candidate = candidate_in(folder, 0, 100, ancestor)
        ancestor = store.commit(f"e0.a{number}.x", [candidate], rule=frame_count).manifest.experts[
            0
        ]
    return sorted(store.graph_paths.expert_folder(0, "Skill 0").iterdir())


def test_two_versions_of_an_expert_are_averaged_by_weights(versions, tmp_path, flowrl):
    words = ["--json", "--weights", "1,3", "-o", tmp_path / "mean", *versions]
    report = json.loads(flowrl("average", *words).out)
    assert report["origin"] == "e0.a0.x"
    assert report["weights"] == [1, 3]
    mean = checkpoint.load_expert(tmp_path / "mean", LIKE)
    assert report["content"] == checkpoint.array_digest(mean)
    assert biases(tmp_path / "mean").tolist() == [0.75] * 17


def test_what_two_runs_left_is_averaged_if_they_began_with_one_version(versions, tmp_path, capsys):
    ancestor = ExpertStore(GraphPaths(tmp_path / "graph")).manifest().experts[0]
    finals = []
    for number in (1, 2):
        run_paths = RunPaths(tmp_path / f"run{number}", number)
        run_paths.folder.mkdir()
        run = TrainingRun(
            run_id=f"e{number}.a1.x",
            skill=f"Skill {number}",
            expert=number,
            attempt=1,
            plan=(),
            experts=(0, number),
            ancestors=(ancestor,),
            config={},
        )
        write_run(run_paths, run)
        finals += [expert(run_paths.final(local), float(number + local)) for local in (0, 1)]
    out = tmp_path / "mean"
    assert (
        cli.main(["average", "-o", str(out), str(finals[0]), str(finals[2]), str(versions[0])]) == 0
    )
    assert "the mean of 3 experts, all of run e0.a0.x" in capsys.readouterr().out
    assert biases(out).tolist() == [1.0] * 17
    # the new experts of both runs have nothing in common
    assert "have no common ancestor" in refused(capsys, "-o", tmp_path / "no", finals[1], finals[3])


def test_a_rule_is_used_and_the_unrelated_are_averaged_if_asked(tmp_path, capsys, flowrl):
    folders = [expert(tmp_path / f"expert{n}", value) for n, value in enumerate([1.0, 2.0, 1e30])]
    assert "--unrelated" in refused(capsys, "-o", tmp_path / "out", *folders)
    words = ["-o", tmp_path / "out", "--unrelated", "--rule", "median", *folders]
    assert "no common ancestor is known" in flowrl("average", *words).out
    assert biases(tmp_path / "out").tolist() == [2.0] * 17


@pytest.mark.parametrize(
    ("words", "mean"),
    [
        ("--rule trimmed_mean --trimmed 0.3", 3.0),  # without two at each end
        ("--rule trimmed_mean --trimmed 0.1", 1e30 / 7),  # of 7 members all
        ("--rule multi_krum --faulty 2", 2.0),  # without 7 and 1e30
    ],
)
def test_a_rule_bears_as_many_faulty_experts_as_is_said(tmp_path, capsys, words, mean):
    values = [0.0, 1.0, 2.0, 3.0, 4.0, 7.0, 1e30]
    folders = [expert(tmp_path / f"expert{n}", value) for n, value in enumerate(values)]
    words = [*words.split(), "--unrelated", "-o", tmp_path / "out", *folders]
    assert cli.main(["average", *map(str, words)]) == 0
    np.testing.assert_allclose(biases(tmp_path / "out"), [mean] * 17, rtol=1e-6)


def test_an_exported_file_is_averaged_with_a_folder(tmp_path, flowrl):
    folder, file = expert(tmp_path / "expert", 1.0), tmp_path / "0_Skill.safetensors"
    leaves = {path: np.zeros(shape, np.float32) for path, shape in SHAPES.items()}
    save_file(leaves, file)
    words = ["-o", tmp_path / "out", "--unrelated", file, folder]
    assert cli.main(["average", *map(str, words)]) == 0
    assert biases(tmp_path / "out").tolist() == [0.5] * 17
    file.write_bytes(b"no arrays")
    said = flowrl("average", "-o", tmp_path / "no", *words[2:], code=1).err
    assert f"{file} cannot be read" in said


def test_what_cannot_be_averaged_is_refused_in_one_line(tmp_path, capsys):
    good, other = expert(tmp_path / "good", 1.0), expert(tmp_path / "other", 2.0)
    bad = expert(tmp_path / "bad", np.nan)
    narrow = tmp_path / "narrow"
    checkpoint.save_expert(narrow, {"actor": {"dense_0": {"bias": np.zeros(3, np.float32)}}})
    common = ("--unrelated", "-o", tmp_path / "out")
    assert f"{bad} has a NaN" in refused(capsys, *common, good, bad)
    assert f"{narrow} is not of the form of {good}" in refused(capsys, *common, good, narrow)
    lost = tmp_path / "lost"
    assert f"{lost} does not exist" in refused(capsys, "-o", tmp_path / "out", good, lost)
    assert f"{tmp_path} is no expert; name an expert" in refused(capsys, *common, tmp_path, good)
    assert "name two or more" in refused(capsys, *common, good)
    (tmp_path / "link").symlink_to(good)
    assert f"{tmp_path}/link is named twice" in refused(capsys, *common, good, tmp_path / "link")
    inside = tmp_path / "graph" / "skills" / "out"
    storage.write_atomic(storage.make_dir(tmp_path / "graph") / "scheduler_state.json", "")
    said = refused(capsys, "--unrelated", "-o", inside, good, other)
    assert f"is inside the graph {tmp_path / 'graph'}, " in said
    assert "not 2 numbers" in refused(capsys, *common, "--weights", "1,2,3", good, other)
    assert "not 2 numbers" in refused(capsys, *common, "--weights", "1,heavy", good, other)
    assert "must not be below 0" in refused(capsys, *common, "--weights", "1,-1", good, other)
    assert "needs 5 members" in refused(capsys, *common, "--rule", "krum", good, other)
    robust = (*common, "--rule", "multi_krum", "--faulty")
    assert "2 faulty needs 7 members" in refused(capsys, *robust, "2", good, other)
    assert "--faulty is 0" in refused(capsys, *robust, "0", good, other)
    words = (*common, "--rule", "trimmed_mean", "--trimmed", "0.5", good, other)
    assert "0.5: choose 0 to 0.49" in refused(capsys, *words)
    assert "without --rule krum or multi_krum" in refused(
        capsys, *common, "--faulty", "1", good, other
    )
    assert not (tmp_path / "out").exists()


DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U64": 8,
          "BOOL": 1, "C64": 8, "F4": 1, "X": 1}  # fmt: skip
ARRAYS = st.dictionaries(
    st.sampled_from(["a", "a/b", "a/b/c", "/", "", "b", "é", "a//b"]),
    st.tuples(st.sampled_from([*DTYPES]), st.lists(st.integers(0, 2), max_size=2)),
    max_size=3,
)


@given(ARRAYS)
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_whatever_arrays_a_file_holds_they_are_averaged_or_refused(tmp_path, capsys, arrays):
    header, end = {}, 0
    for name, (dtype, shape) in arrays.items():
        begin, end = end, end + DTYPES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    files = [tmp_path / "one", tmp_path / "other"]
    for file in files:
        file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    words = ["average", "--unrelated", "-o", tmp_path / "out", *files]
    code = cli.main([*map(str, words)])
    lines = capsys.readouterr().err.splitlines()
    assert (code, len(lines)) in ((0, 0), (1, 1), (2, 1)), lines
    assert (tmp_path / "out").exists() == (code == 0)
