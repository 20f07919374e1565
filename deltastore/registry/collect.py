"""Garbage collection of a registry: objects without a live version, and leftovers of crashes.

The caller holds the objects lock exclusively, so no publication has stored its object but not yet its record.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deltastore.errors import RegistryError
from deltastore.registry.claims import Claims
from deltastore.registry.objects import Objects
from deltastore.registry.reserve import DIRECTORY
from deltastore.registry.storage import TEMPORARY, Storage, file_size, flock
from deltastore.registry.uploads import PARTIAL
from deltastore.registry.variants import directories


@dataclass(frozen=True, slots=True)
class GcReport:
    """The garbage that a collection removed, or with `dry_run` found."""

    objects: tuple[str, ...]  # digests
    num_partials: int  # abandoned uploads
    num_leftovers: int  # other files that a crash left behind
    bytes_freed: int
    dry_run: bool


def collect(root: Path, objects: Objects, storage: Storage, *, dry_run: bool) -> GcReport:
    """Remove garbage, or with `dry_run` only report it.

    Raises:
        RegistryError: A record or state is damaged, so the objects in use are unknown; nothing was removed.
    """
    try:
        needed = referenced(root, storage)
    except RegistryError as error:
        raise RegistryError(f"nothing was collected: {error}") from error
    digests = sorted({*objects.digests(), *objects.marked(), *objects.evidence()} - needed)
    marked = set(objects.marked())
    leftovers = [objects.evidence_path(digest) for digest in (needed - marked) & set(objects.evidence())]
    leftovers += [objects.path(digest) for digest in needed & marked & set(objects.digests())]
    leftovers += [*temporaries(objects.quarantine_directory), *temporaries(root / DIRECTORY)]
    files = [path for digest in digests for path in (objects.path(digest), objects.evidence_path(digest))]
    freed = _size([*files, *leftovers])
    if not dry_run:
        objects.remove(digests)
        _unlink(leftovers, storage)
    num_partials, partial_bytes = collect_partials(root / "uploads", storage, dry_run=dry_run)
    num_drafts, draft_bytes = _collect_drafts(root, storage, dry_run)
    num_claims, claim_bytes = _collect_claims(root, storage, dry_run)
    num_leftovers = len(leftovers) + num_drafts + num_claims
    freed += partial_bytes + draft_bytes + claim_bytes
    return GcReport(tuple(digests), num_partials, num_leftovers, freed, dry_run)


def collect_partials(directory: Path, storage: Storage, *, dry_run: bool) -> tuple[int, int]:
    """Remove abandoned uploads, or with `dry_run` only count them. Return their number and bytes."""
    count = num_bytes = 0
    for path in sorted(directory.glob(f"*{PARTIAL}")):
        with contextlib.suppress(FileNotFoundError), abandoned(path) as is_abandoned:
            if is_abandoned:
                count, num_bytes = count + 1, num_bytes + _size([path])
                _unlink([] if dry_run else [path], storage)
    return count, num_bytes


def referenced(root: Path, storage: Storage) -> set[str]:
    """Return the digests of all live versions.

    Raises:
        RegistryError: A record or state is damaged, so some are unknown.
    """
    needed = set()
    for directory in directories(root / "variants", storage):
        needed |= {directory.record(number).digest for number in directory.history().live}
    return needed


def temporaries(directory: Path) -> list[Path]:
    """List a directory's temporary files, which a crash kept from getting their final names."""
    return sorted(directory.glob(f"*{TEMPORARY}"))


@contextlib.contextmanager
def abandoned(path: Path) -> Iterator[bool]:
    """Yield True if no upload writes this partial file; none can begin to while the block runs."""
    # Some network file systems lock only files that are open for writing.
    writable = os.access(path, os.W_OK)
    fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        try:
            flock(fd, exclusive=True, wait=False)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def _collect_drafts(root: Path, storage: Storage, dry_run: bool) -> tuple[int, int]:
    count = num_bytes = 0
    for directory in directories(root / "variants", storage):
        if not temporaries(directory.path):
            continue
        with contextlib.suppress(BlockingIOError), directory.locked(wait=False):
            drafts = temporaries(directory.path)
            count, num_bytes = count + len(drafts), num_bytes + _size(drafts)
            _unlink([] if dry_run else drafts, storage)
    return count, num_bytes


def _collect_claims(root: Path, storage: Storage, dry_run: bool) -> tuple[int, int]:
    claims = Claims(root, storage)
    if not [*claims.ended(), *temporaries(claims.directory)]:
        return 0, 0
    with claims.locked():
        leftovers = [*claims.ended(), *temporaries(claims.directory)]
        num_bytes = _size(leftovers)
        _unlink([] if dry_run else leftovers, storage)
    return len(leftovers), num_bytes


def _unlink(paths: list[Path], storage: Storage) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            storage.unlink(path)


def _size(paths: list[Path]) -> int:
    return sum(file_size(path) or 0 for path in paths)
