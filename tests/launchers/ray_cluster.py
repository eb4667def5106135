"""A real Ray on this machine: a head with its job server, and further nodes."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.launchers.slurm_cluster import free_ports
from tests.waiting import until

PROGRAM = shutil.which("ray") or str(Path(sys.executable).with_name("ray"))


def missing() -> str:
    """Return why Ray cannot be had here, or ""."""
    return "" if Path(PROGRAM).exists() else "Ray is missing: pip install 'ray[default]'"


class RayCluster:
    """A head of two CPUs; every process of it has the cluster's folder on its command line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self.dashboard = free_ports(2)
        self.address = f"http://127.0.0.1:{self.dashboard}"
        self._env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        # A lost node is found after three seconds, not after thirty.
        health = {"initial_delay_ms": "1000", "period_ms": "1000", "failure_threshold": "3"}
        self._env |= {f"RAY_health_check_{name}": value for name, value in health.items()}

    def start_head(self) -> None:
        """Start the head, and wait until its job server answers."""
        self._ray(
            *("start", "--head", f"--port={self.port}", f"--dashboard-port={self.dashboard}"),
            *("--include-dashboard=true", "--num-cpus=2", f"--temp-dir={self.folder}"),
            *("--disable-usage-stats", "--object-store-memory=100000000"),
        )
        until(self.answers, every=0.1)

    def start_node(self, *resources: str) -> set[int]:
        """Start a node of two CPUs; returns the pids of its processes."""
        before = self.pids()
        self._ray(
            *("start", f"--address=127.0.0.1:{self.port}", "--num-cpus=2", *resources),
            *("--disable-usage-stats", "--object-store-memory=100000000"),
        )
        time.sleep(1.0)
        return self.pids() - before

    def answers(self) -> bool:
        """Return whether the job server answers."""
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(f"{self.address}/api/jobs/", timeout=5).status == 200
        return False

    def pids(self) -> set[int]:
        """The processes of the cluster."""
        word, found = str(self.folder), set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(word in each for each in process.cmdline()) or (
                    process.name().startswith("ray::")
                ):
                    found.add(process.pid)
        return found

    def kill(self, pids: set[int] | None = None) -> None:
        """Kill processes, or all."""
        for pid in self.pids() if pids is None else pids:
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).kill()

    def _ray(self, *words: str) -> None:
        done = subprocess.run(
            [PROGRAM, *words], env=self._env, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """A cluster for the length of the block; its sockets need a short path."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as name:
        cluster = RayCluster(Path(name))
        try:
            cluster.start_head()
            yield cluster
        finally:
            until(lambda: cluster.kill() or not cluster.pids(), every=0.1)
