"""A game: everything that flowrl knows of one, as one object that is found by its name.

The entry-point group `flowrl.games` names the installed games: an entry point's name is the game's
name (`--env_name`), its value a `Game`. Importing a game does not import JAX, because the scheduler
does so; `make` and `renderer` import what they need when they are called. `docs/how-to.md` shows
how to add a game.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from flowrl.config import PPOConfig
from flowrl.errors import RAISED, ConfigError, closest, format_raised
from flowrl.games.probes import Probes
from flowrl.paths import printable

_GROUP = "flowrl.games"
_EXTRAS = frozenset({"gymnax", "navix"})
COUNT = "n"  # the parameter of skill functions that is the count of the plan's step
SIGHT_WINDOW = 5  # cells that an expert sees of where it has been, each way
ObservationSize = int | tuple[int, int, int]  # length, or rows, columns and channels of a grid
_NEAREST_COLUMNS = 5  # of each channel of the map
_STEP_COLUMNS = 2  # what the step lacks, and its time left; beside one for each item
_REMEDIES = {
    "num_actions": "correct it, or cut continuous actions into a few levels",
    "capacity": "correct it",
}
INTRINSICS = "player_intrinsics"  # the feature whose numbers `Game.intrinsics` names
# Features whose fields are the game's items.
INVENTORIES = ("inventory", "inventory_prev", "inventory_diff")
# pyproject.toml lists the same ones; a source tree that is not installed has no entry points.
SHIPPED = {
    "Craftax-Classic-Symbolic-v1": "flowrl.games.craftax:CLASSIC",
    "Craftax-Symbolic-v1": "flowrl.games.craftax:FULL",
    "Navix-DoorKey-Random-8x8-v0": "flowrl.games.adapters.navix:DOOR_KEY",
    "Navix-KeyCorridorS3R3-v0": "flowrl.games.adapters.navix:KEY_CORRIDOR",
}


class WorldStep(NamedTuple):
    """One timestep of one environment: the world before and after it, and the game's reward."""

    before: Any
    after: Any
    env_reward: Any
    """f32[]"""
    timestep: Any = 1
    """int32[]: the number of this timestep in the plan's step, from 1."""
    episode_timestep: Any = 1
    """int32[]: its number in the episode, from 1."""


