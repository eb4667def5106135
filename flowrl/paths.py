"""All paths of a graph and of a run, and the only function that makes a name fit for a file."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError, FileRefusedError, NameRefusedError

DEFAULT_GRAPH = Path("exp/bottom_up_parallel")
AGENT_JSON = "agent.json"  # in the folder of an exported agent
_NAME_LIMIT = 200
_SLUG_LIMIT = 64
_MOST_NAME_BYTES = 255  # of a file, on every common file system
# Fillers, joiners and variation selectors: letters and marks that draw nothing.
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0") | frozenset(
    map(chr, (*range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)))
)
_RESERVED = re.compile(r"(?i)con|prn|aux|nul|(com|lpt)[0-9]")  # on some file systems
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_ ]*")


def plain(path: Path) -> Path:
    """Return a path without `..` to the same place, since libraries refuse `..`.

    A path with `..` becomes absolute; a link before `..` is followed, as the kernel does.
    """
    if ".." not in path.parts:
        return path
    place = Path.cwd()
    for part in path.parts:
        if part != "..":
            place /= part
        else:
            place = Path(os.path.realpath(place) if place.is_symlink() else place).parent
    return place


def local_path(word: str) -> Path:
    """Return the path that a command line gives; a leading `~` is the user's folder.

    ConfigError says so if it is an address such as s3://bucket, or of a user that is not there.
    """
    _refuse_strange(word)
    return given_path(word) if word.startswith("~") else plain(Path(word))


def _refuse_strange(given: Any) -> None:
    if "\0" in str(given):
        raise ConfigError(f"is {str(given)!r:.100}, and no path holds a NUL; name another")
    if any(len(part.encode(errors="replace")) > _MOST_NAME_BYTES for part in str(given).split("/")):
        what = f"is {printable(str(given))}, with a name of over {_MOST_NAME_BYTES} bytes"
        raise ConfigError(f"{what}; choose a shorter one")
    if isinstance(given, str) and _ADDRESS.match(given):
        raise ConfigError(f"is {printable(given)}, an address; name a path of this machine")


def given_path(given: Any) -> Path:
    """Return the path that a Python call was given, which may begin with `~`; or ConfigError."""
    if given == "":
        raise ConfigError("is '', which is no path; name a folder or a file")
    _refuse_strange(given)
    try:
        return plain(Path(given).expanduser())
    except (TypeError, RuntimeError) as error:  # of None, say; of a user who is not there
        raise ConfigError(
            f"is {given!r:.100}, which is no path ({error}); name a folder or a file"
        ) from error


def display_name(text: str) -> str:
    """Return the name as people see it: NFC, trimmed, printable, at most 200 characters.

    NameRefusedError says so if it is empty, too long, or holds characters that cannot be seen.
    """
    name = unicodedata.normalize("NFC", text).strip()
    if len(name) > _NAME_LIMIT:
        raise NameRefusedError(f"the skill name {name[:40]!a}… is over {_NAME_LIMIT} characters")
    if not any(unicodedata.category(char)[0] in "LNPS" for char in name):
        raise NameRefusedError(f"the skill name {name!a} is empty; give it a letter to be seen")
    unseen = sorted({char for char in name if _is_unseen(char)})
    if unseen:
        which = ", ".join(f"U+{ord(char):04X}" for char in unseen[:5])
        raise NameRefusedError(
            f"the skill name {name!a} holds control characters or others that cannot be seen "
            f"({which}); remove them"
        )
    return name


def printable(text: str) -> str:
    """The text with `�` for each character that a terminal obeys or cannot show."""
    return "".join(char if char.isprintable() else "�" for char in text)


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


class _Below:
    """A path of a paths object: `name` below the path that the attribute `base` holds."""

    def __init__(self, base: str, name: str) -> None:
        self._base, self._name = base, name

    def __get__(self, paths: object, kind: type) -> Path:
        return getattr(paths, self._base) / self._name


@dataclass(frozen=True, slots=True)
class JobPaths:
    """The files in a job's folder by which its runner is told what to run, and reports."""

    folder: Path

    def __post_init__(self) -> None:
        """Take any path of a user or a caller."""
        object.__setattr__(self, "folder", plain(self.folder))

    spec_json = _Below("folder", "spec.json")  # what the runner starts: argv, folder, CPUs, sandbox
    environment_json = _Below("folder", "environment.json")  # 0600; its reader removes it
    secrets_json = _Below("folder", "secrets.json")  # 0600: what must not reach the log
    start_json = _Below("folder", "start.json")  # pids, start times and boot id of runner and job
    exit_json = _Below("folder", "exit.json")  # how the job ended, as the runner saw it
    lock = _Below("folder", "run.lock")  # held while any process of this job lives

    @property
    def engine_json(self) -> Path:
        """The claim of an engine on this job, beside the folder: a confined job cannot reach it."""
        return self.folder.with_name(f"{self.folder.name}.engine.json")

    @property
    def beat(self) -> Path:
        """The file whose time the runner of an engine's job renews, beside the folder, too."""
        return self.folder.with_name(f"{self.folder.name}.beat")

    @property
    def read_only(self) -> tuple[Path, ...]:
        """The files that a confined job sees and cannot change; some may not exist."""
        return (self.spec_json, self.start_json)


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

    def replica(self, number: int) -> RunPaths:
        """The files that one replica of the run writes for itself."""
        return RunPaths(self.replicas / str(number), self.expert)

    replicas = _Below("folder", "replicas")  # what the run's replicas write for themselves
    rounds = _Below("folder", "rounds")  # rounds in which replicas are averaged (`replicas.rounds`)
    last_words = _Below("folder", "error.txt")  # why a replica ended, if it could say so
    finals = _Below("policies", "final")  # all final experts, renamed into place when complete
    resume = _Below("policies", "resume")  # all that a stopped trainer goes on from
    run_json = _Below("folder", "run.json")  # plan, experts, configuration; written before launch
    result_json = _Below("folder", "result.json")  # written last, by a run that reached its end
    training_log = _Below("folder", "training.log")  # the trainer's output
    older_training_log = _Below("folder", "training.log.1")  # its older half, once it is long
    metrics = _Below("folder", "metrics.jsonl")  # one JSON line per logged update
    prune_json = _Below("folder", "prune.json")  # whether a stopped trainer ends with what it has
    progress = _Below("folder", "progress.json")  # the newest metrics; they tell that a run hangs
    tensorboard = _Below("folder", "tensorboard")  # TensorBoard's event files
    wandb = _Below("folder", "wandb")  # the files of Weights & Biases

    @property
    def read_only(self) -> tuple[Path, ...]:
        """As for every job, and what the run is."""
        return (self.spec_json, self.start_json, self.run_json, self.module)

    @property
    def records(self) -> tuple[Path, ...]:
        """The files that are archived after the merge, run.json last; some may not exist."""
        logs = (self.training_log, self.older_training_log, self.metrics)
        return (self.module, *logs, self.result_json, self.run_json)

    @property
    def of_the_process(self) -> tuple[Path, ...]:
        """The files that mean nothing once no process of the run lives."""
        given = (self.spec_json, self.environment_json, self.secrets_json)
        return (*given, self.start_json, self.exit_json, self.lock, self.progress, self.prune_json)

    @property
    def films(self) -> tuple[Path, Path]:
        """The films of a merged run's expert, of which it has one at most: mp4, or gif."""
        return (self.folder / "video.mp4", self.folder / "video.gif")

    @property
    def tracker_folders(self) -> tuple[Path, ...]:
        """The folders of other programs that are archived as far as they can be read."""
        return (self.tensorboard, self.wandb)


