"""The merged experts of a graph as a folder of plain files, and an agent that acts with them.

    agent.json                          what is here: game, sizes, experts, digests
    experts/0_Collect_Wood.safetensors  the arrays of one expert, by their paths
    plans/0_Collect_Wood.py             the plan of one skill, as its expert was trained with

The folder needs no graph and may be given away. Its code is checked and tried when it is loaded, as
that of any skill file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import save

from flowrl import storage
from flowrl.calls import by_annotation
from flowrl.config import Activation, Steps
from flowrl.envs.base import StepOutput
from flowrl.envs.skill_module import TaskModule, load_module, open_modules
from flowrl.envs.tasks import SkillEnv, WalkState, make_env
from flowrl.envs.world_digest import world_digest
from flowrl.errors import (
    ConfigError,
    ExpertCorruptError,
    ExpertMissingError,
    FileRefusedError,
    GraphError,
    closest,
)
from flowrl.experts import checkpoint
from flowrl.experts.store import ExpertStore
from flowrl.games.base import env_sizes, find_game, renderer_of
from flowrl.measures.episodes import RecordedEpisode
from flowrl.networks import dispatch
from flowrl.networks.grouped import Packed, pack
from flowrl.networks.moe import stack_experts
from flowrl.parallel.training_setup import expected_shapes
from flowrl.paths import AGENT_JSON, GraphPaths, slug
from flowrl.ppo.sharding import check_backend
from flowrl.ppo.trainer import use_compile_cache
from flowrl.runs import (
    CodeApproval,
    ExpertVersion,
    SkillName,
    TrainingRun,
    check_module,
    expert_shapes,
    read_run,
)
from flowrl.skills.validation.cache import ApprovalStore
from flowrl.storage import records
from flowrl.storage.arrays import read_tensors
from flowrl.storage.records import Natural, Positive, Word

_AGAIN = "export the agent again"
_Acted = tuple[WalkState, Any, Any, StepOutput]  # with the observation and the action before it


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedExpert:
    """One expert, and the plan of its skill; `arrays` and `module` are its files' sha256."""

    index: Natural
    skill: SkillName
    frames: Natural
    arrays: Word
    module: Word
    max_task_steps: Steps
    keep_needs: bool
    approvals: tuple[CodeApproval, ...]

    @property
    def name(self) -> str:
        """The stem of its files."""
        return f"{self.index}_{slug(self.skill)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecord:
    """agent.json."""

    env_name: str
    layer_size: Positive
    activation: Activation
    sight: bool
    egocentric: bool = False
    generation: Natural
    experts: tuple[ExportedExpert, ...]

    @classmethod
    def of(
        cls, run: TrainingRun, generation: int, experts: Sequence[ExportedExpert]
    ) -> AgentRecord:
        """The record of experts of one graph, of which `run` trained one."""
        return cls(
            env_name=run.config["env_name"],
            layer_size=run.config["layer_size"],
            activation=run.config["activation"],
            sight=run.config["sight"],
            egocentric=run.config["egocentric"],
            generation=generation,
            experts=tuple(experts),
        )


class _Walk(NamedTuple):
    """The programs that walk a skill's plan."""

    begin: Callable[..., Any]
    """In a world of a key."""
    act: Callable[..., Any]
    """Once, as the expert chooses."""
    repeat: Callable[..., Any]
    """A recorded action."""
    player: Callable[..., Any]
    """The intrinsics and items in a world."""


class AgentStep(NamedTuple):
    """One action of an agent, and what came of it."""

    observation: np.ndarray
    """f32[observation_size]: before the action, in the frame in which the expert saw it."""
    skill: str
    """The skill of the plan's step in which the action was taken."""
    step: int
    """That step's number in the plan, from 0."""
    count: int
    """How many times the step asks for its skill's gain."""
    expert: int
    """Global index of the expert that chose the action."""
    action: int
    """The game's; the expert chose it in the frame of the observation."""
    reward: float
    success: bool
    """Whether the plan's last step is done now."""
    done: bool
    """Whether the episode is over."""
    cause: str
    """What the player died of with this action; empty if it lives, or the game names no causes."""
    intrinsics: Mapping[str, float]
    """The player's health, food and so on after the action, as far as the game names them."""
    inventory: Mapping[str, int]
    """The items that the player then has, without those of which there are none."""
    frame: np.ndarray | None
    """uint8 `[H, W, 3]`: the game's picture after the action, if `play` was asked for frames."""


