"""An exported agent holds what was merged, acts without its graph, and is read without trust."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from functools import reduce
from hashlib import sha256
from operator import getitem
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flowrl
from flowrl import cli, storage
from flowrl.agent import _Walk
from flowrl.envs.skill_module import _codes
from flowrl.errors import (
    ConfigError,
    ExpertCorruptError,
    ExpertMissingError,
    FileRefusedError,
    FlowrlError,
    GraphError,
    SkillError,
)
from flowrl.experts import checkpoint
from flowrl.experts.store import ExpertStore
from flowrl.paths import GraphPaths
from flowrl.runs import CodeApproval, expert_shapes
from flowrl.skills.validation.cache import ApprovalStore
from flowrl.storage import records
from tests.experts.making import SHAPES
from tests.parallel.making import PICKAXE, TABLE, WOOD, train


@pytest.fixture(scope="module")
def merged(tmp_path_factory) -> GraphPaths:
    graph_paths = GraphPaths(tmp_path_factory.mktemp("merged") / "graph")
    train(graph_paths, WOOD, 0, {}, acted={0: 50})
    train(graph_paths, TABLE, 1, {WOOD: 0}, acted={0: 10, 1: 20})
    return graph_paths


@pytest.fixture(scope="module")
def exported(merged, tmp_path_factory):
    """The folder of an agent, and what was printed, with expert shapes as the fixture's are."""
    folder = tmp_path_factory.mktemp("exported") / "agent"
    with pytest.MonkeyPatch.context() as patch:
        _small(patch)
        assert cli.main(["export", str(merged.root), "-o", str(folder)]) == 0
    return folder


@pytest.fixture(autouse=True)
def _shapes(monkeypatch):
    _small(monkeypatch)


def _small(patch):
    """Experts of tests have a few small arrays."""
    import flowrl.agent

    patch.setattr(flowrl.agent, "expected_shapes", lambda _: SHAPES)
    patch.setattr(flowrl.agent, "expert_shapes", lambda *_: SHAPES)


@pytest.fixture
def agent(exported, tmp_path):
    shutil.copytree(exported, tmp_path / "agent")
    return tmp_path / "agent"


def test_an_agent_holds_the_arrays_and_plans_that_count(agent, merged):
    found = flowrl.load_agent(agent)
    assert found.skills == (WOOD, TABLE)
    assert found.record.generation == 2
    store = ExpertStore(merged)
    for index, version in store.manifest().experts.items():
        kept = checkpoint.load_expert(store.verify(version), checkpoint.like_of(SHAPES))
        assert checkpoint.array_digest(found.params[index]) == checkpoint.array_digest(kept)
    plan = found.modules[1]
    steps = [(step.skill, plan.experts[step.expert_local]) for step in plan.tasks]
    assert steps == [(WOOD, 0), (TABLE, 1)]
    assert json.loads((agent / "agent.json").read_text())["experts"][0]["skill"] == WOOD


def test_an_agent_is_never_written_over_something(agent, merged, capsys):
    before = storage.tree_digest(agent)
    assert cli.main(["export", str(merged.root), "-o", str(agent)]) == 1
    assert "agent exists already; name another folder" in capsys.readouterr().err
    assert storage.tree_digest(agent) == before


@pytest.mark.parametrize(
    ("place", "said"),
    [("loop", "exists already"), ("file/agent", "Not a directory"), ("loop/x", "")],
)
def test_an_agent_for_a_place_that_cannot_be_is_refused_in_one_line(
    merged, tmp_path, capsys, place, said
):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").touch()
    assert cli.main(["export", str(merged.root), "-o", str(tmp_path / place)]) in (1, 2)
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop"]


def test_a_graph_without_experts_is_not_exported(tmp_path, capsys):
    assert cli.main(["export", str(tmp_path), "-o", str(tmp_path / "agent")]) == 1
    assert "is no graph" in capsys.readouterr().err
    assert not (tmp_path / "agent").exists()


def test_what_an_export_left_that_was_killed_is_in_nobodys_way(merged, tmp_path):
    left = tmp_path / ".tmp-agent" / "experts" / "9_Other.safetensors"
    left.parent.mkdir(parents=True)
    left.write_text("half")
    assert cli.main(["export", str(merged.root), "-o", str(tmp_path / "agent")]) == 0
    names = sorted(path.name for path in (tmp_path / "agent" / "experts").iterdir())
    assert names == ["0_Collect_Wood.safetensors", "1_Place_Table.safetensors"]
    assert not left.exists()


def _flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "experts/0_Collect_Wood.safetensors": (_flip, ExpertCorruptError),
    "agent.json": (_flip, FileRefusedError),
    "experts/1_Place_Table.safetensors": (Path.unlink, FileRefusedError),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_agent_is_refused(agent, name):
    damage, error = DAMAGE[name]
    damage(agent / name)
    with pytest.raises(error, match=f"{name}.*; export the agent again"):
        flowrl.load_agent(agent)


