"""Names and paths are made in one place."""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import FileRefusedError, NameRefusedError
from flowrl.paths import GraphPaths, plain, refuse_other_folder, session_name, slug


@pytest.mark.parametrize("name", ["", "   ", "a\nb", "a\x00b", "a\x1b[31m", "x" * 201, "a\u202eb"])
def test_a_name_that_cannot_be_shown_is_refused(name):
    with pytest.raises(NameRefusedError):
        slug(name)


@given(st.text(min_size=1, max_size=200))
def test_a_slug_is_one_plain_path_component(name):
    try:
        word = slug(name)
    except NameRefusedError:
        return
    assert 0 < len(word) <= 64
    assert word.isascii()
    assert word.replace("_", "a").isalnum()
    assert Path(word).name == word


def test_long_names_keep_their_differences():
    assert slug("x" * 100 + "a") != slug("x" * 100 + "b")


def test_the_documented_places(tmp_path):
    graph_paths = GraphPaths(tmp_path)
    paths = {
        graph_paths.run(2, "Make Pickaxe").module: "training_runs/skill_2_Make_Pickaxe/2.py",
        graph_paths.run(
            2, "Make Pickaxe"
        ).policies: "training_runs/skill_2_Make_Pickaxe/2_policies",
        graph_paths.expert_folder(0, "Collect Wood"): "skills/0_Collect_Wood/expert_0_policy",
        graph_paths.manifest: "checkpoints/global_latest.json",
        graph_paths.manifest_pickle: "checkpoints/global_latest.pkl",
        graph_paths.scheduler_state: "scheduler_state.json",
    }
    assert {str(path.relative_to(tmp_path)) for path in paths} == set(paths.values())


def test_the_documented_session_name():
    assert session_name(0, "Collect Wood") == "flowrl_e0_Collect_Wood"


@given(
    st.lists(st.sampled_from(["..", ".", "", "a", "b c", "木", "link"]), max_size=9), st.booleans()
)
def test_a_path_without_dots_leads_to_the_same_place(parts, from_root):
    """Folders, and links to folders elsewhere, as the kernel sees them."""
    with TemporaryDirectory() as top, chdir(top):
        for folder in ("a/a/a", "a/b c", "b c/a", "木", "far/away/a"):
            Path(folder).mkdir(parents=True)
        for place in (".", "a", "b c"):
            Path(place, "link").symlink_to(Path("far/away").absolute())
        path = Path("/".join([top, *parts] if from_root else parts))
        found = plain(path)
        assert ".." not in found.parts
        assert found == path or found.is_absolute()
        if path.exists():
            assert found.samefile(path)
            kept = [part for part in path.parts if part == "link"]
            assert ".." in path.parts or [p for p in found.parts if p == "link"] == kept


@pytest.mark.parametrize("root", ["/", "/.", "/usr/.."])
def test_the_root_of_all_folders_is_no_graph(root):
    with pytest.raises(FileRefusedError, match="is the root of all folders; name one in it"):
        refuse_other_folder(Path(root))