def export_agent(graph_paths: GraphPaths, folder: Path) -> AgentRecord:
    """Write the experts that count now, and their plans, to a new folder, which appears whole.

    Raises:
      ExpertMissingError: nothing is merged yet, or a plan has an expert that does not count.
      ExpertCorruptError: an expert's files are not those that were merged.
      FileRefusedError: the folder exists, or a record is damaged.
    """
    check_backend()
    store = ExpertStore(graph_paths)
    manifest = store.manifest()
    if not manifest.experts:
        raise ExpertMissingError(
            f"{graph_paths.root} has no merged expert yet; train a skill first"
        )
    if os.path.lexists(folder):
        raise FileRefusedError(f"{folder} exists already; name another folder")
    with storage.building(folder) as prepared:
        experts = []
        for index, version in manifest.experts.items():
            run = read_run(graph_paths.archive(index, version.skill))
            if missing := set(run.experts) - manifest.experts.keys():
                raise ExpertMissingError(
                    f"the plan of {version.skill} has the experts {sorted(missing)}, which "
                    f"{graph_paths.manifest} does not name; train them again"
                )
            experts.append(_write_expert(store, version, run, prepared))
        record = AgentRecord.of(run, manifest.generation, experts)
        records.write(prepared / AGENT_JSON, record)
    return record


def read_agent_record(folder: Path) -> AgentRecord:
    """The record of an exported agent; FileRefusedError if there is none, or it is damaged."""
    if folder.name == AGENT_JSON and folder.is_file():
        raise FileRefusedError(f"{folder} is a file of an agent; name its folder, {folder.parent}")
    if not os.path.lexists(folder / AGENT_JSON):
        raise FileRefusedError(f"{folder} is no agent: it has no {AGENT_JSON}; use flowrl export")
    return records.read(folder / AGENT_JSON, AgentRecord, remedy=_AGAIN)


@by_annotation("flowrl.load_agent")
def load_agent(path: str | Path, *, trust_skills: bool = False) -> Agent:
    """Read an exported agent; its code is checked now, and tried unless it is the library's.

    Args:
      path: the folder that `flowrl export` wrote.
      trust_skills: also run code that the syntax check refuses, where it was exported as trusted.

    Raises:
      FileRefusedError: the folder is no agent, or agent.json or an expert's arrays are malformed.
      ExpertCorruptError: an expert's file is not the one that was exported.
      ExpertMissingError: a plan has an expert that is not here.
      SkillError: a plan's code is refused.
    """
    folder = Path(path)
    record = read_agent_record(folder)
    names = {each.index: each.skill for each in record.experts}
    if len(names) < len(record.experts) or len({*map(slug, names.values())}) < len(names):
        raise FileRefusedError(f"{folder / AGENT_JSON} names an expert or a skill twice; {_AGAIN}")
    looks = {"sight": record.sight, "egocentric": record.egocentric}
    shapes = expert_shapes(*env_sizes(record.env_name, **looks), record.layer_size)
    params = {each.index: _read_expert(folder, each, shapes) for each in record.experts}
    modules = _read_modules(folder, record.experts, trust_skills=trust_skills)
    for index, module in modules.items():
        path = folder / "plans" / f"{index}_{slug(names[index])}.py"
        _check_plan(path, module, record.env_name, names)
    return Agent(record=record, params=params, modules=modules)