def test_a_folder_that_is_no_agent_is_refused(tmp_path):
    with pytest.raises(FileRefusedError, match=r"is no agent: .* use flowrl export"):
        flowrl.load_agent(tmp_path)


def _resealed(agent, **changes):
    """Change facts of the first expert, as somebody would who gives a hostile agent away."""
    document = records.read_document(agent / "agent.json")
    document["experts"][0].update(changes)
    records.write(agent / "agent.json", document)


def test_arrays_that_are_no_safetensors_or_of_other_shapes_are_refused(agent):
    path = agent / "experts" / "0_Collect_Wood.safetensors"
    path.write_bytes(b"\xff" * 100)
    _resealed(agent, arrays=sha256(path.read_bytes()).hexdigest())
    with pytest.raises(FileRefusedError, match="cannot be read"):
        flowrl.load_agent(agent)


def test_a_plan_with_an_expert_that_is_not_here_is_refused(agent):
    document = records.read_document(agent / "agent.json")
    document["experts"] = document["experts"][1:]
    records.write(agent / "agent.json", document)
    with pytest.raises(ExpertMissingError, match=r"lacks the experts \[0\] of its plans"):
        flowrl.load_agent(agent)


def _rewritten(agent, old, new, **changes):
    """Change code of the first expert's plan, and what agent.json says of it."""
    path = agent / "plans" / "0_Collect_Wood.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    _resealed(agent, module=sha256(path.read_bytes()).hexdigest(), **changes)
    return path


def test_a_plan_that_was_changed_is_refused(agent):
    path = agent / "plans" / "0_Collect_Wood.py"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(FileRefusedError, match="is not the plan that was exported"):
        flowrl.load_agent(agent)


def test_hostile_code_of_an_agent_is_not_run_although_it_says_it_is_trusted(agent):
    approvals = [
        {**each, "trusted": True}
        for each in records.read_document(agent / "agent.json")["experts"][0]["approvals"]
    ]
    hostile = "return open('/etc/passwd') or inventory"
    _rewritten(agent, "return inventory", hostile, approvals=approvals)
    with pytest.raises(SkillError, match="open"):
        flowrl.load_agent(agent)


def test_an_agent_brings_no_approvals_of_its_own(agent):
    path = _rewritten(
        agent, "return gathered + 0.05 * closer", "return closer / (gathered - gathered)"
    )
    [code] = _codes(path)
    ApprovalStore(agent / "plans" / "approvals").keep(CodeApproval(digest=code.digest))
    with pytest.raises(SkillError, match="not finite"):
        flowrl.load_agent(agent)


