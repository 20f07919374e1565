"""Machine, versions and date of a bench's figures, for its JSON and its table.

Names no host, no user and no path, so that results can be published as they are.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
LIBRARIES = ("torch", "transformers", "safetensors", "numpy", "numba", "triton")


def machine(device: torch.device) -> dict[str, Any]:
    """Describe the hardware."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed libraries."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def write_result(path: Path, bench: str, device: torch.device, figures: Mapping[str, Any]) -> None:
    """Write one bench's figures with the machine, the versions and the date."""
    document = {
        "bench": bench,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(device),
        "versions": versions(),
        **figures,
    }
    path.write_text(json.dumps(document, indent=2) + "\n")


def describe(device: torch.device) -> str:
    """Describe the machine in one line, for the head of a table."""
    facts = machine(device)
    where = "" if facts["device"] == "cpu" else f", {facts['device']}"
    return f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_bytes'] / 2**30:.0f} GiB{where}"


def _cpu_model() -> str:
    """Return the CPU's model name of Linux, or the architecture if there is none."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
