"""Checks of torch, the device and pinned memory."""

from __future__ import annotations

import os

import torch

from deltastore.host_memory import available_bytes
from deltastore.quantities import size_text
from server.errors import NotServable

# Small, because only the right to pin is checked.
PINNED_BYTES = 1 << 20


def check_torch() -> str:
    """Return the versions of torch and of what it was built for."""
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
    return f"version {torch.__version__} for {built_for}, {torch.get_num_threads()} threads"


def check_device(device: torch.device) -> str:
    """Return the device's name and its free memory.

    Raises:
        NotServable: the device cannot be used.
    """
    host = f"{size_text(available_bytes())} of host memory are free"
    if device.type == "cpu":
        return f"the CPU, {os.cpu_count()} cores; {host}"
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        raise NotServable(f"the GPU cannot be used ({error}): check its driver with `nvidia-smi`") from error
    name = torch.cuda.get_device_name(device)
    return f"{name}, {size_text(free)} of {size_text(total)} free; {host}"


def check_pinned_memory(device: torch.device) -> str:
    """Check that host memory can be pinned, which copies to a GPU need.

    Raises:
        NotServable: it cannot.
    """
    if device.type == "cpu":
        return "not needed on the CPU"
    try:
        torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise NotServable(
            f"host memory cannot be pinned ({error}): raise the limit of locked memory (ulimit -l, or the "
            "container's memlock)"
        ) from error
    return "can be allocated"
