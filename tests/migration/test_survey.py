"""What is found in an old folder: every form, every index as it was, no link followed."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from flowrl.errors import (
    ConfigError,
    ExpertCorruptError,
    ExpertShapeError,
    FileRefusedError,
    FlowrlError,
)
from flowrl.migration.old_files import numbered
from tests.migration.hostile import HOSTILE
from tests.migration.old_graphs import (
    KEYS,
    NAMES,
    link,
    mixture,
    network,
    pair,
    parallel_graph,
    planned,
    sequential_graph,
    skill_data,
    write_books,
    write_expert,
    write_orbax,
)


def first_numbers(plan) -> dict[int, float]:
    """One number of every expert's actor, which tells whose it is."""
    return {
        expert.index: float(expert.arrays()["actor/dense_3/kernel"][0, 0])
        for expert in plan.experts
    }


def wanted(seeds: dict[int, int]) -> dict[int, float]:
    return {index: float(pair(seed)[0][KEYS[3]]["kernel"][0, 0]) for index, seed in seeds.items()}


def origins(plan) -> dict[int, str]:
    return {expert.index: plan.decision(expert).origin for expert in plan.experts}


def test_a_parallel_graph_gives_names_frames_and_success_rates(tmp_path):
    plan = planned(parallel_graph(tmp_path))
    assert plan.survey.found == ("3 experts of the parallel code (skills/)",)
    assert [(e.index, e.name, e.frames, e.success_rate) for e in plan.experts] == [
        (0, "Collect Wood", 1000, 0.75),
        (1, "Place Table", 1001, 0.75),
        (2, "Make Wood Pickaxe", 1002, 0.75),
    ]
    assert (plan.config.env_name, plan.config.layer_size) == ("Craftax-Classic-Symbolic-v1", 8)
    assert plan.config.activation == "tanh"


def test_twelve_experts_each_keep_their_own_numbers_in_pickles(tmp_path):
    for index in range(12):
        write_expert(tmp_path, index, f"Skill {index}", seed=100 + index)
    plan = planned(tmp_path)
    assert first_numbers(plan) == wanted({index: 100 + index for index in range(12)})
    assert plan.notes == ()


def test_twelve_experts_of_one_tree_are_never_taken_by_a_prefix_of_their_key(tmp_path):
    """FACTS §9, 1: with 11 experts, expert 1 got expert 10's weights."""
    seeds = {index: 200 + index for index in range(12)}
    policies = write_orbax(tmp_path / "0_policies", seeds, 10)
    assert first_numbers(planned(policies)) == wanted(seeds)


def test_experts_that_the_original_has_mixed_up_are_told(tmp_path):
    write_expert(tmp_path, 1, "One", seed=10)
    write_expert(tmp_path, 10, "Ten", seed=10)
    (note,) = planned(tmp_path).notes
    assert note.startswith("experts 1 and 10 hold the same numbers")


def test_gaps_in_the_numbering_stay(tmp_path):
    for index in (3, 17, 5):
        write_expert(tmp_path, index, f"Skill {index}")
    assert [expert.index for expert in planned(tmp_path).experts] == [3, 5, 17]


def test_a_sequential_graph_gives_the_newest_expert_of_every_skill(tmp_path):
    plan = planned(sequential_graph(tmp_path))
    assert plan.survey.found == ("2 experts of the sequential code (<i>/<i>_policies)",)
    assert [(e.index, e.name, e.frames) for e in plan.experts] == [
        (0, "Collect Wood", 640),
        (1, "Place Table", 2000),
    ]
    assert first_numbers(plan) == wanted({0: 60, 1: 61})
    assert origins(plan)[0] == "own"


