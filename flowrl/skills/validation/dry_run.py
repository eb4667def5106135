"""Approve the skill code of a graph, after it was tried in a process that may be killed.

All code is tried before anything is written; approvals are kept with the graph. The process
(`flowrl.skills.validation.worker`) loads JAX once and reports each function before it runs it. When
it dies or takes too long, the function it was in is refused for that reason, and another process
continues with those after it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flowrl import notices
from flowrl.errors import ConfigError, LaunchError, SkillError
from flowrl.paths import GraphPaths, printable
from flowrl.runs import CodeApproval
from flowrl.skills.floors import begins_anew
from flowrl.skills.skill import CodeOrigin, Skill
from flowrl.skills.validation.cache import ApprovalStore, code_digest, parsed_function

_NOTICE = "trusted_skills"
logger = logging.getLogger(__name__)
_INHERITED = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "TZ")
# Each operation is compiled once and computed a few times: compiling is what takes long.
_QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
_PACKAGE_ROOT = Path(__file__).parents[3]
_CHECK_SECONDS = 600.0  # of a game: to load and compile it, on a machine that is busy
EXIT_MEMORY = 3  # of the worker
# The words that confine a process to a folder, from the folder and the process's environment.
Confine = Callable[[Path, Mapping[str, str]], tuple[str, ...]]


def unconfined(folder: Path, env: Mapping[str, str]) -> tuple[str, ...]:
    """No words: the process has all rights of the user."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one function."""

    seconds: float = 30.0  # for all counts together
    megabytes: int = 1_024  # more than JAX itself has
    start_seconds: float = 300.0  # to load JAX, on a machine that is busy


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillCode:
    """The two functions of a skill in a game; `origin` is where they are written.

    One that `begins_anew` may begin in a new world, so it must not be done where nothing was.
    """

    env_name: str
    is_done: str
    reward: str
    origin: CodeOrigin
    trusted: bool = False
    begins_anew: bool = True

    @staticmethod
    def of(skill: Skill, env_name: str) -> SkillCode:
        """A skill's functions."""
        return SkillCode(
            env_name=env_name,
            is_done=skill.is_done,
            reward=skill.reward,
            origin=skill.origin or CodeOrigin(f"skill {skill.name!r}"),
            trusted=skill.trusted,
            begins_anew=begins_anew(skill),
        )

    def is_covered_by(self, approval: CodeApproval | None) -> bool:
        """Return whether an approval of this digest says as much as this code needs."""
        return approval is not None and (approval.begins_anew or not self.begins_anew)

    @property
    def digest(self) -> str:
        """Of the code, in this game."""
        functions = parsed_function(self.is_done), parsed_function(self.reward)
        return code_digest(*functions, self.env_name)


def try_codes(
    codes: Sequence[SkillCode], limits: Limits | None = None, *, confine: Confine = unconfined
) -> list[CodeApproval | str]:
    """An approval, or why there is none (`file:line: what; remedy`), for each of the codes.

    Raises LaunchError if the worker does not start, ConfigError if the game's code raises an error.
    """
    verdicts: dict[int, CodeApproval | str] = {}
    while len(verdicts) < len(codes):
        rest = [number for number in range(len(codes)) if number not in verdicts]
        outcomes = run_worker([codes[number] for number in rest], limits or Limits(), confine)
        verdicts |= {rest[number]: outcome for number, outcome in outcomes.items()}
    return [verdicts[number] for number in range(len(codes))]


def approve_skills(
    graph_paths: GraphPaths,
    skills: Collection[Skill],
    env_name: str,
    *,
    trust: bool,
    confine: Confine = unconfined,
) -> Mapping[str, CodeApproval]:
    """An approval for every skill, by name; new code is tried first, and nothing is written.

    Raises SkillError if code is refused, or has only its author's trust without `trust`.
    """
    codes = [SkillCode.of(skill, env_name) for skill in skills]
    for skill, code in zip(skills, codes, strict=True):
        if skill.trusted and not trust:
            raise SkillError(
                f"{code.origin.place}: {skill.name} is trusted code, which the syntax check "
                "refuses; start with --trust_skills, or rewrite it"
            )
    outcomes = approvals_of(codes, ApprovalStore(graph_paths.approvals), confine=confine)
    refused = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if refused:
        more = f" (and {len(refused) - 1} more: see flowrl check)" if len(refused) > 1 else ""
        raise SkillError(refused[0] + more)
    pairs = zip(skills, outcomes, strict=True)
    return {skill.name: outcome for skill, outcome in pairs if isinstance(outcome, CodeApproval)}


def approvals_of(
    codes: Sequence[SkillCode], store: ApprovalStore, *, confine: Confine = unconfined
) -> list[CodeApproval | str]:
    """The kept approvals, and new ones for the other codes, which are not kept yet."""
    found = [(code, store.find(code.digest)) for code in codes]
    kept = [approval if code.is_covered_by(approval) else None for code, approval in found]
    unknown = [code for code, approval in zip(codes, kept, strict=True) if approval is None]
    fresh = iter(try_codes(unknown, confine=confine))
    return [next(fresh) if approval is None else approval for approval in kept]


