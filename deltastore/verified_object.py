"""Reads of stored objects: chunks that match the digests of a version record, and one rule for reads that fail.

A chunk is read once, into the memory of its reader, and hashed there. `read_verified` quarantines an object that is
corrupt and reads one again that was replaced or put back meanwhile. `loader.py` reads device sections into slots, a
`VerifiedObject` the bytes of downloads and of a variant's files (tokenizer, chat template, generation config), none of
which is parsed here. Imports no torch, so processes that only handle text may use it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar

from deltastore.errors import (
    CorruptObject,
    RegistryError,
    RegistryUnavailable,
    StorageFull,
    VariantNotFound,
    VariantQuarantined,
)
from deltastore.format.header import parse_verified_header
from deltastore.format.manifest import Manifest, file_tensor
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from deltastore.registry.storage import is_replaced
from deltastore.registry.uploads import CHUNK_BYTES

T = TypeVar("T")

log = logging.getLogger(__name__)

QUARANTINED = "its stored object is corrupt and was quarantined: upload it again"
# Readings that end because the object's file was moved or replaced.
MAX_READINGS = 5


@dataclass(frozen=True, slots=True)
class ObjectSource:
    """An object's file and the facts of its version record that reading it needs.

    Raises:
        RegistryError: The record contradicts itself.
    """

    path: Path
    digest: str  # of the whole file, 64 hex digits
    size_bytes: int
    data_start: int  # bytes before the data section
    device_bytes: int  # bytes of the device section; the variant's files follow it
    chunk_sha256: tuple[str, ...]  # hex, of each 4 MiB of the file; the last may be shorter

    def __post_init__(self) -> None:
        num_chunks = -(-self.size_bytes // CHUNK_BYTES)
        sizes = (self.data_start, self.device_bytes, self.size_bytes - self.data_end)
        if min(sizes) < 0 or len(self.chunk_sha256) != num_chunks:
            raise RegistryError(
                f"the version record of object {self.digest} contradicts itself: upload it again"
            )

    @classmethod
    def of(cls, registry: Registry, record: VersionRecord) -> ObjectSource:
        """Return the source of a version's object; in a bucket, this downloads an object without a local copy."""
        return cls(
            registry.object_path(record),
            record.digest,
            record.size_bytes,
            record.data_start,
            record.device_bytes,
            record.chunk_sha256,
        )

    @property
    def data_end(self) -> int:
        """The end of the device section, in bytes from the beginning of the file."""
        return self.data_start + self.device_bytes

    def chunk_range(self, index: int) -> tuple[int, int]:
        """The first byte of a chunk in the file, and the byte after its last."""
        return index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, self.size_bytes)

    def device_range(self, index: int) -> slice:
        """The bytes of the device section that a chunk holds, from the section's beginning; may be empty."""
        cuts = (min(max(cut - self.data_start, 0), self.device_bytes) for cut in self.chunk_range(index))
        return slice(*cuts)


