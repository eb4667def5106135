"""Several processes that train one run together, on one machine or on several.

Every process runs the same program with the same command line. Process 0 holds the coordinator
through which they find one another, and it alone writes. What they compute is exchanged by gloo on
CPUs and by NCCL on GPUs.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import jax
from jax._src import distributed  # its client has the barriers and the keys; nothing public has

from flowrl import storage
from flowrl.command_line import to_argv
from flowrl.errors import EXIT_RESUMABLE, ConfigError, FlowrlError
from flowrl.launchers import child
from flowrl.launchers.child import Child
from flowrl.program_cache import digest_of_sources
from flowrl.runs import TrainConfig

logger = logging.getLogger(__name__)
PROGRAM = ("-m", "flowrl.ppo_flow")
_START_SECONDS = 300
_GRACE_SECONDS = 3
_SIGNALLED = 128  # and more: srun's exit codes for a process that a signal has killed
_LOOPBACK = "127.0.0.1"
_OF_PROCESSES = re.compile(r"PATH|HOME|USER|LANG|TZ|TMPDIR|(XDG|JAX|XLA|NCCL|FLOWRL|PYTHON|LD)\w+")
_LIBC = ctypes.CDLL(None)


@contextmanager
def connected(config: TrainConfig, stop: Callable[[], int | None]) -> Iterator[TrainConfig]:
    """Connect to the other processes, and start them if none has a coordinator to find.

    Inside of the block JAX sees the devices of all. If another process is lost, this one ends at
    once with exit code 85: its next start goes on from the checkpoint.

    `stop` returns an exit code to stop with, or None; it is called while others are waited for.

    Raises ConfigError if the processes' command lines, modules or sources differ.
    """
    if config.num_processes == 1:
        yield config
        return
    others: list[Child] = []
    config = replace(config, ppo=config.ppo_of_all())
    if config.coordinator is None:
        start, host = _starter(config)
        config = replace(config, coordinator=f"{host}:{_free_port(host)}", process_id=0)
        others = [start(replace(config, process_id=i)) for i in range(1, config.num_processes)]
    try:
        _connect(config, others, stop)
        yield config
        _leave(config)
    except (jax.errors.JaxRuntimeError, PeerLostError) as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise
        logger.error("another process of this run is lost: %s", str(error).partition("\n")[0])
        # JAX's own exit would wait for the process that is lost.
        os._exit(_exit_code(others))
    except FlowrlError:
        _leave(config)
        raise
    finally:
        child.end(others, grace_seconds=_GRACE_SECONDS)


class PeerLostError(Exception):
    """Another process of the run has ended."""


def meet(name: str, value: str) -> None:
    """Wait until all processes are here, and make sure that all give the same value.

    gloo gives up 30 s after the first process began the first exchange, so all meet when their
    programs are compiled.

    Raises:
      ConfigError: the values differ; every process raises it.
      PeerLostError: another process has ended.
    """
    number = jax.process_count()
    if number == 1:
        return
    client = distributed.global_state.client
    assert client is not None
    client.key_value_set(f"flowrl/{name}/{jax.process_index()}", value)
    nodes = client.get_live_nodes(list(range(number)))
    if missing := [str(process) for process in range(number) if process not in nodes]:
        raise PeerLostError(f"no sign of life of process {', '.join(missing)}")
    if len({said for _, said in client.key_value_dir_get(f"flowrl/{name}")}) > 1:
        raise ConfigError(f"the {number} processes have different {name}; start all with the same")


def _connect(config: TrainConfig, others: Sequence[Child], stop: Callable[[], int | None]) -> None:
    assert config.coordinator is not None
    each = config.ppo.num_devices // config.num_processes
    own = list(range(config.process_id * each, (config.process_id + 1) * each))
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM away
    jax.config.update("jax_enable_recoverability", True)  # the end of a peer is not this one's
    if config.process_id:
        logging.getLogger("flowrl").setLevel(logging.WARNING)  # process 0 reports
        _LIBC.signal(signal.SIGABRT, _on_abort)
    initialize = partial(
        jax.distributed.initialize,
        coordinator_address=config.coordinator,
        num_processes=config.num_processes,
        process_id=config.process_id,
        local_device_ids=own if _is_loopback(config.coordinator) else None,
        initialization_timeout=_START_SECONDS,
        heartbeat_timeout_seconds=config.peer_timeout,
        shutdown_timeout_seconds=_GRACE_SECONDS,
        coordinator_bind_address=config.coordinator,
    )
    connecting = ThreadPoolExecutor(1).submit(initialize)  # signals arrive in this thread
    while not wait([connecting], timeout=0.2).done:
        if code := stop():
            os._exit(code)  # there is nothing to save yet
        if any(other.poll() is not None for other in others):
            raise PeerLostError("it ended as it started")
    connecting.result()
    if jax.default_backend() == "cpu":
        # JAX keeps what process 0 compiled, but on a CPU no other finds its programs there.
        distributed.global_state.process_id = 0
    meet("command lines, modules or sources", common_digest(config))


def common_digest(config: TrainConfig) -> str:
    """Return a digest of what all processes of a run must have in common."""
    argv = to_argv(replace(config, process_id=0))
    digest = hashlib.sha256(f"{digest_of_sources()}\n{argv}".encode())
    for path in filter(Path.exists, (config.module_path, config.run_paths.run_json)):
        digest.update(storage.read_bytes(path))
    return digest.hexdigest()


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _on_abort(number: int) -> None:
    """Exit; JAX aborts a process when the coordinator is lost, and offers no other way."""
    os.write(2, b"flowrl: aborted: process 0 of this run is lost, or what is said above\n")
    os._exit(EXIT_RESUMABLE)


def _leave(config: TrainConfig) -> None:
    """Disconnect with the others, whom JAX would abort if process 0 left before them."""
    with suppress(jax.errors.JaxRuntimeError):
        client = distributed.global_state.client
        assert client is not None
        client.wait_at_barrier("flowrl/end", config.peer_timeout * 1000)
        if config.process_id == 0:  # wait until all others have disconnected
            client.get_live_nodes(list(range(config.num_processes)))
        jax.distributed.shutdown()


def _is_loopback(address: str) -> bool:
    """Return whether all processes are on this machine, so that each takes devices of its own."""
    host = urlsplit(f"//{address}").hostname or ""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def _starter(config: TrainConfig) -> tuple[Callable[[TrainConfig], Child], str]:
    """Return how another process of the run is started, and this host's name to it.

    In a job of Slurm with a node for each process it is on that node, else on this machine.
    """
    if os.environ.get("SLURM_JOB_NUM_NODES") == str(config.num_processes):
        return _start_on_node, socket.gethostname()
    return _start, _LOOPBACK


def _start(config: TrainConfig) -> Child:
    """Start another process of the run here; JAX has no threads yet."""
    return child.start((sys.executable, *PROGRAM, *config.command_line))


def _start_on_node(config: TrainConfig) -> Child:
    """Start another process of the run on the job's node of its number; its secrets stay here."""
    names = ",".join(filter(_OF_PROCESSES.fullmatch, os.environ))
    step = ("srun", "--nodes=1", "--ntasks=1", f"--relative={config.process_id}", "--overlap")
    words = (*step, "--input=none", "--quiet", f"--export={names}", sys.executable, *PROGRAM)
    return child.start((*words, *config.command_line))


def _exit_code(others: Sequence[Child]) -> int:
    """The exit code of a process that failed by itself, else 85; all have ended then."""
    child.end(others, grace_seconds=_GRACE_SECONDS)
    code = max((other.returncode for other in others), default=0)
    return code if 0 < code < _SIGNALLED else EXIT_RESUMABLE


def _free_port(host: str) -> int:
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])