def test_the_skills_of_a_sequential_graph_may_lie_in_a_pickle(tmp_path):
    sequential_graph(tmp_path)
    skills = json.loads((tmp_path / "1" / "skills.json").read_text())["data"]
    for path in tmp_path.glob("*/skills.json"):
        path.unlink()
    (tmp_path / "checkpoints").mkdir()
    for number, known in ((1, skills), (0, {})):
        path = tmp_path / "checkpoints" / f"successful_skill_{number}_Place Table.pkl"
        path.write_bytes(pickle.dumps({"current_i": number, "skills": known, "db": {}}))
    assert [expert.name for expert in planned(tmp_path).experts] == list(NAMES[:2])


def test_networks_that_no_skill_names_and_skills_without_one_stay_behind(tmp_path):
    write_orbax(tmp_path / "4" / "4_policies", {0: 1, 1: 2, 7: 3}, 10)
    skills = {"Collect Wood": skill_data(number=1), "Far": skill_data(number=9)}
    (tmp_path / "4" / "skills.json").write_text(json.dumps({"data": skills}))
    plan = planned(tmp_path)
    assert [(expert.index, expert.name) for expert in plan.experts] == [(1, "Collect Wood")]
    left = {item.what.partition(" of ")[0]: item.why for item in plan.left_out}
    assert left == {
        "skill 'Far'": "no iteration has an expert for it",
        "expert 0": "no skill names it",
        "expert 7": "no skill names it",
    }


def test_one_pickle_or_one_orbax_folder_with_all_experts_is_enough(tmp_path):
    path = tmp_path / "checkpoint.pkl"
    path.write_bytes(pickle.dumps({"params": mixture({0: 5, 11: 6})}))
    assert first_numbers(planned(path)) == wanted({0: 5, 11: 6})
    policies = write_orbax(tmp_path / "2_policies", {0: 5, 11: 6}, 10, total_timesteps="1e6")
    step = policies / "policies" / "10"
    for place in (policies, step, step / "default"):
        assert first_numbers(planned(place)) == wanted({0: 5, 11: 6})
    plan = planned(policies)
    assert [(e.name, e.frames) for e in plan.experts] == [
        ("Expert 0", 1_000_000),
        ("Expert 11", 1_000_000),
    ]
    assert set(origins(plan).values()) == {"none"}


def test_a_mixture_takes_both_forms_and_says_so(tmp_path):
    sequential_graph(tmp_path)
    write_expert(tmp_path, 0, "Collect Wood", seed=1)
    plan = planned(tmp_path)
    assert len(plan.survey.found) == 2
    assert first_numbers(plan) == wanted({0: 1, 1: 61})
    assert [item.what for item in plan.left_out] == ["expert 0 (Collect Wood)"]


def test_an_expert_without_a_pickle_is_read_from_its_runs_checkpoint(tmp_path):
    parallel_graph(tmp_path, NAMES[:1])
    folder = tmp_path / "skills" / "5_Place_Table"
    policies = write_orbax(folder / "5_policies", {0: 70, 1: 71}, 30, TRAINED_TIMESTEPS=600)
    remap = {
        "global_to_local": {"0": 0, "5": 1},
        "initial_frame_counts": {"0": 9, "5": 40},
        "skill_name": "Place Table",
    }
    (policies / "remap.json").write_text(json.dumps(remap))
    plan = planned(tmp_path)
    assert first_numbers(plan) == wanted({0: 0, 5: 71})
    assert plan.experts[1].frames == 640


def test_only_the_newest_whole_step_counts(tmp_path):
    policies = write_orbax(tmp_path / "0_policies", {0: 1}, 5)
    write_orbax(policies, {0: 2}, 40)
    whole = policies / "policies" / "40"
    whole.rename(policies / "policies" / "40.orbax-checkpoint-tmp-7")
    (policies / "policies" / "900").mkdir()
    assert first_numbers(planned(policies)) == wanted({0: 1})


def test_the_newest_step_is_the_largest_number(tmp_path):
    policies = write_orbax(tmp_path / "0_policies", {0: 1}, 9)
    write_orbax(policies, {0: 2}, 10)
    assert first_numbers(planned(policies)) == wanted({0: 2})


