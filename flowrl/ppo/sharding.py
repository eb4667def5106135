"""Placement of a run's shards: one device, several, or several processes with devices each.

The environments are split into S shards with keys, worlds and shuffles of their own, and what is
drawn depends on S alone. Devices only say where a shard is computed: each holds S / D of them and
a copy of all parameters. With one device every function here does nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from flowrl.config import PPOConfig, num_shards
from flowrl.errors import ConfigError
from flowrl.launchers.sandbox import HOST_DEVICES
from flowrl.program_cache import Device
from flowrl.runs import threads_for

logger = logging.getLogger(__name__)
_AXIS = "device"
COPIED, SPLIT = P(), P(_AXIS)


@dataclass(frozen=True, slots=True)
class Axis:
    """Reductions over the devices of a run, in a function that runs on all of them.

    Without a name there is one device, and each is the identity.
    """

    name: str | None = None

    def mean(self, tree: Any) -> Any:
        """The means of leaves of any shape, element by element."""
        return tree if self.name is None else jax.lax.pmean(tree, self.name)

    def total(self, tree: Any) -> Any:
        """The sums of leaves of any shape, element by element."""
        return tree if self.name is None else jax.lax.psum(tree, self.name)

    def greatest(self, leaf: jax.Array) -> jax.Array:
        """The greatest numbers, element by element."""
        return leaf if self.name is None else jax.lax.pmax(leaf, self.name)

    def any(self, leaf: jax.Array) -> jax.Array:
        """bool of any shape: whether it is true on any device, element by element."""
        return self.greatest(leaf.astype(np.int32)) > 0

    def gather(self, leaf: jax.Array, *, axis: int) -> jax.Array:
        """The leaves of all devices, one after another along `axis`."""
        if self.name is None:
            return leaf
        return jax.lax.all_gather(leaf, self.name, axis=axis, tiled=True)


ONE_DEVICE = Axis()


@dataclass(frozen=True)
class Placement:
    """The devices of a run, in order; the shards are dealt to them in order, as many to each."""

    devices: tuple[Device, ...]  # of all processes
    num_shards: int  # S, a multiple of their number

    @property
    def shards_each(self) -> int:
        """Shards of each device."""
        return self.num_shards // len(self.devices)

    @cached_property
    def local(self) -> tuple[Device, ...]:
        """The devices of this process, in order."""
        return tuple(d for d in self.devices if d.process_index == jax.process_index())

    @cached_property
    def local_shards(self) -> tuple[tuple[int, Device], ...]:
        """The shards that lie with this process, in order, and the device of each."""
        homes = enumerate(d for d in self.devices for _ in range(self.shards_each))
        return tuple((shard, device) for shard, device in homes if device in self.local)

    @cached_property
    def mesh(self) -> Mesh | None:
        """One axis of devices; None for one device, whose programs know of no others."""
        return Mesh(np.array(self.devices), (_AXIS,)) if len(self.devices) > 1 else None

    @property
    def axis(self) -> Axis:
        """The reductions over the devices, for functions under `spread`."""
        return Axis(_AXIS if self.mesh else None)

    def spread(self, function: Callable[..., Any], specs: tuple[P, ...]) -> Callable[..., Any]:
        """The function on all devices at once, its arguments lying as `specs` say.

        Each device sees its part of what is split. What it returns must be the same on all.
        """
        if self.mesh is None:
            return function
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=specs, out_specs=COPIED, check_vma=False
        )

    def shardings(self, specs: tuple[P, ...]) -> tuple[NamedSharding, ...]:
        """Return the sharding of each argument of a function under `spread`; () with one device."""
        return () if self.mesh is None else tuple(NamedSharding(self.mesh, s) for s in specs)

    def joined_like(self, tree: Any) -> Any:
        """Shapes of what `join` makes of trees with these shapes."""
        number = len(self.devices)

        def joined(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((leaf.shape[0] * number, *leaf.shape[1:]), leaf.dtype)

        return tree if self.mesh is None else jax.tree.map(joined, tree)

    def join_shards(self, parts: Sequence[Any]) -> tuple[Any, ...]:
        """Trees of the local shards as trees over all devices, as many as each device has shards.

        Leaves `[n, …]` become `[D × n, …]`, each part where it lies: nothing is copied.
        """
        if self.mesh is None:
            return tuple(parts)
        sharding = NamedSharding(self.mesh, SPLIT)

        def joined(*leaves: jax.Array) -> jax.Array:
            rows, *rest = leaves[0].shape
            shape = (rows * len(self.devices), *rest)
            return jax.make_array_from_single_device_arrays(shape, sharding, list(leaves))

        each = self.shards_each
        return tuple(jax.tree.map(joined, *parts[first::each]) for first in range(each))

    def lay(self, tree: Any, spec: P) -> Any:
        """Arrays that every process has, COPIED to all devices, or with their rows SPLIT."""
        if self.mesh is None:
            return tree
        sharding = NamedSharding(self.mesh, spec)

        def laid(leaf: Any) -> jax.Array:
            host = np.asarray(leaf)
            return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)

        return jax.tree.map(laid, tree)

    def copies(self, tree: Any) -> dict[Device, Any]:
        """The copy on each local device of what is on every device; nothing is copied."""
        if self.mesh is None:
            return {self.devices[0]: tree}
        leaves, structure = jax.tree.flatten(tree)
        parts = [{part.device: part.data for part in leaf.addressable_shards} for leaf in leaves]
        return {
            device: jax.tree.unflatten(structure, [part[device] for part in parts])
            for device in self.local
        }

    def put(self, tree: Any, device: Device) -> Any:
        """The tree on this device."""
        return tree if self.mesh is None else jax.device_put(tree, device)


def verify_distributed_setup(config: PPOConfig) -> PPOConfig:
    """Make sure that a run's devices are there and alike; log which shards lie on which.

    Returns the configuration with every number set.

    Raises:
      ConfigError: there are fewer devices, or of several kinds, or environments cannot be shared.
    """
    check_backend()
    if config.num_devices == 0 and jax.device_count() == 1:
        logger.warning("--num_devices 0: there is one device, so the run trains on one")
    config = with_shards(config)
    check_devices(config.num_devices)
    if config.precision == "bf16" and jax.default_backend() == "cpu":
        raise ConfigError("--precision bf16 is for GPUs, a CPU is slower with it; leave it out")
    config.check()
    placement = place(config)
    kinds = {device.device_kind for device in placement.devices}
    if len(kinds) > 1:
        named = ", ".join(f"{device} is a {device.device_kind}" for device in placement.devices)
        raise ConfigError(f"--num_devices {config.num_devices}: the devices differ ({named})")
    for number, device in enumerate(placement.devices):
        first = number * placement.shards_each
        logger.debug(
            "device %s (%s, process %d): shards %d to %d of %d environments each",
            device,
            device.device_kind,
            device.process_index,
            first,
            first + placement.shards_each - 1,
            shard_size(config),
        )
    logger.info(
        "%d environments in %d %s on %d %s",
        config.num_envs,
        placement.num_shards,
        "shard" if placement.num_shards == 1 else "shards",
        len(placement.devices),
        "device" if len(placement.devices) == 1 else "devices",
    )
    return config


def check_backend() -> None:
    """Make sure that JAX has a device.

    Raises ConfigError if JAX_PLATFORMS names what is not here, or a driver fails.
    """
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter of JAX_PLATFORMS=cuda
        platforms = os.environ.get("JAX_PLATFORMS", "")
        why = str(error).partition("\n")[0][:200] or "no backend of these can be used"
        raise ConfigError(
            f"JAX finds no device (JAX_PLATFORMS={platforms!r}: {why}); unset JAX_PLATFORMS to "
            "train on the CPU, or install the driver and '.[cuda]'"
        ) from error


def check_devices(wanted: int, flag: str = "--num_devices") -> None:
    """Make sure that every process has its part of the devices; `flag` asked for them.

    Raises ConfigError if there are fewer.
    """
    each, there = wanted // jax.process_count(), jax.local_device_count()
    if each > there:
        here = f"there are {there} ({jax.local_devices()[0].device_kind})"
        remedy = f"; to try it on a CPU, set XLA_FLAGS={HOST_DEVICES}{each}"
        on_cpu = jax.default_backend() == "cpu"
        raise ConfigError(f"{flag} {wanted}: {here}; lower it{remedy if on_cpu else ''}")


def place(config: PPOConfig) -> Placement:
    """The placement of a configuration's shards on the first devices of every process."""
    each = config.num_devices // jax.process_count()
    devices = [
        device
        for process in range(jax.process_count())
        for device in [d for d in jax.devices() if d.process_index == process][:each]
    ]
    return Placement(tuple(devices), num_shards(config))


def with_shards(config: PPOConfig) -> PPOConfig:
    """The configuration with the machine's numbers where the user gave none."""
    devices, threads = config.num_devices or jax.device_count(), config.acting_threads
    if threads is None:
        on_cpu = jax.default_backend() == "cpu"  # a GPU steps all at once
        cpus = len(os.sched_getaffinity(0)) // config.replicas if on_cpu else 1
        threads = threads_for(replace(config, num_devices=devices), cpus)
    config = replace(config, num_devices=devices, acting_threads=threads)
    return replace(config, env_shards=num_shards(config))


def shard_size(config: PPOConfig) -> int:
    """Environments of one shard."""
    return config.num_envs // num_shards(config)
