"""The program that trains one run: `python -m flowrl.ppo_flow --module_path RUN/2.py`.

Reads the generated module, run.json and the seed experts beside it; leaves the final experts
and, last of all, result.json. run.json is the configuration; a flag comes before it, and is
written down there once the run has begun.

Ends with 0 when the run is whole. It ends with 85 (SIGTERM) or 130 (Ctrl-C) when it was asked to
stop; the same command goes on with it. It ends with 2 for a wrong command line, and with 1 for
anything else, the reason in one line.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit

from flowrl import console, storage
from flowrl.errors import ConfigError
from flowrl.paths import GraphPaths
from flowrl.runs import TrainConfig

PROGRAM = "python -m flowrl.ppo_flow"


def main(argv: Sequence[str] | None = None) -> int:
    """Train one run; returns the exit code."""
    return console.run_words(lambda words: _train(TrainConfig.read(words, prog=PROGRAM)), argv)


def _train(config: TrainConfig) -> int:
    # NumPy draws new experts, small matrices: threads gain nothing there, and wait by spinning.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if config.replica is not None:
        from flowrl.replicas import trainer as replica  # it may be killed at any instant

        return replica.run(config)
    stop = console.StopSignal()
    with stop.listening():
        refuse_archive(config)
        refuse_other_form(config)
        if config.ppo.replicas > 1:
            from flowrl.replicas import averager  # and NumPy

            return averager.run(config, stop)
        if config.coordinator is not None and config.process_id == 0:
            refuse_used_port(config.coordinator)
        from flowrl.ppo import trainer  # --help does not wait for jax

        return trainer.run(config, stop)


def refuse_other_form(config: TrainConfig) -> None:
    """A run that one trainer began cannot go on with replicas, nor the other way round.

    Without `--resume`, what the other form has saved is removed.

    Raises:
      ConfigError: the run would begin anew.
    """
    alone, run_paths = config.ppo.replicas == 1, config.run_paths
    saved = [run_paths.rounds] if alone else list(run_paths.folder.glob("*_policies/resume"))
    if not config.resume:
        for folder in saved:
            storage.remove_tree(folder)
    elif any(path for folder in saved for path in folder.glob("*")):
        before = "replicas" if alone else "one trainer"
        raise ConfigError(
            f"--replicas {config.ppo.replicas}: {run_paths.folder} was begun by {before}; give "
            "--replicas as before, or --no_resume to begin anew"
        )


def refuse_archive(config: TrainConfig) -> None:
    """Raise ConfigError for the module of a merged run: its folder belongs to the graph."""
    folder = config.run_paths.folder.resolve()
    graph_paths = GraphPaths(folder.parent.parent)
    if folder.parent == graph_paths.skills and graph_paths.checkpoints.is_dir():
        raise ConfigError(
            f"--module_path {config.module_path} is of a run that is merged into the graph "
            f"{graph_paths.root}; use flowrl train-more, or copy its folder and train there"
        )


def refuse_used_port(address: str) -> None:
    """Make sure that process 0 can listen at HOST:PORT; raises ConfigError."""
    parts = urlsplit(f"//{address}")
    host, family = parts.hostname or "", socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    try:
        with socket.create_server((host, parts.port or 0), family=family):
            pass
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--coordinator {address}: process 0 cannot listen there ({error}); choose a free port "
            "of an address of this machine, as 127.0.0.1:29500"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
