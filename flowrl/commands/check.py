"""`flowrl check`: what is wrong with skill files, or with a game, one line each."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tyro

from flowrl.config import PPOConfig, Sandbox, with_flags
from flowrl.console import print_report
from flowrl.errors import ConfigError, FlowrlError, GraphError
from flowrl.games.base import COUNT, Game, check_extra, find_game, known_games
from flowrl.knowledge.asking import facts_of
from flowrl.knowledge.remarks import remarks, speaks_of
from flowrl.launchers.sandbox import confinement
from flowrl.paths import printable, slug
from flowrl.runs import CodeApproval
from flowrl.skills.graph import SkillGraph
from flowrl.skills.levels import excess
from flowrl.skills.skill import Skill, load_library, load_skill, missing_in, skill_files
from flowrl.skills.validation.cache import parsed_function, shipped
from flowrl.skills.validation.dry_run import (
    Confine,
    Limits,
    SkillCode,
    check_game,
    try_codes,
    unconfined,
)
from flowrl.skills.validation.syntax import fitting_games

_LIBRARIES = Path(__file__).parents[1] / "skills" / "library"
_NO_PLAN = "no plan yet: "
_SAME = "task_reward is the same in every timestep, so it guides nobody; compute it from features"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedFile:
    """A file, the skill in it and the games it is good for, or the reason why there is none."""

    file: str
    skill: str | None = None
    games: tuple[str, ...] = ()
    plans: Mapping[str, str] = field(default_factory=dict)  # by game, among the library's skills
    why: str | None = None
    warning: str | None = None


@dataclass(frozen=True, kw_only=True)
class CheckCommand:
    """Say what is wrong with skill files, or with a game.

    Examples:
      flowrl check my_skills
      flowrl check my_skills/*.py
      flowrl check my_skills/*.py --no_trace
      flowrl check my_skills --facts
      flowrl check my_skills/*.py --json | jq '.[].games'
      flowrl check my_skills --env_name Craftax-Symbolic-v1
      flowrl check --game Tiny-v1
    """

    files: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Skill files, and folders of them."""
    env_name: str | None = None
    """Check the files for this game alone, in its words; without, for all installed games."""
    game: str | None = None
    """Instead of files, check that a game keeps its contract: shapes, types, finite, pure."""
    trace: bool = True
    """Also trace the functions in a process with limits, and compute them in known states; those
    of flowrl's own libraries have been."""
    sandbox: Sandbox = "auto"
    """Confine that process by bubblewrap; auto: if it is there."""
    facts: bool = False
    """Also compare skills with their game's facts, which `flowrl facts` shows."""
    json: bool = False
    """Print JSON: for every file the games it is good for, or why it is refused."""

    def __call__(self) -> int:
        """Print one line per file or broken promise; returns 1 when there is a fault, else 0."""
        if self.game is not None:
            return self._check_game(self.game)
        files = skill_files(self.files)
        confine = confinement(self.sandbox).in_folder if self.trace else unconfined
        whole = any(path.is_dir() for path in self.files)
        games = known_games() if self.env_name is None else (find_game(self.env_name),)
        checked = check_files(files, trace=self.trace, confine=confine, whole=whole, games=games)
        if self.facts:
            checked = [compared(each) for each in checked]
        told = [asdict(each) for each in checked]
        print_report(told, map(_line, checked), as_json=self.json)
        return 1 if any(each.why for each in checked) else 0

    def _check_game(self, name: str) -> int:
        if self.files or self.env_name is not None:
            raise ConfigError("--game takes no files and no --env_name; use a second command")
        before = "jax" in sys.modules
        game = find_game(name)
        check_extra(game.name, *game.sources)
        broken = check_game(game.name, confine=confinement(self.sandbox).in_folder)
        if not before and "jax" in sys.modules:
            broken.append("make: its module imports JAX; import it inside of functions")
        facts = {"game": game.name, "broken": broken}
        sizes = f"observation_size {game.observation_size}, {game.num_actions} actions"
        ok = f"{game.name}: ok: {sizes}, {len(game.features)} features"
        lines = [f"{game.name}: {line}" for line in broken] or [ok]
        print_report(facts, lines, as_json=self.json)
        return 1 if broken else 0


def _line(checked: CheckedFile) -> str:
    if checked.why is not None:
        return checked.why
    plans = list(dict.fromkeys(checked.plans.values()))
    if len(plans) > 1:
        plans = [f"{plan} ({game})" for game, plan in checked.plans.items()]
    games = ", ".join(checked.games)
    warning = f"; warning: {checked.warning}" if checked.warning else ""
    return f"{checked.file}: ok: {checked.skill}, for {games}; plan: {'; '.join(plans)}{warning}"


def check_files(
    files: Sequence[Path],
    *,
    trace: bool = True,
    limits: Limits | None = None,
    confine: Confine = unconfined,
    whole: bool = False,
    games: Sequence[Game] | None = None,
) -> list[CheckedFile]:
    """The checks of every file: syntax, names and, with `trace`, one dry run of them all.

    Code that flowrl itself brings, for its own games, is not run again: it is approved.
    With `whole`, the files are all there will be: a skill without a plan is refused. The games are
    those installed, unless they are given.
    """
    games = known_games() if games is None else games
    read = [_read(path, games) for path in files]
    read = _without_namesakes(files, read) if whole else read
    codes = [
        (number, SkillCode.of(skill, env_name))
        for number, skill in enumerate(read)
        if isinstance(skill, Skill)
        for env_name in _games(skill, games)
    ]
    tried = _tried([code for _, code in codes], limits, confine) if trace else {}
    good: dict[int, list[str]] = {}
    why = {number: each for number, each in enumerate(read) if isinstance(each, str)}
    for number, code in codes:
        if isinstance(outcome := tried.get(code), str):
            why.setdefault(number, outcome)
        else:
            good.setdefault(number, []).append(code.env_name)
    skills = {number: skill for number, skill in enumerate(read) if number in good}
    plans = _plans(skills, good, games, files)
    why = {number: each for number, each in why.items() if number not in good}
    for number in good if whole else ():
        if all(plan.startswith(_NO_PLAN) for plan in plans[number].values()):
            told = next(iter(plans[number].values())).removeprefix(_NO_PLAN)
            why[number] = f"{printable(str(files[number]))}:1: {told}"
    return [
        CheckedFile(
            file=str(path),
            skill=skill.name if isinstance(skill := read[number], Skill) else None,
            games=tuple(good.get(number, ())),
            plans=plans.get(number, {}),
            why=why.get(number),
            warning=_warning(read[number]),
        )
        for number, path in enumerate(files)
    ]


def _tried(
    codes: Sequence[SkillCode], limits: Limits | None, confine: Confine
) -> Mapping[SkillCode, CodeApproval | str]:
    """Return what a dry run says of each code that is not approved."""
    untried = [code for code in codes if not _is_approved(code)]
    return dict(zip(untried, try_codes(untried, limits, confine=confine), strict=True))


def _is_approved(code: SkillCode) -> bool:
    """Return whether flowrl itself brings the game and an approval of this code.

    Another game may have been changed since its library was approved.
    """
    if not find_game(code.env_name).library_folder.is_relative_to(_LIBRARIES):
        return False
    return code.is_covered_by(shipped(code.env_name).get(code.digest))


def compared(checked: CheckedFile) -> CheckedFile:
    """The same file with what its skill says otherwise than the game's facts.

    That refuses a skill of the game's own library, and is a warning for others.
    """
    if checked.why is not None:
        return checked
    path = Path(checked.file)
    skill, folder = load_skill(path, trust=True), path.resolve().parent
    games = [find_game(name) for name in checked.games]
    homes = [game for game in games if game.library_folder.resolve() == folder]
    said = [
        f"{game.name}: {remark}"
        for game in homes or games
        if game.probes is not None and speaks_of(skill, game)
        for remark in remarks(skill, facts_of(game.name), game.items)
    ]
    if not said:
        return checked
    if homes:
        return replace(checked, why=f"{printable(checked.file)}:1: {'; '.join(said)}; correct it")
    return replace(checked, warning="; ".join(filter(None, [checked.warning, *said])))


def _plans(
    skills: Mapping[int, Any],
    good: Mapping[int, Sequence[str]],
    games: Sequence[Game],
    files: Sequence[Path],
) -> dict[int, dict[str, str]]:
    """The steps to each skill, or why there are none, among the library and these skills.

    The library is not read again if its files are among these.
    """
    plans: dict[int, dict[str, str]] = {}
    read = {path.resolve() for path in files}
    for game in games:
        fit = {number: skill for number, skill in skills.items() if game.name in good[number]}
        own = {skill.name: skill for skill in fit.values()}
        library = own and not read.issuperset(game.library_folder.resolve().glob("*.py"))
        others = load_library(game.name) if library else {}
        graph = SkillGraph({**others, **own}.values(), capacity=game.capacity)
        for number, skill in fit.items():
            try:
                steps = graph.plan(skill.name)
                graph.check_like(skill)
                plan = ", ".join(f"{step.skill} × {step.count}" for step in steps)
            except GraphError as error:
                plan = f"{_NO_PLAN}{error}"
            plans.setdefault(number, {})[game.name] = plan
    return plans


def _read(path: Path, games: Sequence[Game]) -> Skill | str:
    """The skill, or why its syntax is refused."""
    try:
        skill = load_skill(path, env_name=games[0].name if len(games) == 1 else None)
        with_flags(PPOConfig(), **skill.training).check()
        capacity = max(game.capacity for game in _fitting(skill, games))
        if said := excess(skill, 1, capacity=capacity):
            return f"{printable(str(path))}:1: {said}"
    except ConfigError as error:
        return f"{printable(str(path))}:1: training: {error}"
    except FlowrlError as error:
        return str(error)
    return skill


def _without_namesakes(files: Sequence[Path], read: Sequence[Skill | str]) -> list[Skill | str]:
    """The same, but for each skill whose files another one's would be, the reason to refuse it."""
    first: dict[str, Path] = {}
    checked = list(read)
    for number, each in enumerate(read):
        if isinstance(each, Skill):
            word = slug(each.name)
            other = first.setdefault(word, files[number])
            if other != files[number]:
                checked[number] = f"{files[number]}: {other} is {word!r}, too; rename one"
    return checked


def _warning(skill: Skill | str) -> str | None:
    """A remark on a skill whose reward asks for no feature, or uses none."""
    if isinstance(skill, str):
        return None
    reward = parsed_function(skill.reward)
    features = {argument.arg for argument in reward.args.args} - {COUNT}
    used = {node.id for node in ast.walk(reward) if isinstance(node, ast.Name)}
    return None if features & used else _SAME


def _games(skill: Skill, games: Sequence[Game]) -> list[str]:
    """The games whose inventory has room for the skill's amounts: one at least, as `_read` asks."""
    fitting = _fitting(skill, games)
    return [game.name for game in fitting if not excess(skill, 1, capacity=game.capacity)]


def _fitting(skill: Skill, games: Sequence[Game]) -> Sequence[Game]:
    """The games that have all that the skill names: one at least, or it would be refused."""
    if len(games) == 1:
        return games
    functions = [parsed_function(code) for code in (skill.is_done, skill.reward)]
    return [game for game in fitting_games(functions, games) if not missing_in(game, skill)]
