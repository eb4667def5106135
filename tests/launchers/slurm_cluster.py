"""A real Slurm on this machine: two nodes, no systemd, no cgroups; it is up in about a second."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.waiting import limit, until

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "scancel")
_CONF = """
ClusterName=flowrl
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={spool}/%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=100000,batch_sched_delay=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=10
KillWait=5
SlurmdParameters=config_overrides
{nodes}
PartitionName=low Nodes=n[1-{count}] Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=3
PartitionName=high Nodes=n[1-{count}] PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """Return why Slurm cannot be had here, or ""."""
    if gone := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"{', '.join(gone)} missing: apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "slurmd starts as root only"


class Cluster:
    """A controller and its nodes, each a process that can be killed and started again."""

    def __init__(self, folder: Path, *, nodes: int = 2) -> None:
        self.folder, self.nodes = folder, [f"n{number}" for number in range(1, nodes + 1)]
        self.conf = folder / "slurm.conf"
        self.spool = Path(tempfile.mkdtemp(prefix="slurmd."))  # short: sockets are made in it
        self._env = {**os.environ, "SLURM_CONF": str(self.conf)}
        (folder / "munge").mkdir(parents=True)
        (folder / "state").mkdir()
        (folder / "munge").chmod(0o711)
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        ports = free_ports(nodes + 1)
        host = socket.gethostname().partition(".")[0]
        own = "NodeName={} NodeHostname={} NodeAddr=127.0.0.1 Port={} CPUs=4 RealMemory=4000"
        lines = [own.format(n, host, port) for n, port in zip(self.nodes, ports[1:], strict=True)]
        facts = {"host": host, "user": "root", "folder": folder, "port": ports[0], "count": nodes}
        facts["spool"] = self.spool
        self.conf.write_text(_CONF.format(nodes="\n".join(lines), **facts))
        (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")

    def start(self) -> None:
        """Start everything, and wait until all nodes are idle."""
        munge = self.folder / "munge"
        self._run(
            *("munged", "--force", f"--socket={munge}/socket", f"--key-file={munge}/key"),
            *(f"--pid-file={self.folder}/munged.pid", f"--log-file={munge}/log"),
            *(f"--seed-file={munge}/seed", "--num-threads=2"),
        )
        self.start_controller(clean=True)
        for node in self.nodes:
            self.start_node(node)
        until(lambda: self.idle() == len(self.nodes), every=0.1)

    def start_controller(self, *, clean: bool = False) -> None:
        """Start the controller, and wait for the nodes that it has had before."""
        self._run("slurmctld", *(["-c"] if clean else []), "-f", str(self.conf))
        until(lambda: self.in_state("idle,mixed,allocated,unknown") == len(self.nodes), every=0.1)

    def restart_controller(self, *, clean: bool = False) -> None:
        """Kill the controller, and start it again."""
        self.kill("slurmctld")
        self.start_controller(clean=clean)
        until(lambda: self.in_state("idle,mixed,allocated") == len(self.nodes), every=0.1)

    def clear(self) -> None:
        """Kill all jobs, and wait until all nodes are idle."""
        self.call("scancel", "--full", "--quiet", "--signal=KILL", "--user=root")
        self.call("scancel", "--quiet", "--user=root")
        until(lambda: self.idle() == len(self.nodes), every=0.1)

    def start_node(self, name: str) -> None:
        self._run("slurmd", "-N", name)

    def idle(self) -> int:
        """Return the number of idle nodes."""
        return self.in_state("idle")

    def in_state(self, states: str) -> int:
        """Return the number of nodes in one of these states."""
        words = ["sinfo", "--noheader", "--partition=low", f"--states={states}", "--format=%D"]
        done = subprocess.run(words, env=self._env, capture_output=True, text=True, check=False)
        return sum(map(int, done.stdout.split()))

    def kill(self, name: str) -> None:
        """Kill `slurmctld` or `slurmd.n1`."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
            os.kill(int((self.folder / f"{name}.pid").read_text()), signal.SIGKILL)

    def call(self, *words: str) -> str:
        """Call a program of Slurm; returns what it prints."""
        done = subprocess.run(words, env=self._env, capture_output=True, text=True, check=True)
        return done.stdout

    def end(self) -> None:
        """Cancel all jobs, and end all processes."""
        words = ["scancel", "--full", "--quiet", "--user=root"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(words, env=self._env, check=False, timeout=10)
        for name in (*(f"slurmd.{node}" for node in self.nodes), "slurmctld", "munged"):
            file = self.folder / f"{name}.pid"
            deadline = time.monotonic() + limit(10)
            number = signal.SIGTERM
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
                while True:
                    os.kill(int(file.read_text()), number)
                    time.sleep(0.05)
                    number = signal.SIGKILL if time.monotonic() > deadline else signal.SIGTERM
            file.unlink(missing_ok=True)
        shutil.rmtree(self.spool, ignore_errors=True)

    def _run(self, *words: str) -> None:
        done = subprocess.run(
            words,
            env=self._env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (words, done.stderr)


def free_ports(count: int) -> list[int]:
    """Return ports that were free just now."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def cluster(folder: Path, *, nodes: int = 2) -> Iterator[Cluster]:
    """A cluster for the length of the block; SLURM_CONF leads to it."""
    before = os.environ.get("SLURM_CONF")
    made = Cluster(folder, nodes=nodes)
    os.environ["SLURM_CONF"] = str(made.conf)
    try:
        made.start()
        yield made
    finally:
        made.end()
        if before is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = before
