"""Damage while a graph trains: found before use, told of, put right by a user's command."""

from __future__ import annotations

import pytest

from flowrl import cli, notices, storage
from flowrl.experts.store import ExpertStore
from tests.launchers.conftest import nothing_survives, server_folder, until  # noqa: F401
from tests.parallel.making import PICKAXE, TABLE, WOOD
from tests.parallel.stand_in_story import DEADLINE_SECONDS, Place, ended
from tests.sealing import rewrite

SAPLING = "Collect Sapling"
LOCAL = ("--launcher=local", "--retry_backoff=0.05")
TO_TABLE, TO_PICKAXE = f"--target_skill={TABLE}", f"--target_skill={PICKAXE}"


@pytest.fixture
def place(tmp_path, server_folder):  # noqa: F811
    place = Place(tmp_path)
    yield place
    place.end()


def damage(place, expert):
    """Lose a file of an expert that counts; answers its version."""
    store = ExpertStore(place.graph_paths)
    version = store.manifest().experts[expert]
    storage.remove_file(next(iter(sorted(store.path_of(version).glob("_*")))))
    return version


def test_a_dependant_trains_on_the_previous_version_of_a_damaged_expert(place, flowrl):
    place.order({TABLE: {"acted": {"0": 50, "1": 50}}})
    assert place.run(*LOCAL, TO_TABLE)[0] == 0
    assert place.experts() == {0: (WOOD, 150), 1: (TABLE, 50)}
    broken = damage(place, 0)
    code, said = place.run(*LOCAL, TO_PICKAXE)
    assert code == 0, said
    assert f"version {broken.version} (150 frames) is in" in said
    assert place.experts()[0] == (WOOD, 100)
    said = " ".join(flowrl("status", place.graph_paths.root).out.split())
    assert "expert 0 (Collect Wood) was damaged" in said
    assert cli.main(["fsck", str(place.graph_paths.root), "--repair"]) == 0
    assert "damage_expert_0" not in notices.read(place.graph_paths)


def test_a_skill_without_a_whole_version_is_trained_again_once_a_user_says_so(place, flowrl):
    place.order()
    assert place.run(*LOCAL, TO_TABLE)[0] == 0
    damage(place, 1)
    graph = str(place.graph_paths.root)
    for target in (TO_TABLE, TO_PICKAXE):  # the first is completed
        code, said = place.run(*LOCAL, target)
        assert (code, f"let flowrl fsck {graph} --repair" in said) == (1, True), said
    assert place.launches() == [WOOD, TABLE]
    assert place.statuses() == {WOOD: "completed", TABLE: "completed"}
    assert "its skill will be trained again" in flowrl("fsck", graph, "--repair").out
    code, said = place.run(*LOCAL, TO_PICKAXE)
    assert code == 0, said
    assert place.launches() == [WOOD, TABLE, TABLE, PICKAXE]
    assert place.experts()[1] == (TABLE, 100)
    assert cli.main(["fsck", graph]) == 0


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (lambda facts: facts.update(attempt="first"), "attempt"),
        (lambda facts: facts["config"].update(num_minibatches=7), "do not divide into"),
        (None, "its run folder is gone"),
    ],
    ids=["damaged", "of settings that another version refuses", "lost"],
)
def test_a_damaged_record_of_a_run_ends_it_alone_and_is_named(place, harm, named):
    place.order({WOOD: {"gate": "never"}, SAPLING: {"gate": "gate"}})
    daemon = place.start(*LOCAL, "--max_nodes=2")
    until(lambda: place.launches() and len(place.launches()) == 2, seconds=DEADLINE_SECONDS)
    until(lambda: all(line.get("handle") for line in place.lines().values()))
    daemon.kill()
    daemon.wait()
    path = place.graph_paths.run(place.lines()[WOOD]["expert"], WOOD).run_json
    if harm:
        rewrite(path, harm)
    else:
        path.unlink()
    place.order()
    place.open("gate")
    code, said = place.run(*LOCAL, "--max_nodes=2")
    assert code == 0, said
    assert "run.json" in said
    assert named in said
    assert place.launches().count(WOOD) == 2
    assert place.launches().count(SAPLING) == 1, "the other skill is not concerned"
    assert set(place.statuses().values()) == {"completed"}
    assert "Traceback" not in said


def other_format(path):
    rewrite(path, lambda facts: facts.update(format=2))


@pytest.mark.parametrize("harm", [lambda path: path.write_text("{"), other_format])
def test_a_manifest_that_is_damaged_meanwhile_ends_the_daemon_and_costs_no_run(place, harm):
    place.order({SAPLING: {"gate": "gate"}})
    daemon = place.start(*LOCAL, "--max_nodes=2")
    until(lambda: SAPLING in place.launches(), seconds=DEADLINE_SECONDS)
    until(lambda: place.statuses()[WOOD] == "completed", seconds=DEADLINE_SECONDS)
    until(lambda: not place.graph_paths.run(place.lines()[WOOD]["expert"], WOOD).folder.exists())
    whole = place.graph_paths.manifest.read_bytes()
    harm(place.graph_paths.manifest)
    place.open("gate")
    code, said = ended(daemon)
    assert (code, "global_latest.json" in said, "Traceback" in said) == (1, True, False), said
    assert not list(place.graph_paths.failed_runs.glob("*"))
    place.graph_paths.manifest.write_bytes(whole)
    code, said = place.run(*LOCAL, "--max_nodes=2")
    assert code == 0, said
    assert sorted(place.launches()) == [SAPLING, WOOD]
    assert set(place.statuses().values()) == {"completed"}
