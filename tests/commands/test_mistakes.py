"""Mistakes made by a generator: any command, any of its flags, any wrong word or file.

Whatever is wrong, the answer is one line that names it, and nothing is made on disk.
"""

from __future__ import annotations

import os
import socket
import string
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flowrl
from flowrl import arguments, cli, command_line
from flowrl.arguments import Argument, Given, Origin
from flowrl.config import BottomUpConfig
from flowrl.errors import ConfigError, FlowrlError

VAST = ("seed", "run_memory", "run_disk")  # of 64 bits
WORDS = st.text(string.ascii_letters + string.digits + "_é", min_size=1, max_size=12)
HOSTILE = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
QUIET = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def flags_of(command: str) -> list[Argument]:
    return list(arguments.arguments(cli.class_of(command)).values())


def takes_no_word(argument: Argument) -> bool:
    """True if no word of letters is a value of it."""
    kind = argument.type
    return kind in (int, float) or get_origin(kind) is Literal


def wrong_value(draw: Callable, flag: Argument) -> list[str]:
    """A flag with a value that is none of its own, too large, too small or too long."""
    if flag.type is bool:
        return [f"--{flag.name}={draw(WORDS)}"]
    if not takes_no_word(flag):
        return [f"--{flag.name}="]
    wrong = [f"x{draw(WORDS)}", "x" * 5000, "9" * 5000, "1e18"]
    wrong += ["1e-320", "1e300"] if flag.type is float else []
    wrong += ["1e17"] if flag.type is int and flag.name not in VAST else []
    return [f"--{flag.name}", draw(st.sampled_from(wrong))]


@st.composite
def wrong_lines(draw: Callable) -> tuple[list[str], str]:
    """A command line that must be refused, and what the answer must name."""
    command = draw(st.sampled_from(sorted(cli.ALL)))
    named = [each for each in flags_of(command) if not each.positional]
    words = command.split()
    kind = draw(st.sampled_from(["unknown"] + ["value", "none"] * bool(named)))
    if kind == "unknown":
        known = draw(st.sampled_from([each.name for each in named] or ["json"]))
        at = draw(st.integers(0, len(known) - 1))
        flag = draw(st.sampled_from([known[:at] + known[at + 1 :], f"{known}{draw(WORDS)}"]))
        if not flag or flag.removeprefix("no_") in arguments.arguments(cli.class_of(command)):
            flag = "thisisnoflag"
        return [*words, f"--{flag}"], f"--{flag}"
    flag = draw(st.sampled_from(named))
    if kind == "value":
        return [*words, *wrong_value(draw, flag)], f"--{flag.name}"
    value = ["true"] if flag.type is bool else []
    return [*words, f"--{flag.name}", *value], f"--{flag.name}"


def answer(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a refused command line is answered with: one line."""
    capsys.readouterr()
    code = cli.main(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    assert line.startswith("flowrl: ")
    assert line.isprintable()
    assert len(line) < 600
    return line


@given(wrong_lines())
@QUIET
def test_a_wrong_flag_of_any_command_is_named_in_one_line(tmp_path, monkeypatch, capsys, wrong):
    monkeypatch.chdir(tmp_path)
    words, named = wrong
    assert named.replace("-", "_") in answer(words, capsys).replace("-", "_"), words
    assert list(tmp_path.iterdir()) == []


def positionals(command: str) -> list[Argument]:
    found = [each for each in flags_of(command) if each.positional]
    one_graph = found[:1] and found[0].name == "graph_path" and not found[0].many
    return found if one_graph else []


@pytest.mark.parametrize("command", [name for name in cli.ALL if positionals(name)])
def test_words_before_the_graph_are_told_that_it_comes_first(
    tmp_path, monkeypatch, capsys, command
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "graph.json").touch()
    words = ["Collect Wood", "10"][: max(1, len(positionals(command)) - 1)]
    for place in range(1, len(words) + 1):
        line = [*command.split(), *words[:place], "mine", *words[place:]]
        assert "'mine' is a graph, and GRAPH comes first: flowrl" in answer(line, capsys)


@given(HOSTILE.filter(lambda word: word not in (*cli.ALL, "help") and word[:1] not in ("-", "")))
@QUIET
def test_any_other_word_is_no_command(capsys, word):
    assert "there is no command" in answer([word], capsys)


def odd_files(folder: Path) -> dict[str, Path]:
    """Paths that are no text file of a user's."""
    found = {name: folder / name for name in ("folder", "fifo", "socket", "binary", "long", "loop")}
    found["folder"].mkdir()
    os.mkfifo(found["fifo"])
    with socket.socket(socket.AF_UNIX) as one:
        os.chdir(folder)
        one.bind("socket")
    found["binary"].write_bytes(bytes(range(256)) * 40)
    found["long"].write_bytes(b"x = 1\n" * 400_000)
    found["loop"].symlink_to(found["loop"])
    return {
        **found,
        "missing": folder / "missing",
        "endless": Path("/dev/zero"),
        "null": Path("/dev/null"),
        "too long": folder / ("n" * 300),
        "below a file": found["binary"] / "x",
    }


@pytest.mark.parametrize(
    "line",
    ["train --config", "sequential --config", "sweep --vary lr=log:1e-4:1e-2 --skill X --config",
     "train --skill_config", "sequential --skill_config", "check",
     "sweep ../graph --skill X --space"],
)  # fmt: skip
@pytest.mark.parametrize(
    "kind",
    ["folder", "fifo", "socket", "binary", "long", "loop", "missing", "endless", "too long",
     "below a file"],
)  # fmt: skip
def test_no_odd_file_is_waited_for_or_believed(tmp_path, monkeypatch, capsys, line, kind):
    (tmp_path / "files").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "graph" / "checkpoints").mkdir(parents=True)
    path = odd_files(tmp_path / "files")[kind]
    monkeypatch.chdir(tmp_path / "here")
    words = [*line.split(), str(path)]
    capsys.readouterr()
    code = cli.main(words)
    (line,) = "".join(capsys.readouterr()).splitlines()
    assert code in (1, 2)
    assert path.name in line
    assert list((tmp_path / "here").iterdir()) == []


