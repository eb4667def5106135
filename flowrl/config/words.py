"""Configurations as command lines and as JSON, there and back."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tyro

from flowrl.config.flags import PPOConfig
from flowrl.config.rules import Config, checked
from flowrl.errors import ConfigError


def parse(kind: type[Config], argv: Sequence[str] | None, *, prog: str | None = None) -> Config:
    """Read a command line; prints help or an error and exits as argparse does."""
    return checked(tyro.cli(kind, args=argv, prog=prog))


def to_argv(config: PPOConfig, kind: type[PPOConfig] | None = None) -> tuple[str, ...]:
    """The command line that `parse` reads back into `config`, every flag said.

    `kind` limits it to the fields of that class, e.g. the trainer's part of a story's flags.
    """
    words: list[str] = []
    for name, value in values(config, kind).items():
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, tuple):
            words.extend([f"--{name}", *map(str, value)] if value else [])
        else:
            words.append(f"--{name}={value}")
    return tuple(words)


def values(config: PPOConfig, kind: type[PPOConfig] | None = None) -> dict[str, Any]:
    """Field values by flag name, limited to the fields of `kind`."""
    return {item.name: getattr(config, item.name) for item in dataclasses.fields(kind or config)}


def to_json(config: PPOConfig, kind: type[PPOConfig] | None = None) -> dict[str, Any]:
    """The configuration as plain JSON values."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in values(config, kind).items()
    }


def from_json(kind: type[Config], facts: Mapping[str, Any]) -> Config:
    """The configuration that `to_json` made these facts of, perhaps in another version.

    A field that is missing has its default; one that is unknown today is left out.

    Raises:
      ConfigError: a value is of another type, or makes no sense.
    """
    hints = _hints_of(kind)
    known = {item.name for item in dataclasses.fields(kind)} & facts.keys()
    return checked(kind(**{name: _typed(name, hints[name], facts[name]) for name in known}))


@functools.cache
def _hints_of(kind: type) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)


def _typed(name: str, hint: Any, value: Any) -> Any:
    """A JSON value as the type of its field."""
    kinds = typing.get_args(hint) or (hint,)
    if value is None and type(None) in kinds:
        return None
    if Path in kinds and isinstance(value, str):
        return Path(value)
    if isinstance(value, list):
        value = tuple(value)
    if float in kinds and type(value) is int:
        return float(value)
    if typing.get_origin(hint) is Literal:
        fits = value in kinds
    else:
        plain = (*kinds, typing.get_origin(hint))
        fits = any(isinstance(kind, type) and type(value) is kind for kind in plain)
    if not fits:
        raise ConfigError(f"a recorded configuration has {name} = {value!r}; start anew")
    return value