def test_an_expert_that_was_recorded_and_one_in_training_stay_behind(tmp_path):
    parallel_graph(tmp_path, NAMES[:1])
    write_books(tmp_path, {0: (NAMES[0], {}), 3: ("Lost", {})})
    (tmp_path / "skills" / "4_Empty").mkdir()
    (tmp_path / "training_runs" / "skill_9_Busy").mkdir(parents=True)
    what = [item.what for item in planned(tmp_path).left_out]
    assert what[0] == "expert 3 (Lost)"
    assert what[1].startswith("expert 4 (")
    assert what[2].endswith("skill_9_Busy")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_expert_with_nan_is_left_out_and_the_others_are_not(value, tmp_path):
    parallel_graph(tmp_path)
    actor, critic = pair(0)
    critic[KEYS[1]]["bias"][3] = value
    write_expert(tmp_path, 7, "Sick", networks=(actor, critic))
    plan = planned(tmp_path)
    assert [expert.index for expert in plan.experts] == [0, 1, 2]
    (item,) = plan.left_out
    assert "expert 7 (Sick)" in item.what
    assert "critic/dense_1/bias is not finite" in item.why


def test_a_kernel_of_zeros_is_a_lost_file(tmp_path):
    parallel_graph(tmp_path)
    actor, critic = pair(0)
    actor[KEYS[2]]["kernel"][:] = 0
    write_expert(tmp_path, 7, "Lost", networks=(actor, critic))
    assert "actor/dense_2/kernel is zero everywhere" in planned(tmp_path).left_out[0].why


def test_nothing_is_migrated_when_no_expert_can_be(tmp_path):
    actor, critic = pair(0)
    actor[KEYS[0]]["kernel"][0, 0] = np.nan
    write_expert(tmp_path, 0, "Sick", networks=(actor, critic))
    with pytest.raises(FileRefusedError, match=r"no expert that can be migrated.*not finite"):
        planned(tmp_path)


def without(layers: dict, key: str) -> dict:
    return {name: arrays for name, arrays in layers.items() if name != key}


BAD_NETWORKS = {
    "a layer less": (without(network(1, 17), KEYS[2]), "actor has 3 layers .*flowrl's .* have 4"),
    "a layer more": ({**network(1, 17), "layers_8": network(1, 17)[KEYS[1]]}, "has 5 layers"),
    "another game": (network(1, 17, inputs=99), r"shape \(99, 8\).*fits no game"),
    "other actions": (network(1, 18), r"its last \(8, 18\)"),
    "a transposed layer": (
        {**network(1, 17), KEYS[1]: {"kernel": np.ones((9, 8), "f4"), "bias": np.ones(8, "f4")}},
        r"actor layers_2/kernel has shape \(9, 8\), a network of width 8 .* needs \(8, 8\)",
    ),
    "a bias of another size": (
        {**network(1, 17), KEYS[1]: {"kernel": np.ones((8, 8), "f4"), "bias": np.ones(7, "f4")}},
        r"layers_2/bias has shape \(7,\)",
    ),
    "wider numbers": (
        {**network(1, 17), KEYS[1]: {"kernel": np.ones((8, 8)), "bias": np.ones(8)}},
        "f8 numbers.*float32",
    ),
    "a convolution": ({**network(1, 17), "Conv_0": {}}, "'Conv_0', which is no dense layer"),
    "a layer without bias": ({**network(1, 17), KEYS[1]: {"kernel": 1}}, "no dense layer"),
    "a number for an array": (
        {**network(1, 17), KEYS[1]: {"kernel": 1, "bias": None}},
        r"layers_2/bias has shape \(\)|layers_2/kernel has shape \(\)",
    ),
    "no layers": ({}, "has 0 layers"),
    "a list for layers": ([1, 2], "has 0 layers"),
}


@pytest.mark.parametrize(("actor", "said"), BAD_NETWORKS.values(), ids=BAD_NETWORKS)
def test_a_network_of_another_form_is_refused_with_its_layer(actor, said, tmp_path):
    write_expert(tmp_path, 4, "Other", networks=(actor, network(1, 1)))
    with pytest.raises(ExpertShapeError, match=said) as refusal:
        planned(tmp_path)
    assert len(str(refusal.value).splitlines()) == 1