@dataclass(frozen=True, kw_only=True)
class Agent:
    """Experts and plans of an exported graph.

    >>> agent = load_agent("agent")  # doctest: +SKIP
    >>> for timestep in agent.play("Collect Wood", seed=0):  # doctest: +SKIP
    ...     print(timestep.skill, timestep.action, timestep.reward)
    """

    record: AgentRecord
    params: Mapping[int, Any]
    """The arrays of each expert by its global index, as nested dicts."""
    modules: Mapping[int, TaskModule]
    """The plan of each expert's skill."""
    _walks: dict[int, _Walk] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def skills(self) -> tuple[str, ...]:
        """The names of the skills that the agent has learned."""
        return tuple(each.skill for each in self.record.experts)

    def plan(self, skill: str | int) -> tuple[str, ...]:
        """The skills of the steps of a skill's plan; GraphError if the agent does not have it."""
        return tuple(task.skill for task in self.modules[self._expert(skill).index].tasks)

    @by_annotation("agent.play")
    def play(self, skill: str | int, *, seed: int = 0, frames: bool = False) -> Iterator[AgentStep]:
        """Walk a skill's plan in a fresh world until its end; actions are drawn from the policy.

        Args:
          skill: its name, or its expert number.
          seed: of the world and the actions.
          frames: also draw the game's picture after each action.

        Raises:
          GraphError: the agent has no such skill.
          ConfigError: the seed is no whole number of 64 bits, or the game draws no pictures.
        """
        expert = self._expert(skill)
        world_key, key = jax.random.split(jax.random.key(seed))
        act = self._programs(expert).act

        def acts(state: WalkState) -> _Acted:
            nonlocal key
            key, now = jax.random.split(key)
            return act(now, state)

        return self._steps(expert, world_key, acts, self._draw if frames else None)

    def replay(
        self, skill: str | int, episode: RecordedEpisode, *, frames: bool = False
    ) -> Iterator[AgentStep]:
        """Walk a skill's plan as a recorded episode did; with `frames`, draw pictures as `play`.

        Raises:
          GraphError: the agent has no such skill.
          ConfigError: the episode is no RecordedEpisode.
          FileRefusedError: a timestep is not as it was recorded; says which.
        """
        if not isinstance(episode, RecordedEpisode):
            what = f"agent.replay: episode is {episode!r:.80}, not a recorded episode"
            raise ConfigError(f"{what}; take one of read_episodes(…)")
        expert, length, taken = self._expert(skill), len(episode.actions), 0
        repeat = self._programs(expert).repeat

        def acts(state: WalkState) -> _Acted:
            nonlocal taken
            now, taken = min(taken, length - 1), taken + 1
            key = key_of(episode, episode.step_keys[now])
            digest, acted = repeat(key, state, np.int32(episode.actions[now]))
            same = taken <= length and digest == episode.digests[now]
            check_replay(episode, taken, bool(same and acted[3].reward == episode.rewards[now]))
            return acted

        world_key = key_of(episode, episode.world_key)
        yield from self._steps(expert, world_key, acts, self._draw if frames else None)
        check_replay(episode, taken, taken == length)

    def _steps(
        self,
        expert: ExportedExpert,
        world_key: jax.Array,
        acts: Callable[[WalkState], _Acted],
        draw: Callable[[Any], Any] | None,
    ) -> Iterator[AgentStep]:
        """Each timestep of an episode in the world of a key."""
        walk = self._programs(expert)
        module, game = self.modules[expert.index], find_game(self.record.env_name)
        items = sorted(game.items)
        state, done = walk.begin(world_key), False
        while not done:
            state, observation, action, output = acts(state)
            done, task = bool(output.done), module.tasks[int(output.task)]
            intrinsics, held = (each.tolist() for each in walk.player(state.world))
            yield AgentStep(
                observation=np.asarray(observation),
                skill=task.skill,
                step=int(output.task),
                count=task.count,
                expert=module.experts[int(output.expert)],
                action=int(action),
                reward=float(output.reward),
                success=bool(output.task_success[len(module.tasks) - 1]),
                done=done,
                cause=_cause(output, game.causes),
                intrinsics=dict(zip(game.intrinsics, intrinsics, strict=False)),
                inventory={item: n for item, n in zip(items, held, strict=True) if n},
                frame=None if draw is None else np.asarray(draw(state.world)),
            )

    @cached_property
    def _draw(self) -> Callable[[Any], Any]:
        """The function from a world to the game's picture of it."""
        return renderer_of(self.record.env_name)()

    def _programs(self, expert: ExportedExpert) -> _Walk:
        if expert.index not in self._walks:
            self._walks[expert.index] = self._walk(expert)
        return self._walks[expert.index]

    def _walk(self, expert: ExportedExpert) -> _Walk:
        """The programs of a skill, which are compiled when they are first called."""
        module = self.modules[expert.index]
        env = make_env(
            self.record.env_name,
            module,
            max_task_steps=expert.max_task_steps,
            sight=self.record.sight,
            egocentric=self.record.egocentric,
            keep_needs=expert.keep_needs,
        )
        use_compile_cache(None)
        packed = pack(stack_experts([self.params[index] for index in module.experts]))
        begin = jax.jit(lambda key: env.begin_in(env.new_world(key)))
        act = partial(jax.jit(partial(_act, env, self.record.activation)), packed)
        return _Walk(begin, act, jax.jit(partial(_repeat, env)), jax.jit(env.player))

    def _expert(self, skill: str | int) -> ExportedExpert:
        wanted = str(skill).strip().casefold()
        for each in self.record.experts:
            if wanted in map(str.casefold, (each.skill, slug(each.skill), str(each.index))):
                return each
        near = closest(str(skill), self.skills)
        raise GraphError(
            f"the agent has no skill {skill!r}{near}; it has: {', '.join(self.skills)}"
        )