@dataclass(frozen=True, slots=True)
class IndependentPaths(RunPaths):
    """The paths of a run of independent learners: `final(i)` is agent i's checkpoint."""

    expert: int = 0
    timeline = _Below("folder", "timeline.json")  # when it collects, learns and waits

    @property
    def policies(self) -> Path:
        """The run's agents, by number: `final/` and `resume/`."""
        return self.folder / "agents"

    def final(self, local: int) -> Path:
        """An agent at the end of the run."""
        return self.finals / f"agent_{local}"


@dataclass(frozen=True, slots=True)
class GraphPaths:
    """The paths of one graph of skills, all below `root`."""

    root: Path

    def __post_init__(self) -> None:
        """Take any path of a user or a caller; raises ConfigError for that of a file."""
        object.__setattr__(self, "root", plain(self.root))
        is_link = self.root.is_symlink()
        if not self.root.is_dir() and (is_link or self.root.exists()):
            what = (
                "is a link that leads to no folder" if is_link else "is no graph, which is a folder"
            )
            raise ConfigError(f"{self.root} {what}; name the folder of a graph (GRAPH comes first)")

    def command(self, name: str, *words: str) -> str:
        """A command of flowrl about this graph, for people to copy."""
        return shlex.join(["flowrl", name, str(self.root), *words])

    scheduler_state = _Below("root", "scheduler_state.json")  # for people and jq, too
    daemon_lock = _Below("root", "daemon.lock")  # held by the folder's scheduler, which it names
    events = _Below("root", "events.jsonl")  # the event log, for people; nothing is decided by it
    requests = _Below("root", "requests")  # requests to the scheduler, one file each
    notices = _Below("root", "notices")  # messages that `flowrl status` shows besides the skills

    def notice(self, key: str) -> Path:
        """One notice; its key is the file's stem."""
        return self.notices / f"{key}.json"

    graph_json = _Below("root", "graph.json")  # game and network sizes; checked at every start
    config_json = _Below("root", "config.json")  # the resolved configuration of the last start
    skill_files = _Below("root", "skill_files")  # the source of each skill when its training began

    def skill_file(self, skill: str) -> Path:
        """The source of one skill."""
        return self.skill_files / f"{slug(skill)}.json"

    approvals = _Below("root", "approvals")  # the approvals of skill code, one file per digest
    stages_lock = _Below("root", "stages.lock")  # held by the only orchestrator of the folder
    transcripts = _Below("root", "transcripts")  # of wishes that a language model was asked for
    judging = _Below("root", "judging")  # what was measured of each judge, and answers of models
    comparisons = _Below("root", "comparisons")  # of experts, by run id; removed after the merge
    checkpoints = _Below("root", "checkpoints")  # the manifest, its history and its lock
    manifest = _Below("checkpoints", "global_latest.json")  # which version of each expert counts
    manifest_pickle = _Below("checkpoints", "global_latest.pkl")  # the same; flowrl never reads it
    history = _Below("checkpoints", "history")  # the last manifests, one file per generation
    global_lock = _Below("checkpoints", "global.lock")  # held during a merge; never deleted
    quarantine = _Below("root", "quarantine")  # damaged files, for people to read; never used again
    skills = _Below("root", "skills")  # permanent: one folder per trained skill
    training_runs = _Below("root", "training_runs")  # temporary: one folder per live run
    failed_runs = _Below("training_runs", "failed")  # failed attempts, kept for people to read
    sweeps = _Below("root", "sweeps")  # one folder per sweep: see `SweepPaths`
    tuned = _Below("root", "tuned")  # one TOML file per skill whose settings a sweep has found

    def tuned_file(self, skill: str) -> Path:
        """The settings that a sweep has found for one skill."""
        return self.tuned / f"{slug(skill)}.toml"

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


