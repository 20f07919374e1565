"""`peraxis serve --check`: whether this machine can run the server that the settings describe. It makes nothing."""

from __future__ import annotations

import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch

from deltastore.base import Base
from deltastore.checkpoint import Checkpoint
from deltastore.console import Diagnosis, diagnose, identify_base, size_text
from deltastore.errors import CheckpointError, NotServable, PeraxisError, RegistryError, UsageError
from deltastore.format.sizes import one_bit_plan
from deltastore.memory import available_bytes
from deltastore.registry import Registry
from deltastore.registry.claims import FORMAT_FILE, check_format, check_place, is_bucket, is_registry, older
from deltastore.registry.object_cache import ObjectCache
from deltastore.registry.storage import TEMPORARY, Storage, explained
from deltastore.servable import own_dtype
from server.deltas.resident import size_of_slot
from server.engine.build import (
    DTYPES,
    check_base,
    device_of,
    free_memory,
    host_cache_bytes,
    plan_memory,
)
from server.settings import Settings
from server.settings_sources import LoadedSettings

# Small, because only the right to pin is checked.
PINNED_BYTES = 1 << 20
# Pages of the KV cache are this small here: its share of the memory is all that matters.
PAGE_BYTES = 4096
# Versions that a message names.
MAX_NAMED = 3
T = TypeVar("T")


def check_machine(loaded: LoadedSettings) -> list[Diagnosis]:
    """Run every check that the settings allow; one that fails stops only those that need its result.

    Progress of the base's fingerprint is shown on stderr.

    Args:
        loaded: The settings; without a base or a registry, the checks of it are left out.
    """
    settings = loaded.settings
    found = [diagnose("torch", check_torch)]
    device = _attempt(found, "device", lambda: device_of(settings.device))
    if device is not None:
        found.append(diagnose("device", lambda: check_device(device)))
        found.append(diagnose("pinned memory", lambda: check_pinned_memory(device)))
    missing = [name for name in ("base", "registry") if not loaded.is_given(name)]
    base = None if "base" in missing else _check_base(found, settings, device)
    if "registry" not in missing:
        _check_registry(found, settings.registry, base)
    if missing:
        options = " and ".join(f"--{name}" for name in missing)
        found.append(Diagnosis("options", "note", f"give {options} for more checks"))
    return found


def _check_base(found: list[Diagnosis], settings: Settings, device: torch.device | None) -> Base | None:
    checkpoint = _attempt(found, "base", lambda: Checkpoint.open(_base_directory(settings.base)))
    if checkpoint is None:
        return None
    base = _attempt(found, "base", lambda: identify_base(checkpoint, True))
    if base is None:
        return None
    found.append(Diagnosis("base", "ok", describe_base(base, checkpoint)))
    if device is not None:
        found.append(diagnose("capacity", lambda: check_capacity(base, checkpoint, settings, device)))
    return base


def _base_directory(base: Path) -> Path:
    """Return the directory of a base, that of a hub's in the cache.

    Raises:
        CheckpointError: the hub has no such model, or the cache lacks some of it.
    """
    if base.is_dir():
        return base
    # Deferred: few servers take their base from a hub.
    from deltastore.hub import find_on_hub

    model = find_on_hub(str(base))
    if model.missing_bytes:
        total = size_text(sum(model.files.values()))
        raise CheckpointError(
            f"{model}: {size_text(model.missing_bytes)} of {total} are not in huggingface_hub's cache: run `peraxis "
            "serve` without --check, which fetches them at start"
        )
    return model.fetch_all()


def _check_registry(found: list[Diagnosis], location: str, base: Base | None) -> None:
    root = Path(location)
    if is_bucket(location):
        registry = diagnose("registry", lambda: check_bucket(location))
    else:
        registry = diagnose("registry", lambda: check_directory(root))
    found.append(registry)
    if not is_bucket(location):
        found.append(diagnose("disk", lambda: check_disk(root, None if base is None else delta_bytes(base))))
    if registry.state == "ok" and (
        variants := _attempt(found, "variants", lambda: check_variants(location, base))
    ):
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
    free = free_memory(device, cache_bytes, base_bytes, settings.tensor_parallel_size)
    # The number of pages is bounded by the free memory alone, so that the KV cache takes its whole share.
    plan = plan_memory(settings, free, slot_bytes, PAGE_BYTES, max(2, free.usable // PAGE_BYTES))
    return (
        f"at least {plan.num_slots} slots of {size_text(slot_bytes)} beside the base in "
        f"{str(dtype).removeprefix('torch.')}, and a host cache for {cache_bytes // slot_bytes} deltas"
    )


def check_directory(root: Path) -> str:
    """Write, sync, link, rename and remove a file as the registry does. A missing directory is not created.

    Raises:
        UsageError: there is something else than a registry.
        RegistryError, StorageFull: a step failed.
    """
    check_place(root)
    directory = _existing(root)
    # Named like other temporary files, so that gc removes it if this process is killed.
    path, second = (directory / f".{secrets.token_hex(8)}{TEMPORARY}" for _ in range(2))
    storage = Storage()
    with explained(directory):
        try:
            storage.replace(path, b"check")
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
        files.add(path, b"check")
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


def check_variants(location: str, base: Base | None) -> Diagnosis:
    """Report the versions of a registry that cannot be served: quarantined ones, and those of another base.

    Raises:
        RegistryError, UsageError: the registry cannot be read, or another version of Peraxis wrote it.
    """
    with _reading(location) as registry:
        if registry is None:
            return Diagnosis("variants", "note", f"{location} is no registry yet")
        records = [record for variant in registry.variants() for record in variant.versions]
        quarantined = [record.label for record in records if registry.is_quarantined(record)]
    foreign = [
        record.label for record in records if base is not None and not base.is_named(record.base_fingerprint)
    ]
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


@contextmanager
def _reading(location: str) -> Iterator[Registry | None]:
    """Open a registry without making anything in it; None if there is none."""
    with ExitStack() as stack:
        cache = None
        if is_bucket(location):
            # For objects, of which none is read.
            cache = ObjectCache(Path(stack.enter_context(TemporaryDirectory(prefix="peraxis-check-"))), 0)
        registry = Registry.open(location, cache, make=False)
        yield registry if _has_format(registry, location) else None


def _has_format(registry: Registry, location: str) -> bool:
    """Check the registry's format; False if there is no registry.

    Raises:
        RegistryError: it cannot be read, or another version of Peraxis wrote it.
    """
    path = registry.files.root / FORMAT_FILE
    with explained(registry.files.root):
        try:
            check_format(registry.files.read(path), str(path))
        except FileNotFoundError:
            if not is_bucket(location) and is_registry(Path(location)):
                raise older(location) from None
            return False
    return True


def _existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists; raise RegistryError if that is no directory."""
    found = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    if not found.is_dir():
        raise RegistryError(f"{found} is no directory: give --registry another path")
    return path if found == path.absolute() else found