class Engine(Protocol):
    """One environment of a game without plans and resets; its functions are pure and are jitted.

    A world is a pytree of arrays, whose shapes and dtypes are the same in all worlds. An engine may
    also have `moments`, which returns every feature in M timesteps, leaves `[M, …]`: new skill code
    is tried on them. Without, those of a random player are taken. With `fresh`, which returns them
    in W states in which nothing was done on purpose, leaves `[W, …]`, skills are refused that are
    done in all of those. With `holding`, which takes a world, an item's name and a number, and
    returns the world in which the player holds at most so many of it, `flowrl analyse` tries skills
    without an item.
    """

    def reset(self, key: Any) -> Any:
        """A new world."""
        ...

    def step(self, key: Any, world: Any, action: Any) -> tuple[Any, Any]:
        """The world after an action, int32[], and the game's own reward, a scalar."""
        ...

    def observe(self, world: Any) -> Any:
        """The observation: f32 `[observation_size]`, or `[rows, columns, channels]` of a grid."""
        ...

    def position(self, world: Any) -> Any:
        """int32 `[2]`: the player's row and column in the world; asked of games with `cells`."""
        ...

    def cause(self, step: WorldStep) -> Any:
        """int32[]: index into `Game.causes`, if the player died; asked of games with causes."""
        ...

    def is_over(self, world: Any) -> Any:
        """bool[]: the player is dead, or has won; flowrl sets the time limits."""
        ...

    def features(self, names: Iterable[str], step: WorldStep) -> dict[str, Any]:
        """The named features of a timestep, each of the shape that `Game.features` says."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Game:
    """A game, as far as it can be known without running it, and the functions that run it.

    Its features, items and enums have plain names, each another, which skill code uses.
    """

    name: str
    observation_size: ObservationSize
    """Length of the observation; or rows, columns and channels, and experts begin with a
    convolution. A grid has no view, heading or cells, and experts see nothing beside it."""
    num_actions: int
    view: tuple[int, int, int] | None = None
    """Rows, columns and channels of the map that an observation begins with; a channel is 0 where
    there is nothing, and the player is in the middle. Without, no nearest fields are seen."""
    lasting: int = 0
    """How many of the first channels are things that stay where they are, such as blocks: experts
    see where each was last. It needs a view and cells."""
    heading: int | None = None
    """Where in the observation the four columns begin of which one is 1: the player faces left,
    right, up or down. Without, or without a view, experts do not see what is in front of them."""
    moves: tuple[int, int, int, int] | None = None
    """The actions that lead left, right, up and down, where all directions of the world are alike.
    Experts then see and move in the player's own frame. It needs a view and a heading."""
    cells: tuple[int, int] | None = None
    """Rows and columns of the world in cells of 4 × 4 fields. Without, nobody knows where it has
    been."""
    causes: tuple[str, ...] = ()
    """What a player may die of. Without, deaths are counted by no cause."""
    capacity: int
    """How many of each item the inventory holds."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """Item → how many of it the inventory holds, where that is less than `capacity`."""
    floors: int = 1
    """How many floors there are, on one of which the player is; the first is 0."""
    features: Mapping[str, str]
    """What skill functions may ask for: name → type, shape and meaning."""
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Feature, or field of one (`inventory.bow`) → its least and its most value, where known.
    What is `_prev` or `_diff` follows, and inventories follow from `capacity`."""
    items: frozenset[str] = frozenset()
    """The fields of the feature `inventory`, its `_prev` and its `_diff`."""
    intrinsics: tuple[str, ...] = ()
    """What the numbers of the feature `player_intrinsics` are, for films and `agent.play`."""
    constants: str = ""
    """The module that defines the enums; it may import JAX."""
    enums: Mapping[str, frozenset[str]]
    """Enum → its members, which skill code writes as `BlockType.TREE.value`."""
    library_folder: Path
    """The folder of the skills that come with the game; may hold their `approvals.json`."""
    sources: tuple[str, ...]
    """Top-level packages and modules whose code decides what a compiled program computes."""
    make: Callable[[], Engine]
    renderer: Callable[[], Callable[[Any], Any]] | None = None
    """Makes a function from a world to its picture, uint8 `[H, W, 3]`."""
    probes: Callable[[], Probes] | None = None
    """Makes what `flowrl facts` probes; see `flowrl.games.probes`."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a size that cannot be, or a folder that is no path."""
        if not isinstance(folder := self.library_folder, Path):
            where = f"Path(__file__).parent / {folder!r:.60}"
            raise ConfigError(f"library_folder is {folder!r:.60}, no path; write {where}")
        for name, remedy in _REMEDIES.items():
            if not _is_size(size := getattr(self, name)):
                raise ConfigError(f"{name} is {size!r:.60}, not a whole number from 1; {remedy}")
        shape = self.observation_shape
        if len(shape) not in (1, 3) or not all(map(_is_size, shape)):
            what = f"observation_size is {self.observation_size!r:.60}"
            words = "not a whole number from 1, nor three: rows, columns and channels"
            raise ConfigError(f"{what}, {words}, which never change; correct it")
        if self.intrinsics and INTRINSICS not in self.features:
            raise ConfigError(
                f"intrinsics need the feature {INTRINSICS}; add it, or leave them out"
            )
        if self.is_grid and (self.view or self.cells or self.heading is not None):
            what = "an observation that is a grid has no view, heading or cells"
            raise ConfigError(f"{what}; leave them out, or make it a row of numbers")
        self._check_moves()
        most = self.view[2] if self.view and self.cells else 0
        if type(self.lasting) is not int or not 0 <= self.lasting <= most:
            what = f"lasting is {self.lasting!r:.60}, not a whole number from 0 to {most}"
            raise ConfigError(f"{what}, the channels of a view with cells; correct it")

    def _check_moves(self) -> None:
        if self.moves is None:
            return
        if not self.view or (self.heading or 0) < math.prod(self.view):
            problem = "moves need a view, and a heading that begins behind it"
            raise ConfigError(f"{problem}; add them, or leave moves out")
        if not self.view[0] % 2 == self.view[1] % 2 == 1:
            what = f"view is {self.view}, and moves need a map with a middle"
            raise ConfigError(f"{what}; make its rows and columns odd, or leave moves out")
        are_whole = isinstance(self.moves, tuple) and all(type(each) is int for each in self.moves)
        if (
            not are_whole
            or len({*self.moves}) != 4
            or not {*self.moves} <= {*range(self.num_actions)}
        ):
            what = f"moves are {self.moves!r:.60}, not four actions below {self.num_actions}"
            raise ConfigError(f"{what}; name those that lead left, right, up and down")

    @property
    def largest_count(self) -> int:
        """The largest count of a plan's step: some gain grows with it by one at least."""
        return self.capacity + 1

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """The shape of an observation: `(length,)`, or rows, columns and channels."""
        size = self.observation_size
        return size if isinstance(size, tuple) else (size,)

    @property
    def is_grid(self) -> bool:
        """True if an observation is a grid of cells."""
        return len(self.observation_shape) > 1

    def bounds_of(self, feature: str) -> tuple[float, float] | None:
        """The least and the most of a feature or of a field of one; None where not known."""
        form, _, item = feature.partition(".")
        name = form.removesuffix("_prev").removesuffix("_diff")
        held = (0, self.capacity) if form in INVENTORIES else None
        found = self.bounds.get(f"{name}.{item}" if item else name, held)
        if found is not None and form.endswith("_diff"):
            return found[0] - found[1], found[1] - found[0]
        return found

    def observed(self, *, sight: bool, egocentric: bool) -> ObservationSize:
        """Size of what an expert sees: the observation, with `sight` also the columns beside.

        A grid has no columns beside it. `egocentric`, the map is cut to a square.
        """
        if isinstance(self.observation_size, tuple):
            return self.observation_size
        size = self.observation_size
        if egocentric and self.moves and self.view:
            rows, columns, channels = self.view
            size += (min(rows, columns) ** 2 - rows * columns) * channels
        if not sight:
            return size
        channels = self.view[2] if self.view else 0
        nearest = (_NEAREST_COLUMNS + (self.heading is not None)) * channels
        visited = SIGHT_WINDOW**2 if self.cells else 0
        of_step = _STEP_COLUMNS + len(self.items)
        return size + nearest + of_step + visited

    @property
    def import_line(self) -> str:
        """The statement by which a generated module imports the enums; empty without any."""
        names = ", ".join(sorted(self.enums))
        return f"from {self.constants} import {names}" if names else ""

    def code_digest(self) -> str:
        """sha256 over the Python files of `sources`."""
        total = hashlib.sha256(self.name.encode())
        for root in (Path(place) for name in self.sources for place in _places(name)):
            for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                total.update(f"{path.relative_to(root.parent)} {content}\n".encode())
        return total.hexdigest()


