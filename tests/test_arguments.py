"""Command lines, the environment and TOML files: what is read, from where, and what is refused."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from flowrl import arguments, bottomup, bottomup_parallel, cli, command_line
from flowrl.command_line import parse
from flowrl.commands.check import CheckCommand
from flowrl.commands.control import AddCommand, PauseCommand, PriorityCommand, RetryCommand
from flowrl.commands.repair import RollbackCommand
from flowrl.commands.sessions import LogsCommand
from flowrl.config import BottomUpConfig, flags
from flowrl.errors import EXIT_INTERRUPTED, ConfigError
from flowrl.paths import DEFAULT_GRAPH
from tests.test_config import needed

G = Path("exp/demo")


def read(kind, line, graph=None):
    environment = command_line.environment(BottomUpConfig, {"FLOWRL_GRAPH": graph} if graph else {})
    return arguments.read(kind, line.split(), prog="flowrl x", layers={"environment": environment})[
        0
    ]


@pytest.mark.parametrize(
    ("kind", "line", "expected"),
    [
        (RetryCommand, "exp/demo Wood", {"graph_path": G, "skill": "Wood"}),
        (RetryCommand, "Wood", {"graph_path": DEFAULT_GRAPH, "skill": "Wood"}),
        (RetryCommand, "Wood --graph-path exp/demo", {"graph_path": G, "skill": "Wood"}),
        (RetryCommand, "--graph_path=exp/demo Wood", {"graph_path": G, "skill": "Wood"}),
        (RetryCommand, "exp/demo --wait 3 Wood", {"graph_path": G, "skill": "Wood", "wait": 3.0}),
        (RetryCommand, "exp/demo --skill -t", {"graph_path": G, "skill": "-t"}),
        (RetryCommand, "exp/demo -- --help", {"graph_path": G, "skill": "--help"}),
        (PauseCommand, "exp/demo --all", {"graph_path": G, "skill": "", "all": True}),
        (PauseCommand, "Wood", {"graph_path": DEFAULT_GRAPH, "skill": "Wood"}),
        (PriorityCommand, "exp/demo Wood -5", {"graph_path": G, "skill": "Wood", "number": -5}),
        (PriorityCommand, "Wood 1k", {"graph_path": DEFAULT_GRAPH, "number": 1000}),
        (RollbackCommand, "exp/demo", {"graph_path": G, "generation": None}),
        (RollbackCommand, "--json 1", {"graph_path": DEFAULT_GRAPH, "generation": 1}),
        (RollbackCommand, "12", {"graph_path": DEFAULT_GRAPH, "generation": 12}),
        (RollbackCommand, "exp/demo 12 --json", {"graph_path": G, "generation": 12, "json": True}),
        (LogsCommand, "exp/demo Wood -f", {"graph_path": G, "skill": "Wood", "follow": True}),
    ],
)
def test_the_graph_is_the_first_word_and_may_be_left_out(kind, line, expected):
    found = vars(read(kind, line))
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("dashes", ["", "–", "—", "—-", "−−"], ids=repr)
def test_a_flag_without_its_two_hyphens_is_known_by_its_name(dashes):
    for name in flags(BottomUpConfig()).keys() - {"graph_path"}:
        for word in (f"{dashes}{name.replace('_', '-')}", f"{dashes}{name}=3"):
            said = f"; a flag has two hyphens: --{name}{word.partition('=')[1]}"
            with pytest.raises(ConfigError, match=said):
                read(BottomUpConfig, f"exp/demo {word} 3")


@pytest.mark.parametrize("number", ["7", "1e-4", "5M", "-0.5", "1,5", "80%"])
def test_a_number_too_many_is_no_skill(number):
    for line in (f"exp/demo --lr 1e-3 {number}", f"exp/demo {number}"):
        with pytest.raises(
            ConfigError, match=r"one word too many.*a number stands behind its flag"
        ):
            read(BottomUpConfig, line)


def test_a_list_grows_with_each_of_its_flags_and_ends_before_the_graph():
    assert parse(BottomUpConfig, ["--gpu_ids=0", "mine"]).graph.graph_path == Path("mine")
    words = "--pass_env A --gpu_ids=0 exp/demo --pass_env B"
    config = parse(BottomUpConfig, words.split())
    assert (config.launch.pass_env, config.launch.gpu_ids) == (("A", "B"), (0,))
    assert config.graph.graph_path == G


def test_a_folder_of_skill_files_is_no_graph(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.py").touch()
    found = read(AddCommand, f"{tmp_path}/mine", graph="exp/mine")
    assert (found.graph_path, found.files) == (Path("exp/mine"), (tmp_path / "mine",))
    (tmp_path / "mine" / "graph.json").touch()
    found = read(AddCommand, f"{tmp_path}/mine a.py", graph="exp/mine")
    assert (found.graph_path, found.files) == (tmp_path / "mine", (Path("a.py"),))


def test_a_word_that_is_neither_graph_nor_file_is_answered_in_one_line(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "my_skills").mkdir()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["add", "my_skils", "a.py"]) == 2
    said = (
        "flowrl: my_skils is no folder and no file *.py; closest is 'my_skills'; name skill files"
    )
    assert capsys.readouterr().err.startswith(said)


def test_the_environment_says_which_graph():
    for name in ("FLOWRL_GRAPH", "FLOWRL_GRAPH_PATH"):
        assert command_line.environment(BottomUpConfig, {name: "g"}) == {"graph_path": ["g"]}
    assert read(RetryCommand, "Wood", graph="exp/mine").graph_path == Path("exp/mine")
    assert read(RetryCommand, "exp/demo Wood", graph="exp/mine").graph_path == G


@pytest.mark.parametrize(
    ("kind", "line", "expected"),
    [
        (RetryCommand, "", "SKILL is missing: flowrl x GRAPH SKILL"),
        (RetryCommand, "exp/demo", "SKILL is missing: flowrl x GRAPH SKILL"),
        (RetryCommand, "a b c", "'c' is one word too many: flowrl x GRAPH SKILL"),
        (RetryCommand, "A --wiat 3", "flowrl x has no flag --wiat; closest is '--wait'"),
        (RetryCommand, "A --wait", "--wait has no value"),
        (RetryCommand, "A --wait --json", "--wait has no value"),
        (RetryCommand, "A --json=yes", "--json takes no value"),
        (
            BottomUpConfig,
            "--anneal_lr False",
            "--anneal_lr takes no value; to turn it off say --no",
        ),
        (BottomUpConfig, "--strict true", "--strict takes no value"),
        (CheckCommand, "--trace False a.py", "--trace takes no value; to turn it off say --no_tr"),
        (
            BottomUpConfig,
            "--gpu_ids=0 1",
            "--gpu_ids=0 takes no further word, as '1'; say --gpu_ids",
        ),
        (BottomUpConfig, "--pass_env=A B", "--pass_env=A takes no further word"),
        (RetryCommand, "A --wait soon", "--wait is 'soon', not a number"),
        (RetryCommand, "A --wait 1h", "--wait is '1h', not a number; --help names its unit"),
        (RollbackCommand, "exp/demo twelve", "GENERATION is 'twelve', not a whole number such as"),
        (BottomUpConfig, "--merge_policy best", "--merge_policy is 'best', not one of frame_count"),
        (BottomUpConfig, "--lr=", "--lr has no value"),
        (
            BottomUpConfig,
            "--slurm_args --gres=gpu",
            "--slurm_args has no value; give one without dashes",
        ),
        (BottomUpConfig, "--lr = 3", "--lr has spaces around its =; write --lr=VALUE"),
        (BottomUpConfig, "--no-lr", "flowrl x has no flag --no-lr"),
        (BottomUpConfig, "--gpu_ids 0 x", "--gpu_ids is 'x', not a whole number"),
    ],
)
def test_a_wrong_command_line_is_answered_in_one_line(kind, line, expected):
    with pytest.raises(ConfigError) as caught:
        read(kind, line)
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("word", "value"), [("1M", 10**6), ("5e7", 5 * 10**7), ("200k", 200_000), ("1.5M", 1_500_000)]
)
def test_numbers_may_be_written_as_people_write_them(word, value):
    assert parse(BottomUpConfig, ["--total_timesteps", word]).ppo.total_timesteps == value


@pytest.mark.parametrize(
    ("word", "fault"),
    [
        *((word, "not a whole number") for word in ("", "M", "0x10", "1.5", "nan", "x" * 5000)),
        *((word, "beyond") for word in ("1e999999999", "-1e18", "9" * 5000, "１e99", "1e10G")),
    ],
)
def test_no_number_is_worth_a_traceback_or_a_long_line(word, fault):
    with pytest.raises(ValueError, match=fault) as refused:
        arguments.count(word)
    assert len(str(refused.value)) < 150


@pytest.mark.parametrize("line", ["0 1", "0,1", "0, 1", "=0,1"])
def test_lists_may_have_commas(line):
    words = [f"--gpu_ids{line}"] if line[0] == "=" else ["--gpu_ids", *line.split()]
    assert parse(BottomUpConfig, words).launch.gpu_ids == (0, 1)


def test_the_command_line_comes_before_the_environment_before_the_file(tmp_path, monkeypatch):
    file = tmp_path / "mine.toml"
    file.write_text('lr = 0.5\ngamma = 0.5\nseed = "2k"\nuse-wandb = false\ngpu_ids = [0, 1]\n')
    monkeypatch.setenv("FLOWRL_GAMMA", "0.25")
    monkeypatch.setenv("FLOWRL_ANNEAL_LR", "0")
    monkeypatch.setenv("FLOWRL_GRAPH", "exp/mine")
    config = parse(BottomUpConfig, ["--config", str(file), "--lr", "0.125"])
    found = flags(config)
    assert [found[name] for name in ("lr", "gamma", "seed")] == [0.125, 0.25, 2000]
    assert (config.ppo.anneal_lr, config.launch.gpu_ids) == (False, (0, 1))
    assert config.graph.graph_path == Path("exp/mine")
    assert config.origins == {
        "config": "command line",
        "lr": "command line",
        "gamma": "environment",
        "anneal_lr": "environment",
        "graph_path": "environment",
        "seed": "config file",
        "use_wandb": "config file",
        "gpu_ids": "config file",
    }


@pytest.mark.parametrize("item", arguments.arguments(BottomUpConfig).values(), ids=lambda i: i.name)
def test_every_flag_may_stand_in_a_config_file(tmp_path, item):
    if item.name == "config":
        return
    value = flags(BottomUpConfig())[item.name]
    texts = {bool: str(value).lower(), tuple: "[]", str: f'"{value}"', type(Path()): '"g"'}
    file = tmp_path / "mine.toml"
    unset = '"2M"' if item.name in ("run_memory", "run_disk") else '"2"'
    text = texts.get(type(value), value if value is not None else unset)
    more = [f"{name} = {json.dumps(one)}" for name, one in needed(item.name).items()]
    file.write_text("\n".join([f"{item.name} = {text}", *more]))
    assert parse(BottomUpConfig, ["--config", str(file)]).origins[item.name] == "config file"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lrr = 1", "'lrr' is no flag; closest is 'lr'"),
        ("[ppo]\nlr = 1", "'ppo' is no flag"),
        ("[lr]\nx = 1", "'lr' is a table; write lr = …"),
        ("lr = ", "cannot be read: it is not TOML: Invalid value"),
        ("lr = 'fast'", "--lr (mine.toml) is 'fast', not a number"),
        ("use_wandb = 'perhaps'", "--use_wandb (mine.toml) is 'perhaps', not true or false"),
        ("lr = [1, 2]", "--lr (mine.toml) takes one value, not 2"),
        ("lr = ''", "lr has no value"),
        ("config = 'a.toml'", "'config' names this very file"),
        ("learning_rate = 1", "'learning_rate' is no flag; it is called lr"),
        (f"lr = {'[' * 5000}{']' * 5000}", "its lists lie too deep"),
        (f"# {'x' * 2**20}", "has over 1,048,576 bytes"),
        ("max_retries = 1.5", "--max_retries (mine.toml) is '1.5', not a whole number"),
        ("num-envs = 8\nnum_envs = 16", "num_envs is given twice"),
        ("lr = nan", "--lr (mine.toml) is nan, not a finite number"),
    ],
)
def test_a_wrong_config_file_is_answered_in_one_line(tmp_path, text, expected):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse(BottomUpConfig, ["--config", str(file), "--lr=1"])
    assert expected in str(caught.value).replace(str(file), "mine.toml")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_answered_with_the_closest(tmp_path, flowrl):
    (tmp_path / "mine.toml").touch()
    (tmp_path / "stack.py").touch()
    with pytest.raises(ConfigError, match=r"No such file .*; closest is 'mine\.toml'"):
        parse(BottomUpConfig, ["--config", str(tmp_path / "mnie.toml")])
    assert "closest is 'stack.py'" in flowrl("check", tmp_path / "stak.py", code=1).out


def test_a_variable_of_ours_that_is_no_flag_is_refused(monkeypatch, flowrl):
    monkeypatch.setenv("FLOWRL_VENV", "/of/the/scripts")
    monkeypatch.setenv("FLOWRL_LLM_URL", "http://llm")
    assert parse(BottomUpConfig, []) == BottomUpConfig()
    monkeypatch.setenv("FLOWRL_MAX_PARALEL_SKILLS", "2")
    with pytest.raises(ConfigError, match="closest is FLOWRL_MAX_PARALLEL_SKILLS"):
        parse(BottomUpConfig, [])
    monkeypatch.delenv("FLOWRL_MAX_PARALEL_SKILLS")
    monkeypatch.setenv("FLOWRL_XYZZY", "2")
    with pytest.raises(ConfigError, match="FLOWRL_XYZZY is no flag; unset it"):
        parse(BottomUpConfig, [])
    assert "FLOWRL_XYZZY is no flag; unset it" in flowrl("status", "exp/demo", code=2).err


@pytest.mark.parametrize(
    ("word", "program", "kind"),
    [
        ("train", bottomup_parallel, BottomUpConfig),
        ("sequential", bottomup, bottomup.SequentialConfig),
    ],
)
def test_the_programs_that_train_are_commands_with_the_same_flags(monkeypatch, word, program, kind):
    seen = []
    monkeypatch.setattr(program, "train", lambda config: seen.append(config) or 0)
    assert cli.main([word, "exp/demo", "--lr", "3e-4", "--no_use_wandb"]) == 0
    assert seen == [parse(kind, ["--graph-path=exp/demo", "--lr=3e-4"])]


def test_an_interrupted_training_says_how_to_go_on(monkeypatch, flowrl):
    def interrupted(config):
        raise KeyboardInterrupt

    monkeypatch.setattr(bottomup_parallel, "train", interrupted)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))  # as in an activated environment
    said = flowrl("train", "exp/my demo", code=EXIT_INTERRUPTED).err
    assert "To go on: flowrl train 'exp/my demo'" in said


def test_a_config_that_is_no_plain_file_is_refused_and_never_waited_for(tmp_path):
    pipe, link = tmp_path / "pipe.toml", tmp_path / "link.toml"
    os.mkfifo(pipe)
    link.symlink_to("/dev/zero")
    for path in (pipe, link, Path("/dev/zero"), tmp_path):
        with pytest.raises(ConfigError, match=re.escape(f"--config {path} ")):
            parse(BottomUpConfig, ["graph", "--config", str(path)])


def test_a_missing_config_names_only_toml_files(tmp_path):
    for name in ("nowhere.md", "nowhere.tomll", "nowher.toml"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"closest is 'nowher\.toml'$"):
        parse(BottomUpConfig, ["graph", "--config", str(tmp_path / "nowhere.toml")])


def test_a_value_in_quotes_may_begin_with_a_flag():
    words = ["exp/demo", "--write_skills", "1", "--write_flags", "--model m --seed=1"]
    assert parse(BottomUpConfig, words).write_flags == "--model m --seed=1"
    for value in ("--lr", "--lr=1", "--target_skill=Collect Wood"):
        with pytest.raises(ConfigError, match="--write_flags has no value"):
            parse(BottomUpConfig, ["--write_flags", value])
