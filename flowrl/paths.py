"""All paths of a graph and of a run, and the only function that makes a name fit for a file."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from flowrl.errors import NameRefusedError

DEFAULT_GRAPH = Path("exp/bottom_up_parallel")
_NAME_LIMIT = 200
_SLUG_LIMIT = 64
# Fillers, joiners and variation selectors: letters and marks that draw nothing.
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0") | frozenset(
    map(chr, (*range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)))
)
_RESERVED = re.compile(r"(?i)con|prn|aux|nul|(com|lpt)[0-9]")  # on some file systems
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_ ]*")


def display_name(text: str) -> str:
    """Return the name as people see it: NFC, trimmed, printable, at most 200 characters.

    Raises:
      NameRefusedError: the name is empty, too long, or holds characters that cannot be seen.
    """
    if len(text) > _NAME_LIMIT * 4:  # normalising a huge text would take long
        raise NameRefusedError(f"the skill name {text[:40]!a}… is over {_NAME_LIMIT} characters")
    name = unicodedata.normalize("NFC", text).strip()
    if not any(unicodedata.category(char)[0] in "LNPS" for char in name):
        raise NameRefusedError(f"the skill name {name!a} is empty; give it a letter to be seen")
    if len(name) > _NAME_LIMIT:
        raise NameRefusedError(f"the skill name {name[:40]!a}… is over {_NAME_LIMIT} characters")
    unseen = sorted({char for char in name if _is_unseen(char)})
    if unseen:
        which = ", ".join(f"U+{ord(char):04X}" for char in unseen[:5])
        raise NameRefusedError(
            f"the skill name {name!a} holds control characters or others that cannot be seen "
            f"({which}); remove them"
        )
    return name


def _is_unseen(char: str) -> bool:
    """Return whether two names that differ only in this character look the same."""
    return char != " " and (unicodedata.category(char)[0] in "CZ" or char in _BLANK)


def slug(name: str) -> str:
    """Return the name for files and sessions: `[A-Za-z0-9_]`, at most 64 characters.

    A plain name has its spaces replaced by `_`. Any other name ends with a digest of itself, so two
    names rarely share a slug; `SkillScheduler.add_skill` refuses a name whose slug is taken.

    >>> slug("Collect Wood")
    'Collect_Wood'
    >>> slug("../../x")
    'x_9cdf6a50'
    """
    name = display_name(name)
    word = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")
    if _PLAIN.fullmatch(name) and len(name) <= _SLUG_LIMIT and not _RESERVED.fullmatch(name):
        return name.replace(" ", "_")
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{word[: _SLUG_LIMIT - 9].strip('_') or 'skill'}_{digest}"


def session_name(expert: int, skill: str) -> str:
    """Return the name of the tmux session of a skill's run, for `tmux attach -t`."""
    return f"flowrl_e{expert}_{slug(skill)}"


@dataclass(frozen=True, slots=True)
class JobPaths:
    """The files in a job's folder by which its runner is told what to run, and reports."""

    folder: Path

    @property
    def spec_json(self) -> Path:
        """What the runner starts: argv, folder, CPUs, sandbox."""
        return self.folder / "spec.json"

    @property
    def environment_json(self) -> Path:
        """The job's environment, 0600; the runner removes it as soon as it has read it."""
        return self.folder / "environment.json"

    @property
    def secrets_json(self) -> Path:
        """What must not reach the log, 0600; the log's writer removes it once it has read it."""
        return self.folder / "secrets.json"

    @property
    def start_json(self) -> Path:
        """Pid, start time and boot id of the runner and of its job."""
        return self.folder / "start.json"

    @property
    def exit_json(self) -> Path:
        """How the job ended, as the runner saw it."""
        return self.folder / "exit.json"

    @property
    def lock(self) -> Path:
        """Held while any process of this job lives."""
        return self.folder / "run.lock"


@dataclass(frozen=True, slots=True)
class RunPaths(JobPaths):
    """The paths of one training run; `expert` is the new expert's global index."""

    expert: int

    @property
    def module(self) -> Path:
        """The generated module, with GLOBAL_TO_LOCAL and LOCAL_TO_GLOBAL."""
        return self.folder / f"{self.expert}.py"

    @property
    def policies(self) -> Path:
        """The run's experts, by local index: `seed/`, `final/` and `resume/`."""
        return self.folder / f"{self.expert}_policies"

    def seed(self, local: int) -> Path:
        """A copy of a dependency's expert, made before the run."""
        return self.policies / "seed" / f"expert_{local}"

    def final(self, local: int) -> Path:
        """An expert at the end of the run."""
        return self.policies / "final" / f"expert_{local}"

    @property
    def finals(self) -> Path:
        """The folder of all final experts, renamed into place when complete."""
        return self.policies / "final"

    @property
    def resume(self) -> Path:
        """Parameters, optimizer state and counters of a stopped trainer."""
        return self.policies / "resume"

    @property
    def run_json(self) -> Path:
        """The run's plan, experts and configuration; written before launch."""
        return self.folder / "run.json"

    @property
    def result_json(self) -> Path:
        """The run's result; written last, only by a run that reached its end."""
        return self.folder / "result.json"

    @property
    def training_log(self) -> Path:
        """The trainer's output."""
        return self.folder / "training.log"

    @property
    def older_training_log(self) -> Path:
        """The older half of the output, when the log has reached half of its cap."""
        return self.folder / "training.log.1"

    @property
    def metrics(self) -> Path:
        """One JSON line per logged update."""
        return self.folder / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.folder / "tensorboard"

    @property
    def wandb(self) -> Path:
        """The files of Weights & Biases."""
        return self.folder / "wandb"

    @property
    def records(self) -> tuple[Path, ...]:
        """The files that are archived after the merge, run.json last; some may not exist."""
        return (
            self.module,
            self.training_log,
            self.older_training_log,
            self.metrics,
            self.result_json,
            self.run_json,
        )

    @property
    def tracker_folders(self) -> tuple[Path, ...]:
        """The folders of other programs that are archived as far as they can be read."""
        return (self.tensorboard, self.wandb)

    @property
    def progress(self) -> Path:
        """The newest metrics, for `flowrl status` and for telling that a run hangs."""
        return self.folder / "progress.json"