def keep_approvals(graph_paths: GraphPaths, approvals: Mapping[str, CodeApproval]) -> None:
    """Keep approvals with the graph, and publish a notice of skills that are only trusted."""
    store = ApprovalStore(graph_paths.approvals)
    for approval in approvals.values():
        store.keep(approval)
    trusted = sorted(name for name, approval in approvals.items() if approval.trusted)
    if not trusted:
        notices.withdraw(graph_paths, _NOTICE)
        return
    text = f"--trust_skills: the syntax check is lifted for {', '.join(trusted)}"
    notices.publish(graph_paths, _NOTICE, text)
    logger.warning(text)


def run_worker(
    codes: Sequence[SkillCode], limits: Limits, confine: Confine
) -> dict[int, CodeApproval | str]:
    """The outcomes of codes up to the one that ended the worker: of one at least."""
    order = json.dumps({"codes": [asdict(code) for code in codes], "limits": asdict(limits)})
    seconds = limits.start_seconds + 2 * limits.seconds * len(codes)
    ended = _run_module("worker", order, confine=confine, seconds=seconds)
    if ended is None:
        raise LaunchError("the dry run of skill code does not end; try again")
    outcomes, broken = _outcomes(codes, ended, limits)
    if not outcomes and broken:
        raise ConfigError(
            f"the game {codes[0].env_name} fails in the dry run of skill code: {broken}; correct "
            "its package"
        )
    if not outcomes:
        last = ended.stderr.decode(errors="replace").strip()[-300:] or "no message"
        raise LaunchError(f"the dry run of skill code does not start: {last}; try again")
    return outcomes


def check_game(name: str, *, confine: Confine = unconfined) -> list[str]:
    """The promises that a game breaks, one line each; raises ConfigError if the check fails."""
    ended = _run_module("contract", name, confine=confine, seconds=_CHECK_SECONDS)
    if ended is None:
        raise ConfigError(
            f"the game {name} is not checked in {_CHECK_SECONDS:g} s; make it smaller"
        )
    if ended.returncode:
        last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:]
        how = printable("".join(last)) or f"exit code {ended.returncode}"
        raise ConfigError(f"the game {name} ends the process of its check: {how}; correct it")
    return [printable(line) for line in json.loads(ended.stdout)]


def _run_module(
    module: str, order: str, *, confine: Confine, seconds: float
) -> subprocess.CompletedProcess[bytes] | None:
    """Run a module of this package with an order on its standard input; None: it does not end."""
    with tempfile.TemporaryDirectory(prefix="flowrl-dry-run-") as folder:
        env = _environment(folder)
        words = (sys.executable, "-P", "-m", f"flowrl.skills.validation.{module}")
        with suppress(subprocess.TimeoutExpired):
            return subprocess.run(
                (*confine(Path(folder), env), *words),
                input=order.encode(),
                capture_output=True,
                cwd=folder,
                env=env,
                start_new_session=True,  # Ctrl-C reaches only us
                timeout=seconds,
                check=False,
            )
    return None


def _outcomes(
    codes: Sequence[SkillCode], ended: subprocess.CompletedProcess[bytes], limits: Limits
) -> tuple[dict[int, CodeApproval | str], str]:
    """Return the outcomes that a worker reported, and the error that ended it, if any."""
    outcomes: dict[int, CodeApproval | str] = {}
    running: Mapping[str, Any] | None = None  # the report that a function begins
    broken = ""
    for report in map(json.loads, ended.stdout.splitlines()):
        if report["event"] == "broken":
            broken = printable(report["why"])
            continue
        code, running = codes[report["code"]], report if report["event"] == "begins" else None
        if report["event"] == "passed":
            outcomes[report["code"]] = CodeApproval(
                digest=code.digest, trusted=code.trusted, begins_anew=code.begins_anew
            )
        elif report["event"] == "refused":
            outcomes[report["code"]] = _refusal(code, report["line"], report["why"])
    if running is not None:
        raised = broken and f"raises {broken}; correct the function"
        why = f"{running['name']} {raised or _why_ended(ended.returncode, limits)}"
        outcomes[running["code"]] = _refusal(codes[running["code"]], running["line"], why)
    return outcomes, broken


def _refusal(code: SkillCode, line: int, why: str) -> str:
    return printable(f"{code.origin.place}:{line}: {why}")  # trusted code writes its own errors


def _why_ended(exit_code: int, limits: Limits) -> str:
    """Return the end of the worker in a function, and the remedy."""
    if exit_code > 128:  # the shells' and bubblewrap's way to say by which signal
        exit_code = 128 - exit_code
    if exit_code == -signal.SIGALRM:
        return f"took longer than {limits.seconds:g} s; make it smaller"
    if exit_code in (EXIT_MEMORY, -signal.SIGABRT):
        return f"needed more than {limits.megabytes:,} MB; make its arrays smaller"
    how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    return f"ended its process with {how}; make it simpler"


def _environment(home: str) -> dict[str, str]:
    env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    paths = [str(_PACKAGE_ROOT)] if _PACKAGE_ROOT.name != "site-packages" else []
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths += [str(Path(path).resolve()) for path in given if path]
    env |= {"HOME": home, "TMPDIR": home, "XLA_FLAGS": _QUICK}
    env |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return env | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})
