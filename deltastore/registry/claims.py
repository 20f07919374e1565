"""Public names: the newest entry of `claims/NAME/` holds the tenant whose variant NAME every tenant may use.

A claim also holds the variant's `deleted_through` at its making. Deleting the variant raises that number, so it ends
the claim in the same atomic step, and a later variant of the name is private again.
"""

from __future__ import annotations

from pathlib import PurePath

from deltastore.errors import PublicNameTaken, RegistryError
from deltastore.registry.files import SmallFiles
from deltastore.registry.records import PublicClaim, VariantState, is_name, parse_claim
from deltastore.registry.sequence import Entry, EntrySequence, attempts
from deltastore.registry.variants import VariantDirectory

DIRECTORY = "claims"
# The claims of older versions of Peraxis: the file `public/NAME`.
OLD_DIRECTORY = "public"


class Claims:
    """The public names of a registry."""

    def __init__(self, files: SmallFiles) -> None:
        self.directory = files.root / DIRECTORY
        self.old_directory = files.root / OLD_DIRECTORY
        self._files = files

    def owner(self, name: str) -> str | None:
        """Return the tenant whose variant of this name is public; None if there is none.

        Raises:
            RegistryError: The claim, or the state of its variant, is damaged.
        """
        return self._owner(name, self.entries(name).newest())

    def names(self) -> list[str]:
        """Return the sorted names that were ever claimed."""
        old = self._files.names(self.old_directory) if self._files.may_be_old else ()
        names = {*self._files.names(self.directory), *old}
        return sorted(name for name in names if is_name(name))

    def directories(self) -> list[PurePath]:
        """Return the directories that hold the claims of a name each."""
        return [self.directory / name for name in self._files.subdirectories(self.directory) if is_name(name)]

    def entries(self, name: str) -> EntrySequence:
        """Return the claims of a name."""
        return EntrySequence(self.directory / name, "", self.old_directory / name, self._files)

    def claim(self, directory: VariantDirectory, state: VariantState) -> None:
        """Make a variant, whose state was read, the public one of its name, durably.

        Raises:
            PublicNameTaken: Another tenant's variant is.
        """
        claim = PublicClaim(directory.tenant, state.deleted_through)
        entries = self._made(directory.name)
        for _ in attempts(entries.directory):
            newest = entries.newest()
            owner = self._owner(directory.name, newest)
            if owner not in (None, directory.tenant):
                raise taken(directory.name)
            if owner is not None:
                # The process that made the claim may have died before its sync.
                self._sync(entries)
                return
            if entries.append(newest, claim.to_json(newest.digest)):
                return

    def release(self, directory: VariantDirectory) -> None:
        """Make a variant private, durably."""
        entries = self.entries(directory.name)
        for _ in attempts(entries.directory):
            newest = entries.newest()
            claim = self._parsed(directory.name, newest)
            if claim is None or claim.tenant != directory.tenant:
                self._sync(entries)
                return
            self._made(directory.name)
            if entries.append(newest, PublicClaim(None, 0).to_json(newest.digest)):
                return

    def _made(self, name: str) -> EntrySequence:
        entries = self.entries(name)
        self._files.make_directory(entries.directory)
        # The process that made it may have died before its sync.
        self._files.make_durable(self.directory)
        return entries

    def _sync(self, entries: EntrySequence) -> None:
        # The claim may be that of an older version.
        if self._files.is_directory(entries.directory):
            self._files.make_durable(entries.directory)

    def _owner(self, name: str, entry: Entry) -> str | None:
        claim = self._parsed(name, entry)
        if claim is None or claim.tenant is None:
            return None
        state = VariantDirectory(self._files, claim.tenant, name).state()
        return claim.tenant if state.deleted_through <= claim.deleted_through else None

    def _parsed(self, name: str, entry: Entry) -> PublicClaim | None:
        if entry.raw is None:
            return None
        path = self.entries(name).path(entry.number)
        try:
            return parse_claim(entry.raw, str(path))
        except RegistryError as error:
            raise RegistryError(
                f"{error}: restore the file, or remove it and older ones to make the variant private"
            ) from error


def taken(name: str) -> PublicNameTaken:
    """Return the error for a name that is another tenant's."""
    return PublicNameTaken(
        f"the public name {name!r} is taken by another tenant: take another name, or leave the variant private"
    )