@given(HOSTILE)
@QUIET
def test_no_path_is_worth_a_traceback(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((FlowrlError, OSError)):
        flowrl.status(text)
    with pytest.raises((FlowrlError, OSError)):
        flowrl.evaluate(text, "Collect Wood")
    assert list(tmp_path.iterdir()) == []


NUMBERS = sorted(
    each.name for each in arguments.arguments(BottomUpConfig).values() if each.type in (int, float)
)


@given(st.dictionaries(st.sampled_from(NUMBERS), HOSTILE.map("x".__add__), min_size=1))
@QUIET
def test_a_variable_that_is_no_number_is_named(values):
    env = {f"FLOWRL_{name.upper()}": value for name, value in values.items()}
    layers: dict[Origin, Given] = {"environment": command_line.environment(BottomUpConfig, env)}
    with pytest.raises(ConfigError, match=r"--\w+ \(environment\) is ['\"]x") as refused:
        arguments.read(BottomUpConfig, [], prog="flowrl train", layers=layers)
    assert any(f"--{name} " in str(refused.value) for name in values)


PATHS = [
    (command, each)
    for command in cli.ALL
    for each in flags_of(command)
    if (each.type is Path or get_args(each.type)[:1] == (Path,)) and each.name != "config"
]


@pytest.mark.parametrize(
    ("command", "place"), PATHS, ids=lambda each: each if isinstance(each, str) else each.name
)
@pytest.mark.parametrize("address", ["s3://bucket/one", "https://host/one.svg", "file:///one"])
def test_no_address_is_taken_for_a_path(tmp_path, monkeypatch, capsys, command, place, address):
    monkeypatch.chdir(tmp_path)
    words = [*command.split(), f"--{place.name}", address]
    capsys.readouterr()
    with suppress(SystemExit):
        cli.main(words)
    said = "".join(capsys.readouterr())
    assert "an address; name a path" in said or "is missing" in said or "needed" in said, said
    assert list(tmp_path.iterdir()) == []


def test_a_path_may_begin_with_the_users_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for word in ("~", "~/graph"):
        got = arguments.value_of(cli.class_of("export"), "output", [word])
        assert got == Path(word).expanduser()
    with pytest.raises(ConfigError, match="is '~nobodyhere/x', which is no path"):
        arguments.value_of(cli.class_of("export"), "output", ["~nobodyhere/x"])


MANY = [
    (command, each)
    for command in cli.ALL
    for each in flags_of(command)
    if each.many and not each.positional
]


@pytest.mark.parametrize(
    ("command", "many"), MANY, ids=lambda each: each if isinstance(each, str) else each.name
)
def test_the_values_of_a_flag_end_at_any_flag(command, many):
    kind = cli.class_of(command)
    for flag in [each for each in flags_of(command) if each.short]:
        words = [
            f"--{many.name}",
            "a",
            "b",
            flag.short[0],
            *(() if flag.type is bool else ("c.svg",)),
        ]
        given = arguments.split(kind, words, prog="flowrl")
        assert given[many.name] == ["a", "b"]
        assert given[flag.name] == (["true"] if flag.type is bool else ["c.svg"])


@pytest.mark.parametrize("kind", ["agent.json", "sweep.json", "run.json"])
@pytest.mark.parametrize(
    "line",
    ["train", "sequential", "sweep --skill X --vary lr=log:1e-4:1e-2 --graph_path",
     "skills", "retrain", "train-more"],
)  # fmt: skip
def test_no_graph_is_made_in_another_folder_of_flowrl(tmp_path, monkeypatch, capsys, kind, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / kind).write_text("{}")
    words = [*line.split(), "mine", *(["X"] if line in ("retrain", "train-more") else [])]
    capsys.readouterr()
    assert cli.main(words) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert "mine is " in said
    assert "not a graph; name another folder" in said
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", kind]


@pytest.mark.parametrize("kind", ["folder", "fifo", "socket"])
@pytest.mark.parametrize("line", ["plot nosuch", "play nosuch X"])
def test_no_output_replaces_what_is_no_file(tmp_path, monkeypatch, capsys, line, kind):
    path = odd_files(tmp_path)[kind].rename(tmp_path / "one.gif")
    path = path.rename(path.with_suffix(".svg")) if "plot" in line else path
    before, mode = sorted(tmp_path.iterdir()), path.lstat().st_mode
    said = answer([*line.split(), "-o", str(path)], capsys)
    assert "is a folder; name a file" in said or "is a pipe or a device; name a file" in said
    assert (sorted(tmp_path.iterdir()), path.lstat().st_mode) == (before, mode)


@pytest.mark.parametrize("name", ["config.json", "events.jsonl", "notices", "training_runs"])
@pytest.mark.parametrize("line", ["train mine", "sequential mine", "skills mine"])
def test_no_file_of_another_program_is_written_over(tmp_path, monkeypatch, capsys, name, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text("mine")
    capsys.readouterr()
    assert cli.main(line.split()) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert f"mine is no graph and has {name}, which a graph would write over; name a new" in said
    assert (tmp_path / "mine" / name).read_text() == "mine"


@pytest.mark.parametrize("command", [*cli.ALL, "nosuch"])
def test_a_folder_that_was_removed_under_the_shell_is_said(tmp_path, monkeypatch, capsys, command):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "the folder that you are in was removed" in answer([*command.split(), "x"], capsys)


@pytest.mark.parametrize(
    ("command", "place"), PATHS, ids=lambda each: each if isinstance(each, str) else each.name
)
def test_no_path_holds_a_nul(command, place):
    with pytest.raises(ConfigError, match="no path holds a NUL"):
        arguments.value_of(cli.class_of(command), place.name, ["a\0b"])


OUTPUTS = [
    "write Wish -o /proc/x --llm_replay {replay}", "export {graph} -o /proc/x",
    "plot {graph} -o /proc/x.svg", "new game tea -o /proc/x",
]  # fmt: skip


@pytest.mark.parametrize("line", OUTPUTS)
def test_a_place_where_nothing_can_be_made_is_said(template, tmp_path, monkeypatch, capsys, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "replay").mkdir()
    capsys.readouterr()
    code = cli.main(line.format(graph=template.root, replay="replay").split())
    (said,) = capsys.readouterr().err.splitlines()
    assert code in (1, 2, 74)
    assert said.startswith("flowrl: ")


CLOSED = ["status GRAPH", "status GRAPH --json", "plan GRAPH Place", "fsck GRAPH", "statsu", "help"]


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize("line", CLOSED)
def test_a_closed_output_ends_no_command_otherwise(template, line, closed):
    words = f"{sys.executable} -m flowrl {line.replace('GRAPH', str(template.root))}"
    codes = [
        subprocess.run(["bash", "-c", f"{words} {more}"], check=False, capture_output=True)
        for more in ("", closed)
    ]
    assert codes[0].returncode == codes[1].returncode
    assert b"Traceback" not in codes[1].stderr


@pytest.mark.parametrize("line", ["status GRAPH", "plan GRAPH Place_Table"])
def test_a_terminal_that_knows_few_characters_is_shown_others(template, line):
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    words = [each.replace("GRAPH", str(template.root)) for each in line.split()]
    ran = subprocess.run(
        [sys.executable, "-m", "flowrl", *words], check=False, env=env, capture_output=True
    )
    assert (ran.stderr, b"Place Table" in ran.stdout) == (b"", True)


def test_a_folder_of_skill_files_becomes_no_graph(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tea.py").touch()
    capsys.readouterr()
    assert cli.main(["train", "mine"]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert "mine is no graph and has files *.py; name a new folder, and this one by --sk" in said
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["tea.py"]


@pytest.mark.parametrize(
    "command", [name for name, flags in zip(cli.ALL, map(flags_of, cli.ALL), strict=True)
                if flags[0].name == "graph_path" and flags[0].positional]
)  # fmt: skip
def test_an_exported_agent_is_called_one(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "agent.json").write_text("{}")
    more = {
        "play": ["X", "-o", "x.gif"],
        "write": ["Wish", "--llm_replay", "agent"],
        "sweep": ["--skill", "X", "--vary", "lr=log:1e-4:1e-2"],
        **{f"sweep {each}": ["--name", "X"] for each in ("status", "apply", "forget")},
    }
    (tmp_path / "x.py").touch()
    others = [flag for flag in flags_of(command)[1:] if flag.positional]
    words = ["3" if flag.type is int else "x.py" if flag.many else "X" for flag in others]
    line = [*command.split(), "agent", *more.get(command, words)]
    capsys.readouterr()
    with suppress(SystemExit):
        code = cli.main(line)
        assert code in (1, 2)
    said = capsys.readouterr().err
    assert "agent" in said
    assert "let flowrl train make one" not in said
