"""An upload in progress: one partial file, hashed as it is written. Must not know variants or versions.

The name of a sealed upload's file holds its digest: it tells gc on every server that this object is about to be used.
The name begins with the id of the running kernel. On the same kernel, gc tells an upload by a lock on its file from one
that a crash left behind; a file of another kernel, or one without a lock, counts as abandoned a day after its last
change.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from deltastore.errors import ArtifactTooLarge, RegistryError, UsageError
from deltastore.registry.storage import Storage, file_size, listed_names, try_lock

CHUNK_BYTES = 4 << 20
PARTIAL = ".part"
NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}(?:\.(?P<digest>[0-9a-f]{64}))?" + re.escape(PARTIAL))
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# In the name of a file that could not be locked.
NO_KERNEL = "0" * 16
ABANDONED_AFTER_S = 86_400
WRITEBACK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class SealedUpload:
    """A complete upload whose bytes are durable. Its file exists until the end of the upload's `with` block."""

    path: Path
    digest: str  # 64 lowercase hex digits
    size_bytes: int
    chunk_sha256: tuple[str, ...]  # hex, of each 4 MiB of the file; the last may be shorter


class ChunkedDigest:
    """SHA-256 of a stream of bytes, as a whole and per 4 MiB chunk."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._whole = hashlib.sha256()
        self._chunk = hashlib.sha256()
        self._chunks: list[str] = []

    def update(self, data: memoryview) -> None:
        self._whole.update(data)
        while data:
            missing = CHUNK_BYTES - self.num_bytes % CHUNK_BYTES
            piece, data = data[:missing], data[missing:]
            self._chunk.update(piece)
            self.num_bytes += len(piece)
            if len(piece) == missing:
                self._chunks.append(self._chunk.hexdigest())
                self._chunk = hashlib.sha256()

    def digest(self) -> str:
        return self._whole.hexdigest()

    def chunk_digests(self) -> tuple[str, ...]:
        rest = (self._chunk.hexdigest(),) if self.num_bytes % CHUNK_BYTES else ()
        return (*self._chunks, *rest)


def hash_file(path: Path) -> ChunkedDigest:
    """Return the digests of a file's bytes, read with pread."""
    found = ChunkedDigest()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while block := os.pread(fd, CHUNK_BYTES, found.num_bytes):
            found.update(memoryview(block))
    finally:
        os.close(fd)
    return found


