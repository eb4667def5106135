"""Folders as the original research code left them, written with its libraries and its layout.

The networks are those of its mixture of experts: four layers, tanh between them, one pair of
networks per expert with the keys that flax gives to a list of `nn.Sequential`.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from flowrl.migration.planned import Plan, plan_migration
from flowrl.runs import Verdict

OBSERVATION, ACTIONS, WIDTH = 1345, 17, 8
KEYS = ("layers_0", "layers_2", "layers_4", "layers_6")
NAMES = ("Collect Wood", "Place Table", "Make Wood Pickaxe")

DONE = """def task_is_done(inventory, inventory_diff, n):
    return inventory.wood >= 4 * n
"""
REWARD = """def task_reward(inventory_diff, health_penalty):
    return inventory_diff.wood + health_penalty
"""


def network(seed: int, outputs: int, *, width: int = WIDTH, inputs: int = OBSERVATION) -> dict:
    """One network of an expert; its numbers depend on the seed alone."""
    rng = np.random.default_rng([seed, outputs])
    sizes = [inputs, width, width, width, outputs]
    return {
        key: {
            "kernel": rng.normal(0, 0.2, (rows, columns)).astype(np.float32),
            "bias": rng.normal(0, 0.2, columns).astype(np.float32),
        }
        for key, rows, columns in zip(KEYS, sizes, sizes[1:], strict=False)
    }


def pair(seed: int, **sizes: int) -> tuple[dict, dict]:
    """Actor and critic of an expert."""
    return network(seed, ACTIONS, **sizes), network(seed, 1, **sizes)


def forward(layers: Mapping[str, Mapping[str, np.ndarray]], rows: np.ndarray) -> np.ndarray:
    """What the original computes: dense layers with tanh between them."""
    for key in KEYS:
        rows = rows @ layers[key]["kernel"] + layers[key]["bias"]
        rows = rows if key == KEYS[-1] else np.tanh(rows)
    return rows


def mixture(experts: Mapping[int, int]) -> dict:
    """A tree of many experts: the number in the key → the seed of its numbers."""
    tree: dict[str, Any] = {}
    for number, seed in experts.items():
        tree[f"actor_networks_{number}"], tree[f"critic_networks_{number}"] = pair(seed)
    return {"params": tree}


def write_expert(
    old: Path,
    index: int,
    name: str,
    *,
    seed: int | None = None,
    frames: int | None = 1000,
    networks: tuple[dict, dict] | None = None,
    word: str | None = None,
) -> Path:
    """A skill's folder with its pickled expert; returns that file."""
    word = name.replace(" ", "_") if word is None else word
    folder = old / "skills" / f"{index}_{word}" / f"expert_{index}_policy"
    folder.mkdir(parents=True)
    actor, critic = networks or pair(index if seed is None else seed)
    path = folder / "params.pkl"
    path.write_bytes(pickle.dumps({"actor_network": actor, "critic_network": critic}))
    metadata = {"skill_name": name, "global_expert_idx": index, "total_frames": frames}
    (folder / "metadata.json").write_text(json.dumps(metadata))
    return path


def skill_data(**changes: Any) -> dict[str, Any]:
    """What the original kept of a skill; "Collect Wood" without changes."""
    told = {
        "skill_name": "Collect Wood",
        "requirements": {},
        "consumption": {},
        "gain": {"wood": "lambda n: 4*n + 0"},
    }
    network_number = f"def task_network_number():\n    return {changes.pop('number', 0)}\n"
    functions = [changes.pop("done", DONE), changes.pop("reward", REWARD), network_number]
    return {
        "skill_with_consumption": {**told, **changes},
        "functions": functions,
        "code": "```python\n…```",
        "iteration": 0,
    }


def write_books(old: Path, skills: Mapping[int, tuple[str, dict]]) -> None:
    """scheduler_state.json and global_latest.pkl: by expert index, a name and its skill's data."""
    state = {
        "skills": {
            name.replace(" ", "_"): {
                "skill_name": name,
                "skill_data": data,
                "status": "completed",
                "expert_idx": index,
            }
            for index, (name, data) in skills.items()
        },
        "next_expert_idx": len(skills),
    }
    (old / "scheduler_state.json").write_text(json.dumps(state, indent=2))
    known = {
        name: {
            "expert_idx": index,
            "path": f"skills/{index}_{name.replace(' ', '_')}/",
            "total_frames": 1000,
            "metrics": {"success_rate": np.float64(0.75)},
        }
        for index, (name, _) in skills.items()
    }
    (old / "checkpoints").mkdir(exist_ok=True)
    path = old / "checkpoints" / "global_latest.pkl"
    path.write_bytes(pickle.dumps({"skills": known, "db": {}}))


def parallel_graph(old: Path, names: Sequence[str] = NAMES) -> Path:
    """A graph of the parallel code with an expert per name and its books."""
    old.mkdir(parents=True, exist_ok=True)
    for index, name in enumerate(names):
        write_expert(old, index, name, frames=1000 + index)
    write_books(old, {index: (name, {}) for index, name in enumerate(names)})
    return old


def write_orbax(policies: Path, experts: Mapping[int, int], step: int, **said: Any) -> Path:
    """A `<i>_policies` folder with a train state, as the original's checkpoint manager wrote it."""
    policies.mkdir(parents=True, exist_ok=True)
    params = mixture(experts)
    first = next(iter(params["params"]))
    state = {
        "params": params,
        "opt_state": [None, {"mu": {first: params["params"][first]}}],
        "step": np.int32(7),
    }
    with ocp.PyTreeCheckpointer() as checkpointer:
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
        folder = policies.absolute() / "policies"
        with ocp.CheckpointManager(folder, checkpointer, options) as manager:
            manager.save(step, state)
    lines = [f"{name.upper()}: {value}" for name, value in said.items()]
    (policies / "config.yaml").write_text("\n".join([*lines, "MODULE_PATH: null", ""]))
    return policies


def sequential_graph(old: Path) -> Path:
    """Two iterations of the sequential code: the second has both experts in one tree."""
    wood = skill_data()
    table = {
        **skill_data(
            number=1, skill_name="Place Table", gain={"near_table": {"expression": "lambda n: 1"}}
        ),
        "iteration": 1,
    }
    write_orbax(old / "0" / "0_policies", {0: 50}, 100, trained_timesteps=640, activation="tanh")
    write_orbax(old / "1" / "1_policies", {0: 60, 1: 61}, 200, TOTAL_TIMESTEPS=2000)
    (old / "0" / "skills.json").write_text(json.dumps({"data": {"Collect Wood": wood}}))
    skills = {"Collect Wood": wood, "Place Table": table}
    (old / "1" / "skills.json").write_text(json.dumps({"data": skills}))
    return old


def link(path: Path, target: Path) -> None:
    """A link in the place of a file or folder, which is moved to `target`."""
    path.rename(target)
    path.symlink_to(target)


def planned(old: Path, **options: Any) -> Plan:
    """The plan for an old graph, with a trial that admits all code that the gate does."""

    def vouch(subjects):
        return [Verdict(digest=subject.digest) for subject in subjects]

    return plan_migration(old, trial=options.pop("trial", vouch), **options)
