"""Every flag is a field, and every field travels."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from flowrl.arguments import arguments
from flowrl.command_line import parse, to_argv
from flowrl.config import (
    BottomUpConfig,
    GraphConfig,
    LaunchConfig,
    PPOConfig,
    ScheduleConfig,
    checked,
    flags,
    from_json,
    to_json,
    with_flags,
)
from flowrl.errors import ConfigError
from flowrl.parallel.training import SequentialConfig
from flowrl.runs import TrainConfig

OTHER = {
    "num_envs": 16,
    "acting_threads": 4,
    "num_devices": 2,
    "env_shards": 8,
    "num_steps": 32,
    "num_minibatches": 2,
    "activation": "relu",
    "precision": "bf16",
    "frame_accounting": "total",
    "env_name": "Craftax-Symbolic-v1",
    "gpu_ids": (0, 3),
    "merge_policy": "eval_gate",
    "merge_objective": "success=1,deaths=0.5",
    "replicas": 4,
    "average_rule": "median",
    "average_outer": "sgd",
    "average_quorum": 2,
    "min_workers": 2,
    "average_every": 16,
    "run_memory": 12_345_678,
    "run_disk": 12_345_678,
    "sandbox": "none",
    "pass_env": ("MY_NAME", "MY_OTHER_NAME"),
}


def other_value(item: dataclasses.Field):
    if item.name == "launcher":
        return "tmux" if item.default == "local" else "local"
    if item.name in OTHER:
        return OTHER[item.name]
    match item.default:
        case bool():
            return not item.default
        case int():
            return item.default + 7
        case float():
            return 0.625
        case Path():
            return Path("else where/x")
    empty = {
        "tuple[str, ...]": ("$(id); 'x' -t", "b=1"),
        "Path | None": Path("/a b"),
        "Count | None": 12_345,
        "Frames | None": 12_345,
        "AboveZero | None": 2.5,
    }
    kind = item.type.removeprefix("Annotated[").partition(", Needs")[0]
    return empty.get(kind, "$(id); 'x' -t")


def needed(name: str) -> dict[str, object]:
    """The flags without which a flag of `flowrl train` does nothing."""
    found = {}
    while needs := arguments(BottomUpConfig)[name].needs:
        name, values = next(iter(needs.any_of.items()))
        found[name] = values[0]
    return found


def fields(*kinds):
    return [item for kind in kinds for item in dataclasses.fields(kind)]


GRAPH_FLAGS = fields(GraphConfig, ScheduleConfig, LaunchConfig)
TRAINER = TrainConfig(module_path=Path("m/0.py"))


@pytest.mark.parametrize(
    ("base", "item"),
    [
        *((TRAINER, item) for item in fields(PPOConfig)),
        *((BottomUpConfig(), item) for item in [*fields(PPOConfig), *GRAPH_FLAGS]),
    ],
    ids=lambda part: getattr(part, "name", type(part).__name__),
)
def test_every_flag_reaches_the_other_side(base, item):
    base = with_flags(base, **needed(item.name))
    value = other_value(item)
    config = with_flags(base, **{item.name: value})
    assert value != item.default
    assert flags(config) == {**flags(base), item.name: value}
    assert parse(type(base), to_argv(config)) == config


@pytest.mark.parametrize("change", [{"module_path": Path("else/1.py")}, {"resume": False}])
def test_the_trainers_own_flags_reach_the_other_side(change):
    config = with_flags(TRAINER, **change)
    assert parse(TrainConfig, to_argv(config)) == config != TRAINER


def test_no_two_parts_of_a_configuration_have_a_flag_of_the_same_name():
    names = [item.name for item in [*fields(PPOConfig), *GRAPH_FLAGS]]
    own = ["config", "notify", "video_after", "analyse_at", "write_skills", "write_flags"]
    assert sorted([*names, *own]) == sorted(flags(BottomUpConfig()))


def test_a_flag_that_is_not_there_cannot_be_changed():
    with pytest.raises(TypeError, match="no_such_flag"):
        with_flags(BottomUpConfig(), no_such_flag=1)


def test_the_trainers_part_of_a_graphs_flags_is_a_trainers_command_line():
    graph = with_flags(BottomUpConfig(), lr=3e-3, total_timesteps=7_000, anneal_lr=False)
    trainer = parse(TrainConfig, ("--module_path", "x/2.py", *to_argv(graph.ppo)))
    assert trainer.ppo == graph.ppo


@pytest.mark.parametrize("kind", [PPOConfig, BottomUpConfig])
def test_a_recorded_configuration_comes_back(kind):
    items = fields(PPOConfig) + (GRAPH_FLAGS if kind is BottomUpConfig else [])
    base = with_flags(kind(), **{item.name: other_value(item) for item in items})
    fitting = {"num_envs": 64, "num_steps": 8, "num_minibatches": 4, "stop_when_stuck": False}
    config = checked(with_flags(base, **fitting))
    facts = json.loads(json.dumps(to_json(config)))
    assert from_json(kind, facts) == config
    assert from_json(kind, json.loads(json.dumps(to_json(kind())))) == kind()


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", "x"), ("num_envs", 2.5), ("num_envs", True), ("activation", "sin"), ("seed", None),
     ("use_wandb", 1), ("compile_cache", 7), ("gamma", 2.0)],
)  # fmt: skip
def test_a_wrong_value_in_a_recorded_configuration_is_named(name, value):
    with pytest.raises(ConfigError, match=name):
        from_json(PPOConfig, {**to_json(PPOConfig()), name: value})


@pytest.mark.parametrize(
    "line",
    [
        "--max_nodes 3 --max_parallel_skills 2 --total_timesteps 5e7 --no_use_wandb",
        "--max-nodes 3 --max-parallel-skills 2 --total-timesteps 50000000 --no-use-wandb",
        "--max-nodes=3 --max_parallel_skills=2 --total_timesteps=5E7",
    ],
)
def test_the_documented_command_line_is_taken_with_either_dash(line):
    config = parse(BottomUpConfig, line.split())
    assert (config.graph.max_nodes, config.schedule.max_parallel_skills) == (3, 2)
    assert config.ppo.total_timesteps == 50_000_000
    assert isinstance(config.ppo.total_timesteps, int)


@pytest.mark.parametrize("word", ["1.5", "many", "5e-1", "nan", "inf"])
def test_what_is_no_whole_number_is_refused(word):
    with pytest.raises(ConfigError, match=f"--total_timesteps is '{word}', not a whole number"):
        parse(BottomUpConfig, ["--total_timesteps", word])


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"num_envs": 0}, "--num_envs is 0"),
        ({"num_envs": 3, "num_steps": 5}, "--num_minibatches 8; choose 5, 15"),
        ({"num_envs": 10, "num_devices": 3}, "--num_devices 3; choose 9 or 12"),
        ({"env_shards": 4, "num_devices": 3}, "--env_shards 4 cannot be dealt .* multiple of 3"),
        (
            {"num_envs": 12, "num_steps": 32, "env_shards": 4, "num_minibatches": 10},
            "= 96 rows .* choose 8, 12",
        ),
        ({"grad_sync_period": 0}, "--grad_sync_period is 0"),
        ({"acting_threads": 0}, "--acting_threads is 0"),
        ({"acting_threads": 3, "num_envs": 64}, "--acting_threads 3"),
        ({"lr": 0.0}, "--lr"),
        ({"lr": float("nan")}, "--lr"),
        ({"gamma": 1.5}, "--gamma"),
        ({"gamma": float("nan")}, "--gamma"),
        ({"success_state_rate": -0.1}, "--success_state_rate"),
        ({"total_timesteps": 0}, "--total_timesteps"),
        ({"max_parallel_skills": 0}, "--max_parallel_skills"),
        ({"max_retries": -1}, "--max_retries"),
        ({"checkpoint_seconds": -1.0}, "--checkpoint_seconds"),
        ({"scheduler_poll_interval": 0.0}, "--scheduler_poll_interval"),
        ({"skill_timesteps_budget": 0}, "--skill_timesteps_budget"),
        ({"max_nodes": 0}, "--max_nodes"),
        ({"stall_timeout": 0.0}, "--stall_timeout"),
        ({"run_timeout": -1.0}, "--run_timeout"),
        ({"cpus_per_run": -1}, "--cpus_per_run"),
        ({"replicas": 0}, "--replicas is 0"),
        ({"replicas": 3, "average_quorum": 4}, "--average_quorum 4 must be 2 to 3"),
        ({"replicas": 3, "average_quorum": 1}, "--average_quorum 1 must be 2 to 3"),
        ({"replicas": 2, "average_quorum": 3}, "--average_quorum 3 must be 2, as"),
        ({"replicas": 2, "average_outer": "sgd", "average_momentum": 1.0}, "choose below 1"),
        ({"replicas": 2, "average_every": 99, "total_timesteps": 400_000}, "the 98 updates"),
        ({"replicas": 5, "average_rule": "krum"}, "krum needs --average_quorum 5 or more, not 4"),
        ({"replicas": 5}, "num_envs 64 cannot be shared evenly by --replicas 5; choose 4 or 8"),
        ({"replicas": 64, "num_minibatches": 128}, "in each of 64 replicas, --num_envs 1 × "),
        ({"replicas": 2, "grad_sync_period": 3}, "must be a multiple of --grad_sync_period 3"),
    ],
    ids=str,
)
def test_a_value_that_makes_no_sense_is_refused_by_name(change, flag):
    with pytest.raises(ConfigError, match=flag):
        checked(with_flags(BottomUpConfig(), **change))


def test_the_sequential_story_takes_the_same_flags_and_one_slot():
    config = parse(SequentialConfig, ["--max_nodes", "3", "--no_use_wandb", "--gpu_ids", "1"])
    assert (config.graph.max_nodes, config.launch.gpu_ids) == (3, (1,))
    assert config.schedule.max_parallel_skills == 1


def test_the_sequential_story_refuses_runs_side_by_side():
    with pytest.raises(ConfigError, match=r"--max_parallel_skills 2 .*flowrl train"):
        parse(SequentialConfig, ["--max_parallel_skills", "2"])


def test_a_configuration_recorded_by_another_version_is_read_as_far_as_it_is_known():
    facts = to_json(PPOConfig(lr=0.5))
    del facts["gamma"]
    assert from_json(PPOConfig, {**facts, "of_the_future": 1}) == PPOConfig(lr=0.5)


def test_a_configuration_of_an_earlier_version_is_not_egocentric():
    facts = to_json(BottomUpConfig())
    assert from_json(BottomUpConfig, facts).ppo.egocentric
    del facts["egocentric"]
    assert not from_json(BottomUpConfig, facts).ppo.egocentric