def _cause(output: StepOutput, causes: Sequence[str]) -> str:
    """The cause of the death in a timestep, if it was one."""
    died = output.done & ~output.truncated & ~output.task_success[output.task]
    return causes[int(np.argmax(output.cause))] if causes and died else ""


def _act(  # noqa: PLR0917 — jitted: its arguments are data
    env: SkillEnv, activation: str, packed: Packed, key: jax.Array, state: WalkState
) -> tuple[WalkState, jax.Array, jax.Array, StepOutput]:
    """Take one action of the acting expert in one environment."""
    action_key, step_key = jax.random.split(key)
    (observation, state), expert = env.observe(state), env.current_expert(state)
    logits, _ = dispatch.apply(packed, observation[None], expert[None], activation=activation)
    choice = jax.random.categorical(action_key, logits[0]).astype(jnp.int32)
    action = env.action_of(state, choice)
    state, output = env.advance(step_key, state, action)
    return state, observation, action, output


def _repeat(
    env: SkillEnv, key: jax.Array, state: WalkState, action: jax.Array
) -> tuple[jax.Array, _Acted]:
    """Take a recorded action; returns the digest of the state before it, too."""
    digest, (observation, state) = world_digest(state.world, state.task), env.observe(state)
    state, output = env.advance(key, state, action)
    return digest, (state, observation, action, output)


def key_of(episode: RecordedEpisode, words: np.ndarray) -> jax.Array:
    """Random keys of recorded words, uint32[…, words]; FileRefusedError if JAX uses others."""
    try:
        return jax.random.wrap_key_data(jnp.asarray(words))
    except TypeError as error:
        what = f"recorded episode {episode.number} has keys of {words.shape[-1]} words"
        raise FileRefusedError(f"{what}, which this JAX does not use; record it again") from error


def check_replay(episode: RecordedEpisode, timestep: int, same: bool) -> None:
    """Raise FileRefusedError unless a timestep is as it was recorded."""
    if not same:
        what = f"recorded episode {episode.number} departs from its record at timestep {timestep}"
        raise FileRefusedError(f"{what}: other software or hardware; record it again")


