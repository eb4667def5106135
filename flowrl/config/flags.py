"""Every flag is a field here; parser, child's argv and docs are made from the same classes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from flowrl.paths import DEFAULT_GRAPH


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
MergePolicyName = Literal["frame_count", "frame_average", "eval_gate"]
Sandbox = Literal["auto", "bwrap", "none"]


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """What every run is trained with."""

    env_name: str = "Craftax-Classic-Symbolic-v1"
    """Craftax-Classic-Symbolic-v1, Craftax-Symbolic-v1, or a game of an installed package."""
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
    acting_threads: Count | None = None
    """Threads that step the environments on a CPU, each a share of them; which worlds and actions
    are drawn depends on their number (default: one for each CPU the run may use, while each
    has 32 environments or more)."""
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
    """Worlds generated beforehand and reused for ever; 0 gives every episode a new one."""
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

    graph_path: Path = DEFAULT_GRAPH
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
    skills_per_gpu: Count | None = None
    """Most runs that share one GPU (default: 1, or as many as --gpu_memory_mb lets fit)."""
    gpu_memory_mb: Count | None = None
    """Memory that one run takes of a GPU, in MB; as many share a GPU as fit into 90 % of it."""
    cpus_per_run: Count = 0
    """CPUs that a run without a GPU is pinned to, none of them shared; 0 shares all."""
    stall_timeout: float = 1800.0
    """Seconds without progress after which a run is ended and counts as failed."""
    run_timeout: float | None = None
    """Seconds that one attempt may take, after which it is ended and counts as failed."""
    merge_policy: MergePolicyName = "frame_count"
    """What becomes of an expert that two runs trained: the copy with most frames stays, the two
    are averaged by frames, or the one that does better in the same fresh worlds stays."""
    trust_skills: bool = False
    """Admit skill files of --skills_dir that the syntax check refuses; only for files you wrote."""
    sandbox: Sandbox = "auto"
    """Confine trainers to their own run folder, without network, by bubblewrap; auto: if it is
    there."""
    pass_env: tuple[str, ...] = ()
    """Names of further environment variables that trainers get, e.g. --pass_env WANDB_API_KEY."""
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
