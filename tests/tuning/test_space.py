"""Spaces are read from what users write, and their points are ones that a run admits."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.config import PPOConfig
from flowrl.errors import ConfigError
from flowrl.tuning.space import Space, admissible, parse_vary, read_space, space_from_data

ALL_KINDS = parse_vary(
    [
        "lr=log:1e-4:1e-2",
        "ent_coef=uniform:0:0.1",
        "gamma=logit:0.9:0.999",
        "num_envs=pow2:32:256",
        "update_epochs=int:1:8",
        "total_timesteps=log:1e5:1e6",
        "anneal_lr=choice:true,false",
    ]
)
UNITS = st.lists(st.floats(0, 1), min_size=7, max_size=7).map(np.array)


@given(UNITS)
def test_a_point_goes_to_unit_coordinates_and_back(unit):
    point = ALL_KINDS.from_unit(unit)
    again = ALL_KINDS.from_unit(ALL_KINDS.to_unit(point))
    assert point.keys() == again.keys()
    for name, value in point.items():
        assert type(again[name]) is type(value)
        assert again[name] == pytest.approx(value, rel=1e-8)
    assert np.all((ALL_KINDS.to_unit(point) >= 0) & (ALL_KINDS.to_unit(point) <= 1))


@given(UNITS)
def test_every_point_lies_in_its_space_and_survives_json(unit):
    point = ALL_KINDS.from_unit(unit)
    assert all(each.contains(point[each.name]) for each in ALL_KINDS.dimensions)
    assert json.loads(json.dumps(point)) == point
    PPOConfig(**point)


def test_kinds_spread_their_values_as_they_say():
    middle = ALL_KINDS.from_unit(np.full(7, 0.5))
    assert middle["lr"] == 1e-3
    assert middle["gamma"] == pytest.approx(1 - math.sqrt(0.1 * 0.001))
    assert middle["num_envs"] == 128
    assert middle["total_timesteps"] == round(math.sqrt(1e11))
    assert [ALL_KINDS.dimensions[4].value(at) for at in (0, 0.12, 0.13, 1)] == [1, 1, 2, 8]
    assert ALL_KINDS.dimensions[6].choices == (True, False)


TABLES = {
    "lr": {"type": "log_uniform", "min": 1e-4, "max": 1e-2},
    "num_envs": {"distribution": "uniform_pow2", "min": 32, "max": 256, "scale": "auto"},
    "gamma": {"distribution": "logit_normal", "min": 0.9, "max": 0.999, "scale": 0.25},
    "update_epochs": {"type": "choice", "choices": [1, 2, 4]},
}


def test_toml_and_json_say_the_same_in_both_spellings(tmp_path):
    (tmp_path / "space.json").write_text(json.dumps(TABLES))
    lines = []
    for name, table in TABLES.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    (tmp_path / "space.toml").write_text("\n".join(lines))
    space = read_space(tmp_path / "space.toml")
    assert space == read_space(tmp_path / "space.json")
    assert [each.kind for each in space.dimensions] == [
        "log_uniform",
        "uniform_pow2",
        "logit",
        "choice",
    ]
    assert [each.scale for each in space.dimensions] == [0.5, 0.5, 0.25, 0.5]
    assert space.dimensions[3].choices == (1, 2, 4)


def test_a_space_is_written_and_read_back():
    assert space_from_data(json.loads(json.dumps(ALL_KINDS.to_data())), "here") == ALL_KINDS


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("lr", "FIELD=KIND:MIN:MAX"),
        ("lr=log:1e-4", "FIELD=KIND:MIN:MAX"),
        ("lr=normal:1:2", "lr: has no known type"),
        ("learning=log:1:2", "learning: is no field that can be varied"),
        ("gama=logit:0.9:0.99", "closest is 'gamma'"),
        ("seed=int:1:9", "seed: is no field that can be varied"),
        ("success_state_rate=uniform:0.1:0.9", "trials are compared by"),
        ("layer_size=pow2:32:256", "same for all experts"),
        ("activation=choice:tanh,relu", "same for all experts"),
        ("ent_coef=int:0:2", "use type uniform"),
        ("lr=log:-1:1", "must be above 0"),
        ("ent_coef=log:0:1", "no logarithm"),
        ("ent_coef=log:-1:1", "no logarithm"),
        ("lr=log:1e-2:1e-4", "must be below max"),
        ("lr=log:1e-3:1e-3", "must be below max"),
        ("lr=log:1e-3:nan", "finite"),
        ("lr=log:1e-3:high", "not a number"),
        ("gamma=uniform:0.5:1.5", "[0, 1]"),
        ("gamma=logit:0.5:1", "below 1"),
        ("num_envs=int:1.5:9", "whole number"),
        ("num_envs=pow2:30:256", "powers of two"),
        ("update_epochs=choice:4", "one choice"),
        ("update_epochs=choice:4,4", "one choice"),
        ("anneal_lr=uniform:0:1", "use type"),
        ("update_epochs=choice:4,many", "not a whole number"),
    ],
)
def test_a_dimension_that_cannot_be_is_refused_by_name(item, said):
    with pytest.raises(ConfigError, match=r"^--vary") as caught:
        parse_vary([item])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert item.partition("=")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no field is varied"),
        ("lr = 3", "lr: is no table"),
        ('[lr]\ntype = "uniform"\nmin = 1e-4', "needs min and max"),
        ('[lr]\ntype = "uniform"\nmin = 1e-4\nmax = 1\nmean = 2', "'mean' is unknown"),
        ('[lr]\ntype = "uniform"\nmin = 1e-4\nmax = 1\nscale = 0', "scale 0"),
        ('[lr]\ntype = "uniform"\nmin = true\nmax = 1', "not a number"),
        ('[lr]\ntype = "choice"\nchoices = []', "one choice"),
        ("[lr", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_is_refused_by_name(tmp_path, text, said):
    path = tmp_path / "space.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"space\.toml") as caught:
        read_space(path)
    assert said in str(caught.value)
    (tmp_path / "space.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"space\.json cannot be read"):
        read_space(tmp_path / "space.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_space(tmp_path / "none.json")


def test_a_field_is_varied_once():
    with pytest.raises(ConfigError, match="lr is varied twice"):
        parse_vary(["lr=log:1e-4:1e-2", "lr=log:1e-4:1e-3"])


def test_a_long_range_of_whole_numbers_is_not_written_out():
    (frames,) = parse_vary(["total_timesteps=int:1:1000000000"]).dimensions
    assert frames.contains(999_999_999)
    assert not frames.contains(True)
    assert frames.value(frames.unit(123_456_789)) == 123_456_789


def test_minibatches_are_repaired_to_the_nearest_number_that_divides_the_rows():
    base = PPOConfig(num_minibatches=10)
    assert admissible({"num_envs": 64, "num_steps": 6}, base).num_minibatches == 12
    assert admissible({"num_envs": 64, "num_steps": 5}, base).num_minibatches == 10
    with pytest.raises(ConfigError, match="env_shards"):
        admissible({"num_envs": 48}, PPOConfig(env_shards=5))


def test_a_point_outside_its_space_is_refused():
    space = parse_vary(["update_epochs=choice:1,2"])
    for point in ({"update_epochs": 3}, {"update_epochs": True}, {}, {"lr": 1e-3}):
        with pytest.raises(ConfigError):
            space.to_unit(point)


def test_a_repair_that_leaves_the_space_is_not_admitted():
    items = ["num_minibatches=choice:5,8", "num_envs=choice:32,40"]
    space = Space(parse_vary(items).dimensions, base=PPOConfig())
    assert space.admitted({"num_minibatches": 5, "num_envs": 32}) is None
    good = {"num_minibatches": 5, "num_envs": 40}
    assert space.admitted(good) == good
