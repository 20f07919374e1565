"""Public names: the newest entry of `claims/NAME/` holds the tenant whose variant NAME every tenant may use.

A claim also holds the variant's `deleted_through` at its making. Deleting the variant raises that number, so it ends
the claim in the same atomic step, and a later variant of the name is private again. Before the claim that is entry n,
the empty file `public/NAME~n` is made, so that a listing of `public/` has every public name.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import PurePath

from deltastore.errors import PublicNameTaken, RegistryError, RegistryUnavailable
from deltastore.registry.files import SmallFiles, dropped_when_full
from deltastore.registry.records import NAME, PublicClaim, VariantState, is_name, parse_claim
from deltastore.registry.sequence import Entry, EntrySequence, attempts
from deltastore.registry.variants import VariantDirectory

DIRECTORY = "claims"
# The index of public names.
PUBLIC_NAMES = "public"
INDEX = re.compile(rf"({NAME.pattern.strip('^$')})~([1-9][0-9]{{0,17}})")


class Claims:
    """The public names of a registry."""

    def __init__(self, files: SmallFiles) -> None:
        self.directory = files.root / DIRECTORY
        self.index = files.root / PUBLIC_NAMES
        self._files = files

    def owner(self, name: str) -> str | None:
        """Return the tenant whose variant of this name is public; None if there is none.

        Raises:
            RegistryError: The claim, or the state of its variant, is damaged.
        """
        return self._owner(name, self.entries(name).newest())

    def public_names(self) -> list[str]:
        """Return the sorted names that are public, and some that were claimed in vain, from one listing."""
        return sorted({name for name, _ in self._indexed()})

    def names(self) -> list[str]:
        """Return the sorted names that were ever claimed."""
        return sorted(name for name in self._files.subdirectories(self.directory) if is_name(name))

    def directories(self) -> list[PurePath]:
        """Return the directories that hold the claims of a name each."""
        return [self.directory / name for name in self.names()]

    def entries(self, name: str) -> EntrySequence:
        """Return the claims of a name."""
        return EntrySequence(self.directory / name, "", self._files)

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
            # Empty, so that a full disk takes it.
            index = self._index_path(directory.name, newest.number + 1)
            with dropped_when_full(self._files, index, entries.path(newest.number + 1)):
                self._files.add_or_make_room(index, b"", tuple)
                self._files.make_durable(self.index)
                is_made = entries.append(newest, claim.to_json(newest.digest))
            if is_made:
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
                self.remove_index(directory.name)
                return

    def remove_index(self, name: str) -> None:
        """Remove the index of claims of a name that have ended. What fails is left for gc."""
        with contextlib.suppress(OSError, RegistryError, RegistryUnavailable):
            self._files.remove(self.ended_index(name))

    def ended_index(self, only: str | None = None) -> list[PurePath]:
        """Return the files of the index whose claim has ended, of one name or of all.

        Files above the newest entry of a name stay: a claim may be about to be made. So do those of damaged claims.
        """
        ended = []
        indexed = [(name, number) for name, number in self._indexed() if only in (None, name)]
        for name in sorted({name for name, _ in indexed}):
            newest = self.entries(name).newest()
            try:
                is_public = self._owner(name, newest) is not None
            except RegistryError:
                continue
            numbers = (number for each, number in indexed if each == name)
            ended += [
                self._index_path(name, number)
                for number in numbers
                if number < newest.number or (number == newest.number and not is_public)
            ]
        return ended

    def unindexed(self) -> list[PurePath]:
        """Return the files of public names that the index lacks."""
        indexed = set(self._indexed())
        found = []
        for name in self.names():
            newest = self.entries(name).newest()
            # A damaged claim is a finding of its own.
            with contextlib.suppress(RegistryError):
                if (name, newest.number) not in indexed and self._owner(name, newest) is not None:
                    found.append(self._index_path(name, newest.number))
        return found

    def _indexed(self) -> Iterator[tuple[str, int]]:
        """Yield the name and the entry of each file of the index."""
        for text in self._files.names(self.index, is_fresh=True):
            if (found := INDEX.fullmatch(text)) is not None:
                yield found[1], int(found[2])

    def _index_path(self, name: str, number: int) -> PurePath:
        return self.index / f"{name}~{number}"

    def _made(self, name: str) -> EntrySequence:
        entries = self.entries(name)
        self._files.make_directory(entries.directory)
        # The process that made it may have died before its sync.
        self._files.make_durable(self.directory)
        return entries

    def _sync(self, entries: EntrySequence) -> None:
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