@dataclass(frozen=True, slots=True)
class SweepPaths(GraphPaths):
    """The paths of one sweep: a graph whose runs are trials and whose experts are copies."""

    sweep_json = _Below("root", "sweep.json")  # what the sweep is; written once
    outcome_json = _Below("root", "outcome.json")  # what came of it, once its best are tried anew
    contest_json = _Below("root", "contest.json")  # which text of the skill was best, if it has any
    training_runs = _Below("root", "trials")  # one folder per trial, named by its number; they stay

    def run(self, expert: int, skill: str) -> RunPaths:
        """The trial whose number is `expert`; the run in it may train another expert."""
        return self.trial(expert, expert)

    def trial(self, number: int, expert: int) -> RunPaths:
        """The run folder of a trial, which trains `expert`."""
        return RunPaths(self.training_runs / str(number), expert)


def is_graph(folder: Path) -> bool:
    """Return whether a path is the folder of a graph that was begun."""
    names = ("graph.json", "scheduler_state.json", "checkpoints/global_latest.json")
    # os.path raises no error for a name that is too long.
    return any(os.path.exists(folder / name) for name in names)  # noqa: PTH110


def graph_around(place: Path) -> GraphPaths | None:
    """Return the graph in whose folder a path lies, if any."""
    folders = [outer for outer in Path(os.path.realpath(place)).parents if outer.is_dir()]
    for outer in map(GraphPaths, folders):
        if os.path.lexists(outer.manifest) or os.path.lexists(outer.scheduler_state):
            return outer
    return None