class ObjectFile:
    """The open file of an object, which any number of threads may read at once. Use as a context manager.

    Opening and reading raise:
        CorruptObject: The file has another size than recorded, or a chunk does not match its digest.
        RegistryError: The file cannot be opened or read. Its cause is the operating system's error.
    """

    def __init__(self, source: ObjectSource) -> None:
        """Open the file and check its size."""
        self.source = source
        with self._explained():
            self._fd = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._check_size()
            except BaseException:
                os.close(self._fd)
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._fd)

    def read_chunk(self, index: int, *memory: memoryview) -> None:
        """Read one chunk and compare its digest. After an error the contents of `memory` are undefined.

        Args:
            index: The chunk.
            memory: Buffers that take the chunk's bytes in order; what they do not take is hashed and dropped.
        """
        start, end = self.source.chunk_range(index)
        rest = memoryview(bytearray(end - start - sum(map(len, memory))))
        pieces = [piece for piece in (*memory, rest) if len(piece)]
        with self._explained():
            self._fill(pieces, index)
            digest = hashlib.sha256()
            for piece in pieces:
                digest.update(piece)
            if digest.hexdigest() != self.source.chunk_sha256[index]:
                raise self._corrupt(f"is corrupt: chunk {index} does not match its SHA-256")

    def _check_size(self) -> None:
        size_bytes, expected = os.fstat(self._fd).st_size, self.source.size_bytes
        if size_bytes != expected:
            raise self._corrupt(f"has {size_bytes} bytes where its record says {expected}")

    def _fill(self, pieces: list[memoryview], index: int) -> None:
        left = list(pieces)
        position, _ = self.source.chunk_range(index)
        while left:
            count = os.preadv(self._fd, left, position)
            if count == 0:
                raise self._corrupt(f"is truncated: chunk {index} ends at byte {position}")
            position += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if left:
                left[0] = left[0][count:]

    def _corrupt(self, problem: str) -> CorruptObject:
        return CorruptObject(f"object {self.source.digest} {problem}", os.fstat(self._fd))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RegistryError(
                f"object {self.source.digest} cannot be read: {error.strerror or error}: "
                "check the registry's disk and rights"
            ) from error


def read_verified(registry: Registry, record: VersionRecord, read: Callable[[], T]) -> T:
    """Return what `read` makes of a version's object; read again what was replaced or put back meanwhile.

    A corrupt object is quarantined, unless another file has taken its place: an upload's, or a download's where only
    this machine's copy was damaged.

    Args:
        registry: The registry.
        record: The version.
        read: Opens the object's file, or goes on with an open one at its first call, and raises as `ObjectFile`.

    Raises, without the name of the version, because other versions may share the read:
        VariantQuarantined: The object is quarantined, or was found corrupt and is quarantined now.
        VariantNotFound: The object is no longer in the registry.
        CorruptObject, RegistryError: The disk failed, or the file was replaced at each of `MAX_READINGS` readings.
    """
    for num_readings in range(1, MAX_READINGS + 1):
        try:
            return read()
        except CorruptObject as error:
            if _quarantine(registry, record, error):
                raise VariantQuarantined(QUARANTINED) from error
            if num_readings == MAX_READINGS:
                raise
        except RegistryError as error:
            is_missing = isinstance(error.__cause__, FileNotFoundError)
            if is_missing:
                _check_exists(registry, record, error)
            if not (is_missing or is_replaced(error)) or num_readings == MAX_READINGS:
                raise
    raise AssertionError("the last reading returns or raises")


def _quarantine(registry: Registry, record: VersionRecord, found: CorruptObject) -> bool:
    """Quarantine the file that was read; return False if another one has taken its place."""
    try:
        is_quarantined = registry.quarantine(record, str(found), found.found_in)
    except (StorageFull, RegistryError, RegistryUnavailable) as error:
        # It is not served either way; the next read finds the mismatch again.
        log.error("%s cannot be quarantined: %s", record.label, error)
        is_quarantined = True
    if is_quarantined:
        log.error("%s: %s", record.label, found)
    return is_quarantined


def _check_exists(registry: Registry, record: VersionRecord, error: RegistryError) -> None:
    """Put back an object that was missing; raise VariantQuarantined or VariantNotFound if it is gone."""
    # A quarantine moves the object.
    if registry.is_quarantined(record):
        raise VariantQuarantined(QUARANTINED) from error
    if not registry.recover(record):
        raise VariantNotFound("its object is no longer in the registry: upload it again") from error


