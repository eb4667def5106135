"""A trainer's environment, and its confinement by bubblewrap.

A confined trainer has no network and sees no other processes and no folder but its own run's. It
sees an empty machine with these additions: the system's programs and libraries, Python, its
packages and installed games, all read-only; an empty home and /tmp in memory; its run folder,
writable except for what it was given and what its runner records; a compile cache that only
confined trainers share, because a process that may write programs there decides what others
execute. The runner stays
outside and gives the trainer a session without a terminal, so that nothing can be typed into the
pane. The runner also hands over the environment, which therefore is not on the command line.

Dry runs, comparisons and evaluations run the same code and are confined alike. The last two also
see the graph's folder, read-only.

A trainer runs code that may come from anybody. So it inherits by an allowlist: the
keys with which the daemon calls that model stay here.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flowrl.config import Sandbox
from flowrl.errors import ConfigError
from flowrl.games.base import game_folders
from flowrl.launchers import child
from flowrl.paths import JobPaths
from flowrl.redaction import has_secret, is_secret
from flowrl.storage import make_dir

NOTICE = "sandbox"
_CONFINED_SUFFIX = "-confined"
PROBE_SECONDS = 30.0
_PROBE = "import flowrl.paths, importlib.util as u; assert u.find_spec('jax')"
_CONFINED = "trainers are confined by bubblewrap: no network, no folder but their own run's"
_OFFLINE = "; Weights & Biases is kept on disk for wandb sync, or use --sandbox none"
_MISSING = "bubblewrap is not installed (apt install bubblewrap)"
_REMEDY = "use --sandbox none, or auto to do without where it is missing"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
_SETTINGS = (
    "alternatives ca-certificates fonts glvnd group host.conf hosts ld.so.cache ld.so.conf "
    "ld.so.conf.d localtime nsswitch.conf nvidia OpenCL passwd pki ssl timezone vulkan"
)
_DEVICE_FOLDER = Path("/dev")
_DEVICES = ("nvidia*", "dri")
_TMP_BYTES = 2**30
_HOME_BYTES = 2**26
_MEMORY_SHARE = 0.9  # of a GPU, for all its runs together: CUDA contexts need the rest
HOST_DEVICES = "--xla_force_host_platform_device_count="
MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
# Reading compiled programs allocates and frees small pieces of memory. Asking the kernel for larger
# ones makes a start 5 % cheaper. The third setting restores glibc's default for large blocks.
_MALLOC = {
    "MALLOC_TOP_PAD_": str(2**26),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
}

_ONLINE = re.compile(r"(?i)(https?|all)_proxy|NETRC|WANDB_API_KEY").fullmatch
_INHERITED = re.compile(
    "|".join(
        [
            # the user and the machine
            r"HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TERM|COLORTERM|NO_COLOR",
            # where programs, libraries and caches are
            r"PATH|TMPDIR|XDG_\w+|LD_LIBRARY_PATH|LD_PRELOAD|VIRTUAL_ENV|CONDA_PREFIX|PYTHONPATH",
            # the way to the network, for Weights & Biases
            r"SSL_CERT_\w+|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|NETRC|WANDB_\w+",
            r"(?i:https?_proxy|all_proxy|no_proxy)",
            # the numerical stack and ourselves
            r"(JAX|XLA|CUDA|NVIDIA|NCCL|TF_CPP|TF_GPU|FLOWRL)_\w+|NPROC|\w+_NUM_THREADS",
        ]
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """The confinement of trainers: by the program named, or, without one, none."""

    program: str | None = None
    hidden: Path | None = None  # the graph's folder, of which only the run's own is visible
    disable_userns: bool = False  # bubblewrap 0.8 can keep a trainer from further user namespaces
    described: str = "trainers are not confined (--sandbox none)"

    def around(
        self,
        place: JobPaths | None,
        *,
        cwd: Path,
        env: Mapping[str, str],
        cache: Path | None = None,
        reads_graph: bool = False,
    ) -> tuple[str, ...]:
        """The words that go before a job's own; none if it is not confined.

        Args:
          place: the job; its folder exists and is a real path. None: it has no folder to write to.
          cwd: the job's working folder, which it sees empty.
          env: the job's environment; the folders that it names become visible.
          cache: the compile cache as the job knows it, an absolute path.
          reads_graph: whether it sees the graph's folder, read-only.
        """
        if self.program is None:
            return ()
        words = [self.program, "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]
        if self.disable_userns:
            words += ["--unshare-user", "--disable-userns"]
        words += ["--proc", "/proc", "--dev", "/dev"]
        for folder in ("/dev/shm", "/tmp"):  # noqa: S108
            words += ["--size", str(_TMP_BYTES), "--tmpfs", folder]
        words += _home(env)
        words += _read_only(env)
        words += _devices(env)
        if self.hidden is not None:
            graph = str(self.hidden)
            words += ["--ro-bind", graph, graph] if reads_graph else ["--tmpfs", graph]
        if cache is not None:  # the confined trainers' own takes the place of the user's
            with contextlib.suppress(OSError):
                own = make_dir(cache.with_name(cache.name + _CONFINED_SUFFIX))
                words += ["--bind", str(own), str(cache)]
        words += ["--dir", str(cwd), "--chdir", str(cwd)]
        words += _job_folder(place) if place else []
        if self.hidden is not None and not reads_graph:
            words += ["--remount-ro", str(self.hidden)]
        # Without capabilities a user id 0 may still write the kernel's settings that root owns.
        for folder in ("/proc", "/dev", "/"):
            words += ["--remount-ro", folder]
        return (*words, "--")

    def in_folder(self, folder: Path, env: Mapping[str, str]) -> tuple[str, ...]:
        """As `around`, for a process whose only writable folder is also its working folder."""
        return self.around(JobPaths(folder.resolve()), cwd=folder.resolve(), env=env)


def child_env(
    devices: tuple[str, ...] = (),
    *,
    skills_per_gpu: int = 1,
    environ: Mapping[str, str] = os.environ,
    passed: Collection[str] = (),
) -> dict[str, str]:
    """The environment of one run; raises ConfigError for a variable that is unset or unusable.

    Args:
      devices: the GPUs' ids (`flowrl.launchers.gpus`); () to train without one.
      skills_per_gpu: how many runs share each; a run preallocates its part of the memory.
      environ: the environment to inherit from; by default this process's own.
      passed: the names of further variables that the user passes on (`--pass_env`).
    """
    for name in passed:
        if name not in environ:
            word, equals, _ = name.partition("=")  # its value may be secret
            why = "this takes a name alone" if equals else "it is not set here"
            raise ConfigError(f"--pass_env {word}{equals}: {why}; export it or leave it out")
    env = {name: value for name, value in environ.items() if name in passed or may_pass(name)}
    env = {**_MALLOC, **env, "PYTHONUNBUFFERED": "1"}
    if not devices:
        env.setdefault("JAX_PLATFORMS", "cpu")  # set by a user, it may also say tpu
        return env
    env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    env[MEMORY_FRACTION] = f"{memory_share(env) / skills_per_gpu:.4f}"
    return env


def compile_cache(folder: Path | None, environ: Mapping[str, str]) -> Path:
    """JAX's compile cache: `folder`, else JAX_COMPILATION_CACHE_DIR, else the user's own.

    Raises RuntimeError if there is no home folder.
    """
    if folder is not None:
        return folder
    if environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(environ["JAX_COMPILATION_CACHE_DIR"])
    caches = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home(), ".cache")
    return Path(caches, "flowrl", "jax")


def memory_share(environ: Mapping[str, str]) -> float:
    """The part of a GPU's memory for all its runs together: the user's setting, or 0.9.

    Raises ConfigError if the setting is not in (0, 1].
    """
    text = environ.get(MEMORY_FRACTION, _MEMORY_SHARE)
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"{MEMORY_FRACTION}={text} must lie in (0, 1]; unset it or correct it")
    return share


def host_devices(environ: Mapping[str, str]) -> int:
    """Return how many devices JAX makes of the CPU in this environment.

    >>> host_devices({"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}), host_devices({})
    (4, 1)
    """
    counts = re.findall(rf"{HOST_DEVICES}(\d+)", environ.get("XLA_FLAGS", ""))
    return int(counts[-1]) if counts else 1


def confinement(
    wanted: Sandbox, graph: Path | None = None, *, network_wanted: bool = False
) -> Confinement:
    """Return the confinement that `--sandbox` means here, for skill code of this graph.

    With `network_wanted` the notice says what replaces the network. Raises ConfigError if
    bubblewrap is asked for, and is missing or does not work.
    """
    if wanted == "none":
        return Confinement()
    program = shutil.which("bwrap")
    said = _CONFINED + (_OFFLINE if network_wanted else "")
    hidden = Path(os.path.realpath(graph)) if graph else None
    candidate = Confinement(program=program, hidden=hidden, disable_userns=True, described=said)
    problem = _MISSING if program is None else problem_of(candidate)
    if problem and program is not None:  # an older bubblewrap
        candidate = replace(candidate, disable_userns=False)
        problem = problem_of(candidate)
    if problem is None:
        return candidate
    if wanted == "bwrap":
        raise ConfigError(f"--sandbox bwrap: {problem}; {_REMEDY}")
    return Confinement(
        described=f"trainers are not confined: {problem}; skill code has all your rights"
    )


def problem_of(probed: Confinement) -> str | None:
    """Return the reason why a trainer's Python cannot start confined; None when it can."""
    env = child_env()
    with tempfile.TemporaryDirectory(prefix="flowrl-sandbox-") as folder:
        words = [*probed.in_folder(Path(folder), env), sys.executable, "-c", _PROBE]
        try:
            done = child.run(words, env=env, seconds=PROBE_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"bubblewrap does not work here: {error}"
    if done.returncode == 0:
        return None
    return f"bubblewrap does not work here: {child.reason(done)}"


def confined_env(env: Mapping[str, str], passed: Iterable[str] = ()) -> dict[str, str]:
    """The environment of a confined trainer: without the network's settings, and secrets."""
    kept = {
        name: value
        for name, value in env.items()
        if name in passed or not (_ONLINE(name) or has_secret(name, value))
    }
    if kept.get("WANDB_MODE") != "disabled":
        kept["WANDB_MODE"] = "offline"
    kept["TMPDIR"] = "/tmp"  # noqa: S108
    return kept


def _job_folder(place: JobPaths) -> list[str]:
    """The job's folder, writable but for what it was given and what its runner records."""
    words = ["--bind", str(place.folder), str(place.folder)]
    for record in place.read_only:
        words += ["--ro-bind-try", str(record), str(record)]
    # Its runner replaces it when the job has ended; until then nothing can be in its place.
    words += ["--ro-bind", os.devnull, str(place.exit_json)]
    return [*words, "--bind-try", str(place.lock), str(place.lock)]  # so that it stays where it is


def _home(env: Mapping[str, str]) -> list[str]:
    home = Path(env.get("HOME") or "/")
    hidden = home.is_absolute() and home != Path("/")
    return ["--size", str(_HOME_BYTES), "--tmpfs", str(home)] if hidden else []


def _read_only(env: Mapping[str, str]) -> list[str]:
    """Outer folders first: later ones may lie inside."""
    words: list[str] = []
    system = [Path(name) for name in _SYSTEM]
    settings = [Path("/etc", name) for name in _SETTINGS.split()]
    for path in (*system, *settings, *_outermost(_python(env), beyond=system)):
        if path.is_symlink() and path in system:
            words += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            words += ["--ro-bind", str(path), str(path)]
    return [*words, "--ro-bind-try", "/sys/devices/system/cpu", "/sys/devices/system/cpu"]


def _python(env: Mapping[str, str]) -> Iterator[Path]:
    """The folders of the interpreter and its packages, and those that the environment names."""
    package = Path(__file__).resolve().parents[1]
    ours = [sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values()]
    if site.ENABLE_USER_SITE:
        ours.append(site.getusersitepackages())
    named = [
        folder
        for name in ("PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CONDA_PREFIX", "VIRTUAL_ENV")
        for folder in env.get(name, "").split(":")
    ]
    interpreter = Path(sys.executable).resolve().parents[1]
    folders = (*map(Path, ours), *map(Path, named), *game_folders())  # pip install -e is elsewhere
    for path in (package, interpreter, *folders):
        if path.is_absolute() and path.is_dir() and not _holds_a_home(path, env):
            yield path


def _holds_a_home(path: Path, env: Mapping[str, str]) -> bool:
    """Return whether a folder is a home, or holds homes: too much to show."""
    homes = {Path.home(), Path(env.get("HOME") or "/"), Path("/home/x"), Path("/tmp/x")}  # noqa: S108
    real = path.resolve()
    return any(home.is_relative_to(path) or home.resolve().is_relative_to(real) for home in homes)


def _outermost(paths: Iterable[Path], *, beyond: Iterable[Path]) -> list[Path]:
    """Each folder once, without those inside another one."""
    chosen: list[Path] = []
    for path in sorted(set(paths), key=lambda path: len(path.parts)):
        if not any(path.is_relative_to(other) for other in (*beyond, *chosen)):
            chosen.append(path)
    return chosen


def _devices(env: Mapping[str, str]) -> list[str]:
    """The GPUs that the environment names, and what its libraries read of the machine."""
    if not env.get("CUDA_VISIBLE_DEVICES"):
        return []
    words = ["--ro-bind-try", "/sys", "/sys"]
    for path in (path for name in _DEVICES for path in sorted(_DEVICE_FOLDER.glob(name))):
        words += ["--dev-bind-try", str(path), str(path)]
    return words


def may_pass(name: str) -> bool:
    """Return whether a variable of the daemon's environment is for its children."""
    hidden = is_secret(name) and not name.startswith("WANDB_")
    return not hidden and _INHERITED.fullmatch(name) is not None
