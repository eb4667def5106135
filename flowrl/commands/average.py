"""`flowrl average`: a mean of versions of one expert; what loads jax is imported late."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from flowrl.averaging.rules import Rule, average
from flowrl.averaging.state import from_row, to_row
from flowrl.config import RuleName
from flowrl.errors import ConfigError, ExpertMissingError, FileRefusedError, closest_file
from flowrl.experts import manifest as manifests
from flowrl.experts.store import ExpertStore
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import read_run

_LOCAL = re.compile(r"expert_(0|[1-9][0-9]*)")
_POLICIES = re.compile(r"(0|[1-9][0-9]*)_policies")


@dataclass(frozen=True, kw_only=True)
class AverageCommand:
    """Average versions of one expert into a new folder of the same form.

    Examples:
      flowrl average exp/demo/skills/0_Collect_Wood/expert_0_policy/v* -o mean
      flowrl average --rule geometric_median -o mean a/expert_0 b/expert_0 c/expert_0 --unrelated
    """

    experts: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="EXPERT")]
    """Folders of experts: versions in a graph, or what a run left in its policies."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """The new folder."""
    rule: RuleName = "mean"
    """How they are averaged; all but the mean bear a faulty one among enough others."""
    weights: str = ""
    """A number for each expert, such as 1,3 (default: all count alike)."""
    unrelated: bool = False
    """Also average experts of which no common ancestor is known."""
    json: bool = False
    """Print JSON instead of lines."""

    def __call__(self) -> int:
        """Average, and print what.

        Raises:
          ConfigError: experts of other shapes, with a NaN or without a common ancestor, or weights
            that are not one number for each.
          FileRefusedError: the new folder exists.
        """
        from flowrl.experts import checkpoint

        weights = self._weights()
        if os.path.lexists(self.output):
            raise FileRefusedError(f"{self.output} exists already; name another folder")
        origin = self._common_origin()
        trees = [_read(folder) for folder in self.experts]
        rows = [self._row(number, tree, trees[0]) for number, tree in enumerate(trees)]
        found = average(Rule(name=self.rule), np.stack(rows), weights)
        mean: Any = from_row(found, trees[0])
        checkpoint.save_expert(self.output, mean)
        report = {
            "output": str(self.output),
            "rule": self.rule,
            "experts": [str(folder) for folder in self.experts],
            "weights": None if weights is None else weights.tolist(),
            "origin": origin,
            "content": checkpoint.array_digest(mean),
        }
        line = f"{self.output}: the {self.rule} of {len(rows)} experts"
        line += f", all of run {origin}" if origin else ", no common ancestor is known"
        sys.stdout.write(f"{json.dumps(report, indent=2) if self.json else line}\n")
        return 0

    def _weights(self) -> np.ndarray | None:
        count = len(self.experts)
        if count < 2 or len({folder.resolve() for folder in self.experts}) < count:
            raise ConfigError("name two experts or more, none of them twice; --weights says more")
        try:
            weights = [float(word) for word in self.weights.split(",") if self.weights]
        except ValueError:
            weights = [0.0] * (count + 1)
        if weights and not (len(weights) == count and np.isfinite(weights).all()):
            raise ConfigError(
                f"--weights is {self.weights!r}, not {count} numbers; write one for each expert, "
                "with commas between"
            )
        Rule(name=self.rule).check(count, weighted=bool(weights))
        return np.array(weights) if weights else None

    def _common_origin(self) -> str | None:
        """The id of the run that made the first version of all; None if `unrelated` and unknown."""
        origins = [_origin(folder) for folder in self.experts]
        first = origins[0]
        for folder, origin in zip(self.experts, origins, strict=True):
            if first is None or origin != first:
                if self.unrelated:
                    return None
                odd = f"{self.experts[0]} and {folder}"
                raise ConfigError(
                    f"{odd} have no common ancestor that their graph names, so their mean has most "
                    "likely learned nothing; --unrelated averages them all the same"
                )
        return first

    def _row(self, number: int, tree: Any, like: Any) -> np.ndarray:
        folder = self.experts[number]
        try:
            row = to_row(tree, like)
        except ConfigError as error:
            raise ConfigError(
                f"{folder} is not of the form of {self.experts[0]}: {error}"
            ) from error
        if not np.isfinite(row).all():
            raise ConfigError(f"{folder} has a NaN or an infinite number; leave it out")
        return row


def _read(folder: Path) -> Any:
    """The arrays of an expert; raises as `checkpoint.load_expert` does."""
    from flowrl.experts import checkpoint

    if not folder.is_dir():
        raise ExpertMissingError(
            f"{folder} is no folder of an expert; name one{closest_file(folder)}"
        )
    return checkpoint.load_expert(folder, checkpoint.stored_like(folder))


def _origin(folder: Path) -> str | None:
    """The id of the run that made the first version of an expert, if the folder's graph knows it.

    A version that a manifest names is what was committed, or ExpertCorruptError is raised.
    """
    folder = folder.resolve()
    if len(folder.parents) < 4:
        return None
    layout = GraphPaths(folder.parents[3])
    if manifests.is_version_name(folder.name) and layout.checkpoints.is_dir():
        store = ExpertStore(layout)
        for known in (store.manifest(), *dict(manifests.read_history(layout)).values()):
            for version in known.experts.values() if known else ():
                if store.path_of(version) == folder:
                    store.verify(version)
                    return version.lineage[0].run_id if version.lineage else None
    local, policies = _LOCAL.fullmatch(folder.name), _POLICIES.fullmatch(folder.parents[1].name)
    place = RunPaths(folder.parents[2], int(policies[1]) if policies else 0)
    if not (local and policies and place.run_json.exists()):
        return None
    run = read_run(place)
    expert = dict(enumerate(run.experts)).get(int(local[1]))
    firsts = {each.index: each.lineage[0].run_id for each in run.ancestors if each.lineage}
    return firsts.get(expert, run.run_id if expert == run.expert else None)
