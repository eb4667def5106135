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
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flowrl import notices
from flowrl.errors import LaunchError, SkillError
from flowrl.paths import GraphPaths
from flowrl.runs import CodeApproval
from flowrl.skills.skill import Origin, Skill
from flowrl.skills.validation.cache import ApprovalStore, code_digest, parsed_function

NOTICE = "trusted_skills"
logger = logging.getLogger(__name__)
_INHERITED = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "TZ")
_PACKAGE_ROOT = Path(__file__).parents[3]
EXIT_MEMORY = 3  # of the worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one function may take."""

    seconds: float = 30.0
    megabytes: int = 1_024  # more than JAX itself has
    start_seconds: float = 300.0  # to load JAX, on a machine that is busy


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillCode:
    """The two functions of a skill in a game; `origin` is where they are written."""

    skill: str
    env_name: str
    is_done: str
    reward: str
    origin: Origin
    trusted: bool = False

    @staticmethod
    def of(skill: Skill, env_name: str) -> SkillCode:
        """A skill's functions."""
        return SkillCode(
            skill=skill.name,
            env_name=env_name,
            is_done=skill.is_done,
            reward=skill.reward,
            origin=skill.origin or Origin(f"skill {skill.name!r}"),
            trusted=skill.trusted,
        )

    @property
    def digest(self) -> str:
        """Of the code, in this game."""
        place = self.origin.place
        done, reward = (parsed_function(part, place) for part in (self.is_done, self.reward))
        return code_digest(done, reward, self.env_name)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why code may not be run: `file:line: what; remedy`."""

    text: str


def try_codes(
    codes: Sequence[SkillCode], limits: Limits | None = None
) -> list[CodeApproval | Refusal]:
    """An approval, or why there is none, for each of the codes.

    Raises:
      LaunchError: the worker does not start.
    """
    limits = limits or Limits()
    found: dict[int, CodeApproval | Refusal] = {}
    while len(found) < len(codes):
        rest = [number for number in range(len(codes)) if number not in found]
        attempt = _Attempt([codes[number] for number in rest], limits)
        found |= {rest[number]: outcome for number, outcome in attempt.run().items()}
    return [found[number] for number in range(len(codes))]


def approve_skills(
    layout: GraphPaths,
    skills: Collection[Skill],
    env_name: str,
    *,
    trust: bool,
    limits: Limits | None = None,
) -> Mapping[str, CodeApproval]:
    """An approval for every skill, by name; new code is tried first, and nothing is written.

    Raises:
      SkillError: code is refused, or has only its author's trust without `trust`.
    """
    for skill in skills:
        if skill.trusted and not trust:
            raise SkillError(
                f"{_place(skill)}: {skill.name} is trusted code, which the syntax check refuses; "
                "start with --trust_skills, or rewrite it"
            )
    codes = [SkillCode.of(skill, env_name) for skill in skills]
    outcomes = approvals_of(codes, ApprovalStore(layout.approvals), limits)
    refused = [outcome.text for outcome in outcomes if isinstance(outcome, Refusal)]
    if refused:
        more = f" (and {len(refused) - 1} more: see flowrl check)" if len(refused) > 1 else ""
        raise SkillError(refused[0] + more)
    pairs = zip(skills, outcomes, strict=True)
    return {skill.name: outcome for skill, outcome in pairs if isinstance(outcome, CodeApproval)}


def approvals_of(
    codes: Sequence[SkillCode], store: ApprovalStore, limits: Limits | None = None
) -> list[CodeApproval | Refusal]:
    """The kept approvals, and new ones for the other codes, which are not kept yet."""
    kept = [store.find(code.digest) for code in codes]
    unknown = [code for code, approval in zip(codes, kept, strict=True) if approval is None]
    fresh = iter(try_codes(unknown, limits))
    return [next(fresh) if approval is None else approval for approval in kept]


def keep_approvals(layout: GraphPaths, approvals: Mapping[str, CodeApproval]) -> None:
    """Keep approvals with the graph, and publish a notice of skills that are only trusted."""
    store = ApprovalStore(layout.approvals)
    for name, approval in approvals.items():
        if store.find(approval.digest) is None:
            store.keep(approval, skill=name)
    trusted = sorted(name for name, approval in approvals.items() if approval.trusted)
    if not trusted:
        notices.withdraw(layout, NOTICE)
        return
    text = f"--trust_skills: the syntax check is lifted for {', '.join(trusted)}"
    notices.publish(layout, NOTICE, text)
    logger.warning(text)


class _Attempt:
    """One worker and its outcomes."""

    def __init__(self, codes: Sequence[SkillCode], limits: Limits) -> None:
        self._codes = codes
        self._limits = limits
        self._found: dict[int, CodeApproval | Refusal] = {}
        self._running: Mapping[str, Any] | None = None  # the report that a function begins
        self._ready = False

    def run(self) -> Mapping[int, CodeApproval | Refusal]:
        """The outcomes before the process ended: of one skill at least."""
        with tempfile.TemporaryDirectory(prefix="flowrl-dry-run-") as folder:
            errors = Path(folder, "errors")
            with errors.open("wb") as output:
                process = _start(Path(folder), output)
            ended = False
            try:
                ended = self._listen(process)
            finally:
                _end(process, grace_seconds=5.0 if ended else 0.0)
            if not self._ready:
                last = errors.read_text(errors="replace").strip()[-300:] or "no message"
                raise LaunchError(f"the dry run of skill code does not start: {last}; try again")
        if self._running is not None:
            what, remedy = self._why(self._running["name"], process.returncode, ended=ended)
            self._refuse({**self._running, "what": what, "remedy": remedy})
        elif len(self._found) < len(self._codes):
            raise LaunchError("the dry run of skill code ended too early; try again")
        return self._found

    def _listen(self, process: subprocess.Popen[bytes]) -> bool:
        """Note all its reports; False when it took too long, else True at its end."""
        if process.stdin is None or process.stdout is None:
            raise LaunchError("the dry run of skill code has no pipes; try again")
        try:
            process.stdin.write(json.dumps(self._order()).encode())
            process.stdin.close()
        except BrokenPipeError:
            return True  # it has died; its exit code tells why
        lines = _Lines(process.stdout.fileno())
        for line in lines.until(self._deadline):
            self._note(json.loads(line))
        return not lines.late

    def _order(self) -> dict[str, Any]:
        limits = self._limits
        cpus = os.cpu_count() or 1  # a function may keep all of them busy
        seconds = int(limits.seconds * cpus * len(self._codes) + limits.start_seconds)
        codes = [asdict(code) for code in self._codes]
        return {"codes": codes, "megabytes": limits.megabytes, "cpu_seconds": seconds}

    def _deadline(self) -> float:
        return self._limits.seconds if self._ready else self._limits.start_seconds

    def _note(self, report: Mapping[str, Any]) -> None:
        match report["event"]:
            case "ready":
                self._ready = True
            case "begins":
                self._running = report
            case "passed":
                code, most = self._codes[report["code"]], report["most_count"]
                approval = CodeApproval(digest=code.digest, trusted=code.trusted, most_count=most)
                self._found[report["code"]], self._running = approval, None
            case _:
                self._refuse(report)
                self._running = None

    def _refuse(self, report: Mapping[str, Any]) -> None:
        place = self._codes[report["code"]].origin.place
        text = f"{place}:{report['line']}: {report['what']}; {report['remedy']}"
        # Without control characters: trusted code writes its own error messages.
        plain = "".join(char if char.isprintable() else "�" for char in text)
        self._found[report["code"]] = Refusal(plain)

    def _why(self, name: str, exit_code: int, *, ended: bool) -> tuple[str, str]:
        """Why the worker ended in a function, and the remedy."""
        limits = self._limits
        if not ended or exit_code == -signal.SIGXCPU:
            return f"{name} took longer than {limits.seconds:g} s", "make it smaller"
        if exit_code in (EXIT_MEMORY, -signal.SIGABRT):
            return f"{name} needed more than {limits.megabytes:,} MB", "make its arrays smaller"
        how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        return f"{name} ended its process with {how}", "make it simpler"


class _Lines:
    """Lines from a pipe, until one takes too long."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.late = False

    def until(self, deadline: Callable[[], float]) -> Iterator[bytes]:
        """Each whole line; ends with the pipe, or sets `late` when one takes too long."""
        rest = b""
        due = time.monotonic() + deadline()
        while True:
            ready, _, _ = select.select([self._descriptor], [], [], max(0, due - time.monotonic()))
            if not ready:
                self.late = True
                return
            chunk = os.read(self._descriptor, 65_536)
            if not chunk:
                return
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines
            if lines:
                due = time.monotonic() + deadline()


def _start(folder: Path, errors: Any) -> subprocess.Popen[bytes]:
    env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    paths = [str(_PACKAGE_ROOT)] if _PACKAGE_ROOT.name != "site-packages" else []
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths += [str(Path(path).resolve()) for path in given if path]
    home = str(folder)
    env |= {"HOME": home, "TMPDIR": home, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
    cwd = folder / "empty"
    cwd.mkdir()
    return subprocess.Popen(
        (sys.executable, "-P", "-m", "flowrl.skills.validation.worker"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        cwd=cwd,
        env=env,
        start_new_session=True,  # its group is killed as one; Ctrl-C reaches only us
    )


def _end(process: subprocess.Popen[bytes], *, grace_seconds: float) -> None:
    """Wait for its end, then kill it; its own exit code says more than our signal."""
    if process.stdout is not None:
        process.stdout.close()
    try:
        process.wait(timeout=grace_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _place(skill: Skill) -> str:
    return skill.origin.place if skill.origin else f"skill {skill.name!r}"