def test_experts_of_two_widths_are_refused_with_both(tmp_path):
    write_expert(tmp_path, 0, "Narrow")
    write_expert(tmp_path, 1, "Wide", networks=pair(1, width=16))
    with pytest.raises(ExpertShapeError, match=r"has width 8 .* has width 16"):
        planned(tmp_path)


def test_an_activation_that_the_original_did_not_heed_must_be_said(tmp_path):
    policies = write_orbax(tmp_path / "0_policies", {0: 1}, 10, ACTIVATION="relu")
    with pytest.raises(ConfigError, match="--activation"):
        planned(policies)
    assert planned(policies, activation="tanh").config.activation == "tanh"


@pytest.mark.parametrize("kind", ["os.system", "an object array", "nothing", "opcode OBJ"])
@pytest.mark.parametrize("place", ["params", "book"])
def test_a_hostile_pickle_stops_everything(kind, place, tmp_path):
    parallel_graph(tmp_path)
    paths = {
        "params": tmp_path / "skills" / "1_Place_Table" / "expert_1_policy" / "params.pkl",
        "book": tmp_path / "checkpoints" / "global_latest.pkl",
    }
    paths[place].write_bytes(HOSTILE[kind])
    with pytest.raises(FileRefusedError, match=rf"{paths[place].name} is refused"):
        planned(tmp_path)


@pytest.mark.parametrize(
    "place",
    [
        "skills",
        "skills/1_Place_Table",
        "skills/1_Place_Table/expert_1_policy",
        "skills/1_Place_Table/expert_1_policy/params.pkl",
        "skills/1_Place_Table/expert_1_policy/metadata.json",
        "scheduler_state.json",
        "checkpoints",
        "checkpoints/global_latest.pkl",
    ],
)
def test_a_link_is_refused_and_not_followed(place, tmp_path):
    old = parallel_graph(tmp_path / "old")
    link(old / place, tmp_path / "elsewhere")
    with pytest.raises(FileRefusedError):
        planned(old)


def test_a_link_inside_an_orbax_folder_is_refused(tmp_path):
    policies = write_orbax(tmp_path / "0_policies", {0: 1}, 10)
    link(policies / "policies" / "10" / "default" / "d", tmp_path / "elsewhere")
    with pytest.raises(FileRefusedError, match="link"):
        planned(policies)


