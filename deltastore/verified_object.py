"""Reads a version's stored object chunk by chunk and hands out only bytes that match the digests of its record.

A chunk is read once, hashed in memory, and its bytes are taken from that same memory. A mismatch quarantines the
object. Imports no torch; `loader.py` reads the device section. Must not know what the bytes mean.
"""

from __future__ import annotations

import hashlib
import logging
import os
from types import TracebackType
from typing import NoReturn, Self

from deltastore.errors import (
    CorruptObject,
    RegistryError,
    RegistryUnavailable,
    StorageFull,
    VariantNotFound,
    VariantQuarantined,
)
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from deltastore.registry.storage import is_replaced
from deltastore.registry.uploads import CHUNK_BYTES

log = logging.getLogger(__name__)

# Readings of one chunk that end because the open file was replaced.
MAX_STALE = 5


class VerifiedObject:
    """An object open for reading. Use as a context manager, from one thread at a time.

    Opening and reading raise:
        VariantQuarantined: The object is quarantined, or was found corrupt and is quarantined now.
        VariantNotFound: The object is no longer in the registry.
        RegistryError: The disk failed, or the version record contradicts itself.
    """

    def __init__(self, registry: Registry, record: VersionRecord) -> None:
        self._registry = registry
        self._record = record
        # The last chunk that was read, so that reads in ascending order read no chunk twice.
        self._last = -1, memoryview(b"")

    def __enter__(self) -> Self:
        if len(self._record.chunk_sha256) != -(-self._record.size_bytes // CHUNK_BYTES):
            raise RegistryError(
                f"the version record of {self._record.label} contradicts itself: upload the artifact again"
            )
        self._fd = self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

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
        num_stale = 0
        while self._last[0] != index:
            try:
                self._last = (index, self._read_chunk(index))
            except CorruptObject as error:
                if self._quarantine(error):
                    self._raise_quarantined(error)
                # An upload has replaced the object, by a file of the same bytes.
                self._open_again()
            except RegistryError as error:
                num_stale += 1
                if not is_replaced(error) or num_stale == MAX_STALE:
                    raise
                self._open_again()
        return self._last[1]

    def _open_again(self) -> None:
        fd = self._open()
        os.close(self._fd)
        self._fd = fd

    def _read_chunk(self, index: int) -> memoryview:
        start, digest = index * CHUNK_BYTES, self._record.digest
        chunk = memoryview(bytearray(min(CHUNK_BYTES, self._record.size_bytes - start)))
        done = 0
        try:
            status = os.fstat(self._fd)
            if status.st_size != self._record.size_bytes:
                raise CorruptObject(
                    f"object {digest} has {status.st_size} bytes where its record says {self._record.size_bytes}",
                    status,
                )
            while count := os.preadv(self._fd, [chunk[done:]], start + done):
                done += count
        except OSError as error:
            raise self._unreadable(error) from error
        # A file that became shorter meanwhile fails here, too: the rest of the chunk is zeros.
        if hashlib.sha256(chunk).hexdigest() != self._record.chunk_sha256[index]:
            raise CorruptObject(
                f"object {digest} is corrupt: chunk {index} does not match its SHA-256", status
            )
        return chunk

    def _open(self) -> int:
        while True:
            self._registry.check_not_quarantined(self._record)
            try:
                return os.open(self._registry.object_path(self._record), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError as error:
                # A quarantine moves the object, and may have begun after the check above.
                self._registry.check_not_quarantined(self._record)
                if not self._registry.recover(self._record):
                    raise VariantNotFound(
                        f"{self._record.label}: its object is no longer in the registry: upload it again"
                    ) from error
            except OSError as error:
                raise self._unreadable(error) from error

    def _quarantine(self, found: CorruptObject) -> bool:
        """Quarantine the open file; return False if another one has taken its place."""
        try:
            return self._registry.quarantine(self._record, str(found), found.found_in)
        except (StorageFull, RegistryError, RegistryUnavailable) as error:
            # It is not served either way; the next read finds the mismatch again.
            log.error("%s cannot be quarantined: %s", self._record.label, error)
            return True

    def _raise_quarantined(self, found: CorruptObject) -> NoReturn:
        log.error("%s: %s", self._record.label, found)
        raise VariantQuarantined(
            f"{self._record.label}: its stored object is corrupt and was quarantined: upload it again"
        ) from found

    def _unreadable(self, error: OSError) -> RegistryError:
        return RegistryError(
            f"object {self._record.digest} cannot be read: {error.strerror or error}: "
            "check the registry's disk and rights"
        )
