"""Several processes that train one run together, on one machine or on several.

Every process runs the same program with the same command line. Process 0 holds the coordinator
through which they find one another, and it alone writes. What they compute is exchanged by gloo on
CPUs and by NCCL on GPUs.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax
from jax._src import distributed  # its client has the barrier and the keys; nothing public has

from flowrl.config import TrainConfig, to_argv
from flowrl.errors import EXIT_RESUMABLE, ConfigError
from flowrl.program_cache import digest_of_sources

logger = logging.getLogger(__name__)
_START_SECONDS = 300
_LOOPBACK = "127.0.0.1"


@contextmanager
def connected(config: TrainConfig) -> Iterator[TrainConfig]:
    """Connect to the other processes, and start them if none has a coordinator to find.

    Inside of the block JAX sees the devices of all. If another process is lost, this one ends at
    once with exit code 85: its next start goes on from the checkpoint.

    Raises:
      ConfigError: the coordinator's port is in use, or the processes' command lines or sources
        differ.
    """
    if config.num_processes == 1:
        yield config
        return
    others: list[subprocess.Popen[bytes]] = []
    if config.coordinator is None:
        config = replace(config, coordinator=f"{_LOOPBACK}:{_free_port()}", process_id=0)
        others = [_start(replace(config, process_id=i)) for i in range(1, config.num_processes)]
    try:
        _connect(config)
        yield config
        for other in others:
            other.wait()
    except (jax.errors.JaxRuntimeError, PeerLostError) as error:
        # JAX's own exit would wait for the process that is lost.
        logger.error("another process of this run is lost: %s", str(error).partition("\n")[0])
        _end(others)
        os._exit(EXIT_RESUMABLE)
    finally:
        _end(others)


class PeerLostError(Exception):
    """Another process of the run has ended."""


def meet() -> None:
    """Wait until all processes are here.

    gloo gives up 30 s after the first process began the first exchange, so all meet here when
    their programs are compiled.

    Raises:
      PeerLostError: one of them has ended.
    """
    number = jax.process_count()
    if number > 1:
        found = distributed.global_state.client.get_live_nodes(list(range(number)))
        if missing := [str(process) for process in range(number) if process not in found]:
            raise PeerLostError(f"no sign of life of process {', '.join(missing)}")


def _connect(config: TrainConfig) -> None:
    assert config.coordinator is not None
    each = config.ppo.num_devices // config.num_processes
    own = range(config.process_id * each, (config.process_id + 1) * each)
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM away
    jax.config.update("jax_enable_recoverability", True)  # the end of a peer is not this one's
    if config.process_id == 0:
        _refuse_used_port(config.coordinator)
    jax.distributed.initialize(
        coordinator_address=config.coordinator,
        num_processes=config.num_processes,
        process_id=config.process_id,
        local_device_ids=list(own) if each and _on_loopback(config) else None,
        initialization_timeout=_START_SECONDS,
        heartbeat_timeout_seconds=config.peer_timeout,
        coordinator_bind_address=config.coordinator,
    )
    _refuse_differences(config)


def _refuse_differences(config: TrainConfig) -> None:
    """Make sure that all processes have the same command line and sources."""
    same = replace(config, process_id=0)
    said = f"{digest_of_sources()}\n{to_argv(same)}"
    digest = hashlib.sha256(said.encode()).hexdigest()
    client = distributed.global_state.client
    if config.process_id == 0:
        client.key_value_set("flowrl/program", digest)
    elif client.blocking_key_value_get("flowrl/program", _START_SECONDS * 1000) != digest:
        raise ConfigError(
            f"process {config.process_id} has another command line or other sources than "
            "process 0; start all with the same"
        )


def _start(config: TrainConfig) -> subprocess.Popen[bytes]:
    """Another process of the run; it inherits the run's lock."""
    argv = (sys.executable, "-m", "flowrl.ppo_flow", *to_argv(config))
    return subprocess.Popen(argv, close_fds=False)


def _end(others: list[subprocess.Popen[bytes]]) -> None:
    for other in others:
        if other.poll() is None:
            other.kill()
            other.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((_LOOPBACK, 0))
        return int(found.getsockname()[1])


def _refuse_used_port(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_server((host, int(port))):
            pass
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"--coordinator {address}: process 0 cannot listen there ({error}); choose a free port "
            "of an address of this machine, as 127.0.0.1:29500"
        ) from error


def _on_loopback(config: TrainConfig) -> bool:
    return (config.coordinator or "").startswith(_LOOPBACK)
