"""Every flag is a field here; parser, child's argv and docs are made from the same classes."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from flowrl.errors import ConfigError


def count(text: str) -> int:
    """An integer, also in scientific notation.

    >>> count("5e7")
    50000000
    """
    value = float(text) if any(char in text for char in ".eE") else int(text)
    if value != int(value):
        raise ValueError(f"{text} is not a whole number")
    return int(value)


Count = Annotated[
    int,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: count(words[0]),
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    ),
]
FrameAccounting = Literal["acted", "total"]
Activation = Literal["tanh", "relu", "gelu"]


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """What every run is trained with."""

    env_name: str = "Craftax-Classic-Symbolic-v1"
    """Craftax-Classic-Symbolic-v1 or Craftax-Symbolic-v1."""
    total_timesteps: Count = 10_000_000
    """Environment steps of one run at most, over all environments; rounded up to whole updates."""
    success_state_rate: float = 0.8
    """Stop early when this share of recent episodes succeeds at the plan's last step."""
    lr: float = 1e-3
    """Adam's learning rate."""
    anneal_lr: bool = True
    """Lower the learning rate linearly to zero over total_timesteps."""
    num_envs: Count = 64
    """Environments stepped side by side."""
    num_steps: Count = 64
    """Steps of every environment per update."""
    update_epochs: Count = 4
    """Passes over each update's data."""
    num_minibatches: Count = 8
    """Minibatches per pass."""
    gamma: float = 0.99
    """Discount."""
    gae_lambda: float = 0.9
    """Lambda of generalised advantage estimation."""
    clip_eps: float = 0.2
    """PPO's clip range."""
    ent_coef: float = 0.01
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 1.0
    """Each expert's gradient is clipped to this norm."""
    layer_size: Count = 64
    """Width of the hidden layers of each expert's actor and critic."""
    activation: Activation = "tanh"
    """Activation of the hidden layers."""
    max_task_steps: Count = 300
    """An episode is cut when one step of its plan takes longer, unless its skill has a limit."""
    world_pool: Count = 0
    """Worlds generated beforehand and reused for resets; 0 generates them as they are needed."""
    seed: Count = 0
    """Seed of worlds, parameters and actions; attempt k of a run adds k - 1 to it."""
    frame_accounting: FrameAccounting = "acted"
    """Credit an expert with the steps it acted in, or with all steps of the run."""
    log_seconds: float = 1.0
    """Least time between two lines of metrics.jsonl."""
    checkpoint_seconds: float = 300.0
    """Seconds between checkpoints that a killed run goes on from; 0 for none."""
    use_tensorboard: bool = False
    """Write TensorBoard files into the run folder."""
    use_wandb: bool = False
    """Log to Weights & Biases (offline when there is no key); needs flowrl[wandb]."""
    wandb_project: str = "flowrl"
    """Weights & Biases project."""
    wandb_entity: str | None = None
    """Weights & Biases team or user."""
    compile_cache: Path | None = None
    """Folder of JAX's persistent compile cache (default: the user's cache folder)."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(PPOConfig):
    """Train one generated module: `python -m flowrl.ppo_flow --module_path RUN/2.py`."""

    module_path: Path
    """The generated module; its folder holds run.json and takes the checkpoints."""
    resume: bool = True
    """Continue from the checkpoint of a stopped or killed trainer when there is one."""


@dataclass(frozen=True, kw_only=True)
class BottomUpConfig(PPOConfig):
    """Train a graph of skills, bottom up."""

    graph_path: Path = Path("exp/bottom_up_parallel")
    """Folder of this graph; made when missing, continued when there."""
    max_nodes: Count | None = None
    """Most skills to train (default: all that the target needs, or the whole library)."""
    target_skill: str | None = None
    """Train only what this skill needs, and the skill itself."""
    skills_dir: Path | None = None
    """Folder of skill files that add to or override the library."""
    max_parallel_skills: Count = 3
    """Most runs side by side."""
    scheduler_poll_interval: float = 30.0
    """Seconds between fallback looks at the run folders; ends of runs are heard at once."""
    max_retries: Count = 2
    """Retries of a failed skill after its first attempt."""
    retry_backoff: float = 5.0
    """Seconds before the first retry; doubled for each further one, at most ten minutes."""
    min_success_rate: float = 0.01
    """A run that spent its steps with less success than this counts as a failed attempt."""
    skill_timesteps_budget: Count | None = None
    """Most environment steps for one skill over all attempts; rounded up to whole updates."""
    gpu_ids: tuple[int, ...] = ()
    """GPUs to use, e.g. --gpu_ids 0 1 (default: all that are visible)."""
    skills_per_gpu: Count = 1
    """Runs that share one GPU."""
    cpus_per_run: Count = 0
    """CPUs that a run without a GPU is pinned to, none of them shared; 0 shares all."""
    stall_timeout: float = 1800.0
    """Seconds without progress after which a run is ended and counts as failed."""
    launcher: Literal["tmux", "local"] = "tmux"
    """Run each skill in a tmux session, or as a plain child process."""
    tmux_socket: str | None = None
    """Name of the tmux server's socket (default: the user's own server)."""


@dataclass(frozen=True, kw_only=True)
class SequentialConfig(BottomUpConfig):
    """Train a graph of skills one after another, in this very process."""

    graph_path: Path = Path("exp/bottom_up")
    """Folder of this graph; made when missing, continued when there."""
    max_parallel_skills: Count = 1
    """Runs side by side: always one."""


Config = TypeVar("Config", bound=PPOConfig)


def parse(kind: type[Config], argv: Sequence[str] | None, *, prog: str | None = None) -> Config:
    """Read a command line; prints help or an error and exits as argparse does."""
    return checked(tyro.cli(kind, args=argv, prog=prog))


def checked(config: Config) -> Config:
    """The same configuration, once its values make sense together.

    Raises:
      ConfigError: names the flag, its value and what is allowed.
    """
    _check_training(config)
    if isinstance(config, BottomUpConfig):
        _check_graph(config)
    if isinstance(config, SequentialConfig):
        _check_sequential(config)
    return config


def to_argv(config: PPOConfig, kind: type[PPOConfig] | None = None) -> tuple[str, ...]:
    """The command line that `parse` reads back into `config`, every flag said.

    `kind` limits it to the fields of that class, e.g. the trainer's part of a story's flags.
    """
    words: list[str] = []
    for name, value in values(config, kind).items():
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, tuple):
            words.extend([f"--{name}", *map(str, value)] if value else [])
        else:
            words.append(f"--{name}={value}")
    return tuple(words)


def values(config: PPOConfig, kind: type[PPOConfig] | None = None) -> dict[str, Any]:
    """Field values by flag name, limited to the fields of `kind`."""
    return {item.name: getattr(config, item.name) for item in dataclasses.fields(kind or config)}


def to_json(config: PPOConfig, kind: type[PPOConfig] | None = None) -> dict[str, Any]:
    """The configuration as plain JSON values."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in values(config, kind).items()
    }


