"""Public names: the file `public/NAME` holds the tenant whose variant NAME every tenant may use.

A file is made by link, so that a name has one owner. A claim also holds the variant's `deleted_through` at its making.
Deleting the variant changes that number, so it ends the claim in the same atomic step, and a later variant of the name
is private again. The file of an ended claim is removed afterwards, by the next claim or by gc.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from deltastore.errors import PublicNameTaken, RegistryError
from deltastore.registry.records import PublicClaim, VariantState, is_name, parse_claim
from deltastore.registry.storage import Storage, file_size
from deltastore.registry.variants import VariantDirectory

DIRECTORY = "public"
LOCK = "public.lock"


class Claims:
    """The public names of a registry. Changes take the lock of all claims, after a variant's own."""

    def __init__(self, root: Path, storage: Storage) -> None:
        self.directory = root / DIRECTORY
        self._variants = root / "variants"
        self._lock = root / LOCK
        self._storage = storage

    def owner(self, name: str) -> str | None:
        """Return the tenant whose variant of this name is public; None if there is none.

        Raises:
            RegistryError: the claim, or the state of its variant, is damaged.
        """
        claim = self._read(name)
        return claim.tenant if claim is not None and self._is_valid(claim, name) else None

    def names(self) -> list[str]:
        """Return the sorted names of all claims, those that have ended included."""
        return sorted(name for name in os.listdir(self.directory) if is_name(name))

    def ended(self) -> list[Path]:
        """Return the files of claims that have ended; a damaged one is left out."""
        found = []
        for name in self.names():
            with contextlib.suppress(RegistryError):
                claim = self._read(name)
                if claim is not None and not self._is_valid(claim, name):
                    found.append(self.directory / name)
        return found

    def claim(self, directory: VariantDirectory, state: VariantState) -> None:
        """Make a variant the public one of its name, durably. The caller holds the variant's lock.

        Raises:
            PublicNameTaken: another tenant's variant is.
        """
        path = self.directory / directory.name
        with self.locked():
            owner = self.owner(directory.name)
            if owner not in (None, directory.tenant):
                raise taken(directory.name)
            if owner is None:
                if file_size(path) is not None:
                    self._storage.unlink(path)
                claim = PublicClaim(directory.tenant, state.deleted_through)
                with self._storage.temporary(self.directory, claim.to_json()) as temporary:
                    self._link(temporary, path)
            # Also for a claim that stands: the process that made it may have died before its sync.
            self._storage.fsync_dir(self.directory)

    def release(self, directory: VariantDirectory) -> None:
        """Make a variant private, durably. The caller holds the variant's lock."""
        with self.locked():
            claim = self._read(directory.name)
            if claim is not None and claim.tenant == directory.tenant:
                self._storage.unlink(self.directory / directory.name)
            self._storage.fsync_dir(self.directory)

    def forget(self, directory: VariantDirectory) -> None:
        """Remove the claim of a variant that was just deleted, without a sync: gc removes it if it reappears."""
        path = self.directory / directory.name
        if file_size(path) is None:
            return
        with contextlib.suppress(OSError, RegistryError), self.locked():
            claim = self._read(directory.name)
            if claim is not None and claim.tenant == directory.tenant:
                self._storage.unlink(path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of all claims."""
        with self._storage.locked(self._lock, exclusive=True):
            yield

    def _link(self, temporary: Path, path: Path) -> None:
        try:
            self._storage.link(temporary, path)
        except FileExistsError as error:
            # A server whose file system has no locks was first.
            raise taken(path.name) from error

    def _read(self, name: str) -> PublicClaim | None:
        path = self.directory / name
        try:
            return parse_claim(path.read_bytes(), str(path))
        except FileNotFoundError:
            return None
        except RegistryError as error:
            raise RegistryError(
                f"{error}: restore the file, or remove it to make the variant private"
            ) from error

    def _is_valid(self, claim: PublicClaim, name: str) -> bool:
        state = VariantDirectory(self._variants, claim.tenant, name, self._storage).state()
        return state.deleted_through == claim.deleted_through


def taken(name: str) -> PublicNameTaken:
    """Return the error for a name that is another tenant's."""
    return PublicNameTaken(
        f"the public name {name!r} is taken by another tenant: take another name, or leave the variant private"
    )
