"""The complete environment of a trainer: what it may inherit and what it must have.

A trainer runs code that a language model may have written. So it inherits by an allowlist: the
keys with which the daemon calls that model stay here.

CPUs are not divided among runs: on two cores, two runs pinned to one core each needed 3 to 10 %
less CPU time than two that share both, but a single run then takes twice as long.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.redaction import is_secret

MEMORY_SHARE = 0.9  # of a GPU, for all its runs together: CUDA contexts need the rest
_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
# Reading compiled programs allocates and frees small pieces of memory. Asking the kernel for larger
# ones makes a start 5 % cheaper. The third setting restores glibc's default for large blocks.
_MALLOC = {
    "MALLOC_TOP_PAD_": str(2**26),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
}

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
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWN_SECRETS = re.compile(r"WANDB_\w+")


def child_env(
    device: str | None = None,
    *,
    skills_per_gpu: int = 1,
    environ: Mapping[str, str] | None = None,
    passed: Collection[str] = (),
) -> dict[str, str]:
    """The environment of one run.

    Args:
      device: the GPU's id (`flowrl.launchers.gpus`), or None to train without one.
      skills_per_gpu: how many runs share it; each preallocates its part of the memory.
      environ: the environment to inherit from; by default this process's own.
      passed: the names of further variables that the user passes on (`--pass_env`).

    Raises:
      ConfigError: XLA_PYTHON_CLIENT_MEM_FRACTION is not in (0, 1], or a variable to pass on is
        not set.
    """
    inherited = os.environ if environ is None else environ
    env = {name: value for name, value in inherited.items() if _may_pass(name)}
    env |= {name: _set_value(name, inherited) for name in passed}
    env["PYTHONUNBUFFERED"] = "1"
    env = {**_MALLOC, **env}
    if device is None:
        env.setdefault("JAX_PLATFORMS", "cpu")  # set by a user, it may also say tpu
        return env
    env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    env["CUDA_VISIBLE_DEVICES"] = device
    env[_FRACTION] = f"{memory_share(env) / skills_per_gpu:.4f}"
    return env


def compile_cache(folder: Path | None, environ: Mapping[str, str]) -> Path:
    """JAX's compile cache: `folder`, else JAX_COMPILATION_CACHE_DIR, else the user's own.

    Raises:
      RuntimeError: there is no home folder.
    """
    if folder is not None:
        return folder
    if environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(environ["JAX_COMPILATION_CACHE_DIR"])
    caches = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home(), ".cache")
    return Path(caches, "flowrl", "jax")


def _set_value(name: str, environ: Mapping[str, str]) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--pass_env {name!r} is no name of an environment variable")
    if name not in environ:
        raise ConfigError(f"--pass_env {name}: it is not set here; export it or leave it out")
    return environ[name]


def _may_pass(name: str) -> bool:
    if is_secret(name) and not _OWN_SECRETS.fullmatch(name):
        return False
    return _INHERITED.fullmatch(name) is not None


def memory_share(environ: Mapping[str, str]) -> float:
    """The part of a GPU's memory for all its runs together: the user's setting, or 0.9.

    Raises:
      ConfigError: XLA_PYTHON_CLIENT_MEM_FRACTION is not in (0, 1].
    """
    text = environ.get(_FRACTION)
    if text is None:
        return MEMORY_SHARE
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"{_FRACTION}={text} must lie in (0, 1]; unset it or correct it")
    return share