class Upload:
    """A context manager around one upload: write, seal, publish. Leaving it removes an unpublished file."""

    def __init__(
        self,
        directory: Path,
        storage: Storage,
        max_bytes: int | None,
        explained: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._directory = directory
        self._explained = explained
        self._storage = storage
        self._max_bytes = max_bytes
        self._hash = ChunkedDigest()
        self._sealed: SealedUpload | None = None
        self._broken = False
        # Bytes that the kernel was asked to write to the disk.
        self._written_back = 0

    def __enter__(self) -> Upload:
        with self._explained():
            self._fd, self._path = _create_locked(self._directory, self._storage)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # If it stays, gc removes it.
            with contextlib.suppress(OSError):
                self._storage.unlink(self._path)
        finally:
            os.close(self._fd)

    @property
    def num_bytes(self) -> int:
        """Bytes written so far."""
        return self._hash.num_bytes

    def write(self, part: bytes | bytearray | memoryview) -> None:
        """Append a part of the artifact, of any size.

        Raises:
            ArtifactTooLarge: The upload would exceed `max_bytes`; none of the part is written.
            StorageFull: The disk is full.
            UsageError: The upload is sealed.
            RegistryError: An earlier write or sync failed.
        """
        data = memoryview(part).cast("B")
        if self._max_bytes is not None and self.num_bytes + len(data) > self._max_bytes:
            raise ArtifactTooLarge(
                f"the upload is larger than the {self._max_bytes} bytes that this server takes: "
                "compress it with a smaller --budget, or raise the server's --max-upload-gb"
            )
        self._check_open()
        # Until the write has succeeded: writing on after a failed write would leave a hole.
        self._broken = True
        with self._explained():
            self._storage.write(self._fd, data)
            self._begin_writeback(self.num_bytes + len(data))
        self._broken = False
        self._hash.update(data)

    def seal(self) -> SealedUpload:
        """Make the bytes durable and compute the digest. Nothing can be written afterwards.

        Raises:
            StorageFull: The disk is full.
            UsageError: The upload is sealed already.
            RegistryError: The sync, or an earlier write, failed.
        """
        self._check_open()
        # A failed fsync is not retried: the second call would succeed although pages are lost.
        self._broken = True
        with self._explained():
            self._storage.fsync(self._fd)
            digest = self._hash.digest()
            path = self._path.with_name(f"{self._path.name.removesuffix(PARTIAL)}.{digest}{PARTIAL}")
            self._storage.rename(self._path, path)
            self._path = path
        self._broken = False
        self._sealed = SealedUpload(path, digest, self.num_bytes, self._hash.chunk_digests())
        return self._sealed

    def _begin_writeback(self, end: int) -> None:
        """Start writing to the disk while bytes arrive, so that the fsync at the end does not wait for gigabytes."""
        if end - self._written_back >= WRITEBACK_BYTES:
            self._storage.begin_writeback(self._fd, self._written_back, end - self._written_back)
            self._written_back = end

    def _check_open(self) -> None:
        if self._sealed is not None:
            raise UsageError("the upload is sealed already: open another one")
        if self._broken:
            raise RegistryError("the upload failed before: open another one and send the artifact again")


class Uploads:
    """The uploads into one directory, each a partial file.

    Args:
        directory: Holds the partial files.
        storage: Changes them.
        explained: Turns the errors of their disk into those of the registry.
    """

    def __init__(
        self, directory: Path, storage: Storage, explained: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.directory = directory
        self._storage = storage
        self._explained = explained

    def open(self, max_bytes: int | None) -> Upload:
        """Begin an upload. Use it as a context manager."""
        return Upload(self.directory, self._storage, max_bytes, self._explained)

    def partials(self) -> list[Path]:
        """Return the partial files, of sealed uploads or not, sorted by name."""
        names = sorted(listed_names(self.directory))
        return [self.directory / name for name in names if NAME.fullmatch(name)]

    def sealed_digests(self, except_for: Path | None = None) -> set[str]:
        """Return the digests of the sealed uploads that are not abandoned. gc keeps their objects."""
        paths = (path for path in self.partials() if path != except_for)
        digests = {path: digest for path in paths if (digest := _digest_of(path))}
        now_s = self._storage.touch(self.directory) if digests else 0.0
        kept = set()
        for path, digest in digests.items():
            with contextlib.suppress(FileNotFoundError), abandoned(path, now_s) as is_abandoned:
                if not is_abandoned:
                    kept.add(digest)
        return kept

    def remove_abandoned(self, *, dry_run: bool = False) -> tuple[int, int]:
        """Remove abandoned uploads, or with `dry_run` only count them. Return their number and bytes."""
        count = num_bytes = 0
        paths = self.partials()
        now_s = self._storage.touch(self.directory) if paths else 0.0
        for path in paths:
            with contextlib.suppress(FileNotFoundError), abandoned(path, now_s) as is_abandoned:
                if is_abandoned:
                    count, num_bytes = count + 1, num_bytes + (file_size(path) or 0)
                    if not dry_run:
                        self._storage.unlink(path)
        return count, num_bytes


def kernel_id() -> str:
    """Return the id of the running kernel, which containers on one machine share and no two machines do."""
    try:
        text = BOOT_ID.read_text()
    except OSError:
        text = socket.gethostname()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextlib.contextmanager
def abandoned(path: Path, now_s: float) -> Iterator[bool]:
    """Yield True if no upload writes this partial file; none can begin to while the block runs.

    Args:
        path: The partial file.
        now_s: The time by the clock of the file system, as `Storage.touch` returns it.
    """
    # Some network file systems lock only files that are open for writing.
    writable = os.access(path, os.W_OK)
    fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        is_locked = try_lock(fd) if path.name.startswith(f"{kernel_id()}-") else None
        is_old = os.fstat(fd).st_mtime < now_s - ABANDONED_AFTER_S
        yield is_old if is_locked is None else is_locked
    finally:
        os.close(fd)


def _digest_of(partial: Path) -> str | None:
    """Return the digest of a sealed upload; None of another one."""
    found = NAME.fullmatch(partial.name)
    return found["digest"] if found is not None else None


def _create_locked(directory: Path, storage: Storage) -> tuple[int, Path]:
    while True:
        token = secrets.token_hex(16)
        path = directory / f"{kernel_id()}-{token}{PARTIAL}"
        fd = storage.create(path)
        try:
            is_locked = try_lock(fd)
            if is_locked is None:
                unlocked = directory / f"{NO_KERNEL}-{token}{PARTIAL}"
                storage.rename(path, unlocked)
                return fd, unlocked
            if is_locked and os.fstat(fd).st_nlink:
                return fd, path
        except BaseException:
            os.close(fd)
            raise
        # gc took the file between its creation and its lock: begin again.
        os.close(fd)
