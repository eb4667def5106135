"""The whole reading of a command line: with what the environment and a TOML file say of its flags.

The command line comes first, then the environment (`FLOWRL_LR`), then the file of `--config`.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl import arguments, storage
from flowrl import config as configs
from flowrl.config import BottomUpConfig, Config, Configuration
from flowrl.errors import ConfigError, FileRefusedError, closest_file, format_error

_ENV = "FLOWRL_"
_INTERNAL = re.compile(r"FLOWRL_(FAULT|VENV|EXTRAS|PYTHON|ROOT|TEST_WORKERS|LLM_\w+)")
_MOST_BYTES = 2**20  # of a TOML file


def parse(kind: type[Config], argv: Sequence[str] | None, *, prog: str = "flowrl") -> Config:
    """Read a command line; prints help and exits if it asks for that.

    Flags of a graph may come from the environment (`FLOWRL_LR`) and from `--config`, too; the
    command line comes first, the file last. Raises ConfigError for what cannot be used.
    """
    words = sys.argv[1:] if argv is None else argv
    layers: dict[arguments.Origin, arguments.Given] = {}
    if "origins" in kind.__dataclass_fields__:
        layers["environment"] = environment(kind, os.environ)
        given = layers["environment"] | arguments.split(kind, words, prog=prog)
        if "config" in given:
            layers["config file"] = config_file(kind, Path(given["config"][0]))
    config, origins = arguments.read(kind, words, prog=prog, layers=layers)
    arguments.check_needs(kind, kind.settled(configs.flags(config)), origins)
    if layers:
        said = arguments.split(kind, words, prog=prog)
        command = shlex.join([*prog.split(), "GRAPH", *arguments.without_graph(said)])
        config = dataclasses.replace(config, origins=origins, command=command)  # type: ignore[call-arg]
    return configs.checked(config)


def to_argv(config: Configuration) -> tuple[str, ...]:
    """Return the command line that `parse` reads back into `config`, every flag said."""
    words: list[str] = []
    for name, value in configs.flags(config).items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
        elif isinstance(value, tuple):
            words.extend([f"--{name}", *map(str, value)] if value else [])
        elif value is not None:
            words.append(f"--{name}={value}")
    return tuple(words)


def environment(kind: type, env: Mapping[str, str]) -> arguments.Given:
    """Return what environment variables say: FLOWRL_GRAPH, FLOWRL_LR and so on.

    Raises ConfigError for another one that begins with FLOWRL_.
    """
    items = arguments.arguments(kind).items()
    known = {f"{_ENV}{name.upper()}": argument for name, argument in items}
    known[f"{_ENV}GRAPH"] = arguments.arguments(kind)["graph_path"]
    for name in env:
        if name.startswith(_ENV) and name not in known and not _INTERNAL.fullmatch(name):
            words = [each.removeprefix(_ENV) for each in known]
            word = name.removeprefix(_ENV)
            meant = arguments.SYNONYMS.get(word.lower(), word).upper()
            near = difflib.get_close_matches(meant, words, n=1, cutoff=0.6)
            other = f"; closest is {_ENV}{near[0]}" if near else ""
            raise ConfigError(f"the environment's {name} is no flag{other}; unset it, or rename it")
        if name in known and not env[name]:
            raise ConfigError(f"the environment's {name} is empty; give it a value, or unset it")
    names = [f"{_ENV}GRAPH", f"{_ENV}GRAPH_PATH"]
    if len({env[name] for name in names if env.get(name)}) > 1:
        raise ConfigError(f"the environment has {' and '.join(names)}; unset one of them")
    return {
        argument.name: env[name].split() if argument.many else [env[name]]
        for name, argument in known.items()
        if name in env
    }


def graph_layer(kind: type) -> dict[arguments.Origin, arguments.Given]:
    """Return what the environment says of a command that takes no other flag from it: its GRAPH.

    Raises ConfigError as `environment` does, so FLOWRL_GRPAH is refused.
    """
    given = environment(BottomUpConfig, os.environ)
    names = {"graph_path"} & given.keys() & arguments.arguments(kind).keys()
    return {"environment": {name: given[name] for name in names}}


def config_file(kind: type, path: Path) -> arguments.Given:
    """Return what a TOML file says, one key for each flag; raises ConfigError for other content."""
    given: arguments.Given = {}
    for key, value in toml(path, flag="config").items():
        name = key.replace("-", "_")
        if name == "config":
            raise ConfigError(f"{path}: {key!r} names this very file; remove the line")
        if name in given:
            raise ConfigError(f"{path}: {name} is given twice; leave one of them out")
        if name not in arguments.arguments(kind):
            near = arguments.closest_flag(name, arguments.arguments(kind), dashes="")
            near = "; tables of skills go to --skill_config" if isinstance(value, dict) else near
            raise ConfigError(
                f"{path}: {key!r} is no flag{near}; remove it, or write a flag's name"
            )
        if isinstance(value, dict):
            raise ConfigError(f"{path}: {key!r} is a table; write {key} = …")
        if value == "":
            raise ConfigError(f"{path}: {key} has no value; give one, or leave it out")
        items = value if isinstance(value, list) else [value]
        given[name] = [str(item).lower() if isinstance(item, bool) else str(item) for item in items]
        arguments.value_of(kind, name, given[name], str(path))
    return given


def toml(path: Path, *, flag: str = "") -> dict[str, Any]:
    """Return the content of a TOML file, which a flag may name, or raise ConfigError."""
    named = f"--{flag} {path}" if flag else str(path)
    try:
        remedy = f"name a TOML file of at most {_MOST_BYTES:,} bytes{closest_file(path, '.toml')}"
        return tomllib.loads(
            storage.read_bytes(path, limit_bytes=_MOST_BYTES, remedy=remedy).decode("utf-8-sig")
        )
    except FileRefusedError as error:
        raise ConfigError(f"--{flag} {error}" if flag else str(error)) from error
    except RecursionError as error:
        why = "its lists lie too deep; write flat ones"
        raise ConfigError(f"{named} cannot be read: {why}") from error
    except OSError as error:
        raise ConfigError(f"{named} cannot be read: {format_error(error)}") from error
    except ValueError as error:
        remedy = "text and names of several words stand in quotes, a key once"
        why = f"it is not TOML: {error}; mend it there: a line is KEY = VALUE, {remedy}"
        raise ConfigError(f"{named} cannot be read: {why}") from error