def from_json(kind: type[Config], facts: Mapping[str, Any]) -> Config:
    """The configuration that `to_json` made these facts of, perhaps in another version.

    A field that is missing has its default; one that is unknown today is left out.

    Raises:
      ConfigError: a value is of another type, or makes no sense.
    """
    hints = typing.get_type_hints(kind)
    known = {item.name for item in dataclasses.fields(kind)} & facts.keys()
    return checked(kind(**{name: _typed(name, hints[name], facts[name]) for name in known}))


def _typed(name: str, hint: Any, value: Any) -> Any:
    """A JSON value as the type of its field."""
    kinds = typing.get_args(hint) or (hint,)
    if value is None and type(None) in kinds:
        return None
    if Path in kinds and isinstance(value, str):
        return Path(value)
    if isinstance(value, list):
        value = tuple(value)
    if float in kinds and type(value) is int:
        return float(value)
    if typing.get_origin(hint) is Literal:
        fits = value in kinds
    else:
        plain = (*kinds, typing.get_origin(hint))
        fits = any(isinstance(kind, type) and type(value) is kind for kind in plain)
    if not fits:
        raise ConfigError(f"a recorded configuration has {name} = {value!r}; start anew")
    return value


def _at_least(config: PPOConfig, name: str, least: int) -> None:
    if getattr(config, name) < least:
        raise ConfigError(f"--{name} {getattr(config, name)} must be at least {least}")


def _within(config: PPOConfig, name: str, low: float, high: float) -> None:
    if not low <= getattr(config, name) <= high:
        raise ConfigError(f"--{name} {getattr(config, name)} must lie in [{low:g}, {high:g}]")


def _check_training(config: PPOConfig) -> None:
    sizes = ("num_envs", "num_steps", "update_epochs", "num_minibatches", "layer_size")
    for name in (*sizes, "total_timesteps", "max_task_steps"):
        _at_least(config, name, 1)
    for name in ("world_pool", "checkpoint_seconds"):
        _at_least(config, name, 0)
    for name in ("gamma", "gae_lambda", "success_state_rate"):
        _within(config, name, 0.0, 1.0)
    for name in ("lr", "max_grad_norm", "clip_eps"):
        if not getattr(config, name) > 0:
            raise ConfigError(f"--{name} {getattr(config, name)} must be above 0")
    rows = config.num_envs * config.num_steps
    if rows % config.num_minibatches:
        raise ConfigError(
            f"--num_envs {config.num_envs} × --num_steps {config.num_steps} = {rows} rows do not "
            f"divide into --num_minibatches {config.num_minibatches}; choose a divisor of {rows}"
        )


def _check_graph(config: BottomUpConfig) -> None:
    for name in ("max_parallel_skills", "skills_per_gpu"):
        _at_least(config, name, 1)
    _at_least(config, "max_retries", 0)
    _within(config, "min_success_rate", 0.0, 1.0)
    interval = config.scheduler_poll_interval
    if interval <= 0:
        raise ConfigError(f"--scheduler_poll_interval {interval} must be above 0")
    for name in ("max_nodes", "skill_timesteps_budget"):
        if getattr(config, name) is not None:
            _at_least(config, name, 1)


def _check_sequential(config: SequentialConfig) -> None:
    alone = SequentialConfig(gpu_ids=config.gpu_ids[:1])
    flags = "max_parallel_skills gpu_ids skills_per_gpu launcher tmux_socket stall_timeout"
    for name in flags.split():
        if getattr(config, name) != getattr(alone, name):
            raise ConfigError(
                f"--{name} {getattr(config, name)} is for runs side by side, here one skill trains "
                "after another, in one process; use python -m flowrl.bottomup_parallel"
            )