def refuse_other_folder(graph_path: Path) -> None:
    """Raise FileRefusedError if a folder is flowrl's, but none that a graph may be made in."""
    if os.path.realpath(graph_path) == "/":
        raise FileRefusedError(f"{graph_path} is the root of all folders; name one in it")
    kinds = {AGENT_JSON: "an exported agent", "sweep.json": "a sweep", "run.json": "a run's folder"}
    for name, kind in kinds.items():
        if os.path.lexists(graph_path / name):
            raise FileRefusedError(f"{graph_path} is {kind}, not a graph; name another folder")
    if is_graph(graph_path):
        return
    for name in ("config.json", "events.jsonl", "notices", "skill_files", "training_runs"):
        if os.path.lexists(graph_path / name):
            what = f"{graph_path} is no graph and has {name}, which a graph would write over"
            raise FileRefusedError(f"{what}; name a new folder")
    if outer := graph_around(graph_path):
        where = f"{graph_path} is inside the graph {outer.root}, where flowrl alone writes"
        raise FileRefusedError(f"{where}; name a folder outside, or that graph")


def refuse_agent(folder: Path) -> None:
    """Raise FileRefusedError for the folder of an exported agent, where a graph must be named."""
    if os.path.lexists(folder / AGENT_JSON):
        what = f"{folder} is an exported agent, which flowrl play and load_agent take"
        raise FileRefusedError(f"{what}; name the folder of a graph")


def existing_graph(graph_path: Path) -> GraphPaths:
    """Return the paths of a graph; raises FileRefusedError where there is none, or a sweep."""
    graph_paths = existing_graph_or_sweep(graph_path)
    if isinstance(graph_paths, SweepPaths):
        root = graph_paths.root.absolute()
        what = f"{graph_path} is a sweep, whose trials have no merged expert"
        raise FileRefusedError(f"{what}; name its graph: {root.parents[1]}")
    return graph_paths


def existing_graph_or_sweep(graph_path: Path) -> GraphPaths:
    """Return the paths of a graph or a sweep; raises FileRefusedError where there is neither."""
    graph_paths = graph_or_sweep(graph_path)
    if not (graph_paths.checkpoints.is_dir() or graph_paths.scheduler_state.is_file()):
        refuse_agent(graph_paths.root)
        raise FileRefusedError(
            f"{shlex.quote(str(graph_paths.root))} is no graph: it has neither checkpoints/ nor "
            "scheduler_state.json; name the folder of a graph (GRAPH comes first), or let flowrl "
            "train make one"
        )
    folder, is_sweep = graph_paths.root.absolute(), isinstance(graph_paths, SweepPaths)
    if not is_sweep and folder.parent.name == "sweeps" and is_graph(folder.parents[1]):
        what = f"{graph_paths.root} is a sweep that has lost its sweep.json"
        raise FileRefusedError(f"{what}; restore it from a copy, or sweep under another --name")
    return graph_paths


def graph_or_sweep(root: Path) -> GraphPaths:
    """The paths of the graph, or of the sweep, in a folder."""
    if os.path.isdir(root) and not os.access(root, os.X_OK):  # noqa: PTH112
        what = f"{root} cannot be read: permission denied"
        raise FileRefusedError(f"{what}; let its owner give you the right, or name another graph")
    return SweepPaths(root) if SweepPaths(root).sweep_json.exists() else GraphPaths(root)
