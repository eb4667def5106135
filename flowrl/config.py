"""Flags: every flag is a field of a class here, and parser, child's argv and docs are made of them.

A program's configuration is composed (`BottomUpConfig.ppo.lr`); its flags are flat (`--lr`), on
command lines and in config.json and run.json alike. A check stands in the type of its field; what
several fields must satisfy together is the method `problems` of their class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from flowrl import arguments
from flowrl.arguments import (
    Count,
    CountOrZero,
    Frames,
    FramesOrZero,
    GraphArgument,
    Needs,
    Origin,
    Seconds,
)
from flowrl.errors import ConfigError, divisors_near
from flowrl.paths import DEFAULT_GRAPH
from flowrl.storage import records
from flowrl.storage.records import Share, above, at_least, at_most, within

AboveZero = Annotated[float, above(0.0)]
MOST_STEPS = 100_000  # of one step of a plan
Steps = Annotated[int, within(1, MOST_STEPS)]
FrameAccounting = Literal["acted", "total"]
Activation = Literal["tanh", "relu", "gelu"]
Precision = Literal["f32", "bf16"]
MergePolicyName = Literal["frame_count", "frame_average", "eval_gate"]
RuleName = Literal["mean", "trimmed_mean", "median", "geometric_median", "krum", "multi_krum"]
Sandbox = Literal["auto", "bwrap", "none"]
ENGINES = ("slurm", "ray")  # launchers whose runs are on other hosts
VideoAfter = Literal["never", "success"]


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """Fields that are flags, or other configurations; a flag's name stands once in the whole."""

    @classmethod
    def settled(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return those of the flags that have their last value once the command line is read."""
        return values

    def check(self) -> None:
        """Raise ConfigError for the first problem of several fields together."""
        for problem in self.problems():
            raise ConfigError(problem)

    def problems(self) -> Iterator[str]:
        """Lines about what several fields do not satisfy together, and the remedies."""
        yield from ()


Config = TypeVar("Config", bound=Configuration)
_LEAST_OF_KRUM = 5  # members of which one may be faulty
_MOST_APART = 2**31 - 1  # steps, which devices count in 32 bits


@dataclass(frozen=True, kw_only=True)
class PPOConfig(Configuration):
    """Training of one run."""

    env_name: str = "Craftax-Classic-Symbolic-v1"
    """Craftax-Classic-Symbolic-v1, Craftax-Symbolic-v1, or a game of an installed package."""
    total_timesteps: Frames = 10_000_000
    """Environment steps of one run at most, over all environments; rounded up to whole updates."""
    success_state_rate: Share = 0.8
    """Stop early when this share of recent episodes succeeds at the plan's last step."""
    stop_when_stuck: bool = False
    """Also stop when success has levelled off. If the next attempt levels off no higher, give the
    skill up."""
    lr: AboveZero = 1e-3
    """Adam's learning rate."""
    anneal_lr: bool = True
    """Lower the learning rate linearly to zero over total_timesteps."""
    schedule_timesteps: Annotated[FramesOrZero, Needs(anneal_lr=True)] = 0
    """Steps over which the learning rate falls, if more than total_timesteps: for a run that will
    be continued with more."""
    num_envs: Count = 64
    """Environments stepped side by side; replicas share them evenly."""
    acting_threads: Count | None = None
    """Threads that step the environments on a CPU (default: one for each CPU that the run may use,
    with at least 32 environments each)."""
    num_devices: CountOrZero = 1
    """Devices that share the environments; 0 takes all that the run may see."""
    env_shards: Count | None = None
    """Shards of the environments, each with keys and worlds of its own. Devices and threads do not
    decide what is drawn (default: the greater of devices and acting threads)."""
    grad_sync_period: Count = 1
    """Updates after which the devices agree. 1 averages every gradient. More lets each device move
    its own copy of the parameters, and then averages the copies."""
    replicas: Count = 1
    """Trainers of one run, each with worlds of its own, whose experts are averaged in rounds."""
    average_every: Annotated[Count, Needs(replicas=2)] = 5
    """Updates from one round to the next."""
    average_rule: Annotated[RuleName, Needs(replicas=2)] = "mean"
    """How a round averages its members, by the steps in which each expert acted."""
    average_outer: Annotated[Literal["replace", "sgd"], Needs(replicas=2)] = "replace"
    """How a round goes to its members' mean: by taking it, or by a step of Nesterov's method."""
    average_lr: Annotated[AboveZero, Needs(average_outer="sgd")] = 0.7
    """Length of the outer step sgd; 1 is the whole way."""
    average_momentum: Annotated[Share, Needs(average_outer="sgd")] = 0.9
    """Momentum of the outer step sgd."""
    average_quorum: Annotated[Count | None, Needs(replicas=2)] = None
    """Replicas that a round needs (default: all but one, at least 2)."""
    average_deadline: Annotated[AboveZero | None, Needs(replicas=2)] = None
    """Seconds after which a round with its quorum closes (default: the median of the last arrivals
    and four median deviations, at least a second)."""
    num_steps: Count = 64
    """Steps of every environment per update."""
    update_epochs: Count = 4
    """Passes over each update's data."""
    num_minibatches: Count = 8
    """Minibatches per pass."""
    gamma: Share = 0.99
    """Discount."""
    gae_lambda: Share = 0.7
    """Lambda of generalised advantage estimation."""
    clip_eps: AboveZero = 0.2
    """PPO's clip range."""
    ent_coef: float = 0.01
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: AboveZero = 1.0
    """Each expert's gradient is clipped to this norm."""
    layer_size: Count = 64
    """Width of the hidden layers of each expert's actor and critic."""
    activation: Activation = "tanh"
    """Activation of the hidden layers."""
    sight: bool = True
    """Let experts also see the nearest cell of each kind and what is in front of the player. Of
    their step they see what it lacks, its time left, and where they have been."""
    egocentric: bool = True
    """See the map turned so that the player looks up, and move so, if the game says its moves."""
    settled_frames: FramesOrZero = 300_000
    """Frames after which an expert learns with half the learning rate, and with a quarter after
    three times as many; 0: always with the whole rate."""
    keep_needs: bool = True
    """Count a step of a plan as done only while the player still has what later steps need. That is
    items in the inventory, and places such as a table in reach."""
    coverage_bonus: Annotated[float, at_least(0.0)] = 0.03
    """Reward of an expert that sees where it has been for each cell of the world it comes into."""
    precision: Precision = "f32"
    """Compute the networks in f32, or in bf16 on a GPU; parameters and moments stay f32."""
    max_task_steps: Steps = 300
    """An episode is cut when one step of its plan takes longer, unless its skill has a limit."""
    world_pool: Annotated[int, within(0, 2**14)] = 0
    """Worlds generated beforehand and reused for ever; 0 gives every episode a new one."""
    seed: int = 0
    """Seed of worlds, parameters and actions; attempt k of a run adds k - 1 to it."""
    frame_accounting: FrameAccounting = "acted"
    """Credit an expert with the steps it acted in, or with all steps of the run."""
    log_seconds: Seconds = 1.0
    """Least time between two lines of metrics.jsonl."""
    checkpoint_seconds: Seconds = 300.0
    """Seconds between checkpoints that a killed run goes on from; 0 for none."""
    use_tensorboard: bool = False
    """Write TensorBoard files into the run folder; pip install '.[tb]' brings it."""
    use_wandb: bool = False
    """Log to Weights & Biases (offline when there is no key); pip install '.[wandb]' brings it."""
    wandb_project: Annotated[str, Needs(use_wandb=True)] = "flowrl"
    """Weights & Biases project."""
    wandb_entity: Annotated[str | None, Needs(use_wandb=True)] = None
    """Weights & Biases team or user."""
    compile_cache: Path | None = None
    """Folder of JAX's persistent compile cache (default: the user's cache folder)."""

    def problems(self) -> Iterator[str]:
        """Check whether environments and rows can be divided evenly, and rounds be made."""
        if self.replicas > 1:
            yield from self._problems_of_rounds()
            return
        shards, envs, wanted = num_shards(self), self.num_envs, self.num_minibatches
        names = ("env_shards", "num_devices", "acting_threads")
        flag = next((name for name in names if getattr(self, name) == shards), "num_devices")
        if envs % shards:
            below = envs // shards * shards
            near = " or ".join(str(n) for n in (below, below + shards) if n)
            yield f"--num_envs {envs} cannot be shared evenly by --{flag} {shards}; choose {near}"
        if self.num_devices and shards % self.num_devices:
            dealt = f"dealt evenly to --num_devices {self.num_devices}"
            yield f"--{flag} {shards} cannot be {dealt}; choose a multiple of {self.num_devices}"
        rows = envs // shards * self.num_steps
        if rows % wanted:
            of = f"--num_envs {envs} × --num_steps {self.num_steps}"
            of += f" / {shards} shards" if shards > 1 else ""
            near = ", ".join(map(str, divisors_near(rows, wanted)))
            yield f"{of} = {rows} rows do not divide into --num_minibatches {wanted}; choose {near}"
        if rows * shards * self.grad_sync_period > _MOST_APART:
            apart = f"the devices would take more than {_MOST_APART:,} steps by themselves"
            few = self.grad_sync_period == 1
            flag = "--num_envs" if few else "--grad_sync_period"
            value = self.num_envs if few else self.grad_sync_period
            yield f"{flag} {value}: {apart}; lower it"

    def of_replica(self) -> PPOConfig:
        """The configuration of one of the run's replicas: its share of environments and devices."""
        return dataclasses.replace(
            self,
            num_envs=self.num_envs // self.replicas,
            total_timesteps=-(-self.total_timesteps // self.replicas),
            schedule_timesteps=self.schedule_timesteps // self.replicas,
            num_devices=self.num_devices and max(1, self.num_devices // self.replicas),
        )

    def _problems_of_rounds(self) -> Iterator[str]:
        every, period, number = self.average_every, self.grad_sync_period, self.replicas
        quorum = quorum_of(self.average_quorum, number)
        if not 2 <= quorum <= number:
            may = "2" if number == 2 else f"2 to {number}"
            yield f"--average_quorum {quorum} must be {may}, as --replicas says"
        if self.stop_when_stuck:
            yield f"--stop_when_stuck is for runs of one trainer, not of --replicas {number}"
        if self.average_outer == "sgd" and self.average_momentum == 1:
            yield "--average_momentum 1 never comes to rest; choose below 1, such as 0.9"
        if every % period:
            yield f"--average_every {every} must be a multiple of --grad_sync_period {period}"
        if "krum" in self.average_rule and quorum < _LEAST_OF_KRUM:
            needs = f"--average_quorum {_LEAST_OF_KRUM} or more, not {quorum}"
            yield f"--average_rule {self.average_rule} needs {needs}; choose geometric_median"
        updates = -(-self.total_timesteps // (self.num_envs * self.num_steps))
        if every > updates:
            yield f"--average_every {every} is beyond the {updates} updates; choose 1 to {updates}"
        if self.num_envs % number:
            near = " or ".join(map(str, divisors_near(self.num_envs, number)))
            of = f"--num_envs {self.num_envs}"
            yield f"{of} cannot be shared evenly by --replicas {number}; choose {near} replicas"
            return
        one = dataclasses.replace(self.of_replica(), replicas=1)
        yield from (f"in each of {number} replicas, {problem}" for problem in one.problems())


@dataclass(frozen=True, kw_only=True)
class SourceConfig(Configuration):
    """The graph's folder, and where its skills and settings come from."""

    graph_path: GraphArgument = DEFAULT_GRAPH
    """Folder of this graph; made when missing, continued when there."""
    skills_dir: Path | None = None
    """Folder of skill files that add to or override the library."""
    skill_config: Path | None = None
    """TOML file with a table of settings for each skill: ["Collect Wood"], then lr = 3e-4."""
    trust_skills: bool = False
    """Admit skill files of --skills_dir that the syntax check refuses; only for files you wrote."""
    trust_folder: bool = False
    """Train in a folder that is another user's, or that everybody may write to."""
    merge_policy: MergePolicyName = "frame_count"
    """How an expert that two runs trained is merged. The copy with most frames stays, both are
    averaged by frames, or the copy with more success in the same fresh worlds stays."""
    merge_objective: Annotated[str | None, Needs(merge_policy="eval_gate")] = None
    """What eval_gate compares: weights and limits of success, return and deaths, such as
    success=1,deaths=0.5,success>=0.8 (default: success)."""


@dataclass(frozen=True, kw_only=True)
class GraphConfig(SourceConfig):
    """The graph of skills."""

    max_nodes: Count | None = None
    """Most skills to train (default: all that the target needs, or the whole library)."""
    target_skill: str | None = None
    """Train only what this skill needs, and the skill itself."""
    init_from: str | None = None
    """Start new experts from a copy of this trained skill's expert."""
    strict: bool = False
    """Exit with 1 also when a requested skill is completed below its --success_state_rate."""


@dataclass(frozen=True, kw_only=True)
class AttemptConfig(Configuration):
    """The attempts of a run, and the limits that end it."""

    devices_per_run: Count = 1
    """GPUs that each run gets at once and trains on."""
    scheduler_poll_interval: Annotated[AboveZero, at_most(10**6)] = 30.0
    """Seconds between fallback looks at the run folders; ends of runs are heard at once."""
    max_retries: CountOrZero = 2
    """Retries of a failed skill after its first attempt."""
    retry_backoff: Seconds = 5.0
    """Seconds before the first retry, at least 0.1; doubled each time, at most ten minutes."""
    stall_timeout: AboveZero = 1800.0
    """Seconds without progress after which a run is ended and counts as failed."""
    run_timeout: AboveZero | None = None
    """Seconds that one attempt may take before it is ended and counts as failed (default: a day,
    and a second for every 100 of total_timesteps)."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(AttemptConfig):
    """The start of runs, the attempts of a skill, and the limits that end a run."""

    max_parallel_skills: Count = 3
    """Most runs side by side."""
    auto_scaling: bool = False
    """Begin with --min_workers runs side by side, and take one more while it brings 5 % more steps
    per second, up to --max_workers. A number is measured by runs that were launched with it."""
    min_workers: Annotated[Count, Needs(auto_scaling=True)] = 1
    """Fewest runs side by side with --auto_scaling."""
    max_workers: Annotated[Count | None, Needs(auto_scaling=True)] = None
    """Most runs side by side with --auto_scaling (default: --max_parallel_skills)."""
    slot_minutes: Annotated[float, at_least(0.0)] = 10.0
    """Minutes of training after which a run gives its slot to a skill that waits for one. It saves
    first, and queues again behind all that wait; 0 for never."""
    curriculum: bool = False
    """Of skills that wait, start those first that were not tried yet. Then start those whose
    success changed most lately. Priorities that a user gave are replaced."""
    min_success_rate: Share = 0.01
    """A run that spent its steps with less success than this counts as a failed attempt."""
    needs_success_rate: Share = 0.25
    """A skill starts once each skill that it needs succeeds so often; until then it is blocked."""
    skill_timesteps_budget: Frames | None = None
    """Most environment steps for one skill over all attempts; rounded up to whole updates."""

    def problems(self) -> Iterator[str]:
        """Check whether the bounds of --auto_scaling leave a number."""
        least, most = self.min_workers, self.max_workers or self.max_parallel_skills
        if self.auto_scaling and least > most:
            yield f"--min_workers {least} is above --max_workers {most}; lower it"


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(Configuration):
    """The place, resources and environment in which runs execute."""

    gpu_ids: tuple[int, ...] = ()
    """GPUs to use, e.g. --gpu_ids 0 1 (default: all that are visible)."""
    skills_per_gpu: Count | None = None
    """Most runs that share one GPU (default: 1, or as many as --gpu_memory_mb lets fit)."""
    gpu_memory_mb: Count | None = None
    """Memory that one run takes of a GPU, in MB; as many share a GPU as fit into 90 % of it."""
    cpus_per_run: CountOrZero = 0
    """CPUs that a run without a GPU is pinned to, none of them shared; 0 shares all."""
    sandbox: Sandbox = "auto"
    """Confine trainers to their run folder, without network, by bubblewrap; auto: if there."""
    run_memory: Annotated[int, at_least(10**6)] | None = None
    """Most bytes of memory of one run, e.g. 8G; a run that is seen with more is killed."""
    run_disk: Annotated[int, at_least(10**6)] | None = None
    """Most bytes in the folder of one run, e.g. 2G; likewise."""
    run_processes: Count | None = None
    """Most processes of one run; likewise."""
    pass_env: tuple[str, ...] = ()
    """Names of further environment variables that trainers get, e.g. --pass_env WANDB_API_KEY."""
    launcher: Literal["tmux", "local", "slurm", "ray"] = "tmux"
    """Run each skill in a tmux session, as a plain child process, or as a job of Slurm or Ray."""
    tmux_socket: Annotated[str | None, Needs(launcher="tmux")] = None
    """Name or path of the tmux server's socket (default: the user's own server)."""
    shared_folder: bool = False
    """The graph is on a disk of several hosts: keep schedulers of other hosts out, too; always so
    with slurm and ray."""
    slurm_args: Annotated[tuple[str, ...], Needs(launcher="slurm")] = ()
    """Options of sbatch for every run, without dashes, as --slurm_args partition=gpu time=480."""
    nodes_per_run: Annotated[Count, Needs(launcher="slurm")] = 1
    """Nodes that train one run together, with a process on each; needs --sandbox none."""
    ray_address: Annotated[str, Needs(launcher="ray")] = "http://127.0.0.1:8265"
    """The job server of the Ray cluster: its dashboard's address."""
    ray_resources: Annotated[tuple[str, ...], Needs(launcher="ray")] = ()
    """What each run needs besides its CPUs, e.g. --ray_resources GPU=1 memory=8G."""
    lost_after: Annotated[int, at_least(30), Needs(launcher=ENGINES)] = 120
    """Seconds without a sign of life after which a run on another host is taken for lost while
    its engine does not answer."""


@dataclass(frozen=True, kw_only=True)
class StartConfig(Configuration):
    """The flags of all programs that train skills."""

    graph: SourceConfig = SourceConfig()
    schedule: AttemptConfig = AttemptConfig()
    ppo: PPOConfig = PPOConfig()
    launch: LaunchConfig = LaunchConfig()
    config: Path | None = None
    """TOML file of flags, as `lr = 3e-4`; the command line and the environment come before it."""
    origins: Annotated[Mapping[str, Origin], tyro.conf.Suppress] = field(
        default_factory=dict, compare=False
    )
    """Which flags were given, and where; not a flag itself."""
    command: Annotated[str, tyro.conf.Suppress] = field(default="", compare=False)
    """The command that was given, with the word GRAPH, for hints; not a flag itself."""


@dataclass(frozen=True, kw_only=True)
class BottomUpConfig(StartConfig):
    """Train a graph of skills, several side by side.

    The same command goes on with what it began. Most used:
      --target_skill SKILL       train what this skill needs (default: the whole library)
      --max_parallel_skills N    runs side by side
      --total_timesteps N        environment steps of one run at most, as 5M or 5e7
      --success_state_rate R     end a run once this share of its episodes succeeds
      --skills_dir FOLDER        skill files of your own
      --no_use_wandb             leave Weights & Biases out

    Examples:
      flowrl train exp/demo --target_skill "Make Wood Pickaxe" --total_timesteps 5M
      flowrl train exp/demo --config mine.toml --lr 3e-4
    """

    graph: GraphConfig = GraphConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    notify: str | None = None
    """Command to run, without a shell, when a skill or the graph has ended. It gets a JSON line on
    its standard input, and 20 seconds."""
    video_after: VideoAfter = "never"
    """Film each skill once it is merged, by `flowrl play --keep` while a processor is idle."""
    analyse_at: Share = 0.0
    """Success that ends a skill's first run, for `flowrl analyse --apply`; another run goes on."""
    write_skills: CountOrZero = 0
    """Skills that a language model writes, one by one, once no skill is left to start."""
    write_flags: Annotated[str | None, Needs(write_skills=1)] = None
    """Flags of `flowrl write` for that, in quotes, as "--base_url URL --model NAME"."""


def checked(config: Config) -> Config:
    """Return the configuration; raises ConfigError unless its values make sense, also together."""
    for name, value in flags(config).items():
        _read(type(config), name, records.to_json(value))
    for part in (config, *(getattr(config, item.name) for item in dataclasses.fields(config))):
        if isinstance(part, Configuration):
            part.check()
    return config


def flags(config: Configuration) -> dict[str, Any]:
    """Return the values of a configuration by flag, those of nested configurations too.

    >>> flags(BottomUpConfig())["max_retries"]
    2
    """
    values: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        if item.name in ("origins", "command"):
            continue
        value = getattr(config, item.name)
        values |= flags(value) if isinstance(value, Configuration) else {item.name: value}
    return values


def with_flags(config: Config, /, **values: Any) -> Config:
    """Return a copy of a configuration with other values of some flags.

    >>> with_flags(BottomUpConfig(), lr=0.5, max_retries=0).schedule.max_retries
    0
    """
    if unknown := values.keys() - flags(config).keys():
        raise TypeError(f"{type(config).__name__} has no flags {sorted(unknown)}")
    changes: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if not isinstance(value, Configuration):
            changes |= {item.name: values[item.name]} if item.name in values else {}
        elif inner := {name: values[name] for name in flags(value) if name in values}:
            changes[item.name] = with_flags(value, **inner)
    return dataclasses.replace(config, **changes)


def to_json(config: Configuration) -> dict[str, Any]:
    """Return the flags as plain JSON values."""
    return records.to_json(flags(config))


def from_json(kind: type[Config], data: Mapping[str, Any], **required: Any) -> Config:
    """Return the configuration that `to_json` made these data of, perhaps in another version.

    A missing flag has its default, or its value in `required`; `egocentric` is off, as before there
    was the flag. An unknown one is left out. Raises ConfigError for a value that makes no sense.
    """
    default, data = kind(**required), {"egocentric": False, **data}
    values = {name: _read(kind, name, data[name]) for name in flags(default) if name in data}
    return checked(with_flags(default, **values))


def num_shards(config: PPOConfig) -> int:
    """Shards of the environments."""
    return config.env_shards or max(config.num_devices, config.acting_threads or 1)


def quorum_of(average_quorum: int | None, replicas: int) -> int:
    """Replicas that a round needs: without `--average_quorum` all but one, and at least two."""
    return average_quorum or max(2, replicas - 1)


def _read(kind: type, name: str, value: Any) -> Any:
    """Return the value of a flag, from plain JSON."""
    try:
        return records.from_json(arguments.arguments(kind)[name].hint, value)
    except records.MalformedError as error:
        raise ConfigError(f"--{name} {error}") from error
