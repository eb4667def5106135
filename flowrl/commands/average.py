"""`flowrl average` and `export`: experts as files of their own; what loads jax is imported late."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import numpy as np
import tyro

from flowrl import storage
from flowrl.arguments import Count, GraphCommand, Needs
from flowrl.averaging.rules import Rule, average
from flowrl.averaging.state import from_row, to_row
from flowrl.config import RuleName
from flowrl.console import print_report
from flowrl.errors import ConfigError, ExpertCorruptError, FileRefusedError
from flowrl.experts import manifest as manifests
from flowrl.experts.store import ExpertStore
from flowrl.output import check_output
from flowrl.paths import GraphPaths, RunPaths, existing_graph, is_graph
from flowrl.runs import read_run
from flowrl.storage.arrays import read_tensors

_NAME_ONE = "name an expert's folder, or a file *.safetensors of flowrl export"


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
    trimmed: Annotated[float | None, Needs(rule="trimmed_mean")] = None
    """Share of the experts that trimmed_mean leaves out at each end, below 0.5 (default: 0.2)."""
    faulty: Annotated[Count | None, Needs(rule=("krum", "multi_krum"))] = None
    """How many experts may be faulty, for krum and multi_krum (default: 1)."""
    weights: str = ""
    """A number for each expert, such as 1,3 (default: all count alike)."""
    unrelated: bool = False
    """Also average experts of which no common ancestor is known."""
    json: bool = False
    """Print JSON instead of lines."""

    def __call__(self) -> int:
        """Average, and print what; raises ConfigError for experts that cannot be averaged."""
        from flowrl.experts import checkpoint

        for expert in self.experts:
            if not expert.exists():
                raise ConfigError(f"{expert} does not exist; name a version or a file")
        given = {"trimmed": self.trimmed, "faulty": self.faulty}
        said = {name: value for name, value in given.items() if value is not None}
        rule, weights = Rule(name=self.rule, **said), self._weights()
        rule.check(len(self.experts), weighted=weights is not None)
        if os.path.lexists(self.output):
            raise FileRefusedError(f"{self.output} exists already; name another folder")
        check_output(self.output)
        for expert in self.experts:
            known = is_graph(expert) or expert.suffix == ".safetensors"
            if not known and not (expert.is_dir() and checkpoint.holds_expert(expert)):
                raise ConfigError(f"{expert} is no expert; {_NAME_ONE}")
        origin = self._common_origin()
        trees = [_read(expert) for expert in self.experts]
        rows = [self._row(number, trees) for number in range(len(trees))]
        mean: Any = from_row(average(rule, np.stack(rows), weights), trees[0])
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
        print_report(report, [line], as_json=self.json)
        return 0

    def _weights(self) -> np.ndarray | None:
        count = len(self.experts)
        if count < 2:
            raise ConfigError("only one expert is named; name two or more")
        places = [os.path.realpath(expert) for expert in self.experts]
        for number, place in enumerate(places):
            if place in places[:number]:
                more = "name it once (--weights makes one count more)"
                raise ConfigError(f"{self.experts[number]} is named twice; {more}")
        if not self.weights:
            return None
        try:
            weights = np.array([float(word) for word in self.weights.split(",")])
        except ValueError:
            weights = np.array([])
        if len(weights) == count and np.isfinite(weights).all():
            return weights
        needed = f"{count} numbers with commas between them, as 1,3"
        raise ConfigError(f"--weights is {self.weights!r}, not {needed}")

    def _common_origin(self) -> str | None:
        """The id of the run that made the first version of all; None if `unrelated` and unknown."""
        if graph := next((expert for expert in self.experts if is_graph(expert)), None):
            raise ConfigError(f"{graph} is a graph; name a version of an expert in it")
        origins = {expert: _origin(Path(os.path.realpath(expert))) for expert in self.experts}
        first = origins[self.experts[0]]
        others = [expert for expert in self.experts if not first or origins[expert] != first]
        if others and not self.unrelated:
            raise ConfigError(
                f"{others[0]} and the others have no common ancestor that their graph names, so "
                "their mean is most likely good for nothing; --unrelated takes it all the same"
            )
        return None if others else first

    def _row(self, number: int, trees: list[Any]) -> np.ndarray:
        """The numbers f64 `[d]` of an expert."""
        expert = self.experts[number]
        try:
            row = to_row(trees[number], trees[0])
        except ConfigError as error:
            what = f"{expert} is not of the form of {self.experts[0]}"
            raise ConfigError(f"{what}: {error}") from error
        if not np.isfinite(row).all():
            raise ConfigError(f"{expert} has a NaN or an infinite number; leave it out")
        return row


def _read(expert: Path) -> Any:
    """The arrays of an expert by path; raises as `checkpoint.load_expert` does."""
    from flowrl.experts import checkpoint

    if expert.is_dir():
        return checkpoint.load_expert(expert, checkpoint.stored_like(expert))
    tree = read_tensors(storage.read_bytes(expert), place=str(expert), remedy=_NAME_ONE)
    if odd := next((name for name in tree if not tree[name].size or _is_inside(name, tree)), None):
        raise ExpertCorruptError(
            f"{expert} has {odd!r}, which is no array of an expert; {_NAME_ONE}"
        )
    return tree


def _is_inside(name: str, tree: Mapping[str, Any]) -> bool:
    """Return whether an array's path goes through another array."""
    return any(str(part) in tree for part in PurePosixPath(name).parents)


def _origin(folder: Path) -> str | None:
    """The id of the run that made the first version of an expert, if the folder's graph knows it.

    A version that a manifest names is what was committed, or ExpertCorruptError is raised.
    """
    graph_paths = GraphPaths(folder.parent.parent.parent.parent)
    if graph_paths.checkpoints.is_dir():
        store = ExpertStore(graph_paths)
        history = (known for _, known in manifests.read_history(graph_paths) if known)
        known = (each for one in (store.manifest(), *history) for each in one.experts.values())
        if version := next((each for each in known if store.path_of(each) == folder), None):
            store.verify(version)
            return version.lineage[0].run_id if version.lineage else None
    run_paths = RunPaths(folder.parent.parent.parent, 0)
    if not run_paths.run_json.exists():
        return None
    run = read_run(run_paths)
    run_paths = replace(run_paths, expert=run.expert)
    firsts = {each.index: each.lineage[0].run_id for each in run.ancestors if each.lineage}
    firsts.setdefault(run.expert, run.run_id)
    return next(
        (firsts.get(n) for i, n in enumerate(run.experts) if run_paths.final(i) == folder), None
    )


@dataclass(frozen=True, kw_only=True)
class ExportCommand(GraphCommand):
    """Write the merged agent to a folder of plain files.

    In Python, `flowrl.load_agent("agent").play("Collect Wood")` then acts in a fresh world.

    Examples:
      flowrl export exp/demo -o agent
    """

    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("agent")
    """The new folder: agent.json, experts as safetensors, and the plan of each skill."""

    def __call__(self) -> int:
        """Export, and print what."""
        graph_paths = existing_graph(self.graph_path)
        if not os.path.lexists(self.output):
            check_output(self.output)
        from flowrl.agent import export_agent

        record = export_agent(graph_paths, self.output)
        names = ", ".join(each.skill for each in record.experts)
        line = f"{self.output}: the experts of generation {record.generation} for "
        print_report({}, [f"{line}{record.env_name}: {names}"], as_json=False)
        return 0
