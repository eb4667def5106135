"""Whether experts depend on what starts the runs: `python scripts/compare_launchers.py`.

The same graph is trained once under each launcher, with the same seed and one skill at a time, in
folders below `--folder`. Two skills at a time merge in the order in which they end, which is a
matter of time. The shards of the environments are as many everywhere: else there are as many as a
run has CPUs, and they decide which worlds are drawn. Slurm and Ray are started on this machine.
Printed is the content digest of every expert, and the exit code is 1 where two differ.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flowrl.experts import manifest
from flowrl.paths import GraphPaths

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.launchers import ray_cluster, slurm_cluster

LAUNCHERS = ("local", "tmux", "slurm", "ray")
MISSING = {"slurm": slurm_cluster.missing, "ray": ray_cluster.missing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("exp/launchers"))
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=LAUNCHERS)
    parser.add_argument("--max_nodes", type=int, default=9, help="skills of the graph")
    words = parser.parse_args()
    for name in words.launchers:
        if why := MISSING.get(name, str)():
            raise SystemExit(f"--launchers {name}: {why}")
    digests = {name: trained(words.folder, name, words.max_nodes) for name in words.launchers}
    table = Table("expert", *digests)
    for index in sorted({index for found in digests.values() for index in found}):
        table.add_row(str(index), *(found.get(index, "-")[:12] for found in digests.values()))
    Console().print(table)
    if any(found != digests[words.launchers[0]] for found in digests.values()):
        raise SystemExit("the experts differ")


def trained(folder: Path, launcher: str, skills: int) -> dict[int, str]:
    """Train the graph, or go on with it; returns the content digest of each expert."""
    graph = folder.absolute() / launcher
    with engine(launcher) as flags:
        subprocess.run(
            (
                *(sys.executable, "-m", "flowrl", "train", str(graph), f"--launcher={launcher}"),
                *("--seed=3", f"--max_nodes={skills}", "--max_parallel_skills=1"),
                *("--total_timesteps=1e6", "--success_state_rate=0.9", "--env_shards=2", *flags),
            ),
            check=True,
        )
    experts = manifest.read(GraphPaths(graph)).experts
    return {index: version.content for index, version in experts.items()}


@contextlib.contextmanager
def engine(launcher: str) -> Iterator[tuple[str, ...]]:
    """What the launcher speaks to, for the length of the block; yields its flags."""
    match launcher:
        case "slurm":
            with tempfile.TemporaryDirectory() as folder, slurm_cluster.cluster(Path(folder)):
                yield ()
        case "ray":
            with ray_cluster.ray_cluster() as cluster:
                yield (f"--ray_address={cluster.address}",)
        case _:
            yield ()


if __name__ == "__main__":
    main()
