"""Command lines, environment variables and TOML files as fields of a dataclass.

The fields of a class are its flags, and those marked `Positional` its positional arguments, which
may be named as flags, too. tyro prints the help; the reading is done here, because GRAPH may be
left out before other arguments, and because each error is to be one line with a remedy.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass
from decimal import Decimal, DecimalException
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

from flowrl.errors import ConfigError, closest
from flowrl.paths import DEFAULT_GRAPH, is_graph, local_path
from flowrl.storage import records

Origin = Literal["command line", "environment", "config file", "run.json"]
Given = dict[str, Sequence[str]]  # a field's name → its words, as they were given
Kind = TypeVar("Kind")
GraphArgument = tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="GRAPH")]]
# Numbers that a machine has room for, and steps that a record can hold.
Count = Annotated[int, records.at_least(1), records.at_most(10**6)]
CountOrZero = Annotated[int, records.at_least(0), records.at_most(10**6)]
Frames = Annotated[int, records.at_least(1), records.at_most(10**12)]
FramesOrZero = Annotated[int, records.at_least(0), records.at_most(10**12)]
Seconds = Annotated[float, records.at_least(0.0)]
Seed = Annotated[int, records.within(0, 2**32 - 1)]
SkillArgument = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="SKILL")]]

_GRAPH = "graph_path"
_UNITS = {"k": 3, "M": 6, "G": 9}  # powers of ten
_FILES = (".svg", ".png", ".pdf", ".html", ".gif", ".mp4")  # that -o writes
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_BOOLS = {**dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False)}
_SWITCHES = _BOOLS.keys() - {"0", "1"}  # which may be numbers of experts
_DASHES = "-–—−"  # hyphens, and what a text editor makes of them
_NUMBER = re.compile(r"[-+]?[0-9][0-9.,_]*(e[-+]?[0-9]+)?[kMG%]?")
_MOST_DIGITS = 18
_LEAST = 1.2e-38  # of a number above zero, in 32 bits
_MOST_SHOWN = 60  # characters of a word in a message
_HINTS = {
    "resume": ": the same command goes on with what it began",
    **{
        f"flowrl {word} all": f": write flowrl {word} GRAPH SKILL"
        for word in ("retry", "train-more", "retrain", "cancel", "prune", "priority")
    },
    **{
        f"flowrl sweep {word}": f": write flowrl sweep {word} GRAPH --name NAME"
        for word in ("status", "apply", "forget")
    },
}
# Names of other libraries for our flags.
SYNONYMS = {
    "learning_rate": "lr",
    "n_envs": "num_envs",
    "epochs": "update_epochs",
    "timesteps": "total_timesteps",
    "steps": "total_timesteps",
    "env": "env_name",
    "gpus": "gpu_ids",
    "skill": "target_skill",
}


def count(text: str) -> int:
    """Return a whole number, also from scientific notation or with a unit.

    >>> count("5e7"), count("1.5M"), count("200k")
    (50000000, 1500000, 200000)
    """
    power, large = _UNITS.get(text[-1:], 0), False
    try:
        number = Decimal(text[:-1] if power else text)
        large = number.is_finite() and number.adjusted() + power >= _MOST_DIGITS
        if not large and (value := number.scaleb(power)) == int(value):
            return int(value)
    except (DecimalException, ValueError, OverflowError):
        pass
    beyond = f"beyond ±1e{_MOST_DIGITS}; choose a number nearer to 0"
    fault = beyond if large else "not a whole number such as 5000, 5e7, 200k, 1M or 8G"
    raise ValueError(f"is {quoted(text)}, {fault}")


def quoted(word: str) -> str:
    """Return a word of a user's as a message shows it: quoted, and its beginning if it is long."""
    return repr(word) if len(word) <= _MOST_SHOWN else f"{word[:_MOST_SHOWN]!r}…"