def _write_expert(
    store: ExpertStore, version: ExpertVersion, run: TrainingRun, folder: Path
) -> ExportedExpert:
    """Write the two files of an expert."""
    run_paths = store.graph_paths.archive(version.index, version.skill)
    check_module(run_paths, run)
    like = checkpoint.like_of(expected_shapes(run.config))
    params = checkpoint.load_expert(store.verify(version), like)
    name = f"{version.index}_{slug(version.skill)}"
    arrays, module = folder / "experts" / f"{name}.safetensors", folder / "plans" / f"{name}.py"
    storage.make_dir(arrays.parent)
    storage.make_dir(module.parent)
    leaves: Any = flatten_dict(params, sep="/")
    content, code = save(leaves), storage.read_bytes(run_paths.module)
    storage.write_atomic(arrays, content)
    storage.write_atomic(module, code)
    return ExportedExpert(
        index=version.index,
        skill=version.skill,
        frames=version.frames,
        arrays=_digest(content),
        module=_digest(code),
        max_task_steps=run.config["max_task_steps"],
        keep_needs=run.config.get("keep_needs", False),
        approvals=run.approvals,
    )


def _read_expert(folder: Path, expert: ExportedExpert, shapes: Mapping[str, Any]) -> Any:
    """The arrays of an expert, once their digest and shapes are right."""
    path = folder / "experts" / f"{expert.name}.safetensors"
    content = storage.read_bytes(path, remedy=_AGAIN)
    if _digest(content) != expert.arrays:
        raise ExpertCorruptError(f"{path} is not the file that was exported; {_AGAIN}")
    arrays = read_tensors(content, place=str(path), remedy=_AGAIN)
    forms = {name: (each.shape, each.dtype) for name, each in arrays.items()}
    if forms != {name: (shape, np.float32) for name, shape in shapes.items()}:
        raise ExpertCorruptError(f"{path} has arrays of other names, shapes or types; {_AGAIN}")
    if not all(np.isfinite(each).all() for each in arrays.values()):
        raise ExpertCorruptError(f"{path} has numbers that are not finite; {_AGAIN}")
    return unflatten_dict(arrays, sep="/")


def _read_modules(
    folder: Path, experts: Sequence[ExportedExpert], *, trust_skills: bool
) -> dict[int, TaskModule]:
    """The plans, once their digests are right and their code is approved."""
    plans = {folder / "plans" / f"{each.name}.py": each for each in experts}
    for path, expert in plans.items():
        if _digest(storage.read_bytes(path, remedy=_AGAIN)) != expert.module:
            raise FileRefusedError(f"{path} is not the plan that was exported; {_AGAIN}")
    if trust_skills:
        modules = [load_module(path, approvals=each.approvals) for path, each in plans.items()]
    else:  # approvals in the folder are its author's
        modules = open_modules(list(plans), ApprovalStore(Path(os.devnull)))
    by_expert = dict(zip((each.index for each in plans.values()), modules, strict=True))
    if missing := sorted({index for each in modules for index in each.experts} - by_expert.keys()):
        raise ExpertMissingError(f"{folder} lacks the experts {missing} of its plans; {_AGAIN}")
    return by_expert


def _check_plan(path: Path, module: TaskModule, env_name: str, names: Mapping[int, str]) -> None:
    """Make sure that a plan is of this game, of its own skill, and names the experts' skills."""
    steps = [(module.experts[task.expert_local], task.skill) for task in module.tasks]
    for index, skill in steps:
        if names[index] != skill:
            said = f"{path}: its step {skill!r} has expert {index}, that of {names[index]!r}"
            raise FileRefusedError(f"{said}; {_AGAIN}")
    if path.stem.partition("_")[0] != str(steps[-1][0]):
        raise FileRefusedError(f"{path} is the plan of {steps[-1][1]!r}; {_AGAIN}")
    if module.game.name != env_name:
        raise FileRefusedError(f"{path} is for {module.game.name}, not {env_name}; {_AGAIN}")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
