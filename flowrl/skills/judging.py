"""Have skill code tried in a process that may be killed, many functions in one.

The process loads JAX once and says what it is about to run. When it dies or takes too long, the
function it was in is refused for that reason, and another process goes on with those after it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.errors import LaunchError
from flowrl.runs import Verdict
from flowrl.skills.skill import Origin, Skill
from flowrl.skills.verdicts import VerdictStore, code_digest, parsed_function

_INHERITED = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "TZ")
_PACKAGE_ROOT = Path(__file__).parents[2]
_EXIT_MEMORY = 3  # of flowrl.trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one function may take."""

    seconds: float = 30.0
    megabytes: int = 1_024  # more than JAX itself has
    start_seconds: float = 300.0  # to load JAX, on a machine that is busy


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Two functions to be judged for a game; `skill` and `origin` say whose they are."""

    skill: str
    env_name: str
    is_done: str
    reward: str
    origin: Origin
    trusted: bool = False

    @staticmethod
    def of(skill: Skill, env_name: str) -> Subject:
        """A skill's functions."""
        return Subject(
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


@dataclass(slots=True)
class _Place:
    """What the process said last: which code it is in, and where."""

    code: int
    name: str
    line: int


def judge(subjects: Sequence[Subject], limits: Limits | None = None) -> list[Verdict | Refusal]:
    """A verdict, or why there is none, for each of the subjects.

    Raises:
      LaunchError: the process of the trial does not start.
    """
    limits = limits or Limits()
    found: dict[int, Verdict | Refusal] = {}
    while len(found) < len(subjects):
        rest = [number for number in range(len(subjects)) if number not in found]
        trial = _Trial([subjects[number] for number in rest], limits)
        found |= {rest[number]: answer for number, answer in trial.run().items()}
    return [found[number] for number in range(len(subjects))]


def verdicts_on(
    subjects: Sequence[Subject], store: VerdictStore, limits: Limits | None = None
) -> list[Verdict | Refusal]:
    """The verdicts that are there already, and new ones for the rest, which are not kept."""
    known = [store.find(subject.digest) for subject in subjects]
    unknown = [one for one, verdict in zip(subjects, known, strict=True) if verdict is None]
    fresh = iter(judge(unknown, limits))
    return [next(fresh) if verdict is None else verdict for verdict in known]


class _Trial:
    """One process and what came of it."""

    def __init__(self, subjects: Sequence[Subject], limits: Limits) -> None:
        self._subjects = subjects
        self._limits = limits
        self._found: dict[int, Verdict | Refusal] = {}
        self._place: _Place | None = None
        self._ready = False

    def run(self) -> Mapping[int, Verdict | Refusal]:
        """What was found out before the process ended: of one skill at least."""
        with tempfile.TemporaryDirectory(prefix="flowrl-trial-") as folder:
            errors = Path(folder, "errors")
            with errors.open("wb") as said:
                process = _start(Path(folder), said)
            ended = False
            try:
                ended = self._listen(process)
            finally:
                _end(process, grace_seconds=5.0 if ended else 0.0)
            if not self._ready:
                last = errors.read_text(errors="replace").strip()[-300:] or "it said nothing"
                raise LaunchError(f"the trial of skill code does not start: {last}; try again")
        if self._place is not None:
            self._found[self._place.code] = self._refusal(*self._why(process, ended=ended))
        elif len(self._found) < len(self._subjects):
            raise LaunchError("the trial of skill code ended too early; try again")
        return self._found

    def _listen(self, process: subprocess.Popen[bytes]) -> bool:
        """Note all that it says; False when it took too long, else True at its end."""
        if process.stdin is None or process.stdout is None:
            raise LaunchError("the trial of skill code has no pipes; try again")
        try:
            process.stdin.write(json.dumps(self._order()).encode())
            process.stdin.close()
        except BrokenPipeError:
            return True  # it has died, as its end will say
        answers = _Answers(process.stdout.fileno())
        for line in answers.until(self._deadline):
            self._note(json.loads(line))
        return not answers.late

    def _order(self) -> dict[str, Any]:
        limits = self._limits
        cpus = os.cpu_count() or 1  # a function may keep all of them busy
        seconds = int(limits.seconds * cpus * len(self._subjects) + limits.start_seconds)
        codes = [_facts(subject) for subject in self._subjects]
        return {"codes": codes, "megabytes": limits.megabytes, "cpu_seconds": seconds}

    def _deadline(self) -> float:
        return self._limits.seconds if self._ready else self._limits.start_seconds

    def _note(self, facts: Mapping[str, Any]) -> None:
        match facts["event"]:
            case "ready":
                self._ready = True
            case "begins":
                self._place = _Place(facts["code"], facts["name"], facts["line"])
            case "passed":
                subject, most = self._subjects[facts["code"]], facts["most_count"]
                self._place = None
                self._found[facts["code"]] = Verdict(
                    digest=subject.digest, trusted=subject.trusted, most_count=most
                )
            case _:
                self._place = _Place(facts["code"], "", facts["line"])
                self._found[facts["code"]] = self._refusal(facts["what"], facts["remedy"])
                self._place = None

    def _refusal(self, what: str, remedy: str) -> Refusal:
        place = self._place
        if place is None:
            raise LaunchError("the trial of skill code refused nothing; try again")
        origin = self._subjects[place.code].origin
        return Refusal(_plain(f"{origin.place}:{place.line}: {what}; {remedy}"))

    def _why(self, process: subprocess.Popen[bytes], *, ended: bool) -> tuple[str, str]:
        name = self._place.name if self._place else ""
        limits, code = self._limits, process.returncode
        if not ended or code == -signal.SIGXCPU:
            return f"{name} took longer than {limits.seconds:g} s", "make it smaller"
        if code in (_EXIT_MEMORY, -signal.SIGABRT):
            return f"{name} needed more than {limits.megabytes:,} MB", "make its arrays smaller"
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"{name} ended its process with {how}", "make it simpler"


class _Answers:
    """Lines from a pipe, as long as none lets too long wait for itself."""

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
    paths += [str(Path(path).resolve()) for path in _python_path()]
    home = str(folder)
    env |= {"HOME": home, "TMPDIR": home, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
    cwd = folder / "empty"
    cwd.mkdir()
    return subprocess.Popen(
        (sys.executable, "-P", "-m", "flowrl.trial"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        cwd=cwd,
        env=env,
        start_new_session=True,  # its group is killed as one, and Ctrl-C is ours to answer
    )


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _end(process: subprocess.Popen[bytes], *, grace_seconds: float) -> None:
    """See to it that it is gone; how one ends by itself says more than our signal."""
    if process.stdout is not None:
        process.stdout.close()
    try:
        process.wait(timeout=grace_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _plain(text: str) -> str:
    """The text without what a terminal would obey: trusted code words its own errors."""
    return "".join(char if char.isprintable() else "�" for char in text)


def _facts(subject: Subject) -> dict[str, Any]:
    return {
        "env_name": subject.env_name,
        "is_done": subject.is_done,
        "reward": subject.reward,
        "is_done_line": subject.origin.is_done,
        "reward_line": subject.origin.reward,
        "trusted": subject.trusted,
    }
