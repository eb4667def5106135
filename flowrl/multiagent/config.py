"""Flags of independent learners; alone, because `--help` must not import jax."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from flowrl.arguments import Count, Needs, Seconds, Seed
from flowrl.config import AboveZero, Activation, Configuration
from flowrl.errors import divisors_near
from flowrl.storage.records import Share, within

PER_AGENT = ("lr", "gamma", "clip_eps", "ent_coef")


@dataclass(frozen=True, kw_only=True)
class LearnerConfig(Configuration):
    """Learning of each agent; lr, gamma, clip_eps and ent_coef take a number for each, too."""

    algorithm: Literal["ppo", "dqn"] = "ppo"
    """How the agents learn: ppo from each epoch's rollout, dqn from the newest steps."""
    seed: Seed = 0
    """Seed of parameters, worlds and actions."""
    num_envs: Count = 64
    """Copies of the world side by side."""
    num_steps: Count = 64
    """Turns of an epoch in each copy."""
    turns: Literal["simultaneous", "sequential"] = "simultaneous"
    """Whether all agents act at once in a turn, or each sees what those before it have done."""
    acting: Literal["scan", "call"] = "scan"
    """Turns of a world in JAX as one compiled program (scan), or of any world by calls (call)."""
    lr: tuple[AboveZero, ...] = (1e-3,)
    """Adam's learning rate: one for all agents, or one for each."""
    gamma: tuple[Share, ...] = (0.99,)
    """Discount: one for all agents, or one for each."""
    clip_eps: Annotated[tuple[AboveZero, ...], Needs(algorithm="ppo")] = (0.2,)
    """PPO's clip range: one for all agents, or one for each."""
    ent_coef: Annotated[tuple[float, ...], Needs(algorithm="ppo")] = (0.01,)
    """Weight of PPO's entropy bonus: one for all agents, or one for each."""
    gae_lambda: Annotated[Share, Needs(algorithm="ppo")] = 0.9
    """Lambda of generalised advantage estimation."""
    vf_coef: Annotated[float, Needs(algorithm="ppo")] = 0.5
    """Weight of PPO's value loss."""
    max_grad_norm: AboveZero = 1.0
    """Each agent's gradient is clipped to this norm."""
    update_epochs: Count = 4
    """PPO's passes over each rollout; an epoch has update_epochs × num_minibatches gradient steps,
    of dqn, too."""
    num_minibatches: Count = 8
    """Minibatches per pass."""
    layer_size: Count = 64
    """Width of the hidden layers of each agent's network."""
    activation: Activation = "tanh"
    """Activation of the hidden layers."""
    capacity: Annotated[int, within(1, 10**8), Needs(algorithm="dqn")] = 65_536
    """Steps that dqn's buffer of each agent holds; the oldest give way."""
    batch_size: Annotated[Count, Needs(algorithm="dqn")] = 256
    """Steps that dqn draws for a gradient step."""
    train_interval: Annotated[Count, Needs(algorithm="dqn")] = 1
    """Epochs from one training of dqn to the next; those between only fill the buffers."""
    tau: Annotated[Share, Needs(algorithm="dqn")] = 0.01
    """Share by which dqn's target network goes towards the network in every gradient step."""
    epsilon_decay_epochs: Annotated[Count, Needs(algorithm="dqn")] = 20
    """Epochs over which epsilon, dqn's share of random actions, falls from 1 to final_epsilon."""
    final_epsilon: Annotated[Share, Needs(algorithm="dqn")] = 0.05
    """Epsilon from then on."""

    def problems(self) -> Iterator[str]:
        """Check whether rows divide, and fit into the buffer."""
        rows, wanted = self.num_envs * self.num_steps, self.num_minibatches
        if rows % wanted:
            near = ", ".join(map(str, divisors_near(rows, wanted)))
            yield (
                f"--num_envs {self.num_envs} × --num_steps {self.num_steps} = {rows} rows do not "
                f"divide into --num_minibatches {wanted}; choose {near}"
            )
        if self.capacity < self.batch_size:
            least = f"choose {self.batch_size} or more"
            yield f"--capacity {self.capacity} is below --batch_size {self.batch_size}; {least}"


@dataclass(frozen=True, kw_only=True)
class EvaluateAgents:
    """Let the agents of a finished run play in fresh worlds, and print their mean returns.

    Examples:
      python -m flowrl.independent evaluate exp/signs
      python -m flowrl.independent evaluate exp/signs --episodes 1000 --json
    """

    run_folder: tyro.conf.Positional[Path]
    """Folder of the run."""
    episodes: Annotated[int, within(2, 100_000)] = 256
    """Episodes of each agent, each in a copy of the world of its own."""
    seed: Seed = 1_000_003
    """Seed of worlds and actions."""
    json: bool = False
    """Print JSON instead of lines."""


@dataclass(frozen=True, kw_only=True)
class IndependentConfig(Configuration):
    """Train agents in one world, each with a network, an optimizer and a buffer of its own.

    Examples:
      python -m flowrl.independent --world match_the_sign --agents 3 --epochs 50
      python -m flowrl.independent --world MPE_simple_spread_v3 --lag 0 --lr 1e-3 3e-4 1e-4
    """

    world: str
    """The world that the agents act in; MODULE:CLASS is one of your own."""
    learner: LearnerConfig = LearnerConfig()
    agents: Count = 3
    """Number of agents."""
    epochs: Count = 100
    """Epochs to collect and to learn from."""
    lag: Annotated[int, within(0, 1)] = 1
    """Epochs by which the parameters that act trail those that learn. 0 collects, then learns; 1
    lets an epoch be collected while the one before it is learnt from."""
    overlap: bool = True
    """At lag 1, collect and learn at the same time; the results are the same without."""
    run_folder: Path = Path("exp/independent")
    """Folder of the run; made when missing, continued when there; a finished run is kept."""
    resume: bool = True
    """Continue from the checkpoint of a stopped or killed run when there is one."""
    checkpoint_seconds: Seconds = 300.0
    """Seconds between checkpoints that a killed run goes on from; 0 for none."""
    stall_timeout: AboveZero = 1800.0
    """Seconds that collecting or learning may take in an epoch, after which the run is ended."""
    use_tensorboard: bool = False
    """Write TensorBoard files into the run folder; pip install '.[tb]' brings it."""
    use_wandb: bool = False
    """Log to Weights & Biases (offline when there is no key); pip install '.[wandb]' brings it."""
    wandb_project: Annotated[str, Needs(use_wandb=True)] = "flowrl"
    """Weights & Biases project."""
    wandb_entity: Annotated[str | None, Needs(use_wandb=True)] = None
    """Weights & Biases team or user."""
    timeline: bool = False
    """Write timeline.json into the run folder: a Chrome trace of when it collects, learns, waits.
    """
    debug: bool = False
    """Make all calls in one thread, and log each with its thread and epoch."""

    def problems(self) -> Iterator[str]:
        """Check whether the numbers that differ between agents are as many as the agents."""
        agents = self.agents
        for name in PER_AGENT:
            if (given := len(getattr(self.learner, name))) not in {1, agents}:
                yield f"--{name} has {given} numbers for --agents {agents}; give 1 or {agents}"
        if self.run_folder.exists() and not self.run_folder.is_dir():
            yield f"--run_folder {self.run_folder} is a file; name a folder"
