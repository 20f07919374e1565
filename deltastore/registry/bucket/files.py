"""The small files of a registry in a bucket: how they are read, listed and created. Must not know what they mean.

A file that was created is never changed, so its bytes are kept in memory by key and ETag: reading a variant that was
read before costs one listing.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePath, PurePosixPath
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError

from deltastore.errors import RegistryError, RegistryUnavailable, StorageFull
from deltastore.registry.bucket.client import Bucket
from deltastore.registry.claims import FORMAT_FILE
from deltastore.registry.store import FileVersion

if TYPE_CHECKING:
    from obstore import ObjectMeta

T = TypeVar("T")
Result = TypeVar("Result")

# A record of a delta of 1 GB has about 20 KB.
MAX_CACHED_BYTES = 256 << 20
# Keys that one call of S3 lists.
PAGE = 1000
NUM_READERS = 16
MAX_CREATIONS = 5
# The registry is looked for once in this time: `is_live` asks often.
PRESENT_FOR_S = 1.0


class FileCache:
    """The bytes of files that were read last, by key and ETag. For any thread."""

    def __init__(self, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._files: OrderedDict[str, tuple[str | None, bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes | None:
        with self._lock:
            if (found := self._files.get(key)) is None:
                return None
            self._files.move_to_end(key)
            return found[1]

    def put(self, key: str, e_tag: str | None, data: bytes) -> None:
        with self._lock:
            self._drop(key)
            self._files[key] = (e_tag, data)
            self._num_bytes += len(data)
            while self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._files)))

    def keep_listed(self, found: Iterable[ObjectMeta]) -> None:
        """Drop the files that a listing shows with another ETag: their names were used again."""
        with self._lock:
            for meta in found:
                known = self._files.get(meta["path"])
                if known is not None and known[0] != meta["e_tag"]:
                    self._drop(meta["path"])

    def drop(self, key: str) -> None:
        with self._lock:
            self._drop(key)

    def _drop(self, key: str) -> None:
        if (dropped := self._files.pop(key, None)) is not None:
            self._num_bytes -= len(dropped[1])


class BucketFiles:
    """The small files below one prefix.

    Args:
        bucket: The prefix.
        cache: Of files that were read.
        listed: Names by directory, of directories that have just been listed with all below them.
    """

    def __init__(
        self,
        bucket: Bucket,
        cache: FileCache | None = None,
        listed: Mapping[PurePosixPath, Mapping[PurePosixPath, frozenset[str]]] | None = None,
    ) -> None:
        self.root = bucket.root
        self.location = bucket.location
        self._bucket = bucket
        self._cache = cache or FileCache()
        self._listed = listed or {}
        self._found_at = float("-inf")

    def check_present(self, *, is_fresh: bool = False) -> None:
        begun = time.monotonic()
        if is_fresh or begun - self._found_at > PRESENT_FOR_S:
            try:
                self.status(self.root / FORMAT_FILE)
            except FileNotFoundError as error:
                raise self._bucket.gone() from error
            self._found_at = begun

    def read(self, path: PurePath, *, is_fresh: bool = False) -> bytes:
        key = self._key(path)
        if not is_fresh and (cached := self._cache.get(key)) is not None:
            return cached
        with self._bucket.calls():
            found = obstore.get(self._bucket.small, key)
            data = bytes(found.bytes())
        if not is_fresh:
            self._cache.put(key, found.meta["e_tag"], data)
        return data

    def is_directory(self, path: PurePath) -> bool:
        return bool(self.names(path))

    def names(self, directory: PurePath, *, is_fresh: bool = False) -> list[str]:
        if not is_fresh and (found := self._known(directory)) is not None:
            return sorted(found)
        files, folders = self._children(directory)
        return sorted({*files, *folders})

    def each_name(self, directory: PurePath) -> Iterator[str]:
        parent = PurePosixPath(directory)
        with self._bucket.calls(), self._expecting_bucket():
            for page in obstore.list(self._bucket.small, self._key(directory), chunk_size=PAGE):
                self._cache.keep_listed(page)
                paths = (self.root / meta["path"] for meta in page)
                yield from (path.name for path in paths if path.parent == parent)

    def subdirectories(self, directory: PurePath) -> list[str]:
        for tree in self._covering(directory):
            return sorted(path.name for path in tree if path.parent == PurePosixPath(directory))
        return sorted(self._children(directory)[1])

    def each(self, function: Callable[[T], Result], items: Sequence[T]) -> list[Result]:
        with ThreadPoolExecutor(NUM_READERS, "registry-read") as threads:
            return list(threads.map(function, items))

    def listed(self, *directories: PurePath) -> BucketFiles:
        """Return these files with every name below some directories listed, a thousand per call, and read."""
        roots = [PurePosixPath(directory) for directory in directories]
        if all(any(True for _ in self._covering(root)) for root in roots):
            return self
        found = {root: self.below(root) for root in roots}
        self.read_ahead(meta for metas in found.values() for meta in metas)
        trees = {
            root: _tree(root, (self.root / meta["path"] for meta in metas)) for root, metas in found.items()
        }
        return BucketFiles(self._bucket, self._cache, trees)

    def read_ahead(self, found: Iterable[ObjectMeta]) -> None:
        """Read the files of a listing that are not in memory, several at once."""
        if keys := [meta["path"] for meta in found if self._cache.get(meta["path"]) is None]:
            with ThreadPoolExecutor(NUM_READERS, "registry-read") as threads:
                list(threads.map(self._read_ahead, keys))

    def below(self, directory: PurePath) -> list[ObjectMeta]:
        """List every file below a directory, at any depth."""
        key = self._key(directory)
        with self._bucket.calls(), self._expecting_bucket():
            pages = obstore.list(self._bucket.small, key, chunk_size=PAGE)
            found = [meta for page in pages for meta in page]
        self._cache.keep_listed(found)
        return found

    def make_directory(self, directory: PurePath) -> None:
        """Do nothing: a bucket has no directories."""

    def make_durable(self, *directories: PurePath) -> None:
        """Do nothing: a name is durable when the store has answered."""

    def add(self, path: PurePath, data: bytes) -> bool:
        key = self._key(path)
        for _ in range(MAX_CREATIONS):
            try:
                with self._bucket.calls():
                    put = obstore.put(self._bucket.small, key, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                with contextlib.suppress(FileNotFoundError):
                    self._cache.drop(key)
                    # A client that misses the reply repeats the call, and finds its own file.
                    return self.read(path) == data
                # Two creations at once may both be refused (S3's 409), or the file was removed since.
                continue
            self._cache.put(key, put["e_tag"], data)
            return True
        raise RegistryError(f"{path}: the store refuses to create it, and it is not there: try again")

    def add_or_make_room(
        self, path: PurePath, data: bytes, dispensable: Callable[[], Iterable[PurePath]]
    ) -> bool:
        try:
            return self.add(path, data)
        except StorageFull:
            self.remove(dispensable())
        return self.add(path, data)

    def replace(self, path: PurePath, data: bytes) -> None:
        key = self._key(path)
        with self._bucket.calls():
            put = obstore.put(self._bucket.small, key, data, use_multipart=False)
        self._cache.put(key, put["e_tag"], data)

    def remove(self, paths: Iterable[PurePath]) -> None:
        with contextlib.suppress(RegistryError, RegistryUnavailable, StorageFull):
            self.remove_surely(paths)

    def remove_surely(self, paths: Iterable[PurePath]) -> None:
        """Remove files, those that exist, and report a failure: some may be removed then."""
        keys = [self._key(path) for path in paths]
        try:
            for first in range(0, len(keys), PAGE):
                with contextlib.suppress(FileNotFoundError), self._bucket.calls():
                    obstore.delete(self._bucket.small, keys[first : first + PAGE])
        finally:
            for key in keys:
                self._cache.drop(key)

    def append(self, path: PurePath, lines: bytes) -> None:
        # In the order of their times; the token keeps two processes apart.
        name = f"{time.time_ns()}-{secrets.token_hex(4)}{path.suffix}"
        self.add(path.with_suffix("") / name, lines)

    def delete(self, path: PurePath) -> bool:
        try:
            self.status(path)
        except FileNotFoundError:
            return False
        key = self._key(path)
        try:
            with contextlib.suppress(FileNotFoundError), self._bucket.calls():
                obstore.delete(self._bucket.small, key)
        finally:
            self._cache.drop(key)
        return True

    def versions(self, directory: PurePath) -> dict[str, FileVersion]:
        # An ETag tells the contents, so no change goes unseen.
        paths = ((self.root / meta["path"], meta) for meta in self.below(PurePosixPath(directory)))
        return {
            path.name: FileVersion((meta["e_tag"], meta["size"]), meta["size"], 0)
            for path, meta in paths
            if path.parent == directory
        }

    def status(self, path: PurePath) -> ObjectMeta:
        """Return the size, ETag and time of a file. Raises FileNotFoundError."""
        with self._bucket.calls():
            return obstore.head(self._bucket.small, self._key(path))

    def _read_ahead(self, key: str) -> None:
        # A caller that needs the file reads it again, and reports the failure.
        with contextlib.suppress(RegistryError, RegistryUnavailable, FileNotFoundError):
            self.read(self.root / key)

    def _children(self, directory: PurePath) -> tuple[list[str], list[str]]:
        """List the files and the subdirectories of a directory."""
        with self._bucket.calls(), self._expecting_bucket():
            found = obstore.list_with_delimiter(self._bucket.small, self._key(directory))
        self._cache.keep_listed(found["objects"])
        files = [PurePosixPath(meta["path"]).name for meta in found["objects"]]
        return files, [PurePosixPath(prefix).name for prefix in found["common_prefixes"]]

    @contextlib.contextmanager
    def _expecting_bucket(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            # A prefix without files is an empty list.
            raise self._bucket.gone() from error

    def _covering(self, directory: PurePath) -> Iterator[Mapping[PurePosixPath, frozenset[str]]]:
        """Yield the listing that has a directory."""
        for root, tree in self._listed.items():
            if PurePosixPath(directory).is_relative_to(root):
                yield tree

    def _known(self, directory: PurePath) -> frozenset[str] | None:
        for tree in self._covering(directory):
            return tree.get(PurePosixPath(directory), frozenset())
        return None

    def _key(self, path: PurePath) -> str:
        return self._bucket.key(PurePosixPath(path))


def _tree(root: PurePosixPath, paths: Iterable[PurePosixPath]) -> Mapping[PurePosixPath, frozenset[str]]:
    """Return the names in every directory of a tree by directory."""
    names: defaultdict[PurePosixPath, set[str]] = defaultdict(set)
    for path in paths:
        while path != root and path.name not in names[path.parent]:
            names[path.parent].add(path.name)
            path = path.parent
    return {directory: frozenset(found) for directory, found in names.items()}