def other_flags(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say each flag of `now` that had another value, both as plain JSON values.

    >>> other_flags({"seed": 1, "lr": [0.1], "sight": True}, {"lr": [0.2, 0.3], "sight": False})
    ['--lr 0.1, not --lr 0.2 0.3', '--sight, not --no_sight']
    """

    def said(name: str, value: Any) -> str:
        if isinstance(value, bool):
            return f"--{name}" if value else f"--no_{name}"
        return " ".join([f"--{name}", *map(str, value if isinstance(value, list) else [value])])

    others = ((name, was.get(name), value) for name, value in now.items())
    return [f"{said(n, old)}, not {said(n, new)}" for n, old, new in others if old != new]


class Needs:
    """A mark in a field's type: it does nothing without one of these values of other flags.

    Several values are alternatives; a whole number stands for itself and greater ones.
    """

    def __init__(self, **any_of: bool | int | str | tuple[str, ...]) -> None:
        self.any_of = {
            name: value if isinstance(value, tuple) else (value,) for name, value in any_of.items()
        }

    @property
    def remedy(self) -> str:
        """The problem and its remedy in words, by the first of the flags that would do."""
        name, values = next(iter(self.any_of.items()))
        if values[0] is False:
            return f"does nothing with --{name}; drop one"
        flag = name if values[0] is True else f"{name} {' or '.join(map(str, values))}"
        return f"does nothing without --{flag}; add that, or leave it out"

    def met(self, values: Mapping[str, Any]) -> bool:
        """Return whether a flag has such a value; a flag that is not among `values` may have."""
        return any(
            name not in values
            or any(values[name] == one or (type(one) is int and values[name] > one) for one in some)
            for name, some in self.any_of.items()
        )


@dataclass(frozen=True, slots=True)
class Argument:
    """A field that a command line can give."""

    name: str
    hint: Any
    positional: bool
    required: bool
    short: tuple[str, ...]  # such as -f
    default: Any = MISSING

    @property
    def type(self) -> Any:
        """The type without checks and None: bool, int, float, str, Path, tuple, Literal."""
        return _core(self.hint)

    @property
    def many(self) -> bool:
        """True if it takes any number of words."""
        return get_origin(self.type) is tuple

    @property
    def needs(self) -> Needs | None:
        """The flags without which it does nothing."""
        marks = get_args(self.hint)[1:] if get_origin(self.hint) is Annotated else ()
        return next((mark for mark in marks if isinstance(mark, Needs)), None)

    @property
    def shown(self) -> str:
        """The way to write it: GRAPH, SKILL, --lr."""
        if not self.positional:
            return f"--{self.name}"
        return "GRAPH" if self.name == _GRAPH else self.name.upper()


@dataclass(frozen=True, kw_only=True)
class GraphCommand:
    """The flag of every command about a graph."""

    graph_path: GraphArgument = DEFAULT_GRAPH
    """Folder of the graph."""


@dataclass(frozen=True, kw_only=True)
class ReportCommand(GraphCommand):
    """The flags of a command that reports about a graph."""

    json: bool = False
    """Print JSON instead of lines."""


@functools.cache
def arguments(kind: type) -> Mapping[str, Argument]:
    """Return the arguments of a dataclass and of those nested in it, by name."""
    by_name: dict[str, Argument] = {}
    hints = get_type_hints(kind, include_extras=True)
    for item in dataclasses.fields(kind):
        hint = hints[item.name]
        marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        if dataclasses.is_dataclass(_core(hint)):
            by_name |= arguments(_core(hint))
        elif tyro.conf.Suppress not in marks:
            by_name[item.name] = Argument(
                name=item.name,
                hint=hint,
                positional=tyro.conf.Positional in marks,
                required=item.default is MISSING and item.default_factory is MISSING,
                default=item.default,
                short=tuple(
                    name for mark in marks for name in getattr(mark, "aliases", None) or ()
                ),
            )
    return by_name


def read(
    kind: type[Kind], words: Sequence[str], *, prog: str, layers: Mapping[Origin, Given]
) -> tuple[Kind, dict[str, Origin]]:
    """Return what a command line says, over other layers, the strongest first; and from where.

    A flag's name is in the second result unless it has its default. Raises ConfigError if an
    argument is unknown, missing or of another type.
    """
    ordered: dict[Origin, Given] = {"command line": split(kind, words, prog=prog), **layers}
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for origin, given in ordered.items():
        for name in given.keys() - origins.keys():
            origins[name] = origin
            place = "" if origin == "command line" else origin
            try:
                values[name] = value_of(kind, name, given[name], place)
            except ConfigError as error:
                if place or not arguments(kind)[name].positional:
                    raise
                raise ConfigError(f"{error}: {_usage(kind, prog)}") from error
    for argument in arguments(kind).values():
        if argument.required and argument.name not in values:
            listed = get_origin(argument.type) is Literal and get_args(argument.type)
            one_of = f", one of {', '.join(map(str, listed))}" if listed else ""
            raise ConfigError(f"{argument.shown} is missing: {_usage(kind, prog)}{one_of}")
    return _built(kind, values), origins


def check_needs(kind: type, values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Raise ConfigError for one of these flags that does nothing, as another is not given.

    The environment may say more than a command needs; a file, too, if another flag overrules it.
    A default, said or not, is never refused.
    """
    for name in values.keys() & arguments(kind).keys() & origins.keys():
        needs, origin, value = arguments(kind)[name].needs, origins[name], values[name]
        if needs is None or value == arguments(kind)[name].default or needs.met(values):
            continue
        overruled = {origins.get(each) for each in needs.any_of} & {"command line", "environment"}
        if origin == "command line" or (origin == "config file" and not overruled):
            flag = f"--no_{name}" if value is False else f"--{name}"
            place = "" if origin == "command line" else f" ({origin})"
            raise ConfigError(f"{flag}{place} {needs.remedy}")


def value_of(kind: type, name: str, words: Sequence[str], place: str = "") -> Any:
    """Return the value of a field from its words; raises ConfigError for another type."""
    argument = arguments(kind)[name]
    try:
        return records.from_json(argument.hint, _plain(argument.type, words))
    except (ConfigError, ValueError) as error:
        shown = f"{argument.shown} ({place})" if place else argument.shown
        raise ConfigError(f"{shown} {error}") from None


def _print_help(kind: type, *, prog: str) -> None:
    """Print the help of a class; raises SystemExit."""
    text = inspect.cleandoc(kind.__doc__ or "")
    tyro.cli(
        kind,
        args=["--help"],
        prog=prog,
        description=text,
        config=(tyro.conf.OmitArgPrefixes,),
        use_underscores=True,
    )


def _usage(kind: type, prog: str) -> str:
    """Return a command line with the positional arguments.

    >>> _usage(Argument, "flowrl argue")
    'flowrl argue --name=NAME --hint=HINT --positional=POSITIONAL --required=REQUIRED --short=SHORT'
    """
    words = [prog]
    for each in arguments(kind).values():
        if each.positional:
            name = each.shown + (" …" if each.many else "")
            words.append(name if each.required or each.name == _GRAPH else f"[{name}]")
        elif each.required:
            words.append(f"--{each.name}={each.name.upper()}")
    return " ".join(words)


def split(kind: type, words: Sequence[str], *, prog: str) -> Given:
    """Return the words of each argument that a command line gives; `--help` ends the program.

    Raises ConfigError if a flag is unknown or has no value, or there are too many words.
    """
    given: Given = {}
    rest: list[str] = []
    queue = deque(words)
    while queue:
        word = queue.popleft()
        if word in ("--help", "-h"):
            _print_help(kind, prog=prog)
        if word == "--":
            rest += queue
            break
        if not _is_flag(word):
            rest.append(word)
            continue
        argument, switch = _find(kind, word.partition("=")[0], prog)
        taken = [switch] if argument.type is bool else []
        taken += _following(argument, word, queue)
        given[argument.name] = [*given.get(argument.name, ()), *taken] if argument.many else taken
    return given | _positionals(kind, rest, given, prog)


def without_graph(given: Given) -> list[str]:
    """Return the flags that `split` makes this of, but for the graph."""
    words: list[str] = []
    for name, taken in given.items():
        if taken in (["true"], ["false"]):
            words.append(f"--{name}" if taken == ["true"] else f"--no_{name}")
        elif name != _GRAPH:
            words += [f"--{name}={taken[0]}"] if taken[0][:2] == "--" else [f"--{name}", *taken]
    return words


def _core(hint: Any) -> Any:
    """The type without `Annotated` and `| None`."""
    while get_origin(hint) in (Annotated, Union, UnionType):
        hint = next(each for each in get_args(hint) if each is not NoneType)
    return hint


def _is_flag(word: str) -> bool:
    return word.startswith("--") or (len(word) > 1 and word[0] == "-" and not word[1].isdigit())


def _find(kind: type, flag: str, prog: str) -> tuple[Argument, str]:
    """The argument of a flag, and whether it is turned on or off."""
    known = arguments(kind)
    name = flag.removeprefix("--").replace("-", "_")
    if flag.startswith("--") and name in known:
        return known[name], "true"
    off = known.get(name.removeprefix("no_"))
    if flag.startswith("--no") and off and off.type is bool:
        return off, "false"
    for argument in known.values():
        if flag in argument.short:
            return argument, "true"
    hint = _HINTS.get(name) or _HINTS.get(f"{prog} {name}")
    hint = hint or f"{closest_flag(name, known)}; see {prog} --help"
    raise ConfigError(f"{prog} has no flag {flag[:_MOST_SHOWN]}{hint}")


def closest_flag(name: str, known: Collection[str], dashes: str = "--") -> str:
    """Return the end of a message about an unknown flag: the one that it may stand for."""
    meant = SYNONYMS.get(name)
    if meant in known:
        return f"; it is called {dashes}{meant}"
    return closest(f"{dashes}{name}", [f"{dashes}{each}" for each in known])


def _following(argument: Argument, word: str, queue: deque[str]) -> list[str]:
    """Take the words of a flag: what follows its `=`, the next one, or all up to the next flag."""
    flag, equals, value = word.partition("=")
    if argument.type is bool:
        if equals or (queue and queue[0].lower() in _SWITCHES):
            raise ConfigError(f"{flag} takes no value; to turn it off say --no_{argument.name}")
        return []
    taken = [value] if equals else []
    while not equals and queue and (argument.many or not taken):
        name = queue[0].partition("=")[0]  # "--lr 1" in quotes is a value of words
        if (name.startswith("--") and " " not in name) or (taken and _is_flag(queue[0])):
            break  # -o after the values of a flag that takes several
        taken.append(queue.popleft())
    if not taken or "" in taken:
        how = " without dashes" if argument.many and queue and not taken else ""
        raise ConfigError(f"{flag} has no value; give one{how}, or leave the flag out")
    if taken[0] == "=":
        raise ConfigError(f"{flag} has spaces around its =; write {flag}=VALUE")
    more = queue[0] if equals and argument.many and queue else "--"
    could_be = get_args(argument.type)[:1] != (int,) or more[:1].isdigit()
    if could_be and "/" not in more and not _is_flag(more):
        raise ConfigError(f"{word} takes no further word, as {more!r}; say {flag} {value} {more}")
    return taken


def _positionals(kind: type, rest: list[str], given: Given, prog: str) -> Given:
    """The words without a flag, by argument; the first is the graph if there is one for it."""
    places = [
        each for each in arguments(kind).values() if each.positional and each.name not in given
    ]
    positional: Given = {}
    if places and places[0].name == _GRAPH and not places[0].many:
        graph, *places = places
        late = next((word for word in rest[1:] if is_graph(Path(word))), None)
        if late is not None and not is_graph(Path(rest[0])):
            first = f"{quoted(late)} is a graph, and GRAPH comes first"
            raise ConfigError(f"{first}: {_usage(kind, prog)}{_meant(kind, given, rest[0])}")
        files = any(each.many for each in places)
        spare = len(rest) > len(places) and not files
        number = bool(places) and places[0].type is int
        names = rest and (_names_folder(rest[0], files=files) or (number and not rest[0].isdigit()))
        if spare or names:
            positional[graph.name] = [rest.pop(0)]
    for place in places:
        if rest:
            positional[place.name], rest = (rest, []) if place.many else (rest[:1], rest[1:])
    if rest:
        more = f"{quoted(rest[0])} is one word too many"
        raise ConfigError(f"{more}: {_usage(kind, prog)}{_meant(kind, given, rest[0])}")
    if "" in (word for words in positional.values() for word in words):
        raise ConfigError(f"an argument is empty: {_usage(kind, prog)}")
    return positional


def _meant(kind: type, given: Given, word: str) -> str:
    """Return the end of a message about a word that may be the skill to train towards.

    Or it may be a flag without its hyphens, a number without its flag, a file to write, a part of a
    name, or the value of the only flag that is missing.
    """
    known = arguments(kind)
    flags = [each for each in known.values() if each.required and not each.positional]
    missing = [each.shown for each in flags if each.name not in given]
    name, equals, value = word.lstrip(_DASHES).partition("=")
    name = name.replace("-", "_")
    if name in known and not known[name].positional and not missing:
        return f"; a flag has two hyphens: --{name}{equals}{value}"
    if _NUMBER.fullmatch(word):
        return "; a number stands behind its flag, one alone unless it takes a list"
    if "output" in known and "output" not in given and Path(word).suffix in _FILES:
        return f"; for a file say -o {quoted(word)}"
    if _GRAPH in known and (_GRAPH in given or is_graph(Path(word))):
        return "; name one graph, before everything else"
    if "skill" in known and known["skill"].positional and " " not in word:
        return "; put quotes around a skill's name of several words"
    if "target_skill" in known:
        return f"; to train towards a skill say --target_skill {quoted(word)}"
    return f"; perhaps {missing[0]} {quoted(word)}" if len(missing) == 1 else ""


def _names_folder(word: str, *, files: bool) -> bool:
    """Return whether a word is a graph where a skill, a number or a file could stand, too."""
    if files and any(Path(word).glob("[!.]*.py")):
        return is_graph(Path(word))
    return not word.endswith(".py") and ("/" in word or os.path.isdir(word))  # noqa: PTH112 — no error for a name that is too long


def _plain(kind: Any, words: Sequence[str]) -> Any:
    """Words as the JSON value that `records.from_json` reads."""
    if get_origin(kind) is tuple:
        item = _core(get_args(kind)[0])
        parts = words if item is Path else [part for word in words for part in word.split(",")]
        return [_plain(item, [part]) for part in parts if part]
    if len(words) != 1:
        raise ValueError(f"takes one value, not {len(words)}")
    word = words[0]
    if kind is bool:
        return _BOOLS.get(word.lower(), word)
    if kind is Path:
        return str(local_path(word))
    if kind is float:
        try:
            number = float(word)
        except ValueError:
            unit = "; --help names its unit" if word[:1].isdigit() and word[-1:].isalpha() else ""
            raise ValueError(f"is {quoted(word)}, not a number{unit}") from None
        if 0 < abs(number) < _LEAST:
            raise ValueError(f"is {quoted(word)}, which is 0 in 32 bits; choose a larger number")
        return number
    return count(word) if kind is int else word


def _built(kind: type[Kind], values: Mapping[str, Any]) -> Kind:
    """An instance of the class; values of nested classes replace those of their defaults."""
    facts: dict[str, Any] = {}
    for item in dataclasses.fields(kind):  # type: ignore[arg-type]
        if dataclasses.is_dataclass(item.default) and not isinstance(item.default, type):
            inner = {each.name for each in dataclasses.fields(item.default)} & values.keys()
            facts[item.name] = dataclasses.replace(item.default, **{n: values[n] for n in inner})
        elif item.name in values:
            facts[item.name] = values[item.name]
    return kind(**facts)
