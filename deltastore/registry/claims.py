"""The names in a registry: those in its root, by which it is told from other places, and public names of variants.

A registry of any other format than that in `format.json` is refused: its files would be misread.

The newest entry of `claims/NAME/` holds the tenant whose variant NAME every tenant may use, and the variant's
`deleted_through` at its making. Deleting the variant raises that number, so it ends the claim in the same atomic step,
and a later variant of the name is private again. Before the claim that is entry n, the empty file `public/NAME~n` is
made, so that a listing of `public/` has every public name.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path, PurePath

from deltastore.errors import PublicNameTaken, RegistryError, RegistryUnavailable, UsageError
from deltastore.registry import storage, variants
from deltastore.registry.records import NAME, PublicClaim, VariantState, is_name, parse_claim
from deltastore.registry.store import SmallFiles, dropped_when_full
from deltastore.registry.variants import Entry, EntrySequence, VariantDirectory, attempts

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


SCHEME = "s3://"
FORMAT_FILE = "format.json"
FORMAT = 3
STATED_FORMAT = json.dumps({"format": FORMAT}).encode() + b"\n"
LAYOUT = (
    "objects",
    "uploads",
    "quarantine",
    variants.DIRECTORY,
    variants.REPORTS,
    DIRECTORY,
    PUBLIC_NAMES,
)
# Kept by servers: keys, limits and the audit log.
OF_SERVERS = ("tenants", "audit")
# In a registry that another process is making now, or at the root of a volume that was just formatted.
HARMLESS = frozenset({*LAYOUT, *OF_SERVERS, FORMAT_FILE, storage.RESERVE_DIRECTORY, "lost+found"})


def is_bucket(location: str) -> bool:
    """True if a value of `--registry` names a bucket and not a directory."""
    return location.startswith(SCHEME)


def is_registry(path: Path) -> bool:
    return (path / variants.DIRECTORY).is_dir()


def check_place(path: Path) -> None:
    """Check that `path` is a registry, or that one may be made there because it is missing or empty.

    Raises:
        UsageError: it is a file, or a directory with other contents, such as a checkpoint.
        RegistryError: it cannot be read.
    """
    try:
        if is_registry(path) or not path.exists():
            return
        if not path.is_dir():
            raise UsageError(f"{path} is a file and not a registry: give --registry a directory")
        foreign = min((entry.name for entry in path.iterdir() if entry.name not in HARMLESS), default=None)
    except OSError as error:
        raise RegistryError(
            f"{path}: {error.strerror}: give --registry a directory that can be read"
        ) from error
    if foreign is not None:
        raise UsageError(
            f"{path} is not a registry: it has other contents, such as {foreign!r}; give --registry the directory of "
            "a registry, or an empty or missing one"
        )


def check_present(root: Path) -> None:
    """Raise RegistryUnavailable if a registry's directory is gone: it must not look like one without variants."""
    if not is_registry(root):
        raise RegistryUnavailable(
            f"{root} is gone: mount its volume again",
            public="the registry's volume is gone: ask its operator to mount it again",
        )


def check_format(raw: bytes, where: str) -> None:
    """Check the contents of `format.json`.

    Raises:
        RegistryError: Another version of Peraxis wrote it, or the file is damaged.
    """
    try:
        found = json.loads(raw)["format"]
    except (ValueError, LookupError, TypeError) as error:
        raise RegistryError(f'{where} is damaged: write {{"format": {FORMAT}}} to it') from error
    if found in (1, 2):
        raise older(where)
    if found != FORMAT:
        raise RegistryError(
            f"{where} has format {found!r}, written by a newer version of Peraxis, and this one reads format {FORMAT}: "
            "run the newer version"
        )


def older(where: str) -> RegistryError:
    """Return the error for a registry that an older version of Peraxis wrote."""
    return RegistryError(
        f"{where} was written by an older version of Peraxis and cannot be read: publish the variants again, into a "
        "new directory or prefix"
    )
