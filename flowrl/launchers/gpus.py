"""The GPUs of the machine, and those that this graph may use.

The ids are nvidia-smi's: PCI bus order, which children share by `CUDA_DEVICE_ORDER=PCI_BUS_ID`
(`flowrl.launchers.sandbox`); CUDA's own default, fastest first, may number them otherwise.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowrl.errors import ConfigError
from flowrl.launchers.sandbox import HOST_DEVICES, host_devices, memory_share

TIMEOUT_SECONDS = 5.0
_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU; `id` is what CUDA_VISIBLE_DEVICES takes: an index, or a MIG slice's name."""

    id: str
    memory_mb: int  # 0: unknown
    uuid: str = ""


def visible_devices(
    gpu_ids: tuple[int, ...] = (), *, environ: Mapping[str, str] = os.environ
) -> tuple[Device, ...]:
    """The GPUs to use: those named, else those that CUDA_VISIBLE_DEVICES leaves; () is the CPU.

    There are none if nvidia-smi is missing, hangs or fails; then a named one is a ConfigError.
    """
    present = _probe()
    if gpu_ids:
        return _named(gpu_ids, present)
    if "CUDA_VISIBLE_DEVICES" in environ:
        return _left_visible(environ["CUDA_VISIBLE_DEVICES"], present)
    return present


def slots(
    devices: Sequence[Device],
    *,
    most: int | None = None,
    memory_mb: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, int]:
    """Return how many runs each GPU takes at once, by its id; raises ConfigError if one takes none.

    Args:
      most: the largest number on each; None stands for 1, or for any number that fits.
      memory_mb: the memory of one run, as the user declares it. Free memory is not measured: a
        run takes its memory only after it has compiled.
      environ: may set the part of a GPU that is for runs, XLA_PYTHON_CLIENT_MEM_FRACTION.
    """
    if memory_mb is None:
        return {device.id: most or 1 for device in devices}
    share = memory_share(environ)
    fit = {device.id: int(device.memory_mb * share) // memory_mb for device in devices}
    for device in devices:
        if not fit[device.id]:
            raise ConfigError(
                f"--gpu_memory_mb {memory_mb}: GPU {device.id} has {device.memory_mb} MB, of "
                f"which {int(device.memory_mb * share)} are for runs (0: unknown); declare less, "
                "choose other GPUs by --gpu_ids, or use --skills_per_gpu instead"
            )
    return {id: min(most or number, number) for id, number in fit.items()}


def check_devices(
    devices: Sequence[Device], *, each: int, wanted: int, environ: Mapping[str, str] = os.environ
) -> None:
    """Raise ConfigError unless a run with `each` of the GPUs can train on the `wanted` devices."""
    if devices and each > len(devices):
        there = ", ".join(device.id for device in devices)
        raise ConfigError(
            f"--devices_per_run {each}: there are {len(devices)} GPUs ({there}); lower it"
        )
    if not devices and each > 1:
        raise ConfigError(
            f"--devices_per_run {each}: there is no GPU that JAX can use; where there is "
            f"one, pip install '.[cuda]' in flowrl's folder; or try several devices on a CPU: use "
            f"--num_devices {each} and set XLA_FLAGS={HOST_DEVICES}{each}"
        )
    if devices and wanted not in (0, 1, each):
        raise ConfigError(
            f"--num_devices {wanted}: a run trains on all GPUs that it gets, here {each}; leave "
            f"it out and set --devices_per_run {wanted}"
        )
    on_cpu = not devices and environ.get("JAX_PLATFORMS", "cpu") == "cpu"
    if on_cpu and wanted > (there := host_devices(environ)):
        raise ConfigError(
            f"--num_devices {wanted}: a run on this CPU sees {there}; lower it, or set "
            f"XLA_FLAGS={HOST_DEVICES}{wanted}"
        )


def _probe() -> tuple[Device, ...]:
    """Return the GPUs that nvidia-smi lists; () when it fails or prints something else."""
    try:
        process = subprocess.Popen(
            _QUERY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace"
        )
        try:
            text, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        finally:
            process.kill()  # and no wait: a driver that hangs may keep it from ending
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, _QUERY)
        return tuple(_parse(line) for line in text.splitlines() if line.strip())
    except FileNotFoundError:
        return ()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        logger.warning("nvidia-smi fails, so no GPU is used: %s", error)
        return ()


def _parse(line: str) -> Device:
    index, uuid, memory = (word.strip() for word in line.split(","))
    if not uuid.startswith("GPU-"):
        raise ValueError(f"{line!r} is not a line of nvidia-smi")
    # Grace-Hopper and others share the machine's memory and say "[N/A]".
    return Device(id=str(int(index)), memory_mb=int(memory) if memory.isdigit() else 0, uuid=uuid)


def _named(gpu_ids: tuple[int, ...], present: tuple[Device, ...]) -> tuple[Device, ...]:
    by_id = {device.id: device for device in present}
    unknown = [str(number) for number in gpu_ids if str(number) not in by_id]
    if unknown:
        there = ", ".join(by_id) if by_id else "none (does nvidia-smi work?)"
        raise ConfigError(f"--gpu_ids {' '.join(unknown)}: no such GPU; present: {there}")
    return tuple(by_id[name] for name in dict.fromkeys(map(str, gpu_ids)))


def _left_visible(words: str, present: tuple[Device, ...]) -> tuple[Device, ...]:
    """As CUDA reads the variable: the list ends at the first word that names no device."""
    devices: list[Device] = []
    for word in map(str.strip, words.split(",")):
        named = [Device(id=word, memory_mb=0)] if word.startswith("MIG-") else []
        for device in present:
            if word == device.id or (word.startswith("GPU-") and device.uuid.startswith(word)):
                named.append(device)
        if not named or named[0] in devices:
            break
        devices.append(named[0])
    return tuple(devices)
