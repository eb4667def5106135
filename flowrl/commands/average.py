"""`flowrl average`: a mean of versions of one expert; what loads jax is imported late."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from flowrl import storage
from flowrl.averaging.rules import Rule, average
from flowrl.averaging.state import from_row, to_row
from flowrl.config import RuleName
from flowrl.errors import ConfigError, ExpertCorruptError, FileRefusedError
from flowrl.experts import manifest as manifests
from flowrl.experts.store import ExpertStore
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import read_run


@dataclass(frozen=True, kw_only=True)
class AverageCommand:
    """Average versions of one expert into a new checkpoint.

    Examples:
      flowrl average exp/demo/skills/0_Collect_Wood/expert_0_policy/v* -o mean
      flowrl average --rule geometric_median -o mean a/expert_0 b/expert_0 c/expert_0 --unrelated
    """

    experts: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="EXPERT")]
    """Experts: versions in a graph, what a run left in its policies, or exported files."""
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
          ConfigError: experts of other shapes, with a NaN or without a common ancestor.
          FileRefusedError: the new folder exists.
        """
        from flowrl.experts import checkpoint

        weights = self._weights()
        if os.path.lexists(self.output):
            raise FileRefusedError(f"{self.output} exists already; name another folder")
        origin = self._common_origin()
        trees = [_read(expert) for expert in self.experts]
        rows = np.stack([*self._rows(trees)])
        mean: Any = from_row(average(Rule(name=self.rule), rows, weights), trees[0])
        checkpoint.save_expert(self.output, mean)
        report = {
            "output": str(self.output),
            "rule": self.rule,
            "experts": [*map(str, self.experts)],
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
        if count < 2 or len({expert.resolve() for expert in self.experts}) < count:
            raise ConfigError("name two experts or more, none of them twice; --weights says more")
        try:
            weights = [float(word) for word in self.weights.split(",") if self.weights]
        except ValueError:
            weights = [0.0] * (count + 1)
        if weights and not (len(weights) == count and np.isfinite(weights).all()):
            raise ConfigError(
                f"--weights is {self.weights!r}, not {count} numbers with commas between them"
            )
        Rule(name=self.rule).check(count, weighted=bool(weights))
        return np.array(weights) if weights else None

    def _common_origin(self) -> str | None:
        """The id of the run that made the first version of all; None if `unrelated` and unknown."""
        origins = {expert: _origin(expert.resolve()) for expert in self.experts}
        first = origins[self.experts[0]]
        others = [expert for expert in self.experts if not first or origins[expert] != first]
        if others and not self.unrelated:
            raise ConfigError(
                f"{others[0]} and the others have no common ancestor that their graph names, so "
                "their mean is most likely good for nothing; --unrelated takes it all the same"
            )
        return None if others else first

    def _rows(self, trees: Sequence[Any]) -> Iterator[np.ndarray]:
        for expert, tree in zip(self.experts, trees, strict=True):
            try:
                yield to_row(tree, trees[0])
            except ConfigError as error:
                what = f"{expert} is not of the form of {self.experts[0]}"
                raise ConfigError(f"{what}: {error}") from error
            if not all(np.isfinite(leaf).all() for leaf in tree.values()):
                raise ConfigError(f"{expert} has a NaN or an infinite number; leave it out")


def _read(expert: Path) -> Any:
    """The arrays of an expert by path; raises as `checkpoint.load_expert` does."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    from flowrl.experts import checkpoint

    if expert.is_dir():
        return checkpoint.load_expert(expert, checkpoint.stored_like(expert))
    try:
        return load(storage.read_bytes(expert))
    except SafetensorError as error:
        raise ExpertCorruptError(f"{expert} cannot be read ({error}); export it again") from error


def _origin(folder: Path) -> str | None:
    """The id of the run that made the first version of an expert, if the folder's graph knows it.

    A version that a manifest names is what was committed, or ExpertCorruptError is raised.
    """
    layout = GraphPaths(folder.parent.parent.parent.parent)
    if layout.checkpoints.is_dir():
        store = ExpertStore(layout)
        history = (known for _, known in manifests.read_history(layout) if known)
        for known in (store.manifest(), *history):
            for version in known.experts.values():
                if store.path_of(version) == folder:
                    store.verify(version)
                    return version.lineage[0].run_id if version.lineage else None
    place = RunPaths(folder.parent.parent.parent, 0)
    if not place.run_json.exists():
        return None
    run = read_run(place)
    place = replace(place, expert=run.expert)
    firsts = {each.index: each.lineage[0].run_id for each in run.ancestors if each.lineage}
    firsts.setdefault(run.expert, run.run_id)
    finals = {place.final(local): firsts.get(each) for local, each in enumerate(run.experts)}
    return finals.get(folder)