def game_names() -> tuple[str, ...]:
    """The names of all installed games, those that come with flowrl first."""
    return tuple(_entry_points())


def known_games() -> tuple[Game, ...]:
    """All installed games.

    Raises:
      ConfigError: one of them cannot be loaded.
    """
    return tuple(map(find_game, game_names()))


def find_game(name: object) -> Game:
    """The game of this name.

    Raises:
      ConfigError: it is unknown, or cannot be loaded.
    """
    point = _entry_points().get(name) if isinstance(name, str) else None
    if point is None:
        raise ConfigError(
            f"the game {printable(str(name))} is unknown{closest(str(name), game_names())}; "
            f"choose one of {', '.join(game_names())}, or add a game "
            f"by an entry point in the group {_GROUP} (docs/how-to.md, Train your own game)"
        )
    return _loaded(point)


def renderer_of(name: object) -> Callable[[], Callable[[Any], Any]]:
    """The renderer of the game of this name; raises ConfigError without one."""
    game = find_game(name)
    if game.renderer is None:
        remedy = "give it a renderer (docs/how-to.md, Train your own game), or use flowrl evaluate"
        raise ConfigError(f"the game {game.name} draws no pictures; {remedy}")
    return game.renderer


def game_folders() -> list[Path]:
    """The folders in which installed games lie, wherever that is; no game is loaded."""
    modules = {point.module.partition(".")[0] for point in _entry_points().values()}
    places = [Path(place) for module in sorted(modules) for place in _places(module)]
    return [place if place.is_dir() else place.parent for place in places]


