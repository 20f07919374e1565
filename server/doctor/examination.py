"""The checks of one machine that could run a server: torch, device, base, capacity, registry; and their order."""

from __future__ import annotations

import math
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch

from deltastore.base.base import Base
from deltastore.base.checkpoint import Checkpoint
from deltastore.base.servable import own_dtype
from deltastore.diagnosis import Diagnosis, diagnose
from deltastore.errors import NotServable, PeraxisError, RegistryError, UsageError
from deltastore.format.plan import one_bit_plan
from deltastore.host_memory import available_bytes
from deltastore.progress import identify_base
from deltastore.quantities import size_text
from deltastore.registry import Registry
from deltastore.registry.place import FORMAT_FILE, is_bucket
from deltastore.registry.storage import TEMPORARY, Storage, explained
from server.engine.build import DTYPES, device_of
from server.engine.memory import check_base, free_memory, host_cache_bytes, plan_memory, size_of_slot
from server.settings import Settings, load_settings

# Small, because only the right to pin is checked.
PINNED_BYTES = 1 << 20
# Pages of the KV cache are this small here: its share of the memory is all that matters.
PAGE_BYTES = 4096
# Versions that a message names.
MAX_NAMED = 3
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


def describe_base(base: Base, checkpoint: Checkpoint) -> str:
    """Return a base's id, fingerprint and size."""
    num_bytes = sum(stored.num_bytes for stored in checkpoint.tensors.values())
    return f"{base.id}, {size_text(num_bytes)}, fingerprint {base.fingerprint[:12]}"


def delta_bytes(base: Base) -> int:
    """Return the bytes of a delta with one bit per weight."""
    return one_bit_plan(base.shapes).device_bytes


def check_capacity(base: Base, checkpoint: Checkpoint, settings: Settings, device: torch.device) -> str:
    """Return how many deltas have a slot if a server with these settings starts now.

    Raises:
        NotServable: the memory is too small.
    """
    dtype = DTYPES[settings.dtype] or own_dtype(checkpoint)
    slot_bytes = size_of_slot(base.shapes, settings.slot_headroom)
    base_bytes = dtype.itemsize * sum(map(math.prod, base.shapes.values()))
    check_base(settings, device, dtype, base_bytes, slot_bytes)
    cache_bytes = host_cache_bytes(settings)
    free = free_memory(device, cache_bytes, base_bytes)
    # The number of pages is bounded by the free memory alone, so that the KV cache takes its whole share.
    plan = plan_memory(settings, free, slot_bytes, PAGE_BYTES, max(2, free.usable // PAGE_BYTES))
    return (
        f"at least {plan.num_slots} slots of {size_text(slot_bytes)} beside the base in "
        f"{str(dtype).removeprefix('torch.')}, and a host cache for {cache_bytes // slot_bytes} deltas"
    )


def check_registry(root: Path) -> str:
    """Write, sync, link, rename and remove a file as the registry does. A missing directory is not created.

    Raises:
        RegistryError, StorageFull: a step failed.
    """
    directory = _existing(root)
    # Named like other temporary files, so that gc removes it if this process is killed.
    path, second = (directory / f".{secrets.token_hex(8)}{TEMPORARY}" for _ in range(2))
    storage = Storage()
    with explained(directory):
        try:
            storage.replace(path, b"doctor")
            storage.link(path, second)
        finally:
            path.unlink(missing_ok=True)
            second.unlink(missing_ok=True)
        storage.fsync_dir(directory)
    missing = "" if directory == root else f"; {root} does not exist yet, and `peraxis serve` creates it"
    return f"{directory} can be written, synced and linked{missing}"


def check_bucket(location: str) -> str:
    """List a bucket, and create and remove a file there as the registry does.

    Raises:
        UsageError: the location is malformed, or obstore is missing.
        RegistryError, StorageFull: a step failed.
    """
    try:
        from deltastore.registry.bucket.client import Bucket
        from deltastore.registry.bucket.files import BucketFiles
    except ModuleNotFoundError as error:
        raise UsageError(f"{location} needs obstore: run `pip install 'peraxis[s3]'`") from error
    bucket = Bucket.open(location)
    files = BucketFiles(bucket)
    is_made = FORMAT_FILE in files.names(bucket.root)
    path = bucket.root / f".{secrets.token_hex(8)}{TEMPORARY}"
    try:
        files.add(path, b"doctor")
        if files.add(path, b"another"):
            raise RegistryError(
                f"{location} creates an object that exists: use a store with conditional writes (If-None-Match)"
            )
    finally:
        files.remove([path])
    missing = "" if is_made else "; it has no registry yet, and `peraxis serve` creates it"
    return f"{location} can be listed and written, with conditional writes{missing}"


def check_disk(root: Path, delta_bytes: int | None) -> str:
    """Return the free space, and how many deltas fit there if the size of one is known."""
    with explained(root):
        free = shutil.disk_usage(_existing(root)).free
    fit = "" if not delta_bytes else f", {free // delta_bytes} deltas of {size_text(delta_bytes)}"
    return f"{size_text(free)} are free{fit}"


def check_variants(root: Path, base: Base) -> Diagnosis:
    """Report the versions of a registry that a server with this base does not serve."""
    if not (root / "variants").is_dir():
        return Diagnosis("variants", "note", f"{root} is no registry yet")
    registry = Registry(root)
    records = [record for variant in registry.variants() for record in variant.versions]
    foreign = [record.label for record in records if record.base_fingerprint != base.fingerprint]
    quarantined = [record.label for record in records if registry.is_quarantined(record)]
    problems = [
        f"{len(labels)} {problem} ({', '.join(labels[:MAX_NAMED])}{', ...' if labels[MAX_NAMED:] else ''})"
        for labels, problem in (
            (foreign, "were made from another base: compress them again"),
            (quarantined, "are quarantined: push their artifacts again"),
        )
        if labels
    ]
    message = f"{len(records)} versions"
    return Diagnosis("variants", "note" if problems else "ok", "; ".join([message, *problems]))


def _existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists; raise RegistryError if that is no directory."""
    found = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    if not found.is_dir():
        raise RegistryError(f"{found} is no directory: give --registry another path")
    return path if found == path.absolute() else found