def test_a_skill_is_compiled_once(agent, monkeypatch):
    made = []

    def walk(self, expert):
        made.append(expert.skill)
        yes = np.ones(1, bool)
        output = SimpleNamespace(done=yes[0], task=0, expert=0, reward=0.0, task_success=yes)
        output.truncated = ~yes[0]
        begin, player = SimpleNamespace(world=None), (np.arange(4.0), np.arange(12) // 10)
        act = lambda key, state: (state, np.zeros(3), 1, output)  # noqa: E731
        return _Walk(lambda key: begin, act, act, lambda world: player)

    monkeypatch.setattr("flowrl.agent.Agent._walk", walk)
    found = flowrl.load_agent(agent)
    steps = [step for seed in range(3) for step in found.play(WOOD, seed=seed)]
    assert len(steps) == 3
    assert made == [WOOD]
    assert steps[0].count == 1
    assert steps[0].intrinsics == {"health": 0, "food": 1, "drink": 2, "energy": 3}
    assert steps[0].inventory == {"wood_pickaxe": 1, "wood_sword": 1}


def test_an_unknown_skill_is_refused_with_the_closest(agent):
    found = flowrl.load_agent(agent)
    with pytest.raises(GraphError, match="no skill 'Collect Wod'; closest is 'Collect Wood'"):
        next(found.play("Collect Wod"))
    for unknown in (PICKAXE, "", 7):
        with pytest.raises(GraphError, match=f"it has: {WOOD}, {TABLE}"):
            found.play(unknown)
    with pytest.raises(ConfigError, match=r"agent\.play: skill is None, not text"):
        found.play(None)
    for seed in ("x", None, 1.5, 2**70):
        with pytest.raises(ConfigError, match=r"agent\.play: seed is "):
            found.play(WOOD, seed=seed)


@pytest.mark.slow
@pytest.mark.craftax
def test_an_agent_acts_in_a_fresh_world_of_craftax(agent):
    """The tiny game's graph does the same in every run of the tests, with experts that learned."""
    import flowrl.agent

    sizes = expert_shapes(1216, 17, 64)
    found = flowrl.load_agent(agent)
    luck = np.random.default_rng(0)
    leaves = {name: luck.normal(size=shape).astype("f4") * 0.01 for name, shape in sizes.items()}
    tree = flowrl.agent.unflatten_dict(leaves, sep="/")
    object.__setattr__(found, "params", {0: tree, 1: tree})
    first, again = (list(found.play(TABLE, seed=5)) for _ in range(2))
    assert [step.action for step in first] == [step.action for step in again]
    assert first[0].observation.shape == (1216,)
    assert [step.done for step in first] == [False] * (len(first) - 1) + [True]


ODD = st.sampled_from(
    [None, True, -1, 0, 1, 7, 10**12, 2.5, "", "relu", "../x", "Place Table", [], {}, [1], {"a": 1}]
)


def _places(value, place=()):
    """The places of all values in a JSON document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in inner:
        yield (*place, key)
        if isinstance(part, dict | list):
            yield from _places(part, (*place, key))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_record_edited_and_sealed_again_is_a_whole_agent_or_one_line(exported, data):
    """Values of agent.json become others, or change places with others of the same record."""
    with TemporaryDirectory() as top:
        folder = Path(top) / "agent"
        shutil.copytree(exported, folder)
        document = records.read_document(folder / "agent.json")
        places = [place for place in _places(document) if place != ("format",)]
        for _ in range(data.draw(st.integers(1, 3))):
            *way, last = data.draw(st.sampled_from(places))
            try:
                target = reduce(getitem, way, document)
                target[last] = data.draw(ODD | st.sampled_from(list(target.values())))
            except (LookupError, TypeError, AttributeError):
                continue  # an earlier change has taken the place away
        records.write(folder / "agent.json", document)
        _is_whole_or_one_line(folder)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_arrays_edited_and_sealed_again_are_a_whole_agent_or_one_line(exported, data):
    """The header of safetensors names other types, shapes, offsets; the numbers are others."""
    with TemporaryDirectory() as top:
        folder = Path(top) / "agent"
        shutil.copytree(exported, folder)
        path = folder / "experts" / "0_Collect_Wood.safetensors"
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header, numbers = json.loads(content[8 : 8 + size]), bytearray(content[8 + size :])
        leaf = header[data.draw(st.sampled_from([name for name in header if name[0] != "_"]))]
        change = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "numbers"]))
        if change == "dtype":
            leaf["dtype"] = data.draw(st.sampled_from(["BF16", "F8_E4M3", "I32", "F64", "X", None]))
        elif change == "numbers":
            word = struct.pack("<f", data.draw(st.sampled_from([np.nan, np.inf, -np.inf, 3e38])))
            numbers[:4] = word
        else:
            leaf[change] = data.draw(ODD | st.lists(st.integers(-1, 2**40), max_size=3))
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(numbers))
        _resealed(folder, arrays=hashlib.sha256(path.read_bytes()).hexdigest())
        _is_whole_or_one_line(folder)


def _is_whole_or_one_line(folder):
    refused = ""
    try:
        found = flowrl.load_agent(folder)
    except FlowrlError as error:
        refused = str(error)
    if refused:
        assert "\n" not in refused
        return
    plans = {found.modules[each.index].tasks[-1].skill: each.skill for each in found.record.experts}
    assert all(plan == name for plan, name in plans.items())
    for index, params in found.params.items():
        leaves = flatten_dict(params, sep="/")
        assert all(np.isfinite(leaf).all() for leaf in leaves.values())
        assert {name: leaf.shape for name, leaf in leaves.items()} == SHAPES
        assert index in found.modules
    assert all(1 <= each.max_task_steps <= 100_000 for each in found.record.experts)
    assert found.record.activation in ("tanh", "relu", "gelu")


def test_a_plan_under_another_skills_name_is_refused(agent):
    document = records.read_document(agent / "agent.json")
    first, second = document["experts"]
    first["skill"], second["skill"] = second["skill"], first["skill"]
    for kind, end in (("experts", "safetensors"), ("plans", "py")):
        for index in (0, 1):
            [old] = (agent / kind).glob(f"{index}_*")
            old.rename(
                agent / kind / f"{index}_{'Place_Table' if index == 0 else 'Collect_Wood'}.{end}"
            )
    records.write(agent / "agent.json", document)
    with pytest.raises(FileRefusedError, match="has expert 0, that of 'Place Table'"):
        flowrl.load_agent(agent)


@pytest.mark.parametrize("command", ["export", "average"])
def test_a_place_that_cannot_be_written_is_one_line(merged, capsys, command):
    words = [str(merged.root)] if command == "export" else [str(merged.skills), str(merged.root)]
    assert cli.main([command, *words, "-o", "/proc/agent"]) == 2
    said = capsys.readouterr().err
    assert "-o /proc/agent cannot be written (" in said
    assert said.endswith("; choose another\n")