def test_damaged_orbax_arrays_are_refused(tmp_path):
    policies = write_orbax(tmp_path / "0_policies", {0: 1}, 10)
    for path in (policies / "policies" / "10" / "default").rglob("d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ExpertCorruptError, match="cannot be read"):
        planned(policies)


HOSTILE_NAMES = ["../../x", "a;rm -rf ~", "$(id)", "-t", "木を集める", "a/b", 'a"b', "{x}", "a'''b"]


def test_hostile_names_are_shown_as_they_are_and_make_harmless_folders(tmp_path):
    for index, name in enumerate(HOSTILE_NAMES):
        write_expert(tmp_path, index, name, word=f"n{index}")
    assert [expert.name for expert in planned(tmp_path).experts] == HOSTILE_NAMES


@pytest.mark.parametrize("name", ["a\nb", "  ", "x" * 201, "\x1b[2J", "a\u202eb", "\ud800"])
def test_a_name_that_cannot_be_shown_is_refused(name, tmp_path):
    write_expert(tmp_path, 0, name, word="n")
    with pytest.raises(FlowrlError):
        planned(tmp_path)


def test_two_names_that_the_original_took_for_one_are_two_here(tmp_path):
    """FACTS §9, 9: two names shared an id, and one vanished."""
    write_expert(tmp_path, 0, "a b", word="a_b")
    write_expert(tmp_path, 1, "a/b", word="a_b")
    assert [expert.name for expert in planned(tmp_path).experts] == ["a b", "a/b"]


def test_two_experts_of_one_name_are_refused_with_both_places(tmp_path):
    write_expert(tmp_path, 0, "Collect Wood")
    write_expert(tmp_path, 1, "Collect Wood")
    with pytest.raises(FileRefusedError, match=r"0_Collect_Wood.*1_Collect_Wood"):
        planned(tmp_path)


def test_two_folders_that_claim_one_expert_are_refused(tmp_path):
    write_expert(tmp_path, 3, "One")
    write_expert(tmp_path, 3, "Two")
    with pytest.raises(FileRefusedError, match="both hold expert 3"):
        planned(tmp_path)


def test_an_expert_in_anothers_folder_is_refused(tmp_path):
    path = write_expert(tmp_path, 3, "One").parent
    path.rename(path.with_name("expert_4_policy"))
    with pytest.raises(FileRefusedError, match="not of expert 3"):
        planned(tmp_path)


@pytest.mark.parametrize("frames", [-1, 1.5, True, "many", 10**30, [1]])
def test_frames_that_are_no_count_are_refused(frames, tmp_path):
    write_expert(tmp_path, 0, "One", frames=frames)
    with pytest.raises(FileRefusedError, match="frames that are no count"):
        planned(tmp_path)


def test_a_pickle_that_shows_the_same_bytes_as_many_experts_is_refused(tmp_path):
    actor, critic = pair(1)
    tree = {}
    for number in range(50):
        tree[f"actor_networks_{number}"], tree[f"critic_networks_{number}"] = actor, critic
    path = tmp_path / "checkpoint.pkl"
    path.write_bytes(pickle.dumps(tree))
    with pytest.raises(FileRefusedError, match="more numbers than bytes"):
        planned(path)


@pytest.mark.parametrize("kind", ["empty folder", "a text", "a pickle of nothing", "other files"])
def test_what_is_no_graph_is_refused(kind, tmp_path):
    old = tmp_path / "old"
    if kind == "a text":
        old.write_text("hello")
    elif kind == "a pickle of nothing":
        old.write_bytes(pickle.dumps({"params": {}}))
    else:
        old.mkdir()
        if kind == "other files":
            (old / "skills").mkdir()
            (old / "skills" / "readme").write_text("x")
    with pytest.raises(FlowrlError) as refusal:
        planned(old)
    assert len(str(refusal.value).splitlines()) == 1


def test_a_legacy_pickle_carries_its_own_metadata_and_numbers(tmp_path):
    path = write_expert(tmp_path, 6, "Old")
    (path.parent / "metadata.json").unlink()
    actor, critic = pair(9)
    params = {"actor_networks_2": actor, "critic_networks_2": critic}
    metadata = {"skill_name": "Older", "global_expert_idx": 6, "total_frames": 55}
    path.write_bytes(pickle.dumps({"params": params, "metadata": metadata}))
    (expert,) = planned(tmp_path).experts
    assert (expert.name, expert.frames) == ("Older", 55)


def test_without_metadata_the_name_is_that_of_the_books_or_the_folder(tmp_path):
    parallel_graph(tmp_path)
    for path in tmp_path.glob("skills/*/*/metadata.json"):
        path.unlink()
    write_books(tmp_path, {0: ("Collect  Wood!", {})})
    names = [expert.name for expert in planned(tmp_path).experts]
    assert names == ["Collect  Wood!", "Place Table", "Make Wood Pickaxe"]


def test_a_folder_of_records_beside_an_experts_own_is_no_second_expert(tmp_path: Path):
    write_expert(tmp_path, 2, "a-b", word="ab")
    (tmp_path / "skills" / "2_a-b").mkdir()
    assert [expert.name for expert in planned(tmp_path).experts] == ["a-b"]


def test_digits_of_other_scripts_number_nothing(tmp_path):
    for name in ("step_7", "step_\u0667"):
        (tmp_path / name).mkdir()
    found = numbered(tmp_path, re.compile(r"step_(\d+)"))
    assert [path.name for _, _, path in found] == ["step_7"]