def env_sizes(env_name: str, *, sight: bool, egocentric: bool) -> tuple[ObservationSize, int]:
    """The size of what an expert sees and the number of actions of an environment.

    Raises:
      ConfigError: the environment is unknown.
    """
    game = find_game(env_name)
    return game.observed(sight=sight, egocentric=egocentric), game.num_actions


def check_coverage(ppo: PPOConfig, given: Collection[str]) -> None:
    """Make sure that sight and a bonus for coverage, if given, can be; raises ConfigError."""
    if ppo.sight and "sight" in given and find_game(ppo.env_name).is_grid:
        what = f"--sight: the game {ppo.env_name} is seen as a grid, which has nothing beside it"
        raise ConfigError(f"{what}; leave it out")
    if not ppo.coverage_bonus or "coverage_bonus" not in given:
        return
    asked = f"--coverage_bonus {ppo.coverage_bonus:g}"
    if not ppo.sight:
        raise ConfigError(f"{asked} needs experts that see where they have been; add --sight")
    if find_game(ppo.env_name).cells is None:
        raise ConfigError(f"{asked}: the game {ppo.env_name} has no cells to visit; leave it out")


def check_extra(name: str, *packages: str) -> None:
    """Make sure that the extras are installed whose packages a game needs; raises ConfigError."""
    for package in _EXTRAS.intersection(packages):
        if importlib.util.find_spec(package) is None:
            remedy = f"pip install '.[{package}]' in flowrl's folder"
            raise ConfigError(f"the game {name} needs {package}: {remedy}")


@functools.cache
def _loaded(point: EntryPoint) -> Game:
    try:
        game = point.load()
    except RAISED as error:
        what = f"the game {point.name!r} ({point.value}) cannot be loaded: {format_raised(error)}"
        raise ConfigError(f"{what}; repair or uninstall its package") from error
    if not isinstance(game, Game) or game.name != point.name:
        found = f"the game {game.name!r}" if isinstance(game, Game) else f"a {type(game).__name__}"
        raise ConfigError(
            f"the game {point.name!r} ({point.value}) is {found}, not a Game of this name; correct "
            f"the entry point in the group {_GROUP} of its package"
        )
    return game


@functools.cache
def _entry_points() -> Mapping[str, EntryPoint]:
    """Every entry point by its name; nothing replaces a game that comes with flowrl."""
    shipped = {name: EntryPoint(name, value, _GROUP) for name, value in SHIPPED.items()}
    return shipped | {point.name: point for point in entry_points(group=_GROUP)} | shipped


def _is_size(size: Any) -> bool:
    return type(size) is int and size > 0


def _places(package: str) -> list[str]:
    """The folder of a package, or the file of a module, which is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return []
    return list(spec.submodule_search_locations or [spec.origin or ""])