@dataclass(frozen=True, slots=True)
class GraphPaths:
    """The paths of one graph of skills, all below `root`."""

    root: Path

    @property
    def scheduler_state(self) -> Path:
        """The scheduler's state, also for people and jq."""
        return self.root / "scheduler_state.json"

    @property
    def daemon_lock(self) -> Path:
        """Held by the folder's only scheduler; contains its process id."""
        return self.root / "daemon.lock"

    @property
    def events(self) -> Path:
        """The append-only event log, for people; nothing is decided by it."""
        return self.root / "events.jsonl"

    @property
    def requests(self) -> Path:
        """Requests of other programs to the scheduler, one file each."""
        return self.root / "requests"

    @property
    def notices(self) -> Path:
        """Messages that `flowrl status` shows besides the skills."""
        return self.root / "notices"

    def notice(self, key: str) -> Path:
        """One notice; its key is the file's stem."""
        return self.notices / f"{key}.json"

    @property
    def config_json(self) -> Path:
        """The resolved configuration of the last start."""
        return self.root / "config.json"

    @property
    def skill_files(self) -> Path:
        """The source of each skill as it was when its training began."""
        return self.root / "skill_files"

    def skill_file(self, skill: str) -> Path:
        """The source of one skill."""
        return self.skill_files / f"{slug(skill)}.json"

    @property
    def approvals(self) -> Path:
        """The approvals of skill code, one file per digest."""
        return self.root / "approvals"

    @property
    def comparisons(self) -> Path:
        """Comparisons of experts that a merge has ordered, by run id; removed after the merge."""
        return self.root / "comparisons"

    @property
    def checkpoints(self) -> Path:
        """The folder of the manifest, its history and its lock."""
        return self.root / "checkpoints"

    @property
    def manifest(self) -> Path:
        """The global checkpoint: which version of each expert counts, and the merged run ids."""
        return self.checkpoints / "global_latest.json"

    @property
    def manifest_pickle(self) -> Path:
        """The manifest's content under the documented name; flowrl never reads it."""
        return self.checkpoints / "global_latest.pkl"

    @property
    def history(self) -> Path:
        """The last manifests, one file per generation."""
        return self.checkpoints / "history"

    @property
    def global_lock(self) -> Path:
        """Held for the length of a merge; never deleted."""
        return self.checkpoints / "global.lock"

    @property
    def quarantine(self) -> Path:
        """Damaged files, kept for people to read; never used again."""
        return self.root / "quarantine"

    @property
    def skills(self) -> Path:
        """Permanent: one folder per trained skill."""
        return self.root / "skills"

    @property
    def training_runs(self) -> Path:
        """Temporary: one folder per live run."""
        return self.root / "training_runs"

    @property
    def failed_runs(self) -> Path:
        """Failed attempts, kept for people to read."""
        return self.training_runs / "failed"

    def skill_folder(self, expert: int, skill: str) -> Path:
        """The folder of a trained skill's expert and records."""
        return self.skills / f"{expert}_{slug(skill)}"

    def archive(self, expert: int, skill: str) -> RunPaths:
        """The records of a merged run, below `skill_folder`."""
        return RunPaths(self.skill_folder(expert, skill), expert)

    def expert_folder(self, expert: int, skill: str) -> Path:
        """All versions of one expert."""
        return self.skill_folder(expert, skill) / f"expert_{expert}_policy"

    def expert_version(self, expert: int, skill: str, version: str) -> Path:
        """One immutable Orbax checkpoint."""
        return self.expert_folder(expert, skill) / version

    def run(self, expert: int, skill: str) -> RunPaths:
        """The live run of a skill."""
        return RunPaths(self.training_runs / f"skill_{expert}_{slug(skill)}", expert)

    def failed_run(self, expert: int, skill: str, attempt: int) -> Path:
        """The folder that a failed attempt is moved to."""
        return self.failed_runs / f"skill_{expert}_{slug(skill)}.attempt{attempt}"
