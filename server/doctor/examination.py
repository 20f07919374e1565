"""The order of the checks of one machine, and the options that each needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch

from deltastore.base.base import Base
from deltastore.base.checkpoint import Checkpoint
from deltastore.diagnosis import Diagnosis, diagnose
from deltastore.errors import PeraxisError
from deltastore.progress import identify_base
from deltastore.registry.place import is_bucket
from server.doctor.capacity import check_capacity, delta_bytes, describe_base
from server.doctor.machine import check_device, check_pinned_memory, check_torch
from server.doctor.storage import check_bucket, check_disk, check_registry, check_variants
from server.engine.build import device_of
from server.settings import Settings, load_settings

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlannedServer:
    """The server that is to run on this machine, as far as its options are known."""

    base: Path | None = None
    registry: Path | str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"


def examine(planned: PlannedServer, progress: bool) -> list[Diagnosis]:
    """Run every check that the options allow; one that fails stops only those that need its result.

    Args:
        planned: the server.
        progress: show the progress of the base's fingerprint on stderr.
    """
    found = [diagnose("torch", check_torch)]
    device = _attempt(found, "device", lambda: device_of(planned.device))
    if device is not None:
        found.append(diagnose("device", lambda: check_device(device)))
        found.append(diagnose("pinned memory", lambda: check_pinned_memory(device)))
    base = None if planned.base is None else _examine_base(found, planned, planned.base, device, progress)
    if planned.registry is not None:
        _examine_registry(found, planned.registry, base)
    missing = [
        option for option, value in (("--base", planned.base), ("--registry", planned.registry)) if not value
    ]
    if missing:
        found.append(Diagnosis("options", "note", f"give {' and '.join(missing)} for more checks"))
    return found


def _examine_base(
    found: list[Diagnosis],
    planned: PlannedServer,
    directory: Path,
    device: torch.device | None,
    progress: bool,
) -> Base | None:
    checkpoint = _attempt(found, "base", lambda: Checkpoint.open(directory))
    if checkpoint is None:
        return None
    base = _attempt(found, "base", lambda: identify_base(checkpoint, progress))
    if base is None:
        return None
    found.append(Diagnosis("base", "ok", describe_base(base, checkpoint)))
    if device is not None:
        settings = _settings(planned)
        found.append(diagnose("capacity", lambda: check_capacity(base, checkpoint, settings, device)))
    return base


def _settings(planned: PlannedServer) -> Settings:
    """Return the settings of the planned server; those that are no option here come from the environment."""
    # The division of the memory does not depend on the registry.
    registry = planned.registry or Path()
    flags = {"base": planned.base, "registry": registry, "device": planned.device, "dtype": planned.dtype}
    return load_settings(flags).settings


def _examine_registry(found: list[Diagnosis], place: Path | str, base: Base | None) -> None:
    if is_bucket(location := str(place)):
        found.append(diagnose("registry", lambda: check_bucket(location)))
        return
    root = Path(place)
    found.append(diagnose("registry", lambda: check_registry(root)))
    found.append(diagnose("disk", lambda: check_disk(root, None if base is None else delta_bytes(base))))
    if base is not None and (variants := _attempt(found, "variants", lambda: check_variants(root, base))):
        found.append(variants)


def _attempt(found: list[Diagnosis], subject: str, function: Callable[[], T]) -> T | None:
    """Return a function's result; None if it failed, which is then a finding."""
    try:
        return function()
    except PeraxisError as error:
        found.append(Diagnosis(subject, "failed", " ".join(str(error).split())))
        return None