class VerifiedObject:
    """An object open for reading. Use as a context manager, from one thread at a time.

    Opening and reading raise as `read_verified`, with the name of the version.
    """

    def __init__(self, registry: Registry, record: VersionRecord) -> None:
        self._registry = registry
        self._record = record
        self._file: ObjectFile | None = None
        # The last chunk that was read, so that reads in ascending order read no chunk twice.
        self._last = -1, memoryview(b"")

    def __enter__(self) -> Self:
        self._registry.check_not_quarantined(self._record)
        self._verified(self._opened)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def read(self, start: int, end: int) -> bytes:
        """Return the verified bytes from `start` up to `end`, counted from the beginning of the file."""
        pieces = []
        for index in range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
            offset = index * CHUNK_BYTES
            pieces.append(self._chunk(index)[max(start - offset, 0) : end - offset])
        return b"".join(pieces)

    def view(self, start: int, end: int) -> memoryview:
        """Return the same without a copy, of bytes that lie in one chunk."""
        offset = start // CHUNK_BYTES * CHUNK_BYTES
        return self._chunk(start // CHUNK_BYTES)[start - offset : end - offset]

    def _chunk(self, index: int) -> memoryview:
        """Return one verified chunk."""
        if self._last[0] != index:
            self._last = index, self._verified(partial(self._read_chunk, index))
        return self._last[1]

    def _verified(self, read: Callable[[], T]) -> T:
        try:
            return read_verified(self._registry, self._record, read)
        except (VariantQuarantined, VariantNotFound, CorruptObject, RegistryError) as error:
            raise error.about(self._record.label) from error

    def _read_chunk(self, index: int) -> memoryview:
        file = self._opened()
        start, end = file.source.chunk_range(index)
        chunk = memoryview(bytearray(end - start))
        try:
            file.read_chunk(index, chunk)
        except (CorruptObject, RegistryError):
            # The next reading opens what is in the file's place by then.
            self._close()
            raise
        return chunk

    def _opened(self) -> ObjectFile:
        if self._file is None:
            self._file = ObjectFile(ObjectSource.of(self._registry, self._record))
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True, slots=True)
class VariantFiles:
    """A version's files and the facts of its manifest that handling its text needs."""

    files: Mapping[str, bytes]  # by filename; a file that equals the base's is not there
    shapes: Mapping[
        str, tuple[int, ...]
    ]  # of the fine-tune's tensors, by name; one that equals the base's is not there


class Sink(Protocol):
    """Takes a file in pieces."""

    def write(self, piece: bytes, /) -> object:
        """Take the next piece."""


# Given the name and the size of a file, returns a context that takes it; None keeps it in memory.
TakeFile = Callable[[str, int], AbstractContextManager[Sink] | None]


def read_files(
    registry: Registry, record: VersionRecord, take: TakeFile = lambda name, num_bytes: None
) -> VariantFiles:
    """Read a version's files from chunks that match the digests of its record; every needed chunk is read once.

    Takes as much memory as the files that `take` leaves and two chunks. The rows of the variant's embedding, below
    which its token ids lie, are ``shapes[base.embedding][0]``, or the base's own rows if `shapes` lacks that name.

    Raises:
        VariantQuarantined: The object is quarantined, or was found corrupt or truncated and is quarantined now.
        VariantNotFound: The object is no longer in the registry.
        ArtifactError: Another version of Peraxis wrote the manifest.
        RegistryError: The disk failed, or the version record contradicts itself.
    """
    with VerifiedObject(registry, record) as stored:
        header = parse_verified_header(stored.read(0, record.data_start))
        manifest = Manifest.from_verified_metadata(header.metadata, record.label)
        entries = {name: header.tensors[file_tensor(name)] for name in manifest.files}
        files = {}
        # In the order of the file, so that no chunk is read twice.
        for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
            start, end = header.data_start + entry.start, header.data_start + entry.end
            taking = take(name, end - start)
            if taking is None:
                files[name] = stored.read(start, end)
                continue
            with taking as sink:
                for offset in range(start, end, CHUNK_BYTES):
                    sink.write(stored.read(offset, min(offset + CHUNK_BYTES, end)))
    return VariantFiles(files, {name: tuple(spec.shape) for name, spec in manifest.tensors.items()})
